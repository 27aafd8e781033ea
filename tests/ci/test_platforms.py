"""The service where it is deployed: what platforms set, the programs around it, and its log.

The files of deploy/ are given to the programs that read them; test_host.py and test_container.py
have them all at work together.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.postgresql import PostgreSQL
from tests.support.server import (
    GUNICORN,
    HEADERS,
    PATIENCE,
    ROOT,
    Server,
    free_port,
    receive,
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


def test_a_request_id_leads_from_a_503_to_its_reason(
    serve: Callable[..., Server], database: Path
) -> None:
    """The id in the answer is in the line of the error log and in that of the access log."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    os.rename(database, f"{database}.away")
    status, headers, _ = server.request("POST", "/plants", json.dumps(MONSTERA), HEADERS)
    assert status == 503
    reason = rf"\[ERROR\] request {headers['x-request-id']} got a 503: {database} was deleted"
    assert re.search(reason, server.err)
    wait_until(lambda: f"{headers['x-request-id']}\n" in server.out)


def test_a_request_id_leads_from_a_500_to_its_traceback(
    serve: Callable[..., Server], database: Path
) -> None:
    """The traceback is in the lines before the one with the id."""
    server = serve()
    server.may_fail = True
    assert server.port
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute(
            "CREATE TRIGGER fails BEFORE INSERT ON plants BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
    body = json.dumps(MONSTERA)
    status, headers, _ = server.request("POST", "/plants", body, HEADERS)
    assert status == 500
    assert re.search(
        rf"IntegrityError: no\n+.*\[ERROR\] request {headers['x-request-id']} got a 500",
        server.err,
    )
    wait_until(lambda: f"{headers['x-request-id']}\n" in server.out)


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


def test_it_takes_the_url_that_a_platform_gives(
    serve: Callable[..., Server], postgresql: PostgreSQL
) -> None:
    """A URL may have the short scheme, and parameters for libpq."""
    url = postgresql.new_schema().replace("postgresql://", "postgres://")
    server = serve(DATABASE_URL=f"{url}&sslmode=prefer&application_name=web.1")
    assert server.post(MONSTERA) == (200, {"name": "Monstera", "tag": "indoor"})
    names = postgresql.execute("SELECT application_name FROM pg_stat_activity")
    assert ("web.1",) in names


def test_a_request_in_flight_finishes_where_every_process_gets_sigterm(
    serve: Callable[..., Server],
) -> None:
    """Heroku sends it to all processes, others to the master alone."""
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


def test_a_procfile_runner_starts_and_ends_the_service(
    serve: Callable[..., Server], stored: Callable[[], Rows]
) -> None:
    """It finds gunicorn by its name, sets PORT, and passes SIGTERM on."""
    port = free_port()
    folder = Path(sys.executable).parent
    server = serve(command=[str(folder / "honcho"), "start", "-p", str(port)], PATH=f"{folder}")
    # honcho writes what both streams have to its standard output.
    wait_until(lambda: server.out.count("Booting worker") == 2)
    server.port = port
    assert server.post(MONSTERA)[0] == 200
    wait_until(lambda: '"POST /plants" 200' in server.out)  # honcho fails if told while it writes
    server.signal(signal.SIGTERM)
    server.wait()
    assert "Shutting down: Master" in server.out
    assert stored() == [(7, "Monstera", "indoor")]


# systemd


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """It has not a word to say about an option or a value."""
    for unit in [*ROOT.glob("deploy/*.service"), *ROOT.glob("deploy/*.timer")]:
        text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text())  # it exists
        (tmp_path / unit.name).write_text(text)
    verify = ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())]
    done = subprocess.run(verify, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_systemd_is_told_when_the_service_is_ready(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    """Type=notify waits for that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"{tmp_path}/notify")
        systemd.settimeout(PATIENCE)
        serve(NOTIFY_SOCKET=f"{tmp_path}/notify")
        assert systemd.recv(2**16).startswith(b"READY=1")


# A proxy in front of it.


def test_the_curl_line_for_a_socket_stores_a_plant(
    serve: Callable[..., Server], tmp_path: Path, stored: Callable[[], Rows]
) -> None:
    """A proxy on the same machine may be served through a Unix socket."""
    server = serve(command=[GUNICORN, "--bind", f"unix:{tmp_path}/s"], PLANTS_TOKENS=None)
    curl = wait_until(lambda: re.search(r"\ncurl (?:.*\n){3}", server.err))[0]
    answer = subprocess.run(["sh", "-c", curl], stdout=subprocess.PIPE, timeout=PATIENCE)
    assert answer.stdout == b'{"name": "Monstera", "tag": "indoor"}\n'
    assert stored() == [(7, "Monstera", "indoor")]


@pytest.fixture
def caddy(serve: Callable[..., Server], tmp_path: Path) -> Iterator[tuple[Server, int]]:
    """The service, and the port of a Caddy in front of it."""
    server, port = serve(), free_port()
    text = (ROOT / "deploy/Caddyfile").read_text()
    for name, here in ("plants.example.org", f"http://127.0.0.1:{port}"), ("8000", server.port):
        assert text.count(name) == 1
        text = text.replace(name, str(here))
    (tmp_path / "Caddyfile").write_text("{\n\tadmin off\n}\n" + text)
    command = ["caddy", "run", "--config", str(tmp_path / "Caddyfile")]
    with (tmp_path / "caddy.log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env={"HOME": str(tmp_path)})
    try:
        wait_until(lambda: is_open(port))
        yield server, port
    finally:
        process.kill()
        process.wait()


def is_open(port: int) -> bool:
    """Whether somebody listens."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_caddy_passes_on_requests_and_logs_their_ids(
    caddy: tuple[Server, int], tmp_path: Path
) -> None:
    """The id leads from the service's log to the client's address in Caddy's."""
    server, port = caddy
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/plants", json.dumps(MONSTERA), HEADERS)
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read()) == {"name": "Monstera", "tag": "indoor"}
        request_id = answer.getheader("X-Request-ID") or "none"
    wait_until(lambda: request_id in server.out)

    def logged() -> list[str]:
        lines = (tmp_path / "caddy.log").read_text().splitlines()
        return [line for line in lines if request_id in line]

    (line,) = wait_until(logged)
    assert json.loads(line)["request"]["remote_ip"] == "127.0.0.1"
