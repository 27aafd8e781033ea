"""The storage on any engine: what is stored, how often, and what becomes of the others.

What only SQLite can do or suffer is in tests/test_sqlite.py.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from engine import Conflict, Unavailable
from schemas import Plant
from start import get_storage
from storage import Stored
from tests.support.server import PATIENCE
from tests.support.users import run_in_processes


def test_one_bad_plant_harms_no_other_of_its_batch(storage, stored):
    batch = [Plant(3, "n"), Plant(2**64, "n"), Plant(2, "\ud800"), Plant(1, "n"), Plant(3, "x")]
    outcomes = storage.add_all(batch)
    assert [outcome is Stored.NEW for outcome in outcomes] == [True, False, False, True, False]
    assert not any(isinstance(outcome, Unavailable) for outcome in outcomes)
    assert isinstance(outcomes[4], Conflict)
    again = [Plant(3, "n"), Plant(2, "n"), Plant(2, "n")]
    assert storage.add_all(again) == [Stored.BEFORE, Stored.NEW, Stored.BEFORE]
    assert stored() == [(1, "n", None), (2, "n", None), (3, "n", None)]


def test_many_threads_of_many_processes_store_all(storage, url, stored):
    storage.close()

    def work(process: int) -> None:
        def add(thread: int) -> None:
            for number in range(50):
                storage.add(Plant((process * 8 + thread) * 50 + number, f"{process}"))
                storage.add(Plant(10**6 + number, "everybody's"))

        with (
            contextlib.closing(get_storage(url, wait_limit=PATIENCE)) as storage,
            ThreadPoolExecutor(8) as threads,
        ):
            list(threads.map(add, range(8)))

    run_in_processes(*[partial(work, number) for number in range(3)])
    expected = [(n, str(n // 400), None) for n in range(1200)]
    expected += [(10**6 + n, "everybody's", None) for n in range(50)]
    assert stored() == expected


def test_many_that_start_at_once_make_one_table(url, stored):
    def start() -> None:
        with contextlib.closing(get_storage(url, wait_limit=PATIENCE)) as storage:
            storage.open_or_create()
            storage.add(Plant(7, "Monstera"))

    run_in_processes(*[start] * 8)
    assert stored() == [(7, "Monstera", None)]


def test_rows_are_one_snapshot_in_the_order_of_id(storage, url):
    """What is stored while they are read is not among them."""
    writer = get_storage(url)
    numbers = list(range(5000, 0, -1))
    for start in range(0, len(numbers), 200):
        writer.add_all([Plant(n, "n") for n in numbers[start : start + 200]])
    rows = storage.rows()
    seen = [next(rows)]
    writer.add(Plant(6000, "new"))
    seen += rows
    assert [plant.id for plant in seen] == list(range(1, 5001))
    writer.close()
