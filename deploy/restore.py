"""Replaces the SQLite file that DATABASE_URL names with a backup, and keeps the old files.

The service may be running: after the swap, it answers 503 until it is restarted. This needs Python
and backup.py, and nothing else of the service. docs/data.md says how to run it.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

# With PYTHONSAFEPATH, Python does not find the file beside this one by itself.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from backup import (
    APPLICATION_ID,
    ERRORS,
    SIGNALS,
    SUFFIXES,
    Parser,
    become_owner,
    begin,
    check_intact,
    check_ours,
    count_plants,
    dated,
    get_columns,
    get_id,
    get_path,
    get_value,
    is_missing_or_empty,
    lock_folder,
    open_database,
    remove,
    sync,
    temporary,
)

LOWEST, HIGHEST = -(2**63), 2**63 - 1  # ids
# Other errors, such as a lock or a full disk, say nothing about what can be read.
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
UNREADABLE = (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ)  # A bad sector.
NO_FILE = "fine after a loss or on a new host; otherwise correct DATABASE_URL"
# If the old file was lost, running workers may still hold it. A restart would end them.
RESTART = "restart the service; if it answered 503 before this, first read docs/emergencies.md"
Row = tuple[Any, ...]


def main() -> None:
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("backup", nargs="?", metavar="BACKUP", help="a copy made by backup.py")
    parser.add_argument(
        "--merge", action="store_true", help="add the plants of the old file that BACKUP lacks"
    )
    arguments = parser.parse_args()
    if not arguments.backup:
        parser.error("BACKUP is missing or empty")
    begin()
    path = get_path()
    try:
        lines = restore(path, os.path.realpath(arguments.backup), arguments.merge)
    except ERRORS as error:
        sys.exit(f"{path} was not replaced: {error}")
    print(*lines, sep="\n")


def restore(path: str, backup: str, merges: bool) -> list[str]:
    """Finish the new file before anything happens to the old one, then swap. Return a report."""
    folder = os.path.dirname(path)
    new = f"{path}-new"
    if not os.path.isfile(backup) or is_missing_or_empty(backup):
        raise ValueError(f"{backup} is missing, empty or not a file")
    for each in filter(os.path.exists, (path, new, f"{new}-copy")):
        if os.path.samefile(each, backup):
            raise ValueError(f"{backup} is the database itself, or left from a restore")
    with open_database(backup) as source:
        check_backup(source, backup)
        become_owner(path)  # The backup and its -wal stay open, even if only root could open them.
        with lock_folder(folder) as descriptor, temporary(new), temporary(f"{new}-copy"):
            copy(source, new, backup)
            with lock_workers(path):
                before = count_old(path)
                merged = merge(path, new) if merges else []
                with open_database(new) as database:
                    after = count_plants(database)
                sync(new)
                replaced = swap(path, new, descriptor)
    if not replaced:
        report = f"{path}: there was no file before, {after} plants now"
        return [report, NO_FILE, *merged, RESTART]
    was = "an unknown number of" if before is None else before
    report = f"{path}: {was} plants before, {after} now"
    return [report, *merged, f"the old files are in {replaced}", RESTART]


def check_backup(source: sqlite3.Connection, path: str) -> None:
    """Raise a ValueError, which names the file, if it can't be read or is not one of ours."""
    try:
        check_ours(source, path)
    except sqlite3.Error as error:
        raise ValueError(f"{path} can't be read: {error}") from None


def copy(source: sqlite3.Connection, new: str, backup: str) -> None:
    """Copy a database, including what is still in its -wal. Raise a ValueError if it is damaged."""
    with open_database(new, "rwc") as target:
        try:
            source.backup(target)
        except sqlite3.Error as error:
            raise ValueError(f"{backup} can't be copied: {error}") from None
        target.execute("PRAGMA journal_mode = DELETE")  # So that all of it is in one file.
        check_intact(target, backup)


@contextlib.contextmanager
def lock_workers(path: str) -> Iterator[None]:
    """Take a turn, as a worker does. Until it ends, no worker stores a plant."""
    while True:
        lock = os.open(f"{path}-lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # If the file was deleted while we waited, the workers lock another one: try again.
            if os.fstat(lock).st_nlink:
                yield
                return
        finally:
            os.close(lock)


def count_old(path: str) -> int | None:
    """Return the number of plants in the old file, or None if it can't be read.

    Raise a ValueError if the file belongs to another program.
    """
    if is_missing_or_empty(path):
        return 0 if is_missing_or_empty(f"{path}-wal") else None
    try:
        with open_database(path) as old:
            if not get_value(old, "SELECT count(*) FROM sqlite_schema"):
                return 0
            if get_id(old) != APPLICATION_ID:
                raise ValueError("it belongs to another program; correct DATABASE_URL")
            return count_plants(old)
    except sqlite3.Error:
        return None


def merge(path: str, new: str) -> list[str]:
    """Add the plants of the old file whose ids the new file does not have. Return what to report.

    If there is no old file, or an empty one, a restore may have been interrupted. Then also add the
    plants of the files that it moved.
    """
    lines = merge_file(path, new)
    if is_missing_or_empty(path):
        folder, name = os.path.split(path)
        for moved in sorted(glob.glob(f"{glob.escape(folder)}/replaced-2*/"), reverse=True):
            # If it was killed twice, the file may be in one folder, and its -wal in another.
            if {name, f"{name}-wal"} & {*os.listdir(moved)}:
                lines += [f"in {moved}:", *merge_file(moved + name, new)]
            if not is_missing_or_empty(moved + name):
                break
    return lines


def merge_file(path: str, new: str) -> list[str]:
    """Add the plants of one old file, as merge() does. Return what to report.

    If the file is damaged, or only its -wal is left, add all plants that can be read.
    """
    if is_missing_or_empty(path) and is_missing_or_empty(f"{path}-wal"):
        state = "the file was empty" if os.path.exists(path) else "there was no file"
        return [f"no plants were added, since {state}"]
    readable = complete(path, new)
    # Find the last ids before SQLite opens the file: when a process closes a file, all its locks on
    # that file end.
    ends = sorted({LOWEST - 1, *find_last_ids(readable), HIGHEST})
    with open_database(readable) as old, open_database(new, "rw") as database:
        ours = get_columns(database)
        reader = Reader(old, sorted(ours, key="id".__ne__))  # The id comes first.
        added, differing = add_plants(reader, database, ends)
        lines = [f"{added} plants of the old file were added"]
        try:
            check_intact(old, "the old file")
        except (sqlite3.Error, ValueError):
            lines.append("the old file is damaged: it may have more plants than could be read")
    if differing:
        ids = " ".join(map(str, differing))
        lines.append(f"{len(differing)} ids have another plant in the old file, not added: {ids}")
    if dropped := [each for each in reader.all_columns if each not in ours]:
        lines.append(f"columns that the backup does not have were left out: {', '.join(dropped)}")
    for first, last in join(sorted(reader.unread)):
        lines.append(f"ids {first} to {last} of the old file can't be read or added")
    return lines


def join(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join sorted ranges of ids that follow each other."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def complete(path: str, new: str) -> str:
    """Return a file's path or, if its first page is missing or damaged, that of a completed copy.

    Only the first page says where the table begins. The service's tables all begin at the same
    page, so the first page of the new file says it, too.
    """
    if has_first_page(path):
        return path
    remove(copy := f"{new}-copy")
    for suffix in ("", "-wal"):
        if os.path.exists(path + suffix):
            shutil.copyfile(path + suffix, copy + suffix)
    with open_database(new) as database:
        size = get_value(database, "PRAGMA page_size")
    with open(new, "rb") as file:
        page = bytearray(file.read(size))
    page[28:32] = bytes(4)  # SQLite counts the pages itself (section 1.3 of the file format).
    with open(copy, "r+b" if os.path.exists(copy) else "wb") as file:
        file.write(page)
    return copy


def has_first_page(path: str) -> bool:
    """Return False if the table of plants can't be found: the file is missing or damaged."""
    if is_missing_or_empty(path):
        return False
    try:
        with open_database(path) as database:
            # A database of one page has no table: nothing is damaged.
            is_one_page = get_value(database, "PRAGMA page_count") == 1
            return is_one_page or {"id", "name", "tag"} <= set(get_columns(database))
    except sqlite3.Error as error:
        # A schema of an unknown format causes SQLITE_ERROR.
        return get_code(error) & 0xFF not in (*DAMAGE, sqlite3.SQLITE_ERROR)


def get_code(error: sqlite3.Error) -> int:
    """Return SQLite's code. Errors about text that is not UTF-8 come from Python, without one."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)


def add_plants(
    reader: "Reader", database: sqlite3.Connection, ends: list[int]
) -> tuple[int, list[int]]:
    """Add the plants that a database does not have. `ends` are the last ids of pages.

    Return how many were added, and the ids that have other values in the database.
    """
    # Other programs may have stored text that is not UTF-8. Decoded like this, it equals no plant.
    database.text_factory = lambda text: text.decode(errors="surrogateescape")
    names = ", ".join(map(quote, reader.columns))
    marks = ", ".join("?" * len(reader.columns))
    find = f"SELECT {names} FROM plants WHERE id = ?"
    insert = f"INSERT INTO plants ({names}) VALUES ({marks})"
    added = 0
    differing: dict[int, None] = {}  # A plant may be read twice.
    database.execute("BEGIN")
    for row in reader.read_all(ends):
        there = database.execute(find, row[:1]).fetchone()
        if there is None:
            try:
                database.execute(insert, row)
                added += 1
            except sqlite3.IntegrityError:  # The row is not a valid plant.
                reader.unread.append((row[0], row[0]))
        elif there != row:
            differing[row[0]] = None
    database.execute("COMMIT")
    return added, list(differing)


def quote(name: str) -> str:
    """Quote a column's name for SQL."""
    return '"{}"'.format(name.replace('"', '""'))


class Reader:
    """Reads what can be read of a file that may be damaged."""

    def __init__(self, database: sqlite3.Connection, wanted: list[str]) -> None:
        """Prepare to read the wanted columns, without those that the file lacks."""
        self._database = database
        self.unread: list[tuple[int, int]] = []  # Ranges: the first and the last id of each.
        self.all_columns: list[str] = []
        try:
            self.all_columns = get_columns(database)
        except sqlite3.Error as error:
            self._give_up(error, LOWEST, HIGHEST)
        self.columns = [each for each in wanted if each in self.all_columns]
        names = ", ".join(map(quote, self.columns))
        self._query = f"SELECT {names} FROM plants WHERE id "

    def read_all(self, ends: list[int]) -> Iterator[Row]:
        """Yield all plants that can be read, some twice. `ends` are the last ids of pages."""
        if not self.columns:
            return
        names = ", ".join(map(quote, self.columns))
        # A scan of the table finds plants even on a page that is in the wrong place, where a search
        # by id would not look for them. It ends at the first page that can't be read.
        with contextlib.suppress(sqlite3.Error):
            yield from self._database.execute(f"SELECT {names} FROM plants NOT INDEXED")
            return
        for previous, last in pairwise(ends):
            yield from self._read(previous + 1, last)

    def _read(self, first: int, last: int) -> list[Row]:
        """Return the plants with these ids. If some can't be read, return all others."""
        with contextlib.suppress(sqlite3.Error):
            return self._database.execute(self._query + "BETWEEN ? AND ?", (first, last)).fetchall()
        rows = []
        for number in self._find_ids(first, last):
            try:
                # One id at a time: for the end of a range, SQLite would read the next page, too.
                rows += self._database.execute(self._query + "= ?", (number,)).fetchall()
            except sqlite3.Error as error:
                self._give_up(error, number, number)
        return rows

    def _find_ids(self, first: int, last: int) -> Iterator[int]:
        """Yield the ids of a range, from both ends up to the part that can't be read."""
        query = "SELECT id FROM plants WHERE id BETWEEN ? AND ? ORDER BY id {} LIMIT 1"
        for order in ("ASC", "DESC"):
            try:
                while first <= last:
                    found = self._database.execute(query.format(order), (first, last)).fetchone()
                    if found is None:
                        return
                    if not first <= found[0] <= last:  # Otherwise this would never end.
                        raise sqlite3.DatabaseError("a page is in the wrong place")
                    yield found[0]
                    first, last = (found[0] + 1, last) if order == "ASC" else (first, found[0] - 1)
            except sqlite3.Error as error:
                failure = error
        if first <= last:
            self._give_up(failure, first, last)

    def _give_up(self, error: sqlite3.Error, first: int, last: int) -> None:
        """Note which ids can't be read. Raise the error if the file is not damaged."""
        code = get_code(error)
        if code & 0xFF not in DAMAGE and code not in UNREADABLE:
            raise error
        self.unread.append((first, last))


def find_last_ids(path: str) -> Iterator[int]:
    """Yield the last id of each page of plants, and some more numbers.

    These ids are in the table's interior pages, those of type 5 (sqlite.org/fileformat2.html,
    section 1.6). Each page of plants can then be read alone, so that a damaged one hides no other.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(18)[16:], "big")
    size = 2**16 if size == 1 else size
    # A frame of the -wal is a head of 24 bytes and a page. The first one begins at byte 32.
    for name, start, head in ((path, 0, 0), (f"{path}-wal", 32, 24)):
        if size and os.path.exists(name):
            for page in read_pieces(name, start, head + size):
                yield from find_cells(page[head:])


def read_pieces(name: str, start: int, size: int) -> Iterator[bytes]:
    """Yield a file in pieces, without those that the disk can't read."""
    with open(name, "rb") as file:
        for at in range(start, os.path.getsize(name), size):
            with contextlib.suppress(OSError):
                yield os.pread(file.fileno(), size, at)


def find_cells(page: bytes) -> Iterator[int]:
    """Yield the ids in an interior page. Other pages have none."""
    count = int.from_bytes(page[3:5], "big") if page[:1] == b"\5" else 0
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


def swap(path: str, new: str, folder: int) -> str | None:
    """Move the old files into a new folder, and the new file into their place.

    Return the folder's path, or None if there were no old files. `folder` is the descriptor of the
    database's folder. If this is killed, either everything is as before, or the file is missing,
    and the service refuses to start.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    old = [each for suffix in SUFFIXES if os.path.lexists(each := path + suffix)]
    replaced = link(old, os.path.dirname(path)) if old else None
    os.fsync(folder)
    try:
        # plants.db first: if this is killed after that, the service refuses to start. With the
        # -wal first, it would start without the newest plants.
        for each in old:
            os.remove(each)
        os.fsync(folder)  # If the power fails, the new file must not be there with the old -wal.
        os.rename(new, path)
        os.fsync(folder)
    except OSError as error:
        where = f"the old files are in {replaced}" if replaced else "there was no file"
        raise OSError(f"{error}; {where}; run this again") from None
    return replaced


def link(files: list[str], folder: str) -> str:
    """Link files into a new folder in this one. Return its path."""
    while os.path.exists(new := dated(folder, "replaced", "")):
        time.sleep(0.1)
    os.mkdir(new, 0o700)
    try:
        for each in files:
            os.link(each, os.path.join(new, os.path.basename(each)))
        sync(new)
    except OSError:
        shutil.rmtree(new)  # The files themselves have not been touched yet.
        raise
    return new


if __name__ == "__main__":
    main()
