"""Clients that are slow, hostile or too many must not keep others out, and must not fill memory."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.support.server import PATIENT, SHORT, STORED, Server, memory, receive, wait_until
from tests.support.storage import lock_held
from tests.support.wire import (
    BASIC,
    GET,
    HALF_A_BODY,
    HEAD,
    MONSTERA,
    NOWHERE,
    new_plant,
    post,
    receive_response,
    statuses,
)
from tests.test_worker import begin, is_closed
from tests.test_wsgi import get, serve_applications

CONNECTIONS = 64  # Connections at the same time in post_all().
EACH = 150  # Requests on each of them.
# Kinds of bad clients: what they send first, and what they send then over and over. None of them
# reads a response.
KINDS = {
    "nothing": (b"", b""),
    "half a head": (b"POST /pl", b""),
    "half a body": (HALF_A_BODY, b""),
    "idle": (NOWHERE, b""),
    "a refused body without its last byte": (post(b"x" * 65536, head=BASIC)[:-1], b""),
    "a byte at a time": (HEAD, b"x"),
    "holding the connection after the response": (GET + b"Connection: close\r\n\r\n", b"x"),
    "pipelining": ((GET + b"\r\n") * 30, b"x"),
    "taking no 100 Continue": ((GET + b"Expect: 100-continue\r\n\r\n") * 130, b"x"),
    "without end": (HEAD + b"Content-Length: 9999999999\r\n\r\n", b"x" * 2**14),
}


def send_on(client: socket.socket, data: bytes) -> bool:
    """Send as much of `data` as fits without waiting. Return whether the connection is broken."""
    try:
        client.send(data, socket.MSG_DONTWAIT)
    except OSError as error:
        return isinstance(error, ConnectionError)
    return False


def test_slow_clients_of_each_kind_are_disconnected(serve, send):
    """Meanwhile, a good client is served."""
    server = serve(SHORT, "--keep-alive=1")
    clients = {send(server, data): more for data, more in KINDS.values()}

    def are_disconnected() -> bool:
        assert server.post(new_plant())[0] == STORED
        for client, more in list(clients.items()):
            if (more or is_closed(client)) and send_on(client, more or b"x"):
                del clients[client]
        return not clients

    wait_until(are_disconnected)


@pytest.mark.parametrize("kind", KINDS)
def test_twice_as_many_clients_as_the_worker_takes_keep_no_good_client_out(serve, send, kind):
    """A good client connects for each of its requests, and each is answered.

    The worker stays alive, and needs less than 50 MiB more for all these clients.
    """
    data, more = KINDS[kind]
    options = ["--keep-alive=600", "--worker-connections=300"]
    server = serve(PATIENT, *options, WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == STORED
    (worker,) = server.workers(1)
    before = memory(worker)
    others = [send(server, data) for _ in range(600)]
    for _ in range(50):
        for client in others if more else ():
            send_on(client, more)
        assert server.post(new_plant())[0] == STORED
    assert server.workers(1) == [worker]
    assert memory(worker) - before < 50  # MiB. Each connection may send a request of 32 KiB.


def test_a_client_that_has_just_connected_gets_time_for_its_request(serve, database, send):
    """All others have sent theirs, and wait for the database. A few slots are free."""
    options = "--worker-class=tests.support.workers.Sparing", "--worker-connections=100"
    server = serve(*options, WEB_CONCURRENCY="1")
    assert server.health() == 200
    with lock_held(database):
        working = [begin(send(server), MONSTERA) for _ in range(90)]
        for client in working:
            client.sendall(post(MONSTERA)[-9:])
        silent = [send(server) for _ in range(3)]
        assert server.request("GET", "/nowhere")[0] == 404  # It came after the silent ones.
        for client in silent:
            client.sendall(NOWHERE)
            assert statuses(receive_response(client)) == [404]
    for client in working:
        assert statuses(receive_response(client)) == [STORED]


def test_a_response_without_end_ends_at_the_limit_of_a_shutdown(tmp_path):
    """After --max-requests, the master kills no worker, and replaces one only when it has ended."""
    options = ["--max-requests=2", "--graceful-timeout=1"]
    endless = b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serve_applications(tmp_path, "worker.Worker", *options) as server:
        (first,) = server.workers(1)
        with server.connect() as client:
            client.sendall(endless)
            assert client.recv(100)
            assert get(server, "/one_block")
            assert not receive(client).endswith(b"0\r\n\r\n")
        wait_until(lambda: server.workers(1) != [first])
        with server.connect() as client:
            client.sendall(endless)
            assert client.recv(100)
            assert server.stop() == 0


def post_all(server: Server, bodies: list[bytes]) -> list[int]:
    """Post all bodies, and return the statuses of the responses.

    Each connection sends EACH requests at once, and CONNECTIONS of them do so at the same time.
    """
    requests = list(map(post, bodies))
    batches = [b"".join(requests[i : i + EACH]) for i in range(0, len(requests), EACH)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        responses = b"".join(pool.map(partial(server.send, ends=True), batches))
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", responses)]


def test_memory_does_not_grow_with_what_was_stored_or_refused(serve):
    """15,000 plants, 15,000 refusals and 5,000 connections cost each worker less than 5 MiB.

    Before the measurement, the workers get some of each, to allocate what they allocate only once.
    """
    server = serve()

    def store(first: int, end: int) -> list[float]:
        plants = [b'{"id": %d, "name": "Monstera"}' % number for number in range(first, end)]
        assert post_all(server, plants).count(STORED) == end - first
        return list(map(memory, server.workers()))

    def refuse() -> list[float]:
        for _ in range(5_000):
            server.connect().close()
        bodies = (b'{"id": %d, "name": 5}', b'{"id": %d, "name": "another"}', b"%d nonsense")
        responses = post_all(server, [body % number for body in bodies for number in range(5_000)])
        assert (responses.count(400), responses.count(409)) == (10_000, 5_000)
        return list(map(memory, server.workers()))

    store(0, 5_000)
    before, *stages = refuse(), store(5_000, 20_000), refuse()
    grown = max(now - then for stage in stages for now, then in zip(stage, before, strict=True))
    assert grown < 5
