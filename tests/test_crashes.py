"""What was answered with 200 is there after kill -9.

More rounds, and what happens where a sync fails, are in tests/ci/test_crashes.py; power cuts are in
tests/ci/test_disk.py.
"""

import http.client
import os
import random
import signal
import socket
from collections import Counter

import pytest

from tests.conftest import names_in
from tests.support.server import Writers


class MixedWriters(Writers):
    """Writers that send, after each plant, another one of its id and what is no plant."""

    def __init__(self, port: int) -> None:
        super().__init__(port, count=16)
        self.refusals: Counter[tuple[int, int]] = Counter()  # the right status, the one that came

    def afterwards(self, client: http.client.HTTPConnection, number: int) -> None:
        another, none = {"id": number, "name": "another"}, {"id": -1 - number, "name": None}
        self.refusals[409, self.post(client, another)] += 1
        self.refusals[400, self.post(client, none)] += 1


@pytest.fixture
def victims() -> list[str]:
    return ["a worker", "the service", "a worker"]


def test_every_acknowledged_plant_survives_kill_minus_9(
    serve, stored, database, victims, record_property
):
    """A worker or the whole service dies at any moment under load, again and again.

    Then all that was acknowledged is there as it was sent, and nothing that was refused.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = serve(listener=listener)
        with MixedWriters(listener.getsockname()[1]) as writers:
            for victim in victims:
                assert writers.goes_on(random.randrange(20, 400))
                if victim == "a worker":
                    os.kill(random.choice(server.workers()), signal.SIGKILL)
                else:
                    server.kill()
                    server = serve(listener=listener)
            assert writers.goes_on()
        server.kill()
    rows = {(number, name) for number, name, tag in stored() if tag is None}
    lost = writers.acknowledged.items() - rows
    assert lost == set()
    assert names_in(database) == rows <= writers.sent.items()
    assert writers.refusals.keys() >= {(400, 400), (409, 409)}
    assert all(came in (right, 503, 0) for right, came in writers.refusals), writers.refusals
    record_property(
        "kill -9",
        f"{victims.count('a worker')} times of a worker, "
        f"{victims.count('the service')} of the service, "
        f"{len(writers.acknowledged)} plants acknowledged, {len(lost)} lost",
    )
