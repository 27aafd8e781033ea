"""Fail-over under load: every plant that was answered for is on the server that is left."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.postgresql import PostgreSQL, running_postgresql, running_standby
from tests.support.server import Server, Writers, wait_until

Pair = tuple[PostgreSQL, PostgreSQL]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A primary, and a standby that each of its commits waits for."""
    with running_postgresql() as primary, running_standby(primary) as standby:
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("SELECT pg_reload_conf()")
        state = "SELECT sync_state FROM pg_stat_replication"
        wait_until(lambda: primary.execute(state) == [("sync",)])
        yield primary, standby


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


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_primary_that_is_killed_or_frozen_is_replaced_by_its_standby(server, pair, name):
    """The service goes on, not restarted; a connection that has no answers is given up."""
    primary, standby = pair
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
        primary.signal(name)
        assert goes_on_after_promotion(standby, writers)
    assert lost(writers, standby) == set()
    wait_until(lambda: server.request("GET", "/healthz")[0] == 200)  # of either worker
    assert writers.answers.keys() <= {200, 503} and not writers.failures
