"""What nobody thought of: plants, bytes and headers that are made up, and requests by the book.

hypothesis makes up what is no HTTP; schemathesis makes requests of /openapi.json.
"""

import json
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ci.node import ENVIRONMENT, node_modules
from tests.support.server import HEADERS, QUICK, TOKEN
from tests.support.wire import answers

EDGES = st.sampled_from([0, 2**31, 2**53, -(2**53), 2**63, -(2**63)])
IDS = st.integers() | st.builds(int.__add__, EDGES, st.integers(-1, 1))
ODD = st.text(st.sampled_from(' \t\n\r"\\/u0e\x01\x7f\u0301\u2028\ufeff\uffff\U0001f335'))
TEXT = ODD | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(TEXT, values, max_size=4),
    max_leaves=8,
)
STARTS = [b"POST /plants HTTP/1.1", b"POST /plants HTTP/1.0", b"PUT /plants HTTP/1.1"]
STARTS += [b"GET /healthz?x HTTP/1.1", b"POST /plants/ HTTP/1.1"]
NAMES = ["Transfer-Encoding", "Content-Type", "Content-Encoding", "Expect", "Connection", "Upgrade"]
NAMES += ["Host", "X-Request-ID", "Origin", "Content_Length", "Cookie", "Trailer", "Authorization"]
NAMED = ["", "0", "2", "chunked", "gzip, chunked", "close", "keep-alive", "100-continue"]
NAMED += ["application/json", "Bearer", f"Bearer {TOKEN[1:]}", f"Basic {TOKEN}"]
ENDS = [b"\r\n"] * 9 + [b"\n", b"\r", b"\0", b"\r\n "]
PLANT = b'{"id": 7, "name": "n\\u00e9", "tag": "\xc3\xa9", "x": [1.5, null]}'
BODIES = [
    b"\r\n",
    b"Content-Length: 2\r\n\r\n{}",
    b"Content-Length: %d\r\n\r\n" % len(PLANT) + PLANT,
]
BODIES += [b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PLANT), PLANT)]
LINES = st.tuples(
    st.sampled_from(NAMES).map(str.encode),
    st.sampled_from(NAMED).map(str.encode)
    | st.from_regex(rb"[\x21-\x7e\x80-\xff]{0,20}", fullmatch=True),
    st.sampled_from(ENDS),
).map(lambda header: b"%b: %b%b" % header)
REQUESTS = st.tuples(
    st.sampled_from(STARTS), st.lists(LINES, max_size=5).map(b"".join), st.sampled_from(BODIES)
).map(lambda parts: b"%b\r\n%b%b" % parts)


def made_up(count, *strategies):
    """Run a test with so many examples, the same in each run, of which nothing is kept."""
    health = list(HealthCheck)
    options = {"derandomize": True, "database": None, "deadline": None}
    run = settings(max_examples=count, suppress_health_check=health, **options)
    return lambda test: run(given(*strategies)(test))()


@st.composite
def plants(draw):
    """A plant, and one of the texts that it can be sent as."""
    number = draw(IDS.filter(lambda each: -(2**63) <= each < 2**63))
    name, tag = draw(TEXT), draw(st.none() | TEXT)
    members = {"id": number, "name": name} | ({} if tag is None else {"tag": tag})
    others = st.dictionaries(TEXT.filter(lambda key: key not in ("id", "name", "tag")), VALUES)
    order = draw(st.permutations([*members.items(), *draw(others).items()]))
    indent = draw(st.sampled_from([None, 0, 3, "\t", "\r\n"]))
    dump = json.JSONEncoder(ensure_ascii=draw(st.booleans()), indent=indent).encode
    ways = [f"{number}", f"{number}.0", f"{number}.00E+0", f"{number * 1000}e-3"]
    digits = draw(st.sampled_from(ways if abs(number) <= 2**53 else ways[:1]))
    parts = [f"{dump(key)}:{digits if key == 'id' else dump(value)}" for key, value in order]
    space = draw(st.sampled_from(["", " ", "\n", "\r\n\t"]))
    text = f"{space}{{{space}{f'{space},{space}'.join(parts)}{space}}}{space}"
    return (number, name, tag), text.encode()


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
            assert (answer.status_int, answer.json) == (200, {"name": plant[1], **tag}), text
        else:
            assert answer.status_int == 409, text

    assert stored() == sorted(known.values())


def test_any_bytes_are_a_plant_or_an_error(client):
    """A 400 or, if they happen to be a plant, what becomes of one."""

    @made_up(1000, st.binary(max_size=20), st.integers(0, len(PLANT)), st.integers(0, 9))
    def check(garbage, start, length):
        body = PLANT[:start] + garbage + PLANT[start + length :]
        answer = client.post("/plants", body, HEADERS, expect_errors=True)
        assert answer.status_int in (200, 400, 409), body
        assert set(answer.json) <= {"name", "tag"} or set(answer.json) == {"error", "message"}


def test_any_bytes_over_a_socket_are_answered_with_errors_and_let_nobody_in(serve, stored):
    """Requests with any headers and bodies, garbage, and several of them in a row."""
    server = serve(QUICK, WEB_CONCURRENCY="1")

    @made_up(1000, st.lists(REQUESTS | REQUESTS | st.binary(max_size=20), max_size=3))
    def check(requests):
        data = b"".join(requests)
        found = server.send(data, ends=True).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        for status, answer in answers(found):
            if status == 200:
                assert answer == {"status": "ok"}, data
            else:
                assert status in (400, 401, 404, 405, 408, 413, 414, 415, 417, 431, 501), data
                assert answer == {"error": status, "message": answer["message"]}, data

    assert stored() == []
    assert len(server.workers(1)) == 1 and server.err.count("Booting worker") == 1


def test_the_description_is_as_its_linter_wants_it(server, tmp_path):
    """No error, and no warning but that a licence and a contact are the operator's to say."""
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(server.request("GET", "/openapi.json").body))
    settings = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}
    command = [node_modules() / ".bin/redocly", "lint", document]
    command += ["--extends=recommended", "--format=json"]
    done = subprocess.run(command, env={**ENVIRONMENT, **settings}, capture_output=True, text=True)
    found = {each["ruleId"] for each in json.loads(done.stdout)["problems"]}
    assert found <= {"info-license", "info-contact"}, done.stdout


def test_the_service_does_what_the_description_says(serve, tmp_path):
    """Schemathesis finds nothing, with every check that it has."""
    server = serve(QUICK, WEB_CONCURRENCY="1")
    command = [Path(sys.executable).with_name("schemathesis"), "run", "--checks=all", "--seed=7"]
    command += ["--max-examples=200", f"--header=Authorization: Bearer {TOKEN}"]
    command += [f"http://127.0.0.1:{server.port}/openapi.json"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout
    assert "No issues found" in run.stdout
    assert "2 selected / 2 total" in run.stdout
    assert '" 500 ' not in server.out and "Traceback" not in server.err
