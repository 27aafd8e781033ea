"""The service under signals, faults, other options of gunicorn, and a storage that is away."""

import contextlib
import os
import re
import signal
import time

import pytest

from start import get_storage
from tests.support.locks import lock_held
from tests.support.server import Server, Writers, is_alive, receive, wait_until
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
    with Writers(server.port) as writers:
        assert writers.goes_on()
        server.reload()
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
    lines = "from start import get_app\n\n\ndef named():\n    app = get_app()\n    "
    lines += "return lambda environ, start: app({**environ, 'HTTP_X_REQUEST_ID': '%s'}, start)\n"
    code.write_text(lines % "before")
    options = {"PLANTS_TOKENS": None, "PYTHONDONTWRITEBYTECODE": "1"}
    server = serve(f"--pythonpath={tmp_path}", "own_app:named()", **options)
    token = printed_token(server)
    assert server.request("GET", "/healthz")[1]["x-request-id"] == "before"
    assert server.post(MONSTERA, token)[0] == 200
    code.write_text(lines % "and_after")
    server.reload()
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


def test_a_service_that_was_stopped_blames_nobody_when_it_goes_on(serve, database):
    """SIGSTOP, or a machine that sleeps: all time is up then, though nothing keeps the plant."""
    server = serve("start:get_app(wait_limit=2)", WEB_CONCURRENCY="1")
    (worker,) = server.workers(1)
    with server.connect() as connection:
        with lock_held(database):
            connection.sendall(post(MONSTERA))
            for _ in range(9):  # by the second one the plant is on its way
                assert server.request("GET", "/nowhere")[0] == 404
            os.kill(worker, signal.SIGSTOP)
        time.sleep(4)
        os.kill(worker, signal.SIGCONT)
        assert answers(receive_answer(connection))[0][0] == 200
    assert "gave up" not in server.err


def test_a_worker_that_starts_later_takes_up_no_other_file(serve, database):
    """Plants in a new one would be lost when the old one is put back."""
    server = serve()
    assert server.post(MONSTERA)[0] == 200
    before = server.workers()
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{database}{suffix}", f"{database}.old{suffix}")
    with contextlib.closing(get_storage(f"sqlite:///{database}")) as other:
        other.open_or_create()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert server.workers(besides=before)
    assert {server.post({"id": 8, "name": "n"})[0] for _ in range(8)} == {503}
    assert "was deleted or replaced: see docs/data.md" in server.err
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{database}.old{suffix}", f"{database}{suffix}")
    assert server.post({"id": 8, "name": "n"})[0] == 200


def test_the_end_does_not_wait_for_reloads(serve):
    """gunicorn's queue of signals has no limit, and a reload takes a second."""
    server = serve()
    assert server.post({"id": 1, "name": "one"})[0] == 200
    for _ in range(60):
        server.signal(signal.SIGHUP)
        time.sleep(0.01)  # the kernel makes one of those that nobody has seen yet
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert server.err.count("Handling signal: hup") < 30


def test_a_service_that_was_stopped_goes_on(serve):
    """No worker is killed for a time in which all stood still."""
    server = serve("--timeout=5")
    workers = server.workers()
    time.sleep(3)  # until each has said that it is alive
    os.killpg(server.process.pid, signal.SIGSTOP)
    time.sleep(7)  # longer than the timeout
    server.signal(signal.SIGCONT)
    time.sleep(1)  # the system may wake the master first
    os.killpg(server.process.pid, signal.SIGCONT)
    time.sleep(4)
    assert server.post({"id": 1, "name": "one"})[0] == 200
    assert server.workers() == workers and "TIMEOUT" not in server.err
