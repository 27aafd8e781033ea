"""--preload, which Render presets: each worker still begins an application of its own."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.postgresql import PostgreSQL
from tests.support.server import HERE, STORED, wait_until
from tests.support.storage import read_names
from tests.support.wire import MONSTERA

PRESET = "--preload --access-logfile - --bind=127.0.0.1:0"
KINDS = ["worker.Worker", "gevent", "gthread", "sync"]


@pytest.mark.parametrize("engine", ["SQLite", "PostgreSQL"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_service_that_is_preloaded_mixes_up_no_clients(serve, request, url, kind, engine):
    """Each client sends a token, a path or a plant of its own.

    Some go to a worker that has replaced another one.

    Bottle keeps the present request in a threading.local(). Greenlets would share it if the master
    had imported Bottle.
    """
    if engine == "PostgreSQL":
        url = request.getfixturevalue("postgresql_url")
    options = {"GUNICORN_CMD_ARGS": f"{PRESET} -k{kind} --threads=8", "DATABASE_URL": url}
    server = serve(command=HERE[:1], **options)
    kinds = {
        STORED: lambda n: server.post({"id": n, "name": f"Ivy {n}."}),
        401: lambda n: server.post({"id": n, "name": "n"}, f"wrong-token-{n:08}"),
        404: lambda n: server.request("GET", f"/nowhere-{n}"),
    }

    def send(number: int) -> None:
        wanted = [*kinds][number % 3]
        status, body = kinds[wanted](number)
        assert status == wanted
        assert wanted != STORED or body == {"name": f"Ivy {number}."}
        assert wanted != 404 or f"/nowhere-{number};" in body["message"]

    with ThreadPoolExecutor(32) as clients:
        list(clients.map(send, range(300)))
        os.kill(victim := server.workers()[0], signal.SIGKILL)
        wait_until(lambda: victim not in server.workers())
        list(clients.map(send, range(300, 600)))
    assert read_names(url) == {number: f"Ivy {number}." for number in range(0, 600, 3)}
    assert server.stop() == 0


def test_a_database_server_that_is_frozen_stops_no_other_request(serve):
    """psycopg chooses at its import how it waits, so the master must not import it, either."""
    with PostgreSQL() as own:
        options = {"GUNICORN_CMD_ARGS": PRESET, "DATABASE_URL": own.url(), "WEB_CONCURRENCY": "1"}
        server = serve(command=HERE[:1], **options)
        assert server.post(MONSTERA)[0] == STORED
        own.signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.post, {**MONSTERA, "id": 8})
            for _ in range(20):
                assert server.request("GET", "/livez") == (200, {"status": "ok"})
                assert not waiting.done()
            own.signal(signal.SIGCONT)
            assert waiting.result()[0] == STORED
