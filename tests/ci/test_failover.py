"""Fail-over under load: every plant that was answered for is on the server that is left."""

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.postgresql import PostgreSQL
from tests.support.server import Server, Writers, wait_until

Pair = tuple[PostgreSQL, PostgreSQL]
TIME_LIMIT = 15.0  # seconds from a promotion to the first 200


@pytest.fixture
def new_server() -> Iterator[Callable[..., PostgreSQL]]:
    """Makes servers that do sync, and removes them in the end."""
    servers = []

    def make(*arguments: str, **options: PostgreSQL) -> PostgreSQL:
        servers.append(PostgreSQL(*arguments, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.remove()


@pytest.fixture
def pair(new_server: Callable[..., PostgreSQL]) -> Pair:
    """A primary, and a standby that each of its commits waits for."""
    primary = new_server()
    standby = new_server(copy_of=primary)
    primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    primary.execute("SELECT pg_reload_conf()")
    state = "SELECT sync_state FROM pg_stat_replication"
    wait_until(lambda: primary.execute(state) == [("sync",)])
    return primary, standby


@pytest.fixture
def server(serve: Callable[..., Server], pair: Pair) -> Server:
    """The service, which knows both servers."""
    primary, standby = pair
    url = f"postgresql:///postgres?host={primary.folder},{standby.folder}&user=postgres"
    server = serve(DATABASE_URL=url)
    assert server.port
    return server


def lost(writers: Writers, left: PostgreSQL) -> set[tuple[int, str]]:
    """What was acknowledged and is not on the server that is left."""
    stored = {(number, name) for number, name, _ in left.execute("SELECT * FROM plants")}
    return writers.acknowledged.items() - stored


def serves_after(promoted: PostgreSQL, writers: Writers) -> bool:
    """Promote a standby; return whether plants are acknowledged again within TIME_LIMIT."""
    failed = writers.answers[503]
    wait_until(lambda: writers.answers[503] > failed + 20)  # what was under way has its answer
    before = len(writers.acknowledged)
    start = time.monotonic()
    promoted.execute("SELECT pg_promote()")
    wait_until(lambda: len(writers.acknowledged) > before)
    return time.monotonic() - start < TIME_LIMIT


def test_a_primary_that_is_killed_is_replaced_by_its_standby(server, pair):
    """kill -9 of all its processes, and nobody restarts the service."""
    primary, standby = pair
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
        primary.kill()
        assert serves_after(standby, writers)
        assert writers.goes_on(300)
    assert lost(writers, standby) == set()
    assert server.request("GET", "/healthz")[0] == 200
    assert writers.answers.keys() <= {200, 503} and not writers.failures


def test_a_primary_that_is_frozen_is_replaced_too(server, pair):
    """Its connections stay open, and never have an answer."""
    primary, standby = pair
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
        primary.signal(signal.SIGSTOP)
        assert serves_after(standby, writers)
        assert writers.goes_on(300)
    assert lost(writers, standby) == set()


def test_what_the_primary_has_alone_is_not_answered_for(server, pair):
    """It commits while it is cut off, crashes, and comes back with what no standby has.

    Then clients that retry find their plants there, but must not be told that they are stored: they
    go with the primary, when it is lost for good.
    """
    primary, standby = pair
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
        standby.stop(signal.SIGQUIT)
        waiting = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: primary.execute(waiting) == [(True,)])
        primary.kill()
        primary.start()
        alone = len(primary.execute("SELECT id FROM plants")) - len(writers.acknowledged)
        wait_until(lambda: primary.execute(waiting) == [(True,)])  # the retries
        primary.kill()
        standby.start()
        assert serves_after(standby, writers)
        assert writers.goes_on(300)
    assert alone > 0
    assert lost(writers, standby) == set()


def test_a_server_that_is_restarted_at_once_loses_nothing(serve, new_server):
    """Immediate mode: a crash of all its processes, and recovery."""
    database = new_server()
    server = serve(DATABASE_URL=database.url())
    with Writers(server.port) as writers:
        for _ in range(3):
            assert writers.goes_on(200)
            database.stop(signal.SIGQUIT)
            database.start()
        assert writers.goes_on(200)
    assert lost(writers, database) == set()


def test_a_server_that_is_frozen_is_not_waited_for(serve, new_server):
    """Longer than the time limit: everybody gets a 503 in time, and a 200 when it goes on."""
    database = new_server()
    server = serve(DATABASE_URL=database.url())
    with Writers(server.port) as writers:
        assert writers.goes_on(200)
        database.signal(signal.SIGSTOP)
        wait_until(lambda: writers.answers[503] > 100)  # those that waited, and many at once
        assert server.request("GET", "/healthz")[0] == 503
        database.signal(signal.SIGCONT)
        assert writers.goes_on(200)
    assert lost(writers, database) == set()
    assert writers.answers.keys() <= {200, 503} and not writers.failures
