"""Clients that post plants at the same time."""

import http.client
import json
import threading
import time
from collections import Counter

from tests.support.server import HEADERS, PATIENCE, STORED, wait_until
from tests.support.wire import NEW_IDS


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
        number = next(NEW_IDS)
        while not self.end.is_set():
            headers = {**HEADERS, "X-Request-ID": f"{number}"}
            try:
                plant = {"id": number, "name": name_of(number)}
                client.request("POST", "/plants", json.dumps(plant), headers)
                (answer := client.getresponse()).read()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(error)
                client.close()
                time.sleep(0.01)
                continue
            self.answers[answer.status] += 1
            if answer.status == STORED:
                self.acknowledged[number] = name_of(number)
                number = next(NEW_IDS)
        client.close()


def name_of(number: int) -> str:
    """The name of the plant with an id, which no other plant has."""
    return f"number {number}."
