"""What could make one request look like two, or be read in another way than a proxy reads it.

In each body hides a whole request, with a good token, that would store plant 666. RFC 9112 says
what is one request (sections 6.3 and 7.1); what is not clear must be refused.
"""

import pytest

from app import BODY_LIMIT
from tests.support.server import STORED, TOKEN, Server
from tests.support.storage import read_names
from tests.support.wire import HALF_A_BODY, HEAD, answers, chunked, post, receive_answer

EVIL = b'{"id": 666, "name": "smuggled"}'
HIDDEN = post(EVIL)
NEXT = post({"id": 667, "name": "next"})
AFTER = b"GET /after HTTP/1.1\r\nHost: localhost\r\n\r\n"  # answered with 404 if it is reached
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
NOBODY = HEAD.replace(b"Bearer", b"Basic")


def length(body: bytes) -> bytes:
    """The end of a head, and a body of that length."""
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def differ(server: Server, cases: dict[bytes, list[int]]) -> dict[bytes, list[int]]:
    """The requests that were not answered with these statuses, and how they were.

    Every answer of 400 and above is an Error, and nothing that hides in a body is stored.
    """
    got = {}
    for data in cases:
        found = answers(server.send(data, ends=True))
        assert all(code < 400 or body.keys() == {"error", "message"} for code, body in found)
        got[data] = [code for code, _ in found]
    assert 666 not in read_names(server.url)
    return {data[-999:]: codes for data, codes in got.items() if codes != cases[data]}


ROUTES = [  # heads, what is answered, and whether the body is read for that
    (NOBODY, 401, False),
    (NOBODY + b"Authorization_: Bearer %b\r\n" % TOKEN.encode(), 401, False),
    (HEAD + b"Authorization: Bearer %b\r\n" % TOKEN.encode(), 401, False),
    (HEAD.replace(b"/json", b"/http"), 415, False),
    (HEAD.replace(b"POST /plants", b"GET /plants?_method=POST"), 405, False),
    (HEAD.replace(b"POST /plants", b"GET /openapi.json"), 200, False),
    (HEAD, 400, True),
    (HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\n", 400, True),
]


@pytest.mark.parametrize("body", [length(HIDDEN), CHUNKED + chunked(HIDDEN, HIDDEN, b"")])
def test_no_request_is_served_from_the_body_of_another(server, body):
    """Either the body was read, and the next request is behind it; or the connection ends, as the
    answer says, which does not wait for the body.
    """
    cases = {
        head + body + AFTER: [status, 404] if is_read else [status]
        for head, status, is_read in ROUTES
    }
    assert differ(server, cases) == {}
    for head, _, is_read in ROUTES:
        with server.connect() as client:
            client.sendall(head + (body if is_read else body[: body.index(b"\r\n\r\n") + 4]))
            assert (b"\r\nConnection: close\r\n" in receive_answer(client)) == (not is_read)


def test_a_body_that_is_not_read_to_its_end_ends_the_connection(server):
    """Too long, too short, or cut short."""
    many = HIDDEN * (3 * BODY_LIMIT // len(HIDDEN))
    cases = {
        HEAD + length(many) + AFTER: [413],
        HEAD + CHUNKED + chunked(many, b"") + AFTER: [413],
        NOBODY + length(many) + AFTER: [401],
        NOBODY + CHUNKED + chunked(many, b"") + AFTER: [401],
        HEAD + b"Content-Length: 9999\r\n\r\n" + HIDDEN: [408],
        HEAD + CHUNKED + b"f" * 5000 + b"\r\n" + HIDDEN: [408],
        HEAD + CHUNKED + b"10000000000000002\r\n{}\r\n0\r\n\r\n": [408],
        HEAD + CHUNKED + b"1": [408],
        HEAD + CHUNKED + chunked(EVIL): [408],
        HEAD.replace(b"/1.1", b"/1.0") + CHUNKED + chunked(b"{}", b"") + AFTER: [400],
        HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n" + HIDDEN: [400],
    }
    assert differ(server, cases) == {}
    assert b"\r\nConnection: close\r\n" in server.send(HALF_A_BODY, ends=True)


def test_what_is_behind_a_body_is_a_request_of_its_own(server):
    """Pipelining (RFC 9112 section 9.3.2): the lengths say where one ends, nothing else does."""
    bodies = [
        b"Content-Length: 0002\r\n\r\n{}",
        b"TRANSFER-ENCODING:\tCHUNKED \r\n\r\n00\r\n\r\n",
        CHUNKED + b'2;a=b;c="; "\r\n{}\r\n0;d\r\n\r\n',  # extensions
        CHUNKED + b"0\r\nX: a\r\n\r\n",  # a trailer
        b"\r\n\r\n",  # no body, and a line before the next request
    ]
    assert differ(server, {HEAD + body + NEXT: [400, STORED] for body in bodies}) == {}
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
    b"2;" + b"a" * 2**15,
    b"0\r\nContent-Length: 5\r\n\r\n",
    b"0\r\nAuthorization: Bearer %b\r\n\r\n" % TOKEN.encode(),
    b"0\r\n" + b"X: a\r\n" * 200 + b"\r\n",
]


def test_what_is_not_clear_is_refused(server):
    """One Error, and nothing that follows is read as a request; after a 401 comes no other answer.

    Also where what came before the fault was a whole plant. A token in a trailer lets nobody in.
    """
    rest = b"\r\n\r\n0\r\n\r\n" + HIDDEN
    cases = {HEAD + line + rest: [status] for line, status in HEADERS.items()}
    cases |= {HEAD + CHUNKED + chunked(EVIL) + each + HIDDEN: [400] for each in CHUNKS}
    cases |= {NOBODY + CHUNKED + each + HIDDEN: [401] for each in CHUNKS}
    assert differ(server, cases) == {}
