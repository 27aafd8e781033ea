"""The start and the stop of the service, as whoever runs it meets them; and other WSGI servers."""

import contextlib
import json
import os
import re
import select
import shlex
import signal
import sqlite3
import sys
from pathlib import Path

import pytest

from engines.sqlite import APPLICATION_ID
from start import get_storage
from tests.support.server import (
    LOG_LINE,
    PATIENCE,
    PATIENT,
    ROOT,
    STORED,
    free_port,
    stops_in_one_line,
    wait_until,
)
from tests.support.storage import locked
from tests.support.wire import HEAD, MONSTERA

START = [sys.executable, "start.py"]

# the start


def test_the_procfile_and_the_printed_curl_line_store_a_plant_for_good(serve, database, stored):
    """From nothing to a plant that survives kill -9, with what a newcomer has before them."""
    procfile = (ROOT / "Procfile").read_text()
    assert procfile == "web: gunicorn\n"
    port = free_port()
    server = serve(
        command=["sh", "-c", f"exec {procfile.removeprefix('web: ')}"],
        PLANTS_TOKENS=None,
        PORT=str(port),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    curl = wait_until(lambda: re.search(r"\ncurl .*\n.*\n.*}'\n", server.err))[0]
    _, url, *options = shlex.split(curl.replace("\\\n", ""))
    assert url == f"http://127.0.0.1:{port}/plants"  # though it listens at all addresses
    assert options[::2] == ["-H", "-H", "-d"]
    headers = dict(option.split(": ") for option in options[1:4:2])
    for _ in range(10):  # in each worker
        status, answer = server.request("POST", "/plants", options[5], headers)
        assert (status, answer) == (STORED, {"name": "Monstera", "tag": "indoor"})
    assert len(headers["Authorization"]) > 40 and server.err.count("Bearer ") == 1
    assert f"A page to try it is at http://127.0.0.1:{port}/\n" in server.err
    assert b"<form" in server.send(b"GET / HTTP/1.0\r\n\r\n")
    assert f"Listening at: http://0.0.0.0:{port} " in server.err
    found = f"plants are stored in SQLite {sqlite3.sqlite_version} in {database}"
    assert f"\n{found}, which is new\n" in server.err
    assert [json.loads(line)["status"] for line in server.out.splitlines()] == [STORED] * 11
    server.kill()
    assert stored() == [(7, "Monstera", "indoor")]
    again = serve(command=START, DATABASE_URL=server.url)  # the check alone
    assert (again.wait(), again.err) == (0, f"{found}\n")


def test_a_wrong_setting_ends_the_start_in_one_line(serve, tmp_path):
    """The line says what to do; the exit status is 1, and no worker was started."""
    missing, folder, foreign, busy = (tmp_path / name / "plants.db" for name in "abcd")
    folder.mkdir(parents=True)
    for path, number in ((foreign, 1), (busy, APPLICATION_ID)):
        path.parent.mkdir()
        with contextlib.closing(sqlite3.connect(path)) as file:
            file.executescript(f"PRAGMA application_id = {number}; CREATE TABLE plants (id)")
    with locked(busy):
        servers = {
            "PLANTS_TOKENS must be .*at least 16 .*token_urlsafe": serve(PLANTS_TOKENS="too-short"),
            "DATABASE_URL must be set where PORT is": serve(DATABASE_URL=None, PORT="0"),
            "WEB_CONCURRENCY must not be 0": serve(WEB_CONCURRENCY="0"),
        }
        for path, words in {
            missing: "No such file or directory",
            folder: "unable to open database file",
            foreign: "is another program's; correct DATABASE_URL",
            busy: "database is locked",
        }.items():
            where = f"plants can't be stored in SQLite .* in {path}: .*{words}"
            servers[where] = serve(command=START, DATABASE_URL=f"sqlite:///{path}")
        for words, server in servers.items():
            stops_in_one_line(server, words)
            assert server.wait() == 1


WRONG_URLS = {  # what is said of them; of a password nothing is repeated
    "must name a file like ": ("mysql://h/d", "sqlite:plants.db", "sqlite:///plants.db?mode=ro"),
    "percent-encoded": (  # else a password can be taken for another part of the URL
        "postgresql://u:p@SECRET@h/d",
        "postgresql://u:p/SECRET@h/d",
        "postgresql://u:SECRET%@h/d",
        "postgresql://u:p/x?SECRET@h/d",
        "postgresql://u:p@h:SECRET@h/d",
    ),
    'query parameter: "pgbouncer"': ("postgresql://u:SECRET@h/d?pgbouncer=true",),
}


@pytest.mark.parametrize("words", WRONG_URLS)
def test_a_url_that_names_no_storage_is_refused(words):
    for url in WRONG_URLS[words]:
        with pytest.raises(ValueError, match=words) as error:
            get_storage(url)
        assert "SECRET" not in str(error.value)


# the stop


def test_a_worker_that_is_starting_ends_at_once(serve):
    """It has no handlers of its own yet; in those of the master a signal would be lost."""
    server = serve("--worker-class=tests.support.workers.Starting", "--graceful-timeout=600")
    assert server.workers() and server.stop() == 0


def test_a_stop_says_nothing_but_what_gunicorn_says(serve):
    """At Ctrl+C, which all processes get at once. A server that is away was waited for."""
    away = f"postgresql://user:secret-word@127.0.0.1:{free_port()}/plants"
    servers = {
        serve(WEB_CONCURRENCY="1"): "are stored in SQLite",
        serve(WEB_CONCURRENCY="1", DATABASE_URL=away): "can't be stored in PostgreSQL: ",
    }
    for server in servers:
        assert server.health() == (503 if server.url == away else 200)
        os.killpg(server.process.pid, signal.SIGINT)
    for server, words in servers.items():
        assert server.wait() == 0
        (said,) = LOG_LINE.sub("", server.err).splitlines()
        assert said.startswith(f"plants {words}") and "secret-word" not in server.err + server.out


def test_workers_do_not_outlive_their_master(serve):
    server = serve(PATIENT)
    workers = [os.pidfd_open(pid) for pid in server.workers()]
    server.process.kill()
    for worker in workers:
        assert select.select([worker], [], [], PATIENCE)[0]
        os.close(worker)


# other WSGI servers

WSGIREF = """
import sys
from wsgiref.simple_server import make_server
from start import get_app
server = make_server("127.0.0.1", 0, get_app())
print(f"Listening at: http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize(
    "start",
    [
        {"command": [sys.executable, "-c", WSGIREF]},
        {"GUNICORN_CMD_ARGS": "-k gevent"},
        {"GUNICORN_CMD_ARGS": "-k gthread"},
    ],
)
def test_any_wsgi_server_stores_plants_for_good(serve, stored, start):
    """It may leave to the application where a body ends."""
    server = serve(**start)
    assert server.health() == 200
    assert server.post(MONSTERA) == (STORED, {"name": "Monstera", "tag": "indoor"})
    assert server.post({**MONSTERA, "tag": "outdoor"})[0] == 409
    for line in (b"Content-Length: seven", b"Transfer-Encoding: chunked"):
        with server.connect() as connection:
            connection.sendall(HEAD + line + b"\r\n\r\n0\r\n\r\n")
            # The beginning: it may lose the rest, as it does not read what is left.
            assert connection.recv(2**10).split()[1] == b"400"
    server.kill()
    assert stored() == [(7, "Monstera", "indoor")]
