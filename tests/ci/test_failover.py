"""Fail-over under load: every plant that was answered for is on the server that is left."""

from collections.abc import Iterator

import pytest

from tests.support.postgresql import PostgreSQL, running_postgresql, running_standby
from tests.support.server import Writers, wait_until


@pytest.fixture
def pair() -> Iterator[tuple[PostgreSQL, PostgreSQL]]:
    """A primary, and a standby that each of its commits waits for."""
    with running_postgresql() as primary, running_standby(primary) as standby:
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("SELECT pg_reload_conf()")
        state = "SELECT sync_state FROM pg_stat_replication"
        wait_until(lambda: primary.execute(state) == [("sync",)])
        yield primary, standby


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_primary_that_is_killed_or_frozen_is_replaced_by_its_standby(serve, pair, name):
    """The service goes on, not restarted; a connection that has no answers is given up."""
    primary, standby = pair
    url = f"postgresql:///postgres?host={primary.folder},{standby.folder}&user=postgres"
    server = serve(DATABASE_URL=url)
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
        primary.signal(name)
        failed = writers.answers[503]
        wait_until(lambda: writers.answers[503] > failed + 20)  # what was under way has its answer
        standby.execute("SELECT pg_promote()")
        assert writers.goes_on(300)
    stored = {(number, name) for number, name, _ in standby.execute("SELECT * FROM plants")}
    assert writers.acknowledged.items() - stored == set()
    wait_until(lambda: server.request("GET", "/healthz")[0] == 200)  # of either worker
    assert writers.answers.keys() <= {200, 503} and not writers.failures
