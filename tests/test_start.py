"""The start and the stop of the service, as whoever runs it meets them; and other WSGI servers.

Options of gunicorn are in tests/ci/test_worker.py.
"""

import os
import re
import select
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.support.server import (
    LOG_LINE,
    PATIENCE,
    QUICK,
    ROOT,
    free_port,
    receive,
    stops_in_one_line,
    wait_until,
)
from tests.support.wire import HEAD, MONSTERA

# the start


def test_the_procfile_and_the_printed_curl_line_store_a_plant_for_good(serve, stored):
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
    status, _, answer = server.request("POST", "/plants", options[5], headers)
    assert (status, answer) == (200, {"name": "Monstera", "tag": "indoor"})
    assert len(headers["Authorization"]) > 40
    assert f"A page to try it is at http://127.0.0.1:{port}/\n" in server.err
    assert server.send(b"GET / HTTP/1.0\r\n\r\n").endswith(b"</html>\n")
    assert f"Listening at: http://0.0.0.0:{port} " in server.err
    assert "plants.db\n" in server.err
    server.kill()
    assert stored() == [(7, "Monstera", "indoor")]


WRONG = {  # settings, and a part of the one line that says what to do
    "PLANTS_TOKENS must be .*at least 16 .*token_urlsafe": {"PLANTS_TOKENS": "too-short"},
    "DATABASE_URL must name a file": {"DATABASE_URL": "mysql://host/plants"},
    # A password that is not percent-encoded can be taken for another part of the URL.
    "DATABASE_URL must be like": {"DATABASE_URL": "postgresql://u:p@SECRET@h/d"},
    "user:pass@host/db, percent-encoded": {"DATABASE_URL": "postgresql://u:p/SECRET@h/d"},
    "@host/db, percent-encoded": {"DATABASE_URL": "postgresql://u:SECRET%@h/d"},
    "pass@host/db, percent-encoded": {"DATABASE_URL": "postgresql://u:p/x?SECRET@h/d"},
    ":pass@host/db, percent-encoded": {"DATABASE_URL": "postgresql://u:p@h:SECRET@h/d"},
    'query parameter: "pgbouncer"': {"DATABASE_URL": "postgresql://u:SECRET@h/d?pgbouncer=true"},
    "/no/x": {"DATABASE_URL": "sqlite:////no/x/plants.db"},
    "/dev/full": {"DATABASE_URL": "sqlite:////dev/full"},
    "--preload is not possible here, leave it out": {"GUNICORN_CMD_ARGS": "--preload"},
    "WEB_CONCURRENCY must not be 0": {"WEB_CONCURRENCY": "0"},
    "--statsd-host is not": {"GUNICORN_CMD_ARGS": "--statsd-host=h:1"},
    "--access-logformat is not": {"GUNICORN_CMD_ARGS": "--access-logformat=%(h)s"},
}


def test_a_wrong_setting_stops_the_start_in_one_line(serve):
    """The line says which and what to do; the master has started no worker."""
    servers = {words: serve(**environment) for words, environment in WRONG.items()}
    for words, server in servers.items():
        stops_in_one_line(server, words)
        assert server.wait() == 1 and "SECRET" not in server.err


@pytest.mark.parametrize("how", [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)])
def test_a_start_that_waits_can_be_stopped(serve, silent, how):
    """By Ctrl+C, which all processes get, or by a signal to one; it leaves no process behind."""
    (kill, number), (url, listener) = how, silent
    server = serve(DATABASE_URL=f"{url}?connect_timeout=600")
    with listener.accept()[0] as connection:
        connection.settimeout(PATIENCE)
        kill(server.process.pid, number)
        assert server.wait() == 1
        receive(connection)  # until the process that has made it ends
    assert LOG_LINE.sub("", server.err) == ""


# the stop


def test_a_worker_that_is_starting_ends_at_once(serve):
    """It has no handlers of its own yet; in those of the master a signal would be lost."""
    options = ["--worker-class=tests.support.workers.Starting", "--graceful-timeout=600"]
    servers = {number: serve(*options) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, server in servers.items():
        assert server.workers()
        server.signal(number)
        assert server.wait() == 0


def test_a_stop_says_nothing_but_what_gunicorn_says(serve):
    """At Ctrl+C, which all processes get at once; no plant was stored, or none could be."""
    away = f"postgresql://user:secret-word@127.0.0.1:{free_port()}/plants"
    servers = [serve(WEB_CONCURRENCY="1"), serve(WEB_CONCURRENCY="1", DATABASE_URL=away)]
    for server in servers:
        assert server.health() == (503 if server.url == away else 200)
        os.killpg(server.process.pid, signal.SIGINT)
    for server in servers:
        assert server.wait() == 0
        said = LOG_LINE.sub("", server.err).splitlines()
        assert all("the database is not available" in line for line in said), server.err
        assert bool(said) == (server.url == away) and "secret-word" not in server.err + server.out


def test_workers_do_not_outlive_their_master(serve):
    server = serve(QUICK)
    workers = [os.pidfd_open(pid) for pid in server.workers()]
    server.signal(signal.SIGKILL)
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
    assert server.post(MONSTERA) == (200, {"name": "Monstera", "tag": "indoor"})
    assert server.post({**MONSTERA, "tag": "outdoor"})[0] == 409
    for line in (b"Content-Length: seven", b"Transfer-Encoding: chunked"):
        with server.connect() as connection:
            connection.sendall(HEAD + line + b"\r\n\r\n0\r\n\r\n")
            # The beginning: it may lose the rest, as it does not read what is left.
            assert connection.recv(2**10).split()[1] == b"400"
    server.kill()
    assert stored() == [(7, "Monstera", "indoor")]
