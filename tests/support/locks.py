"""Locks that keep the service from storing anything, and requests that wait meanwhile."""

import contextlib
import fcntl
import os
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.server import wait_until


@contextlib.contextmanager
def lock_held(database: Path) -> Iterator[None]:
    """Hold the lock that one process of the service may have: shared, so that only it must wait."""
    lock = os.open(f"{database}-lock", os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def locked(database: Path) -> Iterator[None]:
    """Be another program that keeps the service from storing anything."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        yield
        lock.execute("ROLLBACK")


def queue_up(method: Callable[..., object], *arguments: object) -> Future[Any]:
    """Let a thread call add() or check() of a storage; return once it waits in the queue."""
    thread, pool = Future[int](), ThreadPoolExecutor(1)
    outcome = pool.submit(lambda: thread.set_result(threading.get_ident()) or method(*arguments))
    wait = threading.Condition.wait.__code__
    wait_until(lambda: outcome.done() or sys._current_frames()[thread.result()].f_code is wait)
    return outcome
