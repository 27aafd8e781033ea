"""The storage: once add() returns, the plant survives a power cut. Contains no SQL, no HTTP."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from engines import Blocked, Conflict, Engine, NeedsOperator, Rejected, Unavailable
from plant import Plant

Outcome: TypeAlias = Exception | None  # None is a success
Function: TypeAlias = Callable[[], None]

WAIT_LIMIT = 10.0  # seconds that a request waits for its plant to be stored
CHECK_INTERVAL = 1.0  # seconds after a health check in which others need no write of their own
MAX_BATCH_SIZE = 2**20  # bytes; the commit of a larger batch would keep others waiting
BUSY = Unavailable("the storage is busy or hangs")


@dataclass(slots=True, eq=False)
class Entry:
    """A plant in the queue, or None for a health check."""

    plant: Plant | None
    outcome: Outcome = BUSY
    done: threading.Event = field(default_factory=threading.Event)


class Storage:
    """The plants in a database, for all threads of a process, until it is closed.

    A commit costs as much for many plants as for one. So a request puts its plant into a queue
    and waits; one thread, the writer, stores what is queued as one batch.
    """

    def __init__(
        self, engine: Engine, wait_limit: float, call: Callable[[Function], None], gather: Function
    ) -> None:
        """Use the engine through `call`; `gather` lets all who have arrived come and wait."""
        self.engine, self.rows = engine, engine.rows
        self._wait_limit, self._call, self._gather = wait_limit, call, gather
        self._queue: deque[Entry] = deque()
        self._batch: deque[Entry] = deque()  # what is being stored
        self._wake_up = threading.Event()  # set when the writer has something to do
        self._is_closed = False
        self._checked_at = self._stored_at = -CHECK_INTERVAL  # by time.monotonic()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def open_soon(self) -> None:
        """Let the writer open the database now: then it notices if its file is deleted."""
        self._queue.append(Entry(None))
        self._wake_up.set()

    def add(self, plant: Plant) -> None:
        """Store `plant` durably, if it is not yet. Raises Conflict, Rejected or Unavailable."""
        if outcome := self.add_all([plant])[0]:
            # Others may share it, and its traceback would grow from one to the next.
            raise outcome.with_traceback(None)

    def add_all(self, plants: Sequence[Plant]) -> list[Outcome]:
        """Store many plants in few batches; return for each None, or what add() would raise."""
        return self._wait_for(plants, self._wait_limit)

    def check(self, limit: float) -> None:
        """Raise Unavailable unless the database takes plants; answer within `limit` seconds."""
        start = time.monotonic()
        if start > self._checked_at + CHECK_INTERVAL:
            (outcome,) = self._wait_for([None], limit)
            is_late = outcome is BUSY and self._stored_at >= start  # only others take long
            if outcome and not is_late:
                raise outcome.with_traceback(None)

    def close(self) -> None:
        """Store what is in the queue and close the connection, for good."""
        self._is_closed = True
        self._wake_up.set()
        self._writer.join(self._wait_limit / 2)

    def _wait_for(self, plants: Sequence[Plant | None], limit: float) -> list[Outcome]:
        deadline, entries = time.monotonic() + limit, [Entry(plant) for plant in plants]
        self._queue += entries
        self._wake_up.set()
        for entry in entries:
            if not entry.done.wait(deadline - time.monotonic()):
                with contextlib.suppress(ValueError):  # it is being stored
                    self._queue.remove(entry)
        return [entry.outcome for entry in entries]

    def _write(self) -> None:
        """Store one batch after the other, and wake those who wait for it."""
        size = 0  # of the batch before
        while not self._is_closed or self._queue:
            self._wake_up.wait()
            self._wake_up.clear()
            while self._queue:
                try:
                    if size + len(self._queue) > 2:  # one client alone waits for nobody
                        self._gather()
                    self._call(self._store_next)
                except Exception as error:  # no thread can be started, say
                    self._fail(error)
                size = len(self._batch)
                while self._batch:  # nothing of it stays in memory
                    self._batch.popleft().done.set()
        self._call(self.engine.close)

    def _take(self) -> None:
        """Move a batch out of the queue, from which requests that give up go meanwhile."""
        size = 0
        with contextlib.suppress(IndexError):
            while len(self._batch) < self.engine.max_batch and size < MAX_BATCH_SIZE:
                self._batch.append(self._queue.popleft())
                size += len(ascii(self._batch[-1].plant))  # no less than in UTF-8

    def _fail(self, error: Exception) -> None:
        if not self._batch:
            self._take()
        for entry in self._batch:
            entry.outcome = error

    def _store_next(self) -> None:
        """Take a batch once the lock is there; set the outcome of each entry."""
        try:
            with self.engine.locked():
                self._take()
                plants = [entry.plant for entry in self._batch if entry.plant]
                outcomes = iter(self._store(plants) if plants else [])
                checked = self._check() if len(plants) < len(self._batch) else None
            for entry in self._batch:
                entry.outcome = next(outcomes) if entry.plant else checked
        except Exception as error:  # the lock can't be had
            self._fail(error)

    def _check(self) -> Outcome:
        try:
            self.engine.check()
        except Exception as error:  # what keeps out even nothing is not a plant's fault
            return NeedsOperator(str(error)) if isinstance(error, Rejected) else error
        self._checked_at = self._stored_at = time.monotonic()
        return None

    def _store(self, plants: list[Plant], deadline: float | None = None) -> list[Outcome]:
        """Store a batch; if one plant may be at fault, each half alone, until the deadline."""
        # Sorted, as two batches with the same plants in different order can deadlock.
        unique = sorted({plant.id: plant for plant in reversed(plants)}.values())
        try:
            stored = self.engine.insert(unique, is_part=deadline is not None)
            self._stored_at = time.monotonic()
            return [_compare(plant, stored) for plant in plants]
        except (Blocked, Rejected) as error:
            failure = None if deadline else self._check()
            if failure or len(plants) == 1:
                return [failure or error] * len(plants)
        except Exception as error:
            self._checked_at = -CHECK_INTERVAL
            return [error] * len(plants)
        deadline = deadline or time.monotonic() + self._wait_limit / 2
        if time.monotonic() > deadline:
            return [Unavailable("other plants of its batch took too long")] * len(plants)
        middle = len(plants) // 2
        return self._store(plants[:middle], deadline) + self._store(plants[middle:], deadline)


def _compare(plant: Plant, stored: Mapping[int, Plant]) -> Outcome:
    """Return the outcome for `plant` where `stored` is what its database has after the insert."""
    if plant.id not in stored:
        return Rejected("it was not stored: a trigger or a policy keeps it out")
    if plant != stored[plant.id]:
        return Conflict("id: is taken by another plant, which stays as it is")
    return None
