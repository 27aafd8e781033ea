"""A plant, and what makes one of a body: I-JSON (RFC 7493) and schemas/. No HTTP, no SQL."""

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import fastjsonschema
from jsonschema import Draft201909Validator
from referencing import Registry

TYPES = {bool: "a boolean", str: "a string", list: "an array", dict: "an object", int: "a number"}
TYPES |= {type(None): "null", Decimal: "a number with a fraction or an exponent"}
RULES = {  # the patterns in schemas/ are all against NUL
    "minimum": "must be at least {}",
    "maximum": "must be at most {}",
    "pattern": "must not contain NUL",
}


class Plant(NamedTuple):
    """A row of the table: id is a signed integer of 64 bits, tag may be None."""

    id: int
    name: str
    tag: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the shape Plant: no id, no tag of None."""
        members = self._asdict().items()
        return {name: value for name, value in members if name != "id" and value is not None}


class InvalidPlant(Exception):
    """The text is not a NewPlant. The message names every mistake and its place, but no value."""


def parse_new_plant(body: bytes) -> Plant:
    """Return the plant in `body`, a NewPlant as I-JSON. Raises InvalidPlant."""
    members = _decode(body)
    try:
        _check_quickly(members)
    except fastjsonschema.JsonSchemaException:
        if mistakes := _find_mistakes(members):
            raise InvalidPlant(mistakes) from None
    return Plant._make(map(members.get, Plant._fields))


def openapi() -> Any:
    """Return schemas/openapi.json with the other schemas as its components."""
    document = _read_schema("openapi")
    schemas = {schema["title"]: schema for schema in map(_read_schema, SCHEMAS)}
    document["components"]["schemas"] = schemas
    for schema in schemas.values():
        del schema["$id"], schema["$schema"]
    schemas["NewPlant"]["allOf"][0]["$ref"] = "#/components/schemas/Plant"
    return document


def _decode(body: bytes) -> Any:
    """Return what `body` says as I-JSON (RFC 7493). Raises InvalidPlant."""
    if not body:
        raise InvalidPlant("the plant is missing: nothing was sent")
    try:
        members = _DECODER.decode(body.decode())
        if b"\\u" in body:  # half of a surrogate pair has no UTF-8
            json.dumps(members, ensure_ascii=False, default=str).encode()
        return members
    except UnicodeDecodeError as error:
        mistake = f"is not UTF-8: {error.reason} at byte {error.start}"
    except UnicodeEncodeError:
        mistake = "has half of a surrogate pair"
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        mistake = f"is not JSON that can be read: {error.msg} at {place}"
    except (RecursionError, ValueError):  # int() takes no more than 4,300 digits
        mistake = "is nested too deeply, or has a number with too many digits"
    raise InvalidPlant(f"the plant {mistake}")


def _read_schema(name: str) -> Any:
    return json.loads(Path(__file__).parent.joinpath("schemas", f"{name}.json").read_text("utf-8"))


def _unique_members(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose member names are unique (RFC 7493 section 2.3)."""
    unique = dict(members)
    if len(unique) < len(members):
        raise InvalidPlant("the plant has two members of the same name")
    return unique


def _parse_number(text: str) -> int | Decimal:
    """Return an int for 1.0 or 1e3 (JSON Schema Validation 6.1.1) where it is exact."""
    try:
        number = Decimal(text)
    except ArithmeticError:  # no room for such an exponent
        return Decimal("Infinity")
    is_safe = -(2**53) <= number <= 2**53  # 1e16 may stand for a neighbour (RFC 7493 section 2.2)
    return int(number) if is_safe and number == number.to_integral_value() else number


def _refuse_constant(_: str) -> NoReturn:
    raise InvalidPlant("the plant is not JSON, which has no NaN and no Infinity")


def _find_mistakes(value: Any) -> str:
    """Return how `value` breaks the schema, in plain words, each mistake with its place."""
    mistakes: dict[str, str] = {}
    # What is nested is emptied: no rule looks into it, and jsonschema would take its repr().
    small = _empty(value)
    if isinstance(value, dict):
        small = {name: _empty(value[name]) for name in Plant._fields if name in value}
    for error in _VALIDATOR.iter_errors(small):
        place, rule = "".join(error.path) or "the plant", error.validator_value
        if error.validator == "required":
            missing = [name for name in rule if name not in error.instance]
            mistakes |= dict.fromkeys(missing, "required but missing")
        elif error.validator == "type":
            article = "an" if rule[0] in "aeiou" else "a"
            mistakes[place] = f"must be {article} {rule}, not {TYPES[type(error.instance)]}"
        else:
            text = RULES.get(error.validator, f"must fit {error.validator} {{}}")
            mistakes.setdefault(place, text.format(json.dumps(rule)))  # unless its type is wrong
    return "; ".join(f"{place}: {mistake}" for place, mistake in sorted(mistakes.items()))


def _empty(value: Any) -> Any:
    return type(value)() if isinstance(value, dict | list) else value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_members, parse_float=_parse_number, parse_constant=_refuse_constant
)
SCHEMAS = {name: _read_schema(name) for name in ("plant", "new-plant", "error")}
_BY_ID = {schema["$id"]: schema for schema in SCHEMAS.values()}
_VALIDATOR = Draft201909Validator(
    SCHEMAS["new-plant"], registry=Registry[Any]().with_contents(_BY_ID.items())
)
# 2 us a plant; what it refuses, the validator decides and explains in 50.
_check_quickly: Callable[[Any], Any] = fastjsonschema.compile(
    SCHEMAS["new-plant"], {"https": _BY_ID.__getitem__}, use_default=False, use_formats=False
)
