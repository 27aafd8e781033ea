"""The plants table: what it was given and has answered for is there after a crash.

Contains no HTTP. From a shell, `python storage.py dump` and `load` move plants as JSON Lines.
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import logging
import os
import re
import socket
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from operator import attrgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import quote, unquote

from schemas import InvalidPlant, parse_new_plant

if TYPE_CHECKING:
    import psycopg

DEFAULT_URL = "sqlite:///plants.db"
WAIT_LIMIT = 10.0  # seconds until a plant that is not stored yet is given up
CANCEL_LIMIT = 1.0  # seconds for a server to take notice that an answer is not waited for
RECONNECT_PAUSE = 0.2  # seconds
CHECK_LIMIT = 1.5  # seconds that a look at the storage may take
LOAD_BATCH = 250  # plants; larger ones are no faster, and keep the service waiting for its turn
ALL_PLANTS = "SELECT id, name, tag FROM plants ORDER BY id"
LINE_LIMIT = 2**20 + 2**10  # bytes; a dump's line is hardly longer than the request's body was
# A variable that each sets: Heroku and Dokku, Render, Railway, Fly.io, Google Cloud Run.
PLATFORMS = ("DYNO", "RENDER", "RAILWAY_ENVIRONMENT_NAME", "FLY_APP_NAME", "K_SERVICE")

log = logging.getLogger("plants")
T = TypeVar("T")


class Plant(NamedTuple):
    """A row of the table: id is a signed integer of 64 bits, tag is None where there is none."""

    id: int
    name: str
    tag: str | None = None

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> "Plant":
        """The plant in a JSON object that is valid against schemas/new-plant.json."""
        return cls(members["id"], members["name"], members.get("tag"))

    def to_json(self) -> dict[str, Any]:
        """The plant as a JSON object; what has no tag has no such member."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Conflict(Exception):
    """Another plant has this id. It stays as it is."""


class Unavailable(Exception):
    """The storage can't answer for the plant now; storing it again later is safe."""


class StartRefused(Unavailable):
    """The service can't work until an operator mends what the message says.

    At start it ends the start; later it is one more reason to be unavailable.
    """


def database_url() -> str:
    """The DATABASE_URL that the environment sets, or the default."""
    return os.environ.get("DATABASE_URL", DEFAULT_URL)


#: How many plants were new and, unless all were, what is stored under their ids.
Inserted: TypeAlias = tuple[int, Mapping[int, Plant]]


class Engine(Protocol):
    """A database: one connection, opened when first used, for one thread at a time.

    The methods raise Unavailable for what may pass, StartRefused where an operator has to act.
    """

    def turn(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        """Keep this host's other processes from writing, after at most `timeout` seconds."""

    def create(self) -> None:
        """Make the database ready where it is new. Needs the turn."""

    def identity(self) -> str:
        """What tells this database from another one at the same place, if it was seen at all."""

    def describe(self) -> str:
        """What this is and where, as an operator would say it: without a password."""

    def insert(self, plants: Sequence[Plant]) -> Inserted:
        """Store those whose id is new, durably; without plants, prove that it could.

        Needs the turn. Raises anything else where one of the plants is at fault: then none was
        stored.
        """

    def rows(self) -> Iterator[Plant]:
        """All plants as of now, in the order of id."""

    def close(self) -> None:
        """Close the connection, in a turn of its own."""


class Storage:
    """The plants of a DATABASE_URL, for all threads of a process."""

    def __init__(self, engine: Engine, wait_limit: float = WAIT_LIMIT) -> None:
        """`wait_limit` is in seconds; the engine may take half of it for a write."""
        self._engine = engine
        self._wait_limit = wait_limit
        # Half of the limit is for the write: the file may be locked by another program.
        self._group = GroupCommit(engine.turn, lambda batch: self._store(batch)[1], wait_limit / 2)

    @classmethod
    def from_url(cls, url: str, identity: str = "", wait_limit: float = WAIT_LIMIT) -> "Storage":
        """The storage that `url` names, not looked at yet. Raises StartRefused for other URLs.

        With an `identity`, which check_start() has returned, it is that database or none.
        """
        engine: Engine
        if url.startswith("sqlite:///") and "?" not in url:
            engine = SQLiteEngine(unquote(url.removeprefix("sqlite:///")), identity, wait_limit / 2)
        elif url.startswith(("postgresql://", "postgres://")):
            engine = PostgreSQLEngine(url, identity, wait_limit / 2)
        else:
            raise StartRefused(
                "DATABASE_URL must name a file like sqlite:///plants.db (sqlite:////srv/plants.db "
                "with an absolute path) or a server like postgresql://user:password@host/database"
            )
        return cls(engine, wait_limit)

    def add(self, plant: Plant) -> None:
        """Store `plant`, or see that it is stored already; either is durable when this returns.

        Raises Conflict if its id is another plant's, and Unavailable, after the wait limit at
        most (while the disk itself answers), if that can't be told.
        """
        self._group.add(plant, self._wait_limit)

    def submit(self, plant: Plant) -> "Entry":
        """Put `plant` into the batch that is written next, once its start_batch() is called."""
        return self._group.submit(plant)

    def add_all(self, plants: Sequence[Plant]) -> tuple[int, list[Exception | None]]:
        """Store a batch in a process that has no other thread that stores.

        Returns how many were new and, for each, the Conflict or what else kept it out, or None.
        """
        with self._engine.turn(self._wait_limit):
            return self._store(plants)

    def check(self) -> None:
        """Raise Unavailable unless the storage takes a write within CHECK_LIMIT seconds."""
        self._group.add(None, CHECK_LIMIT)

    def create(self) -> None:
        """Create the database if there is none, and see that it takes a write.

        Raises Unavailable. Nothing else creates one: a database that goes away later must not be
        replaced in silence.
        """
        with self._engine.turn(self._wait_limit):
            self._engine.create()
            self._engine.insert([])

    def check_start(self) -> str:
        """Create the database if that is possible now, and return its identity.

        Raises StartRefused if it will not work until an operator mends it.
        """
        try:
            self.create()
        except StartRefused:
            raise
        except Unavailable as error:  # which may pass
            log.warning("starting with 503 for all plants until this has passed: %s", error)
        return self._engine.identity()

    def describe(self) -> str:
        """What the database is and where, for the log."""
        return self._engine.describe()

    def rows(self) -> Iterator[Plant]:
        """All plants as of now, in the order of id, one at a time from the database."""
        return self._engine.rows()

    def close(self) -> None:
        """Close the connection; the storage opens another when it is used again."""
        self._engine.close()

    def _store(self, batch: Sequence[Plant | None]) -> tuple[int, list[Exception | None]]:
        """Write a batch, in which None stands for a look at the storage, inside the turn."""
        plants = sorted((plant for plant in batch if plant is not None), key=attrgetter("id"))
        try:
            new, stored = self._engine.insert(plants)
        except Unavailable:
            raise
        except Exception as error:
            if len(batch) == 1:
                return 0, [error]
            # One of them is at fault: alone, each of the others can be stored.
            single = [self._store([item]) for item in batch]
            return sum(new for new, _ in single), [outcome for _, (outcome,) in single]
        if new < len(plants) and not stored.keys() >= {plant.id for plant in plants}:
            raise Unavailable("a plant was deleted at the same moment")
        return new, [
            Conflict(f"id: {plant.id} is taken by another plant, which stays as it is")
            if plant is not None and stored.get(plant.id, plant) != plant
            else None
            for plant in batch
        ]


@dataclass(eq=False)
class Batch:
    """What is written together."""

    entries: "list[Entry]" = field(default_factory=list)
    written: Future[None] | None = None  # once somebody wants it written
    obstacle: str = ""  # why that has to wait


@dataclass(eq=False)
class Entry:
    """A plant, or None for a look at the storage, on its way into the storage with a batch."""

    group: "GroupCommit"
    batch: Batch
    item: Plant | None
    outcome: Exception | None = None  # what kept it out when the batch was written
    is_stored: bool = False  # durably

    def start_batch(self) -> Future[None]:
        """See to it that the batch is written; return what tells when it is."""
        return self.group.start(self.batch)

    def withdraw(self) -> None:
        """Leave it out of the batch, unless that is being written already."""
        self.group.withdraw(self)


class GroupCommit:
    """Writes what is submitted at the same time as one batch, in a thread of its own.

    A commit costs as much for many as for one. The thread waits for the turn first, and only then
    closes the batch: what comes while it writes is the next one.
    """

    def __init__(
        self,
        turn: Callable[[float], contextlib.AbstractContextManager[None]],
        write: Callable[[list[Plant | None]], list[Exception | None]],
        turn_limit: float,
    ) -> None:
        """`turn_limit` is in seconds; the turn is waited for anew while anybody waits for it."""
        self._turn = turn
        self._write = write
        self._turn_limit = turn_limit
        self._writer = BackgroundThread()
        self._lock = threading.Lock()  # guards the batches
        self._open = Batch()

    def add(self, item: Plant | None, limit: float) -> None:
        """Return when a batch with `item` was written; raise what its outcome was instead."""
        entry = self.submit(item)
        try:
            entry.start_batch().result(limit)
        except FutureTimeoutError:
            entry.withdraw()
            obstacle = entry.batch.obstacle or f"no answer from the storage for {limit:g} s"
            raise Unavailable(obstacle) from None
        if entry.outcome is not None:
            raise entry.outcome

    def submit(self, item: Plant | None) -> Entry:
        """Put `item` into the open batch, which is written once somebody starts it."""
        with self._lock:
            entry = Entry(self, self._open, item)
            self._open.entries.append(entry)
        return entry

    def start(self, batch: Batch) -> Future[None]:
        """See to it that `batch` is written, after those before it."""
        with self._lock:
            if batch.written is None:
                batch.written = self._writer.submit(self._commit, batch)
            return batch.written

    def withdraw(self, entry: Entry) -> None:
        """Leave it out of its batch, unless that is closed."""
        with self._lock:
            if entry in entry.batch.entries:
                entry.batch.entries.remove(entry)

    def _commit(self, batch: Batch) -> None:
        with contextlib.ExitStack() as stack:
            try:
                self._wait_for_turn(stack, batch)
            finally:
                entries = self._close(batch)
            outcomes = self._write([entry.item for entry in entries])
        for entry, outcome in zip(entries, outcomes, strict=True):
            entry.outcome, entry.is_stored = outcome, outcome is None

    def _wait_for_turn(self, stack: contextlib.ExitStack, batch: Batch) -> None:
        """Take the turn for as long as `stack`; give up only when nobody waits any more."""
        while True:
            try:
                return stack.enter_context(self._turn(self._turn_limit))
            except Unavailable as error:
                batch.obstacle = str(error)
                if isinstance(error, StartRefused) or not batch.entries:
                    raise

    def _close(self, batch: Batch) -> list[Entry]:
        """Let what comes from now on be the next batch; return what is in this one."""
        with self._lock:
            if self._open is batch:
                self._open = Batch()
            entries, batch.entries = batch.entries, []
        return entries


class BackgroundThread:
    """Runs calls one after another in a thread that the process does not wait for at its end."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], Any]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Return at once what `call` will have come to."""
        future: Future[T] = Future()
        self._calls.put((future, call, arguments))
        return future

    def _run(self) -> None:
        while True:
            future, call, arguments = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*arguments))
                except BaseException as error:
                    future.set_exception(error)
            del future, call, arguments  # they may be large


class Turn:
    """A lock between all threads of the processes of a host that dies with its holder.

    flock(2) can't wait for a limited time, so where the lock is not free another thread waits for
    it. That is as fast as to wait oneself, while to try again and again loses a tenth to a half of
    the throughput.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._thread = BackgroundThread()
        self._own = threading.Lock()  # flock keeps processes apart, not threads
        self._direct = self._waited = -1

    def take(self, timeout: float) -> int:
        """Wait for the turn `timeout` seconds. Returns what to release.

        Raises Unavailable if it does not come, and OSError if the directory can't be locked.
        """
        deadline = time.monotonic() + timeout
        if not self._own.acquire(timeout=max(timeout, 0)):
            raise self._busy()
        try:
            return self._lock(deadline - time.monotonic())
        except BaseException:
            self._own.release()
            raise

    def release(self, taken: int) -> None:
        """End the turn that take() returned."""
        try:
            fcntl.flock(taken, fcntl.LOCK_UN)
        finally:
            self._own.release()

    def _lock(self, timeout: float) -> int:
        # Two descriptions of one lock, so that a wait that was given up can't free the other.
        if self._direct < 0:
            self._direct = os.open(self._directory, os.O_RDONLY)
        if self._waited < 0:
            self._waited = os.open(self._directory, os.O_RDONLY)
        try:
            fcntl.flock(self._direct, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._direct
        except BlockingIOError:
            wait = self._thread.submit(fcntl.flock, self._waited, fcntl.LOCK_EX)
        try:
            wait.result(max(timeout, 0))
        except FutureTimeoutError:
            if not wait.cancel():
                wait.add_done_callback(lambda _: fcntl.flock(self._waited, fcntl.LOCK_UN))
            raise self._busy() from None
        return self._waited

    def _busy(self) -> Unavailable:
        return Unavailable(f"other writers keep {self._directory} busy; fuser -v shows which")


def insert_new(
    execute: Callable[..., Any], plants: Sequence[Plant], placeholder: str, suffix: str
) -> Inserted:
    """Insert those whose id is new.

    `execute` runs a statement on a connection that commits each, `placeholder` stands for a value
    in one, and `suffix` ends the one that reads.
    """

    def marks(count: int) -> str:
        return "(" + ", ".join([placeholder] * count) + ")"

    # What is put into the text is placeholders; the plants go beside it.
    rows = ", ".join([marks(3)] * len(plants))
    insert = f"INSERT INTO plants (id, name, tag) VALUES {rows} ON CONFLICT (id) DO NOTHING"  # noqa: S608
    new = execute(insert, list(itertools.chain.from_iterable(plants))).rowcount
    if new == len(plants):
        return new, {}
    ids = marks(len(plants))
    select = f"SELECT id, name, tag FROM plants WHERE id IN {ids}{suffix}"  # noqa: S608
    found = execute(select, [plant.id for plant in plants])
    return new, {row[0]: Plant(*row) for row in found}


def is_thrown_away(directory: str) -> bool:
    """Whether the platform that this runs on keeps nothing that is stored there.

    It keeps what is on a volume, which is another device than that of the code or of /tmp.
    """
    places = filter(os.path.exists, (os.path.dirname(__file__), "/tmp"))  # noqa: S108
    lost = {os.stat(place).st_dev for place in places}
    return not os.environ.keys().isdisjoint(PLATFORMS) and os.stat(directory).st_dev in lost


class SQLiteEngine(Engine):
    """A SQLite file in WAL mode, synced at every commit (sqlite.org/wal.html).

    Everything that writes or checkpoints, opening and closing too, needs the turn: processes that
    meet at SQLite's own lock sleep for milliseconds, and SQLite before 3.51.3 can damage the file
    if one checkpoints while another writes (sqlite.org/wal.html, "The WAL-Reset Bug").
    """

    APPLICATION_ID = 0x504C4E54  # "PLNT"
    VERSION = 1
    WAL_LIMIT = 2**24  # bytes that are left of a WAL which some reader has kept from beginning anew
    SCHEMA = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT"

    def __init__(self, path: str, identity: str, write_limit: float) -> None:
        """`path` is relative to the working directory or absolute.

        With an `identity`, no other file of that path is opened. `write_limit` is in seconds, for
        a file that another program has locked.
        """
        if not path or path == ":memory:" or "\0" in path:
            raise StartRefused("DATABASE_URL must name a file: what is in memory is not stored")
        if sqlite3.sqlite_version_info < (3, 37):
            raise StartRefused(
                f"SQLite {sqlite3.sqlite_version} is too old: run a Python that has 3.37 or newer"
            )
        # SQLite keeps its other files beside what a link leads to, and so do we.
        self._path = os.path.realpath(path)
        self._expected = identity
        self._write_limit = write_limit
        self._turn = Turn(os.path.dirname(self._path))
        self._connection: sqlite3.Connection | None = None
        self._files: tuple[str, ...] = ()

    @contextlib.contextmanager
    def turn(self, timeout: float) -> Iterator[None]:
        """Take turns on the directory: a lock on the file itself would undo SQLite's own."""
        try:
            taken = self._turn.take(timeout)
        except OSError as error:
            raise StartRefused(
                f"{self._path}: its directory: {error.strerror}; mend that or name another file in "
                "DATABASE_URL"
            ) from None
        try:
            yield
        finally:
            self._turn.release(taken)

    def create(self) -> None:
        if self._connection is None:
            self._open(create=True)
            if is_thrown_away(os.path.dirname(self._path)):
                log.warning(
                    "%s is on a disk that is thrown away at each deploy, and the plants with it: "
                    "let DATABASE_URL name a file on a mounted volume, or a PostgreSQL server",
                    self._path,
                )

    def identity(self) -> str:
        try:
            return self._inode("")
        except OSError:
            return ""

    def describe(self) -> str:
        return f"SQLite {sqlite3.sqlite_version} in {self._path}"

    def insert(self, plants: Sequence[Plant]) -> Inserted:
        connection = self._connection or self._open()
        self._check_files()
        result: Inserted = 0, {}
        try:
            if plants:
                result = insert_new(connection.execute, plants, "?", "")
            else:  # a read-only file takes BEGIN IMMEDIATE, but not this
                connection.execute(f"PRAGMA user_version = {self.VERSION}")
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.IntegrityError | sqlite3.DataError):
                raise
            raise Unavailable(f"{self._path}: {error}") from error
        self._check_files()
        return result

    def rows(self) -> Iterator[Plant]:
        with self.turn(WAIT_LIMIT):
            connection = self._connection or self._open()
        try:
            # One statement reads one snapshot, whatever is written meanwhile.
            for row in connection.execute(ALL_PLANTS):
                yield Plant._make(row)
        except sqlite3.Error as error:
            raise Unavailable(f"{self._path}: {error}") from error

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Unavailable), self.turn(self._write_limit):
                self._connection.close()
                self._connection = None

    def _open(self, create: bool = False) -> sqlite3.Connection:
        """Connect, and only if told so create what is missing."""
        if os.path.exists(self._path) != os.path.isfile(self._path):
            raise StartRefused(f"{self._path} is not a file; name another in DATABASE_URL")
        if not create and not os.path.exists(self._path):
            raise StartRefused(f"{self._path}: no such file; put it back, or restart the service")
        if os.path.exists(self._path) and not os.path.getsize(self._path):
            raise StartRefused(f"{self._path} is empty; put it back, or remove it for a new one")
        # Before SQLite sees it: it would play the -wal of the old file into a new one.
        expected = self._expected or self.identity()
        self._expect(expected)
        try:
            connection = sqlite3.connect(
                f"file:{quote(self._path)}?mode={'rwc' if create else 'rw'}",
                uri=True,
                timeout=self._write_limit,
                isolation_level=None,
                check_same_thread=False,
            )
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(connection.close)
                self._prepare(connection, create)
                files = self._inodes()
                self._expect(expected)
                on_failure.pop_all()
        except sqlite3.Error as error:
            # Python has SQLite's error codes only since 3.11.
            if "locked" in str(error) or "full" in str(error):
                raise Unavailable(f"{self._path}: {error}") from None
            raise StartRefused(
                f"{self._path}: {error}; mend it, move it or name another in DATABASE_URL"
            ) from None
        self._connection, self._files = connection, files
        return connection

    def _expect(self, identity: str) -> None:
        """Raise StartRefused if the file is another one, unless any is fine."""
        if identity and identity != self.identity():
            raise StartRefused(f"{self._path} was replaced under the service: restart it")

    def _prepare(self, connection: sqlite3.Connection, create: bool) -> None:
        """See that the file is ours, or make it so if it is new, and make all in it durable."""

        def pragma(name: str) -> Any:
            return connection.execute(f"PRAGMA {name}").fetchone()[0]

        owner, version = pragma("application_id"), pragma("user_version")
        is_new = (owner, version, pragma("schema_version")) == (0, 0, 0)
        if owner != self.APPLICATION_ID and not is_new:
            raise StartRefused(f"{self._path} is another program's; name another in DATABASE_URL")
        if version > self.VERSION:
            raise StartRefused(f"{self._path} is of a newer version of this service; run that")
        if is_new and not create:
            raise StartRefused(f"{self._path} is empty; put it back, or restart the service")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone leaves it in the drive
        connection.execute(f"PRAGMA journal_size_limit = {self.WAL_LIMIT}")
        if is_new:
            connection.executescript(
                f"BEGIN IMMEDIATE; {self.SCHEMA}; PRAGMA application_id = {self.APPLICATION_ID};"
                f"PRAGMA user_version = {self.VERSION}; COMMIT"
            )
        if pragma("journal_mode = WAL") != "wal":
            raise StartRefused(
                f"{self._path}: its file system can't do SQLite's WAL mode; name a file on a local "
                "disk in DATABASE_URL"
            )
        # What a killed process wrote but had not synced yet is read back as if it were stored, and
        # would be answered for: a checkpoint syncs it. If that process could not sync it, the disk
        # may lack it nevertheless; a write after the checkpoint begins a WAL that does without it.
        busy, frames, _ = connection.execute("PRAGMA wal_checkpoint").fetchone()
        if busy:
            raise Unavailable(f"{self._path}: another program is at work on it")
        if frames:
            connection.execute(f"PRAGMA user_version = {self.VERSION}")

    def _inode(self, suffix: str) -> str:
        """What the name of the file, or of one beside it, leads to."""
        status = os.stat(self._path + suffix)
        return f"{status.st_dev}:{status.st_ino}"

    def _inodes(self) -> tuple[str, ...]:
        """The inodes of the file, its WAL and its shared memory; none if one is missing."""
        try:
            return tuple(self._inode(suffix) for suffix in ("", "-wal", "-shm"))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise Unavailable(f"{self._path}: {error.strerror}") from None

    def _check_files(self) -> None:
        """Raise Unavailable, from then on, if what is written can't be found under the path."""
        if self._files and self._files != self._inodes():
            log.error("%s was deleted or replaced under the service: restart it", self._path)
            self._files = ()
        if not self._files:
            raise Unavailable(f"{self._path} was deleted or replaced under the service: restart it")


class LostConnection(Unavailable):
    """What was under way may have been done or not; another connection can tell."""


class Link:
    """The connection to a server that may go away, or hang; a thread of its own has it.

    Where it is lost the thread makes another one, and does again what was under way. run() waits
    for that so long, and then cuts the connection, in case the server hangs. From then on the
    thread only connects, and until it has, each run() fails at once.
    """

    def __init__(
        self,
        connect: Callable[[], "psycopg.Connection"],
        explain: Callable[["psycopg.Error"], Exception],
        limit: float,
    ) -> None:
        """`explain` says what an error is to those who wait; `limit` is in seconds."""
        self._connect, self._explain = connect, explain
        self._limit = limit - CANCEL_LIMIT
        self._thread = BackgroundThread()
        self._work: Future[Any] | None = None  # what the thread is at
        self._connection: psycopg.Connection | None = None
        self._is_closed = False
        self._loss = ""  # why there is no connection

    def run(self, call: Callable[["psycopg.Connection"], T]) -> T:
        """Let the thread make a call that may be made again. Raises what `explain` returns."""
        if self._work is not None and not self._work.done():
            raise Unavailable(self._loss or "PostgreSQL: connecting")
        self._is_closed = False
        deadline = time.monotonic() + self._limit
        work: Future[T] = self._thread.submit(self._insist, call, deadline)
        self._work = work
        try:
            return work.result(self._limit)
        except FutureTimeoutError:
            loss = self._loss or self._note_loss(f"PostgreSQL: no answer for {self._limit:g} s")
            self._abort()
            raise Unavailable(loss) from None

    def close(self) -> None:
        """End the connection; run() makes another."""
        self._is_closed = True
        with contextlib.suppress(FutureTimeoutError):
            self._thread.submit(self._disconnect).result(CANCEL_LIMIT)

    def _insist(self, call: Callable[["psycopg.Connection"], T], deadline: float) -> T:
        """Call, on a new connection where one is lost; past the deadline, only connect."""
        while not self._is_closed:
            try:
                if self._connection is None:
                    connection = self._connect()
                    self._socket = socket.socket(fileno=os.dup(connection.fileno()))
                    self._connection = connection
                    if self._loss:
                        log.warning("PostgreSQL: connected again")
                        self._loss = ""
                if time.monotonic() > deadline:
                    break
                return call(self._connection)
            except OSError as error:
                raise Unavailable(f"PostgreSQL: {error.strerror}") from None
            except psycopg.Error as error:
                reason = self._explain(error)
                if not isinstance(reason, LostConnection) and time.monotonic() < deadline:
                    raise reason from None
                self._disconnect()
                self._note_loss(str(reason))
                time.sleep(RECONNECT_PAUSE)
        raise Unavailable(self._loss)

    def _abort(self) -> None:
        """End the wait for a server that does not answer: no time limit of its own does."""
        if (connection := self._connection) is not None:
            sock = self._socket
            with contextlib.suppress(Exception):  # else it would wait on, for a lock or a standby
                connection.cancel_safe(timeout=CANCEL_LIMIT)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _note_loss(self, reason: str) -> str:
        if not self._loss:
            log.warning("%s; connecting again", reason)
        self._loss = reason
        return reason

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._socket.close()
            self._connection = None


def libpq_parameters(url: str) -> dict[str, Any]:
    """What a URL says (postgresql.org/docs/current/libpq-connect.html), and what it leaves to us.

    Raises StartRefused if it can't be read, without a part of it: it may be one of the password.
    """
    global psycopg
    import psycopg  # SQLite does without

    try:
        given: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        given = {"host": "@"}
    if any("@" in str(given.get(name)) for name in ("host", "dbname")):
        raise StartRefused(
            "DATABASE_URL must be like postgresql://user:password@host/database, with special "
            "characters percent-encoded"
        )
    return {
        "connect_timeout": 2,  # seconds, for each address
        "fallback_application_name": "plants",
        "keepalives_idle": 60,  # seconds; routers forget connections that are long silent
        "target_session_attrs": "read-write",  # of several servers, the one that takes writes
        **given,
        "client_encoding": "utf8",
    }


class PostgreSQLEngine(Engine):
    """A table on a PostgreSQL server, or on those of a cluster of which one takes writes."""

    SCHEMA = "CREATE TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, tag text)"
    COLUMNS = (("id", "bigint", True), ("name", "text", True), ("tag", "text", False))
    # No connection, a changed table, a standby, a lost statement, a deadlock, a restart.
    MAY_PASS = ("08", "0A", "25006", "26", "40", "57P")
    REFUSED = (  # libpq has no codes for why it could not connect; other languages are not known
        r"authentication failed|does not exist|no password supplied|no pg_hba\.conf entry|"
        r"not permitted to log in|permission denied|SSL was required|: invalid "
    )

    def __init__(self, url: str, identity: str, write_limit: float) -> None:
        """`url` is libpq's. Without an `identity` the table is created if there is none.

        `write_limit` is in seconds, for all that it takes to store a batch.
        """
        self._parameters = libpq_parameters(url)
        self._may_create = not identity
        self._link = Link(self._connect, self._explain, write_limit)
        self._prepared: psycopg.Connection | None = None
        self._is_local = False
        self._description = "PostgreSQL, not reached yet"

    def turn(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the server keeps writers apart

    def create(self) -> None:
        """Nothing: the first connection does, as the server may be away at the start."""

    def identity(self) -> str:
        return "" if self._may_create else "seen"

    def describe(self) -> str:
        return self._description

    def insert(self, plants: Sequence[Plant]) -> Inserted:
        return self._link.run(lambda connection: self._insert(connection, plants))

    def rows(self) -> Iterator[Plant]:
        try:
            with self._connect() as connection:
                yield from map(Plant._make, connection.cursor().stream(ALL_PLANTS, size=1000))
        except psycopg.Error as error:
            raise self._explain(error) from None

    def close(self) -> None:
        self._link.close()

    def _connect(self) -> "psycopg.Connection":
        try:
            connection = psycopg.connect(**self._parameters, autocommit=True)
        except UnicodeError:
            raise StartRefused("DATABASE_URL: no host can have this name") from None
        connection.add_notice_handler(self._notice)
        return connection

    def _notice(self, notice: "psycopg.errors.Diagnostic") -> None:
        """Remember that a commit gave up waiting for the standbys, which is no error to libpq."""
        self._is_local |= notice.source_function == "SyncRepWaitForLSN"

    def _insert(self, connection: "psycopg.Connection", plants: Sequence[Plant]) -> Inserted:
        if self._prepared is not connection:
            self._prepare(connection)
        self._is_local = False
        # FOR UPDATE makes of a read a commit, and a commit waits until all before it is on the
        # standbys too: what is only here would go with this server.
        if plants:
            result = insert_new(connection.execute, plants, "%s", " ORDER BY id FOR UPDATE")
        else:
            connection.execute(
                "WITH one AS (SELECT id, name, tag FROM plants LIMIT 1 FOR UPDATE) "
                "INSERT INTO plants SELECT * FROM one ON CONFLICT (id) DO NOTHING"
            )
            result = 0, {}
        if self._is_local:
            raise psycopg.OperationalError("committed here, but maybe not on the standbys")
        return result

    def _prepare(self, connection: "psycopg.Connection") -> None:
        """Set the connection up; see that the table is ours, or make it if there is none."""
        connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')"
        )
        connection.execute("SET client_min_messages = warning")  # for _notice
        if (encoding := connection.info.parameter_status("server_encoding")) != "UTF8":
            raise StartRefused(
                f"PostgreSQL: the database is in {encoding}, not UTF8; name another in DATABASE_URL"
            )
        columns = (
            "SELECT attname, format_type(atttypid, atttypmod), attnotnull "
            "FROM pg_attribute JOIN pg_class ON attrelid = pg_class.oid "
            "WHERE attrelid = to_regclass('plants') AND attnum > 0 AND NOT attisdropped "
            "AND relpersistence = 'p' ORDER BY attnum"  # an unlogged table is empty after a crash
        )
        found = connection.execute(columns).fetchall()
        if not found and self._may_create:
            # Of several that create it at once, those that come too late fail.
            too_late = map(psycopg.errors.lookup, ("23505", "42710", "42P07"))
            with contextlib.suppress(*too_late):
                connection.execute(self.SCHEMA)
            found = connection.execute(columns).fetchall()
        if tuple(found) != self.COLUMNS:
            raise StartRefused(
                "PostgreSQL: there is no table plants, or one of another shape; the right one is "
                f"made by: {self.SCHEMA}"
            )
        info = connection.info
        version = info.parameter_status("server_version")
        self._description = f"PostgreSQL {version}, database {info.dbname} at {info.host}"
        self._prepared, self._may_create = connection, False

    def _explain(self, error: "psycopg.Error") -> Exception:
        """What an error is to those who wait, in one line and without the plant."""
        message = error.diag.message_primary or str(error)
        text = " ".join(f"PostgreSQL: {message}".split())
        # With several hosts, what each of them said comes after the first lines.
        failures = message.partition("All failures were:")[2].split("\n- ")[1:] or [message]
        if error.sqlstate is None and all(re.search(self.REFUSED, each) for each in failures):
            return StartRefused(text)
        unknown = "" if isinstance(error, psycopg.ProgrammingError) else "08"
        if (error.sqlstate or unknown).startswith(self.MAY_PASS):
            return LostConnection(text)
        if isinstance(error, psycopg.DataError | psycopg.IntegrityError):
            return ValueError(text)
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            text += "; the role needs SELECT, INSERT and UPDATE on plants, or to create it"
        if isinstance(error, psycopg.ProgrammingError):
            return StartRefused(text)
        return Unavailable(text)


def dump(storage: Storage, out: BinaryIO) -> None:
    """Write all plants to `out` as JSON Lines (jsonlines.org), in the order of id."""
    for plant in _counted(storage.rows()):
        out.write(json.dumps(plant.to_json(), ensure_ascii=False).encode() + b"\n")
    out.flush()


def load(storage: Storage, lines: BinaryIO) -> Counter[str]:
    """Store the plants in JSON Lines; each line that is refused is named on standard error.

    Returns how many were new, there already, conflicting and invalid. What is there already is
    left as it is, so loading the same lines again is safe. Raises Unavailable if the storage
    can't go on.
    """
    counts = Counter({"new": 0, "there already": 0, "conflicting": 0, "invalid": 0})
    chunk: list[tuple[int, bytes]] = []
    size = 0
    for number, line in enumerate(_counted(_cut(lines)), 1):
        chunk.append((number, line))
        size += len(line)
        if len(chunk) == LOAD_BATCH or size > LINE_LIMIT:
            counts.update(_load_batch(storage, chunk))
            chunk, size = [], 0
    counts.update(_load_batch(storage, chunk))
    return counts


def _load_batch(storage: Storage, lines: Iterable[tuple[int, bytes]]) -> dict[str, int]:
    plants: dict[int, Plant] = {}
    refused: dict[int, Exception] = {}
    for number, line in lines:
        try:
            if len(line) == LINE_LIMIT:
                raise InvalidPlant(f"longer than {LINE_LIMIT} bytes")
            plants[number] = Plant.from_json(parse_new_plant(line))
        except InvalidPlant as error:
            refused[number] = error
    invalid = len(refused)
    new, outcomes = storage.add_all(list(plants.values()))
    refused |= {n: error for n, error in zip(plants, outcomes, strict=True) if error}
    for number in sorted(refused):
        print(f"line {number}: {refused[number]}", file=sys.stderr)
    conflicting = len(refused) - invalid
    return {
        "new": new,
        "there already": len(plants) - new - conflicting,
        "conflicting": conflicting,
        "invalid": invalid,
    }


def _cut(lines: BinaryIO) -> Iterator[bytes]:
    """Each line, cut to LINE_LIMIT, so that one without an end does not fill the memory."""
    while line := lines.readline(LINE_LIMIT):
        yield line
        while len(line) == LINE_LIMIT and not line.endswith(b"\n"):
            line = lines.readline(LINE_LIMIT)


def _counted(items: Iterable[T]) -> Iterator[T]:
    """Pass `items` on; where standard error is a terminal, show how many there were."""
    count = 0
    for count, item in enumerate(items, 1):
        yield item
        if count % 1000 == 0 and sys.stderr.isatty():
            print(f"\r{count:,} plants", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(f"\r{count:,} plants", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="storage.py", description="Move plants as JSON Lines.")
    parser.add_argument("command", choices=["dump", "load"], help="write all plants, or read some")
    parser.add_argument("url", nargs="?", default=database_url(), help="default: DATABASE_URL")
    options = parser.parse_args(arguments)
    try:
        with contextlib.closing(Storage.from_url(options.url)) as storage:
            if options.command == "dump":
                dump(storage, sys.stdout.buffer)
                return 0
            storage.create()
            counts = load(storage, sys.stdin.buffer)
            print(", ".join(f"{count} {name}" for name, count in counts.items()), flush=True)
    except BrokenPipeError:  # dump | head: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, Unavailable) as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if counts["conflicting"] or counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
