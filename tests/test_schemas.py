"""What counts as a plant, and what a person is told of one that does not."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import fastjsonschema
import pytest
from jsonschema import Draft201909Validator

import schemas
from schemas import VALIDATORS, InvalidPlant, parse_new_plant
from tests.support.costs import costs


@pytest.mark.parametrize("name", ["plant", "new-plant", "error"])
def test_each_schema_is_described_and_fits_its_own_examples(name):
    schema = VALIDATORS[name].schema
    assert schema["$schema"] == Draft201909Validator.META_SCHEMA["$id"]
    assert schema["$id"].endswith(f"/{name}.json")
    assert schema["title"] and schema["description"]
    for part in schema.get("allOf", [schema]):
        assert all(p["description"] and p["examples"] for p in part.get("properties", {}).values())
    for example in schema["examples"]:
        VALIDATORS[name].validate(example)


OTHERS = ", ".join(f'"{number}": 0' for number in range(999))
REFUSED = {
    "nothing": ("", "the plant is missing: nothing was sent"),
    "not JSON": ("{'id': 7}", "the plant is not JSON: Expecting property name enclosed in "
                              "double quotes at column 2"),
    "not JSON, in several lines": ('{\n"id": x}',
                                   "the plant is not JSON: Expecting value at line 2, column 7"),
    "data behind the plant": ('{"id": 1, "name": "n"} {}',
                              "the plant is not JSON: Extra data at column 24"),
    "null": ("null", "the plant: must be an object, not null"),
    "Infinity": ('{"id": -Infinity, "name": "n"}', "the plant is not JSON, which has no -Infinity"),
    "a name twice, escaped": ('{"id": 1, "\\u0069d": 2, "name": "n"}',
                              'the plant has "id" more than once'),
    "a byte order mark": ("\ufeff{}",
                          "the plant starts with a byte order mark, which JSON has no place for"),
    "text is shown as it was sent": ('{"id": "dreißig 🌵 \\u2028\\ud800", "name": ["é"]}',
                                     'id: must be an integer, not "dreißig 🌵 \\u2028\\ud800"; '
                                     'name: must be a string, not ["é"]'),
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
                             "id: must be written without fraction and exponent beyond 2**53, "
                             "not as 9007199254740993.0"),
    "-2**53 - 1 as a float": ('{"id": -9007199254740993.0, "name": "n"}',
                              "id: must be written without fraction and exponent beyond 2**53, "
                              "not as -9007199254740993.0"),
    "an exponent that would fill the memory": (
        '{"id": 1e999999999, "name": "n"}',
        "id: must be written without fraction and exponent beyond 2**53, not as 1E+999999999"),
    "an exponent beyond Decimal": ('{"id": 1e9999999999999999999, "name": "n"}',
                                   "the plant has a number out of all range: "
                                   '"1e9999999999999999999"'),
    "2**63": ('{"id": 9223372036854775808, "name": "n"}',
              "id: must be at most 9223372036854775807, not 9223372036854775808"),
    "-2**63 - 1": ('{"id": -9223372036854775809, "name": "n"}',
                   "id: must be at least -9223372036854775808, not -9223372036854775809"),
    "a long number": ('{"id": -' + "1" * 4300 + ', "name": "n"}',
                      "id: must be at least -9223372036854775808, not -" + "1" * 58 + "…"),
    "too long a number": ('{"id": ' + "1" * 4301 + ', "name": "n"}',
                          "the plant has a number of more than 4300 digits"),
    "too long a fraction": ('{"id": 1.' + "0" * 4299 + ', "name": "n"}',
                            "the plant has a number of more than 4300 digits"),
    "a name twice in what is ignored, at any depth": ('{"x": [[[[[{"a": 1, "a": 1}]]]]]}',
                                                      'the plant has "a" more than once'),
    "members behind many others": (f'{{{OTHERS}, "name": 1, "id": ""}}',
                                   'id: must be an integer, not ""; name: must be a string, not 1'),
    "half a character behind many others": (
        f'{{{OTHERS}, "x": "\\udfff", "id": 1, "name": "n"}}',
        "the plant: must not contain half of a surrogate pair"),
    "a nested value is cut": ('{"id": ' + "[" * 900 + "]" * 900 + ', "name": {"a": {"b": [[1]]}}}',
                              "id: must be an integer, not " + "[" * 59 + "…; "
                              'name: must be a string, not {"a": {"b": [[1]]}}'),
    "a value of 60 characters is not cut": ('{"id": "' + "x" * 58 + '", "name": "n"}',
                                            'id: must be an integer, not "' + "x" * 58 + '"'),
    "a long value is cut": ('{"id": 7, "name": ["' + "x" * 99 + '"]}',
                            'name: must be a string, not ["' + "x" * 57 + "…"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_plant(text, message):
    with pytest.raises(InvalidPlant) as refusal:
        parse_new_plant(text.encode())
    assert str(refusal.value) == message


def test_no_kind_of_body_costs_more_than_its_bytes(record_property):
    """The CPU time of each is at most ten times that of json.loads() of as many small integers."""
    found = costs()
    assert {kind: cost for kind, cost in found.items() if cost > 10} == {}
    record_property("the most costly body of 64 KiB", f"{max(found.values()):.1f} times json.loads")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("new-plant", ('"$ref": "plant.json"', '"$ref": "shrub.json"'), "shrub.json"),
        ("new-plant", ('"plant.json"', '"http://127.0.0.1:9/plant.json"'), "KeyError"),
        ("plant", ('"type": "object"', '"type": "thing"'), "'thing' is not valid"),
    ],
)
def test_a_schema_or_reference_that_is_wrong_is_found_at_once(tmp_path, name, change, words):
    """When the module is imported, not with the first plant; nothing is fetched."""
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


def test_a_rule_for_what_is_nested_holds_at_any_depth_and_place(tmp_path):
    """Also where jsonschema, which sees but the beginning of a refused value, can't explain it."""
    shutil.copytree(Path(schemas.__file__).parent, tmp_path / "schemas")
    file = tmp_path / "schemas" / "plant.json"
    schema = json.loads(file.read_text())
    words = {"type": "array", "items": {"type": "string"}}
    schema["properties"]["tag"]["default"] = "tag"  # nothing is filled in
    schema["properties"]["name"]["format"] = "date"  # formats are not checked
    schema["properties"] |= {"words": words, "pages": {"type": "array", "items": words}}
    file.write_text(json.dumps(schema))
    cases = {
        "tag: None": {"words": ["a"] * 99, "pages": [["a"]]},
        "InvalidPlant: words.1: must be a string, not 1": {"words": ["a", 1]},
        "InvalidPlant: the plant: data.words[99] must be string": {"words": ["a"] * 99 + [1]},
        "InvalidPlant: the plant: data.pages[0][1] must be string": {"pages": [["a", 1]]},
    }
    parse = "schemas.parse_new_plant(sys.argv[1].encode())"
    program = f"import schemas, sys; print('tag:', {parse}.tag)"
    for said, members in cases.items():
        command = [sys.executable, "-c", program, json.dumps({"id": 7, "name": "n", **members})]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.stdout or done.stderr).endswith(f"{said}\n")


VALUES = ["null", "true", "0", "7", "-9223372036854775809", "9223372036854775808", "7.5", '""',
          '"n"', '"n\\n"', '"\\u0000"', '"a\\u0000b\\n"', "[]", '["n"]', "{}",
          '{"id": 7}']  # fmt: skip


def test_both_validators_take_the_same_plants():
    """On every combination of members, of which most are wrong in one way or another.

    fastjsonschema decides quickly, jsonschema explains what is wrong: each ignores
    what its dialect does not know, so the schemas declare one that both know.
    """
    shapes = {each.schema["$id"]: each.schema for each in VALIDATORS.values()}
    schema = VALIDATORS["new-plant"].schema
    check = fastjsonschema.compile(schema, handlers={"https": shapes.__getitem__})
    plants = list(VALUES)
    for values in itertools.product([*VALUES, None], [*VALUES, None], ['"n"', "7", None]):
        members = zip(('"id": ', '"name": ', '"tag": '), values, strict=True)
        shown = [name + value for name, value in members if value is not None]
        plants.append(f"{{{', '.join(shown)}}}")
    taken = 0
    for text in plants:
        is_valid = VALIDATORS["new-plant"].is_valid(json.loads(text))
        assert is_valid == passes(check, json.loads(text)), text
        assert is_valid == passes(parse_new_plant, text.encode()), text
        taken += is_valid
    assert taken > 10


def passes(check, value):
    try:
        check(value)
    except (InvalidPlant, fastjsonschema.JsonSchemaException):
        return False
    return True
