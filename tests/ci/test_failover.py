"""Fail-over under load: every plant that was answered for is on the server that is left."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.postgresql import PostgreSQL, running_postgresql, running_standby
from tests.support.server import Server, Writers, wait_until

Pair = tuple[PostgreSQL, PostgreSQL]


@pytest.fixture
def database() -> Iterator[PostgreSQL]:
    """A server that does sync."""
    with running_postgresql() as server:
        yield server


@pytest.fixture
def pair(database: PostgreSQL) -> Iterator[Pair]:
    """A primary, and a standby that each of its commits waits for."""
    with running_standby(database) as standby:
        database.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        database.execute("SELECT pg_reload_conf()")
        state = "SELECT sync_state FROM pg_stat_replication"
        wait_until(lambda: database.execute(state) == [("sync",)])
        yield database, standby


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


def goes_on_after_promotion(standby: PostgreSQL, writers: Writers) -> bool:
    """Promote a standby; return whether plants are acknowledged again."""
    failed = writers.answers[503]
    wait_until(lambda: writers.answers[503] > failed + 20)  # what was under way has its answer
    standby.execute("SELECT pg_promote()")
    return writers.goes_on(300)


def test_a_primary_that_is_killed_is_replaced_by_its_standby(server, pair):
    """After kill -9 of all its processes the service goes on with the standby, not restarted."""
    primary, standby = pair
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
        primary.kill()
        assert goes_on_after_promotion(standby, writers)
    assert lost(writers, standby) == set()
    assert server.request("GET", "/healthz")[0] == 200
    assert writers.answers.keys() <= {200, 503} and not writers.failures


def test_a_primary_that_is_frozen_is_replaced_too(server, pair):
    """A connection that stays open and has no answer is given up for the standby."""
    primary, standby = pair
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
        primary.signal("SIGSTOP")
        assert goes_on_after_promotion(standby, writers)
    assert lost(writers, standby) == set()


def test_what_the_primary_has_alone_is_not_answered_for(server, pair):
    """A primary that was cut off from its standby crashes, and comes back with plants of its own.

    Clients that retry find them there, but must not be told that they are stored: they go with the
    primary when it is lost for good.
    """
    primary, standby = pair
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
        standby.stop("SIGQUIT")
        waiting = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: primary.execute(waiting) == [(True,)])
        primary.kill()
        primary.start()
        alone = len(primary.execute("SELECT id FROM plants")) - len(writers.acknowledged)
        wait_until(lambda: primary.execute(waiting) == [(True,)])  # the retries
        primary.kill()
        standby.start()
        assert goes_on_after_promotion(standby, writers)
    assert alone > 0
    assert lost(writers, standby) == set()


def test_a_server_that_is_restarted_at_once_loses_nothing(serve, database):
    """Plants are there after a crash of all its processes and recovery."""
    server = serve(DATABASE_URL=database.url())
    with Writers(server.port) as writers:
        for _ in range(3):
            assert writers.goes_on(200)
            database.stop("SIGQUIT")
            database.start()
        assert writers.goes_on(200)
    assert lost(writers, database) == set()


def test_a_server_that_is_frozen_is_not_waited_for(serve, database):
    """Beyond the time limit every client gets a 503, and a 200 when the server goes on."""
    server = serve(DATABASE_URL=database.url())
    with Writers(server.port) as writers:
        assert writers.goes_on(200)
        database.signal("SIGSTOP")
        wait_until(lambda: writers.answers[503] > 100)  # those that waited, and many at once
        assert server.request("GET", "/healthz")[0] == 503
        database.signal("SIGCONT")
        assert writers.goes_on(200)
    assert lost(writers, database) == set()
    assert writers.answers.keys() <= {200, 503} and not writers.failures
