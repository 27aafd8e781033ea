"""The application under any WSGI server (PEP 3333), not only as gunicorn.conf.py runs it."""

import sys
from wsgiref.util import setup_testing_defaults

import pytest

from app import BODY_LIMIT, create_app
from tests.support.server import TOKEN
from tests.support.wire import HEAD, MONSTERA, post

START = """
import sys
from start import get_app
%s
print(f"Listening at: http://127.0.0.1:{port}", file=sys.stderr, flush=True)
serve()
"""
WSGIREF = """
from wsgiref.simple_server import make_server
server = make_server("127.0.0.1", 0, get_app())
port, serve = server.server_port, server.serve_forever
"""
WAITRESS = """
from waitress import create_server
server = create_server(get_app(), host="127.0.0.1", port=0)
port, serve = server.effective_port, server.run
"""
SERVERS = {
    "wsgiref": {"command": [sys.executable, "-c", START % WSGIREF]},
    "waitress": {"command": [sys.executable, "-c", START % WAITRESS]},
    "gunicorn gevent": {"arguments": ["--worker-class=gevent"]},
    "gunicorn sync": {"arguments": ["--worker-class=sync"]},
    "gunicorn gthread": {"arguments": ["--worker-class=gthread"]},
}


@pytest.mark.parametrize("name", SERVERS)
def test_any_server_stores_plants_for_good(serve, database, stored, name):
    """It makes the database, answers on connections that stay open, and kill -9 loses nothing."""
    assert not database.exists()
    arguments = SERVERS[name].get("arguments", [])
    server = serve(*arguments, command=SERVERS[name].get("command"), WEB_CONCURRENCY="1")
    assert server.request("GET", "/healthz")[::2] == (200, {"status": "ok"})
    assert server.post(MONSTERA) == (200, {"name": "Monstera", "tag": "indoor"})
    assert server.post({**MONSTERA, "tag": "outdoor"})[0] == 409
    chunks = b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    # The beginning of each answer: wsgiref may lose the rest, as it does not read what is left.
    for request, status in (
        (post(MONSTERA, head=HEAD.replace(TOKEN.encode(), b"another-token-0123456789")), b"401"),
        (post(MONSTERA).replace(b"Host: localhost", b"Host: a b"), b"400"),
        (post(MONSTERA).replace(b"Host: localhost\r\n", b""), b"400"),
        (HEAD + chunks, b"400"),  # wsgiref leaves it to the application where they end
    ):
        with server.connect() as connection:
            connection.sendall(request)
            assert connection.recv(2**10).split()[1] == status
    server.kill()
    assert stored() == [(7, "Monstera", "indoor")]


class Input:
    """A body on a connection that stays open: to read beyond it would block."""

    def __init__(self, body: bytes) -> None:
        self.body, self.has_blocked = body, False

    def read(self, size: int = -1) -> bytes:
        self.has_blocked |= not 0 <= size <= len(self.body)
        part, self.body = self.body[:size], self.body[size:]
        return part


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"CONTENT_LENGTH": "24"}, 200),
        ({}, 400),
        ({"CONTENT_LENGTH": ""}, 400),
        ({"CONTENT_LENGTH": "0"}, 400),
        ({"CONTENT_LENGTH": "-1"}, 400),
        ({"CONTENT_LENGTH": "seven"}, 400),
        ({"CONTENT_LENGTH": f"{BODY_LIMIT + 2}"}, 413),
        ({"HTTP_TRANSFER_ENCODING": "chunked"}, 400),
    ],
)
def test_no_byte_is_read_beyond_content_length(storage, headers, status):
    """Not every server ends wsgi.input there, and one that does not undo chunks tells no end."""
    body = Input(b'{"id": 7, "name": "n"}  ')
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/plants",
        "CONTENT_TYPE": "application/json",
        "HTTP_AUTHORIZATION": f"Bearer {TOKEN}",
        "wsgi.input": body,
        **headers,
    }
    setup_testing_defaults(environ)
    statuses = []
    create_app(storage, [TOKEN])(environ, lambda line, headers, _=None: statuses.append(line))
    assert [int(line.split()[0]) for line in statuses] == [status]
    assert not body.has_blocked
