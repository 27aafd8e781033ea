"""The worker, in real processes: HTTP, slow clients, more clients than fit, and shutdowns."""

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

from tests.support.server import PATIENT, SHORT, STORED, Server, receive, wait_until
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
    answers,
    new_plant,
    post,
    receive_response,
    refused,
    statuses,
)
from worker import MAX_REQUEST_BYTES, Connection

RESTLESS = "--worker-class=tests.support.workers.Restless"


def begin(client: socket.socket, plant: object) -> socket.socket:
    """Send a plant without its last 9 bytes. Return once the service has begun to read the body."""
    client.sendall(post(plant, b"Expect: 100-continue")[:-9])
    assert client.recv(2**16) == b"HTTP/1.1 100 Continue\r\n\r\n"
    return client


def is_closed(client: socket.socket) -> bool:
    """Tell if the server has closed its side of a connection, or all of it."""
    poll = select.poll()  # select() takes no descriptor above 1,023.
    poll.register(client, select.POLLRDHUP)
    return bool(poll.poll(0))


def is_held(client: socket.socket) -> bool:
    """Tell if a process still has the socket at the other end of a connection open."""
    port = f":{client.getsockname()[1]:04X}"
    rows = map(str.split, Path("/proc/net/tcp").read_text().splitlines())
    # The kernel keeps a socket for a while after its process has closed it, but without an inode.
    return any(row[2].endswith(port) and row[9] != "0" for row in rows)


def test_a_client_can_not_change_the_path_or_its_address_with_headers_of_a_proxy(server):
    """By default, gunicorn believes such headers if they come from loopback."""
    names = (b"SCRIPT_NAME", b"PATH_INFO", b"X-Forwarded-For", b"X-Forwarded-Proto")
    lines = [name + b": /x" for name in names]
    ends = [b"X-Forwarded-Ssl: on", b"X-Request-ID: proxy", b"Connection: close"]
    assert statuses(server.send(post(MONSTERA, *lines, *ends))) == [STORED]
    logged = server.logged("proxy")
    assert (logged["client"], logged["request"]) == ("127.0.0.1", "POST /plants")


def test_a_head_of_more_than_64_lines_or_32_kib_gets_a_431(server):
    """A request before it on the same connection does not count."""
    get = GET + b"Connection: close\r\n"
    lines = get + b"X: a\r\n" * 61 + b"X: a"
    large = (get + (b"X: " + b"x" * 8000 + b"\r\n") * 4 + b"X: ").ljust(MAX_REQUEST_BYTES - 4, b"x")
    for head, more in ((lines, b"\r\nX: a"), (large, b"x")):
        assert statuses(server.send(NOWHERE + head + b"\r\n\r\n")) == [404, 200]
        refused(server.send(head + more + b"\r\n\r\n"), 431)


def test_a_client_that_sends_close_among_other_connection_options_gets_one_response(server):
    """libwww-perl sends `TE, close` (RFC 9112 section 9.6)."""
    for options in (b"TE, close", b"close", b"Close,TE", b"keep-alive, close"):
        response = server.send(NOWHERE[:-2] + b"Connection: " + options + b"\r\n\r\n" + NOWHERE)
        assert statuses(response) == [404] and CLOSE in response


def test_a_client_of_http_1_0_gets_no_100_continue(server):
    """HTTP/1.0 does not have this status, so its Expect is ignored (RFC 9110 section 10.1.1)."""
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Expect: 100-continue\r\nContent-Length: 9"
    refused(server.send(head + b"\r\n\r\n", ends=True), 408)


def test_a_204_has_no_content_length(server):
    """RFC 9110 section 8.6 forbids it."""
    response = server.send(NOWHERE.replace(b"GET /nowhere", b"OPTIONS /plants"), ends=True)
    assert response.startswith(b"HTTP/1.1 204 ")
    assert b"content-length" not in response.lower()


def test_a_404_repeats_the_path_in_utf_8(server):
    """The client sent it percent-encoded. PEP 3333 hands it on as if its bytes were Latin-1."""
    response = server.send(NOWHERE.replace(b"nowhere", b"%F0%9F%8C%B5"), ends=True)
    assert "nothing at /🌵;".encode() in response and refused(response, 404)


def test_a_bug_in_the_application_causes_a_500_and_is_logged(tmp_path):
    """When the `with` block ends, Server finds the traceback in the log, and raises."""
    options = "--worker-class=tests.support.workers.Failing"
    logged = pytest.raises(AssertionError, match=r"(?s)application failed\n.*\nZeroDivisionError")
    with logged, Server(tmp_path, options, WEB_CONCURRENCY="1") as server:
        ((status, body), another) = answers(server.send(NOWHERE * 2, ends=True))
        assert (status, body) == another == (500, {"error": 500, "message": body["message"]})
        assert len(server.workers(1)) == 1


@pytest.mark.parametrize("before", [b"", NOWHERE])
def test_a_head_request_that_is_refused_gets_no_body(server, before):
    """RFC 9110 section 9.3.2. It may have arrived with another one, or in pieces."""
    head = b"HEAD /livez HTTP/1.1\r\nHost: localhost\r\n"
    refused_heads = {
        b"HEAD /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n": 414,
        head + b"Expect: a cookie\r\n\r\n": 417,
        head + b"X: a\r\n" * 64 + b"\r\n": 431,
        head + b"Transfer-Encoding: gzip, chunked\r\n\r\n": 501,
        b"\r\n" + head + b"a line without a colon\r\n\r\n": 400,
    }
    for data, status in refused_heads.items():
        received = server.send(before + data)
        body = received.rpartition(b"HTTP/1.1 ")[2]
        assert body.startswith(b"%d " % status) and body.endswith(b"\r\n\r\n")
    with server.connect() as client:
        for piece in (b"HE", b"AD", head[4:], b"Expect: a cookie\r\n\r\n"):
            client.sendall(piece)
            time.sleep(0.01)  # Otherwise the server might receive all pieces as one.
        assert receive(client).endswith(b"\r\n\r\n")


def test_an_application_learns_the_version_of_http_that_its_client_speaks(server):
    """HTTP/1.2 has the rules of HTTP/1.1, so it needs a Host, too."""
    request = NOWHERE.replace(b"HTTP/1.1", b"HTTP/1.2")
    assert statuses(server.send(request, ends=True)) == [404]


def test_the_date_of_a_response_is_not_that_of_an_earlier_second(server):
    """The worker formats the date once for each second, and must not keep it for longer."""

    def date() -> bytes:
        return re.search(rb"\r\nDate: (.*)\r\n", server.send(NOWHERE, ends=True))[1]

    first = date()
    wait_until(lambda: date() != first)


def test_a_client_that_does_not_close_its_connection_after_the_last_response_is_disconnected(
    serve, send
):
    """The limit for this is LINGER_TIMEOUT. It also holds for a client that goes on sending.

    There is no other limit in this test: requests may take any time.
    """
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
    """The worker answers one request of each connection in a round.

    In each round it accepts few new connections, so that other workers get some of them.
    """
    (worker,) = server.workers(1)
    clients = {send(server, NOWHERE): name for name in (b"one", b"other")}
    for client in clients:
        receive_response(client)
    os.kill(worker, signal.SIGSTOP)  # Let all requests arrive before the worker reads any of them.
    for client, name in clients.items():
        client.sendall(NOWHERE.replace(b"nowhere", b"turns/" + name) * 150)
    for _ in range(9):
        send(server, NOWHERE.replace(b"nowhere", b"turns/new"))
    os.kill(worker, signal.SIGCONT)
    wait_until(lambda: server.out.count("GET /turns/") == 309)
    order = re.findall(r"GET /turns/(\w+)", server.out)
    # gevent may serve 50 requests of one connection before it checks the other one.
    assert 10 <= order[:150].count("one") <= 140
    first, *_, last = (place for place, name in enumerate(order) if name == "new")
    assert last - first > 10


def test_a_new_client_replaces_the_one_that_has_kept_the_worker_waiting_longest(
    serve, database, send
):
    """The worker may be waiting for a first request, for the rest of one or for the next one.

    A client whose plant waits for the database stays connected.
    """
    server = serve(RESTLESS, "--worker-connections=20", WEB_CONCURRENCY="1")
    assert server.health() == 200
    (worker,) = server.workers(1)
    with lock_held(database):
        working = begin(send(server), MONSTERA)
        working.sendall(post(MONSTERA)[-9:])
        pipelined = send(server, NOWHERE + post(MONSTERA))
        assert statuses(receive_response(pipelined)) == [404]
        receiving = begin(send(server), MONSTERA)
        idle = send(server, NOWHERE)
        assert receive_response(idle)
        order = [receiving, idle, send(server), send(server)]
        for _ in range(12):
            send(server, b"POST /pl")
        for count in (1, 1, 2):  # Clients that come at the same time each replace another one.
            assert not any(map(is_closed, order))
            os.kill(worker, signal.SIGSTOP)
            for _ in range(count):
                send(server, b"POST /pl")
            os.kill(worker, signal.SIGCONT)
            wait_until(lambda count=count: all(map(is_closed, order[:count])))
            del order[:count]
        refused(receive(receiving), 408)
    for client in (working, pipelined):
        response = receive_response(client)
        assert statuses(response) == [STORED] and CLOSE not in response


def test_a_new_client_replaces_another_one_however_few_connections_are_allowed(serve, send):
    """This holds even if the tenth that is kept free is less than one connection."""
    options = {count: f"--worker-connections={count}" for count in (1, 9)}
    servers = {n: serve(PATIENT, options[n], WEB_CONCURRENCY="1") for n in options}
    for count, server in servers.items():
        silent = [send(server) for _ in range(count)]
        assert server.request("GET", "/nowhere")[0] == 404
        wait_until(lambda silent=silent: any(map(is_closed, silent)))


# What late clients have sent. True says that only the body is incomplete, so the client gets a 408.
LATE = {
    b"": False,
    b"POST /pl": False,
    NOWHERE: False,  # It gets a 404, and its next request never comes.
    HALF_A_BODY[:-1]: True,
    HEAD + CHUNKED + b"1\r\n{": True,
    HEAD: False,  # The test goes on to send bytes of another header line.
    HEAD + b"Content-Length: 9999\r\n\r\n": True,  # The test goes on to send bytes of the body.
}


def test_a_late_client_is_disconnected_and_gets_a_408_if_only_its_body_is_late(serve, send):
    """A client that sends one request after the other stays connected until a request is late."""
    server, request = serve(SHORT, "--keep-alive=1", WEB_CONCURRENCY="1"), post(MONSTERA)
    clients = [send(server, half) for half in LATE]
    assert statuses(receive_response(clients[2])) == [404]
    busy, sending = send(server), send(server, (GET + b"\r\n") * 1000)

    def all_are_closed() -> bool:
        for piece in (request[:7], request[7:-9], request[-9:]):
            busy.sendall(piece)
            time.sleep(0.01)  # Otherwise the server might receive all pieces as one.
        assert statuses(receive_response(busy)) == [STORED]
        for client in clients[-2:]:
            with contextlib.suppress(ConnectionError):
                client.send(b"x")
        return all(map(is_closed, [*clients, sending]))

    wait_until(all_are_closed)
    # `sending` sent 1,000 requests and read no response. Few responses fit into the system's
    # buffers, so the worker stopped early.
    assert server.out.count("GET /openapi.json") < 100
    busy.sendall(request + HALF_A_BODY)
    assert statuses(receive(busy)) == [STORED, 408]
    for client, is_body_late in zip(clients, LATE.values(), strict=True):
        response = b""
        # The connection is reset if the client has sent bytes after the server had closed it.
        with contextlib.suppress(ConnectionError):
            response = client.recv(2**16)
        assert "incomplete or too slow" in refused(response, 408) if is_body_late else not response


def test_an_aborted_connection_still_delivers_a_request_that_has_arrived_and_no_more():
    """The worker may abort an idle connection at the moment when a request arrives."""
    near, far = gevent.socket.socketpair()
    with near, far:
        connection = Connection(near, limit=0)
        far.sendall(NOWHERE)
        connection.abort()
        assert connection.recv(2**13) == NOWHERE
        with pytest.raises(TimeoutError):
            connection.recv(2**13)


def test_an_aborted_connection_is_closed_however_much_its_client_has_sent():
    """Its slot is needed. Only connections that were not aborted wait for their clients."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near = gevent.socket.socket(fileno=listener.accept()[0].detach())
    with near, far:
        far.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                far.send(bytes(2**16))
        connection = Connection(near, limit=0)
        connection.abort()
        connection.close()
        with pytest.raises(ConnectionError):  # What had not been read has reset the connection.
            far.send(b"x")


def test_a_request_is_refused_after_32_kib_whatever_the_size_of_its_pieces():
    near, far = gevent.socket.socketpair()
    with near, far:
        connection = Connection(near, limit=0)
        far.sendall(bytes(MAX_REQUEST_BYTES + 1))
        assert sum(len(connection.recv(5000)) for _ in range(7)) == MAX_REQUEST_BYTES
        with pytest.raises(LimitRequestHeaders):
            connection.recv(5000)


def test_a_stop_under_load_answers_every_request_that_has_begun(serve, database, send):
    """No client sees an error. A connection that no worker has accepted waits for the next server.

    After SIGTERM, each response says that its connection ends.
    """
    options = [PATIENT, "--keep-alive=1", "--graceful-timeout=600"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server, plant = serve(*options, listener=listener, WEB_CONCURRENCY="1"), new_plant()
        with Writers(server.port) as writers, begin(send(server), plant) as begun:
            writers.wait_for_more()
            busy = send(server)

            def says_close() -> bool:
                busy.sendall(NOWHERE)
                return CLOSE in receive_response(busy)

            assert not says_close()
            server.process.terminate()
            wait_until(says_close)
            begun.sendall(post(plant)[-9:])
            response = receive(begun)
            assert statuses(response) == [STORED] and CLOSE in response
            begun.close()
            busy.close()
            assert server.wait() == 0
            assert (list(writers.answers), writers.failures) == ([STORED], [])
            listener.close()
    # SQLite removes this file if the last connection to the database is closed in order.
    assert not Path(f"{database}-wal").exists()
    assert read_names(server.url) == writers.acknowledged | {plant["id"]: plant["name"]}


def test_a_stop_answers_the_requests_on_connections_that_nobody_has_accepted_yet(serve, send):
    """Closing the listener would reset them."""
    server = serve(RESTLESS, WEB_CONCURRENCY="1")
    assert server.request("GET", "/nowhere")[0] == 404
    (worker,) = server.workers(1)
    os.kill(worker, signal.SIGSTOP)  # Let all requests arrive before the worker accepts any.
    clients = [send(server, NOWHERE) for _ in range(50)]
    server.process.terminate()
    wait_until(lambda: "Handling signal: term" in server.err)
    os.kill(worker, signal.SIGTERM)  # The master sends it as well, but nobody knows when.
    os.kill(worker, signal.SIGCONT)
    for client in clients:
        with client:
            assert statuses(receive(client)) == [404]
    assert server.wait() == 0


def test_a_worker_that_ends_answers_the_requests_on_connections_that_it_has_just_accepted(
    serve, send
):
    """The first of the requests that arrive together reaches --max-requests.

    The worker still answers those whose connections it has accepted. The next worker answers the
    others.
    """
    server = serve(RESTLESS, "--max-requests=2", WEB_CONCURRENCY="1")
    assert server.request("GET", "/nowhere")[0] == 404
    (worker,) = server.workers(1)
    os.kill(worker, signal.SIGSTOP)  # Let all requests arrive before the worker reads any of them.
    clients = [send(server, data) for data in (NOWHERE, post(MONSTERA), post(MONSTERA))]
    for client in clients:
        client.shutdown(socket.SHUT_WR)
    os.kill(worker, signal.SIGCONT)
    received = [statuses(receive(client)) for client in clients]
    assert received == [[404], [STORED], [STORED]]


def test_a_stop_by_ctrl_c_waits_for_the_storage_but_not_for_clients(serve, database, send):
    """Ctrl+C sends SIGINT to the master and all workers.

    A plant that waits for the database is stored. A client that is idle, or has sent half of a
    head, is disconnected.
    """
    server = serve(SHORT, "--keep-alive=600", "--graceful-timeout=600", WEB_CONCURRENCY="1")
    idle = send(server, NOWHERE)
    assert statuses(receive_response(idle)) == [404]
    # A client whose request is late is disconnected, even if the first bytes of it came with the
    # request before. An idle one may stay for 600 seconds here.
    late = send(server, NOWHERE + b"POST /pl")
    assert receive(send(server, b"POST /pl")) == b""
    assert statuses(receive(late)) == [404] and not is_closed(idle)
    with lock_held(database):
        working = begin(send(server), MONSTERA)
        working.sendall(post(MONSTERA)[-9:])
        half = send(server, b"POST /pl")
        # This response shows that the worker has read the half of a head, which came before.
        assert server.request("GET", "/nowhere")[0] == 404
        os.killpg(server.process.pid, signal.SIGINT)
        assert receive(idle) == receive(half) == b""
    response = receive(working)
    assert statuses(response) == [STORED] and CLOSE in response
    assert server.wait() == 0


def test_a_request_that_is_still_arriving_during_a_stop_gets_a_408_soon(serve, send):
    """The limit for a request is infinite in this test as long as the worker does not stop."""
    options = ["--worker-class=tests.support.workers.Lingering", "--graceful-timeout=600"]
    server = serve(*options, WEB_CONCURRENCY="1")
    with begin(send(server), MONSTERA) as begun:
        server.process.terminate()
        assert "incomplete or too slow" in refused(receive(begun), 408)
    assert server.wait() == 0
