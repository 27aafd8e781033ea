"""Clients that are slow, rude or too many: hundreds of each kind keep nobody out."""

import socket

import pytest

from tests.support.server import PATIENT, SHORT, STORED, memory, wait_until
from tests.support.wire import BASIC, GET, HALF_A_BODY, HEAD, MONSTERA, NOWHERE, new_plant, post
from tests.test_worker import is_cut

LONG = GET + (b"X: " + b"x" * 995 + b"\r\n") * 15
KINDS = {  # what they send at first, and then again and again; they read nothing
    "nothing": (b"", b""),
    "half a head": (b"POST /pl", b""),
    "half a body": (HALF_A_BODY, b""),
    "idle": (NOWHERE, b""),
    "a refused body without its last byte": (post(b"x" * 65536, head=BASIC)[:-1], b""),
    "a byte at a time": (HEAD, b"x"),
    "a long head, then a byte at a time": (LONG, b"x"),
    "holding the connection after the answer": (GET + b"Connection: close\r\n\r\n", b"x"),
    "pipelining": ((GET + b"\r\n") * 30, b"x"),
    "taking no 100 Continue": ((GET + b"Expect: 100-continue\r\n\r\n") * 130, b"x"),
    "without end": (HEAD + b"Content-Length: 9999999999\r\n\r\n", b"x" * 2**14),
}


def send_on(client: socket.socket, data: bytes) -> bool:
    """Send more as far as that does not wait; return whether the connection is gone."""
    try:
        client.send(data, socket.MSG_DONTWAIT)
    except ConnectionError:
        return True
    except BlockingIOError:
        pass
    return False


def test_slow_clients_of_each_kind_are_cut_off(serve, send):
    """A good client is served beside them until then."""
    server = serve(SHORT, "--keep-alive=1")
    clients = {send(server, data): more for data, more in KINDS.values()}

    def are_cut_off() -> bool:
        assert server.post(new_plant())[0] == STORED
        for client, more in list(clients.items()):
            if (more or is_cut(client)) and send_on(client, more or b"x"):
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
