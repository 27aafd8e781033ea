"""Clients that are slow, rude or too many keep nobody out, and leave nothing in memory."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.support.server import PATIENT, SHORT, STORED, Server, memory, wait_until
from tests.support.wire import BASIC, GET, HALF_A_BODY, HEAD, MONSTERA, NOWHERE, new_plant, post
from tests.test_worker import is_closed

CONNECTIONS, EACH = 64, 150  # at the same time; requests on a connection
KINDS = {  # what they send at first, and then again and again; they read nothing
    "nothing": (b"", b""),
    "half a head": (b"POST /pl", b""),
    "half a body": (HALF_A_BODY, b""),
    "idle": (NOWHERE, b""),
    "a refused body without its last byte": (post(b"x" * 65536, head=BASIC)[:-1], b""),
    "a byte at a time": (HEAD, b"x"),
    "holding the connection after the answer": (GET + b"Connection: close\r\n\r\n", b"x"),
    "pipelining": ((GET + b"\r\n") * 30, b"x"),
    "taking no 100 Continue": ((GET + b"Expect: 100-continue\r\n\r\n") * 130, b"x"),
    "without end": (HEAD + b"Content-Length: 9999999999\r\n\r\n", b"x" * 2**14),
}


def send_on(client: socket.socket, data: bytes) -> bool:
    """Send more as far as that does not wait; return whether the connection is gone."""
    try:
        client.send(data, socket.MSG_DONTWAIT)
    except OSError as error:
        return isinstance(error, ConnectionError)
    return False


def test_slow_clients_of_each_kind_are_cut_off(serve, send):
    """A good client is served beside them until then."""
    server = serve(SHORT, "--keep-alive=1")
    clients = {send(server, data): more for data, more in KINDS.values()}

    def are_cut_off() -> bool:
        assert server.post(new_plant())[0] == STORED
        for client, more in list(clients.items()):
            if (more or is_closed(client)) and send_on(client, more or b"x"):
                del clients[client]
        return not clients

    wait_until(are_cut_off)


@pytest.mark.parametrize("kind", KINDS)
def test_more_clients_than_there_is_room_for_keep_nobody_out(serve, send, kind):
    """A good client on new connections is answered; memory is bounded."""
    data, more = KINDS[kind]
    options = ["--keep-alive=600", "--worker-connections=300"]
    server = serve(PATIENT, *options, WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == STORED
    (worker,) = server.workers(1)
    before = memory(worker)
    strangers = [send(server, data) for _ in range(600)]
    for _ in range(50):
        for stranger in strangers if more else ():
            send_on(stranger, more)
        assert server.post(new_plant())[0] == STORED
    assert server.workers(1) == [worker]
    assert memory(worker) - before < 50  # MiB: a connection may send 32 KiB


def post_all(server: Server, bodies: list[bytes]) -> list[int]:
    """Post bodies over connections that send all their requests at once; return the statuses."""
    requests = list(map(post, bodies))
    batches = [b"".join(requests[i : i + EACH]) for i in range(0, len(requests), EACH)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        answers = b"".join(pool.map(partial(server.send, ends=True), batches))
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answers)]


def test_memory_does_not_grow_with_what_was_stored_or_refused(serve):
    """15,000 plants, then as many refusals and 5,000 connections; it starts from some of each."""
    server = serve()

    def store(first: int, end: int) -> list[float]:
        plants = [b'{"id": %d, "name": "Monstera"}' % number for number in range(first, end)]
        assert post_all(server, plants).count(STORED) == end - first
        return list(map(memory, server.workers()))

    def refuse() -> list[float]:
        for _ in range(5_000):
            server.connect().close()
        bodies = (b'{"id": %d, "name": 5}', b'{"id": %d, "name": "another"}', b"%d nonsense")
        answers = post_all(server, [body % number for body in bodies for number in range(5_000)])
        assert (answers.count(400), answers.count(409)) == (10_000, 5_000)
        return list(map(memory, server.workers()))

    store(0, 5_000)
    before, *stages = refuse(), store(5_000, 20_000), refuse()
    grown = max(now - then for stage in stages for now, then in zip(stage, before, strict=True))
    assert grown < 5
