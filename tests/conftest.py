"""What the tests share: a storage on each engine, the application, a real gunicorn."""

import contextlib
import os
import shutil
import socket
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psycopg
import pytest
from webtest import TestApp

from app import create_app
from storage import Storage
from tests.support.postgresql import PostgreSQL, program
from tests.support.server import PATIENCE, ROOT, TOKEN, Server

ROWS = "SELECT id, name, tag FROM plants ORDER BY id"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of pytest's command line."""
    parser.addoption(
        "--crash-rounds",
        type=int,
        default=20,
        metavar="N",
        help="how often tests/test_crashes.py kills the service or a worker (default: 20)",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was measured, and what was left out, once for each reason."""
    for report in terminalreporter.stats.get("passed", []):
        for name, figures in report.user_properties:
            terminalreporter.write_line(f"{name}: {figures}")
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"left out {count} tests: {reason}")


def require_programs(*names: str) -> None:
    """Skip the test where one of them is not installed."""
    for name in names:
        if not shutil.which(name):
            pytest.skip(f"{name} is not installed")


@contextlib.contextmanager
def running_postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server that does not sync; skips the test where there is none to start."""
    for name in ("initdb", "postgres"):
        if not program(name):
            pytest.skip(f"PostgreSQL's program {name} is not installed")
    server = PostgreSQL("fsync=off")
    yield server
    server.remove()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server for all tests."""
    with running_postgresql() as server:
        yield server


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Where a test's SQLite file is, or will be."""
    return tmp_path / "plants.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, database: Path) -> str:
    """The URL of a database that does not exist or has no table yet: one of each engine."""
    if request.param == "sqlite":
        return f"sqlite:///{database}"
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.new_schema()


@pytest.fixture
def storage(url: str) -> Iterator[Storage]:
    """A storage that has been started."""
    storage = Storage.from_url(url, wait_limit=PATIENCE)
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
def stored(url: str) -> Callable[[], list[tuple[int, str, str | None]]]:
    """Reads the rows of the table, in the order of id, past the service."""

    def read() -> list[tuple[int, str, str | None]]:
        if url.startswith("postgresql:"):
            with psycopg.connect(url) as connection:
                return connection.execute(ROWS).fetchall()
        path = url.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return connection.execute(ROWS).fetchall()

    return read


@pytest.fixture
def taken_away(url: str, database: Path) -> Callable[[], AbstractContextManager[None]]:
    """Takes the table away for a while."""

    @contextlib.contextmanager
    def take_away() -> Iterator[None]:
        elsewhere = database.with_name("elsewhere.db")
        if url.startswith("sqlite:"):
            os.rename(database, elsewhere)
            yield
            os.rename(elsewhere, database)
        else:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("ALTER TABLE plants RENAME TO elsewhere")
                yield
                connection.execute("ALTER TABLE elsewhere RENAME TO plants")

    return take_away


@pytest.fixture
def serve(tmp_path: Path, url: str) -> Iterator[Callable[..., Server]]:
    """Starts gunicorn as the README does, on a free port and with a database of its own."""
    servers = []

    def start(
        *arguments: str,
        command: list[str] | None = None,
        listener: socket.socket | None = None,
        **environment: str,
    ) -> Server:
        settings = {"PLANTS_TOKENS": TOKEN, "DATABASE_URL": url, **environment}
        servers.append(Server(ROOT, tmp_path, arguments, command, settings, listener))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
        assert server.may_fail or "Traceback" not in server.err, server.err


@pytest.fixture
def failing_sync(tmp_path: Path) -> dict[str, str]:
    """The environment in which a sync fails, or kills, while one of two files is there."""
    require_programs("cc")
    library, source = tmp_path / "failing_sync.so", Path(__file__).with_name("failing_sync.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {
        "LD_PRELOAD": str(library),
        "SYNC_FAILS": str(tmp_path / "sync-fails"),
        "SYNC_KILLS": str(tmp_path / "sync-kills"),
    }
