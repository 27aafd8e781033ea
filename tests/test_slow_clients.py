"""Clients that are slow: each is cut off in time, and keeps nobody else out until then.

Hundreds of each kind are in tests/ci/test_slow_clients.py.
"""

import contextlib
import fcntl
import sys
import termios
import time
from collections.abc import Iterator

import gevent.socket
import pytest

from postgresql import CANCEL_LIMIT
from storage import WAIT_LIMIT
from tests.support.server import HERE, PATIENCE, ROOT, Server, receive, running, wait_until
from tests.support.wire import HEAD, MONSTERA, answers, post, receive_answer, refused
from worker import FULL, UNWANTED, Connection, Worker

HALF_A_BODY = HEAD + b"Content-Length: 9\r\n\r\n{"
GET = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with running(folder, "--worker-class=tests.support.workers.Short", "--keep-alive=1") as server:
        yield server


def test_a_half_sent_request_is_cut_off(server):
    """Once its time is up; a client that can be told is told. So is one that sends nothing more."""
    said = {
        b"": None,
        b"POST /pl": None,
        HALF_A_BODY[:-1]: "the body ended after 0 of 9 bytes",
        HALF_A_BODY: "the body ended after 1 of 9 bytes",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\n{": "the body could not be read: ",
    }
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(server.connect())
        idle.sendall(post(MONSTERA))
        connections = [stack.enter_context(server.connect()) for _ in said]
        for connection, half in zip(connections, said, strict=True):
            connection.sendall(half)
        for connection, message in zip(connections, said.values(), strict=True):
            data = receive(connection)
            assert refused(data, 400).startswith(message) if message else data == b""
        assert [status for status, _ in answers(receive(idle))] == [200]


def test_each_request_of_a_connection_has_a_time_limit_of_its_own(server):
    """A busy connection is not cut off, but one whose next request does not come to its end is."""
    request = post(MONSTERA)
    with server.connect() as connection:
        end = time.monotonic() + 1.5  # three times the limit
        while time.monotonic() < end:
            connection.sendall(request)
            assert [status for status, _ in answers(receive_answer(connection))] == [200]
        connection.sendall(request + request[:-1])
        assert [status for status, _ in answers(receive(connection))] == [200, 400]


def test_the_rest_of_a_body_that_comes_late_is_no_request(server):
    """The answer was sent at once, and the time to read on behind it is over."""
    head = b"POST /plants HTTP/1.1\r\nHost: h\r\nContent-Length: 65536\r\n\r\n"
    for _ in range(3):
        with server.connect() as client, contextlib.suppress(OSError):
            client.sendall(head)
            for _ in range(2500):  # until it is closed
                client.sendall(b"GET /z HTTP/1.1\r\nHost: h\r\n\r\n")
                time.sleep(0.0005)
    assert "/z" not in server.out


def test_an_idle_connection_may_wait_for_longer_than_a_request_takes(serve):
    server = serve("--worker-class=tests.support.workers.Short", WEB_CONCURRENCY="1")
    with server.connect() as idle, server.connect() as late:
        idle.sendall(post(MONSTERA))
        receive_answer(idle)
        late.sendall(post(MONSTERA) + HALF_A_BODY)  # which is late, not idle
        assert [status for status, _ in answers(receive(late))] == [200, 400]
        idle.sendall(post(MONSTERA))
        assert [status for status, _ in answers(receive_answer(idle))] == [200]


def test_a_client_that_reads_none_of_many_answers_is_cut_off(server):
    """They are more than the system keeps for a connection, so that the worker waits with them."""
    begin = len(server.out)
    with server.connect() as connection:
        connection.setblocking(False)
        requests = memoryview((GET + b"\r\n") * 20_000)

        def is_cut_off() -> bool:
            nonlocal requests
            try:
                requests = requests[connection.send(requests or b"x") :]
            except BlockingIOError:
                return False
            except OSError:
                return True
            return False

        wait_until(is_cut_off)
    assert 0 < server.out[begin:].count("GET /openapi.json") < 20_000


def test_more_connections_than_there_is_room_for_keep_nobody_out(serve):
    """Though each may wait for long, the one that has waited longest makes room.

    There is hardly any room, and the client that came last is not the one that makes it.
    """
    options = ["--worker-class=tests.support.workers.Patient", "--worker-connections=10"]
    server = serve(*options, WEB_CONCURRENCY="1")
    connections = []
    for number, data in enumerate([b"", b"POST /pl", HALF_A_BODY, GET + b"\r\n"] * 10):
        connections.append(server.connect())
        connections[-1].sendall(data)
        assert server.post({"id": number, "name": "n"})[0] == 200
    late = connections[-2]
    late.sendall(b" " * 7 + b"}")
    assert answers(receive_answer(late))[0][0] == 400  # what it has sent is no plant
    for connection in connections:
        connection.close()


def test_as_many_descriptors_as_needed_are_asked_for(serve):
    command = ["sh", "-c", 'ulimit -S -n 64; exec "$@"', "sh", *HERE]
    server = serve(command=command, WEB_CONCURRENCY="1")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(server.connect())
        assert server.post(MONSTERA)[0] == 200
    assert "1 workers of up to 1000 connections" in server.err


def test_the_limits_are_those_that_are_documented():
    """Waiting for each of them would take long."""
    limits, data = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("interface", "data"))
    for words in (
        f"arrive | {Worker.request_limit:.0f} seconds |",
        f"too slow | {Worker.linger_limit:.0f} seconds more |",
        f"waits for the storage | {WAIT_LIMIT:.0f} seconds |",
        f"from {FULL * 1000:.0f} on, each new one closes",
    ):
        assert words in limits
    assert "retries them for up to four seconds" in data
    assert WAIT_LIMIT / 2 - CANCEL_LIMIT == 4


def test_what_is_thrown_away_at_the_end_of_a_connection_holds_up_nobody():
    """Another greenlet runs before all is read that has come."""
    ours, theirs = gevent.socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(UNWANTED + 1))
        closing = gevent.spawn(Connection(ours, PATIENCE, PATIENCE).close)
        other = gevent.spawn(fcntl.ioctl, ours, termios.FIONREAD, bytes(4))
        assert int.from_bytes(other.get(), sys.byteorder) == 1
        theirs.close()
        closing.get()
