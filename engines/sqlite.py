"""The engine for a SQLite file in WAL mode, synced at every commit (sqlite.org/wal.html)."""

import contextlib
import errno
import fcntl
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from urllib.parse import quote

from engines import Engine, NeedsOperator, Rejected, Unavailable
from plant import Plant

APPLICATION_ID = 0x504C4E54  # "PLNT"
VERSION = 1  # of the tables in a file
WAL_LIMIT = 2**23  # bytes of plants.db-wal that stay once it was larger
DURABLE = "PRAGMA synchronous = FULL; PRAGMA fullfsync = ON;"  # macOS: fsync leaves it in the drive
SCHEMA = f"""{DURABLE} BEGIN;
    CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT;
    PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; COMMIT"""
COLUMNS, ROW = ", ".join(Plant._fields), f"({', '.join('?' * len(Plant._fields))})"
# Whatever the table's own ON CONFLICT clauses are.
INSERT = f"INSERT OR ABORT INTO plants ({COLUMNS}) VALUES "
OR_FIND = f" ON CONFLICT (id) DO UPDATE SET id = plants.id RETURNING {COLUMNS}"
# A statement that does not compile does not notice that another program has changed the tables.
NOTICE_CHANGES = "SELECT 1 FROM sqlite_schema LIMIT 0"
TRY_TO_COMPILE = f"EXPLAIN {INSERT}{ROW.replace('?', 'NULL')}"
SELECT = f"SELECT {COLUMNS} FROM plants ORDER BY id"
# A real write that changes nothing: BEGIN IMMEDIATE succeeds on read-only files.
TRY_A_WRITE = f"PRAGMA application_id = {APPLICATION_ID}"
# What a plant may be at fault for; of other primary codes (sqlite.org/rescode.html), these pass.
REFUSED = {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG}
NOT_NOW = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PROTOCOL}
NOT_NOW_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
NO_ACCESS = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY}
LOST = "was deleted or replaced: see docs/data.md, and only then restart"

private = partial(os.open, mode=0o600)  # an opener: who may read the file can hold its locks


class SQLiteEngine(Engine):
    """A connection to a file that several processes write to, one at a time.

    All that writes or checkpoints holds a lock: at SQLite's own, processes sleep for milliseconds,
    and SQLite before 3.51.3 can damage the file (sqlite.org/wal.html, "The WAL-Reset Bug").
    """

    max_batch = 1000  # SQLite allows 32,766 values in a statement

    def __init__(self, path: str, busy_timeout: float) -> None:
        """Name a file; wait so many seconds for other programs. Raises NeedsOperator."""
        if not path or path == ":memory:" or "\0" in path:
            raise NeedsOperator("DATABASE_URL must name a file: what is in memory is not stored")
        # SQLite keeps its other files beside what a link leads to.
        self._path, self._busy_timeout = os.path.realpath(path), busy_timeout
        self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}"
        self._connection: sqlite3.Connection | None = None
        self._files: list[tuple[int, int]] = []  # those that are open; none once one is lost

    def check(self) -> None:
        with self._commit() as connection:
            connection.execute(NOTICE_CHANGES).close()
            connection.execute(TRY_TO_COMPILE)
            connection.execute("SELECT max(id) FROM plants").fetchone()  # a page may be damaged
            connection.execute(TRY_A_WRITE)

    def insert(self, plants: Sequence[Plant], is_part: bool) -> Mapping[int, Plant]:
        rows = ", ".join([ROW] * len(plants))
        values = [value for plant in plants for value in plant]
        with self._commit() as connection:
            try:
                # Most often all are new, and this takes a third of the time.
                if connection.execute(INSERT + rows, values).rowcount == len(plants):
                    return {plant.id: plant for plant in plants}
            except sqlite3.DatabaseError as error:
                if error.sqlite_errorcode & 0xFF not in REFUSED:
                    raise
            try:
                connection.execute(NOTICE_CHANGES).close()
                found = map(Plant._make, connection.execute(INSERT + rows + OR_FIND, values))
                return {plant.id: plant for plant in found}
            except sqlite3.DatabaseError as error:
                is_operators = "NOT NULL constraint failed: plants." in str(error)  # a column's
                if error.sqlite_errorcode & 0xFF not in REFUSED or is_operators:
                    raise
                # Without the message, as a trigger's may have something of the plant in it.
                raise Rejected(f"SQLite: {error.sqlite_errorname}") from None

    def rows(self) -> Iterator[Plant]:
        with explained(self._path), contextlib.closing(self._connect("ro")) as connection:
            check_file(connection, self._path)
            yield from map(Plant._make, connection.execute(SELECT))

    def close(self) -> None:
        if self._connection:
            # Where the folder is gone, and the lock with it, there is nothing to checkpoint.
            with contextlib.suppress(Unavailable), self.locked():
                self._connection.close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        name = f"{self._path}-lock"
        with explained(name):
            lock = private(name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _commit(self) -> Iterator[sqlite3.Connection]:
        """Give the connection; what is committed to a file that is gone is Unavailable."""
        with explained(self._path):
            connection = self._connection = self._connection or self._open()
            try:
                if self._files:
                    yield connection
            finally:
                if not self._files or self._files != find_files(self._path):
                    self._files = []
                    raise NeedsOperator(f"{self._path} {LOST}")

    def _open(self) -> sqlite3.Connection:
        """Connect to the file, and make it first if there is none."""
        try:
            os.stat(self._path)
        except FileNotFoundError:
            create(self._path)
        found = os.stat(self._path)
        # On a full disk SQLite, which maps 32 KiB of -shm to begin with, would get a SIGBUS.
        with tempfile.TemporaryFile(dir=os.path.dirname(self._path)) as trial:
            trial.write(bytes(2**16))
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(contextlib.closing(self._connect("rw")))
            check_file(connection, self._path)
            prepare(connection, self._path)
            self._files = find_files(self._path)
            if self._files[:1] != [(found.st_dev, found.st_ino)]:
                raise Unavailable(f"{self._path} was replaced while it was opened")
            stack.pop_all()
        return connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"file:{quote(os.fsencode(self._path))}?mode={mode}",
            timeout=self._busy_timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=0,  # each would keep the plants that it was last used for
            uri=True,
        )


def create(path: str) -> None:
    """Make the file under another name first: whoever is killed meanwhile leaves that one."""
    if os.path.exists(f"{path}-wal"):  # SQLite would replay it into the new file
        raise NeedsOperator(f"{path} is missing, but not its -wal: restore a backup, or move it")
    new = f"{path}-new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)  # SQLite deletes a journal that an empty file has
    open(new, "xb", opener=private).close()
    with contextlib.closing(sqlite3.connect(new)) as connection:
        connection.executescript(SCHEMA)
    os.link(new, path)  # unlike a rename, it never replaces a file
    os.unlink(new)  # SQLite syncs the folder when it changes the journal mode


def check_file(connection: sqlite3.Connection, path: str) -> None:
    """Raise NeedsOperator unless the file is one of this service, and not of a newer version."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise NeedsOperator(f"{path} is empty, damaged or another program's; see docs/data.md")
    if connection.execute("PRAGMA user_version").fetchone()[0] > VERSION:
        raise NeedsOperator(f"{path} is of a newer version of this service; run that")


def prepare(connection: sqlite3.Connection, path: str) -> None:
    """Make all that is in the file durable, and what is committed from now on."""
    connection.executescript(f"{DURABLE} PRAGMA journal_size_limit = {WAL_LIMIT}")
    # A text that is not UTF-8 is another plant's, and keeps out no other.
    connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
    if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise NeedsOperator(f"{path}: no WAL mode on this file system; use a local disk")
    # A killed process may leave frames in the WAL that can be read but are not synced: a retry
    # would get a 200 for them. The checkpoint syncs them, and the write that follows, of a plant or
    # a health check, restarts the WAL, in case the sync of that process had failed.
    if connection.execute("PRAGMA wal_checkpoint").fetchone()[0]:
        raise Unavailable(f"{path}: another program is at work on it")


def find_files(path: str) -> list[tuple[int, int]]:
    """Return device and inode of the file, -wal and -shm; none if one is missing."""
    with contextlib.suppress(FileNotFoundError):
        found = [os.stat(path + suffix) for suffix in ("", "-wal", "-shm")]
        return [(each.st_dev, each.st_ino) for each in found]
    return []


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Raise the error of ours that SQLite's or the system's means: one line, nothing of plants."""
    try:
        yield
    except (sqlite3.Error, OSError, MemoryError) as error:
        code, number = getattr(error, "sqlite_errorcode", 0) & 0xFF, getattr(error, "errno", None)
        reason = f"{path}: {getattr(error, 'strerror', None) or str(error) or 'out of memory'}"
        if code in NOT_NOW or number in NOT_NOW_ERRNO or isinstance(error, MemoryError):
            with contextlib.suppress(OSError):
                reason += "" if os.statvfs(os.path.dirname(path)).f_bavail else "; the disk is full"
            raise Unavailable(reason) from None
        advice = "see docs/data.md"
        if code in NO_ACCESS or number:
            advice = f"the folder must be there, and user {os.geteuid()} able to write to both"
        raise NeedsOperator(f"{reason}; {advice}") from None
