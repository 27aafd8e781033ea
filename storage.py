"""The storage: once Storage.add() returns, the plant survives a crash and a power cut.

Contains no SQL and no HTTP, and imports no database: start.py gives it an engine.
"""

import contextlib
import enum
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine import Conflict, Engine, Inserted, Unavailable
from schemas import Plant

WAIT_LIMIT = 10.0  # seconds that a request waits for its plant to be stored
CHECK_LIMIT = 1.5  # seconds that a health check waits
CHECK_INTERVAL = 1.0  # seconds after a health check in which others need no write of their own
MAX_BATCH = 1000  # plants; SQLite allows 32,766 values in a statement
MAX_BATCH_SIZE = 2**20  # bytes; the commit of a larger batch would keep others waiting


class Stored(enum.Enum):
    """What a success means."""

    NEW = "new"
    BEFORE = "there already"
    NOTHING = "nothing was to be stored"  # a health check


Batch: TypeAlias = Sequence[Plant | None]  # None stands for a health check
Outcomes: TypeAlias = Sequence[Stored | Exception]
Gather: TypeAlias = Callable[[], None]
Write: TypeAlias = Callable[[Batch], Outcomes]
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
        self.rows = engine.rows  # all plants as of now, in the order of id
        # When a health check, or any write, succeeded, by time.monotonic().
        self._last_check = self._last_write = -CHECK_INTERVAL
        self._commit = GroupCommit(engine, self._write, call, gather)

    def add(self, plant: Plant) -> None:
        """Store `plant`, or make sure that it is stored already; either is durable on return.

        Raises Conflict, Rejected, or, after the wait limit at most, Unavailable: the outcome is
        unknown.
        """
        self._write_one(plant, self._wait_limit)

    def add_all(self, plants: Sequence[Plant]) -> Outcomes:
        """Store many plants in few batches; return what became of each, or what add() would raise.

        Raises Unavailable once the storage is closed.
        """
        return self._commit.submit(plants, self._wait_limit)

    def check(self) -> None:
        """Raise Unavailable unless the database takes writes; answer within CHECK_LIMIT seconds."""
        start = time.monotonic()
        if start > self._last_check + CHECK_INTERVAL:
            try:
                self._write_one(None, CHECK_LIMIT)
            except Unavailable:
                if self._last_write < start:  # else only other plants of its batch take long
                    raise

    def open_or_create(self) -> None:
        """Open the database; create it if there is none and none was seen. Raises Unavailable."""
        self._write_one(None, self._wait_limit)

    def close(self) -> None:
        """Store what is in the queue and close the connection, for good."""
        self._commit.close(self._wait_limit / 2)

    def _write_one(self, plant: Plant | None, limit: float) -> None:
        (outcome,) = self._commit.submit([plant], limit)
        if isinstance(outcome, Exception):
            # Others may share it, and its traceback would grow from one to the next.
            raise outcome.with_traceback(None)

    def _write(self, batch: Batch, deadline: float = 0.0) -> Outcomes:
        """Write the plants of a batch, or what proves to a health check that this is possible."""
        # Sorted, as two batches with the same plants in different order can deadlock.
        plants = sorted((plant for plant in batch if plant), key=operator.attrgetter("id"))
        try:
            inserted = self.engine.insert(plants)
            if plants and None in batch:
                self.engine.insert([])
        except Unavailable as error:
            self._last_check = self._last_write = -CHECK_INTERVAL
            # Maybe it is a plant's alone.
            (checked,) = self._write([None]) if plants and None in batch else [error]
            return [error if plant else checked for plant in batch]
        except Exception as error:
            if not deadline and plants:
                (outcome,) = self._write([None])
                if isinstance(outcome, Exception):  # not a plant is at fault
                    return [outcome] * len(batch)
            return [error] if len(batch) == 1 else self._write_halves(batch, deadline)
        if inserted.new or None in batch:
            self._last_write = time.monotonic()
        if None in batch:
            self._last_check = self._last_write
        new = set(inserted.new)
        return [plant_outcome(plant, inserted, new) if plant else Stored.NOTHING for plant in batch]

    def _write_halves(self, batch: Batch, deadline: float) -> Outcomes:
        """Write a batch with a plant at fault in two parts, so that it keeps out no other."""
        deadline = deadline or time.monotonic() + self._wait_limit / 2
        late = Unavailable("other plants of its batch took too long")
        middle, outcomes = len(batch) // 2, list[Stored | Exception]()
        for half in (batch[:middle], batch[middle:]):
            is_late = time.monotonic() > deadline
            outcomes += [late] * len(half) if is_late else self._write(half, deadline)
        return outcomes


def plant_outcome(plant: Plant, inserted: Inserted, new: set[int]) -> Stored | Exception:
    """Return what became of `plant`; take its id out of `new`, as the batch may have it twice."""
    if plant.id in inserted.locked:
        return Unavailable(f"plant {plant.id}: another transaction holds its row")
    if inserted.existing is not None and plant != inserted.existing.get(plant.id):
        return Conflict(f"id: {plant.id} is taken by another plant, which stays as it is")
    if plant.id in new:
        new.remove(plant.id)
        return Stored.NEW
    return Stored.BEFORE


@dataclass(slots=True, eq=False)
class Entry:
    """A plant in the queue, or None for a health check."""

    plant: Plant | None
    done: threading.Event = field(default_factory=threading.Event)
    outcome: Stored | Exception = Stored.NOTHING  # once it is done


class GroupCommit:
    """Writes the plants of requests that arrive at the same time as one batch.

    A commit that waits for the disk costs as much for many plants as for one. A request puts its
    plant into a queue and waits; one thread writes what is queued and wakes those requests.
    """

    def __init__(self, engine: Engine, write: Write, call: Call, gather: Gather) -> None:
        self._engine, self._write, self._call, self._gather = engine, write, call, gather
        self._queue: deque[Entry] = deque()
        self._batch: list[Entry] = []  # what is being written
        self._wake_up = threading.Event()  # set when the writer has something to do
        self._lock = threading.Lock()  # the writer does not end while a plant is queued
        self._writer: threading.Thread | None = None  # started when first needed: after any fork
        self._is_closed = False

    def submit(self, plants: Batch, limit: float) -> Outcomes:
        """Put plants into the queue; return what became of each within `limit` seconds."""
        deadline = time.monotonic() + limit
        with self._lock:
            if self._is_closed:
                raise Unavailable("the storage is closed")
            if self._writer is None:
                writer = threading.Thread(target=self._run, daemon=True)
                writer.start()
                self._writer = writer  # only if it could be started
            entries = [Entry(plant) for plant in plants]
            self._queue += entries
        self._wake_up.set()
        for entry in entries:
            is_done = entry.done.wait(deadline - time.monotonic())
            if not is_done and time.monotonic() > deadline + 1:  # this process was stopped itself
                deadline = time.monotonic() + 1
                is_done = entry.done.wait(1)
            if not is_done:
                obstacle = self._engine.obstacle or "the storage does not answer"
                entry.outcome = Unavailable(f"gave up after {limit:.3g} s: {obstacle}")
                with contextlib.suppress(ValueError):  # it is being written
                    self._queue.remove(entry)
        return [entry.outcome for entry in entries]

    def close(self, timeout: float) -> None:
        """Let the writer store what is queued, close the engine and end; wait some seconds."""
        with self._lock:
            self._is_closed, writer = True, self._writer
        if writer is not None:
            self._wake_up.set()
            writer.join(timeout)

    def _run(self) -> None:
        size = 0  # of the batch before
        try:
            while not self._is_closed or self._queue:
                self._wake_up.wait()
                self._wake_up.clear()
                while self._queue:
                    if size + len(self._queue) > 2:  # one client alone waits for nobody
                        self._gather()
                    size = self._finish(self._call(self._write_next))
            self._call(self._engine.close)
        finally:  # if it died, the next plant starts another
            with self._lock:
                self._writer = None
                self._batch += self._queue
                self._queue.clear()
                self._finish([Unavailable("the writer failed")] * len(self._batch))

    def _finish(self, outcomes: Outcomes) -> int:
        """Wake those who wait for the batch, which must not stay in memory; return its size."""
        for entry, outcome in zip(self._batch, outcomes, strict=True):
            entry.outcome = outcome
            entry.done.set()
        self._batch = []
        return len(outcomes)

    def _write_next(self) -> Outcomes:
        """Write the next batch, which is what is in the queue once the lock is there."""
        try:
            with self._engine.locked():
                batch = self._take()
                return self._write(batch) if batch else []
        except Exception as error:  # the lock can't be had
            return [error] * len(self._batch or self._take())

    def _take(self) -> Batch:
        """Take a batch out of the queue, from which requests that give up go meanwhile."""
        size = 0
        with contextlib.suppress(IndexError):
            while len(self._batch) < MAX_BATCH and size < MAX_BATCH_SIZE:
                self._batch.append(self._queue.popleft())
                size += len(ascii(self._batch[-1].plant))  # no less than in UTF-8
        return [entry.plant for entry in self._batch]
