"""What stays between a client and the service: tokens, and what is in a body."""

import contextlib
import os
import re
import signal
import sqlite3

import pytest

from tests.support.server import SHORT, STORED, TOKEN, Server
from tests.support.wire import CHUNKED, HEAD, answers, post

TRIGGER = (
    "CREATE TRIGGER refuse BEFORE INSERT ON plants WHEN NEW.name = 'canary-bad' "
    "BEGIN SELECT RAISE(ABORT, 'canary'); END"
)
PLANT = {"id": 7, "name": "canary-name", "tag": "canary-tag"}
CANARY = b"canary-" + TOKEN.encode()
CUT_SHORT = HEAD + b'Content-Length: 999\r\n\r\n{"name": "canary'
REQUESTS = [
    (STORED, post(PLANT)),
    (409, post({**PLANT, "tag": "canary-other"})),
    (400, post({"id": "canary", "name": "canary\0"})),
    (400, post({**PLANT, "id": 8, "name": "canary-bad"})),
    (400, HEAD + CHUNKED + b"1\r\n1canary"),
    (400, post(PLANT, b"Authorization Bearer " + CANARY)),
    (400, CANARY + b" " + post(PLANT)),
    (400, CANARY + b"\r\n\r\n"),
    (401, post(PLANT, head=HEAD.replace(b"Bearer ", b"Bearer canary-"))),
    (404, post(PLANT, head=HEAD.replace(b"plants", b"plant?" + CANARY))),
    (408, CUT_SHORT),
    (413, post(b"canary".ljust(2**14 + 1))),
    (414, post(PLANT, head=HEAD.replace(b"plants", b"plants?" + CANARY * 200))),
    (415, post(PLANT, b"Content-Encoding: canary")),
    (417, post(PLANT, b"Expect: canary")),
    (431, post(PLANT, b"X: " + CANARY * 500)),
    (501, post(PLANT, b"Transfer-Encoding: canary")),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """A server at the level debug that has ended, and all that it has answered."""
    folder = tmp_path_factory.mktemp("secrets")
    with Server(folder, SHORT, "--log-level=debug") as server:
        assert server.health() == 200
        with contextlib.closing(sqlite3.connect(folder / "plants.db")) as connection:
            connection.execute(TRIGGER)
        said = [(status, server.send(data, ends=True)) for status, data in REQUESTS]
        said.append((408, server.send(CUT_SHORT)))  # when its time is over
        assert server.send(HEAD) == server.send(HEAD, ends=True) == b""
        os.rename(folder / "plants.db", folder / "elsewhere.db")
        said.append((503, server.send(post(PLANT), ends=True)))
        os.kill(server.workers()[0], signal.SIGKILL)
        assert server.stop() == 0
        yield server, said


def test_no_log_has_a_token_or_a_body_in_it_whatever_happens(said):
    """And no answer has what was sent in it, but a 200."""
    server, said = said
    for status, data in said:
        assert [found for found, _ in answers(data)] == [status]
        assert status == STORED or not re.search(rf"canary|{TOKEN}".encode(), data)
    assert len(server.out.splitlines()) == len(said)
    assert re.findall(rf".*(?:canary|{TOKEN}).*", server.out + server.err) == []


def test_the_log_says_why_a_request_was_not_answered_with_200(said):
    """Where clients see less, as of a storage that is away, it has what an operator must know."""
    server, said = said
    for status, data in said:
        line = server.logged(re.search(r"X-Request-ID: (\S+)", data.decode())[1])
        ((_, error),) = answers(data)
        assert (line["client"], line["status"]) == ("127.0.0.1", status)
        if status == STORED:
            assert "reason" not in line
        elif "the storage" in error["message"]:
            assert re.search("plants.db|SQLITE_CONSTRAINT", line["reason"])
        else:  # or the name of the error, where its text may repeat what was sent
            assert line["reason"] == error["message"] or re.fullmatch(r"[A-Z]\w+", line["reason"])
