"""The group commit, driven by threads over an engine that waits, fails and counts as it is told.

No plant that was answered for may be missing, and nobody may wait for ever.
"""

import contextlib
import random
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence

import pytest

from storage import BackgroundThread, Conflict, Plant, StartRefused, Storage, Unavailable
from tests.support.server import PATIENCE, wait_until


class MemoryEngine:
    """An engine in memory. A batch waits for `go`; `turn_failures` are raised first come first."""

    def __init__(self) -> None:
        self.table: dict[int, Plant] = {}
        self.batches: list[list[Plant]] = []
        self.go = threading.Event()
        self.go.set()
        self.writing = threading.Semaphore(0)
        self.turn_free = threading.Event()
        self.turn_free.set()
        self.turn_failures: list[Exception] = []
        self.failure: Exception | None = None

    @contextlib.contextmanager
    def turn(self, timeout: float) -> Iterator[None]:
        if not self.turn_free.wait(max(timeout, 0)):
            raise Unavailable("busy")
        if self.turn_failures:
            raise self.turn_failures.pop(0)
        yield

    def insert(self, plants: Sequence[Plant]) -> tuple[int, Mapping[int, Plant]]:
        self.writing.release()
        assert self.go.wait(PATIENCE)
        if self.failure:
            raise self.failure
        if any(plant.name == "poison" for plant in plants):
            raise ValueError("poison")
        self.batches.append(list(plants))
        before = len(self.table)
        for plant in plants:
            self.table.setdefault(plant.id, plant)
        return len(self.table) - before, {plant.id: self.table[plant.id] for plant in plants}

    def rows(self) -> Iterator[Plant]:
        yield from sorted(self.table.values())

    def close(self) -> None:
        pass


class Adder(threading.Thread):
    """A thread that stores a plant and keeps what came of it."""

    def __init__(self, storage: Storage, plant: Plant) -> None:
        super().__init__(daemon=True)
        self.storage, self.plant = storage, plant
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.storage.add(self.plant)
        except BaseException as error:
            self.error = error

    def outcome(self) -> BaseException | None:
        """What add() raised, or None; fails if it never returns."""
        self.join(PATIENCE)
        assert not self.is_alive(), "a waiter was forgotten"
        return self.error


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine()


@pytest.fixture
def storage(engine: MemoryEngine) -> Storage:
    return Storage(engine, wait_limit=PATIENCE)


def plants(*ids: int) -> list[Plant]:
    return [Plant(number, f"plant {number}") for number in ids]


def pending(storage: Storage) -> int:
    return len(storage._group._open.entries)


def add_while_writing(storage: Storage, engine: MemoryEngine, added: list[Plant]) -> list[Adder]:
    """Store plants so that the first is being written while the others, in order, are pending."""
    engine.go.clear()
    while engine.writing.acquire(blocking=False):  # what was written before
        pass
    adders = [Adder(storage, added[0])]
    assert engine.writing.acquire(timeout=PATIENCE)
    for number, plant in enumerate(added[1:], 1):
        adders.append(Adder(storage, plant))
        wait_until(lambda number=number: pending(storage) == number)
    return adders


def test_what_comes_during_a_commit_is_the_next_batch(storage, engine):
    """It is written as one, sorted by id."""
    adders = add_while_writing(storage, engine, plants(5, 9, 3, 7, 1))
    engine.go.set()
    assert [adder.outcome() for adder in adders] == [None] * 5
    assert engine.batches == [plants(5), plants(1, 3, 7, 9)]


def test_what_comes_during_the_wait_for_the_turn_is_in_the_batch(storage, engine):
    """It is closed only when the turn is there."""
    engine.turn_free.clear()
    adders = [Adder(storage, plant) for plant in plants(1, 2, 3)]
    wait_until(lambda: pending(storage) == 3)
    engine.turn_free.set()
    assert [adder.outcome() for adder in adders] == [None] * 3
    assert engine.batches == [plants(1, 2, 3)]


def test_nobody_waits_for_the_next_batch(storage, engine):
    """Who was in the first has the outcome though the second can't be written."""
    first, second = add_while_writing(storage, engine, plants(1, 2))
    engine.turn_free.clear()
    engine.go.set()
    assert first.outcome() is None
    assert second.is_alive() and pending(storage) == 1
    engine.turn_free.set()
    assert second.outcome() is None


def test_each_in_a_batch_gets_an_outcome_of_its_own(storage, engine):
    """Duplicates, conflicts, a poison row and good plants in one batch."""
    storage.add(Plant(1, "one"))
    batch = [
        Plant(0, "first"),
        Plant(1, "one"),
        Plant(1, "another one"),
        Plant(2, "two"),
        Plant(2, "two"),
        Plant(2, "two", "tagged"),
        Plant(3, "poison"),
        Plant(4, "four"),
    ]
    adders = add_while_writing(storage, engine, batch)
    engine.go.set()
    outcomes = [type(adder.outcome()) for adder in adders]
    none = type(None)
    assert outcomes == [none, none, Conflict, none, none, Conflict, ValueError, none]
    assert list(engine.rows()) == [batch[0], batch[1], batch[3], batch[7]]


def test_a_failing_engine_fails_its_batch_and_no_other(storage, engine):
    """All of the batch are told; those who come later are served by the next."""
    adders = add_while_writing(storage, engine, plants(1, 2, 3))
    engine.failure = Unavailable("disk I/O error")
    engine.go.set()
    assert [str(adder.outcome()) for adder in adders] == ["disk I/O error"] * 3
    engine.failure = None
    storage.add(Plant(4, "four"))
    assert list(engine.rows()) == [Plant(4, "four")]


@pytest.mark.parametrize("failure", [StartRefused("gone"), MemoryError(), SystemExit(1)])
def test_a_turn_that_fails_fails_the_batch_and_no_other(storage, engine, failure):
    """All that wait are told; nothing of theirs is stored, and the next turn is as any other."""
    engine.turn_free.clear()
    engine.turn_failures = [failure]
    adders = [Adder(storage, plant) for plant in plants(1, 2, 3)]
    wait_until(lambda: pending(storage) == 3)
    engine.turn_free.set()
    assert [adder.outcome() for adder in adders] == [failure] * 3
    storage.add(Plant(4, "four"))
    assert list(engine.rows()) == [Plant(4, "four")]


def test_a_turn_that_does_not_come_is_waited_for_anew(storage, engine):
    """Who comes late must not fail with those who have waited for long."""
    engine.turn_free.clear()
    engine.turn_failures = [Unavailable("busy"), Unavailable("busy")]
    adders = [Adder(storage, plant) for plant in plants(1, 2, 3)]
    wait_until(lambda: pending(storage) == 3)
    engine.turn_free.set()
    assert [adder.outcome() for adder in adders] == [None] * 3
    assert engine.batches == [plants(1, 2, 3)]


def test_a_turn_that_cannot_be_had_ends_in_time_for_all(engine):
    """Each gives up at its own limit and says why; the storage works again afterwards."""
    storage = Storage(engine, wait_limit=0.1)
    engine.turn_free.clear()
    adders = [Adder(storage, plant) for plant in plants(1, 2, 3)]
    assert [str(adder.outcome()) for adder in adders] == ["busy"] * 3
    engine.turn_free.set()
    storage.add(Plant(4, "four"))
    assert list(engine.rows()) == [Plant(4, "four")]


def test_a_wait_that_runs_out_before_the_write_stores_nothing(storage, engine):
    """A plant that nobody had begun to write is withdrawn."""
    (first,) = add_while_writing(storage, engine, plants(1))
    storage._wait_limit = 0.01
    with pytest.raises(Unavailable, match=r"no answer from the storage for 0\.01 s"):
        storage.add(Plant(2, "plant 2"))
    assert pending(storage) == 0
    engine.go.set()
    assert first.outcome() is None
    storage.check()  # in the batch that was the other's
    assert list(engine.rows()) == plants(1)


def test_a_wait_that_runs_out_during_the_write_is_told_so(storage, engine):
    """Whether the plant will be stored is unknown then; sending it again is a success."""
    engine.go.clear()
    entry = storage.submit(Plant(1, "plant 1"))
    written = entry.start_batch()
    assert engine.writing.acquire(timeout=PATIENCE)
    entry.withdraw()  # too late
    assert not entry.is_stored
    engine.go.set()
    written.result(PATIENCE)
    assert entry.is_stored
    storage.add(Plant(1, "plant 1"))
    assert list(engine.rows()) == plants(1)


def test_what_is_submitted_is_written_when_somebody_starts_its_batch(storage, engine):
    """Until then it gathers company; the outcome of each is its own."""
    storage.add(Plant(1, "one"))
    taken = storage.submit(Plant(1, "another one"))
    withdrawn, new = (storage.submit(plant) for plant in plants(2, 3))
    withdrawn.withdraw()
    assert (pending(storage), len(engine.batches)) == (2, 1)
    assert not new.is_stored
    storage.add(Plant(4, "plant 4"))
    assert engine.batches[1] == [Plant(1, "another one"), *plants(3, 4)]
    assert (taken.is_stored, new.is_stored) == (False, True)
    assert new.start_batch() is taken.start_batch()  # it is written once


def test_what_is_submitted_is_not_stored_if_its_batch_fails(storage, engine):
    """Then nobody knows what became of it."""
    engine.failure = Unavailable("disk I/O error")
    entry = storage.submit(Plant(1, "one"))
    assert isinstance(entry.start_batch().exception(PATIENCE), Unavailable)
    assert not entry.is_stored


def test_nobody_is_forgotten_whatever_fails(engine):
    """Many threads, waits that run out all the time, turns and writes that fail at random."""
    storage = Storage(engine, wait_limit=PATIENCE)
    storage._wait_limit = 0.0005
    chance = random.Random(7)
    answered: list[Plant] = []
    threads, rounds = 24, 150

    def insert(rows: Sequence[Plant]) -> tuple[int, Mapping[int, Plant]]:
        if chance.random() < 0.1:
            raise Unavailable("at random")
        return MemoryEngine.insert(engine, rows)

    @contextlib.contextmanager
    def turn(timeout: float) -> Iterator[None]:
        if chance.random() < 0.1:
            raise Unavailable("at random")
        yield

    engine.insert = insert
    storage._group._turn = turn

    def work(first: int) -> None:
        for number in range(first, first + rounds):
            plant = Plant(number, "n")
            with contextlib.suppress(Unavailable):
                storage.add(plant)
                answered.append(plant)

    workers = [
        threading.Thread(target=work, args=(n * rounds,), daemon=True) for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive(), "a waiter was forgotten"
    assert pending(storage) == 0
    assert len(answered) > 0
    assert all(engine.table[plant.id] == plant for plant in answered)


def test_what_was_written_is_not_kept_in_memory():
    """Not even until the next batch: one of large plants may be hundreds of megabytes."""

    class Large:
        """Such a batch."""

    thread, large = BackgroundThread(), Large()
    reference = weakref.ref(large)
    thread.submit(id, large).result(PATIENCE)
    del large
    wait_until(lambda: reference() is None)


def test_a_look_at_the_storage_ends_in_time_though_the_storage_hangs(engine, storage):
    """Nothing ends the wait for a disk that hangs, so who looks does not wait for it."""
    storage.check()
    engine.go.clear()
    try:
        with pytest.raises(Unavailable, match="no answer"):
            storage.check()
    finally:
        engine.go.set()
    storage.check()


def test_a_look_at_the_storage_is_part_of_a_batch(storage, engine):
    """It fails as the plants beside it fail, and stores nothing."""
    engine.failure = Unavailable("disk full")
    with pytest.raises(Unavailable, match="disk full"):
        storage.check()
    engine.failure = None
    storage.check()
    assert engine.table == {}


def test_a_plant_that_is_deleted_at_the_same_moment_is_not_answered_for(storage, engine):
    """It was there when it should have been stored, and not any more when it was compared."""
    engine.insert = lambda plants: (0, {})
    with pytest.raises(Unavailable, match="deleted"):
        storage.add(Plant(7, "seven"))
