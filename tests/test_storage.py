"""The group commit, over an engine in memory that does what it is told; then on a database.

No plant that was answered for may be missing, and no request may wait for ever.
"""

import contextlib
import gc
import operator
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from engines import Blocked, Conflict, Engine, NeedsOperator, Rejected, Unavailable
from plant import Plant
from start import get_storage
from storage import Storage
from tests.support.processes import run_in_processes
from tests.support.server import PATIENCE, ROOT, wait_until

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
        self.lock, self.go = threading.Lock(), threading.Event()
        self.is_at_work, self.is_closed = threading.Event(), threading.Event()
        self.meanwhile: Callable[[], object] = self.go.wait
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
    """Starts storages on the engine, which goes on unless it is told to wait."""
    engine.go.set()
    options = {"wait_limit": PATIENCE, "call": operator.call, "gather": lambda: None}
    with contextlib.ExitStack() as storages:
        yield lambda **changes: storages.enter_context(
            contextlib.closing(Storage(engine, **{**options, **changes}))
        )
        engine.go.set()


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


@contextlib.contextmanager
def storing_zero(storage: Storage, engine: MemoryEngine) -> Iterator[None]:
    """The engine is storing a plant meanwhile; all others have to wait in the queue."""
    before = len(engine.parts)
    engine.go.clear()
    queue_up(storage.add, ZERO)
    wait_until(lambda: len(engine.parts) > before)
    try:
        yield
    finally:
        engine.go.set()


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
    """As where no thread can be started: the writer goes on."""
    failures = [RuntimeError("can't start new thread")]

    def call(function: Callable[[], object]) -> None:
        if failures:
            raise failures.pop()
        function()

    storage = start(call=call)
    outcomes = storage.add_all(plants(1, 2, 3))
    assert [str(outcome) for outcome in outcomes] == ["can't start new thread"] * 3
    storage.add(*plants(4))
    assert engine.batches == [plants(4)]  # what has failed is not tried again


IN_A_WORKER = """
from gevent import monkey

monkey.patch_all()
import gevent, gevent.threadpool, socket, start, sys
from plant import Plant

def flood():
    while True:
        gevent.socket.wait_read(far.fileno())

def fail(*_):
    gevent.threadpool.start_new_thread = start_thread
    raise RuntimeError("can't start new thread")

start_thread, gevent.threadpool.start_new_thread = gevent.threadpool.start_new_thread, fail
storage = start.get_storage(sys.argv[1])
assert str(*storage.add_all([Plant(1, "one")])) == "can't start new thread"
for number in range(2, 5):
    storage.add(Plant(number, "n"))
near, far = socket.socketpair()
near.send(b"never read")
gevent.spawn(flood)
storage.add_all([Plant(number, "n") for number in range(5, 8)])
missing = start.get_storage("sqlite:////none/plants.db")
assert "the folder must be there" in str(*missing.add_all([Plant(1, "one")]))
"""


def test_a_worker_goes_on_without_a_thread_and_in_a_flood(url, stored):
    """gevent keeps what it was to run in a thread that could not be started, and runs it later.

    Then a batch gathers the plants that have arrived, though requests without plants never end.
    What fails in a thread is an outcome, and no traceback.
    """
    command = [sys.executable, "-c", IN_A_WORKER, url]
    done = subprocess.run(command, cwd=ROOT, timeout=PATIENCE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert stored() == [(number, "n", None) for number in range(2, 8)]


def test_all_plants_of_a_request_share_its_limit(start, engine):
    storage = start(wait_limit=0.1)
    with storing_zero(storage, engine):
        request = queue_up(storage.add_all, plants(*range(1, round(3 * PATIENCE / 0.1))))
        assert {type(outcome) for outcome in request.result(PATIENCE)} == {Unavailable}


def test_who_gave_up_is_gone_from_the_queue(start, engine):
    """The plant is not stored later behind the client's back; to send it again is a success."""
    storage = start(wait_limit=0.1)
    with engine.lock, pytest.raises(Unavailable, match="the storage is busy or hangs"):
        storage.add(*plants(1))
    wait_until(lambda: storage.add_all(plants(2)) == [None])
    assert plants(1) not in engine.batches
    wait_until(lambda: storage.add_all(plants(1)) == [None])


class Text(str):
    """A string that can be observed."""


def fail_as_an_engine_does(plants: Sequence[Plant], is_part: bool) -> NoReturn:
    try:
        raise ValueError
    except ValueError:  # whose traceback has the plants
        raise Unavailable("disk full") from None


@pytest.mark.parametrize(
    "insert",
    [lambda plants, is_part: {plant.id: plant for plant in plants}, fail_as_an_engine_does],
)
def test_a_batch_is_not_kept_in_memory(memory, engine, insert):
    """Not even until the next one, and not if it failed: of large plants it may be a megabyte."""
    engine.insert = insert
    name = Text("n")
    reference = weakref.ref(name)
    with contextlib.suppress(Unavailable):
        memory.add(Plant(1, name))
    del name
    wait_until(lambda: gc.collect() is not None and reference() is None)


def test_an_error_that_requests_share_does_not_grow(memory, engine):
    """Its traceback would keep all of them in memory."""
    engine.failure = Unavailable("disk full")
    for _ in range(20):
        with pytest.raises(Unavailable, match="disk full"):
            memory.add(ZERO)
    assert len(list(traceback.walk_tb(engine.failure.__traceback__))) < 20


@pytest.mark.parametrize(("failure", "check_failure"), [(None, FULL), (FULL, None)])
def test_a_health_check_in_a_batch_has_an_outcome_of_its_own(
    memory, engine, failure, check_failure
):
    """Its failure refuses no plant that can be stored, nor the other way round."""
    with engine.lock:
        engine.failure, engine.check_failure = failure, check_failure
        check, plant = queue_up(memory.check, PATIENCE), queue_up(memory.add, *plants(1))
    assert plant.exception(PATIENCE) == failure
    assert check.exception(PATIENCE) == check_failure


@pytest.mark.parametrize("failure", [None, FULL])
def test_health_checks_that_come_together_share_a_write(memory, engine, failure):
    engine.check_failure = failure
    with engine.lock:
        checks = [queue_up(memory.check, PATIENCE) for _ in range(10)]
    assert [check.exception(PATIENCE) for check in checks] == [failure] * 10
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


def test_a_health_check_ends_in_time_though_the_storage_hangs(memory, engine):
    """Nothing ends the wait for a disk that hangs, so the check does not wait for it."""
    with storing_zero(memory, engine), pytest.raises(Unavailable, match="busy or hangs"):
        memory.check(0.05)


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


def test_closing_stores_what_is_in_the_queue_first(memory, engine):
    with storing_zero(memory, engine), ThreadPoolExecutor() as threads:
        request = queue_up(memory.add_all, plants(1, 2))
        closing = threads.submit(memory.close)
        engine.go.set()
        closing.result(PATIENCE)
    assert request.result(PATIENCE) == [None] * 2
    assert engine.is_closed.is_set() and engine.batches == [[ZERO], plants(1, 2)]


def test_closing_ends_in_time_though_a_commit_hangs(start, engine):
    """The connection is closed when the commit has ended."""
    storage = start(wait_limit=0.1)
    with storing_zero(storage, engine):
        queue_up(storage.close).result(PATIENCE)
        assert not engine.is_closed.is_set()
    assert engine.is_closed.wait(PATIENCE)


def test_many_threads_of_many_processes_store_all(url, stored):
    """They start at once, and one makes the table."""

    def work(process: int) -> None:
        def add(thread: int) -> None:
            for number in range(20):
                storage.add(Plant((process * 8 + thread) * 20 + number, f"{process}"))
                storage.add(Plant(10**6 + number, "everybody's"))

        with (
            contextlib.closing(get_storage(url, wait_limit=PATIENCE)) as storage,
            ThreadPoolExecutor(8) as threads,
        ):
            list(threads.map(add, range(8)))

    run_in_processes(*[partial(work, number) for number in range(4)])
    expected = [(n, str(n // 160), None) for n in range(640)]
    expected += [(10**6 + n, "everybody's", None) for n in range(20)]
    assert stored() == expected


def test_rows_are_one_snapshot_in_the_order_of_id(storage, open_storage):
    """What is stored while they are read is not among them."""
    ids = range(5000, 0, -1)
    storage.add_all(plants(*ids))
    rows = open_storage().rows()
    seen = [next(rows)]
    storage.add(Plant(6000, "new"))
    seen += rows
    assert [plant.id for plant in seen] == sorted(ids)
