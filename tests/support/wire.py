"""Requests as the bytes that clients send, responses as the bytes that arrive, and busy clients."""

import http.client
import itertools
import json
import re
import socket
import threading
import time
from collections import Counter
from typing import Any

from tests.support.server import HEADERS, PATIENCE, STORED, TOKEN, wait_until

MONSTERA = {"id": 7, "name": "Monstera", "tag": "indoor"}
NEW_IDS = itertools.count(10_000)  # Only new_plant() takes ids from here on.
HEAD = (
    f"POST /plants HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    "Content-Type: application/json\r\n"
).encode()
HALF_A_BODY = HEAD + b"Content-Length: 9\r\n\r\n{"
BASIC = HEAD.replace(b"Bearer", b"Basic")  # The response has status 401.
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
CLOSE = b"\r\nConnection: close\r\n"
GET = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
NOWHERE = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"  # The response has status 404.


def new_plant(**members: Any) -> dict[str, Any]:
    """Return a plant with an id and a name of its own, since several tests share a server."""
    number = next(NEW_IDS)
    return {"id": number, "name": f"Ivy {number}.", **members}


def post(plant: object, *headers: bytes, head: bytes = HEAD) -> bytes:
    """Return a request that posts a plant, with `headers` as additional header lines.

    If `plant` is bytes, they are the body as it is.
    """
    body = plant if isinstance(plant, bytes) else json.dumps(plant).encode()
    lines = b"".join(header + b"\r\n" for header in headers)
    return head + lines + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def chunked(*chunks: bytes) -> bytes:
    """Return `chunks` as a client sends them (RFC 9112 section 7.1). An empty one ends the body."""
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)


def receive_response(connection: socket.socket) -> bytes:
    """Return the bytes of the next response on a connection that may stay open.

    Every response has a JSON object and a line break at its end, so `}` and a line break end it.
    """
    data = b""
    while not data.endswith(b"}\n"):
        data += (piece := connection.recv(2**16))
        assert piece, data
    return data


def answers(data: bytes) -> list[tuple[int, Any]]:
    """Split the bytes that arrived on a connection into responses: statuses and JSON bodies."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        length = int(re.search(rb"(?i)\ncontent-length: (\d+)", head)[1])
        found.append((int(head.split()[1]), json.loads(data[:length])))
        data = data[length:]
    return found


def statuses(data: bytes) -> list[int]:
    """Return the statuses of all responses in the bytes that arrived on a connection."""
    return [status for status, _ in answers(data)]


def refused(data: bytes, status: int) -> str:
    """Assert that `data` is one response: an Error with all usual headers. Return its message."""
    ((actual, body),) = answers(data)
    assert (actual, body) == (status, {"error": status, "message": body["message"]})
    assert b"Content-Type: application/json" in data
    assert re.search(rb"\r\nX-Request-ID: \S+\r\n", data)
    assert re.search(rb"\r\nDate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n", data)
    assert b"Cache-Control: no-store" in data
    assert data.lower().count(b"\r\ncontent-length:") == 1
    return body["message"]


class Writers:
    """Clients in threads, each of which posts a plant until it is stored, and then the next one."""

    def __init__(self, port: int, count: int = 8) -> None:
        """Prepare `count` clients. They post while the `with` block runs."""
        self.acknowledged: dict[int, str] = {}  # Names by id of the plants that got a 2xx.
        self.answers: Counter[int] = Counter()  # The number of responses of each status.
        self.failures: list[Exception] = []  # Connections that were refused or broke.
        self._port, self.end = port, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def __enter__(self) -> "Writers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def wait_for_more(self, count: int = 100) -> None:
        """Wait until `count` more plants are acknowledged, or fail."""
        goal = len(self.acknowledged) + count
        wait_until(lambda: len(self.acknowledged) >= goal)

    def _run(self) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        plant = new_plant()
        while not self.end.is_set():
            headers = {**HEADERS, "X-Request-ID": f"{plant['id']}"}
            try:
                client.request("POST", "/plants", json.dumps(plant), headers)
                (response := client.getresponse()).read()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(error)
                client.close()
                time.sleep(0.01)  # Do not keep the machine busy while no server is there.
                continue
            self.answers[response.status] += 1
            if response.status == STORED:
                self.acknowledged[plant["id"]] = plant["name"]
                plant = new_plant()
        client.close()
