"""The service where it is deployed: what platforms set, the programs around it, and its log.

The files of deploy/ are given to the programs that read them; test_host.py and test_container.py
have them all at work together.
"""

import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.server import (
    GUNICORN,
    PATIENCE,
    ROOT,
    Server,
    free_port,
    wait_until,
)

MONSTERA = {"id": 7, "name": "Monstera", "tag": "indoor"}
Rows = list[tuple[int, str, str | None]]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A copy of what the Dockerfile copies."""
    folder = tmp_path / "code"
    folder.mkdir()
    copied = re.findall(r"(?m)^COPY (.*) \S+$", (ROOT / "deploy/Dockerfile").read_text())
    for source in (found for name in copied for found in ROOT.glob(name)):
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / source.name)
    return folder


# What operators find in the log.


@pytest.mark.parametrize("engine", ["SQLite", "PostgreSQL"])
def test_one_line_says_what_was_started_and_where(
    serve: Callable[..., Server], url: str, database: Path, postgresql_url: str, engine: str
) -> None:
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


def test_that_line_says_if_a_server_was_not_reached(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    """It has nothing from the URL, of which each part can be a password in a wrong place."""
    server = serve(DATABASE_URL=f"postgresql://canary:canary@/canary?host={tmp_path}")
    server.workers()
    assert "PostgreSQL, not reached yet; 2 workers" in server.err
    assert "canary" not in server.err


def test_the_access_log_has_no_health_checks_unless_they_fail(
    serve: Callable[..., Server], database: Path
) -> None:
    """Platforms send one every few seconds."""
    server = serve()
    for method in ("GET", "HEAD"):
        assert server.request(method, "/healthz")[0] == 200
    assert server.request("POST", "/healthz")[0] == 405
    os.rename(database, f"{database}.away")
    wait_until(lambda: server.request("GET", "/healthz")[0] == 503)  # the last write is old
    wait_until(lambda: server.out.count("\n") >= 2)
    logged = re.findall(r'"(\w+ /healthz)" (\d+)', server.out)
    assert sorted(logged) == [("GET /healthz", "503"), ("POST /healthz", "405")]


# What platforms set and do.


@pytest.mark.parametrize("engine", ["SQLite", "PostgreSQL"])
def test_it_runs_in_the_environment_of_a_platform(
    serve: Callable[..., Server], url: str, postgresql_url: str, code: Path, engine: str
) -> None:
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


# systemd


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """It has not a word to say about an option or a value."""
    for unit in [*ROOT.glob("deploy/*.service"), *ROOT.glob("deploy/*.timer")]:
        text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text())  # it exists
        (tmp_path / unit.name).write_text(text)
    verify = ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())]
    done = subprocess.run(verify, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_curl_line_for_a_socket_stores_a_plant(
    serve: Callable[..., Server], tmp_path: Path, stored: Callable[[], Rows]
) -> None:
    """A proxy on the same machine may be served through a Unix socket."""
    server = serve(command=[GUNICORN, "--bind", f"unix:{tmp_path}/s"], PLANTS_TOKENS=None)
    curl = wait_until(lambda: re.search(r"\ncurl (?:.*\n){3}", server.err))[0]
    answer = subprocess.run(["sh", "-c", curl], stdout=subprocess.PIPE, timeout=PATIENCE)
    assert answer.stdout == b'{"name": "Monstera", "tag": "indoor"}\n'
    assert stored() == [(7, "Monstera", "indoor")]
