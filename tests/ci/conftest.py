"""What these tests share beyond what all do: PostgreSQL, and syncs that fail."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

from tests.conftest import ROWS
from tests.support.postgresql import PostgreSQL, running_postgresql
from tests.support.server import ROOT


@pytest.fixture(autouse=True, scope="session")
def hypothesis_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where hypothesis keeps its tables: not in the folder of the project."""
    set_hypothesis_home_dir(tmp_path_factory.mktemp("hypothesis"))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server for all tests."""
    with running_postgresql("fsync=off") as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: PostgreSQL) -> str:
    """The URL of a database without a table: what `url` is for the tests of PostgreSQL."""
    return postgresql.new_schema()


@pytest.fixture
def postgresql_stored(postgresql_url: str) -> Callable[[], list[tuple[int, str, str | None]]]:
    """Reads the rows of the table, as `stored` does."""

    def read() -> list[tuple[int, str, str | None]]:
        with psycopg.connect(postgresql_url) as connection:
            return connection.execute(ROWS).fetchall()

    return read


@pytest.fixture
def failing_sync(tmp_path: Path) -> dict[str, str]:
    """The environment in which a sync fails or does nothing, while one of two files is there."""
    library, source = tmp_path / "sync.so", ROOT / "tests" / "support" / "sync.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    names = ("SYNC_FAILS", "SYNC_SKIPS")
    return {"LD_PRELOAD": str(library), **{name: str(tmp_path / name) for name in names}}
