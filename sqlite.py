"""The engine for a SQLite file in WAL mode, synced at every commit (sqlite.org/wal.html).

Contains no queue and no limits for requests: storage.py has those.
"""

import contextlib
import fcntl
import os
import pwd
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from engine import Engine, Inserted, NeedsOperator, Unavailable
from schemas import Plant

APPLICATION_ID = 0x504C4E54  # "PLNT"
VERSION = 1  # of the tables in a file
DURABLE = "PRAGMA synchronous = FULL; PRAGMA fullfsync = ON;"  # macOS: fsync leaves it in the drive
SCHEMA = f"""{DURABLE} BEGIN;
    CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT;
    PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; COMMIT"""
# A real write that changes nothing: BEGIN IMMEDIATE succeeds on read-only files.
TRY_A_WRITE = f"PRAGMA application_id = {APPLICATION_ID}"
COLUMNS, ROW = ", ".join(Plant._fields), f"({', '.join('?' * len(Plant._fields))})"
TRANSIENT = {sqlite3.SQLITE_BUSY: "; lslocks shows by whom", sqlite3.SQLITE_FULL: ""}
LOST = "was deleted or replaced: see docs/data.md, and only then restart"
REMEDY = "; fix that, or set DATABASE_URL to another file on a local disk"


class SQLiteEngine(Engine):
    """A connection to a file that several processes write to, one at a time.

    Everything that writes or checkpoints, opening and closing too, holds a lock: processes that
    meet at SQLite's own lock sleep for milliseconds, and SQLite before 3.51.3 can damage the file
    if one checkpoints while another writes (sqlite.org/wal.html, "The WAL-Reset Bug").
    """

    def __init__(self, path: str, identity: str, busy_timeout: float) -> None:
        """Refuse a file at `path` that is not that of `identity`; wait some seconds for SQLite."""
        if not path or path == ":memory:" or "\0" in path:
            raise NeedsOperator("DATABASE_URL must name a file: what is in memory is not stored")
        # SQLite keeps its other files beside what a link leads to.
        self._path = os.path.realpath(path)
        self.identity, self._busy_timeout = identity, busy_timeout
        self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}"
        self._connection: sqlite3.Connection | None = None
        self._files: list[tuple[int, int]] = []  # those that are open; none once one is lost
        self._lock = -1  # the descriptor of the lock file

    def insert(self, plants: Sequence[Plant]) -> Inserted:
        try:
            connection = self._connection or self._open()
            if self._files:
                inserted = insert_new(connection, plants)
                # What was committed to a file that is no longer there is not stored.
                if self._files == self._find_files():
                    return inserted
                self._files = []
        except (sqlite3.IntegrityError, sqlite3.DataError):
            raise
        except (sqlite3.Error, OSError) as error:
            raise explain(self._path, error) from None
        raise NeedsOperator(f"{self._path} {LOST}")

    def rows(self) -> Iterator[Plant]:
        try:
            with contextlib.closing(self._connect(self._path, "ro")) as connection:
                self._check_application(connection)
                # One statement reads one snapshot, whatever is written meanwhile.
                select = f"SELECT {COLUMNS} FROM plants ORDER BY id"
                yield from map(Plant._make, connection.execute(select))
        except sqlite3.Error as error:
            raise explain(self._path, error) from None

    def close(self) -> None:
        if self._connection is not None:
            with self.locked():
                self._connection.close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        name = f"{self._path}-lock"
        self.obstacle = f"other processes hold the lock {name}; lslocks shows which"
        try:
            self._take_lock(name)
        except OSError as error:
            raise explain(name, error) from None
        self.obstacle = f"the disk, or a program that has locked {self._path}; lslocks shows which"
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _take_lock(self, name: str) -> None:
        """Take the lock, however long that takes."""
        while True:
            if self._lock < 0:
                self._lock = self._open_lock(name)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._lock), os.stat(name)):
                    return
            os.close(self._lock)  # it was deleted or replaced: others lock another file
            self._lock = -1

    def _open_lock(self, name: str) -> int:
        """Open the lock file, only for those who may write plants: who can open it can hold it.

        As with SQLite's own files, the one that root makes is given to the database's owner.
        """
        lock = os.open(name, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        own = os.fstat(lock)
        with contextlib.suppress(OSError):  # there is no database yet, or its group is not ours
            database = os.stat(self._path)
            if own.st_uid == os.geteuid() and own.st_nlink == 1:
                os.fchown(lock, -1 if own.st_uid else database.st_uid, database.st_gid)
                os.fchmod(lock, 0o660 if database.st_mode & stat.S_IWGRP else 0o600)
        return lock

    def _open(self) -> sqlite3.Connection:
        """Connect to the file; make it first if there is none and there was none at the start."""
        found = self._find_files("")
        if not found and not self.identity:
            self._create()
            found = self._find_files("")
        # Before SQLite opens the file, as it would replay a -wal of another one into it.
        if self.identity not in ("", str(found)):
            raise NeedsOperator(f"{self._path} {LOST}")
        if os.path.isfile(self._path) and os.stat(self._path).st_nlink > 1:
            raise NeedsOperator(f"{self._path} has a hard link; with two names it has two -wal")
        connection = self._connect(self._path, "rw")
        try:
            self._prepare(connection)
            self._files = self._find_files()
            if found != self._files[:1]:
                raise Unavailable(f"{self._path} was replaced while it was opened")
        except BaseException:
            connection.close()
            raise
        self.identity, self._connection = str(found), connection
        return connection

    def _create(self) -> None:
        """Make the file under another name first: whoever is killed meanwhile leaves that one."""
        if os.path.exists(f"{self._path}-wal"):  # SQLite would replay it into the new file
            raise NeedsOperator(
                f"{self._path} is missing, but not its -wal: restore a backup, or move that away"
            )
        new = f"{self._path}-new"
        for left in (new, f"{new}-journal"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(left)
        # Who may read the file can hold SQLite's locks, too.
        os.close(os.open(new, os.O_CREAT | os.O_EXCL, 0o600))
        with contextlib.closing(self._connect(new, "rw")) as connection:
            connection.executescript(SCHEMA)
        os.rename(new, self._path)  # SQLite syncs the folder when it changes the journal mode

    def _connect(self, path: str, mode: str) -> sqlite3.Connection:
        if not os.path.exists(path):
            raise NeedsOperator(f"{path}: there is no such file")
        return sqlite3.connect(
            f"file:{quote(os.fsencode(path))}?mode={mode}",
            timeout=self._busy_timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=1,  # each keeps the plants that it was last used for
            uri=True,
        )

    def _check_application(self, connection: sqlite3.Connection) -> None:
        if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise NeedsOperator(f"{self._path} is empty or another program's{REMEDY}")
        if connection.execute("PRAGMA user_version").fetchone()[0] > VERSION:
            raise NeedsOperator(f"{self._path} is of a newer version of this service; run that")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Set the connection up, and make all that is in the file durable."""
        connection.executescript(DURABLE)
        self._check_application(connection)
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise NeedsOperator(f"{self._path}: no WAL mode on this file system{REMEDY}")
        # A killed process may leave frames in the WAL that can be read but are not synced: a retry
        # would get a 200 for them. The checkpoint syncs them. The write after it restarts the WAL,
        # in case the sync of that process had failed.
        busy, frames, _ = connection.execute("PRAGMA wal_checkpoint").fetchone()
        if busy:
            raise Unavailable(f"{self._path}: another program is at work on it")
        if frames:
            connection.execute(TRY_A_WRITE)

    def _find_files(self, *suffixes: str) -> list[tuple[int, int]]:
        """Return device and inode of the file, -wal and -shm; none if one is missing."""
        try:
            found = [os.stat(self._path + suffix) for suffix in suffixes or ("", "-wal", "-shm")]
        except FileNotFoundError:
            return []
        return [(status.st_dev, status.st_ino) for status in found]


def insert_new(connection: sqlite3.Connection, plants: Sequence[Plant]) -> Inserted:
    """Insert the plants whose id is new, in autocommit; without plants, write nothing new."""
    if not plants:
        connection.execute(TRY_A_WRITE)
        return Inserted()
    # Only placeholders are put into the texts; the plants go beside them.
    rows = ", ".join([ROW] * len(plants))
    insert = f"INSERT INTO plants ({COLUMNS}) VALUES {rows} ON CONFLICT (id) DO NOTHING"
    new = connection.execute(insert, [value for plant in plants for value in plant]).rowcount
    if new == len(plants):
        return Inserted(new)
    ids = ", ".join("?" * len(plants))
    select = f"SELECT {COLUMNS} FROM plants WHERE id IN ({ids})"
    found = map(Plant._make, connection.execute(select, [plant.id for plant in plants]))
    return Inserted(new, existing={plant.id: plant for plant in found})


def explain(path: str, error: sqlite3.Error | OSError) -> Unavailable:
    """Return the error of ours that SQLite's or the system's means: one line, nothing of plants."""
    if (code := getattr(error, "sqlite_errorcode", 0) & 0xFF) in TRANSIENT:
        return Unavailable(f"{path}: {error}{TRANSIENT[code]}")
    reason = getattr(error, "strerror", error)
    for place in filter(os.path.exists, (path, os.path.dirname(path))):
        if not os.access(place, os.W_OK):
            owner, user = user_name(os.stat(place).st_uid), user_name(os.geteuid())
            reason = f"{reason}; {place} belongs to {owner}, and this runs as {user}"
            break
    return NeedsOperator(f"{path}: {reason}{REMEDY}")


def user_name(number: int) -> str:
    """Return the name of a user, or the number where it has none."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)
