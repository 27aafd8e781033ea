"""Tests for a solution of the third exercise of docs/exercises.md (-k sqlite), and of the fourth.

These tests know a solution only by its responses, its log and its standard error.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg
import pytest

from tests.support.server import HEADERS, STORED, Server
from tests.support.wire import new_plant

# An application in which each SELECT with a condition takes a minute, as on a disk that hangs.
# The real sleep() waits in C, as sqlite3 does: it stops a whole thread of the operating system.
SLOW = """
import sqlite3
from gevent import monkey
from start import get_app

sleep, connect = monkey.get_original("time", "sleep"), sqlite3.connect

def trace(statement):
    if statement.lstrip().upper().startswith("SELECT") and "WHERE" in statement.upper():
        sleep(60)

def connect_slowly(*arguments, **options):
    connection = connect(*arguments, **options)
    connection.set_trace_callback(trace)
    return connection

sqlite3.connect = connect_slowly
"""


def get(server, number, headers=HEADERS):
    """Ask for a plant. Return the status and the JSON body."""
    return server.request("GET", f"/plants/{number}", headers=headers)


@contextlib.contextmanager
def database(url: str) -> Iterator[sqlite3.Connection | psycopg.Connection]:
    """Connect to a database past the service. Each statement is a transaction."""
    if url.startswith("sqlite:"):
        path = url.removeprefix("sqlite:///")
        connection = sqlite3.connect(path, isolation_level=None)
    else:
        connection = psycopg.connect(url, autocommit=True)
    with contextlib.closing(connection):
        yield connection


def test_a_plant_is_read_by_its_id(server):
    """The body is that of the POST, at once and for every id that a plant can have."""
    assert get(server, 1) == (200, {"name": "Sequoia"})
    for number in (7, 0, -7, 2**63 - 1, -(2**63)):
        status, plant = server.post({"id": number, "name": "Fern\n", "tag": ""})
        assert status == STORED
        assert get(server, number) == (200, plant)


def test_a_read_returns_what_the_post_returned(server):
    """Members that the second exercise has added are the same in JSON, even true and false."""
    for evergreen in (True, False):
        plant = new_plant(tag="indoor", height=1.5, evergreen=evergreen, year=2024)
        posted, read = server.post(plant)[1], get(server, plant["id"])[1]
        assert json.dumps(read) == json.dumps(posted)


@pytest.mark.parametrize("number", ["2", "-1", "seven", "1.0", "1/", 2**63, "9" * 30, ""])
def test_an_id_without_a_plant_gets_a_404(server, number):
    """So does a text that can't be an id. A request without a token gets a 401."""
    assert get(server, number)[0] == 404
    assert get(server, 1, headers={})[0] == 401


def test_many_clients_read_and_write_at_once(server):
    """No request is refused."""
    with ThreadPoolExecutor(32) as clients:
        plants = [new_plant() for _ in range(100)]
        posted = clients.map(server.post, plants)
        found = clients.map(partial(get, server), [1, 2] * 100)
        assert {status for status, _ in posted} == {STORED}
        assert [status for status, _ in found] == [200, 404] * 100


def test_a_read_that_fails_gets_a_503_and_prints_no_traceback(server):
    """A pool of threads prints an exception that is raised in it, with any plant in its message."""
    with database(server.url) as other:
        other.execute("ALTER TABLE plants RENAME TO hidden")
        try:
            statuses = {get(server, 1)[0] for _ in range(9)}
        finally:
            other.execute("ALTER TABLE hidden RENAME TO plants")
    assert statuses == {503}
    assert "Traceback" not in server.err
    assert get(server, 1)[0] == 200


def test_a_text_that_is_not_utf8_is_neither_printed_nor_logged_on_sqlite(sqlite, tmp_path):
    """sqlite3 would quote it in its error. Other plants can be read afterwards."""
    with database(sqlite) as other:
        other.execute("INSERT INTO plants (id, name) VALUES (3, CAST(x'536563726574ff' AS TEXT))")
    with Server(tmp_path, DATABASE_URL=sqlite) as server:
        get(server, 3)
        assert get(server, 1)[0] == 200
        assert "Secret" not in server.out + server.err


def test_slow_reads_delay_no_post_on_sqlite(sqlite, tmp_path):
    """They get a 503 after some time, even those that no thread is left for."""
    (tmp_path / "slow.py").write_text(SLOW)
    slow = ["--pythonpath", str(tmp_path), "slow:get_app()"]
    slowly = Server(tmp_path, *slow, DATABASE_URL=sqlite, WEB_CONCURRENCY="1")
    with slowly as server, ThreadPoolExecutor(40) as clients:
        readers = [clients.submit(get, server, 1) for _ in range(40)]
        assert {server.post(new_plant())[0] for _ in range(9)} == {STORED}
        assert {reader.result()[0] for reader in readers} == {503}


def test_a_read_of_a_locked_table_gets_a_503_on_postgresql(postgresql, tmp_path):
    """Meanwhile the server has connections for others. Afterwards the plant is found again."""
    with Server(tmp_path, DATABASE_URL=postgresql) as server, psycopg.connect(postgresql) as other:
        assert get(server, 1)[0] == 200
        other.execute("LOCK TABLE plants")
        with ThreadPoolExecutor(200) as clients:
            readers = [clients.submit(get, server, 1) for _ in range(200)]
            while not all(reader.done() for reader in readers):
                psycopg.connect(postgresql).close()
            assert {reader.result()[0] for reader in readers} == {503}
        other.rollback()
        assert get(server, 1)[0] == 200
