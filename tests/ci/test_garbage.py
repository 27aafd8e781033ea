"""What nobody thought of: bytes, headers and plants that hypothesis makes up."""

import json
import socket
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import QUICK_CHECKS, VALIDATORS
from tests.conftest import url  # noqa: F401  # both engines, for the plants
from tests.server import HEADERS, TOKEN, receive
from tests.test_server import HEAD, answers

MAX_INT, MAX_EXACT = 2**63 - 1, 2**53
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
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


# plants


def spellings(number: int) -> list[str]:
    """Ways to write an integer in JSON, all of which are that integer exactly."""
    if abs(number) > MAX_EXACT:
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
    near = st.sampled_from([0, 1, -1, MAX_EXACT, -MAX_EXACT, MAX_EXACT + 1, MAX_INT, -MAX_INT - 1])
    number = draw(near | st.integers(-MAX_INT - 1, MAX_INT) | st.integers(-9, 9))
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
    """In any order, spelling and company; the first with an id stays."""
    known = {}

    @made_up(400)
    @given(plants())
    def check(example: tuple[tuple[int, str, str | None], bytes]) -> None:
        plant, text = example
        first = known.setdefault(plant[0], plant)
        answer = client.post("/plants", text, HEADERS, expect_errors=True)
        if first == plant:
            tag = {} if plant[2] is None else {"tag": plant[2]}
            assert (answer.status_int, answer.json) == (200, {"name": plant[1], **tag})
        else:
            assert answer.status_int == 409

    check()
    assert stored() == sorted(known.values())


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_only_whole_numbers_of_64_bits_are_ids(client, stored):
    """As the fractions that the digits stand for say; beyond 2**53 in digits alone."""
    known = set()
    digits = st.from_regex(
        r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,2})?", fullmatch=True
    )

    @made_up(600)
    @given(digits)
    def check(text: str) -> None:
        value = Fraction(text)
        limit = MAX_INT if text.removeprefix("-").isdigit() else MAX_EXACT
        good = value.denominator == 1 and (-limit - (limit == MAX_INT) <= value <= limit)
        body = f'{{"id": {text}, "name": "n"}}'.encode()
        assert client.post("/plants", body, HEADERS, expect_errors=True).status_int == (
            200 if good else 400
        )
        if good:
            known.add((int(value), "n", None))

    check()
    assert stored() == sorted(known)


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("plant", ["name", "tag"]),
        ("new-plant", ["id", "name", "tag"]),
        ("error", ["error", "message"]),
    ],
)
def test_a_quick_check_passes_nothing_that_is_not_valid(name, members):
    """And all that is, but for what it leaves to the validator."""
    seen = set()
    near = st.integers(-MAX_INT - 3, 3 - MAX_INT) | st.integers(MAX_INT - 3, MAX_INT + 3)
    member = st.text() | near | st.integers(-9, 9) | st.decimals() | VALUES
    objects = st.fixed_dictionaries({}, optional=dict.fromkeys(members, member))

    @made_up(500)
    @given(objects | VALUES)
    def check(value: object) -> None:
        is_valid = VALIDATORS[name].is_valid(value)
        passes = bool(QUICK_CHECKS[name](value))
        assert passes == is_valid or (name == "error" and is_valid)
        seen.add(is_valid)

    check()
    assert seen == {True, False}


# bytes


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Any bytes, or a plant in which some are others."""
    garbage = draw(st.binary(max_size=20))
    if draw(st.booleans()):
        return garbage
    text = b'{"id": 7, "name": "n\\u00e9", "tag": "\xc3\xa9", "x": [1.5, null]}'
    start, end = draw(st.integers(0, len(text))), draw(st.integers(0, 9))
    return text[:start] + garbage + text[start + end :]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_any_bytes_are_a_plant_or_an_error(client):
    """A 400 or, if they happen to be a plant, what becomes of one."""

    @made_up(1000)
    @given(bodies())
    def check(body: bytes) -> None:
        answer = client.post("/plants", body, HEADERS, expect_errors=True)
        assert answer.status_int in (200, 400, 409)
        VALIDATORS["plant" if answer.status_int == 200 else "error"].validate(answer.json)

    check()


NAMES = st.sampled_from(
    [b"Content-Length", b"Transfer-Encoding", b"Content-Type", b"Content-Encoding", b"Expect",
     b"Connection", b"Upgrade", b"Host", b"X-Request-ID", b"Origin", b"Content_Length", b"Cookie",
     b"X-Forwarded-Proto", b"X-Forwarded-Protocol", b"Authorization", b"Proxy-Authorization"]
)  # fmt: skip
HEADER_VALUES = st.sampled_from(
    [b"0", b"2", b"99", b"chunked", b"gzip, chunked", b"close", b"keep-alive", b"https", b"on",
     b"application/json", b"Bearer", b"Bearer " + TOKEN[1:].encode(), b"Basic " + TOKEN.encode()]
)  # fmt: skip
PIECES = st.sampled_from(
    [b"POST /plants HTTP/1.1\r\n", b"PUT /plants HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\n",
     b"POST /plants HTTP/1.0\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"\r", b":", b" ", b"\0",
     b"2\r\n{}\r\n", b"0\r\n\r\n", HEAD.replace(TOKEN.encode(), TOKEN[1:].encode()),
     b'{"id": 666, "name": "n"}']
)  # fmt: skip
LINES = st.tuples(NAMES | st.binary(max_size=9), HEADER_VALUES | st.binary(max_size=9)).map(
    lambda header: b"%b: %b\r\n" % header
)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_any_bytes_over_a_socket_are_answered_with_errors_and_let_nobody_in(serve, stored):
    """Requests with any headers, and what is made of pieces of requests."""
    server = serve(WEB_CONCURRENCY="1")
    body = b'Content-Length: 24\r\n\r\n{"id": 666, "name": "n"}'
    whole = st.lists(LINES, max_size=9).map(
        lambda lines: b"POST /plants HTTP/1.1\r\n" + b"".join(lines) + body
    )
    pieces = st.lists(PIECES | LINES | st.binary(max_size=9), max_size=12).map(b"".join)

    @made_up(1000)
    @given(whole | pieces)
    def check(data: bytes) -> None:
        with server.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            found = answers(receive(connection).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""))
        for status, answer in found:
            assert status in (400, 401, 404, 405, 413, 414, 415, 417, 431, 501) or (
                answer == {"status": "ok"}
            )
            assert status == 200 or not VALIDATORS["error"].validate(answer)

    check()
    assert stored() == []
    assert len(server.workers(1)) == 1 and server.err.count("Booting worker") == 1
