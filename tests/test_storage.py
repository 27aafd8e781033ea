"""The group commit, over an engine in memory that does what it is told; then on a database.

No plant that was answered for may be missing, and no request may wait for ever.
"""

import contextlib
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from engines import Blocked, Conflict, Engine, NeedsOperator, Rejected, Unavailable
from plant import Plant
from start import get_storage
from storage import Storage
from tests.support.processes import run_in_processes
from tests.support.server import PATIENCE, wait_until

ZERO = Plant(0, "zero")
FAULTS = {"rejected": Rejected("against a constraint"), "blocked": Blocked("its row is locked")}
FULL = Unavailable("disk full")


class MemoryEngine(Engine):
    """An engine whose inserts call `meanwhile`, and fail as the names of their plants say."""

    description, max_batch = "memory", 1000

    def __init__(self) -> None:
        self.table: dict[int, Plant] = {}
        self.batches: list[list[Plant]] = []  # that were stored
        self.parts: list[bool] = []  # for each insert, whether it was of a part
        self.checks = 0
        self.lock = threading.Lock()
        self.is_at_work, self.is_closed = threading.Event(), threading.Event()
        self.meanwhile: Callable[[], object] = lambda: None
        self.failure: Exception | None = None
        self.check_failure: Exception | None = None

    def locked(self) -> contextlib.AbstractContextManager[object]:
        self.is_at_work.set()
        return self.lock

    def check(self) -> None:
        self.checks += 1
        if self.check_failure:
            raise self.check_failure

    def insert(self, plants: Sequence[Plant], is_part: bool) -> Mapping[int, Plant]:
        self.parts.append(is_part)
        self.meanwhile()
        for error in [self.failure, *(FAULTS.get(plant.name) for plant in plants)]:
            if error:
                raise error
        self.batches.append(list(plants))
        for plant in plants:
            if plant.name != "ignored":
                self.table.setdefault(plant.id, plant)
        return self.table

    def rows(self) -> Iterator[Plant]:
        return iter(self.table.values())

    def close(self) -> None:
        self.is_closed.set()


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine()


@pytest.fixture
def start(engine: MemoryEngine) -> Iterator[Callable[..., Storage]]:
    """Starts storages on the engine."""
    options = {"wait_limit": PATIENCE, "call": operator.call, "gather": lambda: None}
    with contextlib.ExitStack() as storages:
        yield lambda **changes: storages.enter_context(
            contextlib.closing(Storage(engine, **{**options, **changes}))
        )


@pytest.fixture
def memory(start: Callable[..., Storage]) -> Storage:
    return start()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands still, in the place of the module time."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("storage.time", clock)
    return clock


def queue_up(method: Callable[..., object], *arguments: object) -> Future[Any]:
    """Let a thread call a method of a storage; return once it waits in the queue."""
    thread, pool = Future[int](), ThreadPoolExecutor(1)
    outcome = pool.submit(lambda: thread.set_result(threading.get_ident()) or method(*arguments))
    wait = threading.Condition.wait.__code__
    wait_until(lambda: outcome.done() or sys._current_frames()[thread.result()].f_code is wait)
    return outcome


def plants(*ids: int, name: str = "n") -> list[Plant]:
    return [Plant(number, name) for number in ids]


def test_a_batch_has_so_many_plants_and_bytes_at_most(memory, engine):
    """The commit of more would keep others waiting."""
    engine.max_batch = 3
    memory.add_all(plants(*range(7)))
    memory.add_all(plants(*range(10, 15), name="€" * 2**17))
    assert [len(batch) for batch in engine.batches] == [3, 3, 1, 2, 2, 1]


def test_requests_that_wait_for_the_same_lock_share_a_batch(memory, engine):
    with engine.lock:
        requests = [queue_up(memory.add_all, plants(9, 3))]
        assert engine.is_at_work.wait(PATIENCE)
        requests += [queue_up(memory.add_all, plants(*ids)) for ids in ((7, 1), (5,))]
    assert [each.result(PATIENCE) for each in requests] == [[None] * 2, [None] * 2, [None]]
    assert engine.batches == [plants(1, 3, 5, 7, 9)]


def test_only_a_client_that_is_alone_is_not_waited_for(start, engine):
    calls: list[int] = []  # how many batches were stored before each
    storage = start(gather=lambda: calls.append(len(engine.batches)))
    for batch in (plants(1), plants(2), plants(3, 4), plants(5), plants(6)):
        storage.add_all(batch)
    assert calls == [2, 3]


def test_each_in_a_batch_gets_an_outcome_of_its_own(memory, engine):
    """The batch is split until who is at fault is alone; whose id is missing was not stored."""
    memory.add(Plant(1, "one"))
    batch = {
        Plant(1, "one"): None,
        Plant(1, "another one"): Conflict,
        Plant(2, "two"): None,
        Plant(2, "two", "tagged"): Conflict,
        Plant(3, "rejected"): Rejected,
        Plant(4, "four"): None,
        Plant(5, "blocked"): Blocked,
        Plant(6, "ignored"): Rejected,
        Plant(7, "seven"): None,
    }
    outcomes = memory.add_all(list(batch))
    assert [outcome and type(outcome) for outcome in outcomes] == list(batch.values())
    assert engine.table.keys() == {1, 2, 4, 7}
    assert not any(engine.parts[:2]) and all(engine.parts[2:])


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("count", [1, 2])
def test_no_plant_is_at_fault_where_not_even_nothing_can_be_stored(memory, engine, name, count):
    """No client is told "never" for what an operator has to do; and nothing is tried in parts."""
    batch = plants(*range(count), name=name)
    for failure, kind in (FULL, Unavailable), (Rejected("a trigger"), NeedsOperator):
        engine.check_failure = failure
        assert {(type(each), str(each)) for each in memory.add_all(batch)} == {(kind, str(failure))}
    assert engine.parts == [False, False]
    engine.check_failure = None
    assert memory.add_all(batch) == [FAULTS[name]] * count


@pytest.mark.parametrize("failure", [FULL, NeedsOperator("gone"), ValueError("a bug")])
def test_a_failing_engine_fails_its_batch_and_no_other(memory, engine, failure):
    memory.add(ZERO)
    engine.failure = failure
    assert memory.add_all(plants(1, 2)) == [failure] * 2
    assert engine.parts == [False, False]  # they are not tried in parts
    engine.failure = None
    assert memory.add_all(plants(1, 2)) == [None] * 2


def test_plants_at_fault_keep_others_waiting_for_half_of_the_limit(start, engine, clock):
    """A batch is split only so long; who is not reached may try again."""
    engine.meanwhile = lambda: setattr(clock, "now", clock.now + 4)
    outcomes = start(wait_limit=30).add_all(plants(*range(16), name="rejected"))
    kinds = [type(outcome) for outcome in outcomes]
    assert (kinds[0], {*kinds[2:]}) == (Rejected, {Unavailable})
    assert len(engine.parts) < 12  # not 31


def test_a_call_that_fails_is_the_outcome_and_the_next_plant_is_stored(start, engine):
    """As where no thread can be started: gevent keeps what that was to do, and does it later."""
    calls: list[Callable[[], object]] = []

    def call(function: Callable[[], object]) -> None:
        calls.append(function)
        if len(calls) == 1:
            raise RuntimeError("can't start new thread")
        if len(calls) == 2:
            calls[0]()
        function()

    storage = start(call=call)
    outcomes = storage.add_all(plants(1, 2, 3))
    assert [str(outcome) for outcome in outcomes] == ["can't start new thread"] * 3
    storage.add(*plants(4))
    assert engine.table.keys() == {4}  # what has failed is not tried again


def test_all_plants_of_a_request_share_its_limit(start, engine):
    storage = start(wait_limit=0.1)
    with engine.lock:
        request = queue_up(storage.add_all, plants(*range(1, round(3 * PATIENCE / 0.1))))
        assert {type(outcome) for outcome in request.result(PATIENCE)} == {Unavailable}


def test_an_error_that_requests_share_does_not_grow(memory, engine):
    """Its traceback would keep all of them in memory."""
    engine.failure = engine.check_failure = Unavailable("disk full")
    for use in [partial(memory.add, ZERO), partial(memory.check, PATIENCE)] * 20:
        with pytest.raises(Unavailable, match="disk full"):
            use()
    assert len(list(traceback.walk_tb(engine.failure.__traceback__))) < 20


@pytest.mark.parametrize(("failure", "check_failure"), [(None, FULL), (FULL, None)])
def test_health_checks_share_a_write_and_have_an_outcome_of_their_own(
    memory, engine, failure, check_failure
):
    """Their failure refuses no plant that can be stored, nor the other way round."""
    with engine.lock:
        engine.failure, engine.check_failure = failure, check_failure
        plant = queue_up(memory.add, *plants(1))
        checks = [queue_up(memory.check, PATIENCE) for _ in range(10)]
    assert plant.exception(PATIENCE) == failure
    assert [check.exception(PATIENCE) for check in checks] == [check_failure] * 10
    assert engine.checks == 1


def test_only_a_health_check_is_proof_for_a_second(memory, engine, clock):
    """A plant is none, as only a health check looks at the table; and what fails ends the proof."""
    memory.add(ZERO)
    for seconds, checks in (0, 1), (0.9, 1), (0.2, 2):
        clock.now += seconds
        memory.check(PATIENCE)
        assert engine.checks == checks
    engine.failure = engine.check_failure = FULL
    assert memory.add_all(plants(1)) == [FULL]
    for _ in range(2):
        with pytest.raises(Unavailable, match="disk full"):
            memory.check(PATIENCE)


def test_requests_end_in_time_though_the_storage_hangs(start, engine):
    """Nothing ends the wait for a disk that hangs, so they do not wait for it."""
    disk = threading.Event()
    engine.meanwhile = disk.wait
    storage = start(wait_limit=0.1)
    for use in (lambda: storage.add(ZERO), lambda: storage.check(0.05)):
        with pytest.raises(Unavailable, match="busy or hangs"):
            use()
    disk.set()


def test_plants_at_fault_do_not_keep_a_health_check_waiting(memory, engine, clock):
    """While a batch is stored in parts, it is enough that one of them was."""
    checks: list[Future[None]] = []

    def meanwhile() -> None:
        clock.now += 2
        if len(engine.parts) == 2:  # after the batch, and before its parts
            checks.append(queue_up(memory.check, 0.1))
        elif len(engine.parts) == 3:
            checks[0].exception(PATIENCE)

    engine.meanwhile = meanwhile
    assert memory.add_all([ZERO, Plant(1, "rejected")]) == [None, FAULTS["rejected"]]
    assert checks[0].exception() is None


def test_closing_ends_in_time_and_loses_nothing_that_is_in_the_queue(start, engine):
    storage = start(wait_limit=0.1)
    with engine.lock:
        queued = queue_up(storage.check, PATIENCE)
        storage.close()
        assert not engine.is_closed.is_set()
    queued.result(PATIENCE)
    assert engine.is_closed.wait(PATIENCE) and engine.checks == 1


def test_many_threads_of_many_processes_store_all(url, stored):
    """They start at once, and one makes the table. Of the plants with an id, one gets a success."""

    def work(process: int) -> None:
        name, told = f"{process}", set()

        def add(thread: int) -> None:
            for number in range(20):
                storage.add(Plant((process * 8 + thread) * 20 + number, name))
                (outcome,) = storage.add_all([Plant(1000 + number, name)])
                told.add((1000 + number, outcome and type(outcome)))

        with (
            contextlib.closing(get_storage(url, wait_limit=PATIENCE)) as storage,
            ThreadPoolExecutor(8) as threads,
        ):
            list(threads.map(add, range(8)))
            rivals = [plant for plant in storage.rows() if plant.id >= 1000]
        assert told == {(each.id, None if each.name == name else Conflict) for each in rivals}

    run_in_processes(*[partial(work, number) for number in range(4)])
    assert stored()[:-20] == [(n, str(n // 160), None) for n in range(640)]


def test_rows_are_one_snapshot_in_the_order_of_id(storage, open_storage):
    """What is stored while they are read is not among them."""
    ids = range(5000, 0, -1)
    storage.add_all(plants(*ids))
    rows = open_storage().rows()
    seen = [next(rows)]
    storage.add(Plant(6000, "new"))
    seen += rows
    assert [plant.id for plant in seen] == sorted(ids)
