"""A storage from outside: its rows, and locks, threads and processes around it."""

import contextlib
import fcntl
import multiprocessing
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from storage import Storage
from tests.support.server import PATIENCE, wait_until

Row = tuple[int, str, str | None]
SELECT = "SELECT id, name, tag FROM plants ORDER BY id"


def read_rows(url: str) -> list[Row]:
    """Return all rows of the table, sorted by id. Fail if a SQLite file is damaged."""
    if not url.startswith("sqlite:"):
        import psycopg  # most tests need no psycopg

        with psycopg.connect(url) as connection:
            return connection.execute(SELECT).fetchall()
    path = url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return file.execute(SELECT).fetchall()


def read_names(url: str) -> dict[int, str]:
    """Return the names of all stored plants, by id."""
    return {number: name for number, name, _ in read_rows(url)}


@contextlib.contextmanager
def lock_held(database: Path) -> Iterator[None]:
    """Hold the lock by which processes of the service take turns.

    The lock is shared: the service, which needs it exclusively, has to wait, but a second
    lock_held() does not.
    """
    with open(f"{database}-lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def locked(database: Path) -> Iterator[None]:
    """Keep the service from storing anything, as another program could."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        yield


def queue_up(method: Callable[..., object], *arguments: object) -> Future[Any]:
    """Call add() or check() of a storage in a new thread. Return once that call waits in the queue.

    The future gets what the call returns or raises.
    """
    storage: Storage = method.__self__
    before = storage.pending()
    outcome = ThreadPoolExecutor(1).submit(method, *arguments)
    wait_until(lambda: outcome.done() or storage.pending() > before)
    return outcome


def run_in_processes(*functions: Callable[[], object]) -> None:
    """Run all functions at the same time, each in a forked process, and assert that none fails."""
    processes = [multiprocessing.get_context("fork").Process(target=each) for each in functions]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * len(processes)
