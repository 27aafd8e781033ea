"""I-JSON (RFC 7493), JSON that all programs read alike: from and to Python's values, no schema.

Who parses says which numbers are of use. All others with a fraction or an exponent stay digits: a
float may be another number than was sent, and a body of Decimals takes three times as long. The
digits are bytes, which nothing else in JSON becomes, so that nobody takes them for text.
"""

import json
import re
from collections import Counter
from decimal import Decimal
from typing import Any, NoReturn

MAX_DIGITS = 4300  # of a number; Python itself refuses longer integers, unless told otherwise
MAX_EXACT = 2**53  # beyond it doubles are not exact (RFC 7493 section 2.2)
SHOWN_LENGTH = 60  # characters of a value that a message repeats


class InvalidJSON(Exception):
    """The text is not I-JSON; the message goes on after a subject: "is not UTF-8"."""


def parse(body: bytes, kinds: dict[str, type]) -> Any:
    """Return the value; its members of `kinds` have numbers for digits. Raises InvalidJSON."""
    try:
        value = _DECODER.decode(body.decode())
        for name, kind in kinds.items() if isinstance(value, dict) else ():
            if isinstance(number := value.get(name), bytes):
                value[name] = number = _parse_number(number.decode())
            if kind is float and type(number) in (int, Decimal):
                value[name] = float(number)  # as it is stored: a retry is compared with that
        return value
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}"
    except json.JSONDecodeError as error:
        if not body:
            reason = "is missing: nothing was sent"
        elif error.doc.startswith("\ufeff"):
            reason = "starts with a byte order mark, which JSON has no place for"
        else:
            line = f"line {error.lineno}, " if error.lineno > 1 else ""
            reason = f"is not JSON: {error.msg} at {line}column {error.colno}"
    except ValueError:  # Python reads no longer integers, as that takes quadratic time
        reason = f"has a number of more than {MAX_DIGITS} digits"
    except ArithmeticError:
        reason = f"has a number out of all range: {show(number)}"
    raise InvalidJSON(reason)


def has_lone_surrogate(value: Any) -> bool:
    """Return whether half a character, such as `\\ud800`, is in `value` (RFC 7493, 2.1)."""
    return re.search("[\ud800-\udfff]", _ENCODER.encode(value)) is not None


def is_whole(value: Any) -> bool:
    """Return whether `value` was written with a fraction or an exponent and is an integer."""
    return isinstance(value, Decimal) and value == value.to_integral_value()


def show(value: Any) -> str:
    """Return `value` as JSON, cut to what a message has room for, without control characters."""
    text = ""
    for part in [str(value)] if isinstance(value, Decimal) else _ENCODER.iterencode(value):
        text += part
        if len(text) > SHOWN_LENGTH:
            text = text[: SHOWN_LENGTH - 1] + "…"
            break
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def _unique_members(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose member names are unique (RFC 7493 section 2.3)."""
    unique = dict(members)
    if len(unique) < len(members):
        ((repeated, _),) = Counter(name for name, _ in members).most_common(1)
        raise InvalidJSON(f"has {show(repeated)} more than once")
    return unique


def _parse_number(digits: str) -> int | Decimal:
    """Return a number with a fraction or an exponent: an int where it is one (Core, 4.2.3).

    Beyond 2**53 it stays a Decimal, which the schema refuses: 1e16 may stand for a neighbour.
    """
    if len(digits) > MAX_DIGITS:
        raise ValueError
    number = Decimal(digits)
    return int(number) if -MAX_EXACT <= number <= MAX_EXACT and is_whole(number) else number


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidJSON(f"is not JSON, which has no {name}")


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=bytes.decode)
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_members, parse_float=str.encode, parse_constant=_refuse_constant
)
