"""The commands dump and load: all plants as JSON Lines (jsonlines.org), out and in."""

import argparse
import contextlib
import itertools
import json
import os
import sys

from tqdm import tqdm

from engines import Unavailable
from plant import InvalidPlant, Plant, parse_new_plant
from start import DEFAULT_URL, get_storage
from storage import Storage

BATCH = 250  # plants; more at once are no faster, and keep a running service waiting
BAR = {"unit_scale": True, "delay": 1, "disable": None}  # on a terminal only, after a second
HELP = """Write all plants to standard output, or store those of standard input. Each line is a
plant as JSON: {"id": 7, "name": "Monstera", "tag": "indoor"}. To load a line again is safe."""
EXAMPLE = "example: python transfer.py dump sqlite:///plants.db > plants.jsonl"


def dump(storage: Storage) -> None:
    """Write all plants as lines of JSON, in the order of id. Raises Unavailable, maybe at last."""
    # Not sys.stdout: at the exit, Python would write again what could not be written.
    with open(1, "wb", closefd=False) as out, tqdm(storage.rows(), unit=" plants", **BAR) as plants:
        for plant in plants:
            out.write(json.dumps(plant.to_dict(), ensure_ascii=False).encode() + b"\n")


def load(storage: Storage) -> bool:
    """Store the plants in lines of JSON; name the lines that are refused, and say how many.

    Returns whether all were stored. Raises Unavailable.
    """
    stored = refused = 0
    with tqdm(sys.stdin.buffer, unit=" plants", **BAR) as lines:
        numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        while some := list(itertools.islice(numbered, BATCH)):
            plants: dict[int, Plant] = {}
            outcomes: dict[int, Exception | None] = {}
            for number, line in some:
                try:
                    plants[number] = parse_new_plant(line)
                except InvalidPlant as error:
                    outcomes[number] = error
            outcomes.update(zip(plants, storage.add_all(list(plants.values())), strict=True))
            for number, outcome in sorted(outcomes.items()):
                if isinstance(outcome, Unavailable):
                    raise outcome
                if outcome:
                    tqdm.write(f"line {number}: {outcome}", file=sys.stderr)
                stored, refused = stored + (outcome is None), refused + (outcome is not None)
    print(f"{stored} stored, {refused} refused")
    return not refused


def main() -> None:
    """Run a command line; exit with 0 only if all was done."""
    parser = argparse.ArgumentParser(prog="transfer.py", description=HELP, epilog=EXAMPLE)
    parser.add_argument("command", choices=["dump", "load"])
    default = os.environ.get("DATABASE_URL", DEFAULT_URL)
    parser.add_argument("url", nargs="?", default=default, help="default: DATABASE_URL")
    options = parser.parse_args()
    try:
        with contextlib.closing(get_storage(options.url)) as storage:
            if options.command == "dump":
                with contextlib.suppress(BrokenPipeError):  # dump | head
                    dump(storage)
            elif not load(storage):
                sys.exit(1)
    except (OSError, Unavailable) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
