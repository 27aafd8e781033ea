"""What the tests share: a storage on a real SQLite file, the application, a real gunicorn."""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from webtest import TestApp

from app import create_app
from storage import SQLiteEngine, Storage
from tests.server import Server

ROOT = Path(__file__).parent.parent
TOKEN = "test-token-0123456789"


def open_storage(path: Path) -> Storage:
    """A storage that gives up soon, not looked at yet."""
    return Storage(SQLiteEngine(str(path), busy_timeout=0.2), wait_limit=0.5)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Where a test's SQLite file is, or will be."""
    return tmp_path / "plants.db"


@pytest.fixture
def storage(database: Path) -> Iterator[Storage]:
    """A storage that gives up soon."""
    storage = open_storage(database)
    storage.check_start()
    yield storage
    storage.close()


@pytest.fixture
def client(storage: Storage) -> TestApp:
    """A client of the application that has a token."""
    client = TestApp(create_app(storage, [TOKEN]))
    client.authorization = ("Bearer", TOKEN)
    return client


@pytest.fixture
def stored(database: Path) -> Callable[[], list[tuple[int, str, str | None]]]:
    """Reads the rows of the table, in the order of id, past the service."""

    def read() -> list[tuple[int, str, str | None]]:
        with contextlib.closing(
            sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        ) as connection:
            return connection.execute("SELECT id, name, tag FROM plants ORDER BY id").fetchall()

    return read


@pytest.fixture
def serve(tmp_path: Path, database: Path) -> Iterator[Callable[..., Server]]:
    """Starts gunicorn as the README does, on a free port and with a database of its own."""
    servers = []

    def start(*arguments: str, command: list[str] | None = None, **environment: str) -> Server:
        settings = {"PLANTS_TOKENS": TOKEN, "DATABASE_URL": f"sqlite:///{database}", **environment}
        servers.append(Server(ROOT, tmp_path, arguments, command, settings))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
        assert server.may_fail or "Traceback" not in server.err, server.err
