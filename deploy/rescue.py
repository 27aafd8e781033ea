"""Copies all plants that can be read from a damaged plants.db to rescued.db, in the current folder.

docs/data.md says when to run it. It repairs nothing, and writes to plants.db only what is still in
plants.db-wal. Plants that rescued.db has already, as from a backup, stay as they are.
"""

import sqlite3
from collections.abc import Iterator
from itertools import pairwise

LOWEST, HIGHEST = -(2**63), 2**63 - 1  # ids

damaged, rescued = sqlite3.connect("plants.db"), sqlite3.connect("rescued.db")


def main() -> None:
    """Read each page of plants alone, from both sides, so that a damaged one hides no other."""
    damaged.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    rescued.executescript("""
        PRAGMA application_id = 1347178068;
        CREATE TABLE IF NOT EXISTS plants
            (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT""")
    newest = find_id(LOWEST, HIGHEST, "DESC")
    # If the last page can't be read, nothing says which ids it has. Try all that are left.
    ends = sorted({LOWEST - 1, *find_last_ids(), HIGHEST if newest is None else newest})
    for previous, last in pairwise(ends):
        copy_page(previous + 1, last)
    rescued.commit()
    print(*rescued.execute("SELECT count(*) FROM plants").fetchone(), "plants are in rescued.db")


def copy_page(first: int, last: int) -> None:
    """Copy the plants with these ids, which are on one page.

    From the first one forwards, and, if that meets a part that can't be read, from the last one
    backwards.
    """
    while first <= last and (number := find_id(first, last, "ASC")) is not None:
        copy(number)
        first = number + 1
    while first <= last and (number := find_id(first, last, "DESC")) is not None:
        copy(number)
        last = number - 1
    if first <= last:
        print(f"ids {first} to {last} can't be read")


def find_id(first: int, last: int, order: str) -> int | None:
    """Return the first id of a range in this order; None if there is none or it can't be read."""
    query = f"SELECT id FROM plants WHERE id BETWEEN ? AND ? ORDER BY id {order} LIMIT 1"
    try:
        return next((number for (number,) in damaged.execute(query, (first, last))), None)
    except sqlite3.Error:
        return None


def copy(number: int) -> None:
    """Copy the plant with this id, unless rescued.db has it."""
    query = "SELECT id, name, tag FROM plants WHERE id = ?"
    try:
        plant = damaged.execute(query, [number]).fetchone()
        rescued.execute("INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING", plant)
    except sqlite3.Error as error:
        print(f"ids {number} to {number} can't be read or copied: {error}")


def find_last_ids() -> Iterator[int]:
    """Yield the last id of each page of plants. The interior pages of the table contain these.

    Interior pages have the type 5 (sqlite.org/fileformat2.html, section 1.6).
    """
    with open("plants.db", "rb") as file:
        size = int.from_bytes(file.read(18)[16:], "big")
        file.seek(0)
        while page := file.read(size):
            count = int.from_bytes(page[3:5], "big") if page[0] == 5 else 0
            for at in range(12, 12 + 2 * count, 2):
                cell = int.from_bytes(page[at : at + 2], "big")
                yield read_varint(page[cell + 4 : cell + 13].ljust(9, b"\0"))


def read_varint(data: bytes) -> int:
    """Return the varint at the beginning of 9 bytes (section 1.6 of the same document)."""
    value = 0
    for byte in data[:8]:
        value = value << 7 | byte & 127
        if byte < 128:
            return value
    value = value << 8 | data[8]
    return value - (value >> 63 << 64)


main()
