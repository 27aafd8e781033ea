"""What nobody thought of: bytes, headers and plants that hypothesis makes up."""

import json
import socket

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import VALIDATORS
from tests.support.server import HEADERS, TOKEN, receive
from tests.support.wire import answers

INT64, EXACT = range(-(2**63), 2**63), range(-(2**53), 2**53 + 1)
EDGES = st.sampled_from(
    [
        edge + step
        for edge in (0, 2**31, -(2**31), 2**53, -(2**53), 2**63, -(2**63))
        for step in (-1, 0, 1)
    ]
)
ODD = st.text(st.sampled_from(' \t\n\r"\\/u0e\x01\x7f\u0301\u2028\ufeff\uffff\U0001f335'))
TEXT = ODD | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(TEXT, values, max_size=4),
    max_leaves=8,
)


def made_up(count: int) -> settings:
    """So many examples, the same in each run, of which nothing is kept."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def spellings(number: int) -> list[str]:
    """Ways to write an integer in JSON, all of which are that integer exactly."""
    if number not in EXACT:
        return [str(number)]
    ways = [f"{number}", f"{number}.0", f"{number}.00e0", f"{number}E+00"]
    if number % 10 == 0:
        ways += [f"{number // 10}e1", f"{number // 10}.0E+1"]
    if number:
        ways += [f"{number}{'0' * count}{e}-{count}" for count in (1, 3, 30) for e in "eE"]
    return ways


@st.composite
def plants(draw: st.DrawFn) -> tuple[tuple[int, str, str | None], bytes]:
    """A plant, and one of the texts that it can be sent as."""
    number = draw(
        st.integers(INT64.start, INT64.stop - 1) | EDGES.filter(lambda edge: edge in INT64)
    )
    name, tag = draw(TEXT), draw(st.none() | TEXT)
    members = {"id": number, "name": name} | ({} if tag is None else {"tag": tag})
    others = st.dictionaries(TEXT.filter(lambda key: key not in ("id", "name", "tag")), VALUES)
    order = draw(st.permutations([*members.items(), *draw(others).items()]))
    dump = json.JSONEncoder(
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 0, 3, "\t", "\r\n"])),
    ).encode
    digits = draw(st.sampled_from(spellings(number)))
    parts = [f"{dump(key)}:{digits if key == 'id' else dump(value)}" for key, value in order]
    space = draw(st.sampled_from(["", " ", "\n", "\r\n\t"]))
    text = f"{space}{{{space}{f'{space},{space}'.join(parts)}{space}}}{space}"
    return (number, name, tag), text.encode()


def test_what_is_a_plant_is_stored_and_answered_exactly(client, stored):
    """In any order, spelling and company; the first with an id stays. So it is on PostgreSQL."""
    known = {}

    @made_up(300)
    @given(plants())
    def check(example: tuple[tuple[int, str, str | None], bytes]) -> None:
        plant, text = example
        first = known.setdefault(plant[0], plant)
        answer = client.post("/plants", text, HEADERS, expect_errors=True)
        if first == plant:
            tag = {} if plant[2] is None else {"tag": plant[2]}
            assert (answer.status_int, answer.json) == (200, {"name": plant[1], **tag}), text
        else:
            assert answer.status_int == 409, text

    check()
    assert stored() == sorted(known.values())


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Any bytes, or a plant in which some are others."""
    garbage = draw(st.binary(max_size=20))
    if draw(st.booleans()):
        return garbage
    text = b'{"id": 7, "name": "n\\u00e9", "tag": "\xc3\xa9", "x": [1.5, null]}'
    start, end = draw(st.integers(0, len(text))), draw(st.integers(0, 9))
    return text[:start] + garbage + text[start + end :]


def test_any_bytes_are_a_plant_or_an_error(client):
    """A 400 or, if they happen to be a plant, what becomes of one."""

    @made_up(1000)
    @given(bodies())
    def check(body: bytes) -> None:
        answer = client.post("/plants", body, HEADERS, expect_errors=True)
        assert answer.status_int in (200, 400, 409), body
        VALIDATORS["plant" if answer.status_int == 200 else "error"].validate(answer.json)

    check()


START = st.sampled_from(
    [b"POST /plants HTTP/1.1\r\n", b"POST /plants HTTP/1.0\r\n", b"PUT /plants HTTP/1.1\r\n",
     b"GET /healthz?x HTTP/1.1\r\n", b"POST /plants/ HTTP/1.1\r\n"]
)  # fmt: skip
NAMES = st.sampled_from(
    [b"Transfer-Encoding", b"Content-Type", b"Content-Encoding", b"Expect", b"Connection",
     b"Upgrade", b"Host", b"X-Request-ID", b"Origin", b"Content_Length", b"Cookie", b"Trailer",
     b"X-Forwarded-Proto", b"X-Forwarded-Protocol", b"Authorization", b"Proxy-Authorization"]
)  # fmt: skip
ANY_VALUES = st.sampled_from(
    [b"", b"0", b"2", b"chunked", b"gzip, chunked", b"close", b"keep-alive", b"https",
     b"100-continue", b"application/json", b"Bearer", b"Bearer " + TOKEN[1:].encode(),
     b"Basic " + TOKEN.encode()]
) | st.from_regex(rb"[\x21-\x7e\x80-\xff]{0,20}", fullmatch=True)  # fmt: skip
ENDS = st.sampled_from([b"\r\n"] * 9 + [b"\n", b"\r", b"\0", b"\r\n "])
LINES = st.tuples(NAMES, ANY_VALUES, ENDS).map(lambda header: b"%b: %b%b" % header)
BODY = b'{"id": 666, "name": "n"}'
BODIES = st.sampled_from(
    [b"\r\n", b"Content-Length: 24\r\n\r\n" + BODY, b"Content-Length: 2\r\n\r\n" + BODY,
     b"Transfer-Encoding: chunked\r\n\r\n18\r\n" + BODY + b"\r\n0\r\n\r\n",
     b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + BODY]
)  # fmt: skip
REQUESTS = st.tuples(START, st.lists(LINES, max_size=5).map(b"".join), BODIES).map(b"".join)


def test_any_bytes_over_a_socket_are_answered_with_errors_and_let_nobody_in(serve, stored):
    """Requests with any headers and bodies, garbage, and several of them in a row."""
    server = serve(WEB_CONCURRENCY="1")

    @made_up(1000)
    @given(st.lists(REQUESTS | REQUESTS | st.binary(max_size=20), max_size=3).map(b"".join))
    def check(data: bytes) -> None:
        with server.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            found = answers(receive(connection).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""))
        for status, answer in found:
            if status != 200:
                assert status in (400, 401, 404, 405, 413, 414, 415, 417, 431, 501), data
                VALIDATORS["error"].validate(answer)
            else:
                assert answer == {"status": "ok"}, data

    check()
    assert stored() == []
    assert len(server.workers(1)) == 1 and server.err.count("Booting worker") == 1
