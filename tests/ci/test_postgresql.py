"""The storage on PostgreSQL: servers that go away or hang, locks, rights, tables of another shape.

What every engine does is in test_on_postgresql.py, fail-over to a standby in test_failover.py.
"""

import contextlib
import gc
import os
import random
import re
import signal
import socket
import string
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psycopg
import pytest

from engine import Conflict, NeedsOperator, Rejected, Unavailable
from postgresql import (
    CANCEL_LIMIT,
    LOCK_TIMEOUT,
    SHORT_TIMEOUT,
    LostConnection,
    PostgreSQLEngine,
    explain,
)
from schemas import Plant
from start import get_storage
from storage import Storage, Stored
from tests.support.on_postgresql import *  # noqa: F403
from tests.support.postgresql import PostgreSQL, running_postgresql
from tests.support.server import PATIENCE, ROOT, TOKEN, Writers, receive, succeeds, wait_until
from tests.test_start import stops_in_one_line

SOON = 2 * (CANCEL_LIMIT + 1)  # seconds; a wait limit that leaves the engine one second
MONSTERA = Plant(7, "Monstera")
RIGHTS = "SELECT, INSERT, UPDATE"


@pytest.fixture
def connection(url: str) -> Iterator[psycopg.Connection]:
    """A connection of another program."""
    other = f"{url}&application_name=other"
    with psycopg.connect(other, autocommit=True) as connection:
        yield connection


@pytest.fixture
def schema(connection: psycopg.Connection) -> str:
    """The name of the schema that the test has for itself, which its connections have too."""
    return connection.execute("SELECT current_schema()").fetchone()[0]


@pytest.fixture
def own_server() -> Iterator[PostgreSQL]:
    """A server that a test may stop, or set up otherwise."""
    with running_postgresql("fsync=off") as server:
        yield server


@pytest.fixture
def start() -> Iterator[Callable[..., Storage]]:
    """Starts storages as the service does, and closes them in the end."""
    with contextlib.ExitStack() as stack:

        def start(url: str, **options: float) -> Storage:
            storage = stack.enter_context(contextlib.closing(get_storage(url, **options)))
            with contextlib.suppress(LostConnection):
                storage.open_or_create()
            return storage

        yield start


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Runs what waits."""
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def sessions(connection: psycopg.Connection, schema: str) -> Callable[..., list[int]]:
    """Finds the server's processes for the service, all or those that wait for something."""

    def find(event: str | None = None) -> list[int]:
        query = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
        values = [schema]
        if event:
            query, values = f"{query} AND %s IN (wait_event_type, wait_event)", [schema, event]
        return [row[0] for row in connection.execute(query, values)]

    return find


@pytest.fixture
def make_role(connection: psycopg.Connection, schema: str, url: str) -> Callable[[str], str]:
    """Makes a role with rights to the table, or none; returns the URL with it."""

    def make_role(rights: str) -> str:
        role = f"{schema}_role"
        connection.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {role}")
        if rights:
            connection.execute(f"GRANT {rights} ON plants TO {role}")
        return url.replace("user=postgres", f"user={role}")

    return make_role


def before_insert(connection: psycopg.Connection, statements: str) -> None:
    """Let the server run statements for each plant, NEW, before it is inserted."""
    connection.execute(
        "CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {statements} RETURN NEW; END $$"
    )
    connection.execute(
        "CREATE TRIGGER acts BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION act()"
    )


# What stops the start.


@pytest.mark.parametrize(
    "table",
    [
        "TABLE plants (id bigint PRIMARY KEY, name text NOT NULL)",
        "TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, tag text, height int NOT NULL)",
        "TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, tag text NOT NULL)",
        "TABLE plants (id bigint PRIMARY KEY, name text, tag text)",
        "TABLE plants (id bigint PRIMARY KEY, name varchar(9) NOT NULL, tag text)",
        "TABLE plants (id integer PRIMARY KEY, name text NOT NULL, tag text)",
        "TABLE plants (id bigint NOT NULL, name text NOT NULL, tag text)",
        "TABLE plants (id bigint PRIMARY KEY DEFERRABLE, name text NOT NULL, tag text)",
        "TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, tag text, UNIQUE(id) DEFERRABLE)",
        "UNLOGGED TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, tag text)",
        "VIEW plants AS SELECT 1::bigint AS id, ''::text AS name, ''::text AS tag",
    ],
)
def test_a_table_of_another_shape_is_refused(start, url, connection, table):
    connection.execute(f"CREATE {table}")
    with pytest.raises(NeedsOperator, match=r"differs in|matching the ON CONFLICT"):
        start(url)


@pytest.mark.parametrize(
    "column",
    ["height int, ADD UNIQUE (tag) DEFERRABLE", "height int NOT NULL DEFAULT 0",
     "number int GENERATED ALWAYS AS IDENTITY",
     "length int NOT NULL GENERATED ALWAYS AS (length(name)) STORED"],
)  # fmt: skip
def test_a_table_may_have_more_columns(start, storage, url, connection, sessions, column):
    """A newer version's are added under the service, and are there when it connects again."""
    storage.add(MONSTERA)
    connection.execute(f"ALTER TABLE plants ADD COLUMN {column}")
    storage.add(MONSTERA)
    storage.add(Plant(8, "n"))
    connection.execute("SELECT pg_terminate_backend(%s)", sessions())
    storage.add(Plant(9, "n"))
    start(url).add(Plant(9, "n"))
    assert list(storage.rows()) == [MONSTERA, Plant(8, "n"), Plant(9, "n")]


def test_a_database_that_cannot_hold_any_text_is_refused(start, postgresql):
    postgresql.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(NeedsOperator, match="in LATIN1, not UTF8"):
        start(postgresql.url("latin"))


@pytest.mark.parametrize("rights", ["", "SELECT", "SELECT, INSERT", "INSERT, UPDATE"])
def test_missing_rights_are_refused(start, storage, connection, schema, make_role, rights):
    """The start tries all that the service will ever need, and names the rights for it."""
    as_role = make_role(rights)
    with pytest.raises(NeedsOperator, match=r"permission denied for table.*the role needs"):
        start(as_role)
    connection.execute(f"GRANT {RIGHTS} ON plants TO {schema}_role")
    start(as_role).add(MONSTERA)


def test_no_right_to_create_the_table_is_refused(start, make_role):
    with pytest.raises(NeedsOperator, match="permission denied for schema"):
        start(make_role(""))


@pytest.mark.parametrize(
    "message",
    ['FATAL:  password authentication failed for user "u"', "fe_sendauth: no password supplied",
     'FATAL:  no pg_hba.conf entry for host "::1", user "u", database "d", no encryption',
     'FATAL:  role "u" is not permitted to log in', 'FATAL:  permission denied for database "d"',
     "FATAL:  no such database: d", "server does not support SSL, but SSL was required"],
)  # fmt: skip
def test_a_server_that_refuses_the_user_needs_the_operator(message):
    """Such an error has no code."""
    failed = psycopg.OperationalError(f'connection to server at "h", port 5432 failed: {message}')
    assert isinstance(explain(failed), NeedsOperator)


@pytest.mark.parametrize("order", [0, 1])
def test_one_of_several_servers_that_refuses_does_not_stop_the_start(start, url, tmp_path, order):
    """The other server may only be away for a while."""
    folder = url.partition("host=")[2].partition("&")[0]
    hosts = [folder, str(tmp_path)]
    several = url.replace(f"host={folder}", f"host={hosts[order]},{hosts[1 - order]}")
    start(several.replace("user=postgres", "user=nobody"), wait_limit=SOON)


@pytest.mark.parametrize("secret", ["p@SECRET", "p/SECRET", "SECRET%"])
def test_no_part_of_a_password_is_told(caplog, secret):
    """A password that is not percent-encoded can be taken for another part of the URL."""
    with pytest.raises(NeedsOperator, match="percent-encoded") as refusal:
        get_storage(f"postgresql://u:{secret}@h/d")
    assert "SECRET" not in str(refusal.value) + caplog.text


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
def test_a_host_that_no_name_server_can_know_is_refused(start, host):
    """A part of a host's name has 1 to 63 characters."""
    with pytest.raises(NeedsOperator, match="no host can have this name"):
        start(f"postgresql://{host}/d")


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
    """The service does not start where waiting would not help."""
    stops_in_one_line(serve(DATABASE_URL=url.replace(*change)), words)


# What others may put where PostgreSQL looks for names.


# A view, a type, a function and an operator for each that PostgreSQL has, but for those that can't
# be made, and some that match better what has no type. Whichever is used, it counts.
SHADOWS = """
    CREATE SEQUENCE public.uses;
    GRANT ALL ON SEQUENCE public.uses TO PUBLIC;
    SET search_path = pg_catalog;
    CREATE FUNCTION public.is_used() RETURNS bool LANGUAGE plpgsql AS
        $$ BEGIN PERFORM nextval('public.uses'); RAISE 'used'; END $$;
    CREATE VIEW public.pg_attribute AS SELECT attrelid FROM pg_attribute WHERE public.is_used();
    DO $do$ DECLARE shadow text; BEGIN FOR shadow IN
        SELECT format('VIEW public.%I AS SELECT * FROM %1$I WHERE public.is_used()', relname)
        FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')
    UNION ALL
        SELECT format('DOMAIN public.%I AS %1$I CHECK (public.is_used())', typname)
        FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b'
    UNION ALL
        SELECT format('FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS '
            '$$ BEGIN PERFORM public.is_used(); END $$', proname, types, result)
        FROM (SELECT proname, oidvectortypes(proargtypes), pg_get_function_result(oid)
            FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f'
            UNION VALUES ('json_array_elements', 'text', 'SETOF json'),
                ('concat', 'regnamespace, text', 'text'), ('equal', 'oid, regclass', 'bool'),
                ('concat', 'name, text, regnamespace, text, name, text', 'text')
        ) AS functions (proname, types, result)
    UNION ALL
        SELECT format('OPERATOR public.%s (%s RIGHTARG = %s, FUNCTION = public.%s)', oprname,
            'LEFTARG = ' || nullif(oprleft, 0)::regtype || ',', oprright::regtype, oprcode)
        FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace
    UNION ALL VALUES
        ('OPERATOR public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.equal)')
    LOOP
        BEGIN EXECUTE 'CREATE ' || shadow; EXCEPTION WHEN OTHERS THEN END;
    END LOOP; END $do$"""


@pytest.mark.parametrize("path", ["public, pg_catalog", '"an odd %s {0} ""schema""", public'])
def test_nobody_elses_functions_are_called(start, own_server, monkeypatch, path):
    """A role that may create in schema public does not get its code run by the service's role."""
    monkeypatch.setattr("storage.CHECK_INTERVAL", -1)  # each is a write
    own_server.execute(
        "CREATE ROLE mallory LOGIN; CREATE ROLE service LOGIN SUPERUSER; "
        'CREATE SCHEMA "an odd %s {0} ""schema"""; GRANT CREATE ON SCHEMA public TO mallory; '
        f"ALTER ROLE service SET search_path = {path}"
    )
    mallory, url = [
        own_server.url().replace("=postgres", f"={role}") for role in ("mallory", "service")
    ]
    with psycopg.connect(mallory, autocommit=True) as connection:
        connection.execute(SHADOWS)
    start(url)
    storage = start(url)
    assert storage.add_all([MONSTERA, Plant(8, "n")]) == [Stored.NEW] * 2
    with psycopg.connect(url) as other:
        other.execute("UPDATE plants SET tag = 'held'; INSERT INTO plants VALUES (9, 'n')")
        batch = [MONSTERA, Plant(8, "n"), Plant(9, "n"), Plant(10, "n")]
        outcomes = storage.add_all(batch)
        assert [type(outcome) for outcome in outcomes] == [Unavailable] * 3 + [Stored]
        other.rollback()
    wait_until(lambda: succeeds(lambda: storage.add(MONSTERA)))
    assert isinstance(*storage.add_all([Plant(7, "other")]), Conflict)
    storage.check()
    assert list(storage.rows()) == [MONSTERA, Plant(8, "n"), Plant(10, "n")]
    assert own_server.execute("SELECT is_called FROM public.uses") == [(False,)]


# A server that is away, or does not answer.


def test_a_server_that_is_away_at_the_start_is_waited_for(serve, own_server):
    """The service says 503 until the server is there, then makes the table and serves."""
    own_server.stop()
    server = serve(
        "start:get_app(wait_limit=4)", DATABASE_URL=own_server.url(), WEB_CONCURRENCY="1"
    )
    assert server.request("GET", "/openapi.json")[0] == 200
    assert "the database is not available at the start: PostgreSQL: conn" in server.err
    status, headers, _ = server.request("GET", "/healthz")
    assert (status, headers["retry-after"]) == (503, "1")
    own_server.start()
    wait_until(lambda: server.request("GET", "/healthz")[0] == 200)
    assert server.post({"id": 7, "name": "Monstera"})[0] == 200
    assert own_server.execute("SELECT * FROM plants") == [(7, "Monstera", None)]


def test_while_the_server_is_known_to_be_away_all_fails_at_once(start, own_server):
    """Only the first plant waits; the storage works again by itself when the server is back."""
    storage = start(own_server.url(), wait_limit=SOON + 2)
    own_server.stop()
    took = []
    for _ in range(6):
        begin = time.monotonic()
        with pytest.raises(Unavailable, match="PostgreSQL: "):
            storage.add(MONSTERA)
        took.append(time.monotonic() - begin)
    assert sum(took[1:]) < took[0]
    own_server.start()
    wait_until(lambda: succeeds(storage.check))
    assert storage.engine.obstacle == PostgreSQLEngine.obstacle
    own_server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'plants'"
    )
    storage.add(MONSTERA)  # on another connection: the first failure is over


def test_a_server_that_accepts_and_never_answers_is_given_up(start):
    """Neither a plant nor a health check waits for it longer than its limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        storage = start(f"postgresql://127.0.0.1:{port}/plants", wait_limit=SOON)
        for look in (lambda: storage.add(MONSTERA), storage.check):
            with pytest.raises(Unavailable, match="PostgreSQL: "):
                look()


def test_a_connection_that_timed_out_is_closed():
    """Once the server goes on, it would else have many for each worker."""
    gc.disable()  # psycopg's errors are in a cycle
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/plants"
            with pytest.raises(LostConnection):
                PostgreSQLEngine(url, None, SOON).insert([MONSTERA])
            with silent.accept()[0] as connection:
                connection.settimeout(PATIENCE)
                receive(connection)
    finally:
        gc.enable()


@pytest.fixture
def fake_server() -> Iterator[tuple[str, Callable[[], socket.socket]]]:
    """The URL of a server that lets anybody in and answers no statement; accepts a connection."""
    said = {"server_encoding": "UTF8", "client_encoding": "UTF8", "server_version": "15.0",
            "in_hot_standby": "off", "default_transaction_read_only": "off"}  # fmt: skip
    answers = [b"R" + struct.pack("!II", 8, 0)]  # the user is who it says
    for name, value in said.items():
        text = f"{name}\0{value}\0".encode()
        answers.append(b"S" + struct.pack("!I", 4 + len(text)) + text)
    answers.append(b"K" + struct.pack("!III", 12, 1, 1) + b"Z" + struct.pack("!Ic", 5, b"I"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)

        def accept() -> socket.socket:
            connection = server.accept()[0]
            connection.recv(2**16)
            connection.sendall(b"".join(answers))
            return connection

        port = server.getsockname()[1]
        yield f"postgresql://127.0.0.1:{port}/plants?sslmode=disable&gssencmode=disable", accept


def test_a_server_that_hangs_once_it_is_connected_to_is_given_up(fake_server, pool):
    """The check of the table has the deadline of the batch, which leaves time for a cancel."""
    url, accept = fake_server
    with contextlib.closing(get_storage(url, wait_limit=SOON)) as storage:
        adding = pool.submit(storage.add, MONSTERA)
        with accept(), pytest.raises(Unavailable, match="PostgreSQL: the server hangs"):
            adding.result(PATIENCE)


def test_an_error_that_ends_the_connection_is_its_loss(fake_server, pool):
    """Whatever its code: pgpool has this one for a lost connection of its own."""
    url, accept = fake_server
    fields = b"SFATAL\0CXX000\0Munable to read data from DB node 0\0\0"
    with contextlib.closing(get_storage(url, wait_limit=1.5 * SOON)) as storage:
        adding = pool.submit(storage.add, MONSTERA)
        for _ in range(2):  # it tries again
            with accept() as connection:
                connection.recv(2**16)
                connection.sendall(b"E" + struct.pack("!I", 4 + len(fields)) + fields)
        with pytest.raises(Unavailable):
            adding.result(PATIENCE)


def test_health_is_told_in_time_while_the_server_hangs(serve, own_server, pool):
    server = serve(DATABASE_URL=own_server.url(), WEB_CONCURRENCY="1")
    assert server.post({"id": 1, "name": "n"})[0] == 200
    own_server.signal("SIGSTOP")
    posting = pool.submit(server.post, {"id": 7, "name": "Monstera"})
    wait_until(lambda: server.request("GET", "/healthz")[0] == 503)  # the last write is old

    def look(_: int) -> tuple[int, float]:
        begin = time.monotonic()
        status, _, _ = server.request("GET", "/healthz")
        return status, time.monotonic() - begin

    looks = list(pool.map(look, range(3)))
    assert not posting.done()
    assert {status for status, _ in looks} == {503}
    assert min(took for _, took in looks) < 2
    assert posting.result(PATIENCE)[0] == 503
    own_server.signal("SIGCONT")
    wait_until(lambda: server.post({"id": 7, "name": "Monstera"})[0] == 200)


def test_a_service_that_was_stopped_does_not_blame_the_server(serve, own_server, pool):
    """SIGSTOP, or a machine that sleeps: when it goes on, all time is up."""
    server = serve(DATABASE_URL=own_server.url(), WEB_CONCURRENCY="1")
    assert server.post({"id": 1, "name": "n"})[0] == 200
    own_server.signal("SIGSTOP")
    posting = pool.submit(server.post, {"id": 7, "name": "Monstera"})
    wait_until(lambda: server.request("GET", "/healthz")[0] == 503)  # the plant is on its way
    (worker,) = server.workers(1)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(6)
    os.kill(worker, signal.SIGCONT)
    assert posting.result(PATIENCE)[0] == 503
    assert "PostgreSQL: the service itself was stopped" in server.err


def test_a_statement_that_hangs_is_cut_and_ended_on_the_server(
    start, url, connection, sessions, stored
):
    """A request gives up after its limit, and leaves nothing at work on the server."""
    storage = start(url, wait_limit=SOON)
    before_insert(connection, "PERFORM pg_sleep(60);")
    for _ in range(2):
        with pytest.raises(Unavailable):
            storage.add(MONSTERA)
        wait_until(lambda: not sessions("PgSleep"))
    connection.execute("DROP TRIGGER acts ON plants")
    wait_until(lambda: succeeds(lambda: storage.add(MONSTERA)))
    assert stored() == [MONSTERA]


# Locks of other programs.


HELD = "plant 7: another transaction holds its row"


@pytest.mark.parametrize("lock", ["SELECT * FROM plants WHERE id = 7 FOR UPDATE",
                                  "UPDATE plants SET tag = 'held' WHERE id = 7",
                                  "DELETE FROM plants WHERE id = 7",
                                  "INSERT INTO plants VALUES (7, 'other')"])  # fmt: skip
def test_a_plant_whose_row_is_locked_fails_alone(storage, connection, monkeypatch, lock):
    """The others of its batch are stored, and so is it once the lock is released."""
    monkeypatch.setattr("storage.CHECK_INTERVAL", -1)  # each is a write
    storage.add_all([Plant(8, "n")] if "INSERT" in lock else [MONSTERA, Plant(8, "n")])
    with connection.transaction(force_rollback=True):
        connection.execute(lock)
        batch = [Plant(6, "n"), MONSTERA, Plant(8, "n"), Plant(8, "other"), Plant(9, "n"), MONSTERA]
        outcomes = storage.add_all(batch)
        assert {type(outcomes[each]) for each in (0, 2, 4)} == {Stored}
        assert isinstance(outcomes[3], Conflict)
        assert str(outcomes[1]) == str(outcomes[5]) == HELD
        storage.check()
    wait_until(lambda: succeeds(lambda: storage.add(MONSTERA)))
    assert [plant.id for plant in storage.rows()] == [6, 7, 8, 9]


@pytest.mark.parametrize("clients", [60, 250])
@pytest.mark.parametrize(
    "statement",
    ["UPDATE plants SET tag = 'held'", "INSERT INTO plants SELECT generate_series(0, 299), 'n'"],
)
def test_who_sends_locked_rows_harms_nobody_else(serve, storage, connection, statement, clients):
    """Other plants and /healthz are served while clients retry what others have not committed."""
    if "UPDATE" in statement:
        storage.add_all([Plant(number, "n") for number in range(300)])
    server = serve(WEB_CONCURRENCY="1")
    with (
        connection.transaction(force_rollback=True),
        Writers(server.port, first=1000) as writers,
        ThreadPoolExecutor(clients) as pool,
    ):
        connection.execute(statement)
        held = pool.map(lambda n: server.post({"id": n % 300, "name": "n"})[0], range(900))
        statuses = [server.request("GET", "/healthz")[0] for _ in range(20)]
        assert writers.goes_on(300)
        assert set(held) == {503} and set(statuses) == {200}
        assert writers.answers.keys() == {200}
    assert "got a 503: plant 299: another transaction holds its row" in server.err
    wait_until(lambda: server.post({"id": 299, "name": "n"})[0] == 200)


def test_a_row_that_is_locked_makes_others_wait_less_for_a_second(storage, connection, monkeypatch):
    """And no longer, whatever was waited for meanwhile: short waits are usual in a trigger."""
    ahead = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr("postgresql.time", clock)
    storage.add_all([MONSTERA, Plant(8, "n")])
    connection.execute("CREATE TABLE seen (timeout text)")
    before_insert(connection, "INSERT INTO seen SELECT current_setting('lock_timeout');")
    with connection.transaction():
        connection.execute("UPDATE plants SET tag = 'held'")
        for ahead, number in [(0, 7), (0.5, 8), (0.5, 1), (1.1, 2)]:  # noqa: B007
            succeeds(lambda number=number: storage.add(Plant(number, "n")))
    seen = connection.execute("SELECT * FROM seen").fetchall()
    assert seen == [(SHORT_TIMEOUT,), (LOCK_TIMEOUT,)]


def test_a_trigger_that_waits_for_another_table_is_no_lock_of_the_plant(storage, connection):
    """The plant is stored as soon as that is free."""
    storage.open_or_create()
    connection.execute("CREATE TABLE counted (plants bigint); INSERT INTO counted VALUES (0)")
    before_insert(connection, "UPDATE counted SET plants = plants + 1;")
    with connection.transaction():
        connection.execute("SELECT * FROM counted FOR UPDATE")
        with pytest.raises(Unavailable, match=r"LockNotAvailable \(55P03\): PL/pgSQL function"):
            storage.add(MONSTERA)
    storage.add(MONSTERA)


@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout"])
def test_a_timeout_of_the_roles_own_is_no_plants_fault(start, storage, url, connection, setting):
    """What waits for a locked table is told to come again, and is stored then."""
    hasty = start(url.replace("options=", f"options=-c{setting}%3D100%20"))
    with connection.transaction(force_rollback=True):
        connection.execute("LOCK TABLE plants")
        outcomes = hasty.add_all([MONSTERA, Plant(8, "n")])
        for use in (hasty.check, lambda: hasty.add(MONSTERA)):
            with pytest.raises(Unavailable, match="canceling statement due to"):
                use()
        assert {type(outcome) for outcome in outcomes} == {Unavailable}
    assert hasty.add_all([MONSTERA, Plant(8, "n")]) == [Stored.NEW] * 2


def test_a_locked_table_is_waited_for(start, url, connection, pool):
    """Somebody alters it; plants that wait longer than their limit are told so."""
    storage = start(url, wait_limit=SOON)
    with connection.transaction(force_rollback=True):
        connection.execute("LOCK TABLE plants")
        with pytest.raises(Unavailable, match="another transaction has locked the table"):
            storage.add(MONSTERA)
        adding = pool.submit(start(url).add, MONSTERA)
        with pytest.raises(TimeoutError):
            adding.result(0.5)
    adding.result(PATIENCE)


def test_workers_do_not_lock_each_other_out_where_commits_are_slow(serve, own_server, pool):
    """Who sends a stored plant again gets a 200, if a slow one; here commits wait for a standby."""
    url = own_server.url()
    servers = [serve(DATABASE_URL=url, WEB_CONCURRENCY="1") for _ in range(2)]
    assert [server.post({"id": 7, "name": "n"})[0] for server in servers] == [200, 200]
    own_server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    own_server.execute("SELECT pg_reload_conf()")
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    posts = {}

    def both_wait() -> bool:  # as soon as the server has read its settings
        for server in servers:
            if server not in posts or posts[server].done():
                posts[server] = pool.submit(server.post, {"id": 7, "name": "n"})
        return own_server.execute(waiting) == [(2,)]

    wait_until(both_wait)
    own_server.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
    own_server.execute("SELECT pg_reload_conf()")
    assert {post.result(PATIENCE)[0] for post in posts.values()} == {200}


# Connections that are lost, and other failures of the server.


def test_a_connection_is_kept(storage, sessions, monkeypatch):
    """The deadline of a batch is not that of a later one."""
    ahead = 0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr("postgresql.time", clock)
    storage.add(MONSTERA)
    first = sessions()
    ahead = 1000
    storage.add(Plant(8, "n"))
    assert sessions() == first


def test_a_batch_is_sent_again_where_the_connection_is_lost_under_it(
    storage, connection, sessions, pool, stored
):
    """What became of it is unknown, and does not matter: storing it again is safe."""
    connection.execute("CREATE SEQUENCE tries")
    before_insert(connection, "IF nextval('tries') = 1 THEN PERFORM pg_sleep(60); END IF;")
    adding = pool.submit(storage.add, MONSTERA)
    (pid,) = wait_until(lambda: sessions("PgSleep"))
    connection.execute("SELECT pg_terminate_backend(%s)", [pid])
    adding.result(PATIENCE)
    assert stored() == [MONSTERA]


@pytest.mark.parametrize("how", ["pg_terminate_backend", "pg_cancel_backend"])
@pytest.mark.parametrize("already", [False, True], ids=["new", "there already"])
def test_what_is_not_on_the_standby_is_not_answered_for(start, own_server, pool, how, already):
    """A commit that stopped waiting for the standby is a success to PostgreSQL, but not to us.

    Nor is a plant that is there already: it may be here alone, and would go with this server.
    """
    quiet = f"{own_server.url()}&options=-cclient_min_messages%3Derror"  # would hide the warning
    storage = start(quiet, wait_limit=2 * PATIENCE)
    if already:
        storage.add(MONSTERA)

    def wait_for_standbys(setting: str) -> None:
        own_server.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{setting}'")
        own_server.execute("SELECT pg_reload_conf()")

    def waiting() -> list[int]:
        query = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        return [pid for (pid,) in own_server.execute(query)]

    wait_for_standbys("nobody")
    wait_until(lambda: own_server.execute("SHOW synchronous_standby_names") == [("nobody",)])
    adding = pool.submit(storage.add, MONSTERA)
    for _ in range(3):
        (pid,) = wait_until(waiting)
        own_server.execute(f"SELECT {how}({pid})")
        wait_until(lambda pid=pid: pid not in waiting())
    wait_until(waiting)
    assert not adding.done()
    wait_for_standbys("")
    adding.result(PATIENCE)
    assert list(storage.rows()) == [MONSTERA]


def test_lost_connections_are_logged_once_a_minute(
    storage, connection, sessions, monkeypatch, caplog
):
    """With the reason; the next line says how often it happened meanwhile."""
    ahead = 0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead, sleep=time.sleep)
    monkeypatch.setattr("postgresql.time", clock)
    for ahead in (0, 0, 50, 60, 60):  # noqa: B007
        connection.execute("SELECT pg_terminate_backend(%s)", sessions())
        storage.add(MONSTERA)
    counts = re.findall(r"terminating connection.*again \(since .*: (\d)\)", caplog.text)
    assert counts == ["1", "3"]


def test_a_serialization_failure_is_tried_again(start, url, connection, sessions, pool):
    """It is no reason to refuse a plant that is alone."""
    connection.execute("CREATE TABLE seen (id bigint); CREATE SEQUENCE go")
    isolation = "options=-cdefault_transaction_isolation%3Dserializable%20"
    storage = start(url.replace("options=", isolation))
    before_insert(
        connection,
        "PERFORM FROM seen; WHILE (SELECT NOT is_called FROM go) LOOP PERFORM pg_sleep(0.05); "
        "END LOOP;",
    )
    adding = pool.submit(storage.add, MONSTERA)
    wait_until(lambda: sessions("PgSleep"))
    with connection.transaction():  # reads what that writes, and writes what that has read
        connection.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        connection.execute("SELECT FROM plants")
        connection.execute("INSERT INTO seen VALUES (7)")
    connection.execute("SELECT nextval('go')")
    adding.result(PATIENCE)
    assert storage.add_all([MONSTERA]) == [Stored.BEFORE]


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_batch_that_a_trigger_can_not_serialize_is_tried_again_in_parts(
    storage, connection, code
):
    """So a deadlock with other writers costs the plants that met it at most."""
    connection.execute("CREATE SEQUENCE tries")
    failure = f"RAISE EXCEPTION USING ERRCODE = '{code}';"
    before_insert(connection, f"IF nextval('tries') = 1 THEN {failure} END IF;")
    assert storage.add_all([MONSTERA, Plant(8, "n")]) == [Stored.NEW] * 2


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("CREATE INDEX ON plants (name)", "ProgramLimitExceeded (54000, plants_name_idx)"),
        ("CREATE UNIQUE INDEX once ON plants (tag)", "UniqueViolation (23505, once)"),
        ("ALTER TABLE plants ADD CONSTRAINT known CHECK (name NOT LIKE 'secret%')",
         "CheckViolation (23514, known)"),
        ("ALTER TABLE plants ADD rest int GENERATED ALWAYS AS (1 / (id - 99)) STORED",
         "DivisionByZero (22012, no constraint)"),
        ("DROP TABLE plants; CREATE TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, "
         "tag text) PARTITION BY RANGE (id); "
         "CREATE TABLE part PARTITION OF plants FOR VALUES FROM (0) TO (50)",
         "CheckViolation (23514, no constraint)"),
        ("ALTER TABLE plants ENABLE ROW LEVEL SECURITY; "
         "CREATE POLICY known ON plants USING (name NOT LIKE 'secret%')",
         "InsufficientPrivilege (42501, no constraint)"),
        ("IF NEW.id IN (1, 99) THEN RAISE EXCEPTION 'not %', NEW.name; END IF;",
         "RaiseException (P0001, no constraint)"),
        ("IF NEW.id IN (1, 99) THEN RAISE not_null_violation; END IF;",
         "NotNullViolation (23502, no constraint)"),
        ("IF NEW.id = 99 THEN RETURN NULL; END IF;",
         "a trigger or a policy of the table keeps it out, or hides it"),
        ("IF NEW.id = 99 THEN NEW.id := 1099; END IF;",
         "a trigger or a policy of the table keeps it out, or hides it"),
    ],
    ids=["index", "unique", "check", "generated", "partitions", "policy", "trigger", "null",
         "nothing", "another id"],
)  # fmt: skip
def test_a_plant_that_the_operators_table_refuses_fails_alone(
    start, storage, connection, make_role, statement, reason
):
    """It is never taken; the log has nothing of it. Others, and the same one before, are stored."""
    storage.add(Plant(1, "n", "taken"))
    if statement.startswith("IF"):
        before_insert(connection, statement)
    else:
        connection.execute(statement)
    storage = start(make_role(RIGHTS))
    name = "secret" + "".join(random.choices(string.ascii_letters, k=5000))
    for _ in range(2):
        batch = [Plant(1, "n", "taken"), *(Plant(number, "n") for number in range(2, 22))]
        outcomes = storage.add_all([*batch[:7], Plant(99, name, "taken"), *batch[7:]])
        refusal = outcomes.pop(7)
        assert isinstance(refusal, Rejected) and str(refusal) == f"PostgreSQL: {reason}"
        assert not isinstance(refusal.__context__, psycopg.Error)  # whose message has the row
        assert {type(outcome) for outcome in outcomes} == {Stored}
        storage.check()


@pytest.mark.parametrize(
    "statement",
    ["ALTER TABLE plants ADD height int NOT NULL DEFAULT 0; "
     "ALTER TABLE plants ALTER height DROP DEFAULT",
     "CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$; "
     "CREATE TRIGGER acts BEFORE INSERT ON plants EXECUTE FUNCTION act()"],
)  # fmt: skip
def test_what_refuses_every_plant_is_the_tables_fault(storage, connection, statement):
    """No client is told "never" for it, and no health check that all is well."""
    storage.add(MONSTERA)
    connection.execute(statement)
    outcomes = storage.add_all([Plant(8, "n"), Plant(9, "n")])
    assert {type(outcome) for outcome in outcomes} == {NeedsOperator}
    with pytest.raises(NeedsOperator, match=r"\bno\b.*: PL/pgSQL|height"):
        storage.check()


RAISE = "RAISE EXCEPTION '%%', NEW.name USING ERRCODE = '%s';"


@pytest.mark.parametrize(
    ("statement", "reason"),
    [("PERFORM missing();", "UndefinedFunction (42883): PL/pgSQL function act() line 1 at PERFORM"),
     ("INSERT INTO audit VALUES (NEW.id);",
      "InsufficientPrivilege (42501): PL/pgSQL function act() line 1 at SQL statement"),
     ("EXECUTE 'TABLE ' || NEW.name;",
      "UndefinedTable (42P01): PL/pgSQL function act() line 1 at EXECUTE"),
     *((RAISE % code, f"{name} ({code}): PL/pgSQL function act() line 1 at RAISE")
       for code, name in {
           "08001": "SqlclientUnableToEstablishSqlconnection", "40P01": "DeadlockDetected",
           "40001": "SerializationFailure", "53100": "DiskFull", "57014": "QueryCanceled",
           "57P03": "CannotConnectNow", "58030": "IoError", "72000": "SnapshotTooOld",
           "F0000": "ConfigFileError", "HV000": "FdwError"}.items())],
)  # fmt: skip
def test_a_trigger_that_can_not_do_its_work_fails_the_plants_that_it_acts_on(
    start, storage, connection, make_role, statement, reason
):
    """They may be taken later; the others are stored, and all is well to a health check.

    The log says where it was, without the message, which may have parts of the plant.
    """
    storage.open_or_create()
    connection.execute("CREATE TABLE audit (id bigint)")
    before_insert(connection, f"IF NEW.tag = 'known' THEN {statement} END IF;")
    storage = start(make_role(RIGHTS))
    plant = Plant(2, "secret", "known")
    outcomes = storage.add_all([Plant(1, "n"), plant, None, Plant(3, "n")])
    assert outcomes == [Stored.NEW, outcomes[1], Stored.NOTHING, Stored.NEW]
    outcomes += storage.add_all([None, plant])  # None: a health check
    assert outcomes[4] == Stored.NOTHING
    for refusal in (outcomes[1], outcomes[5]):
        assert isinstance(refusal, Unavailable) and not isinstance(refusal, LostConnection)
        assert str(refusal) == f"PostgreSQL: {reason}"


def test_a_worker_uses_the_table_of_the_start(url, storage, connection, schema):
    """One that is made in an earlier schema of the search_path has none of the plants."""
    storage.add(MONSTERA)
    both = url.replace("search_path%3D", f"search_path%3D{schema}_earlier,")
    connection.execute(f"CREATE SCHEMA {schema}_earlier")
    connection.execute(f"CREATE TABLE {schema}_earlier.plants (LIKE plants INCLUDING ALL)")
    with contextlib.closing(get_storage(both, storage.engine.identity)) as worker:
        worker.check()
        with pytest.raises(Conflict):
            worker.add(Plant(7, "other"))
        worker.add(Plant(8, "n"))
    assert list(storage.rows()) == [MONSTERA, Plant(8, "n")]


def test_a_table_that_is_changed_is_looked_at_at_the_next_connection(storage, connection, sessions):
    """What its columns would not hold as it was sent is not answered for."""
    storage.add(MONSTERA)
    connection.execute("ALTER TABLE plants ALTER tag TYPE varchar(10)")
    connection.execute("SELECT pg_terminate_backend(%s)", sessions())
    with pytest.raises(NeedsOperator, match="differs in"):
        storage.add(Plant(8, "n"))
    connection.execute("ALTER TABLE plants ALTER tag TYPE text")
    storage.add(Plant(8, "n"))


def test_a_table_that_is_changed_is_looked_at_at_the_next_health_check(storage, connection):
    """No plant gets a 200 from then on, as a crash would empty the table."""
    storage.add(MONSTERA)
    connection.execute("ALTER TABLE plants SET UNLOGGED")
    for look in (storage.open_or_create, lambda: storage.add(Plant(8, "n"))):
        with pytest.raises(NeedsOperator, match="unlogged"):
            look()
    connection.execute("ALTER TABLE plants SET LOGGED")
    storage.add(Plant(8, "n"))


def test_a_table_that_is_gone_is_not_made_again_by_a_running_service(url, storage, connection):
    """It may be on its way back; only a start makes a new one."""
    storage.add(MONSTERA)
    storage.open_or_create()
    identity = storage.engine.identity
    connection.execute("ALTER TABLE plants RENAME TO elsewhere")
    with contextlib.closing(get_storage(url, identity)) as worker:
        for each in (storage, worker):
            with pytest.raises(Unavailable, match=r"plants.* does not exist|plants is missing"):
                each.add(MONSTERA)
        with pytest.raises(NeedsOperator, match="plants is missing, temporary"):
            list(worker.rows())
        connection.execute("ALTER TABLE elsewhere RENAME TO plants")
        for each in (storage, worker):
            each.add(MONSTERA)


# The connection.


@pytest.mark.parametrize(
    ("setting", "used"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"),
     ("remote_apply", "remote_apply")],
)  # fmt: skip
def test_every_commit_waits_for_disks(start, storage, url, connection, setting, used):
    """synchronous_commit is raised where it would be too little, in each transaction."""
    connection.execute("CREATE TABLE seen (setting text)")
    before_insert(connection, "INSERT INTO seen SELECT current_setting('synchronous_commit');")
    other = start(url.replace("options=", f"options=-csynchronous_commit%3D{setting}%20"))
    for number in range(2):
        other.add(Plant(number, "n"))
    assert connection.execute("SELECT * FROM seen").fetchall() == [(used,), (used,)]


def test_a_role_may_have_all_names_quoted(start, url):
    """As PostgreSQL then shows the types of columns."""
    start(url.replace("options=", "options=-cquote_all_identifiers%3Don%20")).add(MONSTERA)


@pytest.mark.parametrize("scheme", ["postgresql:", "postgres:"])
def test_a_url_is_what_libpq_takes(start, url, tmp_path, scheme):
    """Either scheme, several hosts of which one answers, and parameters."""
    several = url.replace("?host=", f"?host={tmp_path},").replace("postgresql:", scheme)
    storage = start(f"{several}&client_encoding=LATIN1&connect_timeout=10")
    storage.add(Plant(7, "🌵"))
    assert list(storage.rows()) == [Plant(7, "🌵")]


def test_a_session_that_takes_no_writes_is_not_available(start, storage, url, stored):
    """A standby, or a server in maintenance, may take writes later."""
    read_only = url.replace("options=", "options=-cdefault_transaction_read_only%3Don%20")
    standby = start(read_only, wait_limit=SOON)
    for look in (lambda: standby.add(MONSTERA), standby.check):
        with pytest.raises(Unavailable, match="read-only"):
            look()
    assert stored() == []


def test_a_session_that_becomes_read_only_is_left(storage, connection, sessions, stored):
    """Another connection may lead to the server that takes writes."""
    before_insert(connection, "PERFORM set_config('default_transaction_read_only', 'on', false);")
    storage.add(MONSTERA)
    old = sessions()
    storage.add(Plant(8, "n"))
    assert len(stored()) == 2
    assert not {*old} & {*sessions()}


def test_a_dump_needs_the_right_to_read_alone(storage, make_role):
    """A role with SELECT can make a backup."""
    storage.add(MONSTERA)
    with contextlib.closing(get_storage(make_role("SELECT"))) as reader:
        assert list(reader.rows()) == [MONSTERA]


def test_a_dump_does_not_leave_out_what_a_policy_hides(storage, connection, make_role):
    """It fails, as pg_dump does."""
    storage.add(MONSTERA)
    connection.execute("ALTER TABLE plants ENABLE ROW LEVEL SECURITY")
    with (
        contextlib.closing(get_storage(make_role("SELECT"))) as reader,
        pytest.raises(NeedsOperator, match="affected by row-level security"),
    ):
        list(reader.rows())


def test_sqlite_needs_no_psycopg(tmp_path):
    code = "import sys; sys.modules['psycopg'] = None; import start; start.get_app()"
    environment = {"PLANTS_TOKENS": TOKEN, "DATABASE_URL": f"sqlite:///{tmp_path}/plants.db"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
