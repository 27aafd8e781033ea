"""The shapes of what the service takes and answers, and the check of JSON text against them.

Contains no HTTP and no SQL: app.py uses it for requests, transfer.py for `load`.
"""

import json
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, get_args

import fastjsonschema
from jsonschema import Draft201909Validator, ValidationError
from referencing import Registry

from schemas import i_json

EXPLAINED_ITEMS = 30  # of a list or an object that is refused
NO_NUL = r"^[^\x00]*$"


class Plant(NamedTuple):
    """A row of the table: id is a signed integer of 64 bits, tag is None where there is none."""

    id: int
    name: str
    tag: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plant as a JSON object; without a tag it has no such member."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class InvalidPlant(Exception):
    """The text is not a NewPlant; the message names every violation and its place."""


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text("utf-8"))


#: The type of each field of Plant, where it is not None.
KINDS = {name: (*get_args(kind), kind)[0] for name, kind in Plant.__annotations__.items()}
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
        members = i_json.parse(body, KINDS)
        violations = _find_violations(members)
        if not violations and b"\\u" in body:
            violations = _find_lone_surrogates(members)
    except i_json.InvalidJSON as error:
        raise InvalidPlant(f"the plant {error}") from None
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
    value = i_json.show(instance)
    rule: Any = error.validator_value
    match error.validator:
        case "type" if rule == "integer" and i_json.is_whole(instance):
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
            return f"must not be {value} ({error.validator}: {i_json.show(rule)})"


def _find_lone_surrogates(members: dict[str, Any]) -> dict[str, str]:
    """Return the members with half a character, which no UTF-8 can have."""
    if not i_json.has_lone_surrogate(members):
        return {}
    places = [name for name in _cut(members) if i_json.has_lone_surrogate([name, members[name]])]
    return dict.fromkeys(places or ["the plant"], "must not contain half of a surrogate pair")
