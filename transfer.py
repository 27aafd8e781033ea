"""The commands dump, load and copy: plants as JSON Lines (jsonlines.org), out, in, or both.

Contains no SQL and no HTTP: storage.py stores, schemas/ says what a plant is.
"""

import argparse
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from tqdm import tqdm

from engine import Conflict, Rejected, Unavailable
from schemas import InvalidPlant, Plant, parse_new_plant
from start import DEFAULT_URL, get_storage
from storage import Storage, Stored

BATCH = 250  # plants; more at once are no faster, and keep a running service waiting
LINE_LIMIT = 2**20 + 2**10  # bytes; older versions took plants of 1 MiB
BAR = {"unit_scale": True, "delay": 1, "disable": None}  # on a terminal only, after a second
REFUSED = {Conflict: "conflicting", Rejected: "rejected", InvalidPlant: "invalid"}

Found: TypeAlias = dict[int, Plant | InvalidPlant]  # by the number of the line


def dump(storage: Storage) -> Iterator[bytes]:
    """Yield all plants as lines of JSON, in the order of id. Raises Unavailable, maybe at last."""
    with tqdm(storage.rows(), unit=" plants", **BAR) as plants:
        for plant in plants:
            yield json.dumps(plant.to_json(), ensure_ascii=False).encode() + b"\n"


def read() -> Iterator[bytes]:
    """Yield the lines of standard input, each up to LINE_LIMIT."""
    size = os.fstat(0).st_size or None  # 0: not known
    with open(0, "rb", closefd=False) as file, tqdm(total=size, unit="B", **BAR) as bar:
        while line := file.readline(LINE_LIMIT):
            yield line
            bar.update(len(line))
            while len(line) == LINE_LIMIT and not line.endswith(b"\n"):
                line = file.readline(LINE_LIMIT)  # the rest must not fill the memory


def load(storage: Storage, lines: Iterator[bytes], counts: Counter[str]) -> None:
    """Store the plants in lines of JSON, count what became of each, and name the lines refused.

    Raises Unavailable, and what `lines` raises, once the plants before that are stored.
    """
    batch: Found = {}
    try:
        for number, line in enumerate(lines, 1):
            try:
                if len(line) >= LINE_LIMIT:
                    raise InvalidPlant(f"longer than {LINE_LIMIT} bytes")
                if line.strip():
                    batch[number] = parse_new_plant(line.rstrip(b"\r\n"))
            except InvalidPlant as error:
                batch[number] = error
            if len(batch) == BATCH or len(line) > LINE_LIMIT / BATCH:
                full, batch = batch, {}
                load_batch(storage, full, counts)
    finally:
        load_batch(storage, batch, counts)


def load_batch(storage: Storage, batch: Found, counts: Counter[str]) -> None:
    """Store the plants of some lines, and count what became of each."""
    outcomes = iter(storage.add_all([each for each in batch.values() if isinstance(each, Plant)]))
    for number, each in batch.items():
        outcome = next(outcomes) if isinstance(each, Plant) else each
        if isinstance(outcome, Stored):
            counts[outcome.value] += 1
        elif refused := REFUSED.get(type(outcome)):
            counts[refused] += 1
            tqdm.write(f"line {number}: {outcome}", file=sys.stderr)
        else:
            raise outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    text = "Write all plants as JSON Lines, read some, or copy all from one database to another."
    parser = argparse.ArgumentParser(prog="transfer.py", description=text)
    parser.add_argument("command", choices=["dump", "load", "copy"])
    default = os.environ.get("DATABASE_URL", DEFAULT_URL)
    parser.add_argument("url", nargs="?", default=default, help="default: DATABASE_URL")
    parser.add_argument("to", nargs="?", help="the URL to which copy copies")
    options = parser.parse_args(arguments)
    if (options.command == "copy") != (options.to is not None):
        parser.error("copy needs two URLs, dump and load one")
    counts = Counter(dict.fromkeys(("new", "there already", *REFUSED.values()), 0))
    try:
        with contextlib.closing(get_storage(options.to or options.url)) as storage:
            if options.command == "dump":
                # Not sys.stdout: at the exit, Python would write again what could not be written.
                with open(1, "wb", closefd=False) as out:
                    out.writelines(dump(storage))
                return 0
            lines = read() if options.command == "load" else dump(get_storage(options.url))
            try:
                load(storage, lines, counts)
            finally:
                with open(1, "w", closefd=False) as out:
                    print(", ".join(f"{count} {name}" for name, count in counts.items()), file=out)
            if options.command == "load" and not counts.total():  # the left of a pipe has failed?
                raise EOFError("nothing was loaded: standard input has no plant")
    except (OSError, EOFError, Unavailable) as error:
        if isinstance(error, BrokenPipeError) and options.command == "dump":
            return 0  # dump | head: nobody reads on
        tqdm.write(str(error), file=sys.stderr)
        return 1
    return 0 if counts.total() == counts["new"] + counts["there already"] else 1


if __name__ == "__main__":
    sys.exit(main())
