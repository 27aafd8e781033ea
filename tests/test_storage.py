"""The group commit: over an engine in memory that a test controls, and on a real database."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import gevent
import pytest

from engines.postgresql import PostgreSQLEngine
from engines.sqlite import SQLiteEngine
from plant import Plant
from start import get_storage
from storage import BATCH_LIMIT, Conflict, Engine, Locked, Rejected, Storage, Unavailable
from tests.support.server import PATIENCE, wait_until
from tests.support.storage import queue_up, run_in_processes

ZERO = Plant(0, "zero")
FAULTS = {"rejected": Rejected("against a constraint"), "locked": Locked("its row is locked")}
FULL = Unavailable("disk full")


class MemoryEngine(Engine):
    """An engine that a test can make wait or fail, for example by the names of plants."""

    description = "memory"
    creates = False

    def __init__(self) -> None:
        self.table: dict[int, Plant] = {}
        self.inserts: list[list[Plant]] = []  # the plants of each insert
        self.lock_limits: list[int] = []  # the limit of each insert
        self.lock = threading.Lock()
        self.before_batch = self.before_plants = self.before_check = lambda: None
        self.now = 100.0  # seconds

    def run(self, store: Callable[[], None]) -> None:
        with self.lock:
            self.before_batch()
            store()

    def insert(self, plants: Sequence[Plant], lock_limit: int) -> Mapping[int, Plant]:
        self.inserts.append(list(plants))
        self.lock_limits.append(lock_limit)
        (self.before_plants if plants else self.before_check)()
        for plant in plants:
            if plant.name in FAULTS:
                raise FAULTS[plant.name]
        self.table = {plant.id: plant for plant in plants if plant.name != "ignored"} | self.table
        return self.table

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine()


@pytest.fixture
def memory(engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A storage on that engine that was opened two seconds ago; the test sets its clock."""
    monkeypatch.setattr("storage.time", SimpleNamespace(monotonic=lambda: engine.now))
    monkeypatch.setattr("storage.ADD_LIMIT", PATIENCE)
    with contextlib.closing(Storage(engine)) as storage:
        storage.start()
        wait_until(lambda: engine.inserts == [[]])
        with engine.lock:
            engine.inserts.clear()
            engine.now += 2
        yield storage


def queue_together(storage: Storage, *entries: Plant | None) -> list[Future]:
    """Queue plants, and None for a health check, behind one lock; return their outcomes."""
    with storage.engine.lock:
        return [
            queue_up(storage.add, entry) if entry else queue_up(storage.check, PATIENCE)
            for entry in entries
        ]


def kinds(requests: list[Future]) -> list[type | None]:
    """Wait until all requests have ended. Return the type of each one's exception, or None."""
    return [(error := each.exception(PATIENCE)) and type(error) for each in requests]


def plants(*ids: int, name: str = "n") -> list[Plant]:
    return [Plant(number, name) for number in ids]


def test_requests_that_wait_for_the_lock_share_batches(memory, engine, monkeypatch):
    """A batch has at most 200 plants, here 3. They are sorted, and each id occurs once."""
    assert BATCH_LIMIT == 200
    monkeypatch.setattr("storage.BATCH_LIMIT", 3)
    requests = queue_together(memory, *plants(9, 3, 9, 7, 1, 5, 2))
    assert kinds(requests) == [None] * 7
    assert engine.inserts == [plants(3, 9), plants(1, 5, 7), plants(2)]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_plant_of_a_batch_gets_an_outcome_of_its_own(memory, engine, fault):
    """If one plant may be at fault, each half is stored alone, and waits 1 ms for a locked row."""
    memory.add(Plant(1, "one"))
    batch = [
        (Plant(3, fault), type(FAULTS[fault])),
        (Plant(1, "one"), None),
        (Plant(1, "another one"), Conflict),
        (Plant(2, "two"), None),
        (Plant(2, "two"), None),
        (Plant(2, "two", "tagged"), Conflict),
        (Plant(4, "ignored"), Rejected),  # The engine does not return this plant.
    ]
    requests = queue_together(memory, *[plant for plant, _ in batch])
    assert kinds(requests) == [kind for _, kind in batch]
    # The frames of a traceback would hold the whole batch in memory.
    assert requests[0].exception().__cause__.__traceback__ is None
    assert [len(each) for each in engine.inserts[1:]] == [4, 2, 1, 1, 2]
    assert engine.lock_limits[2:] == [100, 1, 1, 1, 1]
    assert engine.table.keys() == {1, 2}


@pytest.mark.parametrize("failure", [FULL, RuntimeError("can't start new thread")])
@pytest.mark.parametrize("place", ["before_batch", "before_plants"])
def test_a_failure_that_is_no_plants_fault_fails_its_batch_and_no_other(
    memory, engine, place, failure
):
    """Each request raises a copy: the traceback of a shared error would grow with each raise."""
    others: list[Future] = []

    def fail_once() -> None:
        setattr(engine, place, lambda: None)
        others.append(queue_up(memory.add, *plants(4)))
        raise failure

    setattr(engine, place, fail_once)
    requests = queue_together(memory, *plants(1, 2, 3))
    errors = [each.exception(PATIENCE) for each in requests]
    assert {(type(error), str(error)) for error in errors} == {(type(failure), str(failure))}
    assert len(set(errors)) == 3
    # The frames of a traceback would hold the whole batch in memory. But an error that is not
    # Unavailable is a bug, and the log needs its traceback.
    traceback = errors[0].__cause__.__traceback__
    assert (traceback is None) == isinstance(failure, Unavailable)
    # If the batch was not taken from the queue yet, everything that is queued fails.
    is_taken = place == "before_plants"
    assert kinds(others) == [None if is_taken else type(failure)]
    memory.add(*plants(5))  # The inserts below show that no plant was tried alone, or once more.
    assert engine.inserts == [plants(1, 2, 3), plants(4), plants(5)][0 if is_taken else 2 :]


def test_a_request_that_gives_up_leaves_the_queue(memory, engine, monkeypatch):
    """Its plant is not stored later, even if the writer waits for a disk that hangs meanwhile."""
    disk = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr("storage.ADD_LIMIT", 0.05)
        for waits_for in (engine.lock, contextlib.nullcontext()):
            with waits_for:
                for use in (lambda: memory.check(0.05), lambda: memory.add(ZERO)):
                    with pytest.raises(Unavailable, match="busy or hangs"):
                        use()
                engine.before_check = disk.wait
    assert engine.inserts == [[]]
    disk.set()
    memory.add(*plants(1))
    assert engine.inserts == [[], plants(1)]


@pytest.mark.parametrize("failure", [None, FULL, *FAULTS.values()])
@pytest.mark.parametrize("name", ["n", *FAULTS, None])
def test_a_health_check_succeeds_if_plants_can_be_stored(memory, engine, name, failure):
    """A plant that is stored proves it. If all plants are at fault, the check makes a write."""
    batch, fault, writes = plants(1, name=name) if name else [], FAULTS.get(name), name != "n"
    engine.before_check = Mock(side_effect=failure)
    outcomes = kinds(queue_together(memory, *batch, *[None] * 5))
    assert outcomes[:-5] == [fault and type(fault)] * len(batch)
    assert outcomes[-5:] == [failure and type(failure) if writes else None] * 5
    assert engine.inserts[: len(batch)] == [batch] * len(batch)
    assert writes <= engine.inserts.count([]) <= 2 * writes  # Two, if halves were stored.


@pytest.mark.parametrize("failure", [None, FULL])
def test_conflicts_prove_nothing_to_a_health_check(memory, engine, failure):
    """If every plant of a batch is a conflict, nothing was written, and the check makes a write."""
    memory.add(ZERO)
    engine.now += 2
    engine.before_check = Mock(side_effect=failure)
    outcome = failure and type(failure)
    assert kinds(queue_together(memory, *plants(0, 0), None)) == [Conflict, Conflict, outcome]
    assert kinds(queue_together(memory, *plants(0))) == [Conflict]
    assert engine.inserts[1:] == [plants(0), [], plants(0)]
    engine.now += 2 if failure else 0.9
    assert kinds([queue_up(memory.check, PATIENCE)]) == [outcome]
    assert engine.inserts[4:] == [[]] * bool(failure)


def test_an_equal_plant_behind_a_conflict_is_written_on_its_own(memory, engine):
    """A batch writes only the first plant of an id. The other one's success needs its own write."""
    memory.add(ZERO)
    assert kinds(queue_together(memory, *plants(0), ZERO, *plants(1))) == [Conflict, None, None]
    assert engine.inserts[1:] == [plants(0, 1), [ZERO]]


def test_a_closed_storage_refuses_plants_at_once(engine):
    """It does not let a request wait for a writer that has ended."""
    storage = Storage(engine)
    storage.close()
    with pytest.raises(Unavailable, match="closed"):
        storage.add(ZERO)


def test_a_storage_starts_once_with_its_first_request_at_the_latest(engine):
    """A server that loads the application before it forks would lose the thread."""
    threads = threading.active_count()
    with contextlib.closing(Storage(engine)) as late, contextlib.closing(Storage(engine)) as early:
        assert threading.active_count() == threads and not engine.inserts
        for _ in range(3):
            early.start()
        assert threading.active_count() == threads + 1
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(late.add, plants(*range(8))))
    assert threading.active_count() == threads
    Storage(engine).close()  # It has not been started.


def test_a_write_proves_health_for_a_second_unless_a_batch_fails(memory, engine, monkeypatch):
    """Anybody may ask for a health check, and each write costs a sync."""
    memory.add(ZERO)
    with monkeypatch.context() as patch:
        patch.setattr("storage.ADD_LIMIT", 0)  # It does not limit a check.
        for seconds, writes in (0, 0), (0.9, 0), (0.2, 1), (0.9, 1):
            engine.now += seconds
            memory.check(PATIENCE)
            assert engine.inserts.count([]) == writes
    engine.before_plants = engine.before_check = Mock(side_effect=FULL)
    for use in (lambda: memory.add(ZERO), lambda: memory.check(PATIENCE)):
        with pytest.raises(Unavailable, match="disk full"):
            use()


def test_many_threads_of_many_processes_store_every_plant(url, stored):
    """All of them start at once, and one creates the table.

    Of different plants with one id, exactly one is stored.
    """

    def work(process: int) -> None:
        name, told = f"{process}", []

        def add(first: int) -> None:
            for number in range(20):
                storage.add(Plant(first + number, name))
                with contextlib.suppress(Conflict):
                    storage.add(Plant(1000 + number, name))
                    told.append(1000 + number)

        with contextlib.closing(get_storage(url)) as storage, ThreadPoolExecutor(8) as threads:
            storage.engine.creates = True  # as in a start
            list(threads.map(add, range(160 * process, 160 * (process + 1), 20)))
        own = [number for number, owner, _ in stored()[-20:] if owner == name]
        assert sorted(told) == sorted(own * 8)

    run_in_processes(*[partial(work, number) for number in range(4)])
    assert stored()[:-20] == [(n, str(n // 160), None) for n in range(640)]


@pytest.mark.parametrize(
    "engine", [SQLiteEngine("plants.db"), PostgreSQLEngine("postgresql:///")], ids=type
)
def test_requests_that_have_arrived_share_a_batch(monkeypatch, engine):
    """So does a request that needs some more rounds of the event loop."""
    monkeypatch.setattr("engines.GATHER_LIMIT", PATIENCE)
    engine.creates = True  # SQLite's lock file is not there.
    arrived: list[int] = []

    def arrive(rounds: int) -> None:
        for _ in range(rounds):
            # Let the thread of the pool run: without gather(), it would take the batch now.
            time.sleep(0.001)
            gevent.sleep(0)
        arrived.append(rounds)

    for rounds in 0, 50, 100:
        gevent.spawn(arrive, rounds)
    engine.run(lambda: arrived.append(-1))  # This stands for taking the batch.
    assert arrived == [0, 50, 100, -1]
