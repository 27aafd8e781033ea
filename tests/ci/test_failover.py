"""Fail-over under load: every plant that was answered for is on the server that is left."""

import pytest

from tests.support.postgresql import running_postgresql
from tests.support.server import Writers, wait_until


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_primary_that_is_killed_or_frozen_is_replaced_by_its_standby(serve, name):
    """The service goes on, not restarted; a connection that has no answers is given up."""
    with running_postgresql() as primary, running_postgresql(primary=primary) as standby:
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("SELECT pg_reload_conf()")
        state = "SELECT sync_state FROM pg_stat_replication"
        wait_until(lambda: primary.execute(state) == [("sync",)])
        url = f"postgresql:///postgres?host={primary.folder},{standby.folder}&user=postgres"
        server = serve(DATABASE_URL=url)
        with Writers(server.port) as writers:
            assert writers.goes_on(300)
            primary.signal(name)
            failed = writers.answers[503]
            wait_until(lambda: writers.answers[503] > failed + 20)  # what was under way has failed
            standby.execute("SELECT pg_promote()")
            assert writers.goes_on(300)
        stored = {(number, name) for number, name, _ in standby.execute("SELECT * FROM plants")}
        assert writers.acknowledged.items() - stored == set()
        wait_until(lambda: server.request("GET", "/healthz")[0] == 200)  # of either worker
    assert writers.answers.keys() <= {200, 503} and not writers.failures
