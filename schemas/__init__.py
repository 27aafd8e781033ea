"""The shapes of what the service takes and answers, and the check of JSON text against them.

Contains no HTTP and no SQL: app.py uses it for requests, transfer.py for `load`.
"""

import json
from collections import Counter
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import fastjsonschema
from jsonschema import Draft201909Validator, ValidationError
from referencing import Registry

MAX_DIGITS = 4300  # of a number; Python itself refuses longer integers, unless told otherwise
MAX_EXACT = 2**53  # beyond it doubles are not exact (RFC 7493 section 2.2)
SHOWN_LENGTH = 60  # characters of a value that a message repeats
NO_NUL = r"^[^\x00]*$"


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
    detailed_exceptions=False,
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
    return Plant(*map(members.get, Plant._fields))


def _find_violations(value: Any) -> dict[str, str]:
    """Return how `value` breaks the schema, in plain words, by the place where it does."""
    try:
        _check_new_plant(value)
        return {}
    except fastjsonschema.JsonSchemaException:
        errors = VALIDATORS["new-plant"].iter_errors(value)
    violations: dict[str, str] = {}
    # Errors of type come last, to replace others at the same place.
    for error in sorted(errors, key=lambda error: error.validator == "type"):
        if error.validator == "required":
            missing = [name for name in error.validator_value if name not in error.instance]
            violations |= dict.fromkeys(missing, "required but missing")
        else:
            place = ".".join(str(step) for step in error.absolute_path) or "the plant"
            violations[place] = _explain(error)
    return violations


def _explain(error: ValidationError) -> str:
    """What a person who sent the value has to know to mend it."""
    value = _shown(error.instance)
    rule: Any = error.validator_value
    match error.validator:
        case "type" if rule == "integer" and _is_whole(error.instance):
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
    violations: dict[str, str] = {}
    for name, member in members.items():
        try:
            _ENCODE([name, member]).encode()
        except UnicodeEncodeError:
            violations[name] = "must not contain half of a surrogate pair"
    return violations


def _shown(value: Any) -> str:
    """Return `value` as JSON, cut to what a message has room for, without control characters."""
    text = str(value) if isinstance(value, Decimal) else _ENCODE(value)
    if len(text) > SHOWN_LENGTH:
        text = text[: SHOWN_LENGTH - 1] + "…"
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
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        if not text:
            reason = "is missing: nothing was sent"
        elif text.startswith("\ufeff"):
            reason = "starts with a byte order mark, which JSON has no place for"
        else:
            reason = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
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


_ENCODE = json.JSONEncoder(ensure_ascii=False, default=str).encode
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_members, parse_float=_parse_number, parse_constant=_refuse_constant
)
