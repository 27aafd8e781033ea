"""Clients that post plants at the same time."""

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.support.server import HEADERS, PATIENCE, STORED, wait_until
from tests.support.wire import NEW_IDS


class Writers:
    """Clients that post new plants, each again and again until it is stored."""

    def __init__(self, port: int, count: int = 8) -> None:
        """`count` is the number of clients."""
        self.sent: dict[int, str] = {}  # names by id
        self.acknowledged: dict[int, str] = {}  # those of them that are stored, as it says
        self.answers: Counter[int] = Counter()  # by status
        self.failures: Counter[type[Exception]] = Counter()  # of connections
        self.port, self.end = port, threading.Event()
        self._threads = [threading.Thread(target=self.run) for _ in range(count)]

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

    def run(self) -> None:
        """Be one of the clients, until the end."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(client):
            while not self.end.is_set():
                self.write(client)

    def write(self, client: http.client.HTTPConnection) -> None:
        """Post a new plant until it is stored."""
        number, name = next(NEW_IDS), f"{random.random()}"
        self.sent[number] = name
        while not self.end.is_set():
            if self.post(client, {"id": number, "name": name}) == STORED:
                self.acknowledged[number] = name
                return

    def post(self, client: http.client.HTTPConnection, plant: Mapping[str, Any]) -> int:
        """Post a plant, with its id as X-Request-ID; return the status, or 0 for no answer."""
        headers = {**HEADERS, "X-Request-ID": f"{plant['id']}"}
        try:
            client.request("POST", "/plants", json.dumps(plant), headers)
            answer = client.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.failures[type(error)] += 1
            client.close()
            time.sleep(0.01)
            return 0
        self.answers[answer.status] += 1
        return answer.status
