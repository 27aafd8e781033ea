"""The engine for a SQLite file in WAL mode, synced at every commit (sqlite.org/wal.html)."""

import contextlib
import fcntl
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from plant import Plant
from storage import Engine, Rejected, Unavailable

APPLICATION_ID = 0x504C4E54  # "PLNT"
# A real write that changes nothing: BEGIN IMMEDIATE succeeds on read-only files.
TRY_A_WRITE = f"PRAGMA application_id = {APPLICATION_ID}"
# Without fullfsync, macOS leaves what is synced in the drive's memory.
PREPARE = f"""
    PRAGMA synchronous = FULL; PRAGMA fullfsync = ON;
    PRAGMA journal_size_limit = {2**23};  -- bytes of plants.db-wal that stay once it was larger
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT;
    {TRY_A_WRITE}; PRAGMA user_version = 1;
    COMMIT"""
COLUMNS, ROW = ", ".join(Plant._fields), f"({', '.join('?' * len(Plant._fields))})"
# What is there already is written too, so that it is synced.
INSERT = f"""INSERT INTO plants ({COLUMNS}) VALUES {{rows}}
    ON CONFLICT (id) DO UPDATE SET id = plants.id RETURNING {COLUMNS}"""


class SQLiteEngine(Engine):
    """A connection to a file that several processes write to or checkpoint, one at a time."""

    def __init__(self, path: str) -> None:
        """Name a file; raise ValueError where no file can have this name."""
        self._path = os.path.realpath(path)  # SQLite's other files are beside what a link leads to
        self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}"
        self._connection: sqlite3.Connection | None = None  # once open, it is never opened again
        self._files: list[tuple[int, int]] = []  # those that it has open

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        # At SQLite's own lock, processes sleep for milliseconds, and before 3.51.3 it lets them
        # damage the file (sqlite.org/wal.html, "The WAL-Reset Bug").
        name = f"{self._path}-lock"
        with explained(name):
            lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)  # whoever may read it can lock it
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)

    def insert(self, plants: Sequence[Plant], lock_limit: int) -> Mapping[int, Plant]:
        rows = ", ".join([ROW] * len(plants))
        statement = INSERT.format(rows=rows) if plants else TRY_A_WRITE
        values = [value for plant in plants for value in plant]
        with explained(self._path):
            connection = self._connection = self._connection or self._open()
            found = connection.execute(statement, values).fetchall()  # the last row commits
            if find_files(self._path) != self._files:  # what is stored is lost
                raise Unavailable(f"{self._path} was deleted or replaced: see docs/data.md")
        return {plant.id: plant for plant in map(Plant._make, found)}

    def close(self) -> None:
        if self._connection:
            with contextlib.suppress(Unavailable), self.locked():  # the last to close checkpoints
                self._connection.close()

    def _open(self) -> sqlite3.Connection:
        """Connect to the file, and make it first if there is none."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, 0o600))
        # Else a SIGBUS on a full disk, where SQLite maps 32 KiB of -shm.
        with tempfile.TemporaryFile(dir=os.path.dirname(self._path)) as trial:
            trial.write(bytes(2**16))
        before = os.stat(self._path)
        url = f"file:{quote(os.fsencode(self._path))}?mode=rw"
        # One cached statement, as each keeps its last batch.
        connection = sqlite3.connect(
            url, uri=True, isolation_level=None, check_same_thread=False, cached_statements=1
        )
        # What is not UTF-8 equals no plant, and fails no batch.
        connection.text_factory = lambda text: text.decode(errors="surrogateescape")
        try:
            self._prepare(connection)
            self._files = find_files(self._path)
            if self._files[:1] != [(before.st_dev, before.st_ino)]:
                raise Unavailable(f"{self._path} was replaced while it was opened")
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the table if there is none, and all that is in the file durable."""
        (number,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if not tables:
            self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}, which is new"
        elif number != APPLICATION_ID:
            raise Unavailable(f"{self._path} is another program's; correct DATABASE_URL")
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise Unavailable(f"{self._path}: no WAL mode on this file system; use a local disk")
        connection.executescript(PREPARE)
        # A killed process may leave frames in the WAL that can be read but are not synced: a retry
        # would get a 200 for them. The checkpoint syncs them first.
        if connection.execute("PRAGMA wal_checkpoint").fetchone()[0]:
            raise Unavailable(f"{self._path}: another program is at work on it")


def find_files(path: str) -> list[tuple[int, int]]:
    """Return device and inode of the file, its -wal and its -shm; none if one is missing."""
    with contextlib.suppress(FileNotFoundError):
        found = [os.stat(path + suffix) for suffix in ("", "-wal", "-shm")]
        return [(each.st_dev, each.st_ino) for each in found]
    return []


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn SQLite's and the system's errors into ours: one line, without plants."""
    try:
        yield
    except sqlite3.IntegrityError as error:  # whose message may quote a plant
        raise Rejected(f"SQLite: {error.sqlite_errorname}") from None
    except (sqlite3.Error, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Unavailable(f"{path}: {reason}") from None
