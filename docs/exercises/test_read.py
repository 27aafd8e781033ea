"""What the second exercise of docs/code.md has to pass (-k sqlite), and the third (all)."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg
import pytest

from tests.support.server import HEADERS, STORED, Server
from tests.support.wire import new_plant

# An application in which each read takes a minute, as on a disk that hangs.
SLOW = """
from gevent import monkey
from engines.sqlite import SQLiteEngine
from start import get_app

SQLiteEngine.find = lambda *_: monkey.get_original("time", "sleep")(60)
"""


def get(server, number, headers=HEADERS):
    """Ask for a plant; return the status and the JSON body."""
    return server.request("GET", f"/plants/{number}", headers=headers)


def test_a_plant_is_read_by_its_id(server):
    """The answer is that of the POST, at once and for every id that there can be."""
    assert get(server, 1) == (200, {"name": "Sequoia"})
    for number in (7, 0, -7, 2**63 - 1, -(2**63)):
        status, answer = server.post({"id": number, "name": "Fern\n", "tag": ""})
        assert status == STORED
        assert get(server, number) == (200, answer)


@pytest.mark.parametrize("number", ["2", "-1", "seven", "1.0", "1/", 2**63, "9" * 30, ""])
def test_what_is_not_there_is_a_404(server, number):
    """Also what can be no id; and a token has to be sent."""
    assert get(server, number)[0] == 404
    assert get(server, 1, headers={})[0] == 401


def test_many_read_and_write_at_once(server):
    """Nobody is refused."""
    with ThreadPoolExecutor(32) as clients:
        plants = [new_plant() for _ in range(100)]
        posted = clients.map(server.post, plants)
        found = clients.map(partial(get, server), [1, 2] * 100)
        assert {status for status, _ in posted} == {STORED}
        assert [status for status, _ in found] == [200, 404] * 100


def test_slow_reads_keep_no_post_waiting_on_sqlite(sqlite, tmp_path):
    """They get a 503 after some time, even if no thread is left for them."""
    (tmp_path / "slow.py").write_text(SLOW)
    slow = ["--pythonpath", str(tmp_path), "slow:get_app()"]
    slowly = Server(tmp_path, *slow, DATABASE_URL=sqlite, WEB_CONCURRENCY="1")
    with slowly as server, ThreadPoolExecutor(40) as clients:
        readers = [clients.submit(get, server, 1) for _ in range(40)]
        assert {server.post(new_plant())[0] for _ in range(9)} == {STORED}
        assert {reader.result()[0] for reader in readers} == {503}


def test_a_read_of_a_locked_table_is_a_503_on_postgresql(postgresql, tmp_path):
    """Meanwhile the server has connections for others, and afterwards the plant is found again."""
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
