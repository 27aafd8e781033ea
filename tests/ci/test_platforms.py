"""The service where it is deployed: what platforms set, the programs around it, and its log.

The files of deploy/ are given to the programs that read them; test_host.py and test_container.py
have them all at work together.
"""

import os
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.support.server import GUNICORN, PATIENCE, ROOT, free_port, wait_until
from tests.support.wire import MONSTERA


@pytest.fixture
def code(tmp_path) -> Path:
    """A copy of what the Dockerfile copies."""
    folder = tmp_path / "code"
    folder.mkdir()
    copied = re.findall(r"(?m)^COPY (.*) \S+$", (ROOT / "deploy/Dockerfile").read_text())
    for source in (found for name in copied for found in ROOT.glob(name)):
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / source.name)
    return folder


@pytest.mark.parametrize("engine", ["SQLite", "PostgreSQL"])
def test_one_line_says_what_was_started_and_where(serve, url, database, postgresql_url, engine):
    """It has versions, storage, workers and address, and no password."""
    storage = rf"SQLite {re.escape(sqlite3.sqlite_version)} in {database}"
    if engine == "PostgreSQL":
        url = postgresql_url.replace("user=postgres", "user=postgres&password=canary")
        storage = r"PostgreSQL \d+\.\d+.*, database postgres at /\S+"
    server = serve(DATABASE_URL=url, WEB_CONCURRENCY="3")
    (line,) = wait_until(lambda: re.findall(r"\[INFO\] (plants: .*)\n", server.err))
    assert re.fullmatch(
        rf"plants: Python 3\.\d+\.\d+\S*, gunicorn \d+\.\d+\.\d+, {storage}; "
        rf"3 workers of up to 1000 connections at http://127\.0\.0\.1:{server.port}",
        line,
    )
    server.workers(3)
    assert "canary" not in server.err and "WARNING" not in server.err


def test_that_line_says_if_a_server_was_not_reached(serve, tmp_path):
    """It has nothing from the URL, of which each part can be a password in a wrong place."""
    server = serve(DATABASE_URL=f"postgresql://canary:canary@/canary?host={tmp_path}")
    server.workers()
    assert "PostgreSQL, not reached yet; 2 workers" in server.err
    assert "canary" not in server.err


@pytest.mark.parametrize("engine", ["SQLite", "PostgreSQL"])
def test_it_runs_in_the_environment_of_a_platform(serve, url, postgresql_url, code, engine):
    """It takes Heroku's gunicorn options, no home, and a code folder that can't be written to."""
    for folder in (code, code / "schemas", code / "static"):
        folder.chmod(0o555)
    port = free_port()
    # Rights bind root too without the capability to overrule them.
    bound = ["setpriv", "--bounding-set=-dac_override"] if os.getuid() == 0 else []
    server = serve(
        command=["sh", "-c", 'cd "$0" && exec "$@"', str(code), *bound, GUNICORN],
        DATABASE_URL=postgresql_url if engine == "PostgreSQL" else url,
        PORT=str(port),
        WEB_CONCURRENCY="3",
        GUNICORN_CMD_ARGS="--access-logfile -",
        FORWARDED_ALLOW_IPS="*",
        PYTHONUNBUFFERED="true",
        HOME="/nonexistent",
    )
    server.workers(3)
    assert server.port == port
    assert server.post(MONSTERA)[0] == 200
    assert server.post({**MONSTERA, "name": "another"})[0] == 409
    wait_until(lambda: server.out.count("POST /plants") == 2)
    assert not (code / "__pycache__").exists()
    assert "WARNING" not in server.err


def test_plants_in_the_folder_of_the_code_are_worth_a_warning(serve, code):
    """One: who deploys by git push loses them with the next one."""
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(code), GUNICORN]
    server = serve(command=command, DATABASE_URL=None, PORT=str(free_port()))
    server.workers()
    (line,) = re.findall(r"\[WARNING\] (.*)", server.err)
    assert line.startswith("DATABASE_URL is not set: a deploy may delete SQLite ")
    assert line.endswith(f" in {code}/plants.db")


def test_systemd_takes_the_units(tmp_path):
    """It has not a word to say about an option or a value."""
    kinds = ("service", "socket", "timer")
    units = [unit for kind in kinds for unit in ROOT.glob(f"deploy/*.{kind}")]
    for unit in units:
        text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text())  # it exists
        (tmp_path / unit.name).write_text(text)
    verify = ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())]
    done = subprocess.run(verify, capture_output=True, text=True)
    said = f"{done.stdout}{done.stderr}".splitlines()  # about units of other programs, too
    assert [line for line in said if any(unit.name in line for unit in units)] == []


ADDRESSES = ["[::]:{0}", ":{0}", "127.0.0.1:{0} --reuse-port", "[::]:{0} --reuse-port"]


@pytest.mark.parametrize("address", ["'unix:{1}/a socket'", *ADDRESSES])
def test_the_curl_line_stores_a_plant(serve, tmp_path, stored, address):
    """Whatever the service listens on: a proxy of the same machine may want a Unix socket."""
    options = address.format(free_port(), tmp_path)
    server = serve(command=["sh", "-c", f"exec '{GUNICORN}' --bind {options}"], PLANTS_TOKENS=None)
    curl = wait_until(lambda: re.search(r"\ncurl (?:.*\n){3}", server.err))[0]
    curl = curl.replace("curl", "curl --retry 9 --retry-connrefused", 1)
    answer = subprocess.run(["sh", "-c", curl], stdout=subprocess.PIPE, timeout=PATIENCE)
    assert answer.stdout == b'{"name": "Monstera", "tag": "indoor"}\n'
    assert stored() == [(7, "Monstera", "indoor")]
