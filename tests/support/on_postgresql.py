"""Fixtures with PostgreSQL in the place of SQLite, for a module that imports them all."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import psycopg
import pytest

from start import get_storage
from storage import Storage
from tests.support.server import PATIENCE

__all__ = ["storage", "stored", "taken_away", "url"]


@pytest.fixture
def url(postgresql_url) -> str:
    return postgresql_url


@pytest.fixture
def storage(url) -> Iterator[Storage]:
    with contextlib.closing(get_storage(url, wait_limit=PATIENCE)) as storage:
        storage.open_or_create()
        yield storage


@pytest.fixture
def stored(postgresql_stored) -> Callable[[], list[tuple[int, str, str | None]]]:
    return postgresql_stored


@pytest.fixture
def taken_away(url) -> Callable[[], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def take_away() -> Iterator[None]:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER TABLE plants RENAME TO elsewhere")
            yield
            connection.execute("ALTER TABLE elsewhere RENAME TO plants")

    return take_away
