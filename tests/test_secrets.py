"""Secrets: no log line and no error response contains a token or a part of a body."""

import os
import re
import signal

from tests.support.server import SHORT, STORED, TOKEN, receive
from tests.support.wire import CHUNKED, HEAD, answers, post
from tests.test_sqlite import execute

TRIGGER = (
    "CREATE TRIGGER refuse BEFORE INSERT ON plants WHEN NEW.name = 'canary-bad' "
    "BEGIN SELECT RAISE(ABORT, 'canary'); END"
)
PLANT = {"id": 7, "name": "canary-name", "tag": "canary-tag"}
CANARY = b"canary-" + TOKEN.encode()
INCOMPLETE = HEAD + b'Content-Length: 999\r\n\r\n{"name": "canary'
REQUESTS = [  # The status of the response, and a request with "canary" in it.
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
    (408, INCOMPLETE),
    (413, post(b"canary".ljust(2**14 + 1))),
    (414, post(PLANT, head=HEAD.replace(b"plants", b"plants?" + CANARY * 200))),
    (415, post(PLANT, b"Content-Encoding: canary")),
    (417, post(PLANT, b"Expect: canary")),
    (431, post(PLANT, b"X: " + CANARY * 500)),
    (501, post(PLANT, b"Transfer-Encoding: canary")),
]
PARSER_ERRORS = {  # Statuses that only gunicorn's parser causes, and the error that it raises.
    414: "LimitRequestLine",
    417: "ExpectationFailed",
    431: "LimitRequestHeaders",
    501: "UnsupportedTransferCoding",
}


def test_the_log_gives_a_reason_for_each_failure_and_contains_no_token_and_no_body(
    serve, send, database
):
    """The same holds for responses, except that a 200 repeats the plant.

    If a response hides the reason of the database, the log has it for the operator.
    """
    server = serve(SHORT, "--log-level=debug")
    assert server.health() == 200
    execute(database, TRIGGER)
    late = [send(server, data) for data in (INCOMPLETE, HEAD)]  # They stay connected.
    received = [(status, server.send(data, ends=True)) for status, data in REQUESTS]
    received.append((408, receive(late[0])))
    assert receive(late[1]) == server.send(HEAD, ends=True) == b""
    os.rename(database, database.with_name("elsewhere.db"))
    received.append((503, server.send(post(PLANT), ends=True)))
    os.kill(server.workers()[0], signal.SIGKILL)
    assert server.stop() == 0
    for expected, data in received:
        ((status, body),) = answers(data)
        line = server.logged(re.search(r"X-Request-ID: (\S+)", data.decode())[1])
        assert (status, line["status"], line["client"]) == (expected, expected, "127.0.0.1")
        assert (status == STORED) == ("reason" not in line)
        assert status == STORED or not re.search(rf"canary|{TOKEN}".encode(), data)
        if re.search("the storage|the database", body.get("message", "")):
            assert re.search("plants.db|SQLITE_CONSTRAINT", line["reason"])
        # gunicorn's parser may quote the request in an error, so the log has only its name.
        elif status in PARSER_ERRORS:
            assert line["reason"] == PARSER_ERRORS[status]
        elif status != STORED:
            assert line["reason"] == body["message"] or re.fullmatch(r"[A-Z]\w+", line["reason"])
    assert len(server.out.splitlines()) == len(received)
    assert re.findall(rf".*(?:canary|{TOKEN}).*", server.out + server.err) == []
