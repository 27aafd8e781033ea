"""More fixtures for the tests of this folder: PostgreSQL, and syncs that fail."""

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgresql import PostgreSQL
from tests.support.server import ROOT

NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server for all tests that leave it as it was. Each has a database of its own."""
    with PostgreSQL() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: PostgreSQL) -> str:
    """The URL of a new database, which has no table."""
    postgresql.execute(f"CREATE DATABASE {(name := f'test{next(NUMBERS)}')}")
    return postgresql.url(name)


@pytest.fixture
def failing_sync(tmp_path: Path) -> dict[str, str]:
    """An environment for servers, whose fsync() a test can break.

    While the file at the path in SYNC_FAILS exists, each sync fails. While the one in SYNC_SKIPS
    exists, each sync does nothing.
    """
    library, source = tmp_path / "sync.so", ROOT / "tests" / "support" / "sync.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    names = ("SYNC_FAILS", "SYNC_SKIPS")
    return {"LD_PRELOAD": str(library), **{name: str(tmp_path / name) for name in names}}
