"""Copies the SQLite file that DATABASE_URL names, even while the service is running.

It needs only Python, and no other file of the service. docs/data.md says how to run it.
"""

import argparse
import contextlib
import fcntl
import os
import re
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import quote, unquote

APPLICATION_ID = 0x504C4E54  # as in engines/sqlite.py
COPY = re.compile(r"plants-\d{4}-\d\d-\d\d-\d{6}\.db")
SUFFIXES = ("", "-wal", "-shm", "-journal")  # of the files that SQLite makes for one database
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
# A path that SQLite can't take causes a ValueError.
ERRORS = (OSError, sqlite3.Error, ValueError)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line and status 1, as for everything else that goes wrong."""
        sys.exit(f"{self.prog}: {message}; see {self.prog} --help")


def main() -> None:
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--keep", type=int, metavar="N", help="keep only the newest N copies in FOLDER"
    )
    parser.add_argument(
        "folder", nargs="?", metavar="FOLDER", help="by default, `backups` beside the database"
    )
    arguments = parser.parse_args()
    if arguments.folder == "" or (arguments.keep is not None and arguments.keep < 1):
        parser.error("FOLDER must not be empty, and N must be at least 1")
    begin()
    path = get_path()
    folder = os.path.abspath(arguments.folder or os.path.join(os.path.dirname(path), "backups"))
    try:
        if not os.path.isfile(path) or is_missing_or_empty(path):
            sys.exit(
                f"{path} is missing, not a file, empty, or not readable by you: is DATABASE_URL "
                "loaded? If so, read docs/emergencies.md before you restart"
            )
        become_owner(path)
        with make_folder(folder), lock_folder(folder):
            copy, count = back_up(path, folder)
            print(f"{copy}: {count} plants of {path}")
            if arguments.keep:
                delete_old(folder, copy, count, arguments.keep)
    except ERRORS as error:
        sys.exit(f"the backup of {path} to {folder} failed: {error}")


def begin() -> None:
    """Make private files only. On a signal, clean up and exit as after an error."""
    os.umask(0o77)
    for number in SIGNALS:
        signal.signal(number, stop)


def stop(*_: Any) -> NoReturn:
    sys.exit("stopped")


def get_path() -> str:
    """Return the path of the file that DATABASE_URL names, without links. Exit if it names none.

    The rules are those of the service. No message repeats the URL, which may have a password in it.
    """
    url = os.environ.get("DATABASE_URL", "sqlite:///plants.db").strip()
    if url.startswith(("postgresql://", "postgres://")):
        sys.exit("DATABASE_URL names a PostgreSQL server: use pg_dump, as docs/postgresql.md says")
    if not re.fullmatch(r"sqlite:///(?!:memory:)[^?]+", url):
        sys.exit("DATABASE_URL must name a file, like sqlite:///plants.db")
    return os.path.realpath(unquote(url.removeprefix("sqlite:///")))


def become_owner(path: str) -> None:
    """If root runs this, go on as the owner of the database, who will then own what it makes.

    Root may own some of plants.db-lock, plants.db and the folder: take the first owner who is not
    root.
    """
    if os.geteuid() != 0:
        return
    for each in (f"{path}-lock", path, os.path.dirname(path)):
        if os.path.exists(each) and (status := os.stat(each)).st_uid != 0:
            os.setegid(status.st_gid)
            os.seteuid(status.st_uid)
            return


@contextlib.contextmanager
def make_folder(folder: str) -> Iterator[None]:
    """Make a folder if there is none, for the owner alone. Remove it if nothing gets into it."""
    is_new = not os.path.exists(folder)
    if is_new:
        os.mkdir(folder, 0o700)
    try:
        yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


@contextlib.contextmanager
def lock_folder(folder: str) -> Iterator[int]:
    """Let programs that make files in a folder take turns. Yield the folder's descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def back_up(path: str, folder: str) -> tuple[str, int]:
    """Make a copy and check it. Return its path, and the number of its plants."""
    new = os.path.join(folder, f"{os.path.basename(path)}-new")
    with temporary(new):
        with open_database(path) as database:
            check_ours(database, path)
            try:
                database.execute("VACUUM INTO ?", [new])
            except sqlite3.Error:
                # If a file is damaged, SQLite may say that the disk is full.
                check_intact(database, path)
                raise
        with open_database(new) as database:
            check_intact(database, new)
            count = count_plants(database)
        sync(new)
        # A rename would replace a copy that was made in the same second.
        while os.path.exists(copy := dated(folder, "plants", ".db")):
            time.sleep(0.1)
        os.rename(new, copy)
        sync(folder)
    return copy, count


def dated(folder: str, name: str, suffix: str) -> str:
    """Return a path with the present time in it. The names sort by time."""
    return os.path.join(folder, time.strftime(f"{name}-%Y-%m-%d-%H%M%S{suffix}"))


def delete_old(folder: str, new: str, count: int, keep: int) -> None:
    """Delete old copies, but none with more plants than the new one: if there is one, exit with 1.

    The service never deletes a plant, so fewer plants are a loss. If nobody has noticed it yet,
    the old copies are the only good ones.
    """
    others = sorted(filter(COPY.fullmatch, os.listdir(folder)), reverse=True)
    others.remove(os.path.basename(new))
    complaints = []
    for number, name in enumerate(others, start=2):
        copy = os.path.join(folder, name)
        try:
            with open_database(copy) as database:
                check_ours(database, copy)
                old = count_plants(database)
        except ERRORS as error:
            complaints.append(f"{copy} can't be read ({error})")
            continue
        if old > count:
            complaints.append(f"{copy} has {old} plants")
        elif number > keep:
            try:
                os.remove(copy)
            except OSError as error:
                complaints.append(f"{copy} can't be deleted ({error})")
    if complaints:
        sys.exit(
            f"the new copy has {count} plants, but {'; '.join(complaints)}; none of these was "
            "deleted: if plants were lost, or a copy can't be read, read docs/emergencies.md; "
            "otherwise delete these copies"
        )


@contextlib.contextmanager
def open_database(path: str, mode: str = "ro") -> Iterator[sqlite3.Connection]:
    """Yield a connection. By default the file must exist, and the connection can't write to it."""
    uri = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode={mode}"
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5)
    except sqlite3.Error as error:
        error.args = (f"{path}: {error}",)
        raise
    with contextlib.closing(connection):
        try:
            yield connection
        except UnicodeDecodeError:  # SQLite's message quotes the damaged schema.
            raise sqlite3.DatabaseError(f"{path} is damaged") from None


def check_ours(database: sqlite3.Connection, path: str) -> None:
    """Raise a ValueError if a database is not one of the service's."""
    columns = {"id", "name", "tag"}
    if not columns <= set(get_columns(database)) or get_id(database) != APPLICATION_ID:
        raise ValueError(f"{path} has no table of plants, or belongs to another program")


def check_intact(database: sqlite3.Connection, path: str) -> None:
    """Raise a ValueError if a database is damaged."""
    if (found := get_value(database, "PRAGMA integrity_check(1)")) != "ok":
        raise ValueError(f"{path} is damaged: {' '.join(found.split())}")


def get_columns(database: sqlite3.Connection) -> list[str]:
    return [row[1] for row in database.execute("PRAGMA table_info(plants)")]


def get_id(database: sqlite3.Connection) -> int:
    return int(get_value(database, "PRAGMA application_id"))


def count_plants(database: sqlite3.Connection) -> int:
    return int(get_value(database, "SELECT count(*) FROM plants"))


def get_value(database: sqlite3.Connection, query: str) -> Any:
    """Return what a query finds in its first row and column."""
    return database.execute(query).fetchone()[0]


@contextlib.contextmanager
def temporary(path: str) -> Iterator[None]:
    """Remove an unfinished database: first what a killed run has left, and at the end our own."""
    try:
        remove(path)
        yield
    finally:
        remove(path)


def is_missing_or_empty(path: str) -> bool:
    """Tell if a file is missing or empty. Do not open such a file: SQLite would delete its -wal."""
    return not os.path.exists(path) or not os.path.getsize(path)


def remove(path: str) -> None:
    """Remove a database, with the files that SQLite has made beside it."""
    for suffix in SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + suffix)


def sync(path: str) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
