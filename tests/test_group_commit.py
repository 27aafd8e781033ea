"""The group commit, over an engine that waits, fails and counts as it is told.

No plant that was answered for may be missing, and no request may wait for ever.
"""

import contextlib
import gc
import itertools
import operator
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import NoReturn

import pytest

from engine import Conflict, Engine, Inserted, NeedsOperator, Rejected, Unavailable
from schemas import Plant
from storage import MAX_BATCH, Entry, Storage, Stored
from tests.support.server import PATIENCE, ROOT, wait_until


class MemoryEngine(Engine):
    """An engine in memory. Each write waits for `go`, calls `meanwhile`, and raises `failure`."""

    def __init__(self) -> None:
        self.obstacle, self.identity, self.description = "", None, "memory"
        self.table: dict[int, Plant] = {}
        self.batches: list[list[Plant]] = []
        self.go = threading.Event()
        self.go.set()
        self.is_writing = threading.Event()
        self.is_closed = threading.Event()
        self.meanwhile: Callable[[], object] = lambda: None
        self.failure: Exception | None = None
        self.calls = 0  # of insert()

    def insert(self, plants: Sequence[Plant]) -> Inserted:
        self.calls += 1
        self.is_writing.set()
        assert self.go.wait(PATIENCE)
        self.meanwhile()
        if self.failure:
            raise self.failure
        if any(plant.name == "poison" for plant in plants):
            raise Rejected("poison")
        self.batches.append(list(plants))
        before = set(self.table)
        locked = {plant.id for plant in plants if plant.name == "locked"}
        for plant in plants:
            if plant.id not in locked:
                self.table.setdefault(plant.id, plant)
        return Inserted(self.table.keys() - before, locked, self.table)

    def rows(self) -> Iterator[Plant]:
        return iter(self.table.values())

    def close(self) -> None:
        self.is_closed.set()


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine()


@pytest.fixture
def start(engine: MemoryEngine) -> Iterator[Callable[..., Storage]]:
    with contextlib.ExitStack() as storages:

        def start(
            wait_limit: float = PATIENCE,
            call: Callable[..., object] = operator.call,
        ) -> Storage:
            return storages.enter_context(contextlib.closing(Storage(engine, wait_limit, call)))

        yield start
        engine.go.set()


@pytest.fixture
def storage(start: Callable[..., Storage]) -> Storage:
    return start()


def plants(*ids: int) -> list[Plant]:
    return [Plant(number, f"plant {number}") for number in ids]


Outcomes = list[Stored | Exception]


def queue_up(
    threads: ThreadPoolExecutor, storage: Storage, plants: Sequence[Plant | None]
) -> Future[Outcomes]:
    """Let a thread store plants; return when they are in the queue."""
    is_adding = threading.Event()

    def observed() -> Iterator[Plant | None]:
        yield from plants
        is_adding.set()

    outcomes = threads.submit(storage.add_all, observed())  # type: ignore[arg-type]
    assert is_adding.wait(PATIENCE)
    storage.add_all([])  # after them
    return outcomes


@contextlib.contextmanager
def writing_and_waiting(
    storage: Storage, engine: MemoryEngine, first: Plant, others: Sequence[Plant | None]
) -> Iterator[tuple[Future[Outcomes], Future[Outcomes]]]:
    """The engine is writing one plant while the others are in the queue; then it goes on."""
    engine.go.clear()
    engine.is_writing.clear()
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(storage.add_all, [first])
        assert engine.is_writing.wait(PATIENCE)
        waiting = queue_up(threads, storage, others)
        try:
            yield writing, waiting
        finally:
            engine.go.set()


def test_what_comes_during_a_commit_is_the_next_batch(storage, engine):
    with writing_and_waiting(storage, engine, *plants(5), plants(9, 3, 7, 1)) as (first, others):
        engine.go.set()
        assert first.result(PATIENCE) == [Stored.NEW]
        assert others.result(PATIENCE) == [Stored.NEW] * 4
    assert engine.batches == [plants(5), plants(1, 3, 7, 9)]


def test_a_batch_has_so_many_plants_at_most(storage, engine):
    with writing_and_waiting(storage, engine, *plants(0), plants(*range(1, 2002))):
        pass
    assert [len(batch) for batch in engine.batches] == [1, 1000, 1000, 1]


def test_a_batch_has_so_many_bytes_at_most(storage, engine):
    large = [Plant(number, "n", "€" * 2**17) for number in range(1, 6)]
    with writing_and_waiting(storage, engine, Plant(0, "zero"), large):
        pass
    assert [[plant.id for plant in batch] for batch in engine.batches] == [[0], [1, 2], [3, 4], [5]]


@contextlib.contextmanager
def lock_taken_by_others(engine: MemoryEngine) -> Iterator[threading.Event]:
    """The engine's lock can't be had meanwhile; the event tells whether somebody waits for it."""
    is_waited_for, is_free = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def locked() -> Iterator[None]:
        is_waited_for.set()
        assert is_free.wait(PATIENCE)
        yield

    engine.locked = locked
    try:
        yield is_waited_for
    finally:
        is_free.set()


def test_a_plant_joins_while_the_lock_is_waited_for(storage, engine):
    with ThreadPoolExecutor() as threads, lock_taken_by_others(engine) as is_waited_for:
        threads.submit(storage.add, *plants(1))
        assert is_waited_for.wait(PATIENCE)
        queue_up(threads, storage, plants(2))
    assert engine.batches == [plants(1, 2)]


def test_without_the_lock_a_batch_fails(storage, engine):
    def locked() -> NoReturn:
        raise NeedsOperator("no such folder")

    engine.locked = locked
    assert [str(outcome) for outcome in storage.add_all(plants(1, 2))] == ["no such folder"] * 2


def test_a_plant_that_comes_as_the_writer_wakes_up_is_written(storage, engine):
    wake_up, clear, outcomes = storage._commit._wake_up, storage._commit._wake_up.clear, []

    def clear_late() -> None:
        wake_up.clear = clear
        outcomes.append(queue_up(threads, storage, plants(2)))
        clear()

    with ThreadPoolExecutor() as threads:
        wake_up.clear = clear_late
        storage.add(*plants(1))
        assert outcomes[0].result(PATIENCE) == [Stored.NEW]


def test_nobody_is_woken_before_the_outcome_is_there(storage, engine):
    seen = []
    entry = Entry(Plant(1, "one"))
    entry.done = SimpleNamespace(set=lambda: seen.append(entry.outcome))
    storage._commit._batch = [entry]
    storage._commit._finish([Conflict("taken")])
    assert [type(error) for error in seen] == [Conflict]


def test_all_plants_of_a_request_share_its_limit(start, engine):
    storage = start(wait_limit=0.3)
    many = plants(*range(2, 2 + round(2 * PATIENCE / 0.3)))
    with writing_and_waiting(storage, engine, *plants(1), many) as (_, others):
        assert {type(outcome) for outcome in others.result(PATIENCE)} == {Unavailable}


def test_a_batch_that_gives_up_before_the_lock_is_there_is_not_written(start, engine):
    storage = start(wait_limit=0.05)
    with lock_taken_by_others(engine), pytest.raises(Unavailable):
        storage.add(*plants(1))
    storage.close()
    assert engine.is_closed.wait(PATIENCE) and not engine.batches


def test_only_a_client_that_is_alone_is_not_waited_for(engine):
    calls: list[int] = []  # how many batches were written before each

    def gather() -> None:
        calls.append(len(engine.batches))

    with contextlib.closing(Storage(engine, PATIENCE, operator.call, gather)) as storage:
        for batch in (plants(1), plants(2), plants(3, 4), plants(5), plants(6)):
            storage.add_all(batch)
    assert calls == [2, 3]


def test_plants_at_fault_do_not_keep_others_waiting_for_long(start, engine):
    """A batch that fails is written in smaller parts only until half of the limit is over."""
    engine.meanwhile = lambda: time.sleep(0.2)
    outcomes = start(wait_limit=4.0).add_all([Plant(number, "poison") for number in range(16)])
    assert {type(outcome) for outcome in outcomes} == {Rejected, Unavailable}
    assert engine.calls <= 12  # not 31


def test_plants_at_fault_do_not_keep_a_health_check_waiting(storage, engine, monkeypatch):
    """While a batch is written in parts, it is enough that something has been written."""
    monkeypatch.setattr("storage.CHECK_LIMIT", 0.1)
    checks: list[Future[None]] = []
    with ThreadPoolExecutor(1) as threads:

        def meanwhile() -> None:
            if engine.calls == 2:  # after the batch, and before its parts
                checks.append(threads.submit(storage.check))
            elif engine.calls == 3:
                wait(checks, PATIENCE)

        engine.meanwhile = meanwhile
        outcomes = storage.add_all([Plant(1, "poison"), Plant(2, "n")])
    assert [type(outcome) for outcome in outcomes] == [Rejected, Stored]
    (check,) = checks
    check.result()


def test_each_in_a_batch_gets_an_outcome_of_its_own(storage, engine):
    storage.add(Plant(1, "one"))
    batch = {
        Plant(1, "one"): Stored.BEFORE,
        Plant(1, "another one"): Conflict,
        Plant(2, "two"): Stored.NEW,
        Plant(2, "two", "tagged"): Conflict,
        Plant(3, "poison"): Rejected,
        Plant(4, "four"): Stored.NEW,
        Plant(5, "locked"): Unavailable,
        Plant(6, "six"): Stored.NEW,
    }
    with writing_and_waiting(storage, engine, Plant(0, "zero"), list(batch)) as (_, others):
        pass
    outcomes = others.result(PATIENCE)
    kinds = [each if isinstance(each, Stored) else type(each) for each in outcomes]
    assert kinds == list(batch.values())
    assert str(outcomes[6]) == "plant 5: another transaction holds its row"
    assert engine.table.keys() == {0, 1, 2, 4, 6}


@pytest.mark.parametrize("failure", [Unavailable("disk full"), NeedsOperator("gone")])
def test_a_failing_engine_fails_its_batch_and_no_other(storage, engine, failure):
    with writing_and_waiting(storage, engine, *plants(1), plants(2, 3)) as (first, others):
        engine.failure = failure
    assert first.result(PATIENCE) == [failure]
    assert others.result(PATIENCE) == [failure] * 2
    assert engine.calls == 2  # they are not tried in parts
    engine.failure = None
    storage.add(Plant(4, "four"))
    assert list(engine.table.values()) == [Plant(4, "four")]


def test_a_request_that_gave_up_is_left_out_of_its_batch(storage, engine):
    """Its plant was not stored, and sending it again later is a success like any other."""
    engine.obstacle = "the disk is asleep"
    with writing_and_waiting(storage, engine, *plants(1), []):
        (error,) = storage._commit.submit(plants(2), 0.01)
        assert isinstance(error, Unavailable) and "the disk is asleep" in str(error)
    storage.add(*plants(3))
    assert engine.batches == [plants(1), plants(3)]
    storage.add(*plants(2))


class Text(str):
    """A string that can be observed."""


def fail_as_sqlite_does(plants: Sequence[Plant]) -> Inserted:
    try:
        raise ValueError
    except ValueError:  # whose traceback has the plants
        raise Unavailable("disk full") from None


@pytest.mark.parametrize(
    "insert", [lambda plants: Inserted([plant.id for plant in plants]), fail_as_sqlite_does]
)
def test_a_batch_is_not_kept_in_memory(storage, engine, insert):
    """Not even until the next one, and not if it failed: of large plants it may be a megabyte."""
    engine.insert = insert
    name = Text("n")
    reference = weakref.ref(name)
    with contextlib.suppress(Unavailable):
        storage.add(Plant(1, name))
    del name
    wait_until(lambda: gc.collect() is not None and reference() is None)


def test_a_health_check_ends_in_time_though_the_storage_hangs(storage, engine, monkeypatch):
    """Nothing ends the wait for a disk that hangs, so the check does not wait for it."""
    monkeypatch.setattr("storage.CHECK_LIMIT", 0.05)
    engine.go.clear()
    while not engine.is_writing.is_set():  # at last it gives up what is being written
        with pytest.raises(Unavailable, match=r"after 0\.05 s: the storage does not answer"):
            storage.check()


def test_a_failure_is_no_reason_to_call_it_well(storage, engine):
    storage.check()
    engine.failure = Unavailable("disk full")
    with pytest.raises(Unavailable, match="disk full"):
        storage.add(Plant(1, "one"))
    for _ in range(2):
        with pytest.raises(Unavailable, match="disk full"):
            storage.check()


@pytest.mark.parametrize("failure", [None, Unavailable("disk full")])
def test_health_checks_that_come_together_share_a_write(storage, engine, monkeypatch, failure):
    """It is not that of a plant before them, even if they came first."""
    monkeypatch.setattr("storage.CHECK_LIMIT", PATIENCE)
    with ThreadPoolExecutor(30) as threads, writing_and_waiting(storage, engine, *plants(1), []):
        checks = [threads.submit(storage.check) for _ in range(30)]
        wait_until(lambda: len(storage._commit._queue) == 30)
        failures = iter([None])
        engine.meanwhile = lambda: setattr(engine, "failure", next(failures, failure))
    assert [check.exception() for check in checks] == [failure] * 30
    assert engine.batches == [plants(1)] + [[]] * (not failure)


def test_only_a_health_check_is_proof_for_a_second(storage, engine, monkeypatch):
    """A plant is none, before it or with it: only a health check looks at the table."""
    one, now = [Plant(1, "one")], time.monotonic()
    monkeypatch.setattr("storage.time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    storage.add(Plant(1, "one"))
    storage.check()
    now += 0.9
    storage.check()
    assert engine.batches == [one, []]
    now += 0.2
    storage.check()
    assert engine.batches[2:] == [[]]
    with writing_and_waiting(storage, engine, Plant(2, "two"), [Plant(3, "three"), None]):
        pass
    assert engine.batches[3:] == [[Plant(2, "two")], [Plant(3, "three")], []]


def test_the_engine_is_used_through_call_only(start, engine):
    """Its calls may block, which would keep all greenlets of the process waiting."""
    depth, depths = 0, {}

    def watch(name: str, method: Callable[..., object]) -> None:
        setattr(engine, name, lambda *args: depths.update({name: depth}) or method(*args))

    def call(function: Callable[[], object]) -> object:
        nonlocal depth
        depth += 1
        try:
            return function()
        finally:
            depth -= 1

    for name in ("locked", "insert", "close"):
        watch(name, getattr(engine, name))
    with contextlib.closing(start(call=call)) as storage:
        storage.add(Plant(1, "one"))
    assert depths == {"locked": 1, "insert": 1, "close": 1}


FLOOD = """
from gevent import monkey

monkey.patch_all()
import gevent, socket, start

near, far = socket.socketpair()
near.send(b"never read")

def flood():
    while True:
        gevent.socket.wait_read(far.fileno())

gevent.spawn(flood)
start.gather()
"""


def test_other_requests_keep_a_batch_waiting_for_a_moment_only():
    """A batch gathers the plants that have arrived, though requests without plants never end."""
    subprocess.run([sys.executable, "-c", FLOOD], check=True, cwd=ROOT, timeout=PATIENCE)


def test_a_batch_fits_into_a_statement():
    """SQLite takes so many values, unless it was built for more."""
    assert MAX_BATCH * len(Plant._fields) <= 32_766


def test_closing_ends_in_time_though_a_write_hangs(start, engine):
    """The connection is closed when the write has ended, and what comes later is refused."""
    storage = start(wait_limit=0.1)
    with writing_and_waiting(storage, engine, *plants(1), []):
        storage.close()
        assert not engine.is_closed.is_set()
        with pytest.raises(Unavailable, match="the storage is closed"):
            storage.add(Plant(2, "two"))
    assert engine.is_closed.wait(PATIENCE)
    assert list(engine.table.values()) == plants(1)


def test_a_writer_that_dies_fails_every_wait_and_is_replaced(start, engine, monkeypatch):
    """Where no thread can be started, for example; the next plant finds another writer."""
    may_die, deaths = threading.Event(), []
    monkeypatch.setattr("threading.excepthook", deaths.append)
    monkeypatch.setattr("storage.MAX_BATCH", 1)

    def call(function: Callable[[], object]) -> object:
        assert may_die.wait(PATIENCE)
        if not deaths:
            raise RuntimeError("can't start new thread")
        return function()

    def queued() -> Iterator[Plant]:
        yield from plants(1, 2, 3)
        may_die.set()  # add_all has taken them all by then

    storage = start(call=call)
    outcomes = storage.add_all(queued())  # type: ignore[arg-type]
    assert [str(outcome) for outcome in outcomes] == ["the writer failed"] * 3
    wait_until(lambda: deaths)
    storage.add(Plant(4, "four"))
    assert engine.batches == [[Plant(4, "four")]]  # what has failed is not tried again


NO_THREAD = """
from gevent import monkey

monkey.patch_all()
import start, sys, gevent.threadpool
from schemas import Plant

storage = start.get_storage(sys.argv[1])
start_thread, insert = gevent.threadpool.start_new_thread, storage.engine.insert
at_work = []

def fail(*_):
    gevent.threadpool.start_new_thread = start_thread
    raise RuntimeError("can't start new thread")

def watch(plants):
    at_work.append(plants)
    assert len(at_work) == 1, at_work
    monkey.get_original("time", "sleep")(0.1)
    inserted = insert(plants)
    at_work.clear()
    return inserted

gevent.threadpool.start_new_thread, storage.engine.insert = fail, watch
assert str(*storage.add_all([Plant(1, "one")])) == "the writer failed"
storage.add(Plant(2, "two"))
"""


def test_no_two_threads_use_the_engine_where_one_could_not_be_started(url):
    """gevent keeps what it was to run in that thread, and runs it with the next one."""
    command = [sys.executable, "-c", NO_THREAD, url]
    subprocess.run(command, check=True, cwd=ROOT, timeout=PATIENCE)


def test_a_writer_that_could_not_be_started_is_tried_again(storage, engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            storage.add(*plants(1))
    storage.add(*plants(2))
    assert engine.batches == [plants(2)]


def test_an_error_that_requests_share_keeps_none_of_them_in_memory(storage, engine):
    """Its traceback does not grow from one to the next."""
    engine.failure = Unavailable("disk full")
    for _ in range(20):
        with pytest.raises(Unavailable, match="disk full"):
            storage.add(*plants(1))
    assert len(list(traceback.walk_tb(engine.failure.__traceback__))) < 20


def test_closing_writes_what_is_in_the_queue_first(storage, engine):
    with writing_and_waiting(storage, engine, *plants(1), plants(2, 3)) as (_, others):
        with ThreadPoolExecutor() as threads:
            closing = threads.submit(storage.close)
            engine.go.set()
            closing.result(PATIENCE)
        assert others.result(PATIENCE) == [Stored.NEW] * 2
    assert engine.is_closed.is_set()
    assert list(itertools.chain(*engine.batches)) == plants(1, 2, 3)
