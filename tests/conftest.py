"""What the tests share: a storage on SQLite, the application, a real gunicorn."""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from webtest import TestApp

from app import create_app
from start import get_storage
from storage import Storage
from tests.support.server import PATIENCE, TOKEN, Server, running

ROWS = "SELECT id, name, tag FROM plants ORDER BY id"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--crash-rounds",
        type=int,
        default=20,
        metavar="N",
        help="how often the service or a worker is killed under load (default: 20)",
    )


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show no dot for a test that passed, so that each file has one line."""
    return ("passed", "", "PASSED") if report.passed and report.when == "call" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, figures in report.user_properties:
            terminalreporter.write_line(f"{name}: {figures}")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "plants.db"


@pytest.fixture
def url(database: Path) -> str:
    """The URL of a database that does not exist yet."""
    return f"sqlite:///{database}"


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file without plants, as a start makes it: a copy is there without waiting for the disk."""
    database = tmp_path_factory.mktemp("new") / "plants.db"
    with contextlib.closing(get_storage(f"sqlite:///{database}")) as storage:
        storage.open_or_create()
    return database


@pytest.fixture
def storage(url: str, database: Path, new_database: Path) -> Iterator[Storage]:
    """A storage whose database is there."""
    shutil.copy(new_database, database)
    with contextlib.closing(get_storage(url, wait_limit=PATIENCE)) as storage:
        yield storage


@pytest.fixture
def client(storage: Storage) -> TestApp:
    client = TestApp(create_app(storage, [TOKEN]))
    client.authorization = ("Bearer", TOKEN)
    return client


@pytest.fixture
def stored(database: Path) -> Callable[[], list[tuple[int, str, str | None]]]:
    """Reads the rows of the table, in the order of id, past the service."""

    def read() -> list[tuple[int, str, str | None]]:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as file:
            return file.execute(ROWS).fetchall()

    return read


def names_in(file: Path) -> set[tuple[int, str]]:
    """Ids and names of the plants in a SQLite file that is as it should be."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return set(connection.execute("SELECT id, name FROM plants"))


@pytest.fixture
def taken_away(database: Path) -> Callable[[], AbstractContextManager[None]]:
    """Takes the table away for a while."""

    @contextlib.contextmanager
    def take_away() -> Iterator[None]:
        elsewhere = database.with_name("elsewhere.db")
        os.rename(database, elsewhere)
        yield
        os.rename(elsewhere, database)

    return take_away


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for tests that only send requests; each stores plants of its own."""
    with running(tmp_path_factory.mktemp("server"), WEB_CONCURRENCY="1") as server:
        yield server


@pytest.fixture
def serve(tmp_path: Path, url: str) -> Iterator[Callable[..., Server]]:
    """Starts gunicorn as the README does, on a free port and with a database of its own."""
    servers: list[Server] = []

    def start(*arguments: str, **options: Any) -> Server:
        servers.append(Server(tmp_path, *arguments, **{"DATABASE_URL": url, **options}))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
    for server in servers:
        assert server.may_fail or "Traceback" not in server.err, server.err
