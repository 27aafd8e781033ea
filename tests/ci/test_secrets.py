"""What stays between a client and the service, with PostgreSQL as its storage."""

from collections.abc import Callable

import psycopg
import pytest

from tests.support.on_postgresql import *  # noqa: F403
from tests.test_secrets import *  # noqa: F403


@pytest.fixture
def refuse_inserts(url: str) -> Callable[[str], None]:
    """Makes the database refuse one plant, in a way that the service does not know."""

    def refuse(name: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"ALTER TABLE plants ADD CHECK (name <> '{name}')")

    return refuse
