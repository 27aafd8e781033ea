"""The service under signals, faults, other options of gunicorn, and a storage that is away."""

import contextlib
import os
import re
import signal
import subprocess

import pytest

from storage import Storage
from tests.support.locks import can_lock, locked
from tests.support.server import (
    GUNICORN,
    PATIENCE,
    Server,
    Writers,
    is_alive,
    receive,
    wait_until,
)
from tests.support.wire import HEAD, MONSTERA, answers, post, receive_answer, refused
from tests.test_server import dropped_nothing

WORKERS = "tests.support.workers"  # where classes for --worker-class are

# where it listens


def test_the_printed_curl_line_for_a_socket_works(serve, tmp_path, stored):
    """A proxy on the same machine may be served through one."""
    server = serve(command=[GUNICORN, "--bind", f"unix:{tmp_path}/s"], PLANTS_TOKENS=None)
    curl = wait_until(lambda: re.search(r"\ncurl .*\n.*\n.*}'\n", server.err))[0]
    answer = subprocess.run(["sh", "-c", curl], capture_output=True, timeout=PATIENCE)
    assert answer.stdout == b'{"name": "Monstera", "tag": "indoor"}\n'
    assert stored() == [(7, "Monstera", "indoor")]


# workers


def test_workers_share_the_tokens(serve, stored):
    """Each worker, while all the others are stopped, takes the same token."""
    server = serve(WEB_CONCURRENCY="3")
    workers = server.workers(3)
    for number, only in enumerate(workers):
        for pid in workers:
            os.kill(pid, signal.SIGCONT if pid == only else signal.SIGSTOP)
        assert server.post({"id": number, "name": "n"})[0] == 200
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    assert len(stored()) == 3


def test_workers_write_at_once(serve, stored):
    """Every plant is there, and nothing fails."""
    server = serve(WEB_CONCURRENCY="3")
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
    assert (set(writers.answers), set(writers.failures)) == ({200}, set())
    assert writers.acknowledged == {number: name for number, name, _ in stored()}


@pytest.mark.parametrize(
    ("name", "data", "answer"),
    [
        ("FailingHandle", post(MONSTERA), None),
        ("FailingTimeout", post(MONSTERA), 500),
        ("FailingRequest", post(MONSTERA), 500),
        ("FailingError", b"nonsense\r\n\r\n", None),
    ],
)
def test_a_worker_survives_a_fault_of_its_own(serve, name, data, answer):
    """The client gets an Error, or at least the end of its connection."""
    server = serve(f"--worker-class={WORKERS}.{name}", WEB_CONCURRENCY="1")
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


def test_a_log_that_fails_ends_the_connection_only(serve, stored):
    """The plant is stored, though the client can't know."""
    server = serve(f"--logger-class={WORKERS}.FailingLogger", WEB_CONCURRENCY="1")
    server.may_fail = True
    workers = server.workers(1)
    for _ in range(3):
        assert server.send(post(MONSTERA)) == b""
    assert server.workers(1) == workers
    assert stored() == [(7, "Monstera", "indoor")]


def test_a_worker_that_can_tell_nothing_to_the_master_is_replaced(serve):
    """By one that serves."""
    server = serve(f"--worker-class={WORKERS}.FailingNotify", WEB_CONCURRENCY="1")
    server.may_fail = True
    workers = server.workers(1)
    assert server.post(MONSTERA)[0] == 200
    assert server.workers(1, besides=workers)
    assert server.post(MONSTERA)[0] == 200


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


def test_workers_may_end_after_some_requests(serve):
    """As --max-requests says; no request is dropped."""
    server = serve("--max-requests=50")
    with Writers(server.port) as writers:
        assert writers.goes_on(500)
    assert (set(writers.answers), set(writers.failures)) == ({200}, set())
    wait_until(lambda: server.err.count("Booting worker") > 2)


# signals


@pytest.mark.parametrize("everybody", [False, True])
def test_sigterm_under_load_drops_nothing(serve, stored, everybody):
    """To the master, or to all processes as some platforms do it; the master may be the last."""
    server = serve(*[f"--worker-class={WORKERS}.Late"] * everybody)
    workers = server.workers()
    with Writers(server.port) as writers:
        assert writers.goes_on()
        if everybody:
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


def test_sigusr2_keeps_the_token(serve):
    """A new master is started with the environment that gunicorn has saved, and the token."""
    server = serve(PLANTS_TOKENS=None)
    token = printed_token(server)
    assert server.post(MONSTERA, token)[0] == 200
    before = server.workers()
    server.signal(signal.SIGUSR2)
    assert server.workers(besides=before)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    wait_until(lambda: not any(map(is_alive, before)))
    assert server.post(MONSTERA, token)[0] == 200
    assert server.err.count("Bearer ") == 1


def test_a_token_is_made_once_for_all_workers_and_is_in_no_log_line(serve):
    """It is printed at start, and nowhere else."""
    server = serve(PLANTS_TOKENS=None)
    token = printed_token(server)
    assert len(token) >= 32
    assert server.workers()
    assert {server.post(MONSTERA, token)[0] for _ in range(20)} == {200}
    server.request("GET", f"/plants?access_token={token}")
    server.send(f"GET / HTTP/1.1\r\nAuthorization Bearer {token}\r\n\r\n".encode())
    wait_until(lambda: "InvalidHeader" in server.out)
    assert server.err.count(token) == 1
    assert token not in server.out


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
        assert server.request("GET", "/nowhere")[0] == 404  # others go on
        lock.close()
        assert answers(receive_answer(connection)) == [(200, {"name": "late"})]
    with locked(database):
        assert server.post({"id": 3, "name": "too late"})[0] == 503
    assert server.post({"id": 3, "name": "again"})[0] == 200
    assert stored() == [(1, "before", None), (2, "late", None), (3, "again", None)]


def test_a_file_that_was_replaced_is_answered_with_503_until_a_restart(serve, database, stored):
    """A backup is put in place under the running service: nothing is stored into the void."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{database}{suffix}", f"{database}.old{suffix}")
    assert server.post({"id": 8, "name": "n"})[0] == 503
    assert server.request("GET", "/healthz")[0] == 503
    assert "deleted or replaced" in server.err
    server.signal(signal.SIGTERM)
    server.wait()
    assert serve().post({"id": 9, "name": "n"})[0] == 200
    assert stored() == [(9, "n", None)]


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
    assert "was deleted or replaced: restore it" in server.err
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{database}.old{suffix}", f"{database}{suffix}")
    assert server.post({"id": 8, "name": "n"})[0] == 200


def test_the_lock_is_not_held_between_requests(serve, database):
    """An idle service leaves it to others."""
    assert serve().post(MONSTERA)[0] == 200
    lock = os.open(f"{database}-lock", os.O_RDONLY)
    wait_until(lambda: can_lock(lock))
    os.close(lock)
