"""What stops the start: one clear line, a status that is not 0, no worker that fails for ever.

Options of gunicorn are in tests/ci/test_start.py.
"""

import os
import re
import signal
import socket

import pytest

from tests.support.server import PATIENCE, receive

LOG_LINE = re.compile(r"\[.*\] \[\d+\] \[INFO\] .*\n")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PLANTS_TOKENS": "too-short"}, "PLANTS_TOKENS must be .*at least 16 .*token_urlsafe"),
        ({"DATABASE_URL": "mysql://host/plants"}, "DATABASE_URL must name a file"),
        ({"DATABASE_URL": "sqlite:////no/x/plants.db"}, "/no/x: no such folder"),
        ({"DATABASE_URL": "sqlite:////dev/full"}, "/dev/full is empty, damaged or another"),
        ({"PLANTS_CORS_ORIGINS": "garden.example"}, "PLANTS_CORS_ORIGINS must be"),
        ({"PORT": ""}, "PORT must be a number from 1 to 65535, not ''"),
        ({"PORT": "0"}, "PORT must be a number from 1 to 65535, not '0'"),
        ({"PORT": "65536"}, "PORT must be a number from 1 to 65535, not '65536'"),
        ({"WEB_CONCURRENCY": "0"}, "--workers and WEB_CONCURRENCY must be 1 or more"),
        ({"WEB_CONCURRENCY": "-1"}, "must be positive|WEB_CONCURRENCY"),
    ],
    ids=str,
)
def test_a_wrong_setting_stops_the_start_in_one_line(serve, environment, words):
    """The line says which and what to do; the master has started no worker."""
    stops_in_one_line(serve(**environment), words)


def stops_in_one_line(server, words: str) -> None:
    """Assert that a start has failed with one line besides those of a log, as it should be."""
    assert server.wait() != 0
    said = LOG_LINE.sub("", server.err).strip()
    assert len(said.splitlines()) == 1, server.err
    assert re.search(words, said, re.IGNORECASE), said
    assert "Booting worker" not in server.err


@pytest.mark.parametrize(
    ("number", "kill"),
    [
        (signal.SIGINT, os.killpg),  # as Ctrl+C does it
        (signal.SIGINT, os.kill),
        (signal.SIGTERM, os.killpg),
        (signal.SIGTERM, os.kill),
        (signal.SIGKILL, os.kill),
    ],
)
def test_a_start_that_waits_can_be_stopped(serve, number, kill):
    """It says nothing, and leaves no process behind that would try to connect again."""
    with socket.create_server(("127.0.0.1", 0)) as database:  # accepts, and never answers
        database.settimeout(PATIENCE)
        host = f"127.0.0.1:{database.getsockname()[1]}"
        server = serve(DATABASE_URL=f"postgresql://{host}/plants?connect_timeout=600")
        connection, _ = database.accept()
        with connection:
            connection.settimeout(PATIENCE)
            kill(server.process.pid, number)
            assert server.wait() == (-number if number == signal.SIGKILL else 128 + number)
            receive(connection)  # until the process that has made it ends
    # One that has waited until its limit would have said so.
    assert LOG_LINE.sub("", server.err) == ""
