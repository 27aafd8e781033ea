"""Fixtures for the tests of the exercises: the service on a database that was there before them."""

import contextlib
import sqlite3
from collections.abc import Iterator

import pytest

from tests.support.pages import command
from tests.support.postgresql import PostgreSQL
from tests.support.server import Server

SQLITE = f"""
    PRAGMA application_id = {0x504C4E54};
    CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT"""
POSTGRESQL = "CREATE TABLE plants (id int8 PRIMARY KEY, name text NOT NULL, tag text)"
OLD = "INSERT INTO plants VALUES (1, 'Sequoia', NULL)"


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a file with a plant, and with the lock file that the service keeps beside it."""
    file = tmp_path_factory.mktemp("sqlite") / "plants.db"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.executescript(f"{SQLITE}; {OLD}")
    file.with_name("plants.db-lock").touch(0o600)
    return f"sqlite:///{file}"


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """The URL of a server with a plant, to which the operator has added the new columns."""
    with PostgreSQL() as server:
        server.execute(f"{POSTGRESQL}; {OLD}; {command('ALTER TABLE plants ADD')}")
        yield server.url()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The service on each database, for all tests of a file. Each test stores plants of its own."""
    url = request.getfixturevalue(request.param)
    with Server(tmp_path_factory.mktemp("server"), DATABASE_URL=url) as server:
        yield server
