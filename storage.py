"""The plants table: once Storage.add() returns, the plant survives a crash and a power cut.

Contains no HTTP. postgresql.py has the engine for a PostgreSQL server; transfer.py moves plants.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias
from urllib.parse import quote, unquote

from schemas import Plant

DEFAULT_URL = "sqlite:///plants.db"
WAIT_LIMIT = 10.0  # seconds that a request waits for its plant to be stored
CHECK_LIMIT = 1.5  # seconds that a health check waits
MAX_BATCH = 1000  # plants of three values each; SQLite allows 32,766 in a statement
ALL_PLANTS = "SELECT id, name, tag FROM plants ORDER BY id"
# A variable that each sets: Heroku and Dokku, Render, Railway, Fly.io, Google Cloud Run.
PLATFORMS = ("DYNO", "RENDER", "RAILWAY_ENVIRONMENT_NAME", "FLY_APP_NAME", "K_SERVICE")
REMEDY = "; fix that, or set DATABASE_URL to another file on a local disk"

log = logging.getLogger("gunicorn.error.plants")  # a child of gunicorn's error log


class Conflict(Exception):
    """Another plant has this id. It stays as it is."""


class Unavailable(Exception):
    """The plant is not known to be stored; storing it again is safe."""


class RowLocked(Unavailable):
    """Somebody else's transaction holds the row of one of the plants."""


class StartRefused(Unavailable):
    """The service can't start, or go on, until an operator has done what the message says."""


#: How many plants were new and, unless all were, what is stored under their ids.
Inserted: TypeAlias = tuple[int, Mapping[int, Plant]]
Batch: TypeAlias = Sequence[Plant | None]  # None stands for a health check
Outcomes: TypeAlias = Sequence[Exception | None]  # None if stored, else why not


class Engine(Protocol):
    """A database. The methods raise Unavailable, StartRefused where an operator has to act.

    insert() stores durably the plants whose id is new; without plants, it proves that it could. If
    one plant is at fault it stores none, and raises RowLocked or what is not Unavailable. locked()
    keeps other processes from writing. rows() are all plants as of now, in the order of id.
    """

    description: str  # what the database is and where, without a password
    identity: str  # what tells it from another one at the same place; "" before it was seen
    obstacle: str = ""  # what insert() is waiting for, if that is known
    blocks: bool = False  # whether insert() blocks the thread, as psycopg under gevent does not

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def insert(self, plants: Sequence[Plant]) -> Inserted: ...
    def rows(self) -> Iterator[Plant]: ...
    def close(self) -> None: ...


class Storage:
    """The plants in a database, for all threads of a process."""

    def __init__(self, engine: Engine, wait_limit: float = WAIT_LIMIT) -> None:
        """Leave the database alone until it is used; `wait_limit` is in seconds."""
        self.inserted = 0  # plants that were new to the database
        self.engine, self._wait_limit = engine, wait_limit
        self.rows = engine.rows  # all plants as of now, in the order of id
        self._commit = GroupCommit(self._write, engine)

    @classmethod
    def from_url(cls, url: str, identity: str = "", wait_limit: float = WAIT_LIMIT) -> "Storage":
        """Return the storage that `url` names, if it is that of `identity`. Raises StartRefused."""
        if url.startswith("sqlite:///") and "?" not in url:
            path = unquote(url.removeprefix("sqlite:///"), errors="surrogateescape")
            return cls(SQLiteEngine(path, identity, wait_limit / 2), wait_limit)
        if url.startswith(("postgresql://", "postgres://")):
            from postgresql import PostgreSQLEngine  # SQLite does without psycopg

            return cls(PostgreSQLEngine(url, identity, wait_limit / 2), wait_limit)
        raise StartRefused(
            "DATABASE_URL must name a file like sqlite:///plants.db (sqlite:////srv/plants.db with "
            "an absolute path) or a server like postgresql://user:password@host/database"
        )

    def add(self, plant: Plant) -> None:
        """Store `plant`, or make sure that it is stored already; either is durable on return.

        Raises Conflict, or, after the wait limit at most, Unavailable: the outcome is unknown.
        """
        if error := self._commit.submit(plant, self._wait_limit).wait():
            raise error

    def add_all(self, plants: Sequence[Plant]) -> list[Exception | None]:
        """Store many plants in few batches; return for each None or what add() would raise."""
        entries = [self._commit.submit(plant, self._wait_limit) for plant in plants]
        return [entry.wait() for entry in entries]

    def check(self) -> None:
        """Raise Unavailable unless the database takes a write within CHECK_LIMIT seconds."""
        if error := self._commit.submit(None, CHECK_LIMIT).wait():
            raise error

    def check_start(self) -> str:
        """Create the database if there is none and return its identity. Raises StartRefused."""
        error = self._commit.submit(None, self._wait_limit).wait()
        if isinstance(error, StartRefused):
            raise error
        if error:
            log.warning("the database is not available at the start: %s", error)
        return self.engine.identity

    def close(self) -> None:
        """Close the connection; the storage opens another when it is used again."""
        self._commit.close(self._wait_limit / 2)

    def _write(self, batch: Batch) -> Outcomes:
        # Sorted, as two batches with the same plants in different order can deadlock.
        plants = sorted((plant for plant in batch if plant is not None), key=lambda new: new.id)
        try:
            new, stored = self.engine.insert(plants)
        except Exception as error:
            is_for_all = isinstance(error, Unavailable) and not isinstance(error, RowLocked)
            if is_for_all or len(batch) == 1:
                return [error] * len(batch)
            # One by one, so that a plant that is at fault keeps out no other.
            return [self._write([plant])[0] for plant in batch]
        self.inserted += new
        if new == len(plants):
            return [None] * len(batch)
        return [plant and compare(plant, stored.get(plant.id)) for plant in batch]


def compare(plant: Plant, stored: Plant | None) -> Exception | None:
    """Return what keeps `plant` out where `stored` has its id, or None if they are equal."""
    if stored is None:
        return Unavailable(f"plant {plant.id} was deleted while it was stored")
    taken = Conflict(f"id: {plant.id} is taken by another plant, which stays as it is")
    return None if stored == plant else taken


@dataclass(slots=True)
class Entry:
    """A plant in the queue, or None for a health check."""

    plant: Plant | None
    limit: float  # seconds to wait for the outcome
    start: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None  # what kept the plant out, once it is done

    def wait(self) -> Exception | None:
        """Return what keeps the plant out, or None once it is stored."""
        self.done.wait()
        return self.error and self.error.with_traceback(None)  # many entries may share it


class GroupCommit:
    """Writes the plants of requests that arrive at the same time as one batch.

    A commit that waits for the disk costs as much for many plants as for one. A request puts its
    plant into a queue and waits; one thread writes all that is queued and wakes those requests.
    """

    def __init__(self, write: Callable[[Batch], Outcomes], engine: Engine) -> None:
        self._write, self._engine = write, engine
        self._queue: deque[Entry] = deque()
        self._batch: list[Entry] = []  # what is being written
        self._wake_up = threading.Event()  # set when the thread has something to do
        self._lock = threading.Lock()  # the thread does not end while a plant is queued
        self._thread: threading.Thread | None = None  # started when first needed: after any fork
        self._is_closing = False  # as soon as the queue is empty

    def submit(self, plant: Plant | None, limit: float) -> Entry:
        """Put a plant into the queue; the entry is done within `limit` seconds."""
        entry = Entry(plant, limit)
        with self._lock:
            self._queue.append(entry)
            if self._thread is None or not self._thread.is_alive():
                self._is_closing = False
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
                threading.Thread(target=self._expire, args=[self._thread], daemon=True).start()
        self._wake_up.set()
        return entry

    def close(self, timeout: float) -> None:
        """End the thread, which closes the engine; wait for that at most `timeout` seconds."""
        with self._lock:
            self._is_closing, thread = True, self._thread
        if thread is not None:
            self._wake_up.set()
            thread.join(timeout)

    def _run(self) -> None:
        while self._thread is not None:
            self._wake_up.wait()
            self._wake_up.clear()
            while self._queue:
                time.sleep(0)  # so that requests that have just arrived are in the batch
                errors = self._call_blocking(self._commit)
                for entry, error in zip(self._batch, errors, strict=True):
                    entry.error, entry.plant = entry.error or error, None  # it may have expired
                    entry.done.set()
                self._batch = []
            if self._is_closing:
                self._call_blocking(self._engine.close)
                with self._lock:
                    if not self._queue:
                        self._thread = None

    def _expire(self, writer: threading.Thread) -> None:
        """Give up on what waits too long, all in one place: a timer for each takes longer."""
        while self._thread is writer:
            time.sleep(0.1)
            for entry in [*self._queue, *self._batch]:
                if time.monotonic() > entry.start + entry.limit and not entry.done.is_set():
                    obstacle = self._engine.obstacle or "the storage does not answer"
                    entry.error = Unavailable(f"gave up after {entry.limit:.3g} s: {obstacle}")
                    entry.plant = None  # it may be large
                    entry.done.set()

    def _commit(self) -> Outcomes:
        """Write what is in the queue once the lock is there."""
        try:
            with self._engine.locked():
                batch = self._take()
                return self._write(batch) if batch else []
        except Exception as error:  # the lock can't be had
            return [error] * len(self._batch or self._take())

    def _take(self) -> Batch:
        """Return what is in the queue, but for requests that have given up."""
        queued = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
        self._batch = [entry for entry in queued if not entry.done.is_set()]
        return [entry.plant for entry in self._batch]

    def _call_blocking(self, function: Callable[[], Any]) -> Any:
        """Call directly or, where gevent has made greenlets of threads, in its thread pool."""
        monkey = sys.modules.get("gevent.monkey")
        if self._engine.blocks and monkey and monkey.is_module_patched("threading"):
            return sys.modules["gevent"].get_hub().threadpool.apply(function)
        return function()


def insert_new(
    execute: Callable[..., Any], plants: Sequence[Plant], placeholder: str, suffix: str
) -> Inserted:
    """Insert the plants whose id is new, in autocommit; `suffix` is appended to the SELECT."""
    # Only placeholders are put into the text; the plants go beside it.
    row = f"({placeholder}, {placeholder}, {placeholder})"
    rows = ", ".join([row] * len(plants))
    insert = f"INSERT INTO plants (id, name, tag) VALUES {rows} ON CONFLICT (id) DO NOTHING"  # noqa: S608
    new = execute(insert, [value for plant in plants for value in plant]).rowcount
    if new == len(plants):
        return new, {}
    ids = ", ".join([placeholder] * len(plants))
    select = f"SELECT id, name, tag FROM plants WHERE id IN ({ids}){suffix}"  # noqa: S608
    return new, {row[0]: Plant(*row) for row in execute(select, [plant.id for plant in plants])}


def is_ephemeral(directory: str) -> bool:
    """Tell whether the platform throws this directory away, like the code's and /tmp."""
    places = filter(os.path.exists, (directory, os.path.dirname(__file__), "/tmp"))  # noqa: S108
    device, *ephemeral = [os.stat(place).st_dev for place in places]
    return not os.environ.keys().isdisjoint(PLATFORMS) and device in ephemeral


class SQLiteEngine(Engine):
    """A SQLite file in WAL mode, synced at every commit (sqlite.org/wal.html).

    Everything that writes or checkpoints, opening and closing too, holds a lock: processes that
    meet at SQLite's own lock sleep for milliseconds, and SQLite before 3.51.3 can damage the file
    if one checkpoints while another writes (sqlite.org/wal.html, "The WAL-Reset Bug").
    """

    blocks = True
    APPLICATION_ID = 0x504C4E54  # "PLNT"
    VERSION = 1
    TRANSIENT = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)
    SCHEMA = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT"

    def __init__(self, path: str, identity: str, busy_timeout: float) -> None:
        """Refuse a file at `path` that is not that of `identity`; wait some seconds for locks."""
        if not path or path == ":memory:" or "\0" in path:
            raise StartRefused("DATABASE_URL must name a file: what is in memory is not stored")
        # SQLite keeps its other files beside what a link leads to.
        self._path = os.path.realpath(path)
        self.identity, self._busy_timeout = identity, busy_timeout
        self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}"
        if is_ephemeral(os.path.dirname(self._path)):
            self.description += ", which is thrown away at each deploy: name a file on a volume"
        self._connection: sqlite3.Connection | None = None
        self._directory = -1  # its descriptor, for the lock
        self._files: list[tuple[int, int]] = []  # device and inode of the file, -wal and -shm

    def insert(self, plants: Sequence[Plant]) -> Inserted:
        try:
            connection = self._connection or self._open()
            self._check_files()
            result: Inserted = 0, {}
            if plants:
                result = insert_new(connection.execute, plants, "?", "")
            else:  # a real write: BEGIN IMMEDIATE works on read-only files
                connection.execute(f"PRAGMA user_version = {self.VERSION}")
            self._check_files()
            return result
        except (sqlite3.IntegrityError, sqlite3.DataError):
            raise
        except (sqlite3.Error, OSError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in self.TRANSIENT:
                raise Unavailable(f"{self._path}: {error}") from None
            raise StartRefused(f"{self._path}: {error}{REMEDY}") from None

    def rows(self) -> Iterator[Plant]:
        try:
            with contextlib.closing(self._connect("ro")) as connection:
                self._check_application(connection)
                # One statement reads one snapshot, whatever is written meanwhile.
                yield from map(Plant._make, connection.execute(ALL_PLANTS))
        except sqlite3.Error as error:
            raise Unavailable(f"{self._path}: {error}") from None

    def close(self) -> None:
        if self._connection is not None:
            with self.locked():
                self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        name = os.path.dirname(self._path)
        try:  # not the file: closing any descriptor of it drops SQLite's locks
            if self._directory < 0:
                self._directory = os.open(name, os.O_RDONLY)
        except OSError as error:
            raise StartRefused(f"{self._path}: its directory: {error.strerror}{REMEDY}") from None
        self.obstacle = f"other processes hold the lock on {name}; fuser -v shows which"
        fcntl.flock(self._directory, fcntl.LOCK_EX)  # for as long as it takes
        self.obstacle = ""
        try:
            yield
        finally:
            fcntl.flock(self._directory, fcntl.LOCK_UN)

    def _open(self) -> sqlite3.Connection:
        """Connect, and create the file if that is allowed now and there is none."""
        found = self._file_ids("")
        # Before SQLite opens the file, as it would replay a -wal of another one into it.
        if found and self.identity not in ("", str(found)):
            raise StartRefused(f"{self._path} was replaced under the service: restart it")
        is_new = not found and not self.identity
        connection = self._connect("rwc" if is_new else "rw")
        try:
            self._prepare(connection, is_new)
            self._files = self._file_ids("", "-wal", "-shm")
            if found and found != self._files[:1]:
                raise Unavailable(f"{self._path} was replaced while it was opened")
        except BaseException:
            connection.close()
            if is_new and not os.path.getsize(self._path):  # later it would be refused as empty
                os.unlink(self._path)
            raise
        self.identity, self._connection = str(self._files[:1]), connection
        return connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        if mode != "rwc" and not os.path.exists(self._path):
            raise StartRefused(f"{self._path}: there is no such file")
        url = f"file:{quote(os.fsencode(self._path))}?mode={mode}"
        return sqlite3.connect(
            url, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False, uri=True
        )

    def _check_application(self, connection: sqlite3.Connection) -> None:
        if connection.execute("PRAGMA application_id").fetchone()[0] != self.APPLICATION_ID:
            raise StartRefused(f"{self._path} is empty or another program's{REMEDY}")
        if connection.execute("PRAGMA user_version").fetchone()[0] > self.VERSION:
            raise StartRefused(f"{self._path} is of a newer version of this service; run that")

    def _prepare(self, connection: sqlite3.Connection, is_new: bool) -> None:
        """Set the connection up, make a new file ours, and make all that is in it durable."""
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone leaves it in the drive
        if is_new:
            connection.executescript(
                f"BEGIN IMMEDIATE; {self.SCHEMA}; PRAGMA application_id = {self.APPLICATION_ID};"
                f"PRAGMA user_version = {self.VERSION}; COMMIT"
            )
        self._check_application(connection)
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise StartRefused(f"{self._path}: no WAL mode on this file system{REMEDY}")
        # A killed process may leave frames in the WAL that can be read but are not synced: a retry
        # would get a 200 for them. The checkpoint syncs them. The write after it restarts the WAL,
        # in case the sync of that process had failed.
        busy, frames, _ = connection.execute("PRAGMA wal_checkpoint").fetchone()
        if busy:
            raise Unavailable(f"{self._path}: another program is at work on it")
        if frames:
            connection.execute(f"PRAGMA user_version = {self.VERSION}")

    def _file_ids(self, *ends: str) -> list[tuple[int, int]]:
        """Return device and inode of the files whose names end so; none if one is missing."""
        try:
            found = [os.stat(self._path + end) for end in ends]
        except FileNotFoundError:
            return []
        return [(status.st_dev, status.st_ino) for status in found]

    def _check_files(self) -> None:
        """Raise Unavailable, for good, if the open files are no longer those at the path."""
        if not self._files or self._files != self._file_ids("", "-wal", "-shm"):
            self._files = []
            raise Unavailable(f"{self._path} was deleted or replaced under the service: restart it")
