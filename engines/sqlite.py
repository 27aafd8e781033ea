"""The engine for a SQLite file in WAL mode, synced at every commit (sqlite.org/wal.html)."""

import contextlib
import fcntl
import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import gevent

from engines import gather
from plant import Plant
from storage import Engine, Locked, Rejected, Unavailable

APPLICATION_ID = 0x504C4E54  # "PLNT"
COLUMNS = ", ".join(Plant._fields)
ROW = f"({', '.join('?' * len(Plant._fields))})"  # placeholders for one plant
# Reads the end of the table, where the next plant goes: its page may be damaged, or a column may be
# missing in an older file. Then writes the application_id, although the file may have it already:
# only a write shows that the file is not read-only. BEGIN IMMEDIATE succeeds on a read-only file.
TRY_A_WRITE = f"""SELECT {COLUMNS} FROM plants ORDER BY id DESC LIMIT 1;
    PRAGMA application_id = {APPLICATION_ID}"""
# Without fullfsync, macOS leaves synced data in the drive's volatile memory.
PREPARE = f"""
    PRAGMA synchronous = FULL; PRAGMA fullfsync = ON;
    PRAGMA journal_size_limit = {2**23};  -- bytes, to which SQLite cuts a larger plants.db-wal
    BEGIN IMMEDIATE; {{create}} {TRY_A_WRITE}; PRAGMA user_version = 1; COMMIT"""
CREATE = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT;"
# A plant that equals the stored one is written once more, so that the sync covers it, too. There is
# no RETURNING: a cursor that is read halfway keeps its transaction open, and all later plants would
# be acknowledged, but lost. Without rows to fetch, execute() returns after the commit.
INSERT = f"""INSERT INTO plants ({COLUMNS}) VALUES {{rows}} ON CONFLICT (id)
    DO UPDATE SET id = plants.id WHERE name = excluded.name AND tag IS excluded.tag"""
FIND = f"SELECT {COLUMNS} FROM plants WHERE id IN ({{ids}})"
# A restart would end the workers from which deleted files can still be copied.
GONE = "was deleted or replaced: read docs/emergencies.md before you restart"
NOWHERE = (
    f"{GONE}; if it never had plants, correct DATABASE_URL, or make a file with start.py, as the "
    "service's user"
)
LOST = (
    "{0} is missing or empty, but {0}-lock shows that a database was here: read "
    "docs/emergencies.md; or, to begin an empty one, move {0}* away"
)


class SQLiteEngine(Engine):
    """A connection to a file that several processes write to and checkpoint, one at a time.

    plants.db-lock is made last of all files. If it exists, plants may have been stored, so a
    missing or empty plants.db is a loss, and nobody makes a new one.
    """

    creates = False  # Only the start makes a file. If a worker did, nobody would notice a loss.

    def __init__(self, path: str) -> None:
        """Name a file. Raises ValueError if no file can have this name."""
        # SQLite keeps its other files beside the file that a link leads to.
        self._path = os.path.realpath(path)
        self._folder = os.path.dirname(self._path)
        self._lock_path = f"{self._path}-lock"
        self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}"
        self._lock: int | None = None  # the descriptor that locked() uses again
        self._connection: sqlite3.Connection | None = None  # opened and closed once, by Storage

    def run(self, store: Callable[[], None]) -> None:
        """Call `store` in a real thread: while sqlite3 waits in C, no greenlet could run."""
        gather()
        failures: list[Exception] = []

        def store_alone() -> None:
            # The pool would print what is raised in its thread, and the message may contain plants.
            try:
                with self.locked():
                    store()
            except Exception as error:
                failures.append(error)

        gevent.get_hub().threadpool.apply(store_alone)
        for failure in failures:
            raise failure

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let the processes of this host take turns."""
        # Processes that meet at SQLite's own lock sleep for milliseconds. SQLite before 3.51.3 can
        # also damage the file if one process writes while another one checkpoints
        # (sqlite.org/wal.html, "The WAL-Reset Bug").
        with translate_errors(self._lock_path):
            lock = self._take_lock()
        try:
            yield
        finally:
            if self._connection:
                fcntl.flock(lock, fcntl.LOCK_UN)
            else:
                os.close(lock)
                self._lock = None

    def _take_lock(self) -> int:
        """Return a descriptor that holds the lock. It stays open, since that saves CPU."""
        while True:
            if self._lock is None:
                self._lock = self._open_lock()
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # While we waited, the lock file may have been deleted. Or we locked the folder for lack
            # of a lock file, and another start has made one. Others lock the new file: open it.
            status = os.fstat(self._lock)
            is_folder = stat.S_ISDIR(status.st_mode)
            if status.st_nlink and not (is_folder and os.path.exists(self._lock_path)):
                return self._lock
            os.close(self._lock)
            self._lock = None

    def _open_lock(self) -> int:
        """Open plants.db-lock, or, before the first start has made that, the folder."""
        # A worker that has the database open knows that plants are stored here, so it may make the
        # lock file again. The file is private, since anyone who may read it can lock it.
        flags = os.O_RDWR | (os.O_CREAT if self._connection else 0)
        try:
            return os.open(self._lock_path, flags, 0o600)
        except (FileNotFoundError, NotADirectoryError):
            if self._connection:
                raise Unavailable(f"the folder {self._folder} {GONE}") from None
            if not self.creates:
                raise Unavailable(f"{self._path} {NOWHERE}") from None
            if not os.path.isdir(self._folder):
                advice = "of DATABASE_URL is missing; mount its disk, or create it for this user"
                raise Unavailable(f"the folder {self._folder} {advice}") from None
            return os.open(self._folder, os.O_RDONLY)

    def insert(self, plants: Sequence[Plant], lock_limit: int) -> Mapping[int, Plant]:
        """Store plants as Engine says. SQLite locks no rows, so `lock_limit` has no meaning."""
        try:
            # Before the write, too: a checkpoint could fill an emptied file, and hide the loss.
            self._check_files()
            with translate_errors(self._path):
                connection = self._connection = self._connection or self._open()
                stored = write(connection, plants)
        except (Rejected, Unavailable):
            # If files are gone, what SQLite says instead, such as "disk I/O error", would mislead.
            self._check_files()
            raise
        self._check_files()
        return stored

    def _check_files(self) -> None:
        """Raise Unavailable if the files that are open are no longer those at their paths."""
        if not self._connection:
            return
        with translate_errors(self._path):
            found = file_ids(self._path)
        if found != self._files:
            missing = self._path if os.path.isdir(self._folder) else f"the folder {self._folder}"
            raise Unavailable(f"{missing} {GONE}")

    def close(self) -> None:
        # The last connection to be closed checkpoints. Storage calls this through run(), so no
        # other process is writing.
        if self._connection:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        """Connect to the file; at the first start, create it first, and plants.db-lock last."""
        # A container may mount only the file. Its -wal would stay in the container, and
        # be deleted with it. proc(5) describes the list of mounts, which only Linux has.
        mounts = Path("/proc/self/mountinfo")
        path = os.fsencode(f" {self._path} ")
        if mounts.exists() and path in mounts.read_bytes().replace(rb"\040", b" "):
            raise Unavailable(f"{self._path} is a mount; mount a folder, and name a file in it")
        self._is_first = self.creates and not os.path.exists(self._lock_path)
        if not os.path.exists(self._path) or not os.path.getsize(self._path):
            self._require_first()
            # SQLite would create a file that anyone may read.
            os.close(os.open(self._path, os.O_CREAT, 0o600))
        elif self._is_exchanged():
            raise Unavailable(f"{self._path} {GONE}")
        # Fail cleanly if the disk is full: SQLite would map 32 KiB of -shm there and die of SIGBUS.
        with tempfile.TemporaryFile(dir=self._folder) as trial:
            trial.write(bytes(2**16))
        before = os.stat(self._path)
        # Each cached statement keeps its last batch in memory, so cache only one.
        connection = sqlite3.connect(
            f"{Path(self._path).as_uri()}?mode=rw",  # SQLite must not create it, either.
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=1,
        )
        # Rows that other programs wrote may not be UTF-8. Decode them to something that equals no
        # plant, rather than fail the batch.
        connection.text_factory = lambda text: text.decode(errors="surrogateescape")
        try:
            self._prepare(connection)
            if self._is_first:
                os.close(os.open(self._lock_path, os.O_CREAT, 0o600))
        except BaseException:
            connection.close()
            raise
        # The ids of the files that are open. If another file has since taken the name, its id is
        # not among them.
        self._files = [(before.st_dev, before.st_ino), *file_ids(self._path)[1:]]
        return connection

    def _is_exchanged(self) -> bool:
        """Tell if other processes have files open that are no longer at our paths.

        They go on using the deleted files. We would use the files that have these names now, or
        make new ones, and together we would destroy the database.
        """
        # Whoever has the database open locks SHARED_SIZE bytes of the file, from SHARED_FIRST on,
        # and the byte UNIX_SHM_DMS of the -shm (sqlite.org/src/file/src/os_unix.c).
        has_file = is_locked(self._path, 2**30 + 2, 510)
        has_index = is_locked(f"{self._path}-shm", 128, 1)
        return has_file != has_index or (has_file and not os.path.exists(f"{self._path}-wal"))

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create the table in a new file, and make the content of an existing one durable."""
        create = ""
        if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,):
            self._require_first()
            create = CREATE
            self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}, which is new"
        elif connection.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
            raise Unavailable(f"{self._path} belongs to another program; correct DATABASE_URL")
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise Unavailable(f"{self._path}: no WAL mode on this file system; use a local disk")
        connection.executescript(PREPARE.format(create=create))
        # Frames of the WAL whose sync failed may never reach the disk. A power cut would lose them,
        # and all plants behind them. The checkpoint copies them into the file and syncs that. The
        # whole story is in docs/code.md, and tests/ci/test_crashes.py shows the loss without it.
        if connection.execute("PRAGMA wal_checkpoint").fetchone()[0]:
            raise Unavailable(f"{self._path}: another program is checkpointing it; stop that first")

    def _require_first(self) -> None:
        """Raise Unavailable unless this is the first start, the only one that makes a database."""
        if not self._is_first:
            raise Unavailable(LOST.format(self._path) if self.creates else f"{self._path} {GONE}")


def write(connection: sqlite3.Connection, plants: Sequence[Plant]) -> Mapping[int, Plant]:
    """Store plants, or make the write of a health check. Return the stored plant for each id."""
    stored = {plant.id: plant for plant in plants}
    if not plants:
        connection.executescript(TRY_A_WRITE)
        return stored
    insert = INSERT.format(rows=", ".join([ROW] * len(plants)))
    values = [value for plant in plants for value in plant]
    # If as many rows were written as there are plants, each was new or the same as before.
    if connection.execute(insert, values).rowcount == len(plants):
        return stored
    found = connection.execute(FIND.format(ids=", ".join(map(str, stored)))).fetchall()
    return {plant.id: plant for plant in map(Plant._make, found)}


def file_ids(path: str) -> list[tuple[int, int]]:
    """Return device and inode of the file, its -wal and its -shm.

    Return [] if one is missing, or the file was emptied, which SQLite would not notice: it would
    go on with what is in the -wal.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = [os.stat(path + suffix) for suffix in ("", "-wal", "-shm")]
        if found[0].st_size:
            return [(each.st_dev, each.st_ino) for each in found]
    return []


def is_locked(path: str, first: int, count: int) -> bool:
    """Tell if another process has locked these bytes of a file.

    Never call it while this process has the file open: closing it here would end our own locks."""
    try:
        with open(path, "rb+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


@contextlib.contextmanager
def translate_errors(path: str) -> Iterator[None]:
    """Turn the errors of SQLite and of the system into ours: one line, without plants."""
    try:
        yield
    except sqlite3.IntegrityError as error:  # Its message may quote a plant.
        raise Rejected(f"SQLite: {error.sqlite_errorname}") from None
    except (sqlite3.Error, OSError) as error:
        # SQLITE_ERROR may concern one plant, for which someone's constraint or trigger fails.
        kind = Locked if getattr(error, "sqlite_errorname", "") == "SQLITE_ERROR" else Unavailable
        raise kind(f"{path}: {getattr(error, 'strerror', error)}") from None
