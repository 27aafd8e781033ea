"""What stays between a client and the service, with PostgreSQL as its storage."""

from collections.abc import Callable

import psycopg
import pytest

from tests.test_secrets import *  # noqa: F403


@pytest.fixture
def url(postgresql_url):
    """PostgreSQL in the place of SQLite."""
    return postgresql_url


@pytest.fixture
def taken_away(postgresql_taken_away):
    """Takes the table there away for a while."""
    return postgresql_taken_away


@pytest.fixture
def refuse_inserts(url: str) -> Callable[[str], None]:
    """Makes the database refuse one plant, in a way that the service does not know."""

    def refuse(name: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"ALTER TABLE plants ADD CHECK (name <> '{name}')")

    return refuse
