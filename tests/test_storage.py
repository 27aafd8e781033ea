"""The group commit, over an engine in memory that does what it is told; then on a database.

No plant that was answered for may be missing, and no request may wait for ever.
"""

import contextlib
import copy
import gc
import operator
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import NoReturn

import pytest

from plant import Plant
from start import get_storage
from storage import ADD_LIMIT, BATCH_LIMIT, Conflict, Engine, Locked, Rejected, Storage, Unavailable
from tests.support.server import PATIENCE, ROOT, wait_until
from tests.support.storage import queue_up, run_in_processes

ZERO = Plant(0, "zero")
FAULTS = {"rejected": Rejected("against a constraint"), "locked": Locked("its row is locked")}
FULL = Unavailable("disk full")


def raising(error: Exception) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise copy.copy(error)  # as its traceback would keep what raises it in memory

    return fail


class MemoryEngine(Engine):
    """An engine that a test can let wait or fail, also by the names of plants."""

    description = "memory"

    def __init__(self) -> None:
        self.table: dict[int, Plant] = {}
        self.inserts: list[list[Plant]] = []  # what each was given
        self.lock_limits: list[int] = []  # as were these
        self.lock, self.is_closed = threading.Lock(), False
        self.before_lock = self.before_plants = self.before_check = lambda: None

    def locked(self) -> contextlib.AbstractContextManager[object]:
        self.before_lock()
        return self.lock

    def insert(self, plants: Sequence[Plant], lock_limit: int) -> Mapping[int, Plant]:
        self.inserts.append(list(plants))
        self.lock_limits.append(lock_limit)
        (self.before_plants if plants else self.before_check)()
        for plant in plants:
            if plant.name in FAULTS:
                raising(FAULTS[plant.name])()
        self.table = {plant.id: plant for plant in plants if plant.name != "ignored"} | self.table
        return self.table

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands still, in the place of the module time."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("storage.time", clock)
    return clock


@pytest.fixture
def memory(
    engine: MemoryEngine, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storage]:
    """A storage on that engine, which it has opened some time ago."""
    monkeypatch.setattr("storage.ADD_LIMIT", PATIENCE)
    with contextlib.closing(Storage(engine, operator.call)) as storage:
        wait_until(lambda: engine.inserts == [[]])
        with engine.lock:
            engine.inserts.clear()
            clock.now += 2
        yield storage


def add_together(storage: Storage, engine: MemoryEngine, *plants: Plant) -> list[Future[None]]:
    """Let requests add plants, which wait for the same lock; return what comes of each."""
    with engine.lock:
        return [queue_up(storage.add, plant) for plant in plants]


def kinds(requests: list[Future[None]]) -> list[type | None]:
    """What each request has raised, in the end."""
    return [(error := each.exception(PATIENCE)) and type(error) for each in requests]


def plants(*ids: int, name: str = "n") -> list[Plant]:
    return [Plant(number, name) for number in ids]


def test_the_database_is_open_before_the_first_request(engine):
    """The writer begins with a health check; else a worker that sleeps would open it too late."""
    with contextlib.closing(Storage(engine, operator.call)):
        wait_until(lambda: engine.inserts == [[]])


def test_limits_are_those_that_the_pages_name():
    assert (ADD_LIMIT, BATCH_LIMIT) == (10, 200)  # seconds, plants


def test_requests_that_wait_for_the_same_lock_share_batches(memory, engine, monkeypatch):
    """Of some plants at most, as others wait; sorted, and with each id once."""
    monkeypatch.setattr("storage.BATCH_LIMIT", 3)
    requests = add_together(memory, engine, *plants(9, 3, 9, 7, 1, 5, 2))
    assert kinds(requests) == [None] * 7
    assert engine.inserts == [plants(3, 9), plants(1, 5, 7), plants(2)]


def test_each_in_a_batch_gets_an_outcome_of_its_own(memory, engine):
    """If one may be at fault, each half is stored alone, and hardly waits for a lock.

    What does not come back was not stored.
    """
    memory.add(Plant(1, "one"))
    batch = {
        Plant(1, "one"): None,
        Plant(1, "another one"): Conflict,
        Plant(2, "two"): None,
        Plant(2, "two", "tagged"): Conflict,
        Plant(4, "four"): None,
        Plant(6, "ignored"): Rejected,
    }
    assert kinds(add_together(memory, engine, *batch, ZERO, ZERO)) == [*batch.values(), None, None]
    at_fault = {Plant(3, "rejected"): Rejected, Plant(5, "locked"): Locked}
    for fault, kind in at_fault.items():
        engine.inserts, engine.lock_limits = [], []
        requests = add_together(memory, engine, fault, *batch, *plants(7))
        assert kinds(requests) == [kind, *batch.values(), None]
        assert [len(each) for each in engine.inserts][:3] == [6, 3, 2]
        assert engine.lock_limits == [100] + [1] * (len(engine.inserts) - 1)
    assert engine.table.keys() == {0, 1, 2, 4, 7}


@pytest.mark.parametrize("failure", [FULL, ValueError("a bug")])
def test_what_no_plant_is_at_fault_for_fails_a_batch_and_no_other(memory, engine, failure):
    """Each request raises an exception of its own, as the traceback of one would keep all."""
    others: list[Future[None]] = []

    def fail_the_first() -> None:
        if not others:
            others.append(queue_up(memory.add, *plants(4)))
            raising(failure)()

    engine.before_plants = fail_the_first
    errors = [each.exception(PATIENCE) for each in add_together(memory, engine, *plants(1, 2, 3))]
    assert {(type(error), str(error)) for error in errors} == {(type(failure), str(failure))}
    assert len(set(errors)) == 3
    assert kinds(others) == [None]
    assert engine.inserts == [plants(1, 2, 3), plants(4)]  # none is tried alone
    memory.add(*plants(1))


def test_the_writer_goes_on_where_no_thread_can_be_started_or_the_lock_not_be_had(memory, engine):
    """What is queued fails at once, and is not tried again."""
    engine.before_lock = raising(RuntimeError("can't start new thread"))
    for number in range(3):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            memory.add(*plants(number))
    engine.before_lock = lambda: None
    memory.add(*plants(7))
    assert engine.table.keys() == {7}


def test_who_gives_up_leaves_the_queue(memory, engine, monkeypatch):
    """It is not stored later. Nothing ends the wait for a disk that hangs, so it is let alone."""
    disk = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr("storage.ADD_LIMIT", 0.05)
        for waits_for in (engine.lock, contextlib.nullcontext()):
            with waits_for:
                for use in (lambda: memory.check(0.05), lambda: memory.add(ZERO)):
                    with pytest.raises(Unavailable, match="busy or hangs") as failure:
                        use()
                    assert failure.value.__cause__.__traceback__ is None  # it does not grow
            engine.before_check = disk.wait
    assert engine.inserts == [[]]
    disk.set()
    memory.add(*plants(1))
    assert engine.inserts == [[], plants(1)]


@pytest.mark.parametrize("failure", [None, FULL, *FAULTS.values()])
@pytest.mark.parametrize("name", ["n", *FAULTS])
def test_a_health_check_is_well_if_plants_can_be_stored(memory, engine, clock, name, failure):
    """One that is stored or found proves it; where all are at fault, a write of its own decides."""
    fault = FAULTS.get(name)
    for batch, writes in (plants(1, name=name), bool(fault)), ([], True):
        clock.now += 2
        engine.inserts.clear()
        engine.before_check = raising(failure) if failure else lambda: None
        with engine.lock:
            requests = [queue_up(memory.add, plant) for plant in batch]
            checks = [queue_up(memory.check, PATIENCE) for _ in range(5)]
        assert kinds(requests) == [fault and type(fault)] * len(batch)
        assert kinds(checks) == [failure and type(failure) if writes else None] * 5
        assert engine.inserts[: len(batch)] == [plants(1, name=name)] * len(batch)
        assert writes <= engine.inserts.count([]) <= 2 * writes  # two, where halves are stored


def test_a_write_is_proof_for_a_second_unless_a_batch_fails(memory, engine, clock):
    """Anybody may ask, and each write is a sync."""
    memory.add(ZERO)
    for seconds, writes in (0, 0), (0.9, 0), (0.2, 1), (0.9, 1):
        clock.now += seconds
        memory.check(PATIENCE)
        assert engine.inserts.count([]) == writes
    engine.before_plants = engine.before_check = raising(FULL)
    for use in (lambda: memory.add(ZERO), lambda: memory.check(PATIENCE)):
        with pytest.raises(Unavailable, match="disk full"):
            use()


def test_closing_stores_what_is_in_the_queue(memory, engine):
    with engine.lock:
        requests = [queue_up(memory.add, plant) for plant in plants(1, 2)]
        closing = threading.Thread(target=memory.close)
        closing.start()
        assert not engine.is_closed
    assert kinds(requests) == [None, None]
    closing.join(PATIENCE)
    assert engine.is_closed and engine.table.keys() == {1, 2}


def test_nothing_of_a_batch_stays_in_memory(memory, engine):
    class Name(str):
        """A text that can be seen to be gone."""

    names = [Name(each) for each in ("stored", "ignored", "rejected")]
    references = [weakref.ref(name) for name in names]
    assert len(kinds(add_together(memory, engine, *map(Plant, range(1, 4), names)))) == 3
    names.clear()
    engine.inserts.clear()
    engine.table.clear()
    memory.add(ZERO)
    wait_until(lambda: gc.collect() is None or not any(each() for each in references))


def test_many_threads_of_many_processes_store_all(url, stored):
    """They start at once, and one makes the table. Of the plants with an id, one gets a success."""

    def work(process: int) -> None:
        name, told = f"{process}", set()

        def add(thread: int) -> None:
            for number in range(20):
                storage.add(Plant((process * 8 + thread) * 20 + number, name))
                try:
                    storage.add(Plant(1000 + number, name))
                    told.add((1000 + number, True))
                except Conflict:
                    told.add((1000 + number, False))

        with (
            contextlib.closing(get_storage(url)) as storage,
            ThreadPoolExecutor(8) as threads,
        ):
            list(threads.map(add, range(8)))
        assert told == {(number, owner == name) for number, owner, _ in stored()[-20:]}

    run_in_processes(*[partial(work, number) for number in range(4)])
    assert stored()[:-20] == [(n, str(n // 160), None) for n in range(640)]


ADD_FROM_GREENLETS = """
from gevent import monkey
monkey.patch_all()
import sys, time, gevent, start
from plant import Plant

def add(number):
    end = time.monotonic() + number / 20
    while time.monotonic() < end:  # rounds of the event loop
        gevent.sleep(0)
    storage.add(Plant(number, "n"))

start.GATHER_LIMIT = 30
storage = start.get_storage(sys.argv[1])
storage.check(30)
batches, insert = [], storage.engine.insert
storage.engine.insert = lambda *given: batches.append(len(given[0])) or insert(*given)
gevent.joinall([gevent.spawn(add, number) for number in range(3)], raise_error=True)
storage.close()
print(batches)
"""


def test_requests_that_have_arrived_share_a_batch(url):
    """In a process that gevent has patched, also those that need some more rounds of its loop."""
    command = [sys.executable, "-c", ADD_FROM_GREENLETS, url]
    assert subprocess.check_output(command, cwd=ROOT, text=True) == "[3]\n"
