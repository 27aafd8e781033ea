"""The group commit, over an engine that waits, fails and counts as it is told.

No plant that was answered for may be missing, and no request may wait for ever.
"""

import contextlib
import itertools
import random
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from schemas import Plant
from storage import Conflict, Engine, RowLocked, StartRefused, Storage, Unavailable
from tests.support.server import PATIENCE, wait_until


class MemoryEngine(Engine):
    """An engine in memory. Each write waits for `go`, and fails with `failure` if there is one."""

    def __init__(self) -> None:
        self.obstacle, self.identity = "", ""
        self.table: dict[int, Plant] = {}
        self.batches: list[list[Plant]] = []
        self.go = threading.Event()
        self.go.set()
        self.is_writing = threading.Event()
        self.is_closed = threading.Event()
        self.failure: Exception | None = None

    def insert(self, plants: Sequence[Plant]) -> tuple[int, Mapping[int, Plant]]:
        self.is_writing.set()
        assert self.go.wait(PATIENCE)
        if self.failure:
            raise self.failure
        for name, error in (("poison", ValueError("poison")), ("locked", RowLocked("locked"))):
            if any(plant.name == name for plant in plants):
                raise error
        self.batches.append(list(plants))
        before = len(self.table)
        for plant in plants:
            self.table.setdefault(plant.id, plant)
        return len(self.table) - before, {plant.id: self.table[plant.id] for plant in plants}

    def rows(self) -> Iterator[Plant]:
        yield from sorted(self.table.values())

    def close(self) -> None:
        self.is_closed.set()


@pytest.fixture
def engine() -> MemoryEngine:
    """An engine that does not wait."""
    return MemoryEngine()


@pytest.fixture
def start(engine: MemoryEngine) -> Iterator[Callable[..., Storage]]:
    """Makes storages over the engine."""
    with contextlib.ExitStack() as storages:

        def start(**options: float) -> Storage:
            storage = Storage(engine, **{"wait_limit": PATIENCE, **options})
            return storages.enter_context(contextlib.closing(storage))

        yield start
        engine.go.set()


@pytest.fixture
def storage(start: Callable[..., Storage]) -> Storage:
    """A storage that waits long."""
    return start()


def plants(*ids: int) -> list[Plant]:
    """Some plants."""
    return [Plant(number, f"plant {number}") for number in ids]


Outcomes = list[Exception | None]


@contextlib.contextmanager
def writing_and_waiting(
    storage: Storage, engine: MemoryEngine, first: Plant, others: Sequence[Plant]
) -> Iterator[tuple[Future[Outcomes], Future[Outcomes]]]:
    """The engine is writing one plant while the others are in the queue; then it goes on."""
    are_queued = threading.Event()

    def queued() -> Iterator[Plant]:
        yield from others
        are_queued.set()  # add_all has taken them all by then

    engine.go.clear()
    engine.is_writing.clear()
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(storage.add_all, [first])
        assert engine.is_writing.wait(PATIENCE)
        waiting = threads.submit(storage.add_all, queued())  # type: ignore[arg-type]
        assert are_queued.wait(PATIENCE)
        try:
            yield writing, waiting
        finally:
            engine.go.set()


def test_what_comes_during_a_commit_is_the_next_batch(storage, engine):
    """It is written as one, sorted by id."""
    with writing_and_waiting(storage, engine, *plants(5), plants(9, 3, 7, 1)) as (first, others):
        engine.go.set()
        assert first.result(PATIENCE) == [None]
        assert others.result(PATIENCE) == [None] * 4
    assert engine.batches == [plants(5), plants(1, 3, 7, 9)]
    assert storage.inserted == 5


def test_a_batch_has_so_many_plants_at_most(monkeypatch, storage, engine):
    """What is beyond MAX_BATCH is in the next."""
    monkeypatch.setattr("storage.MAX_BATCH", 2)
    with writing_and_waiting(storage, engine, *plants(1), plants(2, 3, 4, 5, 6)):
        pass
    assert engine.batches == [plants(1), plants(2, 3), plants(4, 5), plants(6)]


def test_each_in_a_batch_gets_an_outcome_of_its_own(storage, engine):
    """Duplicates, conflicts, good plants, and some that fail the whole batch they are in."""
    storage.add(Plant(1, "one"))
    batch = [
        Plant(1, "one"),
        Plant(1, "another one"),
        Plant(2, "two"),
        Plant(2, "two"),
        Plant(2, "two", "tagged"),
        Plant(3, "poison"),
        Plant(4, "four"),
        Plant(5, "locked"),
        Plant(6, "six"),
    ]
    with writing_and_waiting(storage, engine, Plant(0, "zero"), batch) as (_, others):
        pass
    none = type(None)
    assert [type(error) for error in others.result(PATIENCE)] == [
        none, Conflict, none, none, Conflict, ValueError, none, RowLocked, none,
    ]  # fmt: skip
    assert [plant.name for plant in engine.rows()] == ["zero", "one", "two", "four", "six"]


@pytest.mark.parametrize("failure", [Unavailable("disk full"), StartRefused("gone")])
def test_a_failing_engine_fails_its_batch_and_no_other(storage, engine, failure):
    """All of the batch are told; those who come later are served by the next."""
    with writing_and_waiting(storage, engine, *plants(1), plants(2, 3)) as (first, others):
        engine.failure = failure
    assert first.result(PATIENCE) == [failure]
    assert others.result(PATIENCE) == [failure] * 2
    engine.failure = None
    storage.add(Plant(4, "four"))
    assert list(engine.rows()) == [Plant(4, "four")]


def test_a_request_that_gave_up_is_left_out_of_its_batch(start, engine):
    """Its plant was not stored, and sending it again later is a success like any other."""
    storage = start(wait_limit=0.05)
    engine.obstacle = "the disk is asleep"
    with writing_and_waiting(storage, engine, *plants(1), plants(2)) as (first, others):
        for future in (first, others):
            (error,) = future.result(PATIENCE)
            assert isinstance(error, Unavailable)
            assert "the disk is asleep" in str(error)
        engine.go.set()
        wait_until(lambda: engine.batches == [plants(1)])
    assert wait_until(lambda: stores(storage, *plants(3)))
    assert list(engine.rows()) == plants(1, 3)
    assert wait_until(lambda: stores(storage, *plants(2)))


def stores(storage: Storage, plant: Plant) -> bool:
    """Whether a plant is stored within the limit, which a busy machine may not keep."""
    with contextlib.suppress(Unavailable):
        storage.add(plant)
        return True
    return False


def test_every_request_gets_its_answer_whatever_fails():
    """Many threads, waits that run out all the time, writes that fail at random, and closing."""
    chance = random.Random(7)
    rounds, answered = 150, []

    class FailingEngine(MemoryEngine):
        def insert(self, plants: Sequence[Plant]) -> tuple[int, Mapping[int, Plant]]:
            if chance.random() < 0.1:
                raise Unavailable("at random")
            return super().insert(plants)

    engine = FailingEngine()
    storage = Storage(engine, wait_limit=0.0005)

    def work(first: int) -> None:
        for number in range(first, first + rounds):
            if number % 50 == 0:
                storage.close()
            with contextlib.suppress(Unavailable):
                storage.add(Plant(number, "n"))
                answered.append(number)

    with ThreadPoolExecutor(24) as threads:
        for future in [threads.submit(work, rounds * number) for number in range(24)]:
            future.result(PATIENCE)
    storage.close()
    assert answered and engine.table.keys() >= set(answered)


def test_what_was_written_is_not_kept_in_memory():
    """Not even until the next batch: one of large plants may be hundreds of megabytes."""

    class Text(str):
        """A string that can be observed."""

    class ForgetfulEngine(MemoryEngine):
        def insert(self, plants: Sequence[Plant]) -> tuple[int, Mapping[int, Plant]]:
            return len(plants), {}

    with contextlib.closing(Storage(ForgetfulEngine())) as storage:
        name = Text("n")
        reference = weakref.ref(name)
        storage.add(Plant(1, name))
        del name
        wait_until(lambda: reference() is None)


def test_a_health_check_ends_in_time_though_the_storage_hangs(storage, engine, monkeypatch):
    """Nothing ends the wait for a disk that hangs, so the check does not wait for it."""
    monkeypatch.setattr("storage.CHECK_LIMIT", 0.05)
    engine.go.clear()
    with pytest.raises(Unavailable, match=r"gave up after 0\.05 s: the storage does not answer"):
        storage.check()


def test_a_health_check_is_part_of_a_batch(storage, engine):
    """It fails as the plants beside it fail, and stores nothing."""
    engine.failure = Unavailable("disk full")
    with pytest.raises(Unavailable, match="disk full"):
        storage.check()
    engine.failure = None
    storage.check()
    assert engine.table == {}


def test_a_plant_that_is_deleted_at_the_same_time_is_not_answered_for():
    """It was there when it should have been stored, and not any more when it was compared."""

    class DeletingEngine(MemoryEngine):
        def insert(self, plants: Sequence[Plant]) -> tuple[int, Mapping[int, Plant]]:
            return 0, {}

    with (
        contextlib.closing(Storage(DeletingEngine())) as storage,
        pytest.raises(Unavailable, match="deleted"),
    ):
        storage.add(Plant(7, "seven"))


def test_closing_ends_in_time_though_a_write_hangs(start, engine):
    """The connection is closed when the write has ended, and a later use opens another."""
    storage = start(wait_limit=0.1)
    with writing_and_waiting(storage, engine, *plants(1), []):
        storage.close()
        assert not engine.is_closed.is_set()
    assert engine.is_closed.wait(PATIENCE)
    assert wait_until(lambda: stores(storage, *plants(2)))
    assert list(engine.rows()) == plants(1, 2)


def test_a_plant_that_comes_after_a_close_that_hangs_waits_for_its_write(start, engine):
    """Two threads that write at the same time would confuse their batches."""
    storage = start(wait_limit=0.1)
    with writing_and_waiting(storage, engine, *plants(1), []):
        storage.close()
        engine.is_writing.clear()
        assert not stores(storage, *plants(2))
        assert not engine.is_writing.is_set()
    assert wait_until(lambda: stores(storage, *plants(2)))
    assert list(engine.rows()) == plants(1, 2)


def test_an_error_that_requests_share_keeps_none_of_them_in_memory(storage, engine):
    """Its traceback does not grow from one to the next."""
    engine.failure = Unavailable("disk full")
    for _ in range(20):
        with pytest.raises(Unavailable, match="disk full"):
            storage.add(*plants(1))
    assert len(list(traceback.walk_tb(engine.failure.__traceback__))) < 20


def test_closing_writes_what_is_in_the_queue_first(storage, engine):
    """What was sent before the end is answered."""
    with writing_and_waiting(storage, engine, *plants(1), plants(2, 3)) as (_, others):
        with ThreadPoolExecutor() as threads:
            closing = threads.submit(storage.close)
            engine.go.set()
            closing.result(PATIENCE)
        assert others.result(PATIENCE) == [None, None]
    assert engine.is_closed.is_set()
    assert list(itertools.chain(*engine.batches)) == plants(1, 2, 3)
