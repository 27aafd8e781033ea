"""Crashes of processes. tests/ci/ has the tests of failed syncs and of power cuts."""

import os
import random
import signal
import socket

from tests.support.storage import read_names
from tests.support.wire import Writers


def test_every_acknowledged_plant_survives_kill_minus_9(serve, url):
    """A worker or the whole service is killed under load, several times.

    Plants that were sent but not acknowledged may be stored, too. Nothing else is.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = serve(listener=listener)
        with Writers(listener.getsockname()[1], count=16) as writers:
            for victim in ["a worker", "the service"] * 2:
                writers.wait_for_more(random.randrange(20, 200))
                if victim == "a worker":
                    os.kill(random.choice(server.workers()), signal.SIGKILL)
                else:
                    server.kill()
                    server = serve(listener=listener)
            writers.wait_for_more()
        server.kill()
    names = read_names(url)
    assert writers.acknowledged.items() <= names.items()
    assert names == {number: f"Ivy {number}." for number in names}
