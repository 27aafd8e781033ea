"""What could make one request look like two, or be read in another way than a proxy reads it.

In each body hides a whole request, with a good token, that would store plant 666. RFC 9112 says
what is one request (sections 6.3 and 7.1); what is not clear must be refused.
"""

import contextlib
import json
import socket
import threading

import pytest

from app import BODY_LIMIT
from schemas import VALIDATORS
from tests.support.server import TOKEN, Server
from tests.support.wire import HEAD, MONSTERA, answers, chunked, post, receive_answer

PLANT = json.dumps(MONSTERA).encode()
EVIL = b'{"id": 666, "name": "smuggled"}'
HIDDEN = HEAD + b"Content-Length: %d\r\n\r\n" % len(EVIL) + EVIL
NEXT = post({"id": 667, "name": "next"})
AFTER = b"GET /after HTTP/1.1\r\nHost: localhost\r\n\r\n"  # answered with 404 if it is reached


def differ(server: Server, cases: dict[str, tuple[bytes, list[int]]]) -> dict[str, list[int]]:
    """The cases that were not answered as they should be, and how they were.

    Every answer is JSON, and nothing that hides in a body is stored.
    """
    got = {}
    for name, (data, _) in cases.items():
        found = answers(server.send(data, ends=True))
        assert all(code < 400 or not VALIDATORS["error"].validate(body) for code, body in found)
        got[name] = [code for code, _ in found]
    assert server.stored(666) is None
    return {name: statuses for name, statuses in got.items() if statuses != cases[name][1]}


ROUTES = {
    "no token": (HEAD.replace(b"Bearer", b"Basic"), 401),
    "another token": (HEAD.replace(TOKEN.encode(), TOKEN.encode()[:-1]), 401),
    "no plant": (HEAD, 400),
    "no JSON": (HEAD.replace(b"/json", b"/http"), 415),
    "packed": (HEAD + b"Content-Encoding: gzip\r\n", 415),
    "no such path": (HEAD.replace(b"/plants", b"/nothing"), 404),
    "no such method": (HEAD.replace(b"POST", b"PUT"), 405),
    "OPTIONS": (HEAD.replace(b"POST", b"OPTIONS"), 405),
    "GET": (HEAD.replace(b"POST /plants", b"GET /healthz"), 200),
    "an upgrade to HTTP/2": (
        HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: \r\n",
        400,
    ),
}


@pytest.mark.parametrize("way", ["Content-Length", "chunked"])
def test_no_request_is_served_from_the_body_of_another(server, way):
    """Whatever is answered, and whether or not the body was read, the next request is behind it."""
    if way == "chunked":
        body = b"Transfer-Encoding: chunked\r\n\r\n" + chunked(HIDDEN, HIDDEN, b"")
    else:
        body = b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN
    cases = {name: (head + body + AFTER, [status, 404]) for name, (head, status) in ROUTES.items()}
    assert differ(server, cases) == {}


def test_a_body_that_is_not_read_to_its_end_ends_the_connection(server):
    """Beyond what a server is willing to throw away nothing can be told from it."""
    many = HIDDEN * (3 * BODY_LIMIT // len(HIDDEN))
    length = b"Content-Length: %d\r\n\r\n" % len(many)
    coding = b"Transfer-Encoding: chunked\r\n\r\n"
    nobody = HEAD.replace(b"Bearer", b"Basic")
    cases = {
        "length": (HEAD + length + many + AFTER, [413]),
        "chunked": (HEAD + coding + chunked(many, b"") + AFTER, [413]),
        "length, no token": (nobody + length + many + AFTER, [401]),
        "chunked, no token": (nobody + coding + chunked(many, b"") + AFTER, [401]),
        "a lie": (HEAD + b"Content-Length: 9999999\r\n\r\n" + HIDDEN, [413]),
        "too short": (HEAD + b"Content-Length: 59999\r\n\r\n" + HIDDEN, [400]),
        "a plant cut short": (HEAD + b"Content-Length: 59\r\n\r\n" + EVIL, [400]),
        "closed": (HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n" + HIDDEN, [400]),
    }
    assert differ(server, cases) == {}


@pytest.mark.parametrize("way", ["Content-Length", "chunked"])
@pytest.mark.parametrize("size", [100, BODY_LIMIT, BODY_LIMIT + 1, 2 * BODY_LIMIT + 1, 10**6])
def test_an_answer_tells_whether_its_connection_goes_on(server, way, size):
    """Unless it says that it closes, the next request is answered; small bodies never close it."""
    body = b"Content-Length: %d\r\n\r\n" % size + bytes(size)
    if way == "chunked":
        parts = [bytes(2**15)] * (size >> 15) + [bytes(size % 2**15)] * bool(size % 2**15)
        body = b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*parts, b"")
    for head, status in ROUTES.values():
        with server.connect() as connection, server.connect() as other:
            sending = threading.Thread(target=send, args=[connection, head + body])
            sending.start()
            answer = receive_answer(connection)
            sending.join()
            closes = b"\r\nConnection: close\r\n" in answer
            send(other if closes else connection, AFTER)
            answer += receive_answer(other if closes else connection)
        assert [code for code, _ in answers(answer)] in ([status, 404], [413, 404])
        assert size > 100 or not closes


def send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it closes, as it has said
        connection.sendall(data)


def test_what_is_behind_a_body_is_a_request_of_its_own(server):
    """Pipelining (RFC 9112 section 9.3.2): the lengths say where one ends, nothing else does."""
    cases = {
        "length": (HEAD + b"Content-Length: 2\r\n\r\n{}" + NEXT, [400, 200]),
        "zeros before a length": (HEAD + b"Content-Length: 0002\r\n\r\n{}" + NEXT, [400, 200]),
        "chunked": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + NEXT, [400, 200]),
        "in capitals": (HEAD + b"TRANSFER-ENCODING:\tCHUNKED \r\n\r\n00\r\n\r\n" + NEXT,
                        [400, 200]),
        "a chunk's extension": (
            HEAD + b'Transfer-Encoding: chunked\r\n\r\n2;a=b;c="; "\r\n{}\r\n0;d\r\n\r\n' + NEXT,
            [400, 200],
        ),
        "a trailer": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: a\r\n\r\n" + NEXT,
                      [400, 200]),
        "no body": (HEAD + b"\r\n" + NEXT, [400, 200]),
        "a line before": (b"\r\n" + NEXT, [200]),
    }  # fmt: skip
    assert differ(server, cases) == {}
    assert server.stored(667) == (667, "next", None)


HEADERS = {
    "a length and chunks": (b"Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
    "chunks and a length": (b"Transfer-Encoding: chunked\r\nContent-Length: 5", 400),
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
    "identity alone": (b"Transfer-Encoding: identity", 400),
    "xchunked": (b"Transfer-Encoding: xchunked", 501),
    "chunked, and more": (b"Transfer-Encoding: chunked;q=1", 501),
    "NUL behind chunked": (b"Transfer-Encoding: chunked\x00", 400),
    "chunked behind a space": (b"Transfer-Encoding : chunked", 400),
    "chunked on the next line": (b"Transfer-Encoding:\r\n chunked", 400),
    "a bare LF": (b"X: a\nTransfer-Encoding: chunked", 400),
    "a bare CR": (b"X: a\rTransfer-Encoding: chunked", 400),
    "NUL in a value": (b"X: \x00", 400),
    "no colon": (b"Transfer-Encoding chunked", 400),
    "two hosts": (b"Host: other", 400),
    "two types": (b"Content-Type: text/plain", 400),
}  # fmt: skip


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_headers_that_are_not_clear_are_refused(server, version):
    """One Error, and nothing that follows is read as a request."""
    head = HEAD.replace(b"HTTP/1.1", version)
    rest = b"\r\n\r\n0\r\n\r\n" + HIDDEN
    cases = {name: (head + line + rest, [status]) for name, (line, status) in HEADERS.items()}
    assert differ(server, cases) == {}


HEADS = {
    "chunks in HTTP/1.0": HEAD.replace(b"/1.1", b"/1.0") + b"Transfer-Encoding: chunked\r\n\r\n",
    "lines that end with LF": HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 5\n\n",
    "a space before the first name": HEAD.replace(b"Host", b" Host") + b"\r\n",
    "NUL in the target": HEAD.replace(b"/plants", b"/plants\x00") + b"\r\n",
    "a space behind the version": HEAD.replace(b"/1.1", b"/1.1 ") + b"\r\n",
    "no version": b"POST /plants\r\n\r\n",
    "two lines before": b"\r\n\r\n" + HEAD + b"\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "who a proxy says one is": b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\n",
}


def test_heads_that_are_not_clear_are_refused(server):
    cases = {name: (head + b"0\r\n\r\n" + HIDDEN, [400]) for name, head in HEADS.items()}
    assert differ(server, cases) == {}


CHUNKS = {
    "empty": b"\r\n\r\n",
    "+": b"+2\r\n{}\r\n0\r\n\r\n",
    "-": b"-1\r\n",
    "_": b"0_2\r\n{}\r\n0\r\n\r\n",
    "a digit beyond ASCII": "\uff12\r\n{}\r\n0\r\n\r\n".encode(),
    "an extension with LF": b"2;a\n{}\r\n0\r\n\r\n",
    "lines that end with LF": b"2\n{}\n0\n\n",
    "a size that ends with LF": b"2\n{}\r\n0\r\n\r\n",
    "data without an end": b"2\r\n{}0\r\n\r\n",
    "more data than announced": b"2\r\n{}xx",
    "less data than announced": b"5\r\n{}\r\n0\r\n\r\n",
    "beyond 64 bits": b"10000000000000002\r\n{}\r\n0\r\n\r\n",
    "a huge size": b"f" * 5000 + b"\r\n",
    "a size without an end": b"0" * 10_000,
    "an extension without an end": b"2;" + b"a" * 10_000,
    "a trailer without a colon": b"0\r\nbroken trailer\r\n\r\n",
    "NUL in a trailer": b"0\r\nX: \x00\r\n\r\n",
    "a length in a trailer": b"0\r\nContent-Length: 5\r\n\r\n",
    "a token in a trailer": b"0\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n",
    "too many trailers": b"0\r\n" + b"X: a\r\n" * 200 + b"\r\n",
}


def test_chunks_that_are_not_clear_are_refused(server):
    """Also where what came before the fault was a whole plant; a 401 stays the only answer.

    A token in a trailer lets nobody in.
    """
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    nobody = head.replace(b"Authorization", b"X")
    for start, status in ((head + chunked(EVIL), 400), (nobody, 401)):
        cases = {name: (start + rest + HIDDEN, [status]) for name, rest in CHUNKS.items()}
        assert differ(server, cases) == {}


TARGETS = {
    b"/plants": 200,
    b"/%70lants": 200,  # an unreserved character is the same in both ways (RFC 3986, 6.2.2.2)
    b"http://localhost/plants": 200,  # RFC 9112 section 3.2.2
    b"http://elsewhere.example/plants?x": 200,
    b"//plants": 404,
    b"/plants/": 404,
    b"/plants;x": 404,
    b"/plants%00": 404,
    b"/plants%ff": 404,
    b"/pl%ffants": 404,
    b"/%c0%afplants": 404,
    b"/plants%2f": 404,
    b"/plants%0d%0aX:%20a": 404,
    b"/healthz/../plants": 404,
    b"/plants\\": 404,
    b"http://localhost": 405,  # the path is /
    b"plants": 400,
    b"*": 400,
    b"/pl\xc3\xa4nts": 400,
}


def test_only_the_target_of_the_plants_stores_one(server):
    """What looks like it is not found, and nothing of the sort is a failure."""
    length = b"Content-Length: %d\r\n\r\n" % len(PLANT)
    cases = {
        target.decode(): (HEAD.replace(b"/plants", target) + length + PLANT, [status])
        for target, status in TARGETS.items()
    }
    assert differ(server, cases) == {}
    assert server.stored(7) == (7, "Monstera", "indoor")


def test_no_header_or_query_makes_of_a_method_another(server):
    cases = {}
    for line in (b"X-HTTP-Method-Override", b"X-HTTP-Method", b"X-Method-Override", b"_method"):
        head = HEAD.replace(b"POST /plants", b"GET /plants?_method=POST") + line + b": POST\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(EVIL)
        cases[line.decode()] = (head + length + EVIL, [405])
    assert differ(server, cases) == {}
