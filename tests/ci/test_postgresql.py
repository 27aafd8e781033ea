"""The storage on a PostgreSQL server that goes away, hangs, is not ours or does not wait for disks.

What every engine does is in tests/test_storage.py; fail-over is in tests/ci/test_failover.py.
"""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from storage import CANCEL_LIMIT, Plant, StartRefused, Storage, Unavailable
from tests.conftest import ROOT, running_postgresql
from tests.support.postgresql import PostgreSQL
from tests.support.server import PATIENCE, TOKEN, wait_until

SOON = 2 * (CANCEL_LIMIT + 1)  # seconds; a wait limit that leaves the engine one
MONSTERA = Plant(7, "Monstera")


@pytest.fixture
def url(postgresql: PostgreSQL) -> str:
    """PostgreSQL alone."""
    return postgresql.new_schema()


@pytest.fixture
def connection(url: str) -> Iterator[psycopg.Connection]:
    """A connection of somebody else."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def hasty(url: str, storage: Storage) -> Iterator[Storage]:
    """A storage that gives up soon."""
    hasty = Storage.from_url(url, wait_limit=SOON)
    yield hasty
    hasty.close()


@pytest.fixture
def own_server() -> Iterator[PostgreSQL]:
    """A server that a test may stop, or set up otherwise."""
    with running_postgresql() as server:
        yield server


def check_start(url: str) -> None:
    """Start a storage as the service does, and end it."""
    with contextlib.closing(Storage.from_url(url)) as storage:
        storage.check_start()


def backends(connection: psycopg.Connection, state: str) -> list[int]:
    """The process ids of the server's processes for the service that are in that state."""
    found = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'plants' AND query <> '' "
        f"AND datname = current_database() AND {state}"
    )
    return [row[0] for row in found]


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Start a call; return its thread and, once there is one, its result or exception."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


# what stops the start


@pytest.mark.parametrize(
    "table",
    [
        "TABLE plants (id bigint PRIMARY KEY, name text NOT NULL)",
        "TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, tag text, height int)",
        "TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, tag text NOT NULL)",
        "TABLE plants (id bigint PRIMARY KEY, name text, tag text)",
        "TABLE plants (id bigint PRIMARY KEY, name varchar(9) NOT NULL, tag text)",
        "TABLE plants (id integer PRIMARY KEY, name text NOT NULL, tag text)",
        "TABLE plants (id bigint NOT NULL, name text NOT NULL, tag text)",
        "UNLOGGED TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, tag text)",
        "VIEW plants AS SELECT 1::bigint AS id, ''::text AS name, ''::text AS tag",
    ],
)
def test_a_table_of_another_shape_is_refused(url, connection, table):
    """Nothing is stored into what somebody else made for something else."""
    connection.execute(f"CREATE {table}")
    with pytest.raises(StartRefused, match=r"another shape|matching the ON CONFLICT"):
        check_start(url)


def test_a_database_that_cannot_hold_any_text_is_refused(postgresql):
    """It must be UTF-8."""
    postgresql.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(StartRefused, match="in LATIN1, not UTF8"):
        check_start(postgresql.url("latin"))


@pytest.mark.parametrize("rights", ["", "SELECT", "SELECT, INSERT", "INSERT, UPDATE"])
def test_missing_rights_are_refused(storage, url, connection, rights):
    """All that the service ever needs is tried at the start."""
    schema = connection.execute("SELECT current_schema()").fetchone()[0]
    role = f"{schema}_{rights.replace(', ', '_').lower()}"
    connection.execute(f"CREATE ROLE {role} LOGIN")
    connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    if rights:
        connection.execute(f"GRANT {rights} ON plants TO {role}")
    poor = Storage.from_url(url.replace("user=postgres", f"user={role}"))
    with pytest.raises(StartRefused, match="permission denied for table plants; the role needs"):
        poor.check_start()
    connection.execute(f"GRANT SELECT, INSERT, UPDATE ON plants TO {role}")
    poor.check_start()
    poor.close()


def test_no_right_to_create_the_table_is_refused(url, connection):
    """The line says what is missing."""
    schema = connection.execute("SELECT current_schema()").fetchone()[0]
    connection.execute(f"CREATE ROLE {schema}_guest LOGIN")
    connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO {schema}_guest")
    with pytest.raises(StartRefused, match="permission denied for schema"):
        check_start(url.replace("user=postgres", f"user={schema}_guest"))


@pytest.mark.parametrize("order", [0, 1])
def test_one_of_several_servers_that_refuses_does_not_stop_the_start(url, tmp_path, order):
    """The other one may only be away for a while."""
    folder = url.partition("host=")[2].partition("&")[0]
    hosts = [folder, str(tmp_path)]
    several = url.replace(f"host={folder}", f"host={hosts[order]},{hosts[1 - order]}")
    storage = Storage.from_url(several.replace("user=postgres", "user=nobody"), wait_limit=SOON)
    storage.check_start()
    storage.close()


def test_no_part_of_a_password_is_told(caplog):
    """One whose special characters are not encoded is taken for a part of something else."""
    for url in (
        "postgresql://u:p@SECRET@h/d",
        "postgresql://u:p/SECRET@h/d",
        "postgresql://u:SECRET%@h/d",
    ):
        with pytest.raises(StartRefused, match="percent-encoded") as refusal:
            Storage.from_url(url)
        assert "SECRET" not in str(refusal.value) + caplog.text


def test_a_host_that_no_name_server_can_know_is_refused():
    """An empty or too long part of a name."""
    for host in ("a..b", "a" * 64 + ".example"):
        with pytest.raises(StartRefused, match="no host can have this name"):
            check_start(f"postgresql://{host}/d")


def test_what_a_constraint_of_the_operators_refuses_is_in_no_log(storage, connection):
    """PostgreSQL's own message has the row."""
    connection.execute("ALTER TABLE plants ADD CHECK (name <> 'secret')")
    with pytest.raises(ValueError, match="violates check constraint") as refusal:
        storage.add(Plant(7, "secret"))
    assert "secret" not in str(refusal.value)
    assert refusal.value.__cause__ is None and refusal.value.__suppress_context__


def test_a_table_that_is_changed_under_the_service_is_looked_at_again(storage, connection):
    """What was prepared for the old one fails, and is no reason to fail for ever."""
    for number in range(10):
        storage.add(Plant(number, "n"))
        storage.add(Plant(number, "n"))
    connection.execute("ALTER TABLE plants ALTER tag TYPE varchar(10)")
    with pytest.raises(Unavailable, match="another shape"):
        storage.add(Plant(0, "n"))
    connection.execute("ALTER TABLE plants ALTER tag TYPE text")
    storage.add(Plant(0, "n"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("user=postgres", "user=nobody"), 'role "nobody" does not exist'),
        (("///postgres", "///nothing"), 'database "nothing" does not exist'),
        (("?", "?sslmode=nonsense&"), 'invalid sslmode value: "nonsense"'),
        (("?", "?connect_timeout=soon&"), "bad value for connect_timeout: 'soon'"),
    ],
    ids=["role", "database", "sslmode", "connect_timeout"],
)
def test_a_wrong_url_stops_the_start_in_one_line(serve, url, change, words):
    """As a wrong setting of any kind does."""
    server = serve(DATABASE_URL=url.replace(*change))
    assert server.wait() != 0
    said = [line for line in server.err.splitlines() if not line.startswith("[")]
    assert len(said) == 1 and words in said[0]
    assert "Booting worker" not in server.err


# a server that is away


def test_a_server_that_is_away_at_the_start_is_waited_for(serve, own_server):
    """The service starts, says 503, and makes the table and serves as soon as there is a server."""
    own_server.stop()
    server = serve(DATABASE_URL=own_server.url(), WEB_CONCURRENCY="1")
    assert server.request("GET", "/openapi.json")[0] == 200
    assert (
        "starting with 503 for all plants until this has passed: PostgreSQL: connection"
        in server.err
    )
    status, headers, _ = server.request("GET", "/healthz")
    assert (status, headers["retry-after"]) == (503, "1")
    own_server.start()
    wait_until(lambda: server.request("GET", "/healthz")[0] == 200)
    assert server.post({"id": 7, "name": "Monstera"})[0] == 200
    assert own_server.execute("SELECT * FROM plants") == [(7, "Monstera", None)]


def test_a_server_that_was_restarted_is_used_again(own_server, caplog):
    """A request that comes meanwhile is answered when the server is back; the log has a line."""
    storage = Storage.from_url(own_server.url(), wait_limit=PATIENCE)
    storage.check_start()
    for crash in (own_server.stop, own_server.kill):
        crash()
        thread, outcome = in_thread(lambda: storage.add(MONSTERA))
        wait_until(lambda: "connecting again" in caplog.text)
        own_server.start()
        thread.join(PATIENCE)
        assert outcome == [None]
        assert caplog.text.count("connecting again") == caplog.text.count("connected again") == 1
        caplog.clear()
    assert list(storage.rows()) == [MONSTERA]
    storage.close()


def test_while_the_server_is_known_to_be_away_all_fails_at_once(own_server):
    """Nothing waits but the thread that connects, and that brings the storage back by itself."""
    storage = Storage.from_url(own_server.url(), wait_limit=SOON)
    storage.check_start()
    own_server.stop()
    with pytest.raises(Unavailable, match="PostgreSQL: "):
        storage.add(MONSTERA)
    link = storage._engine._link
    submit, link._thread.submit = link._thread.submit, None  # what waits would need it
    for _ in range(3):
        with pytest.raises(Unavailable, match="PostgreSQL: "):
            storage.add(MONSTERA)
    own_server.start()
    wait_until(link._work.done)
    link._thread.submit = submit
    storage.add(MONSTERA)
    storage.close()


def test_a_storage_that_is_closed_stops_connecting(own_server):
    """Its thread has nothing to do any more."""
    storage = Storage.from_url(own_server.url(), wait_limit=SOON)
    storage.check_start()
    own_server.stop()
    with pytest.raises(Unavailable):
        storage.add(MONSTERA)
    storage.close()
    wait_until(storage._engine._link._work.done)
    own_server.start()
    storage.add(MONSTERA)
    storage.close()


def test_a_server_that_accepts_and_never_answers_is_given_up():
    """Within the limit, in adding as in a look at the storage."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        storage = Storage.from_url(f"postgresql://127.0.0.1:{port}/plants", wait_limit=SOON)
        for look in (lambda: storage.add(MONSTERA), storage.check):
            with pytest.raises(Unavailable, match="PostgreSQL: "):
                look()
        storage.close()
    wait_until(storage._engine._link._work.done)


def test_a_statement_that_hangs_is_cut_and_ended_on_the_server(hasty, connection):
    """A lock of somebody else's: nothing of ours goes on to wait for it there."""
    with connection.transaction():
        connection.execute("LOCK TABLE plants")
        for _ in range(3):
            with pytest.raises(Unavailable, match="no answer"):
                hasty.add(MONSTERA)
            wait_until(hasty._engine._link._work.done)
            assert not wait_until(lambda: [backends(connection, "wait_event_type = 'Lock'")])[0]
    hasty.add(MONSTERA)
    assert list(hasty.rows()) == [MONSTERA]


# connections that are lost


def test_a_lost_connection_is_made_again_unnoticed(storage, connection, stored):
    """Between two requests, as when a router or an idle timeout ends it."""
    storage.add(MONSTERA)
    pid = storage._engine._link._connection.info.backend_pid
    assert connection.execute("SELECT pg_terminate_backend(%s, 9000)", [pid]).fetchone() == (True,)
    storage.add(Plant(8, "n"))
    assert len(stored()) == 2
    assert storage._engine._link._connection.info.backend_pid != pid


def test_a_batch_is_sent_again_where_the_connection_is_lost_under_it(storage, connection, stored):
    """What became of it before is unknown, and does not matter."""
    storage.add(Plant(1, "n"))
    with connection.transaction():
        connection.execute("LOCK TABLE plants")
        thread, outcome = in_thread(lambda: storage.add(MONSTERA))
        (pid,) = wait_until(lambda: backends(connection, "wait_event_type = 'Lock'"))
        connection.execute("SELECT pg_terminate_backend(%s)", [pid])
    thread.join(PATIENCE)
    assert outcome == [None]
    assert (7, "Monstera", None) in stored()


@pytest.mark.parametrize("how", ["pg_terminate_backend", "pg_cancel_backend"])
@pytest.mark.parametrize("already", [False, True], ids=["new", "there already"])
def test_what_is_not_on_the_standby_is_not_answered_for(own_server, how, already):
    """A commit that stopped waiting for the standby is a success to PostgreSQL, and not to us.

    Nor is a plant that is there already: it may be here alone, and would go with this server.
    """
    url = own_server.url()
    quiet = f"{url}&options=-cclient_min_messages%3Derror"  # it would not say that it gave up
    storage = Storage.from_url(quiet, wait_limit=2 * PATIENCE)
    storage.check_start()
    if already:
        storage.add(MONSTERA)
    own_server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    own_server.execute("SELECT pg_reload_conf()")
    with psycopg.connect(url, autocommit=True) as connection:
        wait_until(lambda: "nobody" in own_server.execute("SHOW synchronous_standby_names")[0])
        thread, outcome = in_thread(lambda: storage.add(MONSTERA))
        for _ in range(3):
            (pid,) = wait_until(lambda: backends(connection, "wait_event = 'SyncRep'"))
            connection.execute(f"SELECT {how}(%s)", [pid])
            wait_until(lambda pid=pid: pid not in backends(connection, "wait_event = 'SyncRep'"))
        assert wait_until(lambda: backends(connection, "wait_event = 'SyncRep'"))
        assert outcome == []
        connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
        connection.execute("SELECT pg_reload_conf()")
    thread.join(PATIENCE)
    assert outcome == [None]
    assert list(storage.rows()) == [MONSTERA]
    storage.close()


def before_insert(connection: psycopg.Connection, statements: str) -> None:
    """Let the server run statements for each plant before it is inserted."""
    connection.execute(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {statements} RETURN NEW; END $$"
    )
    connection.execute(
        "CREATE TRIGGER fails BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION fail()"
    )


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_conflicts_of_transactions_are_tried_again(storage, connection, stored, code):
    """Serialization failures and deadlocks."""
    connection.execute("CREATE SEQUENCE tries")
    before_insert(
        connection,
        f"IF nextval('tries') < 3 THEN RAISE EXCEPTION USING ERRCODE = '{code}'; END IF;",
    )
    storage.add(MONSTERA)
    assert stored() == [MONSTERA]
    assert connection.execute("SELECT last_value FROM tries").fetchone() == (3,)


def test_what_the_server_can_not_do_now_is_unavailable_at_once(storage, connection):
    """As where its disk is full (53100): trying again is for the client."""
    before_insert(connection, "RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100';")
    with pytest.raises(Unavailable, match="could not extend file"):
        storage.add(MONSTERA)
    connection.execute("DROP TRIGGER fails ON plants")
    storage.add(MONSTERA)


# the connection


@pytest.mark.parametrize(
    ("setting", "used"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"),
     ("remote_apply", "remote_apply")],
)  # fmt: skip
def test_every_commit_waits_for_disks(url, setting, used):
    """synchronous_commit is raised where it would be too little, on each connection."""
    storage = Storage.from_url(
        url.replace("options=", f"options=-csynchronous_commit%3D{setting}%20")
    )
    storage.check_start()
    for _ in range(2):
        storage.add(MONSTERA)
        connection = storage._engine._link._connection
        assert connection.execute("SHOW synchronous_commit").fetchone() == (used,)
        storage.close()


@pytest.mark.parametrize("schemes", [("postgresql:", "postgresql:"), ("postgresql:", "postgres:")])
def test_a_url_is_what_libpq_takes(url, tmp_path, schemes):
    """Either scheme; several hosts, of which one answers; parameters."""
    several = url.replace("?host=", f"?host={tmp_path},").replace(*schemes)
    storage = Storage.from_url(f"{several}&client_encoding=LATIN1&connect_timeout=10")
    storage.check_start()
    storage.add(Plant(7, "🌵"))
    assert list(storage.rows()) == [Plant(7, "🌵")]
    storage.close()


def test_a_session_that_takes_no_writes_is_not_available(storage, url, stored):
    """A standby, or a server in maintenance: it may become another one."""
    read_only = url.replace("options=", "options=-cdefault_transaction_read_only%3Don%20")
    standby = Storage.from_url(read_only, wait_limit=SOON)
    standby.check_start()
    for look in (lambda: standby.add(MONSTERA), standby.check):
        with pytest.raises(Unavailable, match="read-only"):
            look()
    standby.close()
    assert stored() == []


def test_a_session_that_becomes_read_only_is_left(storage, connection):
    """Another connection may lead to the server that takes writes."""
    storage.add(MONSTERA)
    storage._engine._link._connection.execute("SET default_transaction_read_only = on")
    storage.add(Plant(8, "n"))
    assert len(list(storage.rows())) == 2


def test_a_table_that_is_gone_is_not_made_again_by_a_running_service(url, storage, connection):
    """It may be on its way back; only a start makes a new one."""
    storage.add(MONSTERA)
    connection.execute("ALTER TABLE plants RENAME TO elsewhere")
    worker = Storage.from_url(url, storage._engine.identity())
    for each in (storage, worker):
        with pytest.raises(Unavailable, match=r"plants.* does not exist|no table plants"):
            each.add(MONSTERA)
    with pytest.raises(Unavailable, match='"plants" does not exist'):
        list(worker.rows())
    connection.execute("ALTER TABLE elsewhere RENAME TO plants")
    for each in (storage, worker):
        each.add(MONSTERA)
    worker.close()


def test_sqlite_needs_no_psycopg(tmp_path):
    """It is imported only where it is used."""
    code = (
        "import sys; sys.modules['psycopg'] = None\nimport app\napp.check_start(); app.get_app()\n"
    )
    environment = {"PLANTS_TOKENS": TOKEN, "DATABASE_URL": f"sqlite:///{tmp_path}/plants.db"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
