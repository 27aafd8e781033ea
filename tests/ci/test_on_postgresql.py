"""The interface and the storage once more, on PostgreSQL."""

import contextlib

import pytest

from storage import Storage
from tests.support.server import PATIENCE
from tests.test_app import *  # noqa: F403
from tests.test_storage import *  # noqa: F403


@pytest.fixture
def url(postgresql_url):
    """PostgreSQL in the place of SQLite."""
    return postgresql_url


@pytest.fixture
def storage(postgresql_url):
    """A storage whose table is there."""
    with contextlib.closing(Storage.from_url(postgresql_url, wait_limit=PATIENCE)) as storage:
        storage.check_start()
        yield storage


@pytest.fixture
def stored(postgresql_stored):
    """Reads the rows of the table there."""
    return postgresql_stored


@pytest.fixture
def taken_away(postgresql_taken_away):
    """Takes the table there away for a while."""
    return postgresql_taken_away
