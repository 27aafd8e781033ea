"""Fixtures with PostgreSQL in the place of SQLite, for a module that imports them all."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import psycopg
import pytest

from storage import Storage
from tests.support.server import PATIENCE

__all__ = ["storage", "stored", "taken_away", "url"]


@pytest.fixture
def url(postgresql_url: str) -> str:
    return postgresql_url


@pytest.fixture
def storage(url: str) -> Iterator[Storage]:
    with contextlib.closing(Storage.from_url(url, wait_limit=PATIENCE)) as storage:
        storage.check_start()
        yield storage


@pytest.fixture
def stored(
    postgresql_stored: Callable[[], list[tuple[int, str, str | None]]],
) -> Callable[[], list[tuple[int, str, str | None]]]:
    return postgresql_stored


@pytest.fixture
def taken_away(url: str) -> Callable[[], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def take_away() -> Iterator[None]:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER TABLE plants RENAME TO elsewhere")
            yield
            connection.execute("ALTER TABLE elsewhere RENAME TO plants")

    return take_away
