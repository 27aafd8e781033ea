"""PostgreSQL with standbys, and behind PgBouncer: no acknowledged plant is lost."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from plant import Plant
from tests.support.postgresql import OPTIONS, PostgreSQL
from tests.support.server import PATIENCE, STORED, wait_until
from tests.support.storage import read_names
from tests.support.wire import MONSTERA, Writers


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fail_over_loses_nothing(serve, how):
    """The service recovers by itself on the new primary."""
    with PostgreSQL() as primary, PostgreSQL(primary) as standby:
        primary.set_synchronous("*")
        state = "SELECT sync_state FROM pg_stat_replication"
        wait_until(lambda: primary.execute(state) == [("sync",)])
        hosts = f"{standby.folder},{primary.folder}"  # The first one takes no writes yet.
        server = serve(DATABASE_URL=f"postgresql:///postgres?host={hosts}&user=postgres")
        with Writers(server.port) as writers:
            writers.wait_for_more(100)
            primary.signal(how)
            failed = writers.answers[503]
            wait_until(lambda: writers.answers[503] > failed)  # The outcome is unknown.
            standby.execute("SELECT pg_promote()")
            writers.wait_for_more(100)
        assert writers.acknowledged.items() <= read_names(standby.url()).items()
    assert writers.answers.keys() == {STORED, 503} and not writers.failures


@pytest.mark.parametrize("already", [False, True], ids=["new", "there already"])
def test_a_plant_that_is_not_on_the_standby_is_not_acknowledged(
    postgresql, postgresql_url, serve, already
):
    """PostgreSQL calls a commit that stopped waiting for the standbys a success.

    A plant that is there already may be on the primary alone. A batch that is given up leaves no
    process on the server, which has room for a limited number.
    """
    quiet = f"{postgresql_url}&options=-cclient_min_messages%3Derror"  # It hides warnings.
    server = serve(DATABASE_URL=quiet, WEB_CONCURRENCY="1")
    assert server.post(MONSTERA if already else {**MONSTERA, "id": 8})[0] == STORED
    query = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    with ThreadPoolExecutor() as pool:
        try:
            postgresql.set_synchronous("nobody")
            wait_until(lambda: server.health() == 503)
            adding = pool.submit(wait_until, lambda: server.post(MONSTERA)[0] == STORED)
            # First the health check's batch, twice, since it is retried; then the plant's.
            for how in ("pg_terminate_backend", "pg_cancel_backend", "pg_cancel_backend", None):
                ((session,),) = wait_until(lambda: postgresql.execute(query))
                if how:
                    postgresql.execute(f"SELECT {how}({session})")
                wait_until(lambda old=session: (old,) not in postgresql.execute(query))
            wait_until(lambda: postgresql.execute(query))
            assert not adding.done()
        finally:
            postgresql.set_synchronous("")
        adding.result()
    assert read_names(server.url)[7] == "Monstera"


@contextlib.contextmanager
def pooler(server: PostgreSQL, database: str, user: str) -> Iterator[str]:
    """Run PgBouncer in transaction mode before a server. Yield the URL of a database behind it."""
    (settings := server.folder / "settings").write_text(
        f"[databases]\n{database} = host={server.folder} user={user}\n"
        f"[pgbouncer]\npool_mode = transaction\nunix_socket_dir = {server.folder}\n"
        "auth_type = any\nlisten_addr =\nlisten_port = 6432\n"
    )
    with subprocess.Popen(["pgbouncer", settings], **OPTIONS) as process:
        try:
            server.wait_for("6432")
            yield f"postgresql:///{database}?host={server.folder}&port=6432&user={user}"
        finally:
            process.kill()


@pytest.fixture
def pooled_url(postgresql) -> Iterator[str]:
    """The URL of a pooler, for a role whose commits do not wait, and at a high isolation level."""
    postgresql.execute(
        "CREATE ROLE pooled LOGIN; ALTER ROLE pooled SET synchronous_commit = off; "
        "ALTER ROLE pooled SET default_transaction_isolation = 'repeatable read'"
    )
    postgresql.execute("CREATE DATABASE pooled OWNER pooled")
    with pooler(postgresql, "pooled", "pooled") as url:
        yield url


def test_a_pooler_that_met_a_standby_first_works_once_that_is_promoted(serve):
    """PgBouncer then still says in_hot_standby, as the standby said when PgBouncer connected."""
    with (
        PostgreSQL() as primary,
        PostgreSQL(primary) as standby,
        pooler(standby, "postgres", "postgres") as url,
    ):
        server = serve(DATABASE_URL=url, WEB_CONCURRENCY="1")
        assert server.post(MONSTERA)[0] == server.health() == 503
        standby.execute("SELECT pg_promote()")
        wait_until(lambda: server.health() == 200)
        assert server.post(MONSTERA)[0] == STORED


def test_a_pooler_weakens_no_commit(pooled_url, open_storage):
    """Each commit waits for the disk, though the role's default is not to.

    None of our settings reaches the next client.
    """
    options = {"autocommit": True, "prepare_threshold": None}
    with psycopg.connect(pooled_url, **options) as neighbour:
        storage = open_storage(pooled_url)
        storage.check(PATIENCE)
        neighbour.execute(
            "ALTER TABLE plants ADD session int DEFAULT pg_backend_pid(), "
            "ADD setting text DEFAULT current_setting('synchronous_commit'), "
            "ADD level text DEFAULT current_setting('transaction_isolation')"
        )
        neighbour.execute("SET synchronous_commit = off")
        storage.add(Plant(7, "n"))
        with neighbour.transaction():
            neighbour.execute("SELECT")  # From here on it has the connection that was used last.
            storage.add(Plant(8, "n"))
        seen = neighbour.execute("SELECT session, setting, level FROM plants").fetchall()
        assert [row[1:] for row in seen] == [("on", "read committed")] * 2
        assert len({session for session, *_ in seen}) == 2
        assert neighbour.execute("SHOW lock_timeout").fetchone() == ("0",)
