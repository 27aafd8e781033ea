"""What the longest bodies cost, of each kind that could cost more than its bytes."""

import contextlib
import json
import time
from collections.abc import Callable

from app import BODY_LIMIT
from plant import InvalidPlant, parse_new_plant

REPEATS = 5  # of which the quickest counts
ITEMS = ["1", "1e9", "1" * 4300, "null", "[]", '{"a": 1}', '""', '"\\ud83c\\udf35"']
DEEP = "[" * 900 + "]" * 900  # what every parser takes
LISTS = {
    "alone": "[%s]",
    "as an id": '{"id": [%s], "name": "n"}',
    "ignored, beside an escape": '{"id": 7, "name": "\\u0041", "x": [%s]}',
}


def fill(form: str, item: str) -> bytes:
    """A body with as many items as there is room for; each has its number in place of #."""
    items: list[str] = []
    size = len(form)
    while (size := size + len(item.encode()) + 5) < BODY_LIMIT:  # with a number and a comma
        items.append(item.replace("#", f"{len(items):x}"))
        size += len(items[-1].encode()) - len(item.encode()) - 4
    return form.replace("%s", ",".join(items)).encode()


KINDS = {
    **{f"{item:.9} {where}": fill(form, item) for where, form in LISTS.items() for item in ITEMS},
    "brackets": b"[" * (BODY_LIMIT // 2) + b"]" * (BODY_LIMIT // 2),
    "nested lists as each member": b'{"id": %b, "name": %b, "tag": %b}' % ((DEEP.encode(),) * 3),
    "many nested lists": fill(LISTS["as an id"], DEEP),
    "members": fill("{%s}", '"#":1'),
    "members as an id": fill('{"id": {%s}}', '"#":1'),
    "members with half a character": fill('{"id": 7, "name": "n", %s}', '"#\\ud800":[]'),
    "members, one twice": fill('{"id": 7, "id": 8, %s}', '"#":1'),
    "objects with a name twice": fill("[%s]", '{"a":1,"a":2}'),
    "a long name with NUL": fill('{"id": 7, "name": "%s"}', "\\u0000"),
    "a long text as an id": fill('{"id": "%s", "name": "n"}', "\U0001f335\x7f"),
    "a long number": b'{"id": 1%b}' % (b"0" * (BODY_LIMIT - 9)),
    "a long fraction": b'{"id": 1.%b}' % (b"0" * (BODY_LIMIT - 10)),
    "lines": b"\n" * BODY_LIMIT,
}


def cpu_time(call: Callable[[], object]) -> float:
    """The seconds that a call takes of the processor."""
    start = time.process_time()
    with contextlib.suppress(InvalidPlant):
        call()
    return time.process_time() - start


def costs() -> dict[str, float]:
    """What each kind costs, as a multiple of json.loads() of a list of as many small integers."""
    integers = b"[" + b"1," * (BODY_LIMIT // 2 - 1) + b"1]"
    unit = min(cpu_time(lambda: json.loads(integers)) for _ in range(4 * REPEATS))
    return {
        kind: min(cpu_time(lambda body=body: parse_new_plant(body)) for _ in range(REPEATS)) / unit
        for kind, body in KINDS.items()
    }
