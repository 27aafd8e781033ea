"""What counts as a plant, and what a person is told of one that does not."""

import itertools
import shutil
import socket
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

import schemas
from schemas import QUICK_CHECKS, VALIDATORS, InvalidPlant, parse_new_plant, quick_check


@pytest.mark.parametrize("name", ["plant", "new-plant", "error"])
def test_each_schema_is_described_and_fits_its_own_examples(name):
    """Every schema has $schema, $id, title and examples, every property a description."""
    schema = VALIDATORS[name].schema
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"].endswith(f"/{name}.json")
    assert schema["title"] and schema["description"]
    for part in schema.get("allOf", [schema]):
        assert all(p["description"] and p["examples"] for p in part.get("properties", {}).values())
    for example in schema["examples"]:
        VALIDATORS[name].validate(example)


def test_a_new_plant_is_built_on_plant_by_reference():
    """new-plant.json is allOf of a $ref to plant.json and an object with id, nothing beside."""
    schema = VALIDATORS["new-plant"].schema
    assert schema["allOf"][0] == {"$ref": "plant.json"}
    assert list(schema["allOf"][1]["properties"]) == ["id"]
    assert "properties" not in schema
    assert isinstance(VALIDATORS["new-plant"], Draft202012Validator)


@pytest.mark.parametrize(
    ("text", "plant"),
    [
        ('{"id": 7, "name": "Monstera"}', {"id": 7, "name": "Monstera"}),
        ('{"id": 7, "name": "", "tag": ""}', {"id": 7, "name": "", "tag": ""}),
        ('{"id": -9223372036854775808, "name": "n"}', {"id": -(2**63), "name": "n"}),
        ('{"id": 9223372036854775807, "name": "n"}', {"id": 2**63 - 1, "name": "n"}),
        ('{"id": -0, "name": "n"}', {"id": 0, "name": "n"}),
        ('{"id": 1.0, "name": "n"}', {"id": 1, "name": "n"}),
        ('{"id": 1e3, "name": "n"}', {"id": 1000, "name": "n"}),
        ('{"id": -1.50E1, "name": "n"}', {"id": -15, "name": "n"}),
        ('{"id": 0e999, "name": "n"}', {"id": 0, "name": "n"}),
        ('{"id": 9007199254740992.0, "name": "n"}', {"id": 2**53, "name": "n"}),
        ('{"id": 7, "name": "\\ud83c\\udf35\\n\\u007f"}', {"id": 7, "name": "🌵\n\x7f"}),
        ('{"id": 7, "name": "n", "pot": {"size": [1, "x"]}}', {"id": 7, "name": "n",
                                                               "pot": {"size": [1, "x"]}}),
        ('  {"id": 7, "name": "n"}\r\n', {"id": 7, "name": "n"}),
    ],
)  # fmt: skip
def test_what_is_a_plant(text, plant):
    """A NewPlant is taken as it was sent: int64, any Unicode but NUL, other members ignored."""
    parsed = parse_new_plant(text.encode())
    assert parsed == plant
    assert type(parsed["id"]) is int


REFUSED = {
    "every violation in one message": (
        '{"id": "7", "tag": 3}',
        'id: must be an integer, not "7"; name: required but missing; '
        "tag: must be a string, not 3",
    ),
    "the order is stable": (
        '{"tag": 3, "id": "7"}',
        'id: must be an integer, not "7"; name: required but missing; '
        "tag: must be a string, not 3",
    ),
    "nothing": ("", "the plant is missing: nothing was sent"),
    "only space": (" ", "the plant is not JSON: Expecting value at line 1, column 2"),
    "not JSON": ("{'id': 7}", "the plant is not JSON: Expecting property name enclosed in "
                              "double quotes at line 1, column 2"),
    "data behind the plant": ('{"id": 1, "name": "n"} {}',
                              "the plant is not JSON: Extra data at line 1, column 24"),
    "an array": ("[]", "the plant: must be an object, not []"),
    "null": ("null", "the plant: must be an object, not null"),
    "NaN": ('{"id": NaN, "name": "n"}', "the plant is not JSON, which has no NaN"),
    "Infinity": ('{"id": -Infinity, "name": "n"}', "the plant is not JSON, which has no -Infinity"),
    "a name twice": ('{"id": 1, "id": 1, "name": "n"}', '"id": given more than once'),
    "a name twice, inside": ('{"id": 1, "name": "n", "x": {"a": 1, "a": 2}}',
                             '"a": given more than once'),
    "a name twice, escaped": ('{"id": 1, "\\u0069d": 2, "name": "n"}',
                              '"id": given more than once'),
    "a byte order mark": ("\ufeff{}",
                          "the plant starts with a byte order mark, which JSON has no place for"),
    "NUL": ('{"id": 7, "name": "a\\u0000b"}',
            'name: must not be "a\\u0000b" (The name of the plant, any text without NUL)'),
    "a lone surrogate": ('{"id": 7, "name": "\\ud800"}',
                         "name: must not contain half of a surrogate pair"),
    "a lone surrogate in what is ignored": ('{"id": 7, "name": "n", "x": ["\\udfff"]}',
                                            "x: must not contain half of a surrogate pair"),
    "null is no string": ('{"id": 7, "name": "n", "tag": null}',
                          "tag: must be a string, not null"),
    "true is no integer": ('{"id": true, "name": "n"}', "id: must be an integer, not true"),
    "a fraction": ('{"id": 7.5, "name": "n"}', "id: must be an integer, not 7.5"),
    "a fraction beyond a float": ('{"id": 1.00000000000000000000001, "name": "n"}',
                                  "id: must be an integer, not 1.00000000000000000000001"),
    "nearly zero": ('{"id": 1e-400, "name": "n"}', "id: must be an integer, not 1E-400"),
    "2**53 + 1 as a float": ('{"id": 9007199254740993.0, "name": "n"}',
                             "id: must be written out in digits where it is beyond 2**53, "
                             "not as 9007199254740993.0"),
    "an exponent that would fill the memory": (
        '{"id": 1e999999999, "name": "n"}',
        "id: must be written out in digits where it is beyond 2**53, not as 1E+999999999"),
    "an exponent beyond Decimal": ('{"id": 1e9999999999999999999, "name": "n"}',
                                   "the plant has a number out of all range: "
                                   '"1e9999999999999999999"'),
    "2**63": ('{"id": 9223372036854775808, "name": "n"}',
              "id: must be at most 9223372036854775807, not 9223372036854775808"),
    "-2**63 - 1": ('{"id": -9223372036854775809, "name": "n"}',
                   "id: must be at least -9223372036854775808, not -9223372036854775809"),
    "too long a number": ('{"id": ' + "1" * 5000 + ', "name": "n"}',
                          "the plant has a number of more than 1000 characters"),
    "too long a fraction": ('{"id": 1.' + "0" * 5000 + ', "name": "n"}',
                            "the plant has a number of more than 1000 characters"),
    "too deep": ("[" * 100_000, "the plant is nested too deeply"),
    "too deep, objects": ('{"a":' * 100_000, "the plant is nested too deeply"),
    "a long value is cut": ('{"id": 7, "name": ["' + "x" * 99 + '"]}',
                            'name: must be a string, not ["' + "x" * 57 + "…"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_plant(text, message):
    """The message names each violation with its place, in plain words."""
    with pytest.raises(InvalidPlant) as refusal:
        parse_new_plant(text.encode())
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "body",
    [
        b'\xff{"id": 7}',
        '{"id": 7, "name": "n"}'.encode("utf-16"),
        b'{"id": 7, "name": "\xed\xa0\x80"}',
    ],
    ids=["a stray byte", "UTF-16", "a surrogate as bytes"],
)
def test_what_is_not_utf8_is_refused(body):
    """JSON between systems is UTF-8 (RFC 8259 section 8.1)."""
    with pytest.raises(InvalidPlant, match=r"not UTF-8: byte 0x.. at offset"):
        parse_new_plant(body)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("new-plant", ('"$ref": "plant.json"', '"$ref": "shrub.json"'), "shrub.json"),
        ("plant", ('"type": "object"', '"type": "thing"'), "'thing' is not valid"),
    ],
)
def test_a_schema_or_reference_that_is_wrong_is_found_at_once(tmp_path, name, change, words):
    """When the module is imported, not with the first plant."""
    shutil.copytree(Path(schemas.__file__).parent, tmp_path / "schemas")
    file = tmp_path / "schemas" / f"{name}.json"
    text = file.read_text()
    assert change[0] in text
    file.write_text(text.replace(*change))
    done = subprocess.run(
        [sys.executable, "-c", "import schemas"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert words in done.stderr


def test_no_reference_is_ever_fetched():
    """jsonschema would, without a registry."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        reference = {"$ref": f"http://127.0.0.1:{listener.getsockname()[1]}/plant.json"}
        with pytest.raises(Exception, match="Unresolvable"):
            VALIDATORS["plant"].evolve(schema=reference).validate({})
        with pytest.raises(BlockingIOError):
            listener.accept()


VALUES = [None, True, 0, 7, -(2**63) - 1, 2**63, 1.5, Decimal("7.5"), "", "n", "n\n", "\0", "a\0b",
          [], ["n"], {}, {"id": 7}]  # fmt: skip


def test_a_quick_check_and_a_validator_agree():
    """On every combination of members, of which most are wrong in one way or another."""
    passed = 0
    plants = itertools.product([*VALUES, "absent"], repeat=3)
    for members in [dict(zip(("id", "name", "tag"), values, strict=True)) for values in plants]:
        plant = {name: value for name, value in members.items() if value != "absent"}
        is_valid = VALIDATORS["new-plant"].is_valid(plant)
        assert bool(QUICK_CHECKS["new-plant"](plant)) == is_valid, plant
        passed += is_valid
    assert passed > 10
    assert not any(QUICK_CHECKS["new-plant"](value) for value in VALUES)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 3},
        {"type": ["string", "null"]},
        {"type": "number", "minimum": 1},
        {"pattern": "^a"},
        {"minimum": 1},
        {"required": ["id"]},
        {"enum": ["indoor", "outdoor"]},
        {"type": "object", "required": ["tag"], "properties": {"tag": {"maxLength": 9}}},
        {"allOf": [{"$id": "https://plants.example/other.json", "type": "string"}]},
    ],
)
def test_a_quick_check_leaves_what_it_does_not_know_to_the_validator(schema):
    """A schema can be changed freely: at worst it is slower."""
    check = quick_check(schema, None)
    assert not any(check(value) for value in [*VALUES, "abcd", {"tag": "abcd"}])


@pytest.mark.parametrize("schema", [{"description": "anything"}, True, {"allOf": [True]}])
def test_a_schema_that_says_nothing_takes_everything(schema):
    """{} and true are schemas too."""
    assert all(quick_check(schema, None)(value) for value in VALUES)
    assert not any(quick_check(False, None)(value) for value in VALUES)


def test_a_schema_can_refer_to_itself():
    """A plant that has a parent, which has a parent."""
    schema = {"type": "object", "properties": {"parent": {"$ref": "#"}, "name": {"type": "string"}}}
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    check = quick_check(schema, resolver)
    assert check({"parent": {"parent": {"name": "n"}}})
    assert not check({"parent": {"parent": {"name": 7}}})
