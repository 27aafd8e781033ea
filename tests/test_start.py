"""The start and the stop of the service, as its operator sees them; and other WSGI servers."""

import contextlib
import os
import re
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path

import psycopg
import pytest

from engines.postgresql import connect
from start import get_storage
from storage import Misconfigured
from tests.support.server import (
    HERE,
    PATIENCE,
    PATIENT,
    ROOT,
    SHORT,
    STORED,
    fails_with,
    free_port,
    wait_until,
)
from tests.support.storage import locked, read_rows
from tests.support.wire import HEAD, MONSTERA, NOWHERE, receive_response, statuses

ANSWER = {"name": "Monstera", "tag": "indoor"}


def test_the_command_of_the_procfile_prints_a_curl_line_that_stores_a_plant(serve, stored):
    """The service listens at all addresses, and the line has one that a newcomer can use."""
    assert (ROOT / "Procfile").read_text() == "web: gunicorn\n"
    port = free_port()
    server = serve(command=HERE[:1], PLANTS_TOKENS=None, PORT=str(port))
    curl = wait_until(lambda: re.search(r"\ncurl .*\n.*\n.*}'\n", server.err))[0]
    _, url, *options = shlex.split(curl.replace("\\\n", ""))
    assert url == f"http://127.0.0.1:{port}/plants"
    assert f"A page to try it is at http://127.0.0.1:{port}/\n" in server.err
    assert f"Listening at: http://[::]:{port} " in server.err
    with socket.create_connection(("::1", port)) as client:  # Some platforms connect only by IPv6.
        client.sendall(NOWHERE)
        assert statuses(receive_response(client)) == [404]
    assert options[::2] == ["-H", "-H", "-d"]
    headers = dict(option.split(": ") for option in options[1:4:2])
    for _ in range(10):  # so that each worker gets one
        assert server.request("POST", "/plants", options[5], headers) == (STORED, ANSWER)
    assert len(headers["Authorization"]) > 40 and server.err.count("Bearer ") == 1
    assert stored() == [(7, "Monstera", "indoor")]


def test_a_wrong_setting_ends_the_start_in_one_line(serve, database):
    """The line says what to do. The exit status is 1, and no worker was started."""
    no_folder = f"{database}/plants.db"
    with locked(database):
        servers = {
            "PLANTS_TOKENS must be .*at least 16 .*token_urlsafe": serve(PLANTS_TOKENS="too-short"),
            "PORT is set, so set DATABASE_URL too: ": serve(DATABASE_URL=None, PORT="0"),
            "WEB_CONCURRENCY must not be 0": serve(WEB_CONCURRENCY="0"),
            "DATABASE_URL: invalid sslmode value$": serve(
                DATABASE_URL="postgres://127.0.0.1/d?sslmode=no"
            ),
            "host's name is not valid": serve(DATABASE_URL=f"postgresql://{'a' * 64}/plants"),
            f"the folder {database} of DATABASE_URL is missing; mount its disk, or create": serve(
                DATABASE_URL=f"sqlite:///{no_folder}"
            ),
            f"plants can't be stored in SQLite .* in {database}.*: database is locked": serve(),
        }
        for words, server in servers.items():
            fails_with(server, words)
            assert server.wait() == 1


WRONG_URLS = {  # A URL, and a part of the message about it.
    "mysql://h/d": "must name a file like ",
    "sqlite:///plants.db?mode=ro": "must name a file like ",
    "postgresql://u:p@SECRET@h/d": "percent-encoded",
    "postgresql://u:p/SECRET@h/d": "percent-encoded",
    "postgresql://u:SECRET%@h/d": "percent-encoded",
    "postgresql://u:%a5SECRET@h/d": "percent-encoded",
    "postgresql://u:p/x?SECRET@h/d": "percent-encoded",
    "postgresql://u:SECRET/d?host=/run": "percent-encoded",
    "postgresql://u:1/SECRET@h/d": "percent-encoded",
    "postgresql://u:p/x?SECRET=1@h/d": "percent-encoded",
    "postgresql://u@h/d?password-SECRET": "percent-encoded",
    "postgresql://u:SECRET\n@h/d": "percent-encoded",
    "postgresql://u:SECRET@h/d?pgbouncer=true": '"pgbouncer"; correct or remove it$',
    "sqlite:///:memory:": "must name a file like ",
    "sqlite:///": "must name a file like ",
}


@pytest.mark.parametrize("url", WRONG_URLS)
def test_a_url_that_names_no_storage_is_refused(url):
    """The message repeats no part of a password."""
    with pytest.raises(ValueError, match=WRONG_URLS[url]) as error:
        get_storage(url)
    assert "SECRET" not in str(error.value)


WRONG_VALUES = {  # What libpq or psycopg refuses before it connects, whatever is at the address.
    "sslmode=no-verify": "^DATABASE_URL: invalid sslmode value$",
    "sslmode=require&sslrootcert=system": '^DATABASE_URL: weak sslmode "require"',
    "sslmode=SECRET@h/d": "^DATABASE_URL: invalid sslmode value$",
    "port=99999": "^DATABASE_URL: invalid port number$",
    "connect_timeout=SECRET": "^DATABASE_URL: bad value for connect_timeout$",
    "keepalives_idle=SECRET": 'value for connection option "keepalives_idle"$',
    "target_session_attrs=SECRET": "invalid target_session_attrs value$",
    "port=1,2&host=h1,h2,h3": "could not match 2 port numbers to 3 hosts$",
    "host=h1,h2&hostaddr=127.0.0.1": "match 2 host names with 1 hostaddr values$",
}


@pytest.mark.parametrize("value", WRONG_VALUES)
def test_a_value_that_can_never_work_is_told_from_a_server_that_is_down(open_storage, value):
    """Waiting would not help, so the start fails. The message repeats no part of a password."""
    with pytest.raises(Misconfigured, match=WRONG_VALUES[value]) as error:
        open_storage(f"postgresql://u:SECRET@127.0.0.1:1/d?{value}").check(PATIENCE)
    assert "SECRET" not in str(error.value)


def test_what_another_server_answers_is_not_taken_for_a_wrong_value():
    """libpq calls that an invalid response. The right server may come back later."""

    def answer() -> None:
        with server.accept()[0] as connection:
            connection.recv(8)
            connection.sendall(b"HTTP/1.1 400\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        port = str(server.getsockname()[1])
        with pytest.raises(psycopg.OperationalError, match="invalid response"):
            connect({"hostaddr": "127.0.0.1", "port": port})
        thread.join()


@pytest.mark.parametrize("more", ["service=none", "service=two", "sslcert=/none"])
def test_a_url_that_depends_on_files_is_accepted(open_storage, tmp_path, monkeypatch, more):
    """The files may appear later."""
    (tmp_path / "services").write_text("[two]\nhost=one,two\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    assert open_storage(f"postgresql:///d?{more}")


def test_white_space_around_the_url_is_ignored(open_storage, url, database):
    """Secrets often end in a line break."""
    open_storage(f" {url}\n").check(PATIENCE)
    assert {file.name.partition("-")[0] for file in database.parent.glob("*.db*")} == {"plants.db"}


def test_the_start_finds_its_modules_with_a_safe_path(serve, tmp_path):
    """With PYTHONSAFEPATH, Python leaves out the folder of a script.

    If root runs the start by hand, it leaves no -wal and no -shm that only root can write.
    """
    command = ["env", "-C", str(tmp_path), sys.executable, str(ROOT / "start.py")]
    server = serve(command=command, PYTHONSAFEPATH="1")
    assert server.wait() == 0
    assert "plants are stored in SQLite" in server.err
    assert {each.name for each in tmp_path.glob("*.db*")} == {"plants.db", "plants.db-lock"}
    assert serve(PYTHONSAFEPATH="1", WEB_CONCURRENCY="1").post(MONSTERA)[0] == STORED


def test_ctrl_c_during_the_start_prints_no_traceback(serve, tmp_path):
    """The start is still importing a module, or a server that says nothing keeps it waiting."""
    # Python imports this file in place of Bottle.
    (tmp_path / "bottle.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    server = serve(command=[sys.executable, "start.py"], PYTHONPATH=str(tmp_path))
    assert server.wait() == -signal.SIGINT and not server.err
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/plants"
        server = serve(DATABASE_URL=url)
        with silent.accept()[0]:
            os.killpg(server.process.pid, signal.SIGINT)
            assert server.wait() == -signal.SIGINT and not server.said()


def test_a_worker_that_is_starting_ends_at_once(serve):
    """It has no signal handlers of its own yet, and those of the master would lose a signal."""
    options = ["--worker-class=tests.support.workers.Starting", "--graceful-timeout=600"]
    numbers = signal.SIGTERM, signal.SIGQUIT, signal.SIGINT
    servers = {number: serve(*options, WEB_CONCURRENCY="1") for number in numbers}
    for number, server in servers.items():
        wait_until(lambda server=server: "this worker is starting" in server.err)
        server.process.send_signal(number)
        assert server.wait() == 0


def test_a_worker_that_can_not_load_the_application_ends_the_service_without_a_traceback(serve):
    """It has no storage to close."""
    server = serve("start:nothing", WEB_CONCURRENCY="1")
    assert server.wait() == 4  # gunicorn's status for an application that can't be loaded.
    assert "Failed to find attribute 'nothing' in 'start'" in server.err
    assert "AttributeError" not in server.err


def test_a_stop_prints_nothing_but_gunicorns_own_lines(serve, database):
    """All processes get Ctrl+C at once. One of the services waits for a server that is down."""
    away = f"postgresql://user:secret-word@127.0.0.1:{free_port()}/plants"
    here, one = serve(SHORT, WEB_CONCURRENCY="1"), {"WEB_CONCURRENCY": "1", "DATABASE_URL": away}
    stored = f"plants are stored in SQLite .* in {database}, which is new"
    waiting = "plants can't be stored in PostgreSQL: .*; the service answers 503 until they can"
    for server, status, words in ((here, 200, stored), (serve(SHORT, **one), 503, waiting)):
        assert server.health() == status
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait() == 0
        (said,) = server.said()
        assert re.fullmatch(words, said) and "secret-word" not in server.err + server.out


def test_each_worker_opens_the_database_at_its_start(serve, database):
    """One that opened it later, with its first request, might find another file in its place."""

    def has_opened(worker: int) -> bool:
        with contextlib.suppress(FileNotFoundError):  # The worker may close other files meanwhile.
            links = map(os.readlink, Path(f"/proc/{worker}/fd").iterdir())
            return str(database) in links
        return False

    for worker in serve(WEB_CONCURRENCY="2").workers():
        wait_until(lambda worker=worker: has_opened(worker))


def test_workers_do_not_outlive_their_master(serve):
    """Once the master is killed, nobody listens at their port."""
    server = serve(PATIENT)
    assert server.health() == 200
    server.process.kill()
    # The connection is refused, or reset if it came just before the last worker ended.
    with pytest.raises(ConnectionError):
        wait_until(lambda: server.connect().close())


WSGIREF = """
import subprocess, sys, start, wsgiref.simple_server
subprocess.run([sys.executable, "start.py"], check=True)
server = wsgiref.simple_server.make_server("127.0.0.1", 0, start.get_app())
print(f"Listening at: http://127.0.0.1:{server.server_port}", file=sys.stderr)
server.serve_forever()
"""


OTHER_SERVERS = {
    "gevent": [*HERE, "-kgevent"],
    "gthread": [*HERE, "-kgthread"],
    "wsgiref": [sys.executable, "-c", WSGIREF],
}


def test_any_wsgi_server_stores_plants(serve, url):
    """Some servers let the application find the end of a body."""
    servers = [
        serve(command=command, DATABASE_URL=f"{url}-{name}", WEB_CONCURRENCY="1")
        for name, command in OTHER_SERVERS.items()
    ]
    for server in servers:
        assert server.post(MONSTERA) == (STORED, ANSWER)
        for line in (b"Content-Length: seven", b"Transfer-Encoding: chunked"):
            with server.connect() as connection:
                connection.sendall(HEAD + line + b"\r\n\r\n0\r\n\r\n")
                # Look only at the beginning of the response: a server that does not read the rest
                # of the body may lose the end.
                assert connection.recv(2**10).split()[1] == b"400"
        assert read_rows(server.url) == [(7, "Monstera", "indoor")]
