"""The storage: once Storage.add() returns, the plant survives a crash and a power cut.

Contains no SQL and no HTTP: the engines in sqlite.py and postgresql.py know their databases.
"""

import contextlib
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import unquote

from engine import Conflict, Engine, Inserted, NeedsOperator, Unavailable
from schemas import Plant
from sqlite import SQLiteEngine

DEFAULT_URL = "sqlite:///plants.db"
WAIT_LIMIT = 10.0  # seconds that a request waits for its plant to be stored
CHECK_LIMIT = 1.5  # seconds that a health check waits
CHECK_INTERVAL = 1.0  # seconds after a write in which a health check needs no other one
JOIN_LIMIT = WAIT_LIMIT / 2  # seconds that a batch is open: no less than a write takes at most
MAX_BATCH = 1000  # plants; SQLite allows 32,766 values in a statement
MAX_BATCH_SIZE = 2**20  # bytes; the commit of a larger batch would keep others waiting

log = logging.getLogger("gunicorn.error.plants")  # a child of gunicorn's error log

Outcomes: TypeAlias = Sequence[Exception | None]  # None if stored, else why not
Gather: TypeAlias = Callable[[], None]
Write: TypeAlias = Callable[[Sequence[Plant]], Outcomes]
Call: TypeAlias = Callable[[Callable[[], Any]], Any]  # calls a function, returns what that returns


class Storage:
    """The plants in a database, for all threads of a process, until it is closed."""

    def __init__(
        self, engine: Engine, wait_limit: float, call: Call, gather: Gather = lambda: None
    ) -> None:
        """Wait at most `wait_limit` seconds; use the engine through `call` only.

        `gather` gives all requests that have arrived the time to come and wait.
        """
        self.engine, self._wait_limit = engine, wait_limit
        self.inserted = 0  # plants that were new to the database
        self.rows = engine.rows  # all plants as of now, in the order of id
        self._last_write = -CHECK_INTERVAL  # when a write succeeded, by time.monotonic()
        self._commit = GroupCommit(engine, self._write, call, gather)

    @classmethod
    def from_url(
        cls,
        url: str,
        identity: str = "",
        wait_limit: float = WAIT_LIMIT,
        call_blocking: Call = operator.call,
        gather: Gather = lambda: None,
    ) -> "Storage":
        """Return the storage that `url` names, if it is that of `identity`.

        `call_blocking` is for calls that block even where gevent has made greenlets of threads.
        Raises NeedsOperator.
        """
        if url.startswith("sqlite:///") and "?" not in url:
            path = unquote(url.removeprefix("sqlite:///"), errors="surrogateescape")
            engine: Engine = SQLiteEngine(path, identity, wait_limit / 2)
            return cls(engine, wait_limit, call_blocking, gather)
        if url.startswith(("postgresql://", "postgres://")):
            from postgresql import PostgreSQLEngine  # SQLite does without psycopg

            engine = PostgreSQLEngine(url, identity, wait_limit / 2)
            return cls(engine, wait_limit, operator.call, gather)
        raise NeedsOperator(
            "DATABASE_URL must name a file like sqlite:///plants.db (sqlite:////srv/plants.db with "
            "an absolute path) or a server like postgresql://user:password@host/database"
        )

    def add(self, plant: Plant) -> None:
        """Store `plant`, or make sure that it is stored already; either is durable on return.

        Raises Conflict, or, after the wait limit at most, Unavailable: the outcome is unknown.
        """
        (error,) = self.add_all([plant])
        if error:
            raise error

    def add_all(self, plants: Sequence[Plant]) -> Outcomes:
        """Store many plants in few batches; return for each None or what add() would raise.

        Raises Unavailable once the storage is closed.
        """
        return self._commit.submit(plants, self._wait_limit)

    def check(self) -> None:
        """Raise Unavailable unless the database takes writes; answer within CHECK_LIMIT seconds."""
        is_proven = time.monotonic() < self._last_write + CHECK_INTERVAL
        if not is_proven and (error := self._commit.check(CHECK_LIMIT)):
            raise error

    def check_start(self) -> str:
        """Create the database if there is none and return its identity. Raises NeedsOperator."""
        error = self._commit.check(self._wait_limit)
        if isinstance(error, NeedsOperator):
            raise error
        if error:
            log.warning("the database is not available at the start: %s", error)
        return self.engine.identity

    def close(self) -> None:
        """Store what is in the queue and close the connection, for good."""
        self._commit.close(self._wait_limit / 2)

    def _write(self, plants: Sequence[Plant]) -> Outcomes:
        """Write plants; without plants, prove that it can. Return the outcome for each, or that."""
        try:
            # Sorted, as two batches with the same plants in different order can deadlock.
            inserted = self.engine.insert(sorted(plants, key=operator.attrgetter("id")))
        except Exception as error:
            self._last_write = -CHECK_INTERVAL
            if isinstance(error, Unavailable) or len(plants) < 2:
                return [error] * max(len(plants), 1)
            return self._write_one_by_one(plants)
        self.inserted += inserted.new
        if inserted.new or not plants:
            self._last_write = time.monotonic()
        return [outcome(plant, inserted) for plant in plants] or [None]

    def _write_one_by_one(self, plants: Sequence[Plant]) -> Outcomes:
        """Write each by itself, so that a plant that is at fault keeps out no other."""
        deadline = time.monotonic() + self._wait_limit / 2
        late = Unavailable("other plants of its batch took too long")
        return [self._write([each])[0] if time.monotonic() < deadline else late for each in plants]


def outcome(plant: Plant, inserted: Inserted) -> Exception | None:
    """Return what kept `plant` out of its batch, or None if it is stored."""
    if plant.id in inserted.locked:
        return Unavailable(f"plant {plant.id}: another transaction holds its row")
    if inserted.existing is None or plant == inserted.existing.get(plant.id):
        return None
    if plant.id not in inserted.existing:
        return Unavailable(f"plant {plant.id} was deleted while it was stored")
    return Conflict(f"id: {plant.id} is taken by another plant, which stays as it is")


@dataclass(slots=True, eq=False)
class Batch:
    """Plants that are written together, or a health check. All wait for the same event."""

    plants: list[Plant] = field(default_factory=list)
    size: int = 0  # bytes of the plants
    is_open: bool = True  # until the writer has begun, which may be a real thread
    start: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)
    outcomes: Outcomes = ()  # for each plant or for the health check, once it is done

    def has_room(self) -> bool:
        """Whether a plant may join; it shares the time limit of the first."""
        is_small = len(self.plants) < MAX_BATCH and self.size < MAX_BATCH_SIZE
        return self.is_open and is_small and time.monotonic() < self.start + JOIN_LIMIT

    def fail(self, error: Exception) -> None:
        """Set the same outcome for all."""
        self.outcomes = [error] * max(len(self.plants), 1)


class GroupCommit:
    """Writes the plants of requests that arrive at the same time as one batch.

    A commit that waits for the disk costs as much for many plants as for one. A request puts its
    plant into a batch and waits; one thread writes the batches and wakes the requests.
    """

    def __init__(self, engine: Engine, write: Write, call: Call, gather: Gather) -> None:
        self._engine, self._write, self._call, self._gather = engine, write, call, gather
        self._queue: deque[Batch] = deque()  # the first may be being written
        self._check: Batch | None = None  # what health checks share
        self._wake_up = threading.Event()  # set when the writer has something to do
        self._lock = threading.Lock()  # the writer does not end while a batch is queued
        self._writer: threading.Thread | None = None  # started when first needed: after any fork
        self._is_closed = False

    def submit(self, plants: Iterable[Plant], limit: float) -> Outcomes:
        """Put plants into the queue; return what became of each within `limit` seconds."""
        with self._lock:
            self._start_writer()
            joined = [self._join(plant) for plant in plants]
        self._wake_up.set()
        return [self._wait(batch, index, limit) for batch, index in joined]

    def check(self, limit: float) -> Exception | None:
        """Return what keeps the engine from writing, within `limit` seconds."""
        with self._lock:
            self._start_writer()
            check = self._check
            if check is None or check.done.is_set() or time.monotonic() > check.start + limit / 3:
                self._queue.append(check := Batch(is_open=False))
                self._check = check
        self._wake_up.set()
        return self._wait(check, 0, limit)

    def close(self, timeout: float) -> None:
        """Let the writer store what is queued, close the engine and end; wait some seconds."""
        with self._lock:
            self._is_closed, writer = True, self._writer
        if writer is not None:
            self._wake_up.set()
            writer.join(timeout)

    def _start_writer(self) -> None:
        if self._is_closed:
            raise Unavailable("the storage is closed")
        if self._writer is None:
            writer = threading.Thread(target=self._run, daemon=True)
            writer.start()
            self._writer = writer

    def _join(self, plant: Plant) -> tuple[Batch, int]:
        """Add a plant to the last batch of the queue; return that and the index in it."""
        size = len(ascii(plant))  # no less than in UTF-8
        batch = next(reversed([*self._queue]), None)  # a copy, as other threads change the queue
        if batch is None or not batch.has_room():
            self._queue.append(batch := Batch([plant], size))  # an empty one is a health check
            return batch, 0
        batch.size += size
        batch.plants.append(plant)
        return batch, len(batch.plants) - 1

    def _wait(self, batch: Batch, index: int, limit: float) -> Exception | None:
        """Wait for a batch, the first in it with a limit for all: a timer for each takes longer."""
        try:
            batch.done.wait(None if index else batch.start + limit - time.monotonic())
        finally:
            if not index and not batch.done.is_set():
                obstacle = self._engine.obstacle or "the storage does not answer"
                batch.fail(Unavailable(f"its batch gave up after {limit:.3g} s: {obstacle}"))
                self._finish(batch)
        outcomes = batch.outcomes  # read once: a batch that gave up may still be written
        if index >= len(outcomes):  # it joined when the writer had just begun
            late = Batch([batch.plants[index]], is_open=False, start=batch.start)
            with self._lock:
                self._start_writer()
                self._queue.append(late)
            self._wake_up.set()
            return self._wait(late, 0, limit)
        error = outcomes[index]
        # Other requests may share an error, and its traceback would grow from one to the next.
        return error and error.with_traceback(None)

    def _finish(self, batch: Batch) -> None:
        with contextlib.suppress(ValueError):  # it has given up, and was written all the same
            self._queue.remove(batch)
        batch.done.set()

    def _run(self) -> None:
        written = 0  # plants in the batch before
        try:
            while not self._is_closed or self._queue:
                self._wake_up.wait()
                self._wake_up.clear()
                while batch := next(iter([*self._queue]), None):
                    if written + len(batch.plants) > 2:  # one client alone waits for nobody
                        self._gather()
                    self._call(partial(self._write_batch, batch))
                    written = len(batch.plants)
                    self._finish(batch)
            self._call(self._engine.close)
        finally:  # if it died, the next plant starts another
            with self._lock:
                self._writer = None
                for batch in [*self._queue]:
                    batch.fail(Unavailable("the writer failed"))
                    self._finish(batch)

    def _write_batch(self, batch: Batch) -> None:
        """Write what is in the batch once the lock is there, unless the requests gave up."""
        try:
            with self._engine.locked():
                batch.is_open = False
                if not batch.done.is_set():
                    batch.outcomes = self._write(tuple(batch.plants))
        except Exception as error:  # the lock can't be had
            batch.fail(error)
