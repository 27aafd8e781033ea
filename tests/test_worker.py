"""The worker: what it makes of bytes, slow clients, many clients and SIGTERM, in real processes.

What takes longer is in tests/ci/test_slow_clients.py and tests/ci/test_worker.py.
"""

import contextlib
import os
import re
import select
import signal
import socket
import time
from pathlib import Path

from app import BODY_LIMIT
from storage import WAIT_LIMIT
from tests.support.locks import lock_held
from tests.support.pages import table
from tests.support.rows import read_names
from tests.support.server import PATIENCE, TOKEN, receive, wait_until
from tests.support.wire import (
    GET,
    HALF_A_BODY,
    HEAD,
    MONSTERA,
    answers,
    chunked,
    new_plant,
    post,
    receive_answer,
    refused,
    statuses,
)
from tests.support.writers import Writers
from worker import FULL, HEAD_LIMIT, LIMITS, State

CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n"

# bodies and heads over raw sockets


def test_a_client_that_is_still_sending_gets_to_read_the_answer(server):
    """It sends all of a large body before it reads; the connection ends, as the answer says."""
    large = b" " * (256 * BODY_LIMIT)
    for head, status in ((HEAD, 413), (HEAD.replace(b"Bearer", b"Basic"), 401)):
        for data in (post(large, head=head), head + CHUNKS + chunked(large, b"")):
            answer = server.send(data)
            refused(answer, status)
            assert b"\r\nConnection: close\r\n" in answer


def test_a_connection_ends_or_stays_as_its_options_say(server):
    """What is behind an answer that says close is not served (RFC 9112 section 9.6).

    HTTP/1.0 ends unless the client asks otherwise, and needs no Host. A version that is higher is
    answered as 1.1.
    """
    new, old = HEAD, HEAD.replace(b"1.1\r\nHost: localhost", b"1.0")
    for head, lines, ends in (
        (new, b"Connection: keep-alive, close", True),
        (new, b"Connection: TE ,\tClose", True),
        (new, b"Connection: keep-alive\r\nConnection: close", True),
        (new, b"Connection: close\r\nTE: trailers\r\nConnection: TE", True),
        (old, b"Connection: keep-alive, close", True),
        (old, b"X: x", True),
        (old, b"Connection: keep-alive", False),
        (new, b'Connection: closed, x-close, "close"', False),
        (new.replace(b"1.1", b"1.9"), b"X-Connection: close", False),
    ):
        behind = new_plant()
        data = server.send(post(MONSTERA, lines, head=head) + post(behind, b"Connection: close"))
        assert statuses(data) == ([200] if ends else [200, 200])
        assert data.count(b"\r\nConnection: close\r\n") == 1 and b"HTTP/1.9" not in data
        assert (server.stored(behind["id"]) is None) == ends


def test_headers_of_a_proxy_change_nothing(server):
    """gunicorn believes such headers from loopback, unless it is told not to."""
    for lines in (
        b"SCRIPT_NAME: /plants",
        b"SCRIPT_NAME: /x",
        b"PATH_INFO: /healthz",
        b"X-Forwarded-Proto: https\r\nX-Forwarded-Ssl: off",
    ):
        assert statuses(server.send(post(MONSTERA, lines, b"Connection: close"))) == [200]


def test_a_head_or_a_body_with_too_many_parts_is_refused(server):
    """64 lines and 16 KiB of a head, but not one more; 80 KiB of a body with its chunks."""
    get = GET + b"Connection: close\r\n"
    assert b" 200 OK" in server.send(get + b"X: a\r\n" * 62 + b"\r\n")
    refused(server.send(get + b"X: a\r\n" * 63 + b"\r\n"), 431)
    for length, status in ((HEAD_LIMIT, b" 200 OK"), (HEAD_LIMIT + 1, b" 431 ")):
        assert status in server.send((get + b"X: ").ljust(length - 4, b"x") + b"\r\n\r\n")
    head = HEAD + b"Connection: close\r\n" + CHUNKS
    body = b'{"id": %d, "name": "Ivy"}' % new_plant()["id"]
    for count, expected in ((30, [200]), (60, [400])):
        extensions = (b"1;x=" + b"x" * 2000 + b"\r\n \r\n") * count
        trailers = b"0\r\n" + (b"X: " + b"x" * 2000 + b"\r\n") * count + b"\r\n"
        assert statuses(server.send(head + extensions + chunked(body, b""))) == expected
        assert statuses(server.send(head + chunked(body) + trailers)) == expected


# the access log


def test_the_access_log_has_one_line_a_request_that_no_request_can_forge(server):
    """Method, path without the query, status, bytes, time, request id; and why it was refused."""
    path = "/a%0A127.0.0.1%20-%20forged%0D%1B%5B31m%22%E2%80%A8"
    form = r'127\.0\.0\.1 - - \[\d\d/\w+/\d+:\d\d:\d\d:\d\d [+-]\d{4}\] "(.+?)" (\d+) (\d+) '
    form += r'\d+\.\d{4}s (\S+)( ".*")?'
    for request, status, reason in (
        ("GET /openapi.json", 200, None),
        (f"GET {path}", 404, r' "there is nothing at /a\n127.0.0.1 - forged\r\u001b[31m\"'),
    ):
        sent = {"X-Request-ID": f"line-{status}"}
        answer = server.request(*f"{request}?query".split(), headers=sent)
        *found, said = re.fullmatch(form, server.log_line(f"line-{status}")).groups()
        length = answer.headers["content-length"]
        assert found == [request, f"{status}", length, f"line-{status}"]
        assert said.startswith(reason) if reason else said is None
    server.request("GET", "/healthz", headers={"X-Request-ID": "is-left-out"})
    server.request("GET", "/nowhere", headers={"X-Request-ID": "is-behind-it"})
    assert server.log_line("is-behind-it") and "is-left-out" not in server.out


# many clients


def test_a_wait_for_the_database_holds_up_no_other_request(server):
    """The lock is waited for in a real thread; gevent can't pause that."""
    with server.connect() as waiting:
        with lock_held(Path(server.url.removeprefix("sqlite:///"))):
            waiting.sendall(post(new_plant()))
            for _ in range(9):  # by the second one the plant is on its way
                assert server.request("GET", "/openapi.json").status == 200
        assert answers(receive_answer(waiting)) == [(200, {"name": "Ivy"})]


def is_cut(client: socket.socket) -> bool:
    """Whether the server has closed a connection on which it had nothing to send."""
    return bool(select.select([client], [], [], 0)[0])


def is_reset(client: socket.socket) -> bool:
    """Whether the server takes nothing more from a client that goes on sending."""
    try:
        if select.select([], [client], [], 0)[1]:
            client.send(b"GET /behind HTTP/1.1\r\nHost: h\r\n\r\n")
    except ConnectionError:
        return True
    return False


def test_a_worker_opens_its_database_before_a_request_comes(serve, database):
    """So it notices that the file was deleted, and makes no empty one in its place."""
    server = serve(WEB_CONCURRENCY="1")
    server.workers(1)  # the check at the start has closed the file again
    wal = database.with_name(f"{database.name}-wal")
    wait_until(lambda: wal.exists() and wal.stat().st_size)
    database.unlink()
    assert server.post(MONSTERA)[0] == 503


def test_who_has_waited_longest_makes_room_for_a_new_client(serve, database):
    """Who does not take answers first, then who has had the last one, then who sends nothing, or a
    part of a request; in each the one that came first. Who waits for us does not.
    """
    options = ["--worker-class=tests.support.workers.Patient", "--worker-connections=7"]
    server = serve(*options, WEB_CONCURRENCY="1")
    assert server.health() == 200  # from now on the system keeps little for a client
    nowhere = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:

        def send(data: bytes) -> socket.socket:
            client = stack.enter_context(socket.socket())
            client.settimeout(PATIENCE)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            client.connect(("127.0.0.1", server.port))
            client.sendall(data)
            return client

        lock = stack.enter_context(contextlib.ExitStack())
        lock.enter_context(lock_held(database))
        working = send(post(MONSTERA))
        receiving = send(HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        assert receiving.recv(2**16).startswith(b"HTTP/1.1 100 ")
        first, second = send(nowhere), send(b"")
        assert receive_answer(first)
        ending = send(GET + b"Connection: close\r\n\r\n")
        assert receive(ending)
        sending = send((GET + b"\r\n") * 200)
        for _ in range(100):  # rounds, in each of which it is sent an answer while it has room
            second.sendall(nowhere)
            assert receive_answer(second)
        order = [(sending, is_reset), (ending, is_reset)]
        order += [(each, is_cut) for each in (receiving, first, second)]
        while order:
            send(b"POST /pl")
            client, is_gone = order.pop(0)
            wait_until(lambda: is_gone(client))  # noqa: B023
            assert not any(is_gone(client) for client, is_gone in order)
        refused(receive(receiving), 408)
        lock.close()
        assert statuses(receive_answer(working)) == [200]
    assert 0 < server.out.count("/openapi.json") < 100 and "/behind" not in server.out


# slow clients


def test_who_is_late_is_cut_off(short):
    """A client that can be told is told. So is one that sends nothing more.

    The limit is that of a request: a busy client goes on, until it is late with one.
    """
    told = {
        b"": False,
        b"POST /pl": False,
        HALF_A_BODY[:-1]: True,
        HALF_A_BODY: True,
        HEAD + CHUNKS + b"9\r\n{": True,
    }
    request = post(MONSTERA)
    with contextlib.ExitStack() as stack:
        busy, idle, *clients = (stack.enter_context(short.connect()) for _ in range(len(told) + 2))
        idle.sendall(request)
        for client, half in zip(clients, told, strict=True):
            client.sendall(half)

        def another_is_cut() -> bool:
            for piece in (request[:7], request[7:-9], request[-9:]):
                busy.sendall(piece)
                time.sleep(0.01)
            assert statuses(receive_answer(busy)) == [200]
            return is_cut(clients[-1])

        wait_until(another_is_cut)
        busy.sendall(request + HALF_A_BODY)
        assert statuses(receive(busy)) == [200, 408]
        for client, is_told in zip(clients, told.values(), strict=True):
            answer = receive(client)
            assert "did not come in whole" in refused(answer, 408) if is_told else not answer
        assert statuses(receive(idle)) == [200]


def test_the_limits_are_those_that_are_documented():
    """Waiting for each of them would take long."""
    limits = {what: f"{limit} {then}" for what, limit, then in table(r"what \| limit")}
    for what, limit in {
        "time for a request to arrive": f"{LIMITS[State.RECEIVING]:.0f} seconds",
        "time to take the answer": f"{LIMITS[State.SENDING]:.0f} seconds",
        "time to read the last answer": f"{LIMITS[State.ENDING]:.0f} seconds",
        "time that a request waits": f"{WAIT_LIMIT:.0f} seconds",
        "connections to a worker": f"from {FULL * 1000:.0f} on",
    }.items():
        assert [text for name, text in limits.items() if name.startswith(what) and limit in text]


# the end


def test_sigterm_drops_nothing(serve, database):
    """Each connection that was made gets its answer, also for a request that was only begun.

    Idle clients are not waited for, though they may wait for longer than this test does.
    """
    options = ["--worker-class=tests.support.workers.Lenient", "--graceful-timeout=600"]
    server = serve(*options, PLANTS_TOKENS=f"garden:{TOKEN}")
    with (
        Writers(server.port) as writers,
        server.connect() as begun,
        server.connect() as idle,
    ):
        idle.sendall(post(MONSTERA))
        assert receive_answer(idle).startswith(b"HTTP/1.1 200")
        plant = new_plant()
        begun.sendall(post(plant, b"Expect: 100-continue")[:-9])
        assert begun.recv(2**16).startswith(b"HTTP/1.1 100")
        assert writers.goes_on()
        server.signal(signal.SIGTERM)
        wait_until(lambda: writers.failures)  # nobody listens any more
        begun.sendall(post(plant)[-9:])
        answer = receive(begun)
        assert statuses(answer) == [200]
        assert b"\r\nConnection: close\r\n" in answer
        begun.close()
        assert server.wait() == 0
        assert receive(idle) == b""
    assert set(writers.answers) == {200}
    # The system resets one that is made between the last accept() and the close() of the listener.
    assert set(writers.failures) <= {ConnectionRefusedError, ConnectionResetError}
    assert writers.failures[ConnectionResetError] <= 1
    assert not Path(f"{database}-wal").exists()  # the connections were closed, not just dropped
    stored = {plant["id"]: plant["name"], 7: "Monstera"}
    assert read_names(server.url) == writers.acknowledged | stored
    assert server.out.startswith("127.0.0.1 - garden [")  # the name of the token


def test_a_worker_serves_on_for_a_while_after_sigterm(serve):
    """Where all processes get it, the master may be the last. Each answer says close from then."""
    server = serve("--worker-class=tests.support.workers.Patient", WEB_CONCURRENCY="1")
    (worker,) = server.workers(1)
    assert server.post(MONSTERA)[0] == 200
    server.signal(signal.SIGSTOP)  # it would start another worker
    os.kill(worker, signal.SIGTERM)

    def says_close() -> bool:
        with server.connect() as client:
            client.sendall(post(MONSTERA))
            answer = receive_answer(client)
        assert statuses(answer) == [200]
        return b"\r\nConnection: close\r\n" in answer

    wait_until(says_close)
    time.sleep(0.2)  # it looks more often than that whether it has to end
    assert says_close()
