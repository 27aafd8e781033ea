"""What the tests share: a storage on SQLite, the application, gunicorn servers."""

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from webtest import TestApp

from app import create_app
from start import get_storage
from storage import Storage
from tests.support.rows import Row, read_rows
from tests.support.server import PATIENCE, SHORT, TOKEN, Server


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the figures that tests have recorded by `record_property`."""
    for report in terminalreporter.stats.get("passed", []):
        for name, figures in report.user_properties:
            terminalreporter.write_line(f"{name}: {figures}")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Where the SQLite file of a test is."""
    return tmp_path / "plants.db"


@pytest.fixture
def url(database: Path) -> str:
    """The URL of a database that does not exist yet; a module may have another one."""
    return f"sqlite:///{database}"


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file without plants, as a start makes it: a copy is there without waiting for the disk."""
    database = tmp_path_factory.mktemp("new") / "plants.db"
    with contextlib.closing(get_storage(f"sqlite:///{database}")) as storage:
        storage.check(PATIENCE)
    return database


@pytest.fixture
def open_storage(url: str) -> Iterator[Callable[..., Storage]]:
    """Opens storages, which are closed in the end: of the test's own URL, or of another."""
    with contextlib.ExitStack() as storages:

        def open_storage(url: str = url) -> Storage:
            return storages.enter_context(contextlib.closing(get_storage(url)))

        yield open_storage


@pytest.fixture
def storage(url: str, new_database: Path, open_storage: Callable[..., Storage]) -> Storage:
    """A storage; if it is on SQLite, its database is there."""
    if url.startswith("sqlite:"):
        shutil.copy(new_database, url.removeprefix("sqlite:///"))
    return open_storage()


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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of all tests that leave it as it was: each stores plants of its own."""
    with Server(tmp_path_factory.mktemp("server"), WEB_CONCURRENCY="1") as server:
        yield server


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another server for all tests, whose limits are short."""
    folder = tmp_path_factory.mktemp("short")
    with Server(folder, SHORT, "--keep-alive=1", WEB_CONCURRENCY="1") as server:
        yield server


@pytest.fixture
def serve(tmp_path: Path, url: str) -> Iterator[Callable[..., Server]]:
    """Starts gunicorn as the README does, on a free port and with a database of its own."""
    with contextlib.ExitStack() as servers:

        def start(*arguments: str, **options: Any) -> Server:
            server = Server(tmp_path, *arguments, **{"DATABASE_URL": url, **options})
            return servers.enter_context(server)

        yield start


@pytest.fixture
def silent() -> Iterator[tuple[str, socket.socket]]:
    """The URL of a database server that accepts connections and says nothing; its listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        yield f"postgresql://127.0.0.1:{listener.getsockname()[1]}/plants", listener
