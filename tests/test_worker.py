"""The worker: what it makes of bytes, slow clients, many clients and SIGTERM, in real processes."""

import contextlib
import os
import re
import select
import signal
import socket
import time
from pathlib import Path

import gevent
import pytest
from gunicorn.http.errors import LimitRequestHeaders

from tests.support.server import PATIENT, SHORT, STORED, receive, wait_until
from tests.support.storage import lock_held, read_names
from tests.support.wire import (
    CHUNKED,
    CLOSE,
    GET,
    HALF_A_BODY,
    HEAD,
    MONSTERA,
    NOWHERE,
    Writers,
    new_plant,
    post,
    receive_response,
    refused,
    statuses,
)
from worker import MAX_REQUEST_BYTES, Connection


def begin(client: socket.socket, plant: object) -> socket.socket:
    """Send a plant but for its last 9 bytes; return once the service reads the body."""
    client.sendall(post(plant, b"Expect: 100-continue")[:-9])
    assert client.recv(2**16) == b"HTTP/1.1 100 Continue\r\n\r\n"
    return client


def is_cut(client: socket.socket) -> bool:
    """Whether the server has ended its side of a connection."""
    poll = select.poll()  # unlike select(), for any number of descriptors
    poll.register(client, select.POLLRDHUP)
    return bool(poll.poll(0))


def is_held(client: socket.socket) -> bool:
    """Whether a process still has the socket at the other end of a connection open."""
    port = f":{client.getsockname()[1]:04X}"
    rows = map(str.split, Path("/proc/net/tcp").read_text().splitlines())
    return any(row[2].endswith(port) and row[9] != "0" for row in rows)  # The inode is 0 then.


def test_headers_of_a_proxy_change_nothing(server):
    """gunicorn believes such headers from loopback, unless it is told not to."""
    names = (b"SCRIPT_NAME", b"PATH_INFO", b"X-Forwarded-For", b"X-Forwarded-Proto")
    lines = [name + b": /x" for name in names]
    ends = [b"X-Forwarded-Ssl: on", b"X-Request-ID: proxy", b"Connection: close"]
    assert statuses(server.send(post(MONSTERA, *lines, *ends))) == [STORED]
    logged = server.logged("proxy")
    assert (logged["client"], logged["request"]) == ("127.0.0.1", "POST /plants")


def test_a_head_with_too_many_parts_is_refused(server):
    """64 lines and 32 KiB, but no more, whatever the request before it had."""
    get = GET + b"Connection: close\r\n"
    lines = get + b"X: a\r\n" * 61 + b"X: a"
    large = (get + (b"X: " + b"x" * 8000 + b"\r\n") * 4 + b"X: ").ljust(MAX_REQUEST_BYTES - 4, b"x")
    for head, more in ((lines, b"\r\nX: a"), (large, b"x")):
        assert statuses(server.send(NOWHERE + head + b"\r\n\r\n")) == [404, 200]
        refused(server.send(head + more + b"\r\n\r\n"), 431)


def test_a_connection_ends_if_any_of_its_options_says_close(server):
    """libwww-perl sends `TE, close` (RFC 9112 section 9.6)."""
    for options in (b"TE, close", b"close", b"Close,TE", b"keep-alive, close"):
        response = server.send(NOWHERE[:-2] + b"Connection: " + options + b"\r\n\r\n" + NOWHERE)
        assert statuses(response) == [404] and CLOSE in response


def test_each_second_has_a_date_of_its_own(server):
    def date() -> bytes:
        return re.search(rb"\r\nDate: (.*)\r\n", server.send(NOWHERE, ends=True))[1]

    first = date()
    wait_until(lambda: date() != first)


def test_a_client_that_reads_its_last_response_has_a_limit_of_its_own(serve, send):
    """Here the limit for a request is infinite. A client that goes on sending is closed as well."""
    server = serve("--worker-class=tests.support.workers.Lingering", WEB_CONCURRENCY="1")
    last = NOWHERE[:-2] + b"Connection: close\r\n\r\n"
    silent, sending = send(server, last), send(server, last)
    assert receive(silent) and receive(sending)

    def are_closed() -> bool:
        with contextlib.suppress(ConnectionError):
            sending.send(b"x")
        return not is_held(silent) and not is_held(sending)

    wait_until(are_closed)


def test_clients_that_send_all_their_requests_at_once_are_served_in_turn(server, send):
    """One request of each in a round, which takes few new clients: other workers want some, too."""
    (worker,) = server.workers(1)
    clients = {send(server, NOWHERE): name for name in (b"one", b"other")}
    for client in clients:
        receive_response(client)
    os.kill(worker, signal.SIGSTOP)  # until all has come
    for client, name in clients.items():
        client.sendall(NOWHERE.replace(b"nowhere", b"turns/" + name) * 150)
    for _ in range(9):
        send(server, NOWHERE.replace(b"nowhere", b"turns/new"))
    os.kill(worker, signal.SIGCONT)
    wait_until(lambda: server.out.count("GET /turns/") == 309)
    order = re.findall(r"GET /turns/(\w+)", server.out)
    assert 10 <= order[:150].count("one") <= 140  # gevent runs 50 of one, if only they are ready
    first, *_, last = (place for place, name in enumerate(order) if name == "new")
    assert last - first > 10


def test_who_has_been_waited_for_longest_makes_room(serve, database, send):
    """Whatever it does not do. Who waits for the database is not cut, and holds up nobody."""
    server = serve(PATIENT, "--worker-connections=10", WEB_CONCURRENCY="1")
    assert server.health() == 200
    with lock_held(database):
        working = begin(send(server), MONSTERA)
        working.sendall(post(MONSTERA)[-9:])
        receiving = begin(send(server), MONSTERA)
        idle = send(server, NOWHERE)
        assert receive_response(idle)
        order = [receiving, idle, send(server)]
        for _ in range(5):
            send(server, b"POST /pl")
        while order:
            assert not any(map(is_cut, order))
            send(server, b"POST /pl")
            wait_until(lambda: is_cut(order[0]))
            order.pop(0)
        refused(receive(receiving), 408)
    answer = receive_response(working)
    assert statuses(answer) == [STORED] and CLOSE not in answer


LATE = {  # what a client has sent, and whether it is told
    b"": False,
    b"POST /pl": False,
    NOWHERE: False,  # the next request
    HALF_A_BODY[:-1]: True,
    HEAD + CHUNKED + b"1\r\n{": True,
    HEAD: False,  # and bytes of another line
    HEAD + b"Content-Length: 9999\r\n\r\n": True,  # and bytes of the body
}


def test_who_is_late_is_cut_off(serve, send):
    """Who can be told is told. A busy client goes on, until it is late with a request."""
    server, request = serve(SHORT, "--keep-alive=1", WEB_CONCURRENCY="1"), post(MONSTERA)
    clients = [send(server, half) for half in LATE]
    assert statuses(receive_response(clients[2])) == [404]
    busy, sending = send(server), send(server, (GET + b"\r\n") * 1000)

    def all_are_cut() -> bool:
        for piece in (request[:7], request[7:-9], request[-9:]):
            busy.sendall(piece)
            time.sleep(0.01)  # so that it comes in pieces
        assert statuses(receive_response(busy)) == [STORED]
        for client in clients[-2:]:
            with contextlib.suppress(ConnectionError):
                client.send(b"x")
        return all(map(is_cut, [*clients, sending]))

    wait_until(all_are_cut)
    assert server.out.count("GET /openapi.json") < 100  # of 1,000: the system keeps few answers
    busy.sendall(request + HALF_A_BODY)
    assert statuses(receive(busy)) == [STORED, 408]
    for client, is_told in zip(clients, LATE.values(), strict=True):
        answer = b""
        with contextlib.suppress(ConnectionError):  # what it sends to who is gone is refused
            answer = client.recv(2**16)
        assert "incomplete or too slow" in refused(answer, 408) if is_told else not answer


def test_what_has_come_before_a_client_is_cut_is_read():
    """Also where it was idle for too long, or the worker ends; and nothing after it."""
    near, far = gevent.socket.socketpair()
    with near, far:
        connection = Connection(near, limit=0)
        far.sendall(NOWHERE)
        connection.abort()
        assert connection.recv(2**13) == NOWHERE
        with pytest.raises(TimeoutError):
            connection.recv(2**13)


def test_a_request_takes_as_much_as_it_may_in_pieces_of_any_size():
    near, far = gevent.socket.socketpair()
    with near, far:
        connection = Connection(near, limit=0)
        far.sendall(bytes(MAX_REQUEST_BYTES + 1))
        assert sum(len(connection.recv(5000)) for _ in range(7)) == MAX_REQUEST_BYTES
        with pytest.raises(LimitRequestHeaders):
            connection.recv(5000)


def test_a_stop_under_load_drops_nothing(serve, database, send):
    """What has begun is finished. Who has not been accepted is there for the next server."""
    options = [PATIENT, "--keep-alive=1", "--graceful-timeout=600"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server, plant = serve(*options, listener=listener, WEB_CONCURRENCY="1"), new_plant()
        with Writers(server.port) as writers, begin(send(server), plant) as begun:
            assert writers.goes_on()
            busy = send(server)

            def says_close() -> bool:
                busy.sendall(NOWHERE)
                return CLOSE in receive_response(busy)

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


def test_a_stop_waits_for_the_storage_but_not_for_clients(serve, database, send):
    """By Ctrl+C, which all processes get."""
    server = serve(SHORT, "--keep-alive=600", "--graceful-timeout=600", WEB_CONCURRENCY="1")
    idle = send(server, NOWHERE)
    assert statuses(receive_response(idle)) == [404]
    with lock_held(database):
        working = begin(send(server), MONSTERA)
        working.sendall(post(MONSTERA)[-9:])
        half = send(server, b"POST /pl")
        assert server.request("GET", "/nowhere")[0] == 404  # it has read what came before
        os.killpg(server.process.pid, signal.SIGINT)
        assert receive(idle) == receive(half) == b""
    answer = receive(working)
    assert statuses(answer) == [STORED] and CLOSE in answer
    assert server.wait() == 0


def test_a_request_that_is_still_arriving_when_the_worker_stops_soon_gets_a_408(serve, send):
    """Its limit would be infinite here if the worker did not stop."""
    options = ["--worker-class=tests.support.workers.Lingering", "--graceful-timeout=600"]
    server = serve(*options, WEB_CONCURRENCY="1")
    with begin(send(server), MONSTERA) as begun:
        server.process.terminate()
        assert "incomplete or too slow" in refused(receive(begun), 408)
    assert server.wait() == 0
