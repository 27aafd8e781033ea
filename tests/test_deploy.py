"""The service where it is deployed: what platforms set, and what operators find in the log."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
from pathlib import Path

import pytest

from storage import is_thrown_away
from tests.conftest import ROOT
from tests.support.readme import block
from tests.support.server import (
    GUNICORN,
    HEADERS,
    PATIENCE,
    change,
    copy_service,
    free_port,
    receive,
    wait_until,
)

MONSTERA = {"id": 7, "name": "Monstera", "tag": "indoor"}


# Where it does not matter which engine.
on_sqlite = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A copy of what README.md's Dockerfile copies."""
    folder = tmp_path / "code"
    folder.mkdir()
    copied = re.findall(r"(?m)^COPY (.*) \S+$", block("dockerfile", "FROM"))
    for name in " ".join(copied).split():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


# the log


def test_one_line_says_what_was_started_and_where(serve, url, database):
    """Versions, storage, workers, threads, address; no password."""
    if url.startswith("postgresql:"):
        url = url.replace("user=postgres", "user=postgres&password=canary")
        storage = r"PostgreSQL \d+\.\d+.*, database postgres at /\S+"
    else:
        storage = rf"SQLite {re.escape(sqlite3.sqlite_version)} in {database}"
    server = serve(DATABASE_URL=url, WEB_CONCURRENCY="3")
    port = server.port
    (line,) = wait_until(lambda: re.findall(r"\[INFO\] (plants: .*)\n", server.err))
    assert re.fullmatch(
        rf"plants: Python 3\.\d+\.\d+\S*, gunicorn \d+\.\d+\.\d+, {storage}; "
        rf"3 workers of up to 1000 connections at http://127\.0\.0\.1:{port}",
        line,
    )
    assert "canary" not in server.err


@on_sqlite
def test_that_line_says_if_a_server_was_not_reached(serve, tmp_path):
    """Nor what the URL says of it, which can be a password in a wrong place."""
    server = serve(DATABASE_URL=f"postgresql://canary:canary@/canary?host={tmp_path}")
    server.workers()
    assert "PostgreSQL, not reached yet; 2 workers" in server.err
    assert "canary" not in server.err


@pytest.mark.parametrize(
    "variable", ["DYNO", "RENDER", "RAILWAY_ENVIRONMENT_NAME", "FLY_APP_NAME", "K_SERVICE"]
)
@on_sqlite
def test_a_start_warns_of_a_disk_that_a_platform_throws_away(serve, variable, database):
    """It names the file and both ways out."""
    server = serve(**{variable: "1"})
    server.workers()
    (line,) = re.findall(r"\[WARNING\] (.*)\n", server.err)
    assert line.startswith(f"{database} is on a disk that is thrown away")
    assert "volume" in line and "PostgreSQL" in line


def test_a_start_elsewhere_warns_of_nothing(serve, url):
    """Not on a laptop, and not with PostgreSQL."""
    environment = {"DYNO": "web.1"} if url.startswith("postgresql:") else {}
    server = serve(**environment)
    server.workers()
    assert "WARNING" not in server.err


def test_a_volume_is_not_thrown_away(monkeypatch, tmp_path):
    """It is on another device than the code, as /dev is on every system."""
    monkeypatch.setenv("FLY_APP_NAME", "plants")
    assert is_thrown_away(str(ROOT))
    assert not is_thrown_away("/dev")


@on_sqlite
def test_the_access_log_has_no_probes_unless_they_fail(serve, database):
    """Platforms send one every few seconds."""
    server = serve()
    for method in ("GET", "HEAD"):
        assert server.request(method, "/healthz")[0] == 200
    assert server.request("POST", "/healthz")[0] == 405
    os.rename(database, f"{database}.away")
    assert server.request("GET", "/healthz")[0] == 503
    wait_until(lambda: server.out.count("\n") >= 2)
    logged = re.findall(r'"(\w+ /healthz)" (\d+)', server.out)
    assert sorted(logged) == [("GET /healthz", "503"), ("POST /healthz", "405")]


@on_sqlite
def test_a_request_id_leads_from_a_503_to_its_reason(serve, database):
    """The id in the answer is in the line of the error log and in that of the access log."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    os.rename(database, f"{database}.away")
    status, headers, _ = server.request("GET", "/healthz")
    assert status == 503
    reason = rf"\[ERROR\] request {headers['x-request-id']} got a 503: {database} was deleted"
    assert re.search(reason, server.err)
    wait_until(lambda: f"{headers['x-request-id']}\n" in server.out)


@on_sqlite
def test_a_request_id_leads_from_a_500_to_its_traceback(serve, tmp_path):
    """Which is in the lines before the one with the id."""
    options = copy_service(tmp_path / "copy")
    change(tmp_path / "copy" / "app.py", '{"status": "ok"}', '{"status": ok}')
    server = serve(*options)
    server.may_fail = True
    status, headers, _ = server.request("GET", "/healthz")
    assert status == 500
    assert re.search(
        rf"NameError: name 'ok' .*\n+.*\[ERROR\] request {headers['x-request-id']} got a 500",
        server.err,
    )
    wait_until(lambda: f"{headers['x-request-id']}\n" in server.out)


# what platforms set


def test_it_runs_in_the_environment_of_a_platform(serve, url, code, stored):
    """Heroku's gunicorn options, no home, and a code folder that can't be written to."""
    for folder in (code, code / "schemas", code / "static"):
        folder.chmod(0o555)
    port = free_port()
    # Rights bind root too without the capability to overrule them.
    bound = ["setpriv", "--bounding-set=-dac_override"] if os.getuid() == 0 else []
    server = serve(
        command=["sh", "-c", 'cd "$0" && exec "$@"', str(code), *bound, GUNICORN],
        PORT=str(port),
        WEB_CONCURRENCY="3",
        GUNICORN_CMD_ARGS="--access-logfile -",
        FORWARDED_ALLOW_IPS="*",
        PYTHONUNBUFFERED="true",
        HOME="/nonexistent",
        DYNO="web.1",
    )
    server.workers(3)
    assert server.port == port
    assert server.post(MONSTERA)[0] == 200
    wait_until(lambda: server.out)
    assert server.out.count("POST /plants") == 1
    assert stored() == [(7, "Monstera", "indoor")]
    assert not (code / "__pycache__").exists()


@on_sqlite
def test_it_takes_the_url_that_a_platform_gives(serve, postgresql):
    """With the short scheme, and parameters for libpq."""
    url = postgresql.new_schema().replace("postgresql://", "postgres://")
    server = serve(DATABASE_URL=f"{url}&sslmode=prefer&application_name=web.1")
    assert server.post(MONSTERA) == (200, {"name": "Monstera", "tag": "indoor"})
    names = postgresql.execute("SELECT application_name FROM pg_stat_activity")
    assert ("web.1",) in names


@on_sqlite
def test_systemd_is_told_when_the_service_is_ready(serve, tmp_path):
    """As Type=notify wants it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"{tmp_path}/notify")
        systemd.settimeout(PATIENCE)
        serve(NOTIFY_SOCKET=f"{tmp_path}/notify")
        assert systemd.recv(2**16).startswith(b"READY=1")


@on_sqlite
def test_a_request_in_flight_finishes_where_every_process_gets_sigterm(serve):
    """As on Heroku; elsewhere it goes to the master alone."""
    server = serve()
    body = json.dumps(MONSTERA).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    head += f"Host: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(f"POST /plants HTTP/1.1\r\n{head}".encode())
        assert connection.recv(2**16).startswith(b"HTTP/1.1 100")
        os.killpg(server.process.pid, signal.SIGTERM)
        wait_until(lambda: "Handling signal: term" in server.err)
        connection.sendall(body)
        assert receive(connection).startswith(b"HTTP/1.1 200")
    assert server.wait() == 0
