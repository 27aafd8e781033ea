"""What could make one request look like two, or be read in another way than a proxy reads it.

In each body hides a whole request, with a good token, that would store plant 666. RFC 9112 says
what is one request (sections 6.3 and 7.1); what is not clear must be refused.
"""

import pytest

from app import BODY_LIMIT
from tests.support.server import TOKEN, Server
from tests.support.wire import HEAD, answers, chunked, post, receive_answer

EVIL = b'{"id": 666, "name": "smuggled"}'
HIDDEN = post(EVIL)
NEXT = post({"id": 667, "name": "next"})
AFTER = b"GET /after HTTP/1.1\r\nHost: localhost\r\n\r\n"  # answered with 404 if it is reached
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
GOOD = TOKEN.encode()
NOBODY = HEAD.replace(b"Bearer", b"Basic")


def with_length(body: bytes) -> bytes:
    """The end of a head, and a body of that length."""
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def differ(server: Server, cases: dict[str, tuple[bytes, list[int]]]) -> dict[str, list[int]]:
    """The cases that were not answered as they should be, and how they were.

    Every answer of 400 and above is an Error, and nothing that hides in a body is stored.
    """
    got = {}
    for name, (data, _) in cases.items():
        found = answers(server.send(data, ends=True))
        assert all(code < 400 or body.keys() == {"error", "message"} for code, body in found)
        got[name] = [code for code, _ in found]
    assert server.stored(666) is None
    return {name: statuses for name, statuses in got.items() if statuses != cases[name][1]}


ROUTES = {  # heads, what is answered, and whether the body is read for that
    "no token": (NOBODY, 401, False),
    "another token": (HEAD.replace(GOOD, GOOD[:-1]), 401, False),
    "a token in another header": (NOBODY + b"Authorization_: Bearer %b\r\n" % GOOD, 401, False),
    "a token in CGI's words": (NOBODY + b"HTTP_AUTHORIZATION: Bearer %b\r\n" % GOOD, 401, False),
    "two tokens": (HEAD + b"Authorization: Bearer %b\r\n" % GOOD, 401, False),
    "no plant": (HEAD, 400, True),
    "no JSON": (HEAD.replace(b"/json", b"/http"), 415, False),
    "packed": (HEAD + b"Content-Encoding: gzip\r\n", 415, False),
    "no such path": (HEAD.replace(b"/plants", b"/nothing"), 404, False),
    "no such method": (HEAD.replace(b"POST /plants", b"GET /plants?_method=POST"), 405, False),
    "another method": (HEAD.replace(b"POST", b"PUT") + b"X-Http-Method: POST\r\n", 405, False),
    "GET": (HEAD.replace(b"POST /plants", b"GET /healthz"), 200, False),
    "an upgrade to HTTP/2": (
        HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: \r\n",
        400,
        True,
    ),
}


@pytest.mark.parametrize(
    "body", [with_length(HIDDEN), CHUNKED + chunked(HIDDEN, HIDDEN, b"")], ids=["length", "chunks"]
)
def test_no_request_is_served_from_the_body_of_another(server, body):
    """Either the body was read, and the next request is behind it; or the connection ends, as the
    answer says, which does not wait for the body.
    """
    cases = {
        name: (head + body + AFTER, [status, 404] if is_read else [status])
        for name, (head, status, is_read) in ROUTES.items()
    }
    assert differ(server, cases) == {}
    for head, _, is_read in ROUTES.values():
        with server.connect() as client:
            client.sendall(head + (body if is_read else body[: body.index(b"\r\n\r\n") + 4]))
            assert (b"\r\nConnection: close\r\n" in receive_answer(client)) == (not is_read)


def test_a_body_that_is_not_read_to_its_end_ends_the_connection(server):
    """Too long, too short, or cut short."""
    many = HIDDEN * (3 * BODY_LIMIT // len(HIDDEN))
    cases = {
        "length": (HEAD + with_length(many) + AFTER, [413]),
        "chunked": (HEAD + CHUNKED + chunked(many, b"") + AFTER, [413]),
        "length, no token": (NOBODY + with_length(many) + AFTER, [401]),
        "chunked, no token": (NOBODY + CHUNKED + chunked(many, b"") + AFTER, [401]),
        "a lie": (HEAD + b"Content-Length: 9999999\r\n\r\n" + HIDDEN, [413]),
        "too short": (HEAD + b"Content-Length: 59999\r\n\r\n" + HIDDEN, [408]),
        "a plant cut short": (HEAD + b"Content-Length: 59\r\n\r\n" + EVIL, [408]),
        "a huge chunk": (HEAD + CHUNKED + b"f" * 5000 + b"\r\n" + HIDDEN, [408]),
        "beyond 64 bits": (HEAD + CHUNKED + b"10000000000000002\r\n{}\r\n0\r\n\r\n", [408]),
        "no chunk": (HEAD + CHUNKED, [408]),
        "half a size": (HEAD + CHUNKED + b"1", [408]),
        "half a chunk": (HEAD + CHUNKED + b"59\r\n" + EVIL, [408]),
        "no last chunk": (HEAD + CHUNKED + chunked(EVIL), [408]),
        "HTTP/1.0": (HEAD.replace(b"/1.1", b"/1.0") + CHUNKED + chunked(b"{}", b"") + AFTER, [400]),
        "closed": (HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n" + HIDDEN, [400]),
    }
    assert differ(server, cases) == {}


def test_what_is_behind_a_body_is_a_request_of_its_own(server):
    """Pipelining (RFC 9112 section 9.3.2): the lengths say where one ends, nothing else does."""
    bodies = {
        "length": b"Content-Length: 2\r\n\r\n{}",
        "zeros before a length": b"Content-Length: 0002\r\n\r\n{}",
        "chunked": CHUNKED + b"0\r\n\r\n",
        "in capitals": b"TRANSFER-ENCODING:\tCHUNKED \r\n\r\n00\r\n\r\n",
        "a chunk's extension": CHUNKED + b'2;a=b;c="; "\r\n{}\r\n0;d\r\n\r\n',
        "a trailer": CHUNKED + b"0\r\nX: a\r\n\r\n",
        "no body, and a line before the next request": b"\r\n\r\n",
    }
    cases = {name: (HEAD + body + NEXT, [400, 200]) for name, body in bodies.items()}
    assert differ(server, cases) == {}
    assert server.stored(667) == (667, "next", None)


HEADERS = {
    "a length and chunks": (b"Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
    "two lengths": (b"Content-Length: 5\r\nContent-Length: 6", 400),
    "a length twice": (b"Content-Length: 5\r\nContent-Length: 5", 400),
    "a list of equal lengths": (b"Content-Length: 5, 5", 400),
    "+": (b"Content-Length: +5", 400),
    "-": (b"Content-Length: -5", 400),
    "empty": (b"Content-Length:", 400),
    "a digit beyond ASCII": (b"Content-Length: \xb2", 400),
    "a huge length": (b"Content-Length: " + b"9" * 4000, 413),
    "beyond 64 bits": (b"Content-Length: 18446744073709551621", 413),
    "a length behind a space": (b"Content-Length : 5", 400),
    "chunked twice": (b"Transfer-Encoding: chunked, chunked", 400),
    "chunked on two lines": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400),
    "chunked is not the last": (b"Transfer-Encoding: chunked, identity", 400),
    "gzip alone": (b"Transfer-Encoding: gzip", 400),
    "xchunked": (b"Transfer-Encoding: xchunked", 501),
    "chunked, and more": (b"Transfer-Encoding: chunked;q=1", 501),
    "chunked on the next line": (b"Transfer-Encoding:\r\n chunked", 400),
    "a bare LF": (b"X: a\nTransfer-Encoding: chunked", 400),
    "a bare CR": (b"X: a\rTransfer-Encoding: chunked", 400),
    "NUL in a value": (b"X: \x00", 400),
    "no colon": (b"Transfer-Encoding chunked", 400),
    "two hosts": (b"Host: other", 400),
    "two types": (b"Content-Type: text/plain", 400),
}


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_headers_that_are_not_clear_are_refused(server, version):
    """One Error, and nothing that follows is read as a request."""
    head = HEAD.replace(b"HTTP/1.1", version)
    rest = b"\r\n\r\n0\r\n\r\n" + HIDDEN
    cases = {name: (head + line + rest, [status]) for name, (line, status) in HEADERS.items()}
    cases["a space before a name"] = (head.replace(b"Host", b" Host") + rest, [400])
    cases["lines that end with LF"] = (head.replace(b"\r\n", b"\n") + b"X: a" + rest, [400])
    assert differ(server, cases) == {}


CHUNKS = {
    "empty": b"\r\n\r\n",
    "+": b"+2\r\n{}\r\n0\r\n\r\n",
    "-": b"-1\r\n",
    "_": b"0_2\r\n{}\r\n0\r\n\r\n",
    "a digit beyond ASCII": "\uff12\r\n{}\r\n0\r\n\r\n".encode(),
    "an extension with LF": b"2;a\n{}\r\n0\r\n\r\n",
    "a size that ends with LF": b"2\n{}\r\n0\r\n\r\n",
    "data without an end": b"2\r\n{}0\r\n\r\n",
    "more data than announced": b"2\r\n{}xx",
    "less data than announced": b"5\r\n{}\r\n0\r\n\r\n",
    "a size without an end": b"0" * 10_000,
    "an extension without an end": b"2;" + b"a" * 10_000,
    "a trailer without a colon": b"0\r\nbroken trailer\r\n\r\n",
    "NUL in a trailer": b"0\r\nX: \x00\r\n\r\n",
    "a length in a trailer": b"0\r\nContent-Length: 5\r\n\r\n",
    "a token in a trailer": b"0\r\nAuthorization: Bearer " + GOOD + b"\r\n\r\n",
    "too many trailers": b"0\r\n" + b"X: a\r\n" * 200 + b"\r\n",
}


def test_chunks_that_are_not_clear_are_refused(server):
    """Also where what came before the fault was a whole plant; a 401 stays the only answer.

    A token in a trailer lets nobody in.
    """
    head, nobody = HEAD + CHUNKED, NOBODY + CHUNKED
    for start, status in ((head + chunked(EVIL), 400), (nobody, 401)):
        cases = {name: (start + rest + HIDDEN, [status]) for name, rest in CHUNKS.items()}
        assert differ(server, cases) == {}
