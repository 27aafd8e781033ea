"""Requests and answers as they are sent over a socket."""

import json
import re
import socket
from typing import Any

from schemas import VALIDATORS
from tests.support.server import TOKEN

MONSTERA = {"id": 7, "name": "Monstera", "tag": "indoor"}
HEAD = (
    f"POST /plants HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    "Content-Type: application/json\r\n"
).encode()


def post(plant: object, *headers: bytes, head: bytes = HEAD) -> bytes:
    body = plant if isinstance(plant, bytes) else json.dumps(plant).encode()
    lines = b"".join(header + b"\r\n" for header in headers)
    return head + lines + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def chunked(*chunks: bytes) -> bytes:
    """Chunks of a body; an empty one ends it."""
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)


def receive_answer(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < length_of_answer(data):
        piece = connection.recv(2**16)
        assert piece, data
        data += piece
    return data


def length_of_answer(data: bytes) -> int:
    """How long the first answer is of which `data` is the beginning; more than that if unknown."""
    head = re.match(rb"(?s).+?\r\n\r\n", data)
    if not head:
        return len(data) + 1
    return head.end() + int(re.search(rb"(?i)\ncontent-length: (\d+)", head[0])[1])


def answers(data: bytes) -> list[tuple[int, Any]]:
    """Split what came over a socket into answers: their statuses and JSON bodies."""
    found = []
    while data:
        length = length_of_answer(data)
        head, _, body = data[:length].partition(b"\r\n\r\n")
        found.append((int(head.split()[1]), json.loads(body)))
        data = data[length:]
    return found


def refused(data: bytes, status: int) -> str:
    """Assert that `data` is one answer with an Error of this status; return its message.

    It has the headers that all answers have.
    """
    ((actual, body),) = answers(data)
    assert actual == body["error"] == status, body
    VALIDATORS["error"].validate(body)
    assert b"Content-Type: application/json" in data
    assert re.search(rb"\r\nX-Request-ID: \S+\r\n", data)
    assert re.search(rb"\r\nDate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n", data)
    assert b"Server: gunicorn" in data
    assert b"Cache-Control: no-store" in data
    assert b"X-Content-Type-Options: nosniff" in data
    return body["message"]
