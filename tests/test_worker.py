"""The worker: what it makes of bytes, slow clients, many clients and SIGTERM, in real processes.

What takes longer is in tests/ci/test_slow_clients.py and tests/ci/test_worker.py.
"""

import contextlib
import os
import re
import select
import signal
import socket
import struct
import time
from pathlib import Path

import gevent
import pytest

from app import BODY_LIMIT
from storage import ADD_LIMIT
from tests.support.pages import table
from tests.support.server import PATIENT, SHORT, STORED, receive, wait_until
from tests.support.storage import lock_held, read_names
from tests.support.wire import (
    GET,
    HALF_A_BODY,
    HEAD,
    MONSTERA,
    Writers,
    chunked,
    new_plant,
    post,
    receive_answer,
    refused,
    statuses,
)
from worker import FULL, LAST_LIMIT, LIMIT, ROOM, Client

CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n"
NOWHERE = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLOSE = b"\r\nConnection: close\r\n"

# bodies and heads over raw sockets


def test_a_client_that_is_still_sending_gets_to_read_the_answer(server):
    """It sends all of a large body before it reads; the connection ends, as the answer says."""
    large = b" " * (256 * BODY_LIMIT)
    for head, status in ((HEAD, 413), (HEAD.replace(b"Bearer", b"Basic"), 401)):
        for data in (post(large, head=head), head + CHUNKS + chunked(large, b"")):
            answer = server.send(data)
            refused(answer, status)
            assert CLOSE in answer


def test_a_connection_ends_or_stays_as_the_client_asks(server):
    """Nothing behind an answer that says close is served (RFC 9112 section 9.6)."""
    old = HEAD.replace(b"1.1\r\nHost: localhost", b"1.0")
    last = NOWHERE.replace(b"\r\n\r\n", CLOSE + b"\r\n")
    for head, line, more in (
        (HEAD, b"Connection: close", []),
        (old, b"X: x", []),
        (old, b"Connection: keep-alive", [404]),
    ):
        data = server.send(post(MONSTERA, line, head=head) + last)
        assert statuses(data) == [STORED, *more] and data.count(CLOSE) == 1


def test_headers_of_a_proxy_change_nothing(server):
    """gunicorn believes such headers from loopback, unless it is told not to."""
    lines = (b"SCRIPT_NAME: /x", b"PATH_INFO: /x", b"X-Forwarded-For: x", b"X-Forwarded-Ssl: off")
    for number, line in enumerate(lines):
        request = post(MONSTERA, line, b"X-Request-ID: proxy-%d" % number, b"Connection: close")
        assert statuses(server.send(request)) == [STORED]
        logged = server.logged(f"proxy-{number}")
        assert (logged["client"], logged["request"]) == ("127.0.0.1", "POST /plants")


def test_a_head_or_a_body_with_too_many_parts_is_refused(server):
    """64 lines and 32 KiB of a head, and of a body with its chunks, but no more."""
    get = GET + b"Connection: close\r\n"
    assert b" 200 OK" in server.send(get + b"X: a\r\n" * 62 + b"\r\n")
    refused(server.send(get + b"X: a\r\n" * 63 + b"\r\n"), 431)
    line, head = b"X: " + b"x" * 8000 + b"\r\n", HEAD + b"Connection: close\r\n"
    for length, status in ((ROOM, b" 200 OK"), (ROOM + 1, b" 431 ")):
        data = (get + line * 4 + b"X: ").ljust(length - 4, b"x") + b"\r\n\r\n"
        assert status in server.send(data)
    body = b'{"id": %d, "name": "Ivy"}' % new_plant()["id"]
    for count, status in ((12, STORED), (20, 400)):
        extensions = (b"1;x=" + b"x" * 2000 + b"\r\n \r\n") * count
        trailers = b"0\r\n" + (b"X: " + b"x" * 2000 + b"\r\n") * count + b"\r\n"
        assert statuses(server.send(head + CHUNKS + extensions + chunked(body, b""))) == [status]
        assert statuses(server.send(head + CHUNKS + chunked(body) + trailers)) == [status]


# many clients


def test_an_answer_is_one_write(server):
    """Each further one is a system call and a packet more. What requests may take is not shared."""
    with server.connect() as client:
        for _ in range(9):
            client.sendall(GET + b"X: " + b"x" * (ROOM // 8) + b"\r\n\r\n")
            receive_answer(client)
        info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
    assert struct.unpack_from("I", info, 152) == (9,)  # tcpi_data_segs_in of linux/tcp.h


def test_clients_that_send_all_their_requests_at_once_are_served_in_turn(server):
    """One request of each in a round, however many of them are there."""
    (worker,) = server.workers(1)
    with server.connect() as one, server.connect() as other:
        for client in (one, other):
            client.sendall(NOWHERE)
            receive_answer(client)
        os.kill(worker, signal.SIGSTOP)  # until all has come
        for client, path in ((one, b"/turns/one"), (other, b"/turns/other")):
            client.sendall(NOWHERE.replace(b"/nowhere", path) * 150)
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: server.out.count("GET /turns/") == 300)
    order = re.findall(r"GET /turns/(\w+)", server.out)[:150]
    assert 10 <= order.count("one") <= 140  # gevent runs 50 of one, if only they are ready


def is_cut(client: socket.socket) -> bool:
    """Whether the server has ended its side of a connection."""
    poll = select.poll()  # unlike select(), for any number of descriptors
    poll.register(client, select.POLLRDHUP)
    return bool(poll.poll(0))


def test_who_has_been_waited_for_longest_makes_room_for_a_new_client(serve, database):
    """Whatever it is that it does not do. Who waits for the database is not cut; that wait, in a
    real thread, holds up nobody else.
    """
    server = serve(PATIENT, "--worker-connections=10", WEB_CONCURRENCY="1")
    assert server.health() == 200
    with contextlib.ExitStack() as stack:

        def send(data: bytes) -> socket.socket:
            client = stack.enter_context(server.connect())
            client.sendall(data)
            return client

        lock = stack.enter_context(contextlib.ExitStack())
        lock.enter_context(lock_held(database))
        working = send(post(MONSTERA, b"Expect: 100-continue")[:-9])
        assert working.recv(2**16).startswith(b"HTTP/1.1 100 ")
        working.sendall(post(MONSTERA)[-9:])
        receiving = send(HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        assert receiving.recv(2**16).startswith(b"HTTP/1.1 100 ")
        idle = send(NOWHERE)
        assert receive_answer(idle)
        order = [receiving, idle, send(b"")]
        sending = send((GET + b"\r\n") * 1000)  # more than the system keeps for a client
        for _ in range(4):
            send(b"POST /pl")
        for client in order:
            assert not any(map(is_cut, order[order.index(client) :]))
            send(b"POST /pl")
            wait_until(lambda: is_cut(client))  # noqa: B023
        refused(receive(receiving), 408)
        wait_until(lambda: send(b"POST /pl") and is_cut(sending))
        assert server.out.count("GET /openapi.json") < 100  # of 1,000: it was not served on
        lock.close()
        answer = receive_answer(working)
        assert statuses(answer) == [STORED] and CLOSE not in answer


# slow clients


LATE = {  # what a client has sent, and whether it is told
    b"": False,
    b"POST /pl": False,
    NOWHERE: False,  # the next request
    HALF_A_BODY[:-1]: True,
    HALF_A_BODY: True,
    HEAD + CHUNKS + b"9\r\n{": True,
    HEAD + CHUNKS + b"1\r\n{": True,
    HEAD: False,  # and bytes of another line
    HEAD + b"Content-Length: 9999\r\n\r\n": True,  # and bytes of the body
}


def test_who_is_late_is_cut_off(serve):
    """A client that can be told is told. So is one that sends nothing more, or a byte at a time;
    one that takes no answer can't be.

    The limit is that of a request: a busy client goes on, until it is late with one.
    """
    server, request = serve(SHORT, "--keep-alive=1", WEB_CONCURRENCY="1"), post(MONSTERA)
    with contextlib.ExitStack() as stack:
        connections = (stack.enter_context(server.connect()) for _ in range(len(LATE) + 2))
        busy, sending, *clients = connections
        sending.sendall((GET + b"\r\n") * 1000)  # more than the system keeps for a client
        for client, half in zip(clients, LATE, strict=True):
            client.sendall(half)
        assert statuses(receive_answer(clients[2])) == [404]

        def all_are_cut() -> bool:
            for piece in (request[:7], request[7:-9], request[-9:]):
                busy.sendall(piece)
                time.sleep(0.01)  # so that it comes in pieces
            assert statuses(receive_answer(busy)) == [STORED]
            for client in clients[-2:]:
                with contextlib.suppress(ConnectionError):
                    client.send(b"x")
            return all(map(is_cut, [*clients, sending]))

        wait_until(all_are_cut)
        busy.sendall(request + HALF_A_BODY)
        assert statuses(receive(busy)) == [STORED, 408]
        for client, is_told in zip(clients, LATE.values(), strict=True):
            answer = b""
            with contextlib.suppress(ConnectionError):  # what it sends to who is gone is refused
                answer = client.recv(2**16)
            assert "did not come in whole" in refused(answer, 408) if is_told else not answer


def test_what_has_come_before_a_client_is_cut_is_read():
    """Also where it was idle for too long, or the worker ends; and nothing after it."""
    near, far = gevent.socket.socketpair()
    with near, far:
        client = Client(near, limit=0)
        far.sendall(NOWHERE)
        client.cut()
        assert client.recv(2**13) == NOWHERE
        with pytest.raises(ConnectionResetError):
            client.recv(2**13)


def test_the_limits_are_those_that_are_documented():
    """Waiting for each of them would take long."""
    stated = {what: f"{limit} {then}" for what, limit, then in table(r"what \| limit")}
    for what, limit in (
        ("time for a request to arrive", f"{LIMIT:.0f} seconds"),
        ("time to take the answer", f"{LIMIT:.0f} seconds"),
        ("time to read the last answer", f"{LAST_LIMIT:.0f} seconds"),
        ("time that a request waits", f"{ADD_LIMIT:.0f} seconds"),
        ("connections to a worker", f"from {FULL * 1000:.0f} on"),
    ):
        assert [name for name in stated if name.startswith(what) and limit in stated[name]]


# the end


def test_a_stop_under_load_drops_nothing(serve, database):
    """What has begun is finished. Who has not been accepted is there for the next server."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        options = [PATIENT, "--keep-alive=1", "--graceful-timeout=600"]
        server = serve(*options, listener=listener, WEB_CONCURRENCY="1")
        writers = stack.enter_context(Writers(server.port))
        begun, plant = stack.enter_context(server.connect()), new_plant()
        begun.sendall(post(plant, b"Expect: 100-continue")[:-9])
        assert begun.recv(2**16).startswith(b"HTTP/1.1 100")
        assert writers.goes_on()
        busy = stack.enter_context(server.connect())

        def says_close() -> bool:
            busy.sendall(NOWHERE)
            return CLOSE in receive_answer(busy)

        assert not says_close()
        server.process.terminate()
        wait_until(says_close)
        begun.sendall(post(plant)[-9:])
        answer = receive(begun)
        assert statuses(answer) == [STORED] and CLOSE in answer
        begun.close()
        busy.close()
        assert server.wait() == 0
        assert (list(writers.answers), writers.failures) == ([STORED], [])
        listener.close()
    assert not Path(f"{database}-wal").exists()  # the connections were closed, not just dropped
    assert read_names(server.url) == writers.acknowledged | {plant["id"]: plant["name"]}


def test_a_stop_waits_for_the_storage_but_not_for_clients(serve, database):
    """By Ctrl+C, which all processes get."""
    server = serve(SHORT, "--keep-alive=600", "--graceful-timeout=600", WEB_CONCURRENCY="1")
    with contextlib.ExitStack() as stack:
        idle, half, working = (stack.enter_context(server.connect()) for _ in range(3))
        idle.sendall(NOWHERE)
        assert statuses(receive_answer(idle)) == [404]
        with lock_held(database):
            working.sendall(post(MONSTERA, b"Expect: 100-continue"))
            half.sendall(b"POST /pl")
            assert server.request("GET", "/nowhere")[0] == 404  # it has read what came before
            os.killpg(server.process.pid, signal.SIGINT)
            assert receive(idle) == receive(half) == b""
        wait, answer = receive(working).split(b"\r\n\r\n", 1)
        assert wait == b"HTTP/1.1 100 Continue"
        assert statuses(answer) == [STORED] and CLOSE in answer
        assert server.wait() == 0
