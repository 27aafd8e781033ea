"""Inputs that no test names: hypothesis makes up plants and bytes, and Schemathesis requests."""

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
    """One of `texts`, with a part of it replaced by up to 20 bytes of any kind, or one of LINES."""
    text = draw(st.sampled_from(texts))
    start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 9))
    part = draw(st.binary(max_size=20) | st.sampled_from(LINES))
    return text[:start] + part + text[start + length :]


def made_up(count, *strategies):
    """Return a decorator that runs its function at once, with `count` examples.

    The examples are the same in each run, and hypothesis keeps none of them in a file.
    """
    options = {"derandomize": True, "database": None, "deadline": None}
    options |= {"max_examples": count, "suppress_health_check": list(HealthCheck)}
    return lambda test: settings(**options)(given(*strategies)(test))()


@st.composite
def plants(draw):
    """A plant as a tuple, and one of the JSON texts by which it can be sent."""
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


def test_a_plant_is_stored_and_returned_exactly_however_its_json_is_written(client, stored):
    """Order of members, spacing, escapes, spelling of numbers and unknown members do not matter.

    Of several plants with the same id, the first one is stored.
    """
    known = {}

    @made_up(300, plants())
    def check(example):
        plant, text = example
        first = known.setdefault(plant[0], plant)
        response = client.post("/plants", text, HEADERS, expect_errors=True)
        if first == plant:
            tag = {} if plant[2] is None else {"tag": plant[2]}
            assert (response.status_int, response.json) == (STORED, {"name": plant[1], **tag}), text
        else:
            assert response.status_int == 409, text

    assert stored() == sorted(known.values())


def test_a_body_of_any_bytes_gets_a_plant_or_an_error(client):
    """The status is 400, unless the bytes happen to be a plant."""

    @made_up(1000, changed(PLANT))
    def check(body):
        response = client.post("/plants", body, HEADERS, expect_errors=True)
        assert response.status_int in (STORED, 400, 409), body
        assert set(response.json) <= {"name", "tag"} or set(response.json) == {"error", "message"}


def test_a_connection_with_any_bytes_gets_only_errors_and_stores_nothing(serve, stored):
    """The bytes are up to three pieces in a row: requests with a part replaced, or a few bytes.

    None of them has a valid token. No worker ends.
    """
    server = serve(PATIENT, WEB_CONCURRENCY="1")
    parts = changed(post(PLANT, head=STRANGER), IN_CHUNKS) | st.binary(max_size=20)

    @made_up(1000, st.lists(parts, max_size=3).map(b"".join))
    def check(data):
        found = server.send(data, ends=True).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        for status, body in answers(found):
            assert status in (400, 401, 404, 405, 408, 413, 414, 415, 417, 431, 501), data
            assert body == {"error": status, "message": body["message"]}, data

    assert stored() == []
    assert server.err.count("Booting worker") == 1


def test_schemathesis_finds_no_difference_between_the_service_and_its_description(serve, tmp_path):
    """It runs all of its checks on /plants, /healthz and /livez."""
    server = serve(PATIENT, WEB_CONCURRENCY="1")
    command = [Path(sys.executable).with_name("schemathesis"), "run", "--checks=all", "--seed=7"]
    command += ["--max-examples=200", f"--header=Authorization: Bearer {TOKEN}"]
    command += [f"http://127.0.0.1:{server.port}/openapi.json"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout
    assert "No issues found" in run.stdout
    assert "3 selected / 3 total" in run.stdout
    assert '"status": 500' not in server.out
