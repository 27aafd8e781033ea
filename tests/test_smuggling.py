"""Request smuggling: a service must not read two requests where a proxy has read one.

Each body contains a whole request, with a valid token, that would store plant 666. RFC 9112 says
where a request ends (sections 6.3 and 7.1). If that is not clear, the service must refuse it.
"""

import pytest

from app import BODY_LIMIT
from tests.support.server import STORED, TOKEN, Server
from tests.support.storage import read_names
from tests.support.wire import BASIC, CHUNKED, CLOSE, HEAD, answers, chunked, post, receive_response

EVIL = b'{"id": 666, "name": "smuggled"}'
HIDDEN = post(EVIL)
LARGE = HIDDEN * (256 * BODY_LIMIT // len(HIDDEN))
NEXT = post({"id": 667, "name": "next"})
AFTER = b"GET /after HTTP/1.1\r\nHost: localhost\r\n\r\n"  # It gets a 404, if the service reads it.
OLD = HEAD.replace(b"/1.1", b"/1.0")
TOKEN_LINE = b"Authorization: Bearer %b\r\n" % TOKEN.encode()
CHUNK = b"1;x=" + b"x" * 2000 + b"\r\n \r\n"  # Takes 2 KiB, and adds one byte to the body.
TRAILER = b"X: " + b"x" * 2000 + b"\r\n"


def check(server: Server, cases: dict[bytes, list[int]]) -> None:
    """Send each request of `cases`, and assert that the responses have its statuses.

    From 400 on, a response must be an Error. The hidden plant must not be stored.
    """
    for data, statuses in cases.items():
        found = answers(server.send(data, ends=True))
        assert [status for status, _ in found] == statuses, data[-999:]
        assert all(status < 400 or body.keys() == {"error", "message"} for status, body in found)
    assert 666 not in read_names(server.url)


ROUTES = [  # A head, the status that it gets, and whether the service reads its body.
    (BASIC, 401, False),
    (BASIC + TOKEN_LINE.replace(b":", b"_:"), 401, False),
    (HEAD + TOKEN_LINE, 401, False),
    (HEAD.replace(b"/json", b"/http"), 415, False),
    (HEAD.replace(b"POST /plants", b"GET /plants?_method=POST"), 405, False),
    (HEAD.replace(b"POST /plants", b"GET /openapi.json"), 200, False),
    (HEAD, 400, True),
    (HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\n", 400, True),
]


@pytest.mark.parametrize("body", [post(HIDDEN, head=b""), CHUNKED + chunked(HIDDEN, HIDDEN, b"")])
def test_no_part_of_a_body_is_served_as_a_request(server, body):
    """If the service does not read the body, it answers at once and closes the connection.

    The response says `Connection: close` then. Otherwise the next request on it is served.
    """
    for head, status, is_read in ROUTES:
        check(server, {head + body + AFTER: [status, 404] if is_read else [status]})
        with server.connect() as client:
            client.sendall(head + (body if is_read else body[: body.index(b"\r\n\r\n") + 4]))
            assert (CLOSE in receive_response(client)) == (not is_read)


def test_the_service_closes_a_connection_whose_body_it_does_not_read_to_the_end(server):
    """The response says so. A client that sends all of a large body first can still read it."""
    cases = {
        post(LARGE) + AFTER: [413],
        HEAD + CHUNKED + chunked(LARGE, b"") + AFTER: [413],
        post(LARGE, head=BASIC) + AFTER: [401],
        BASIC + CHUNKED + chunked(LARGE, b"") + AFTER: [401],
        HEAD + b"Content-Length: 9999\r\n\r\n" + HIDDEN: [408],
        HEAD + CHUNKED + b"10000000000000002\r\n{}\r\n0\r\n\r\n": [408],
        HEAD + CHUNKED + b"1": [408],
        HEAD + CHUNKED + chunked(EVIL): [408],
        OLD + CHUNKED + chunked(b"{}", b"") + AFTER: [400],
        post(b"{}", head=OLD) + AFTER: [400],
        post(b"", b"Connection: close") + HIDDEN: [400],
    }
    check(server, cases)
    assert [server.send(data, ends=True).count(CLOSE) for data in cases] == [1] * len(cases)


def test_a_request_that_follows_a_body_is_served(server):
    """Pipelining (RFC 9112 section 9.3.2): only Content-Length or the last chunk ends a body."""
    requests = [
        HEAD + b"Content-Length: 0002\r\n\r\n{}",
        HEAD + b"TRANSFER-ENCODING:\tCHUNKED \r\n\r\n00\r\n\r\n",
        HEAD + CHUNKED + b'2;a=b;c="; "\r\n{}\r\n0;d\r\n\r\n',  # Extensions of chunks.
        HEAD + CHUNKED + CHUNK * 12 + b"0\r\n\r\n",
        HEAD + CHUNKED + b"0\r\n" + TRAILER * 12 + b"\r\n",
        HEAD + b"\r\n\r\n",  # No body, and an empty line before the next request.
        OLD + b"Connection: keep-alive\r\n\r\n",
    ]
    check(server, {request + NEXT: [400, STORED] for request in requests})
    assert read_names(server.url)[667] == "next"


HEADERS = {
    b"Content-Length: 5\r\nTransfer-Encoding: chunked": 400,
    b"Content-Length: 5\r\nContent-Length: 6": 400,
    b"Content-Length: 5, 5": 400,
    b"Content-Length:": 400,
    b"Content-Length: \xb2": 400,
    b"Content-Length : 5": 400,
    b"Content-Length: 18446744073709551621": 413,
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked": 400,
    b"Transfer-Encoding: chunked, identity": 400,
    b"Transfer-Encoding: xchunked": 501,
    b"Transfer-Encoding: gzip, chunked": 501,
    b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked": 501,
    b"Transfer-Encoding: identity, chunked": 501,
    b"Transfer-Encoding:\r\n chunked": 400,
    b"X: a\nTransfer-Encoding: chunked": 400,
    b"X: a\rTransfer-Encoding: chunked": 400,
    b"Host: other": 400,
    b"Content-Type: text/plain": 400,
}
CHUNKS = [
    b"+2\r\n{}\r\n0\r\n\r\n",
    b"2\n{}\r\n0\r\n\r\n",
    b"2\r\n{}xx",
    b"5\r\n{}\r\n0\r\n\r\n",
    CHUNK * 20 + b"0\r\n\r\n",  # Longer than a request may be.
    b"0\r\n" + TRAILER * 20 + b"\r\n",
    b"0\r\nContent-Length: 5\r\n\r\n",
    b"0\r\n" + TOKEN_LINE + b"\r\n",
]


def test_a_request_whose_end_is_not_clear_is_refused(server):
    """It gets one Error, and the service reads no further request from the connection.

    This also holds if a whole plant has arrived before the mistake, and for a request that has no
    valid token. A token in a trailer does not count.
    """
    rest = b"\r\n\r\n0\r\n\r\n" + HIDDEN
    cases = {HEAD + line + rest: [status] for line, status in HEADERS.items()}
    cases |= {HEAD + CHUNKED + chunked(EVIL) + each + HIDDEN: [400] for each in CHUNKS}
    cases |= {BASIC + CHUNKED + each + HIDDEN: [401] for each in CHUNKS}
    check(server, cases)
