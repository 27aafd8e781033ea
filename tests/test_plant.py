"""Which bodies are plants, and what the message says about the mistakes in the others."""

import itertools
import json
import runpy
import shutil
import time
from collections.abc import Callable

import pytest
from jsonschema import Draft201909Validator
from referencing import Registry

from app import BODY_LIMIT
from plant import SCHEMAS, InvalidPlant, Plant, parse_new_plant
from tests.support.server import ROOT

INTEGER = "id: must be an integer, not "
FRACTION = f"{INTEGER}a number with a fraction"
TOO_LARGE = "id: must be written in plain digits beyond 2**53 (9007199254740992)"
TOO_MUCH = "the body is nested too deeply, or has a number with too many digits"
HALF = "the body has an escaped half of a surrogate pair"
TWICE = "the body has two members of the same name in one object"
NOT_JSON = "the body is not valid JSON: "
MANY = ", ".join(f'"{number}": 0' for number in range(999))
DEEP = "[" * 900 + "]" * 900  # Python of every version parses this depth.
MISTAKES = {  # A body, and the message that it gets.
    "": "the body is empty",
    '{\n"id": x}': f"{NOT_JSON}Expecting value at line 2, column 7",
    '{"id": 1, "name": "n"} {}': f"{NOT_JSON}Extra data at line 1, column 24",
    "\ufeff{}": "the body begins with a byte order mark, which JSON does not have",
    '{"id": \udcff}': "the body is not valid UTF-8: invalid start byte at byte 7",
    '{"id": -Infinity, "name": "n"}': f"{NOT_JSON}NaN and Infinity are not allowed",
    '{"id": 1, "\\u0069d": 2, "name": "n"}': TWICE,
    '{"x": [[[[[{"a": 1, "a": 1}]]]]]}': TWICE,
    "null": "the body: must be an object, not null",
    "{}": "id: required but missing; name: required but missing",
    '{"name": "n", "tag": null}': "id: required but missing; tag: must be a string, not null",
    '{"id": "7", "name": ["n"]}': f"{INTEGER}a string; name: must be a string, not an array",
    '{"id": {"id": 7}, "name": 7}': f"{INTEGER}an object; name: must be a string, not a number",
    f'{{"id": {DEEP}, "name": "n"}}': f"{INTEGER}an array",
    f'{{{MANY}, "name": "n", "id": ""}}': f"{INTEGER}a string",
    '{"id": true, "name": "n"}': f"{INTEGER}a boolean",
    '{"id": 7.5, "name": "n"}': FRACTION,
    '{"id": 1e-1, "name": "n"}': FRACTION,
    '{"id": -1e-99999, "name": 1e99}': f"{FRACTION}; name: must be a string, not a number",
    '{"id": 9007199254740992.5, "name": "n"}': FRACTION,
    '{"id": 9007199254740993.0, "name": "n"}': TOO_LARGE,
    '{"id": -9007199254740993.0, "name": "n"}': TOO_LARGE,
    '{"id": 1e16, "name": "n"}': TOO_LARGE,
    '{"id": -1e16, "name": "n"}': TOO_LARGE,
    '{"id": -1e99999, "name": "n"}': TOO_LARGE,
    '{"id": 1e999999999, "name": "n"}': TOO_LARGE,
    '{"id": 1e9999999999999999999, "name": "n"}': TOO_MUCH,
    '{"id": 9223372036854775808, "name": "n"}': "id: must be at most 9223372036854775807",
    '{"id": -9223372036854775809, "name": "n"}': "id: must be at least -9223372036854775808",
    f'{{"id": {"1" * 4300}, "name": "n"}}': "id: must be at most 9223372036854775807",
    f'{{"id": {"1" * 4301}, "name": "n"}}': TOO_MUCH,
    '{"id": 7, "name": "\\u0000", "tag": "a\\u0000\\n"}': "name: must not contain NUL; "
    "tag: must not contain NUL",
    '{"id": 7, "name": "\\ud800"}': HALF,
    '{"id": 7, "name": "n", "x": [{"\\udfff": 1.5}]}': HALF,
}


def refusal(body: bytes) -> str | None:
    """Return the message about a body that is not a plant, or None if it is a plant."""
    try:
        parse_new_plant(body)
    except InvalidPlant as error:
        return str(error)
    return None


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[-44:])
def test_a_message_names_every_mistake_in_terms_of_json_and_repeats_no_value(text):
    assert refusal(text.encode("utf-8", "surrogateescape")) == MISTAKES[text]


def test_a_rule_that_somebody_adds_to_a_schema_is_explained_in_words(tmp_path):
    """The test adds a pattern, an enum and a maximum length to a copy of the schemas.

    A value that breaks several rules gets the message about one of them. The message names a member
    that somebody has added to a schema, even if Plant does not have it yet.
    """
    shutil.copytree(ROOT / "schemas", tmp_path / "schemas")
    file = tmp_path / "schemas" / "plant.json"
    schema = json.loads(file.read_text())
    schema["properties"]["name"]["pattern"] = "^[A-Z]"
    schema["properties"]["tag"] |= {"enum": ["indoor", "outdoor"], "maxLength": 7}
    schema["properties"]["year"] = {"type": "integer", "minimum": 1800}
    file.write_text(json.dumps(schema))
    plant = runpy.run_path(shutil.copy(ROOT / "plant.py", tmp_path))
    with pytest.raises(plant["InvalidPlant"]) as refusal:
        plant["parse_new_plant"](b'{"id": 7, "name": "n", "tag": "somewhere", "year": 7}')
    name, tag, year = str(refusal.value).split("; ")
    assert name == 'name: must match the pattern "^[A-Z]"'
    assert tag == 'tag: must be one of ["indoor", "outdoor"]'
    assert year == "year: must be at least 1800"


def test_plant_has_exactly_the_members_that_the_schemas_describe():
    """Otherwise a member would be accepted and lost without a word."""
    described = [*SCHEMAS["plant"]["properties"], *SCHEMAS["new-plant"]["allOf"][1]["properties"]]
    assert sorted(Plant._fields) == sorted(described)


NO_JSON = [b"[1,]", b"{a: 1}", b"'a'", b"/**/1", b"\xc2\xa01", b'"new\nline"', rb'"\x00"']
NO_JSON += [b"01", b"+1", b"1.", b"0x42", b"1_000", b"\xef\xbc\x91", rb'"\u+123"', rb'"\u1_23"']
NO_JSON += [b'"\xc0\xaf"', b'"\xed\xa0\x80"', *(f'"{each}"'.encode("utf-16") for each in "aé")]


@pytest.mark.parametrize("text", NO_JSON)
def test_a_body_that_is_not_json_is_refused_even_if_the_mistake_is_in_an_ignored_member(text):
    """RFC 8259 says what JSON is. json.loads() accepts more: UTF-16, for example."""
    assert refusal(text).startswith("the body ")
    assert refusal(b'{"id": 7, "name": "n", "x": %b}' % text).startswith("the body ")


@pytest.mark.parametrize("depth", [100, 1_000, 10_000, 30_000])
def test_a_deeply_nested_body_is_stored_or_refused_but_never_fails(depth):
    """Python's parser follows about 1,000 or 100,000 levels, depending on its version."""
    quarter = depth // 4  # An object opens with four bytes, so both openings are equally long.
    for nested in (b"[" * depth + b"]" * depth, b'{"":' * quarter + b"[]" + b"}" * quarter):
        assert refusal(nested)
        assert refusal(b'{"id": 7, "name": %b}' % nested)
        assert refusal(b'{"id": 7, "name": "\\ud800", "x": %b}' % nested) in (HALF, TOO_MUCH)
        body = b'{"id": 7, "name": "\\u006e", "x": %b}' % nested
        assert refusal(body) in (None, TOO_MUCH)


def test_a_body_that_is_nested_almost_too_deep_for_the_parser_is_refused_and_does_not_fail():
    """On Python 3.11, repr() and the parser share one limit, so repr() may exceed it first."""
    for depth in range(700, 1_100):
        assert refusal(b'{"id": %b}' % (b"[" * depth + b"]" * depth))


def fill(form: str, item: str) -> bytes:
    """Return a body as long as the limit allows: `form` with as many copies of `item` as fit.

    In each copy, its number stands in place of `#`.
    """
    size = len(item.replace("#", "0000").encode()) + 1
    items = (item.replace("#", f"{number:04x}") for number in range((BODY_LIMIT - 50) // size))
    return form.replace("%s", ",".join(items)).encode()


ITEMS = ["1", "1e9", "1" * 4300, "null", "[]", '{"a": 1}', '""', '"\\ud83c\\udf35"', DEEP]
FORMS = ["[%s]", '{"id": [%s], "name": "n"}', '{"id": 7, "name": "\\u0041", "x": [%s]}']
NESTED = b"[" * (BODY_LIMIT // 2) + b"]" * (BODY_LIMIT // 2)
COSTLY = [
    *(fill(form, item) for form in FORMS for item in ITEMS),
    fill("{%s}", '"#":1'),
    fill('{"id": 7, "name": "n", %s}', '"#\\ud800":[]'),
    fill('{"id": 7, "id": 8, %s}', '"#":1'),
    fill('{"id": 7, "name": "%s"}', "\\u0000"),
    NESTED,
    b'{"id": %b}' % NESTED[9:-9],
    b'{"id": 1%b}' % (b"0" * (BODY_LIMIT - 9)),
    b"\n" * BODY_LIMIT,
]


def cpu_time(call: Callable[[bytes], object], body: bytes) -> float:
    """Return the CPU seconds of a call with `body`: the shortest of five, to leave out noise."""
    times = []
    for _ in range(5):
        start = time.process_time()
        call(body)
        times.append(time.process_time() - start)
    return min(times)


def test_the_cost_of_a_body_is_bounded_by_its_size():
    """The largest body of each kind takes at most twenty times as long as a list of integers.

    That list has the same size and is parsed by json.loads(). Both times are CPU times.
    """
    unit = min(cpu_time(json.loads, fill("[%s]", "1")) for _ in range(4))
    costs = {body: cpu_time(refusal, body) / unit for body in COSTLY}
    assert {body[:50]: cost for body, cost in costs.items() if cost > 20} == {}


VALUES = ["null", "true", "0", "7", "-9223372036854775809", "9223372036854775808", "7.5", '""']
VALUES += ['"n"', '"n\\n"', '"\\u0000"', '"a\\u0000b\\n"', "[]", '["n"]', "{}", '{"id": 7}']


def test_the_service_and_jsonschema_accept_the_same_plants():
    """The test tries every combination of values for the members; most of them break a rule."""
    registry = Registry().with_contents((schema["$id"], schema) for schema in SCHEMAS.values())
    validator = Draft201909Validator(SCHEMAS["new-plant"], registry=registry)
    plants = list(VALUES)
    for values in itertools.product([*VALUES, None], [*VALUES, None], ['"n"', "7", None]):
        members = zip(('"id": ', '"name": ', '"tag": '), values, strict=True)
        present = [name + value for name, value in members if value is not None]
        plants.append(f"{{{', '.join(present)}}}")
    accepted = 0
    for text in plants:
        is_valid = validator.is_valid(json.loads(text))
        assert is_valid == (refusal(text.encode()) is None), text
        accepted += is_valid
    assert accepted > 10
