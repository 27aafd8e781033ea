"""The group commit, driven by threads over an engine that waits, fails and counts as it is told.

No plant that was answered for may be missing, and nobody may wait for ever.
"""

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence

import pytest

from storage import Conflict, GroupCommit, Plant, Storage, Unavailable
from tests.server import PATIENCE, wait_until


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
        self.turn_wanted = threading.Semaphore(0)
        self.turn_failures: list[Exception] = []
        self.failure: Exception | None = None

    @contextlib.contextmanager
    def turn(self, timeout: float) -> Iterator[None]:
        self.turn_wanted.release()
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
    return len(storage._group._pending)


def add_while_writing(storage: Storage, engine: MemoryEngine, added: list[Plant]) -> list[Adder]:
    """Store plants so that the first is being written while the others, in order, are pending."""
    engine.go.clear()
    adders = [Adder(storage, added[0])]
    assert engine.writing.acquire(timeout=PATIENCE)
    for number, plant in enumerate(added[1:], 1):
        adders.append(Adder(storage, plant))
        wait_until(lambda number=number: pending(storage) == number)
    return adders


def test_what_comes_during_a_commit_is_the_next_batch(storage, engine):
    """The leader writes what is pending once, sorted by id, and the next leader all the others."""
    adders = add_while_writing(storage, engine, plants(5, 9, 3, 7, 1))
    engine.go.set()
    assert [adder.outcome() for adder in adders] == [None] * 5
    assert engine.batches == [plants(5), plants(1, 3, 7, 9)]


def test_what_comes_while_the_leader_waits_for_its_turn_is_in_its_batch(storage, engine):
    """The pending list is drained only when the turn is there."""
    engine.turn_free.clear()
    adders = [Adder(storage, plant) for plant in plants(1, 2, 3)]
    wait_until(lambda: pending(storage) == 3)
    engine.turn_free.set()
    assert [adder.outcome() for adder in adders] == [None] * 3
    assert engine.batches == [plants(1, 2, 3)]


def test_a_leader_goes_when_its_own_batch_is_written(storage, engine):
    """The next batch is the work of one of those who wait for it."""
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
        Plant(0, "leader"),
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


@pytest.mark.parametrize("failure", [Unavailable("no turn"), MemoryError(), SystemExit(1)])
def test_a_leader_that_fails_before_it_has_the_batch_fails_alone(storage, engine, failure):
    """The next of those who wait leads; the plant of the one that failed is not stored."""
    engine.turn_free.clear()
    engine.turn_failures = [failure]
    leader = Adder(storage, Plant(1, "one"))
    assert engine.turn_wanted.acquire(timeout=PATIENCE)
    followers = [Adder(storage, plant) for plant in plants(2, 3, 4)]
    wait_until(lambda: pending(storage) == 4)
    engine.turn_free.set()
    assert leader.outcome() is failure
    assert [follower.outcome() for follower in followers] == [None] * 3
    assert list(engine.rows()) == plants(2, 3, 4)


def test_a_turn_that_cannot_be_had_ends_in_time_for_all(engine):
    """Each gives up at the latest at its own limit, and the storage works again afterwards."""
    storage = Storage(engine, wait_limit=0.1)
    engine.turn_free.clear()
    adders = [Adder(storage, plant) for plant in plants(1, 2, 3)]
    assert all(isinstance(adder.outcome(), Unavailable) for adder in adders)
    engine.turn_free.set()
    storage.add(Plant(4, "four"))
    assert list(engine.rows()) == [Plant(4, "four")]


class LateGroupCommit(GroupCommit):
    """A group commit whose waiters give up only when they are let."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.gives_up = threading.Semaphore(0)
        self.may_give_up = threading.Event()

    def _give_up(self, waiter: object) -> None:
        self.gives_up.release()
        assert self.may_give_up.wait(PATIENCE)
        super()._give_up(waiter)


@pytest.fixture
def group(storage: Storage, engine: MemoryEngine) -> LateGroupCommit:
    """The storage's group commit, replaced by a late one."""
    storage._group = LateGroupCommit(engine.turn, lambda batch: storage._store(batch)[1], PATIENCE)
    return storage._group


def add_late(storage: Storage, plant: Plant) -> Adder:
    """Store a plant and return when its wait has run out but is not given up yet."""
    storage._group._wait_limit = 0.01
    adder = Adder(storage, plant)
    assert storage._group.gives_up.acquire(timeout=PATIENCE)
    storage._group._wait_limit = PATIENCE
    return adder


def test_a_wait_that_runs_out_before_the_write_stores_nothing(storage, engine, group):
    """A plant that nobody had begun to write is withdrawn."""
    (leader,) = add_while_writing(storage, engine, plants(1))
    late = add_late(storage, Plant(2, "plant 2"))
    group.may_give_up.set()
    assert isinstance(late.outcome(), Unavailable)
    assert pending(storage) == 0
    engine.go.set()
    assert leader.outcome() is None
    assert list(engine.rows()) == plants(1)


def test_a_wait_that_runs_out_during_the_write_is_told_so(storage, engine, group):
    """Whether the plant will be stored is unknown then; sending it again is a success."""
    engine.turn_free.clear()
    engine.go.clear()
    leader = Adder(storage, Plant(1, "plant 1"))
    wait_until(lambda: pending(storage) == 1)
    late = add_late(storage, Plant(2, "plant 2"))
    engine.turn_free.set()
    assert engine.writing.acquire(timeout=PATIENCE)
    group.may_give_up.set()
    assert isinstance(late.outcome(), Unavailable)
    engine.go.set()
    assert leader.outcome() is None
    storage.add(Plant(2, "plant 2"))
    assert list(engine.rows()) == plants(1, 2)


def test_who_has_left_keeps_nobody_asleep(storage, engine, group):
    """Each wakes the next, so those who are not there any more are passed over."""
    engine.turn_free.clear()
    engine.go.clear()
    adders = [Adder(storage, Plant(1, "plant 1"))]
    wait_until(lambda: pending(storage) == 1)
    late = [add_late(storage, Plant(2, "plant 2"))]
    adders.append(Adder(storage, Plant(3, "plant 3")))
    wait_until(lambda: pending(storage) == 3)
    late.append(add_late(storage, Plant(4, "plant 4")))
    adders.append(Adder(storage, Plant(5, "plant 5")))
    wait_until(lambda: pending(storage) == 5)
    engine.turn_free.set()
    assert engine.writing.acquire(timeout=PATIENCE)
    group.may_give_up.set()
    assert all(isinstance(adder.outcome(), Unavailable) for adder in late)
    engine.go.set()
    assert [adder.outcome() for adder in adders] == [None] * 3
    assert engine.batches == [plants(1, 2, 3, 4, 5)]


@pytest.mark.parametrize("turn_is_free", [True, False])
def test_a_follower_whose_wait_runs_out_as_it_is_made_leader(storage, engine, group, turn_is_free):
    """It leads, if the turn is free at once, or hands over: who waits behind it is served."""
    (leader,) = add_while_writing(storage, engine, plants(1))
    late = add_late(storage, Plant(2, "plant 2"))
    behind = Adder(storage, Plant(3, "plant 3"))
    wait_until(lambda: pending(storage) == 2)
    engine.go.set()
    assert leader.outcome() is None  # and has made the late one leader
    if not turn_is_free:
        engine.turn_free.clear()
    group.may_give_up.set()
    if turn_is_free:
        assert late.outcome() is None
    else:
        assert isinstance(late.outcome(), Unavailable)
        engine.turn_free.set()
    assert behind.outcome() is None
    assert list(engine.rows()) == (plants(1, 2, 3) if turn_is_free else plants(1, 3))


def test_a_follower_whose_wait_runs_out_as_its_plant_is_stored(storage, engine, group):
    """What was settled in the meantime counts: it is no failure."""
    leader, behind = add_while_writing(storage, engine, plants(1, 2))
    late = add_late(storage, Plant(3, "plant 3"))
    engine.go.set()
    assert leader.outcome() is None
    assert behind.outcome() is None  # its batch had the late one's plant
    group.may_give_up.set()
    assert late.outcome() is None
    assert list(engine.rows()) == plants(1, 2, 3)


def test_nobody_is_forgotten_whatever_fails(engine):
    """Many threads, waits that run out all the time, turns and writes that fail at random."""
    storage = Storage(engine, wait_limit=PATIENCE)
    storage._group._wait_limit = 0.0005
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
    assert pending(storage) == 0 and not storage._group._has_leader
    assert len(answered) > 0
    assert all(engine.table[plant.id] == plant for plant in answered)


def test_a_look_at_the_storage_ends_in_time_though_the_storage_hangs(engine, storage):
    """Nothing ends the wait for a disk that hangs, so who looks does not wait for it."""
    storage.check()
    engine.go.clear()
    try:
        with pytest.raises(Unavailable, match="no answer"):
            storage.check()
    finally:
        engine.go.set()
    wait_until(storage._check.done)
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
