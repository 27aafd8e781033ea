"""What these tests share beyond what all do: PostgreSQL, and syncs that fail."""

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
    """A PostgreSQL server for all tests that leave it as it was."""
    with PostgreSQL() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: PostgreSQL) -> str:
    """The URL of a database without a table."""
    postgresql.execute(f"CREATE DATABASE {(name := f'test{next(NUMBERS)}')}")
    return postgresql.url(name)


@pytest.fixture
def failing_sync(tmp_path: Path) -> dict[str, str]:
    """The environment in which a sync fails or does nothing, while one of two files is there."""
    library, source = tmp_path / "sync.so", ROOT / "tests" / "support" / "sync.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    names = ("SYNC_FAILS", "SYNC_SKIPS")
    return {"LD_PRELOAD": str(library), **{name: str(tmp_path / name) for name in names}}
