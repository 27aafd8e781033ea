"""Locks that keep the service from writing to its SQLite file."""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path


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
