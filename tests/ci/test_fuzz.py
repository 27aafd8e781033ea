"""What nobody thought of: plants and bytes that hypothesis makes up, and requests by the book."""

import json
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.server import HEADERS, PATIENT, STORED, TOKEN
from tests.support.wire import CHUNKED, HEAD, answers, chunked, post

EDGES = [-(2**63), -(2**53) - 1, -(2**53), 2**31, 2**53, 2**53 + 1, 2**63 - 1]
IDS = st.sampled_from(EDGES) | st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9)
ODD = st.text(st.sampled_from(' \t\n\r"\\/u0e\x01\x7f\u0301\u2028\ufeff\uffff\U0001f335'))
TEXT = ODD | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(TEXT, values, max_size=4),
    max_leaves=8,
)
PLANT = b'{"id": 7, "name": "n\\u00e9", "tag": "\xc3\xa9", "x": [1.5, null]}'
STRANGER = HEAD.replace(TOKEN.encode(), b"another")
IN_CHUNKS = STRANGER + CHUNKED + chunked(PLANT, b"")
LINES = [b"Expect: 100-continue\r\n", b"Content-Length: 0\r\n", b"\r\n", b"\r", b"\0"]


@st.composite
def changed(draw, *texts):
    """One of some texts, a part of which is replaced by any bytes or by a line."""
    text = draw(st.sampled_from(texts))
    start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 9))
    part = draw(st.binary(max_size=20) | st.sampled_from(LINES))
    return text[:start] + part + text[start + length :]


def made_up(count, *strategies):
    """Run a test with so many examples, the same in each run, of which nothing is kept."""
    options = {"derandomize": True, "database": None, "deadline": None}
    options |= {"max_examples": count, "suppress_health_check": list(HealthCheck)}
    return lambda test: settings(**options)(given(*strategies)(test))()


@st.composite
def plants(draw):
    """A plant, and one of the texts that it can be sent as."""
    number = draw(IDS)
    name, tag = draw(TEXT), draw(st.none() | TEXT)
    members = {"id": number, "name": name} | ({} if tag is None else {"tag": tag})
    others = st.dictionaries(TEXT.filter(lambda key: key not in ("id", "name", "tag")), VALUES)
    order = draw(st.permutations([*members.items(), *draw(others).items()]))
    indent = draw(st.sampled_from([None, 0, 3, "\t", "\r\n"]))
    dump = json.JSONEncoder(ensure_ascii=draw(st.booleans()), indent=indent).encode
    ways = [f"{number}", f"{number}.0", f"{number}.00E+0", f"{number * 1000}e-3"]
    digits = draw(st.sampled_from(ways if abs(number) <= 2**53 else ways[:1]))
    parts = [f"{dump(key)}:{digits if key == 'id' else dump(value)}" for key, value in order]
    return (number, name, tag), f"{{{','.join(parts)}}}".encode()


def test_what_is_a_plant_is_stored_and_answered_exactly(client, stored):
    """In any order, spelling and company; the first with an id stays."""
    known = {}

    @made_up(300, plants())
    def check(example):
        plant, text = example
        first = known.setdefault(plant[0], plant)
        answer = client.post("/plants", text, HEADERS, expect_errors=True)
        if first == plant:
            tag = {} if plant[2] is None else {"tag": plant[2]}
            assert (answer.status_int, answer.json) == (STORED, {"name": plant[1], **tag}), text
        else:
            assert answer.status_int == 409, text

    assert stored() == sorted(known.values())


def test_any_bytes_are_a_plant_or_an_error(client):
    """A 400 or, if they happen to be a plant, what becomes of one."""

    @made_up(1000, changed(PLANT))
    def check(body):
        answer = client.post("/plants", body, HEADERS, expect_errors=True)
        assert answer.status_int in (STORED, 400, 409), body
        assert set(answer.json) <= {"name", "tag"} or set(answer.json) == {"error", "message"}


def test_any_bytes_over_a_socket_are_answered_with_errors_and_let_nobody_in(serve, stored):
    """Requests with a part that is something else, and several of them in a row."""
    server = serve(PATIENT, WEB_CONCURRENCY="1")
    parts = changed(post(PLANT, head=STRANGER), IN_CHUNKS) | st.binary(max_size=20)

    @made_up(1000, st.lists(parts, max_size=3).map(b"".join))
    def check(data):
        found = server.send(data, ends=True).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        for status, answer in answers(found):
            assert status in (400, 401, 404, 405, 408, 413, 414, 415, 417, 431, 501), data
            assert answer == {"error": status, "message": answer["message"]}, data

    assert stored() == []
    assert server.err.count("Booting worker") == 1


def test_the_service_does_what_the_description_says(serve, tmp_path):
    """Schemathesis finds nothing, with every check that it has."""
    server = serve(PATIENT, WEB_CONCURRENCY="1")
    command = [Path(sys.executable).with_name("schemathesis"), "run", "--checks=all", "--seed=7"]
    command += ["--max-examples=200", f"--header=Authorization: Bearer {TOKEN}"]
    command += [f"http://127.0.0.1:{server.port}/openapi.json"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout
    assert "No issues found" in run.stdout
    assert "2 selected / 2 total" in run.stdout
    assert '"status": 500' not in server.out
