"""The shapes of what the service takes and answers, and the check of JSON text against them.

Contains no HTTP and no SQL: app.py uses it for requests, storage.py for `load`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from jsonschema import Draft201909Validator, ValidationError
from referencing import Registry, Resource

MAX_NUMBER_LENGTH = 1000  # characters; reading a number takes time quadratic in its length
MAX_EXACT = 2**53  # RFC 7493 section 2.2: beyond it 1e16 and its neighbours look the same to many
SHOWN_LENGTH = 60  # characters of a value that a message repeats


# What a quick check has to know of JSON Schema.
TYPES = {"object": dict, "string": str, "integer": int}
ANNOTATIONS = {"$schema", "title", "description", "examples", "format"}
Check: TypeAlias = Callable[[Any], Any]  # what it returns is true or false


class InvalidPlant(ValueError):
    """The text is not a NewPlant; the message names every violation and its place."""


def _load(*names: str) -> tuple[dict[str, Draft201909Validator], dict[str, Check]]:
    """Read schemas/NAME.json; return a validator for each, and a quick check.

    Raises jsonschema.SchemaError for a file that is no schema, and
    referencing.exceptions.Unresolvable for a `$ref` that leads to none of the files:
    nothing is ever fetched.
    """
    schemas = {name: _read(name) for name in names}
    resources = [(schema["$id"], Resource.from_contents(schema)) for schema in schemas.values()]
    registry: Registry[Any] = Registry().with_resources(resources).crawl()
    for schema in schemas.values():
        Draft201909Validator.check_schema(schema)
        for ref in _refs(schema):
            registry.resolver(schema["$id"]).lookup(ref)
    return (
        {name: Draft201909Validator(each, registry=registry) for name, each in schemas.items()},
        {name: quick_check(each, registry.resolver(each["$id"])) for name, each in schemas.items()},
    )


def _read(name: str, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    text = Path(__file__).with_name(f"{name}.json").read_text("utf-8")
    return json.loads(text, object_hook=object_hook)


def _refs(schema: Any) -> Iterator[str]:
    """Every `$ref` in a schema, at any depth."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _refs(part)


def quick_check(schema: Any, resolver: Any) -> Check:
    """A check that is true only of what is valid against `schema`; of all else it is not.

    It is compiled from the schema, while a validator walks that anew for each value. Where a schema
    says what is not known here nothing passes, and all is left to the validator.
    """
    constants: dict[str, Any] = {}  # what the schema says: none of it gets into the text

    def constant(value: Any) -> str:
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    def expression(schema: Any, value: str, ignored: Set[str] = ANNOTATIONS) -> str:
        if isinstance(schema, bool):
            return str(schema)
        # The type comes first, as the others need a value of it.
        keywords = sorted(schema.keys() - ignored, key=lambda keyword: keyword != "type")
        return every(term(word, schema[word], schema.get("type"), value) for word in keywords)

    def term(keyword: str, rule: Any, kind: Any, value: str) -> str:
        match keyword, kind:
            case "type", str() if rule in TYPES:
                return f"type({value}) is {constant(TYPES[rule])}"
            case "required", "object":
                return f"{constant(frozenset(rule))}.issubset({value})"
            case "properties", "object":
                names = {constant(name): part for name, part in rule.items()}
                return every(
                    f"({name} not in {value} or {expression(part, f'{value}[{name}]')})"
                    for name, part in names.items()
                )
            case "pattern", "string":
                return f"{constant(re.compile(rule).search)}({value})"
            case "minimum", "integer":
                return f"{value} >= {constant(rule)}"
            case "maximum", "integer":
                return f"{value} <= {constant(rule)}"
            case "allOf", _:
                return every(expression(part, value) for part in rule)
            case "$ref", _:
                found = resolver.lookup(rule)
                target = cache(lambda: quick_check(found.contents, found.resolver))
                return f"{constant(target)}()({value})"  # compiled when called: it may be this one
        return "False"

    def every(terms: Iterable[str]) -> str:
        return " and ".join(terms) or "True"

    # Further in, an $id would make each $ref beside it lead elsewhere.
    text = f"lambda value: {expression(schema, 'value', ANNOTATIONS | {'$id'})}"
    check: Check = eval(text, constants)  # noqa: S307
    return check


#: A validator for each of the schemas, by the name of its file, and a quick check.
VALIDATORS, QUICK_CHECKS = _load("plant", "new-plant", "error")


def openapi() -> dict[str, Any]:
    """schemas/openapi.json with the other schemas as its components, so that it stands alone.

    Each goes by its title there, and they refer to each other within the document.
    """
    titles = {name: _read(name)["title"] for name in VALIDATORS}

    def localize(part: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in part:
            part["$ref"] = f"#/components/schemas/{titles[part['$ref'].removesuffix('.json')]}"
        return {key: value for key, value in part.items() if key not in ("$id", "$schema")}

    document: dict[str, Any] = _read("openapi")
    document["components"]["schemas"] = {
        title: _read(name, localize) for name, title in titles.items()
    }
    return document


def parse_new_plant(body: bytes) -> dict[str, Any]:
    """Return the members of the NewPlant that `body` is as I-JSON (RFC 7493).

    `id` is an int of 64 bits, `name` and `tag`, if there, are str; members that the schema
    does not name are there as they were sent. Raises InvalidPlant for anything else.
    """
    try:
        plant = _parse_json(body)
        violations = {} if QUICK_CHECKS["new-plant"](plant) else dict(_violations(plant))
        if not violations and b"\\u" in body:
            violations = dict(_lone_surrogates(plant))
    except RecursionError:
        raise InvalidPlant("the plant is nested too deeply") from None
    if violations:
        raise InvalidPlant(
            "; ".join(f"{place}: {text}" for place, text in sorted(violations.items()))
        )
    return plant  # type: ignore[no-any-return]


def _violations(value: Any) -> Iterator[tuple[str, str]]:
    """Each place where `value` breaks the schema and, in plain words, how.

    What is of the wrong type can break other rules as well: the type comes last, to win in a dict.
    """
    errors = VALIDATORS["new-plant"].iter_errors(value)
    for error in sorted(errors, key=lambda error: error.validator == "type"):
        place = ".".join(str(step) for step in error.absolute_path) or "the plant"
        if error.validator == "required":
            for name in error.validator_value:
                if name not in error.instance:
                    yield name, "required but missing"
        else:
            yield place, _explain(error)


def _explain(error: ValidationError) -> str:
    """What a person who sent the value has to know to mend it."""
    value = _shown(error.instance)
    rule: Any = error.validator_value
    schema: Any = error.schema
    match error.validator:
        case "type" if rule == "integer" and _is_whole(error.instance):
            return f"must be written out in digits where it is beyond 2**53, not as {value}"
        case "type":
            return f"must be {'an' if rule[0] in 'aeiou' else 'a'} {rule}, not {value}"
        case "minimum":
            return f"must be at least {rule}, not {value}"
        case "maximum":
            return f"must be at most {rule}, not {value}"
        case _:
            return f"must not be {value} ({schema.get('description', error.validator)})"


def _lone_surrogates(plant: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each member with a `\\ud800` or the like in it, which is half a character (RFC 7493, 2.1)."""
    for name, member in plant.items():
        try:
            json.dumps([name, member], ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            yield name, "must not contain half of a surrogate pair"


def _shown(value: Any) -> str:
    """`value` as JSON, cut to what a message has room for."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=str)
    return text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 1] + "…"


def _parse_json(body: bytes) -> Any:
    """Parse I-JSON: what RFC 8259 allows and RFC 7493 does not is refused with InvalidPlant."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidPlant(
            f"the plant is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}"
        ) from None
    if not text:
        raise InvalidPlant("the plant is missing: nothing was sent")
    if text.startswith("\ufeff"):
        raise InvalidPlant("the plant starts with a byte order mark, which JSON has no place for")
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise InvalidPlant(
            f"the plant is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose member names are unique (RFC 7493 section 2.3)."""
    unique = dict(members)
    if len(unique) < len(members):
        ((repeated, _),) = Counter(name for name, _ in members).most_common(1)
        raise InvalidPlant(f"{_shown(repeated)}: given more than once")
    return unique


def _integer(digits: str) -> int:
    """An integer written without fraction and exponent."""
    _check_length(digits)
    return int(digits)


def _number(digits: str) -> int | Decimal:
    """A number written with a fraction or an exponent: an int where it exactly is one.

    JSON Schema takes 1.0 for an integer (2020-12 Core, 4.2.3). Beyond 2**53 it stays a
    Decimal, which the schema refuses: there 1e16 may stand for a neighbour (RFC 7493, 2.2).
    """
    _check_length(digits)
    try:
        number = Decimal(digits)
    except InvalidOperation:
        raise InvalidPlant(f"the plant has a number out of all range: {_shown(digits)}") from None
    return int(number) if -MAX_EXACT <= number <= MAX_EXACT and _is_whole(number) else number


def _is_whole(value: Any) -> bool:
    return isinstance(value, Decimal) and value == value.to_integral_value()


def _check_length(digits: str) -> None:
    if len(digits) > MAX_NUMBER_LENGTH:
        raise InvalidPlant(f"the plant has a number of more than {MAX_NUMBER_LENGTH} characters")


def _constant(name: str) -> NoReturn:
    raise InvalidPlant(f"the plant is not JSON, which has no {name}")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant
)
