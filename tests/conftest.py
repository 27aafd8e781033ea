"""What the tests share: a storage on SQLite, the application, gunicorn servers."""

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
    """Where the SQLite file of a test is."""
    return tmp_path / "plants.db"


@pytest.fixture
def url(database: Path) -> str:
    """The URL of a database that does not exist yet; a module may have another one."""
    return f"sqlite:///{database}"


@pytest.fixture
def open_storage(url: str) -> Iterator[Callable[..., Storage]]:
    """Opens storages, which are closed in the end: of the test's own URL, or of another."""
    with contextlib.ExitStack() as storages:
        yield lambda url=url: storages.enter_context(contextlib.closing(get_storage(url)))


@pytest.fixture
def storage(open_storage: Callable[..., Storage]) -> Storage:
    """A storage whose database is there."""
    storage = open_storage()
    storage.check(PATIENCE)
    return storage


@pytest.fixture
def client(storage: Storage) -> TestApp:
    """A client of the application on that storage, which sends the token."""
    client = TestApp(create_app(storage, [TOKEN]))
    client.authorization = ("Bearer", TOKEN)
    return client


@pytest.fixture
def stored(url: str) -> Callable[[], list[Row]]:
    """Reads the rows of the table, in the order of id, past the service."""
    return lambda: read_rows(url)


@pytest.fixture
def serve(tmp_path: Path, url: str) -> Iterator[Callable[..., Server]]:
    """Starts gunicorn as the README does, on a free port and with a database of its own."""
    with contextlib.ExitStack() as servers:
        yield lambda *arguments, **options: servers.enter_context(
            Server(tmp_path, *arguments, **{"DATABASE_URL": url, **options})
        )


@pytest.fixture
def send() -> Iterator[Callable[..., socket.socket]]:
    """Sends data to a server on a new connection, which stays open until the end of the test."""
    with contextlib.ExitStack() as connections:

        def send(server: Server, data: bytes = b"") -> socket.socket:
            connection = connections.enter_context(server.connect())
            connection.sendall(data)
            return connection

        yield send


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of all tests that leave it as it was: each stores plants of its own."""
    with Server(tmp_path_factory.mktemp("server"), WEB_CONCURRENCY="1") as server:
        yield server
