"""The storage: stores plants durably, many of them with one commit. No SQL, no HTTP, no gevent."""

import abc
import contextlib
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from plant import Plant

# The time limits, the outermost first. An inner limit expires before the ones around it, so that
# the log names the cause, such as a lock, and not only "the storage is busy or hangs".
#   15 s   the check at the start waits (start.py).
#   10 s   a request waits for its plant to be stored (below). Only a health check, 1.5 s (app.py),
#          may give up before it knows the cause.
#    8 s   a batch takes on a server, connecting included (engines/postgresql.py).
#    5 s   sqlite3 waits for another program's lock, by default. Our workers wait for each
#          other by flock, which has no limit: there, only the 10 s apply.
#    4 s   a server works on one statement (engines/postgresql.py).
#    2 s   an address takes to let us connect (engines/postgresql.py). If a server's name has four
#          addresses and three of them are dead, that fits into the 8 s.
ADD_LIMIT = 10.0  # seconds
BATCH_LIMIT = 200  # plants; the commit of a larger batch would keep other requests waiting
LOCK_LIMIT, PART_LOCK_LIMIT = 100, 1  # milliseconds that a batch, or a part of one, waits for a row


class Conflict(Exception):
    """The id belongs to a different plant, which was not changed."""


class Rejected(Exception):
    """The database will never accept this plant: a constraint or a trigger forbids it."""


class Unavailable(Exception):
    """The plant may or may not have been stored. It is safe to store it again."""


class Locked(Unavailable):
    """This plant can't be written now: its row is locked, access is denied, or a trigger fails."""


class Misconfigured(Unavailable):
    """Waiting will not help: a setting can never work, or the database lacks its table."""


class Engine(abc.ABC):
    """A database with a table of plants. One thread at a time uses it; the first use opens it."""

    description: str  # the database and its place, without a password
    creates: bool  # whether the first use may create a database if there is none

    @abc.abstractmethod
    def run(self, store: Callable[[], None]) -> None:
        """Call `store` so that waiting for this database stops no other request.

        If need be, keep other processes of the service from writing while it runs. Raises what
        `store` raises, or Unavailable if it can't get a turn or takes too long.
        """

    @abc.abstractmethod
    def insert(self, plants: Sequence[Plant], lock_limit: int) -> Mapping[int, Plant]:
        """Store the plants whose id is new, all or none; return the stored plant for each id.

        The plants are sorted by id, and no two have the same id. Those that are new and those that
        equal the stored ones are written, and are durable when this returns.

        Without plants, this is a health check: read the end of the table, where the next plant
        would go, and commit a small write that is as durable as a plant's.

        Waits for a locked row for `lock_limit` milliseconds, plus the time for which a commit of
        another worker may hold it. Raises Rejected or Locked if one of the plants may be at fault,
        and Unavailable otherwise.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection, if there is one."""


DIFFERENT = Conflict("id: already used by a different plant, which was not changed")
IGNORED = Rejected("the plant was not stored: a trigger keeps it out")


class Entry:
    """An entry of the queue: a plant, or a health check. The writer settles it."""

    def __init__(self, plant: Plant | None) -> None:
        self.plant = plant
        self.is_settled = False  # whether its outcome is known
        self.failure: Exception | None = None  # the outcome: why it failed, or None for a success
        self.done = threading.Event()  # set once its whole batch is settled

    def settle(self, failure: Exception | None) -> None:
        """Set the outcome."""
        # In this order: a request that gives up may be reading both right now.
        self.failure = failure
        self.is_settled = True


class Storage:
    """The plants in a database. All threads of a process share it until it is closed.

    A commit takes about as long for many plants as for one. So requests put their plants into a
    queue, and one thread, the writer, stores everything that is queued as one batch. Under gevent,
    the writer is a greenlet, and run() of the engine decides where it waits for the database.
    """

    def __init__(self, engine: Engine) -> None:
        """Keep the engine for later: nothing is opened and no thread begins before start()."""
        self.engine = engine
        # The first entry is a health check, so that each worker opens the file at its start.
        # Otherwise an idle worker might open it only after someone has replaced it, and accept the
        # other file.
        self._queue = deque([Entry(None)])
        self._batch: list[Entry] = []
        self._wake_up = threading.Event()  # set when there is something to do for the writer
        self._wake_up.set()
        self._is_closed = False
        # Until this time, by time.monotonic(), the last write proves that plants can be stored.
        self._proven_until = 0.0
        self._writer: threading.Thread | None = None
        self._start_lock = threading.Lock()

    def start(self) -> None:
        """Start the writer, which opens the database. Later calls do nothing.

        A thread does not survive a fork, so call this in the process that serves the requests. If
        nobody does, the first request does.
        """
        with self._start_lock:
            if self._writer is None:
                # Under gevent, Python 3.14 gives the whole process the name of this thread. An
                # operator looks for gunicorn.
                writer = threading.Thread(target=self._write, name="gunicorn", daemon=True)
                writer.start()
                self._writer = writer

    def add(self, plant: Plant) -> None:
        """Store `plant` durably, unless it already is. Raises Conflict, Rejected or Unavailable."""
        self._wait_for(Entry(plant), ADD_LIMIT)

    def check(self, limit: float) -> None:
        """Raise Rejected or Unavailable if no plant can be stored, or after `limit` seconds."""
        # Anybody may ask, and each write costs a sync. So a write within the last second is enough.
        if time.monotonic() > self._proven_until:
            self._wait_for(Entry(None), limit)

    def close(self) -> None:
        """Store what is queued, and close the connection for good."""
        self._is_closed = True
        self._wake_up.set()
        if self._writer:
            self._writer.join(5)  # seconds; a database that hangs must not keep the process alive

    def pending(self) -> int:
        """Return how many requests wait in the queue."""
        return len(self._queue)

    def _wait_for(self, entry: Entry, limit: float) -> None:
        """Queue `entry` and wait until the writer has set its outcome; raise its failure."""
        if self._is_closed:  # The writer has ended, or will soon.
            raise Unavailable("the storage is closed")
        if self._writer is None:
            self.start()
        self._queue.append(entry)
        self._wake_up.set()
        if not entry.done.wait(limit):
            # Withdraw it. If it is no longer in the queue, the writer is storing it.
            with contextlib.suppress(ValueError):
                self._queue.remove(entry)
        if not entry.is_settled:
            raise Unavailable("the storage is busy or hangs")
        if entry.failure:
            # Raise a copy: the batch shares one exception, and every raise lengthens its traceback.
            raise copy.copy(entry.failure) from entry.failure

    def _write(self) -> None:
        """Be the writer: store one batch after the other, and wake the requests that wait for it.

        Whatever is raised fails a batch. It never ends the writer.
        """
        while not self._is_closed or self._queue:
            self._wake_up.wait()
            self._wake_up.clear()
            while self._queue:
                try:
                    self.engine.run(lambda: self._store(self._take()))
                except Exception as error:
                    # Drop the traceback of an Unavailable: its frames hold the whole batch in
                    # memory. Any other error is a bug, and the log needs its traceback.
                    self._fail(copy.copy(error) if isinstance(error, Unavailable) else error)
                for entry in self._batch:
                    entry.done.set()
                self._batch = []  # Keep nothing of it in memory until the next one.
        with contextlib.suppress(Unavailable):
            self.engine.run(self.engine.close)

    def _take(self) -> Sequence[Entry]:
        """Move entries from the queue into the batch, and return it."""
        # Requests that give up take their entries out, so the queue may become empty at any time.
        with contextlib.suppress(IndexError):
            while len(self._batch) < BATCH_LIMIT:
                self._batch.append(self._queue.popleft())
        return self._batch

    def _store(self, entries: Sequence[Entry], lock_limit: int = LOCK_LIMIT) -> None:
        """Store entries as one batch. If one plant may be at fault, store each half alone."""
        # Reversed, so that of several plants with one id the first one wins.
        plants = {entry.plant.id: entry.plant for entry in reversed(entries) if entry.plant}
        try:
            # Sorted, because two batches that lock the same rows in different orders can deadlock.
            stored = self.engine.insert(sorted(plants.values()), lock_limit)
        except (Locked, Rejected) as error:
            middle = len(entries) // 2
            if middle and plants:
                self._store(entries[:middle], PART_LOCK_LIMIT)
                self._store(entries[middle:], PART_LOCK_LIMIT)
            else:
                for entry in entries:
                    entry.settle(copy.copy(error))
            return
        # If every plant is a conflict, maybe nothing was written, and that proves nothing.
        has_written = not plants or any(stored.get(each) == plants[each] for each in plants)
        if has_written:
            self._proven_until = time.monotonic() + 1
        unproven = []
        for entry in entries:
            if entry.plant is None:
                was_written = has_written
            elif (found := stored.get(entry.plant.id)) == entry.plant:
                # insert() got only the first plant of each id. If that was a different plant,
                # this one was not written.
                was_written = entry.plant == plants[entry.plant.id]
            else:
                entry.settle(DIFFERENT if found else IGNORED)
                continue
            if was_written:
                entry.settle(None)
            else:
                unproven.append(entry)
        # A success promises a synced write, so make one for those that have none yet: health checks
        # in a batch that stored no plant, and plants that insert() did not get.
        if unproven:
            self._store(unproven, lock_limit)

    def _fail(self, error: Exception) -> None:
        """Let the batch fail, except for plants whose outcome is already known."""
        self._proven_until = 0.0
        # If run() failed before the batch was taken from the queue, fail what would be in it now.
        for entry in self._batch or self._take():
            if not entry.is_settled:
                entry.settle(error)
