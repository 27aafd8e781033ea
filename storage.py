"""The storage: once add() returns, the plant survives a power cut. No SQL, no HTTP."""

import contextlib
import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from plant import Plant

ADD_LIMIT = 10.0  # seconds that a request waits for its plant to be stored
BATCH_LIMIT = 200  # plants; the commit of a larger batch would keep others waiting
LOCK_LIMIT, PART_LOCK_LIMIT = 100, 1  # milliseconds that a batch, or a part, waits for a row

Function = Callable[[], None]


class Conflict(Exception):
    """Another plant has this id. It stays as it is."""


class Rejected(Exception):
    """The database never takes this plant: a constraint or a trigger is against it."""


class Unavailable(Exception):
    """The plant is not known to be stored; storing it again is safe."""


class Locked(Unavailable):
    """Another transaction has locked the row of this plant."""


class Engine(Protocol):
    """A database with a table of plants, used by one thread at a time; its first use opens it."""

    description: str  # what the database is and where, without a password

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Keep other processes from writing meanwhile, if need be. Raises Unavailable."""
        return contextlib.nullcontext()

    def insert(self, plants: Sequence[Plant], lock_limit: int) -> Mapping[int, Plant]:
        """Store durably all plants whose id is new, or none; return what is there for each id.

        Their ids are sorted, and differ. Without plants, it proves by as durable a write that they
        could be stored. Raises Rejected, or Locked after `lock_limit` milliseconds, if one plant
        may be at fault, else Unavailable.
        """

    def close(self) -> None:
        """Close the connection, if there is one."""


BUSY = Unavailable("the storage is busy or hangs")  # for who gives up before there is an outcome


@dataclass(slots=True, eq=False)
class Entry:
    """A plant in the queue, or None for a health check."""

    plant: Plant | None
    failure: Exception | None = BUSY  # None once it is stored
    done: threading.Event = field(default_factory=threading.Event)


class Storage:
    """The plants in a database, for all threads of a process, until it is closed.

    One thread, the writer, stores what is queued as one batch: a commit takes as long for many.
    """

    def __init__(self, engine: Engine, call: Callable[[Function], None]) -> None:
        """Start the writer. `call` runs all that uses the engine, and raises what it raises."""
        self.engine, self._call = engine, call
        # The first entry makes the writer open the database before a request comes.
        self._queue = deque([Entry(None)])
        self._batch: list[Entry] = []
        self._wake_up = threading.Event()  # the writer has something to do
        self._wake_up.set()
        self._is_closed = False
        self._stored_at = -math.inf  # by time.monotonic(), unless a batch has failed since
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def add(self, plant: Plant) -> None:
        """Store `plant` durably, if it is not yet. Raises Conflict, Rejected or Unavailable."""
        self._wait_for(Entry(plant), ADD_LIMIT)

    def check(self, limit: float) -> None:
        """Raise Rejected or Unavailable if plants can't be stored; take `limit` seconds at most."""
        # Anybody may ask, and each write is a sync: one of the last second is enough.
        if time.monotonic() > self._stored_at + 1:
            self._wait_for(Entry(None), limit)

    def close(self) -> None:
        """Store what is queued and close the connection, for good."""
        self._is_closed = True
        self._wake_up.set()
        self._writer.join(5)  # seconds; the database may hang

    def _wait_for(self, entry: Entry, limit: float) -> None:
        self._queue.append(entry)
        self._wake_up.set()
        if not entry.done.wait(limit):
            with contextlib.suppress(ValueError):  # it is being stored
                self._queue.remove(entry)
        if entry.failure:  # a copy, as a batch shares one, whose traceback would grow
            raise copy.copy(entry.failure) from entry.failure

    def _write(self) -> None:
        """Store one batch after the other, and wake those who wait for it."""
        while not self._is_closed or self._queue:
            self._wake_up.wait()
            self._wake_up.clear()
            while self._queue:
                try:
                    self._call(self._store_batch)
                except Exception as error:  # its traceback keeps the batch; a copy has none
                    self._fail(copy.copy(error) if isinstance(error, Unavailable) else error)
                for entry in self._batch:
                    entry.done.set()
                self._batch = []  # nothing of it stays in memory
        self._call(self.engine.close)

    def _store_batch(self) -> None:
        """Store what is queued as one batch, once the lock is there."""
        with self.engine.locked():
            self._take()
            self._store(self._batch)

    def _take(self) -> None:
        """Move a batch out of the queue; requests that give up may empty it meanwhile."""
        with contextlib.suppress(IndexError):
            while len(self._batch) < BATCH_LIMIT:
                self._batch.append(self._queue.popleft())

    def _store(self, entries: Sequence[Entry], lock_limit: int = LOCK_LIMIT) -> None:
        """Store entries as one batch; if a plant may be at fault, each half alone."""
        # Reversed: the first of an id wins. Sorted, or two batches with the same ids can deadlock.
        plants = {entry.plant.id: entry.plant for entry in reversed(entries) if entry.plant}
        try:
            stored = self.engine.insert(sorted(plants.values()), lock_limit)
        except (Locked, Rejected) as error:
            middle = len(entries) // 2
            if middle and plants:
                self._store(entries[:middle], PART_LOCK_LIMIT)
                self._store(entries[middle:], PART_LOCK_LIMIT)
            else:
                for entry in entries:
                    entry.failure = copy.copy(error)
            return
        self._stored_at = time.monotonic()
        for entry in entries:
            if not entry.plant or entry.plant == stored.get(entry.plant.id):
                entry.failure = None
            elif entry.plant.id in stored:
                entry.failure = Conflict("id: is taken by another plant, which stays as it is")
            else:
                entry.failure = Rejected("it was not stored: a trigger keeps it out")

    def _fail(self, error: Exception) -> None:
        """Let a batch fail, but for plants whose outcome is known."""
        self._stored_at = -math.inf
        if not self._batch:  # without the lock or a thread, it was not taken
            self._take()
        for entry in self._batch:
            if entry.failure is BUSY:
                entry.failure = error
