"""What clients that fight for the same ids are told, under faults, held against what is stored.

Of an id one plant gets 200s and all others 409, and that plant is in the table.
"""

import contextlib
import http.client
import os
import random
import signal
from collections import defaultdict

import psycopg
import pytest

from tests.support.server import PATIENCE, Writers, wait_until

IDS, NAMES = 400, ("a", "b", "c")


class Rivals(Writers):
    """Clients that post plants with the same ids and different names, all the time."""

    def __init__(self, port: int) -> None:
        super().__init__(port, count=12)
        self.told: defaultdict[int, set[tuple[str, int]]] = defaultdict(set)  # names and statuses

    def write(self) -> None:
        """Post one plant after another, whatever the answers are."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(client):
            while not self.end.is_set():
                number, name = random.randrange(IDS), random.choice(NAMES)
                status = self.post(client, {"id": number, "name": name})
                self.told[number].add((name, status))

    def go_on(self) -> None:
        """Wait for some hundred answers that are no 503."""
        goal = self.answers[200] + self.answers[409] + 300
        wait_until(lambda: self.answers[200] + self.answers[409] > goal)


@pytest.mark.parametrize("engine", ["SQLite", "PostgreSQL"])
def test_one_plant_of_an_id_is_stored_and_all_are_told_so(serve, request, engine, record_property):
    """While workers are killed, and the connections of PostgreSQL."""
    prefix = "postgresql_" if engine == "PostgreSQL" else ""
    url, stored = (request.getfixturevalue(prefix + name) for name in ("url", "stored"))
    server = serve(DATABASE_URL=url)
    with Rivals(server.port) as rivals:
        for _ in range(5):
            rivals.go_on()
            os.kill(random.choice(server.workers()), signal.SIGKILL)
            if engine == "PostgreSQL":
                rivals.go_on()
                with psycopg.connect(url, application_name="fault") as fault:
                    fault.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
                        "current_database() AND pid <> pg_backend_pid()"
                    )
        rivals.go_on()
    rows = {number: name for number, name, _ in stored()}
    for number, told in rivals.told.items():
        for name, status in told:
            assert status in (200, 409, 503, 0)
            assert status in (503, 0) or (status == 200) == (rows[number] == name)
    assert rivals.answers[200] and rivals.answers[409]
    record_property(f"rivals on {engine}", dict(rivals.answers))
