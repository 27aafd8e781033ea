"""What stays between a client and the service: tokens, and what is in a body."""

import contextlib
import json
import os
import signal
import sqlite3
from collections.abc import Callable

import pytest

from app import BODY_LIMIT
from tests.support.server import wait_until
from tests.support.wire import answers

GOOD, BAD = "canary-good-0123456789", "canary-bad-0123456789"
PLANT = {"id": 7, "name": "canary-name", "tag": "canary-tag"}


@pytest.fixture
def refuse_inserts(database) -> Callable[[str], None]:
    def refuse(name: str) -> None:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute(
                f"CREATE TRIGGER refuse BEFORE INSERT ON plants WHEN NEW.name = '{name}' "
                "BEGIN SELECT RAISE(ABORT, 'refused'); END"
            )

    return refuse


def message(start: str, *headers: str, body: str = "", token: str = GOOD) -> bytes:
    """A request with a token and with a body, unless `headers` say its length."""
    given = [f"Authorization: Bearer {token}", "Content-Type: application/json", *headers]
    if body:
        given.append(f"Content-Length: {len(body)}")
    return "\r\n".join([f"{start} HTTP/1.1", "Host: x", *given, "", body]).encode()


QUOTING = {400, 415, 417, 501}  # the Errors that say to who sent it what is wrong
PLANTS = "POST /plants"
TEXT = json.dumps(PLANT)
NO_PLANT = '{"id": "canary", "name": "canary\\u0000"}'
REQUESTS = {
    "stored": (message(PLANTS, body=TEXT), 200),
    "stored again": (message(PLANTS, body=TEXT), 200),
    "healthy": (message("GET /healthz?canary", body=TEXT), 200),
    "another": (message(PLANTS, body=TEXT.replace("-tag", "-gat")), 409),
    "no plant": (message(PLANTS, body=NO_PLANT), 400),
    "no JSON": (message(PLANTS, body="canary"), 400),
    "cut short": (message(PLANTS, "Content-Length: 999") + TEXT.encode(), 400),
    "a broken chunk": (message(PLANTS, "Transfer-Encoding: chunked") + b"canary\r\n", 400),
    "a broken end": (message(PLANTS, "Transfer-Encoding: chunked") + b"1\r\n1canary", 400),
    "no colon": (message("GET /", f"Authorization Bearer {GOOD}"), 400),
    "no name": (message("GET /", f": Bearer {GOOD}"), 400),
    "folded": (message("GET /", f"X: a\r\n {GOOD}"), 400),
    "no method": (message(f"canary-{GOOD} /plants"), 400),
    "no version": (f"GET / HTTP/canary\r\nX: {GOOD}\r\n\r\n".encode(), 400),
    "no HTTP": (f"{GOOD}\r\n\r\n{TEXT}".encode(), 400),
    "a length": (message(PLANTS, "Content-Length: canary"), 400),
    "another token": (message(PLANTS, body=TEXT, token=BAD), 401),
    "a token in the query": (message(f"{PLANTS}?token={GOOD}", body=TEXT, token=BAD), 401),
    "elsewhere": (message(f"POST /nowhere?{GOOD}", body=TEXT), 404),
    "another method": (message("PUT /plants?canary", body=TEXT), 405),
    "too long": (message(PLANTS, body=TEXT.ljust(BODY_LIMIT + 1)), 413),
    "a long target": (message(f"{PLANTS}?{GOOD}{'x' * 5000}"), 414),
    "another type": (message(PLANTS, "Content-Encoding: canary", body=TEXT), 415),
    "an expectation": (message(PLANTS, "Expect: canary"), 417),
    "a long header": (message(PLANTS, f"X: {GOOD}{'x' * 2**14}"), 431),
    "many headers": (message(PLANTS, *[f"X: {GOOD}"] * 200), 431),
    "another coding": (message(PLANTS, "Transfer-Encoding: canary"), 501),
    "rejected": (message(PLANTS, body=TEXT.replace("7", "8").replace("-name", "-bad")), 400),
}


def test_no_log_has_a_token_or_a_body_in_it_whatever_happens(serve, refuse_inserts, taken_away):
    """At the level debug too, where gunicorn says more; and only an Error quotes what is wrong."""
    short = "--worker-class=tests.support.workers.Short"
    server = serve(short, "--log-level=debug", PLANTS_TOKENS=f"{GOOD},{GOOD}-2")
    assert server.port
    refuse_inserts("canary-bad")
    said = [(status, server.send(data, ends=True)) for data, status in REQUESTS.values()]
    with taken_away():
        said.append((503, server.send(REQUESTS["stored"][0], ends=True)))
        # A worker that was checked less than a second ago is not checked again.
        checks = iter(lambda: server.send(REQUESTS["healthy"][0], ends=True), None)
        said.append((503, wait_until(lambda: (data := next(checks)) * (b" 503 " in data))))
    half = message(PLANTS, "Content-Length: 999") + TEXT.encode()
    said.append((400, server.send(half)))  # when its time is over
    assert server.send(half[:120]) == server.send(half[:120], ends=True) == b""
    os.kill(server.workers()[0], signal.SIGKILL)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0

    assert [[status for status, _ in answers(data)] for _, data in said] == [[s] for s, _ in said]
    for status, data in said:
        assert status in QUOTING or status == 200 or b"canary" not in data
    log = server.out + server.err
    assert all(f" {status} " in log for status, _ in said) and " [DEBUG] " in log
    assert [line for line in log.splitlines() if "canary" in line] == []
