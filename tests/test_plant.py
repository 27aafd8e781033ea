"""What counts as a plant, and what a person is told of one that does not."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fastjsonschema
import pytest
from jsonschema import Draft201909Validator, ValidationError
from referencing import Registry

from plant import SCHEMAS, InvalidPlant, parse_new_plant
from tests.support.costs import costs
from tests.support.json_cases import OTHERS, REFUSED, TEXTS
from tests.support.server import HEADERS, ROOT

BY_ID = {schema["$id"]: schema for schema in SCHEMAS.values()}
REGISTRY = Registry().with_contents(BY_ID.items())
INTEGER = "id: must be an integer, not "
FLOAT = f"{INTEGER}a number with a fraction or an exponent"
HALF = "the plant has half of a surrogate pair"
TWICE = "the plant has two members of the same name"
UNREADABLE = "the plant is not JSON that can be read: "
MANY = ", ".join(f'"{number}": 0' for number in range(999))
DEEP = "[" * 900 + "]" * 900  # what every parser takes
MISTAKES = {
    "": "the plant is missing: nothing was sent",
    "{'id': 7}": f"{UNREADABLE}Expecting property name enclosed in double quotes at line 1, "
    "column 2",
    '{\n"id": x}': f"{UNREADABLE}Expecting value at line 2, column 7",
    '{"id": 1, "name": "n"} {}': f"{UNREADABLE}Extra data at line 1, column 24",
    "\ufeff{}": "the plant starts with a byte order mark, which JSON has no place for",
    '{"id": -Infinity, "name": "n"}': "the plant is not JSON, which has no NaN and no Infinity",
    '{"id": 1, "\\u0069d": 2, "name": "n"}': TWICE,
    '{"x": [[[[[{"a": 1, "a": 1}]]]]]}': TWICE,
    "null": "the plant: must be an object, not null",
    "[[7]]": "the plant: must be an object, not an array",
    "{}": "id: required but missing; name: required but missing",
    '{"name": "n", "tag": null}': "id: required but missing; tag: must be a string, not null",
    '{"id": "7", "name": ["n"]}': f"{INTEGER}a string; name: must be a string, not an array",
    '{"id": {"id": 7}, "name": 7}': f"{INTEGER}an object; name: must be a string, not a number",
    f'{{"id": {DEEP}, "name": "n"}}': f"{INTEGER}an array",
    f'{{{MANY}, "name": "n", "id": ""}}': f"{INTEGER}a string",
    '{"id": true, "name": "n"}': f"{INTEGER}a boolean",
    '{"id": 7.5, "name": "n"}': FLOAT,
    '{"id": 1.00000000000000000000001, "name": "n"}': FLOAT,
    '{"id": 1e-400, "name": "n"}': FLOAT,
    '{"id": 9007199254740993.0, "name": "n"}': FLOAT,
    '{"id": -9007199254740993.0, "name": "n"}': FLOAT,
    '{"id": 1e16, "name": "n"}': FLOAT,
    '{"id": 1e999999999, "name": "n"}': FLOAT,
    '{"id": 1e9999999999999999999, "name": "n"}': FLOAT,
    '{"id": 9223372036854775808, "name": "n"}': "id: must be at most 9223372036854775807",
    '{"id": -9223372036854775809, "name": "n"}': "id: must be at least -9223372036854775808",
    f'{{"id": {"1" * 4300}, "name": "n"}}': "id: must be at most 9223372036854775807",
    f'{{"id": {"1" * 4301}, "name": "n"}}': "the plant has a number with too many digits",
    '{"id": 7, "name": "\\u0000", "tag": "a\\u0000\\n"}': "name: must not contain NUL; "
    "tag: must not contain NUL",
    '{"id": 7, "name": "\\ud800"}': HALF,
    '{"id": 7, "name": "n", "x": [{"\\udfff": 1.5}]}': HALF,
}


def refusal(body: bytes) -> str:
    """What is said of a body that is no plant."""
    with pytest.raises(InvalidPlant) as caught:
        parse_new_plant(body)
    return str(caught.value)


def passes(check: Callable, value: object) -> bool:
    try:
        check(value)
    except (InvalidPlant, ValidationError, fastjsonschema.JsonSchemaException):
        return False
    return True


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[-44:])
def test_what_is_no_plant_is_told_in_words_of_json_that_repeat_nothing(text):
    assert refusal(text.encode()) == MISTAKES[text]


def test_what_is_not_utf_8_is_told_with_its_place():
    assert re.fullmatch("the plant is not UTF-8: .+ at byte 7", refusal(b'{"id": \xff}'))


def test_what_is_json_is_taken_and_what_is_not_is_refused(client, stored):
    """As the whole body, beside a plant, as the name of one, and as a member that is ignored."""

    def refuses(body: bytes) -> bool:
        answer = client.post("/plants", body, HEADERS, expect_errors=True)
        assert answer.status_int == 400, body[:99]
        return bool(re.match("the plant|id: |name: ", answer.json["message"]))

    plants = []
    for number, case in enumerate([*TEXTS, *OTHERS, *REFUSED]):
        assert refuses(case)
        if case.strip():
            assert refuses(case + b'{"id": 7, "name": "n"}')
            assert refuses(b'{"id": 7, "name": "n"}' + case)
        for plant, body, is_taken in (
            ((2 * number, TEXTS.get(case)), b'{"id": %d, "name": %b}', case in TEXTS),
            ((2 * number + 1, "n"), b'{"id": %d, "name": "n", "x": %b}', case not in REFUSED),
        ):
            if is_taken:
                answer = client.post("/plants", body % (plant[0], case), HEADERS)
                assert answer.json == {"name": plant[1]}
                plants.append((*plant, None))
            else:
                assert refuses(body % (plant[0], case))
    assert stored() == plants


@pytest.mark.parametrize("depth", [100, 1_000, 10_000, 30_000])
def test_what_is_nested_is_taken_or_refused_however_deep_a_parser_goes(depth):
    """Python's goes to about 1,000 or 100,000, depending on its version."""
    too_deep = "the plant is nested too deeply"
    quarter = depth // 4  # of brackets and names, of which each takes four bytes
    for nested in (b"[" * depth + b"]" * depth, b'{"":' * quarter + b"[]" + b"}" * quarter):
        assert refusal(nested)
        assert refusal(b'{"id": 7, "name": %b}' % nested)
        assert refusal(b'{"id": 7, "name": "\\ud800", "x": %b}' % nested) in (HALF, too_deep)
        body = b'{"id": 7, "name": "\\u006e", "x": %b}' % nested
        assert passes(parse_new_plant, body) or refusal(body) == too_deep


def test_no_kind_of_body_costs_more_than_its_bytes(record_property):
    """The CPU time of each is at most twenty times that of json.loads() of as many integers."""
    found = costs()
    assert {kind: cost for kind, cost in found.items() if cost > 20} == {}
    record_property("the most costly body of 64 KiB", f"{max(found.values()):.1f} times json.loads")


@pytest.mark.parametrize("name", ["plant", "new-plant", "error"])
def test_each_schema_is_described_and_fits_its_own_examples(name):
    schema = SCHEMAS[name]
    assert schema["$schema"] == Draft201909Validator.META_SCHEMA["$id"]
    assert schema["$id"].endswith(f"/{name}.json")
    assert schema["title"] and schema["description"]
    for part in schema.get("allOf", [schema]):
        assert all(p["description"] and p["examples"] for p in part.get("properties", {}).values())
    for example in schema["examples"]:
        Draft201909Validator(schema, registry=REGISTRY).validate(example)


VALUES = ["null", "true", "0", "7", "-9223372036854775809", "9223372036854775808", "7.5", '""']
VALUES += ['"n"', '"n\\n"', '"\\u0000"', '"a\\u0000b\\n"', "[]", '["n"]', "{}", '{"id": 7}']


def test_both_validators_take_the_same_plants():
    """On every combination of members, of which most are wrong in one way or another.

    fastjsonschema decides quickly, jsonschema explains what is wrong: each ignores
    what its dialect does not know, so the schemas declare one that both know.
    """
    check = fastjsonschema.compile(SCHEMAS["new-plant"], handlers={"https": BY_ID.__getitem__})
    explain = Draft201909Validator(SCHEMAS["new-plant"], registry=REGISTRY).validate
    plants = list(VALUES)
    for values in itertools.product([*VALUES, None], [*VALUES, None], ['"n"', "7", None]):
        members = zip(('"id": ', '"name": ', '"tag": '), values, strict=True)
        shown = [name + value for name, value in members if value is not None]
        plants.append(f"{{{', '.join(shown)}}}")
    taken = 0
    for text in plants:
        is_valid = passes(explain, json.loads(text))
        assert is_valid == passes(check, json.loads(text)), text
        assert is_valid == passes(parse_new_plant, text.encode()), text
        taken += is_valid
    assert taken > 10


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Parses plants, given as arguments, by schemas of which one was changed as text."""
    shutil.copytree(ROOT / "schemas", tmp_path / "schemas")
    shutil.copy(ROOT / "plant.py", tmp_path)
    program = (
        "import sys\n"
        "from plant import InvalidPlant, parse_new_plant\n"
        "for text in sys.argv[1:]:\n"
        "    try:\n"
        "        print(parse_new_plant(text.encode()))\n"
        "    except InvalidPlant as error:\n"
        "        print(error)\n"
    )

    def run(name: str, old: str, new: str, *texts: str) -> subprocess.CompletedProcess:
        file = tmp_path / "schemas" / f"{name}.json"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        command = [sys.executable, "-c", program, *texts]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return run


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("new-plant", '"$ref": "plant.json"', '"$ref": "shrub.json"', "shrub.json"),
        ("new-plant", '"plant.json"', '"http://127.0.0.1:9/plant.json"', "KeyError"),
        ("plant", '"type": "object"', '"type": "thing"', "'thing' is not valid"),
    ],
)
def test_a_schema_or_reference_that_is_wrong_is_found_at_once(changed, name, old, new, words):
    """When the module is imported, not with the first plant; nothing is fetched."""
    done = changed(name, old, new)
    assert done.returncode != 0
    assert words in done.stderr


def test_another_rule_of_a_schema_holds_and_is_explained(changed):
    """At any depth and place, in words of the schema alone. Nothing is filled in."""
    rules = (
        '"sun": {"type": "array", "items": {"type": "string"}, "default": ["full"]},'
        '"tag": {"enum": ["in", "under"], "format": "date", "default": "in", "maxLength": 3,'
    )
    cases = {
        '{"id": 7, "name": "n"}': "Plant(id=7, name='n', tag=None)",
        '{"id": 7, "name": "n", "tag": "in", "sun": []}': "Plant(id=7, name='n', tag='in')",
        '{"id": 7, "name": "n", "tag": "on"}': 'tag: must be one of ["in", "under"]',
        '{"id": 7, "name": "n", "tag": "under"}': "tag: must fit maxLength 3",
        '{"id": 7, "name": "n", "sun": ["a", 1]}': "data.sun[1] must be string",
    }
    done = changed("plant", '"tag": {', rules, *cases)
    assert done.stdout.splitlines() == [*cases.values()], done.stderr
