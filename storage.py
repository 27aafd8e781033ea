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
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, unquote

from schemas import InvalidPlant, parse_new_plant

DEFAULT_URL = "sqlite:///plants.db"
WAIT_LIMIT = 10.0  # seconds until a plant that is not stored yet is given up
BUSY_TIMEOUT = WAIT_LIMIT / 2  # the part of them for a file that another program has locked
CHECK_LIMIT = 1.5  # seconds that a look at the storage may take
LOAD_BATCH = 250  # plants; larger ones are no faster, and keep the service waiting for its turn
LINE_LIMIT = 2**20 + 2**10  # bytes; a dump's line is hardly longer than the request's body was

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


class Engine(Protocol):
    """A database: one connection, opened when first used, for one thread at a time.

    The methods raise Unavailable for what may pass, StartRefused where an operator has to act.
    """

    def turn(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        """Keep this host's other processes from writing, after at most `timeout` seconds."""

    def create(self) -> None:
        """Make the database ready where it is new. Needs the turn."""

    def identity(self) -> str:
        """What tells this database from another one at the same place."""

    def insert(self, plants: Sequence[Plant]) -> tuple[int, Mapping[int, Plant]]:
        """Store those whose id is new, durably; without plants, prove that it could.

        Needs the turn. Returns how many were new and, unless all were, what is stored under their
        ids. Raises anything else where one of the plants is at fault: then none was stored.
        """

    def rows(self) -> Iterator[Plant]:
        """All plants as of now, in the order of id."""

    def close(self) -> None:
        """Close the connection, in a turn of its own."""


class Storage:
    """The plants of a DATABASE_URL, for all threads of a process."""

    def __init__(self, engine: Engine, wait_limit: float = WAIT_LIMIT) -> None:
        """`wait_limit` is in seconds."""
        self._engine = engine
        self._wait_limit = wait_limit
        self._group = GroupCommit(engine.turn, lambda batch: self._store(batch)[1], wait_limit)
        self._checker = BackgroundThread()
        self._check: Future[None] | None = None

    @classmethod
    def from_url(cls, url: str, identity: str = "") -> "Storage":
        """The storage that `url` names, not looked at yet. Raises StartRefused for other URLs.

        With an `identity`, which check_start() has returned, it is that database or none.
        """
        if url.startswith("sqlite:///") and "?" not in url:
            return cls(SQLiteEngine(unquote(url.removeprefix("sqlite:///")), identity))
        raise StartRefused(
            "DATABASE_URL must name a file like sqlite:///plants.db (sqlite:////srv/plants.db "
            "with an absolute path)"
        )

    def add(self, plant: Plant) -> None:
        """Store `plant`, or see that it is stored already; either is durable when this returns.

        Raises Conflict if its id is another plant's, and Unavailable, after the wait limit at
        most (while the disk itself answers), if that can't be told.
        """
        self._group.add(plant)

    def add_all(self, plants: Sequence[Plant]) -> tuple[int, list[Exception | None]]:
        """Store a batch in a process that has no other thread that stores.

        Returns how many were new and, for each, the Conflict or what else kept it out, or None.
        """
        with self._engine.turn(self._wait_limit):
            return self._store(plants)

    def check(self) -> None:
        """Raise Unavailable unless the storage takes a write within CHECK_LIMIT seconds.

        Writes in a thread of its own, as nothing ends the wait for a disk that hangs.
        """
        if self._check is None or self._check.done():
            self._check = self._checker.submit(self._group.add, None)
        try:
            self._check.result(CHECK_LIMIT)
        except FutureTimeoutError:
            raise Unavailable(f"no answer from the storage for {CHECK_LIMIT} s") from None

    def check_start(self) -> str:
        """Create the database if there is none, and return its identity.

        Raises StartRefused if it will not work until an operator mends it. Nothing else creates
        one: a database that goes away later must not be replaced in silence.
        """
        try:
            with self._engine.turn(self._wait_limit):
                self._engine.create()
                self._engine.insert([])
        except StartRefused:
            raise
        except Unavailable as error:  # which may pass
            log.warning("starting nevertheless: %s", error)
        return self._engine.identity()

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
            single = [self._store([item]) for item in batch]
            return sum(new for new, _ in single), [outcome for _, (outcome,) in single]
        return new, [
            Conflict(f"id: {plant.id} is taken by another plant, which stays as it is")
            if plant is not None and stored.get(plant.id, plant) != plant
            else None
            for plant in batch
        ]


class _Waiter:
    """A thread's item in the group commit and, in the end, its outcome."""

    __slots__ = ("item", "leads", "outcome", "settled", "wake")

    def __init__(self, item: Plant | None) -> None:
        self.item = item
        self.leads = self.settled = False
        self.outcome: BaseException | None = None
        self.wake = threading.Lock()  # held until there is something to wake up for
        self.wake.acquire()


class GroupCommit:
    """Writes what threads add at the same time as one batch.

    The first to come leads: it waits for the turn, takes all that is pending by then and writes
    it, while the others, its followers, sleep. Then it makes the first of those that came
    meanwhile the next leader, and wakes exactly those whose items it wrote. Each thread sleeps on
    a lock of its own: with one lock for all, every commit would wake every thread.
    """

    def __init__(
        self,
        turn: Callable[[float], contextlib.AbstractContextManager[None]],
        write: Callable[[list[Plant | None]], list[Exception | None]],
        wait_limit: float,
    ) -> None:
        self._turn = turn
        self._write = write
        self._wait_limit = wait_limit
        self._lock = threading.Lock()  # guards what follows, and `leads` of each waiter
        self._pending: list[_Waiter] = []
        self._has_leader = False

    def add(self, item: Plant | None) -> None:
        """Return when a batch with `item` was written; raise what its outcome was instead."""
        waiter = _Waiter(item)
        deadline = time.monotonic() + self._wait_limit
        with self._lock:
            self._pending.append(waiter)
            if not self._has_leader:
                self._has_leader = waiter.leads = True
        if not waiter.leads and not waiter.wake.acquire(timeout=self._wait_limit):
            self._give_up(waiter)
        if waiter.leads:
            self._lead(waiter, deadline)
        if waiter.outcome is not None:
            raise waiter.outcome

    def _give_up(self, waiter: _Waiter) -> None:
        """Stop waiting, unless the wait came to its end at this very moment."""
        with self._lock:
            if waiter.settled or waiter.leads:  # made leader: the others depend on it
                return
            if waiter in self._pending:
                self._pending.remove(waiter)
        waiter.outcome = Unavailable(f"not stored within {self._wait_limit:g} s")

    def _lead(self, leader: _Waiter, deadline: float) -> None:
        """Write one batch and hand over, whatever happens."""
        batch: list[_Waiter] = []
        outcomes: Sequence[BaseException | None] = []
        try:
            # Half of the limit is for the write: the file may be locked by another program.
            with self._turn(deadline - self._wait_limit / 2 - time.monotonic()):
                with self._lock:
                    batch, self._pending = self._pending, []
                outcomes = self._write([waiter.item for waiter in batch])
        except BaseException as error:
            outcomes = [error] * max(len(batch), 1)
        with self._lock:
            if not batch:  # it failed before it took any: the others' turn may still come
                self._pending.remove(leader)
                batch = [leader]
            self._has_leader = bool(self._pending)
            if self._has_leader:
                self._pending[0].leads = True
                self._pending[0].wake.release()
            for waiter, outcome in zip(batch, outcomes, strict=True):
                waiter.outcome, waiter.settled = outcome, True
        for waiter in batch:
            if waiter is not leader:
                waiter.wake.release()


class BackgroundThread:
    """Runs calls one after another in a thread that the process does not wait for at its end."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[None], Callable[..., None], Any]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Return at once what `call` will have come to."""
        future: Future[None] = Future()
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


class Turn:
    """A lock between the processes of a host that dies with its holder.

    It is for one thread of a process at a time; GroupCommit sees to that. flock(2) can't wait for
    a limited time, so where the lock is not free another thread waits for it. That is as fast as
    to wait oneself, while to try again and again loses a tenth to a half of the throughput.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._thread = BackgroundThread()
        self._direct = self._waited = -1

    def take(self, timeout: float) -> int:
        """Wait for the turn `timeout` seconds. Returns what to release.

        Raises Unavailable if it does not come, and OSError if the directory can't be locked.
        """
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
                wait.add_done_callback(lambda _: self.release(self._waited))
            raise Unavailable("other processes keep the storage busy") from None
        return self._waited

    def release(self, taken: int) -> None:
        """End the turn that take() returned."""
        fcntl.flock(taken, fcntl.LOCK_UN)


class SQLiteEngine(Engine):
    """A SQLite file in WAL mode, synced at every commit (sqlite.org/wal.html).

    Everything that writes or checkpoints, opening and closing too, needs the turn: processes that
    meet at SQLite's own lock sleep for milliseconds, and SQLite before 3.51.3 can damage the file
    if one checkpoints while another writes (sqlite.org/wal.html, "The WAL-Reset Bug").
    """

    APPLICATION_ID = 0x504C4E54  # "PLNT"
    VERSION = 1
    SCHEMA = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT"

    def __init__(self, path: str, identity: str = "", busy_timeout: float = BUSY_TIMEOUT) -> None:
        """`path` is relative to the working directory or absolute, `busy_timeout` in seconds.

        With an `identity`, no other file of that path is opened.
        """
        if not path or path == ":memory:" or "\0" in path:
            raise StartRefused("DATABASE_URL must name a file: what is in memory is not stored")
        if sqlite3.sqlite_version_info < (3, 37):
            raise StartRefused(f"SQLite 3.37 or newer is needed; this is {sqlite3.sqlite_version}")
        # SQLite keeps its other files beside what a link leads to, and so do we.
        self._path = os.path.realpath(path)
        self._expected = identity
        self._busy_timeout = busy_timeout
        self._turn = Turn(os.path.dirname(self._path))
        self._connection: sqlite3.Connection | None = None
        self._files: tuple[str, ...] = ()

    @contextlib.contextmanager
    def turn(self, timeout: float) -> Iterator[None]:
        """Take turns on the directory: a lock on the file itself would undo SQLite's own."""
        try:
            taken = self._turn.take(timeout)
        except OSError as error:
            raise StartRefused(f"{self._path}: its directory: {error.strerror}") from None
        try:
            yield
        finally:
            self._turn.release(taken)

    def create(self) -> None:
        if self._connection is None:
            self._open("rwc")

    def identity(self) -> str:
        try:
            return self._inode("")
        except OSError:
            return ""

    def insert(self, plants: Sequence[Plant]) -> tuple[int, Mapping[int, Plant]]:
        connection = self._connection or self._open()
        self._check_files()
        new, stored = 0, {}
        try:
            if plants:
                rows = ", ".join(["(?, ?, ?)"] * len(plants))
                new = connection.execute(
                    f"INSERT INTO plants VALUES {rows} ON CONFLICT (id) DO NOTHING",
                    list(itertools.chain.from_iterable(plants)),
                ).rowcount
            else:  # a read-only file takes BEGIN IMMEDIATE, but not this
                connection.execute(f"PRAGMA user_version = {self.VERSION}")
            if new < len(plants):
                ids = ", ".join("?" * len(plants))
                select = f"SELECT id, name, tag FROM plants WHERE id IN ({ids})"
                found = connection.execute(select, [plant.id for plant in plants])
                stored = {row[0]: Plant(*row) for row in found}
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.IntegrityError | sqlite3.DataError):
                raise
            raise Unavailable(f"{self._path}: {error}") from error
        self._check_files()
        return new, stored

    def rows(self) -> Iterator[Plant]:
        with self.turn(WAIT_LIMIT):
            connection = self._connection or self._open()
        try:
            # One statement reads one snapshot, whatever is written meanwhile.
            for row in connection.execute("SELECT id, name, tag FROM plants ORDER BY id"):
                yield Plant._make(row)
        except sqlite3.Error as error:
            raise Unavailable(f"{self._path}: {error}") from error

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Unavailable), self.turn(self._busy_timeout):
                self._connection.close()
                self._connection = None

    def _open(self, mode: str = "rw") -> sqlite3.Connection:
        """Connect; `mode` is that of sqlite.org/uri.html, where rwc creates what is missing."""
        if os.path.exists(self._path) != os.path.isfile(self._path):
            raise StartRefused(f"{self._path} is not a file; name another in DATABASE_URL")
        if mode == "rw" and not os.path.exists(self._path):
            raise StartRefused(f"{self._path}: no such file; put it back, or restart for a new one")
        # Before SQLite sees it: it would play the -wal of the old file into a new one.
        expected = self._expected or self.identity()
        self._expect(expected)
        try:
            connection = sqlite3.connect(
                f"file:{quote(self._path)}?mode={mode}",
                uri=True,
                timeout=self._busy_timeout,
                isolation_level=None,
                check_same_thread=False,
            )
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(connection.close)
                self._prepare(connection, create=mode == "rwc")
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
            raise StartRefused(f"{self._path} is empty; put it back, or restart for a new one")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone leaves it in the drive
        if is_new:
            connection.executescript(
                f"BEGIN IMMEDIATE; {self.SCHEMA}; PRAGMA application_id = {self.APPLICATION_ID};"
                f"PRAGMA user_version = {self.VERSION}; COMMIT"
            )
        if pragma("journal_mode = WAL") != "wal":
            raise StartRefused(f"{self._path}: its file system can't do SQLite's WAL mode")
        # What a killed process wrote but had not synced yet is read back as if it were stored, and
        # would be answered for: a checkpoint syncs it.
        if pragma("wal_checkpoint"):
            raise Unavailable(f"{self._path}: another program is at work on it")

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
    numbered = enumerate(_counted(_cut(lines)), 1)
    while chunk := list(itertools.islice(numbered, LOAD_BATCH)):
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
            storage.check_start()
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
