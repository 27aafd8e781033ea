"""Fixtures of all tests: a storage on SQLite, a client of the application, gunicorn servers."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from webtest import TestApp

from app import create_app
from start import get_storage
from storage import Storage
from tests.support.server import PATIENCE, TOKEN, Server
from tests.support.storage import Row, read_rows


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """The path of the SQLite file of a test. The file does not exist yet."""
    return tmp_path / "plants.db"


@pytest.fixture
def url(database: Path) -> str:
    """The URL of a database that does not exist yet. A module may override it."""
    return f"sqlite:///{database}"


@pytest.fixture
def open_storage(url: str) -> Iterator[Callable[..., Storage]]:
    """A function that opens a storage at `url`, or at the URL that it is given, as the start does.

    All these storages are closed after the test.
    """
    with contextlib.ExitStack() as storages:

        def open_storage(url: str = url, creates: bool = True) -> Storage:
            storage = storages.enter_context(contextlib.closing(get_storage(url)))
            storage.engine.creates = creates
            return storage

        yield open_storage


@pytest.fixture
def storage(open_storage: Callable[..., Storage]) -> Storage:
    """A storage that has made its database already."""
    storage = open_storage()
    storage.check(PATIENCE)
    return storage


@pytest.fixture
def client(storage: Storage) -> TestApp:
    """A client of the application on `storage`. It sends a valid token."""
    client = TestApp(create_app(storage, [TOKEN]))
    client.authorization = ("Bearer", TOKEN)
    return client


@pytest.fixture
def stored(url: str) -> Callable[[], list[Row]]:
    """A function that reads all rows from the database itself, in the order of id."""
    return lambda: read_rows(url)


@pytest.fixture
def serve(tmp_path: Path, url: str) -> Iterator[Callable[..., Server]]:
    """A function that starts gunicorn as README.md does, but on a free port and at `url`.

    All these servers are killed after the test.
    """
    with contextlib.ExitStack() as servers:
        yield lambda *arguments, **options: servers.enter_context(
            Server(tmp_path, *arguments, **{"DATABASE_URL": url, **options})
        )


@pytest.fixture
def send() -> Iterator[Callable[..., socket.socket]]:
    """A function that sends data to a server on a new connection, and returns the connection.

    The connection stays open until the end of the test.
    """
    with contextlib.ExitStack() as connections:

        def send(server: Server, data: bytes = b"") -> socket.socket:
            connection = connections.enter_context(server.connect())
            connection.sendall(data)
            return connection

        yield send


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests that leave it as it was.

    They share its database. So each of them stores MONSTERA, or plants with ids of its own.
    """
    with Server(tmp_path_factory.mktemp("server"), WEB_CONCURRENCY="1") as server:
        yield server
