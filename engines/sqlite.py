"""The engine for a SQLite file in WAL mode, synced at every commit (sqlite.org/wal.html)."""

import contextlib
import fcntl
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import gevent.util

from engines import gather
from plant import Plant
from storage import Engine, Locked, Rejected, Unavailable

APPLICATION_ID = 0x504C4E54  # "PLNT"
COLUMNS, ROW = ", ".join(Plant._fields), f"({', '.join('?' * len(Plant._fields))})"
# Reads the end of the table, where the next plant goes: its page may be damaged, or a column may be
# missing in an older file. Then writes the application_id, although the file may have it already:
# only a write shows that the file is not read-only. BEGIN IMMEDIATE succeeds on such a file, too.
TRY_A_WRITE = f"""SELECT {COLUMNS} FROM plants ORDER BY id DESC LIMIT 1;
    PRAGMA application_id = {APPLICATION_ID}"""
# Without fullfsync, macOS leaves synced data in the drive's volatile memory.
PREPARE = f"""
    PRAGMA synchronous = FULL; PRAGMA fullfsync = ON;
    PRAGMA journal_size_limit = {2**23};  -- bytes, to which SQLite cuts a larger plants.db-wal
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT;
    {TRY_A_WRITE}; PRAGMA user_version = 1;
    COMMIT"""
# A plant that equals the stored one is written once more, so that the sync covers it, too. There is
# no RETURNING: a cursor that is read halfway keeps its transaction open, and all later plants would
# be acknowledged, but lost. Without rows to fetch, execute() returns after the commit.
INSERT = f"""INSERT INTO plants ({COLUMNS}) VALUES {{rows}} ON CONFLICT (id)
    DO UPDATE SET id = plants.id WHERE name = excluded.name AND tag IS excluded.tag"""
FIND = f"SELECT {COLUMNS} FROM plants WHERE id IN ({{ids}})"
# A restart would end the workers that still hold the deleted files, which can be copied from them.
GONE = "was deleted or replaced; do not restart: see docs/data.md"


class SQLiteEngine(Engine):
    """A connection to a file that several processes write to and checkpoint, one at a time."""

    def __init__(self, path: str) -> None:
        """Name a file. Raises ValueError if no file can have this name."""
        # SQLite keeps its other files beside the file that a link leads to.
        self._path = os.path.realpath(path)
        self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}"
        self._connection: sqlite3.Connection | None = None  # once opened, it is never opened again

    def run(self, store: Callable[[], None]) -> None:
        """Call `store` in a real thread: while sqlite3 waits in C, no greenlet could run."""
        gather()
        # As a decorator, locked() holds the lock while `store` runs in the thread. The pool prints
        # every error that is raised in its threads, and the message may contain plants. So
        # wrap_errors() makes a function that returns the error instead, and it is raised here.
        locked_store = gevent.util.wrap_errors(Exception, self.locked()(store))
        if error := gevent.get_hub().threadpool.apply(locked_store):
            raise error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let the workers of this host take turns."""
        # Processes that meet at SQLite's own lock sleep for milliseconds. Besides, SQLite before
        # 3.51.3 can damage the file if one process writes while another one checkpoints
        # (sqlite.org/wal.html, "The WAL-Reset Bug").
        folder, name = os.path.dirname(self._path), f"{self._path}-lock"
        if not os.path.isdir(folder):
            reason = GONE if self._connection else "of DATABASE_URL is missing; mount or create it"
            raise Unavailable(f"the folder {folder} {reason}")
        # Private, since everybody who may read it can lock it.
        with translate_errors(name), open(os.open(name, os.O_RDWR | os.O_CREAT, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def insert(self, plants: Sequence[Plant], lock_limit: int) -> Mapping[int, Plant]:
        """Store plants as Engine says. SQLite locks no rows, so `lock_limit` has no meaning."""
        stored = {plant.id: plant for plant in plants}
        insert = INSERT.format(rows=", ".join([ROW] * len(plants)))
        values = [value for plant in plants for value in plant]
        with translate_errors(self._path):
            connection = self._connection = self._connection or self._open()
            if not plants:
                connection.executescript(TRY_A_WRITE)
            # If as many rows were written as there are plants, each was new or the same as before.
            elif connection.execute(insert, values).rowcount != len(plants):
                found = connection.execute(FIND.format(ids=", ".join(map(str, stored)))).fetchall()
                stored = {plant.id: plant for plant in map(Plant._make, found)}
            if file_ids(self._path) != self._files:  # The commit went to files that are gone.
                raise Unavailable(f"{self._path} {GONE}")
        return stored

    def close(self) -> None:
        # The last connection to be closed checkpoints. Storage calls this by run(), so no other
        # process writes meanwhile.
        if self._connection:
            self._connection.close()

    def _open(self) -> sqlite3.Connection:
        """Connect to the file; create it first if there is none."""
        # A container may have the file alone on a volume. Its -wal would stay in the container, and
        # be deleted with it. proc(5) describes the list of mounts, which only Linux has.
        mounts, path = Path("/proc/self/mountinfo"), os.fsencode(f" {self._path} ")
        if mounts.exists() and path in mounts.read_bytes().replace(rb"\040", b" "):
            raise Unavailable(f"{self._path} is a mount; mount a folder, and name a file in it")
        # If there is no file, create it here. SQLite would create one that everybody may read.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, 0o600))
        # Fail cleanly if the disk is full: SQLite would map 32 KiB of -shm there and die of SIGBUS.
        with tempfile.TemporaryFile(dir=os.path.dirname(self._path)) as trial:
            trial.write(bytes(2**16))
        # If the -shm was deleted while another process has the file open, that process still uses
        # the deleted index of the WAL. We would make a second index, and the two processes would
        # destroy the file. So refuse it if a process holds the lock that belongs to every open
        # file, on the bytes SHARED_FIRST and SHARED_SIZE (sqlite.org/src/file/src/os.h). An
        # empty file has no WAL yet, so it needs no such check.
        if os.path.getsize(self._path) and not os.path.exists(f"{self._path}-shm"):
            with open(self._path, "rb+") as file, translate_errors(f"{self._path}-shm {GONE}"):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 2**30 + 2)
        before = os.stat(self._path)
        # Each cached statement keeps its last batch in memory, so cache only one.
        connection = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, cached_statements=1
        )
        # Rows that other programs wrote may not be UTF-8. Decode them to something that equals no
        # plant, rather than fail the batch.
        connection.text_factory = lambda text: text.decode(errors="surrogateescape")
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        # The ids of the files that are open. If another file has taken the name meanwhile, its id
        # is not among them.
        self._files = [(before.st_dev, before.st_ino), *file_ids(self._path)[1:]]
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create the table if there is none, and make durable what is in the file."""
        if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,):
            self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}, which is new"
        elif connection.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
            raise Unavailable(f"{self._path} belongs to another program; correct DATABASE_URL")
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise Unavailable(f"{self._path}: no WAL mode on this file system; use a local disk")
        connection.executescript(PREPARE)
        # A process whose sync failed, and that was then killed, leaves frames in the WAL that can
        # be read. But the kernel may have marked their pages as clean, so that no later sync of the
        # WAL brings them to the disk. We would append to them, a power cut would lose them, and
        # SQLite would stop reading at the gap: plants behind it that were synced would be lost,
        # too. The checkpoint copies the frames into the file and syncs that, so that nothing
        # depends on them. tests/ci/test_crashes.py shows the loss without it.
        if connection.execute("PRAGMA wal_checkpoint").fetchone()[0]:
            raise Unavailable(f"{self._path}: another program is checkpointing it; stop that first")


def file_ids(path: str) -> list[tuple[int, int]]:
    """Return device and inode of the file, its -wal and its -shm, or [] if one is missing."""
    with contextlib.suppress(FileNotFoundError):
        found = [os.stat(path + suffix) for suffix in ("", "-wal", "-shm")]
        return [(each.st_dev, each.st_ino) for each in found]
    return []


@contextlib.contextmanager
def translate_errors(path: str) -> Iterator[None]:
    """Turn the errors of SQLite and of the system into ours: one line, without plants."""
    try:
        yield
    except sqlite3.IntegrityError as error:  # Its message may quote a plant.
        raise Rejected(f"SQLite: {error.sqlite_errorname}") from None
    except (sqlite3.Error, OSError) as error:
        # SQLITE_ERROR may concern one plant, for which somebody's constraint or trigger fails.
        kind = Locked if getattr(error, "sqlite_errorname", "") == "SQLITE_ERROR" else Unavailable
        raise kind(f"{path}: {getattr(error, 'strerror', error)}") from None
