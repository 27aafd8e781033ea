"""The commands dump and load: plants as JSON Lines (jsonlines.org), while the service runs or not.

Contains no SQL and no HTTP: storage.py stores, schemas/ says what a plant is.
"""

import argparse
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import BinaryIO

from engine import Unavailable
from schemas import InvalidPlant, Plant, parse_new_plant
from storage import DEFAULT_URL, Storage

BATCH = 250  # plants; more at once are no faster, and keep a running service waiting
LINE_LIMIT = 2**20 + 2**10  # bytes; older versions took plants of 1 MiB


def dump(storage: Storage, out: BinaryIO) -> None:
    """Write all plants to `out`, in the order of id. Raises Unavailable."""
    for plant in storage.rows():
        out.write(json.dumps(plant.to_json(), ensure_ascii=False).encode() + b"\n")
    out.flush()


def load(storage: Storage, lines: BinaryIO) -> Counter[str]:
    """Store the plants in JSON Lines; name the lines that are refused on standard error.

    Returns how many were new, there already, conflicting and invalid. Raises Unavailable.
    """
    counts = Counter({"new": 0, "there already": 0, "conflicting": 0, "invalid": 0})
    batch: dict[int, Plant] = {}  # by the number of the line
    for number, line in enumerate(iter(lambda: lines.readline(LINE_LIMIT), b""), 1):
        try:
            if len(line) == LINE_LIMIT:
                while line and not line.endswith(b"\n"):  # it must not fill the memory
                    line = lines.readline(LINE_LIMIT)
                raise InvalidPlant(f"longer than {LINE_LIMIT} bytes")
            if line.strip():
                batch[number] = parse_new_plant(line.rstrip(b"\r\n"))
        except InvalidPlant as error:
            load_batch(storage, batch, counts)  # so that lines are named in their order
            print(f"line {number}: {error}", file=sys.stderr)
            counts["invalid"] += 1
        if len(batch) == BATCH or len(line) > LINE_LIMIT / BATCH:
            load_batch(storage, batch, counts)
    load_batch(storage, batch, counts)
    return counts


def load_batch(storage: Storage, batch: dict[int, Plant], counts: Counter[str]) -> None:
    """Store and forget the plants of some lines, and count what came of them."""
    before = storage.inserted
    errors = storage.add_all(list(batch.values()))
    counts["new"] += storage.inserted - before
    counts["there already"] += errors.count(None) - (storage.inserted - before)
    for number, error in zip(batch, errors, strict=True):
        if isinstance(error, Unavailable):
            raise error
        if error is not None:
            print(f"line {number}: {error}", file=sys.stderr)
            counts["conflicting"] += 1
    batch.clear()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="transfer.py", description="Move plants as JSON Lines.")
    parser.add_argument("command", choices=["dump", "load"], help="write all plants, or read some")
    default = os.environ.get("DATABASE_URL", DEFAULT_URL)
    parser.add_argument("url", nargs="?", default=default, help="default: DATABASE_URL")
    options = parser.parse_args(arguments)
    try:
        with contextlib.closing(Storage.from_url(options.url)) as storage:
            if options.command == "dump":
                dump(storage, sys.stdout.buffer)
                return 0
            storage.check_start()
            counts = load(storage, sys.stdin.buffer)
            print(", ".join(f"{count} {name}" for name, count in counts.items()), flush=True)
    except (OSError, Unavailable) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python would try the rest again
        if isinstance(error, BrokenPipeError) and options.command == "dump":
            return 0  # dump | head: nobody reads on
        print(error, file=sys.stderr)
        return 1
    return 1 if counts["conflicting"] or counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
