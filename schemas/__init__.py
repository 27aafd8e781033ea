"""The shapes of what the service takes and answers, and the check of JSON text against them.

Contains no HTTP and no SQL: app.py uses it for requests, transfer.py for `load`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import fastjsonschema
from jsonschema import Draft201909Validator, ValidationError
from referencing import Registry

MAX_DIGITS = 4300  # of a number; Python itself refuses longer integers, unless told otherwise
MAX_EXACT = 2**53  # beyond it doubles are not exact (RFC 7493 section 2.2)
SHOWN_LENGTH = 60  # characters of a value that a message repeats
EXPLAINED_ITEMS = 30  # of a list or an object that is refused
NO_NUL = r"^[^\x00]*$"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Plant(NamedTuple):
    """A row of the table: id is a signed integer of 64 bits, tag is None where there is none."""

    id: int
    name: str
    tag: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plant as a JSON object; without a tag it has no such member."""
        members = zip(self._fields, self, strict=True)
        return {name: value for name, value in members if value is not None}


class InvalidPlant(Exception):
    """The text is not a NewPlant; the message names every violation and its place."""


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text("utf-8"))


SCHEMAS: dict[str, Any] = {name: _read(name) for name in ("plant", "new-plant", "error")}
_BY_ID = {schema["$id"]: schema for schema in SCHEMAS.values()}
_REGISTRY: Registry[Any] = Registry().with_contents(_BY_ID.items())
for _schema in SCHEMAS.values():
    Draft201909Validator.check_schema(_schema)

#: A validator for each of the schemas, which explains what the quick check refuses.
VALIDATORS = {
    name: Draft201909Validator(schema, registry=_REGISTRY) for name, schema in SCHEMAS.items()
}
# The quick check: raises an exception for what is not valid. 2 us a plant, a validator 50.
_check_new_plant: Callable[[Any], Any] = fastjsonschema.compile(
    SCHEMAS["new-plant"],
    handlers=dict.fromkeys(("http", "https"), _BY_ID.__getitem__),  # nothing is fetched
    use_default=False,
    use_formats=False,
)


def openapi() -> dict[str, Any]:
    """Return schemas/openapi.json with the other schemas as its components."""
    parts = json.dumps({schema["title"]: schema for schema in SCHEMAS.values()})
    for name, schema in SCHEMAS.items():
        parts = parts.replace(f'"{name}.json"', f'"#/components/schemas/{schema["title"]}"')
    components = json.loads(parts)
    for schema in components.values():
        del schema["$id"], schema["$schema"]
    document: dict[str, Any] = _read("openapi")
    document["components"]["schemas"] = components
    return document


def parse_new_plant(body: bytes) -> Plant:
    """Return the plant in `body`, a NewPlant as I-JSON (RFC 7493). Raises InvalidPlant."""
    try:
        members = _parse_json(body)
        violations = _find_violations(members)
        if not violations and b"\\u" in body:
            violations = _find_lone_surrogates(members)
    except RecursionError:
        raise InvalidPlant("the plant is nested too deeply") from None
    if violations:
        raise InvalidPlant("; ".join(f"{at}: {text}" for at, text in sorted(violations.items())))
    return Plant._make(map(members.get, Plant._fields))


def _find_violations(value: Any) -> dict[str, str]:
    """Return how `value` breaks the schema, in plain words, by the place where it does."""
    try:
        _check_new_plant(value)
        return {}
    except fastjsonschema.JsonSchemaException as reason:
        refusal = str(reason)
    errors = VALIDATORS["new-plant"].iter_errors(_cut(value))
    violations: dict[str, str] = {}
    # Errors of type come last, to replace others at the same place.
    for error in sorted(errors, key=lambda error: error.validator == "type"):
        if error.validator == "required":
            missing = [name for name in error.validator_value if name not in error.instance]
            violations |= dict.fromkeys(missing, "required but missing")
        else:
            place = ".".join(str(step) for step in error.absolute_path) or "the plant"
            violations[place] = _explain(error, reduce(getitem, error.absolute_path, value))
    return violations or {"the plant": refusal}


def _cut(value: Any, depth: int = 2) -> Any:
    """Return a small copy: jsonschema puts repr() of a value, which may be slow, into messages."""
    if isinstance(value, dict):  # a plant's own members come first: they must not look missing
        names = sorted(value, key=lambda name: name not in Plant._fields)[:EXPLAINED_ITEMS]
        return {name: _cut(value[name], depth - 1) for name in names if depth}
    if isinstance(value, list):
        return [_cut(item, depth - 1) for item in value[:EXPLAINED_ITEMS] if depth]
    return max(-(2**64), min(value, 2**64)) if isinstance(value, int) else value


def _explain(error: ValidationError, instance: Any) -> str:
    """What a person who sent `instance`, whole or cut, has to know to mend it."""
    value = _shown(instance)
    rule: Any = error.validator_value
    match error.validator:
        case "type" if rule == "integer" and _is_whole(instance):
            return f"must be written without fraction and exponent beyond 2**53, not as {value}"
        case "type":
            return f"must be {'an' if rule[0] in 'aeiou' else 'a'} {rule}, not {value}"
        case "minimum":
            return f"must be at least {rule}, not {value}"
        case "maximum":
            return f"must be at most {rule}, not {value}"
        case "pattern" if rule == NO_NUL:
            return "must not contain NUL"
        case _:
            return f"must not be {value} ({error.validator}: {_shown(rule)})"


def _find_lone_surrogates(members: dict[str, Any]) -> dict[str, str]:
    """Return the members with half a character, such as `\\ud800` (RFC 7493, 2.1)."""
    if not LONE_SURROGATE.search(_ENCODER.encode(members)):
        return {}
    parts = [(name, _ENCODER.encode([name, members[name]])) for name in _cut(members)]
    places = [name for name, part in parts if LONE_SURROGATE.search(part)]
    return dict.fromkeys(places or ["the plant"], "must not contain half of a surrogate pair")


def _shown(value: Any) -> str:
    """Return `value` as JSON, cut to what a message has room for, without control characters."""
    text = ""
    for part in [str(value)] if isinstance(value, Decimal) else _ENCODER.iterencode(value):
        text += part
        if len(text) > SHOWN_LENGTH:
            text = text[: SHOWN_LENGTH - 1] + "…"
            break
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def _parse_json(body: bytes) -> Any:
    """Parse I-JSON: what RFC 8259 allows and RFC 7493 does not is refused with InvalidPlant."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidPlant(
            f"the plant is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}"
        ) from None
    try:
        value = _DECODER.decode(text)
        for name in Plant._fields if isinstance(value, dict) else ():
            if isinstance(digits := value.get(name), bytes):
                value[name] = _parse_number(digits.decode())
        return value
    except json.JSONDecodeError as error:
        if not text:
            reason = "is missing: nothing was sent"
        elif text.startswith("\ufeff"):
            reason = "starts with a byte order mark, which JSON has no place for"
        else:
            line = f"line {error.lineno}, " if error.lineno > 1 else ""
            reason = f"is not JSON: {error.msg} at {line}column {error.colno}"
        raise InvalidPlant(f"the plant {reason}") from None
    except ValueError:  # Python reads no longer integers, as that takes quadratic time
        raise InvalidPlant(f"the plant has a number of more than {MAX_DIGITS} digits") from None


def _unique_members(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose member names are unique (RFC 7493 section 2.3)."""
    unique = dict(members)
    if len(unique) < len(members):
        ((repeated, _),) = Counter(name for name, _ in members).most_common(1)
        raise InvalidPlant(f"{_shown(repeated)}: given more than once")
    return unique


def _parse_number(digits: str) -> int | Decimal:
    """Return a number with a fraction or an exponent: an int where it is one (Core, 4.2.3).

    Beyond 2**53 it stays a Decimal, which the schema refuses: 1e16 may stand for a neighbour.
    """
    if len(digits) > MAX_DIGITS:
        raise ValueError
    try:
        number = Decimal(digits)
    except InvalidOperation:
        raise InvalidPlant(f"the plant has a number out of all range: {_shown(digits)}") from None
    return int(number) if -MAX_EXACT <= number <= MAX_EXACT and _is_whole(number) else number


def _is_whole(value: Any) -> bool:
    return isinstance(value, Decimal) and value == value.to_integral_value()


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidPlant(f"the plant is not JSON, which has no {name}")


# A number with a fraction or an exponent stays its digits, as bytes, unless the plant needs it.
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=bytes.decode)
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_members, parse_float=str.encode, parse_constant=_refuse_constant
)
