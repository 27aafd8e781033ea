"""The interface and the storage once more, on PostgreSQL."""

import pytest

from tests.test_app import *  # noqa: F403
from tests.test_storage import *  # noqa: F403


@pytest.fixture
def url(postgresql_url):
    """PostgreSQL in the place of SQLite."""
    return postgresql_url


@pytest.fixture
def storage(postgresql_storage):
    """A storage whose table is there."""
    return postgresql_storage


@pytest.fixture
def stored(postgresql_stored):
    """Reads the rows of the table there."""
    return postgresql_stored


@pytest.fixture
def taken_away(postgresql_taken_away):
    """Takes the table there away for a while."""
    return postgresql_taken_away
