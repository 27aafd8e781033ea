"""What stays between a client and the service: tokens, and what is in a body."""

import contextlib
import json
import os
import re
import signal
import sqlite3

import pytest

from tests.support.server import SHORT, Server
from tests.support.wire import answers

GOOD, BAD = "canary-good-0123456789", "canary-bad-0123456789"
TRIGGER = (
    "CREATE TRIGGER refuse BEFORE INSERT ON plants WHEN NEW.name = 'canary-bad' "
    "BEGIN SELECT RAISE(ABORT, 'not this one'); END"
)


def message(start: str, *headers: str, body: str = "", token: str = GOOD) -> bytes:
    """A request with a token and with a body, unless `headers` say its length."""
    given = [f"Authorization: Bearer {token}", "Content-Type: application/json", *headers]
    if body:
        given.append(f"Content-Length: {len(body)}")
    return "\r\n".join([f"{start} HTTP/1.1", "Host: x", *given, "", body]).encode()


PLANTS = "POST /plants"
TEXT = '{"id": 7, "name": "canary-name", "tag": "canary-tag"}'
CUT_SHORT = message(PLANTS, "Content-Length: 999") + TEXT.encode()
STORED = message(PLANTS, body=TEXT)
REQUESTS = [
    (200, STORED),
    (200, message("GET /healthz?canary", body=TEXT)),
    (409, message(PLANTS, body=TEXT.replace("-tag", "-gat"))),
    (400, message(PLANTS, body='{"id": "canary", "name": "canary\\u0000"}')),
    (400, message(PLANTS, body=TEXT.replace("7", "8").replace("-name", "-bad"))),
    (400, message(PLANTS, "Transfer-Encoding: chunked") + b"1\r\n1canary"),
    (400, message("GET /", f"Authorization Bearer {GOOD}")),
    (400, message("GET /", f"X: a\r\n {GOOD}")),
    (400, message(f"canary-{GOOD} /plants")),
    (400, f"{GOOD}\r\n\r\n{TEXT}".encode()),
    (401, message(f"{PLANTS}?token={GOOD}", body=TEXT, token=BAD)),
    (404, message(f"POST /nowhere?{GOOD}", body=TEXT)),
    (405, message("PUT /plants?canary", body=TEXT)),
    (408, CUT_SHORT),
    (413, message(PLANTS, body=TEXT.ljust(2**16 + 1))),
    (414, message(f"{PLANTS}?{GOOD}{'x' * 5000}")),
    (415, message(PLANTS, "Content-Encoding: canary", body=TEXT)),
    (417, message(PLANTS, "Expect: canary")),
    (431, message(PLANTS, f"X: {GOOD}{'x' * 2**14}")),
    (501, message(PLANTS, "Transfer-Encoding: canary")),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """A server at the level debug that has ended, and all that it has answered."""
    folder = tmp_path_factory.mktemp("secrets")
    database, tokens = folder / "plants.db", f"web:{GOOD},{GOOD}-2"
    with Server(folder, SHORT, "--log-level=debug", PLANTS_TOKENS=tokens) as server:
        assert server.health() == 200
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute(TRIGGER)
        said = [(status, server.send(data, ends=True)) for status, data in REQUESTS]
        said.append((408, server.send(CUT_SHORT)))  # when its time is over
        assert server.send(CUT_SHORT[:120]) == server.send(CUT_SHORT[:120], ends=True) == b""
        os.rename(database, folder / "elsewhere.db")
        said.append((503, server.send(STORED, ends=True)))
        os.kill(server.workers()[0], signal.SIGKILL)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        yield server, said


def test_no_log_has_a_token_or_a_body_in_it_whatever_happens(said):
    """And no answer has what was sent in it, but a 200."""
    server, said = said
    for status, data in said:
        assert [found for found, _ in answers(data)] == [status]
        assert status == 200 or b"canary" not in data
    log = server.out + server.err
    assert all(f" {status} " in log for status, _ in said)
    assert [line for line in log.splitlines() if "canary" in line] == []


def test_the_log_says_why_a_request_was_not_answered_with_200(said):
    """Where clients see less, as of a storage that is away, it says what an operator has to know.

    For what is not HTTP it is the name of the error, as its text repeats what was sent.
    """
    server, said = said
    for status, data in said:
        request_id = re.search(r"X-Request-ID: (\S+)", data.decode())[1]
        reasons = re.findall(rf'(?m) {request_id} (".*")$', server.out)
        assert len(reasons) == (status != 200)
        for reason in map(json.loads, reasons):
            ((_, error),) = answers(data)
            if "the storage" in error["message"]:
                assert re.search("plants.db|SQLITE_CONSTRAINT", reason)
            else:
                assert reason == error["message"] or re.fullmatch(r"[A-Z]\w+", reason)
