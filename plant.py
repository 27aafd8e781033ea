"""A plant, and how the body of a request becomes one. It knows no HTTP and no SQL.

A body is I-JSON (RFC 7493) that is valid by schemas/new-plant.json.
"""

import codecs
import json
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import fastjsonschema
from jsonschema import Draft201909Validator
from referencing import Registry

TYPES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    Decimal: "a number",
    type(None): "null",
}
# The words in a message for a keyword of JSON Schema. The keyword's value follows them.
RULES = {"minimum": "be at least", "maximum": "be at most", "enum": "be one of"}


class Plant(NamedTuple):
    """A row of the table. `id` is a signed 64-bit integer; `tag` is None if there is none."""

    id: int
    name: str
    tag: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the plant as in schemas/plant.json: without its id, and without a tag of None."""
        members = self._asdict()
        del members["id"]
        return {name: value for name, value in members.items() if value is not None}


class InvalidPlant(Exception):
    """The body is not a NewPlant. The message names mistakes and their places, but no values."""


def parse_new_plant(body: bytes) -> Plant:
    """Return the plant in `body`, a NewPlant as I-JSON. Raises InvalidPlant."""
    members = _decode(body)
    try:
        _check_quickly(members)
    except fastjsonschema.JsonSchemaException:
        raise InvalidPlant(_find_mistakes(members)) from None
    return Plant(id=members["id"], name=members["name"], tag=members.get("tag"))


def read_schema(name: str) -> Any:
    """Return the JSON document schemas/NAME.json."""
    return json.loads(Path(__file__).parent.joinpath("schemas", f"{name}.json").read_text("utf-8"))


def _decode(body: bytes) -> Any:
    """Return what `body` says as I-JSON (RFC 7493). Raises InvalidPlant."""
    if not body:
        raise InvalidPlant("the body is empty")
    try:
        members = _DECODER.decode(body.decode())
        if b"\\u" in body:  # An escaped half of a surrogate pair can't be encoded as UTF-8.
            json.dumps(members, ensure_ascii=False, default=str).encode()
        return members
    except UnicodeDecodeError as error:
        mistake = f"is not valid UTF-8: {error.reason} at byte {error.start}"
    except UnicodeEncodeError:
        mistake = "has an escaped half of a surrogate pair"
    except json.JSONDecodeError as error:
        mistake = f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        if body.startswith(codecs.BOM_UTF8):
            mistake = "begins with a byte order mark, which JSON does not have"
    # int() raises ValueError for more than 4,300 digits. Decimal() raises an ArithmeticError for an
    # exponent beyond some 10**18.
    except (RecursionError, ValueError, ArithmeticError):
        mistake = "is nested too deeply, or has a number with too many digits"
    raise InvalidPlant(f"the body {mistake}")


def _unique_members(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose member names are unique (RFC 7493 section 2.3)."""
    unique = dict(members)
    if len(unique) < len(members):
        raise InvalidPlant("the body has two members of the same name in one object")
    return unique


def _parse_number(text: str) -> int | Decimal:
    """Return an int if the number is integral and exact, as 1.0 and 1e3 are, or else a Decimal.

    The decoder calls this only for a number with a fraction or an exponent. It makes an int of
    plain digits by itself, however large. To JSON Schema, 1.0 is an integer (draft 2019-09,
    "Validation", section 6.1.1).
    """
    number = Decimal(text)
    # Beyond 2**53, a client may have rounded another number to this one (RFC 7493 section 2.2).
    # Without a bound, int() would also take many seconds for 1e1000000.
    is_safe = -(2**53) <= number <= 2**53
    return int(number) if is_safe and number == number.to_integral_value() else number


def _refuse_constant(_: str) -> NoReturn:
    raise InvalidPlant("the body is not valid JSON: NaN and Infinity are not allowed")


def _find_mistakes(value: Any) -> str:
    """Return how `value` breaks the schema, in plain words, each mistake with its place."""
    mistakes: dict[str, str] = {}
    # jsonschema calls repr() on nested values. No rule looks inside them, so empty them first.
    if isinstance(value, dict):
        value = {name: _empty(member) for name, member in value.items()}
    else:
        value = _empty(value)
    for error in _VALIDATOR.iter_errors(value):
        place = "".join(error.path) or "the body"
        if error.validator == "required":
            for name in error.validator_value:
                if name not in value:
                    mistakes[name] = "required but missing"
        elif error.validator == "type":
            mistakes[place] = _explain_type(error.validator_value, error.instance)
        else:
            # If there is a message about a wrong type, keep it: it says more than any other.
            mistakes.setdefault(place, _explain_rule(error))
    return "; ".join(f"{place}: {mistake}" for place, mistake in sorted(mistakes.items()))


def _explain_type(expected: str, value: Any) -> str:
    article = "an" if expected[0] in "aeiou" else "a"
    actual = TYPES[type(value)]
    if expected == "integer" and isinstance(value, Decimal):
        if value == value.to_integral_value():  # It is not an int, so it is beyond 2**53.
            return "must be written in plain digits beyond 2**53 (9007199254740992)"
        actual = "a number with a fraction"
    return f"must be {article} {expected}, not {actual}"


def _explain_rule(error: Any) -> str:
    if error.validator == "pattern" and "\0" in error.instance:
        return "must not contain NUL"  # People understand this better than a pattern.
    words = RULES.get(error.validator, f"match the {error.validator}")
    return f"must {words} {json.dumps(error.validator_value)}"


def _empty(value: Any) -> Any:
    return type(value)() if isinstance(value, dict | list) else value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_members, parse_float=_parse_number, parse_constant=_refuse_constant
)
SCHEMAS = {name: read_schema(name) for name in ("plant", "new-plant", "error")}
_BY_ID = {schema["$id"]: schema for schema in SCHEMAS.values()}
_REGISTRY = Registry[Any]().with_contents(_BY_ID.items())
_VALIDATOR = Draft201909Validator(SCHEMAS["new-plant"], registry=_REGISTRY)
# fastjsonschema takes 2 us for a plant. jsonschema takes 50 us, so it only explains refusals.
_check_quickly: Any = fastjsonschema.compile(
    SCHEMAS["new-plant"], {"https": _BY_ID.__getitem__}, use_default=False, use_formats=False
)
