"""Clients: plants, requests and answers as they are sent over a socket, and writers of plants."""

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
NEW_IDS = itertools.count(10_000)  # which no test may choose by itself
HEAD = (
    f"POST /plants HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    "Content-Type: application/json\r\n"
).encode()
HALF_A_BODY = HEAD + b"Content-Length: 9\r\n\r\n{"
BASIC = HEAD.replace(b"Bearer", b"Basic")  # which gets a 401
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
CLOSE = b"\r\nConnection: close\r\n"
GET = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
NOWHERE = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"  # which gets a 404


def new_plant(**members: Any) -> dict[str, Any]:
    """A plant whose id and name no other test has used, as servers are shared."""
    number = next(NEW_IDS)
    return {"id": number, "name": f"Ivy {number}.", **members}


def post(plant: object, *headers: bytes, head: bytes = HEAD) -> bytes:
    """A request that posts a plant, or bytes as they are, with more header lines."""
    body = plant if isinstance(plant, bytes) else json.dumps(plant).encode()
    lines = b"".join(header + b"\r\n" for header in headers)
    return head + lines + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def chunked(*chunks: bytes) -> bytes:
    """Chunks of a body; an empty one ends it."""
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)


def receive_answer(connection: socket.socket) -> bytes:
    """The next answer, on a connection that may stay open; each ends as its JSON does."""
    data = b""
    while not data.endswith(b"}\n"):
        data += (piece := connection.recv(2**16))
        assert piece, data
    return data


def answers(data: bytes) -> list[tuple[int, Any]]:
    """Split what came over a socket into answers: their statuses and JSON bodies."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        length = int(re.search(rb"(?i)\ncontent-length: (\d+)", head)[1])
        found.append((int(head.split()[1]), json.loads(data[:length])))
        data = data[length:]
    return found


def statuses(data: bytes) -> list[int]:
    """The statuses of the answers that came over a socket."""
    return [status for status, _ in answers(data)]


def refused(data: bytes, status: int) -> str:
    """Assert that `data` is one answer with an Error, and all headers; return its message."""
    ((actual, body),) = answers(data)
    assert (actual, body) == (status, {"error": status, "message": body["message"]})
    assert b"Content-Type: application/json" in data
    assert re.search(rb"\r\nX-Request-ID: \S+\r\n", data)
    assert re.search(rb"\r\nDate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n", data)
    assert b"Cache-Control: no-store" in data
    return body["message"]


class Writers:
    """Clients that post new plants, each again and again until it is stored."""

    def __init__(self, port: int, count: int = 8) -> None:
        """`count` is the number of clients."""
        self.acknowledged: dict[int, str] = {}  # the names of plants that are stored, by id
        self.answers: Counter[int] = Counter()  # by status
        self.failures: list[Exception] = []  # of connections
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

    def goes_on(self, count: int = 100) -> bool:
        """Wait until `count` more plants were acknowledged."""
        goal = len(self.acknowledged) + count
        return bool(wait_until(lambda: len(self.acknowledged) >= goal))

    def _run(self) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        plant = new_plant()
        while not self.end.is_set():
            headers = {**HEADERS, "X-Request-ID": f"{plant['id']}"}
            try:
                client.request("POST", "/plants", json.dumps(plant), headers)
                (answer := client.getresponse()).read()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(error)
                client.close()
                time.sleep(0.01)  # a server that is away is asked again, but not all the time
                continue
            self.answers[answer.status] += 1
            if answer.status == STORED:
                self.acknowledged[plant["id"]] = plant["name"]
                plant = new_plant()
        client.close()
