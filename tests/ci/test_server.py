"""The service under signals, faults, other options of gunicorn, and a storage that is away."""

import contextlib
import os
import re
import signal

import pytest

from storage import Storage
from tests.support.locks import locked
from tests.support.server import (
    Server,
    Writers,
    is_alive,
    receive,
    wait_until,
)
from tests.support.wire import HEAD, MONSTERA, answers, post, receive_answer, refused
from tests.test_server import dropped_nothing

WORKERS = "tests.support.workers"  # where classes for --worker-class are

# workers


@pytest.mark.parametrize(
    ("option", "data", "answer"),
    [
        (f"--worker-class={WORKERS}.FailingHandle", post(MONSTERA), None),
        (f"--worker-class={WORKERS}.FailingTimeout", post(MONSTERA), 500),
        (f"--worker-class={WORKERS}.FailingRequest", post(MONSTERA), 500),
        (f"--worker-class={WORKERS}.FailingError", b"nonsense\r\n\r\n", None),
        (f"--logger-class={WORKERS}.FailingLogger", post(MONSTERA), None),
    ],
)
def test_a_worker_survives_a_fault_of_its_own(serve, option, data, answer):
    """The client gets an Error, or at least the end of its connection."""
    server = serve(option, WEB_CONCURRENCY="1")
    server.may_fail = True
    workers = server.workers(1)
    for _ in range(3):
        try:
            said = server.send(data)
        except ConnectionResetError:
            said = b""
        assert "the service failed" in refused(said, answer) if answer else said == b""
    wait_until(lambda: "a fault made by a test" in server.err)
    assert server.workers(1) == workers


@pytest.mark.parametrize("name", ["gevent", "gthread", "sync"])
def test_gunicorns_other_workers_run_the_service_too(serve, name):
    """Without the time limits: it stores, takes a SIGHUP and ends."""
    server = serve(f"--worker-class={name}")
    before = server.workers()
    assert server.post(MONSTERA)[0] == 200
    assert server.request("GET", "/nowhere")[0] == 404
    assert server.send(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    server.signal(signal.SIGHUP)
    assert server.workers(besides=before)
    assert server.post({"id": 8, "name": "n"})[0] == 200
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


# signals


def test_sigterm_to_all_processes_under_load_drops_nothing(serve, stored):
    """As some platforms do it; the master may be the last."""
    server = serve(f"--worker-class={WORKERS}.Late")
    workers = server.workers()
    with Writers(server.port) as writers:
        assert writers.goes_on()
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
        assert writers.goes_on()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    dropped_nothing(writers)
    assert writers.acknowledged == {number: name for number, name, _ in stored()}


def test_sighup_under_load_drops_nothing(serve):
    """Nobody is refused while new workers take over."""
    server = serve()
    before = server.workers()
    with Writers(server.port) as writers:
        assert writers.goes_on()
        server.signal(signal.SIGHUP)
        assert server.workers(besides=before)
        wait_until(lambda: not any(map(is_alive, before)))
        assert writers.goes_on()
    assert (set(writers.answers), set(writers.failures)) == ({200}, set())


def test_a_request_that_never_ends_does_not_keep_an_old_worker(serve):
    """After SIGHUP the master leaves it to the worker to end in time, which it does silently."""
    server = serve("--graceful-timeout=1")
    before = server.workers()
    with server.connect() as connection:
        connection.sendall(b"POST /pl")
        assert server.post(MONSTERA)[0] == 200
        server.signal(signal.SIGHUP)
        assert receive(connection) == b""
    wait_until(lambda: not any(map(is_alive, before)))


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGTERM, "Short"), (signal.SIGINT, "Patient"), (signal.SIGQUIT, "Patient")],
)
def test_the_end_does_not_wait_for_idle_clients(serve, number, name):
    """SIGTERM gives requests that were begun their time, and no others; SIGINT gives none."""
    options = ["--graceful-timeout=600", "--keep-alive=600"]
    server = serve(f"--worker-class={WORKERS}.{name}", *options)
    idle = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as clients:
        for data in (b"", b"POST /pl", HEAD + b"Content-Length: 9\r\n\r\n{", idle) * 10:
            clients.enter_context(server.connect()).sendall(data)
        wait_until(lambda: server.out.count("GET /") == 10)
        server.signal(number)
        assert server.wait() == 0


def test_sighup_takes_changed_code_and_keeps_the_token(serve, tmp_path):
    """New workers run the code as it is now; a token that was made at start stays good."""
    code = tmp_path / "own_app.py"
    lines = "from app import get_app\n\n\ndef named():\n    app = get_app()\n    "
    lines += "return lambda environ, start: app({**environ, 'HTTP_X_REQUEST_ID': '%s'}, start)\n"
    code.write_text(lines % "before")
    options = {"PLANTS_TOKENS": None, "PYTHONDONTWRITEBYTECODE": "1"}
    server = serve(f"--pythonpath={tmp_path}", "own_app:named()", **options)
    token = printed_token(server)
    assert server.request("GET", "/healthz")[1]["x-request-id"] == "before"
    assert server.post(MONSTERA, token)[0] == 200
    before = server.workers()
    code.write_text(lines % "and_after")
    server.signal(signal.SIGHUP)
    assert server.workers(besides=before)
    wait_until(lambda: not any(map(is_alive, before)))
    assert server.request("GET", "/healthz")[1]["x-request-id"] == "and_after"
    assert server.post(MONSTERA, token)[0] == 200
    assert server.err.count("Bearer ") == 1


def printed_token(server: Server) -> str:
    """The token in the curl line that a server has printed."""
    assert server.port
    return wait_until(lambda: re.search("Authorization: Bearer ([^']+)'", server.err))[1]


def test_a_token_is_made_once_for_all_workers_and_kept_at_sigusr2(serve):
    """A new master is started with the environment that gunicorn has saved, and the token."""
    server = serve(PLANTS_TOKENS=None)
    token = printed_token(server)
    assert len(token) >= 32
    assert {server.post(MONSTERA, token)[0] for _ in range(20)} == {200}
    before = server.workers()
    server.signal(signal.SIGUSR2)
    assert server.workers(besides=before)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    wait_until(lambda: not any(map(is_alive, before)))
    assert server.post(MONSTERA, token)[0] == 200
    assert server.err.count("Bearer ") == 1


# when the storage is away


def test_a_worker_that_starts_while_the_file_is_locked_does_not_stop_the_server(
    serve, database, stored
):
    """gunicorn stops everything when a worker fails to boot; a lock is no reason for that."""
    server = serve()
    assert server.post(MONSTERA)[0] == 200
    before = server.workers()
    with locked(database):
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert server.workers(besides=before)
        assert server.request("GET", "/nowhere")[0] == 404
        status, headers, answer = server.request("GET", "/healthz")
        assert (status, answer["error"], headers["retry-after"]) == (503, 503, "1")
    assert server.post({"id": 8, "name": "n"})[0] == 200
    assert is_alive(server.process.pid)
    assert [row[0] for row in stored()] == [7, 8]


def test_while_the_file_is_locked_answers_are_late_and_then_503(serve, database, stored):
    """By another program: what is free again in time is stored, the rest is safe to send again."""
    server = serve("app:get_app(wait_limit=4)", WEB_CONCURRENCY="1")
    assert server.post({"id": 1, "name": "before"})[0] == 200
    with contextlib.ExitStack() as lock, server.connect() as connection:
        lock.enter_context(locked(database))
        connection.sendall(post({"id": 2, "name": "late"}))
        for _ in range(20):  # others go on
            assert server.request("GET", "/nowhere")[0] == 404
        lock.close()
        assert answers(receive_answer(connection)) == [(200, {"name": "late"})]
    with locked(database):
        assert server.post({"id": 3, "name": "too late"})[0] == 503
    assert server.post({"id": 3, "name": "again"})[0] == 200
    assert stored() == [(1, "before", None), (2, "late", None), (3, "again", None)]


@pytest.mark.parametrize("left", ["nothing", "another file"])
def test_a_worker_that_starts_later_takes_up_no_other_file(serve, database, left):
    """Plants in a new one would be lost when the old one is put back."""
    server = serve()
    assert server.post(MONSTERA)[0] == 200
    before = server.workers()
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{database}{suffix}", f"{database}.old{suffix}")
    if left == "another file":
        other = Storage.from_url(f"sqlite:///{database}")
        other.check_start()
        other.close()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert server.workers(besides=before)
    assert {server.post({"id": 8, "name": "n"})[0] for _ in range(8)} == {503}
    assert "was deleted or replaced: see docs/data.md" in server.err
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{database}.old{suffix}", f"{database}{suffix}")
    assert server.post({"id": 8, "name": "n"})[0] == 200
