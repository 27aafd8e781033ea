"""The storage on PostgreSQL: tables that can't be used, servers that are away, locks, triggers."""

import itertools
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import psycopg
import pytest

from engines import Blocked, Conflict, NeedsOperator, Rejected, Unavailable
from plant import Plant
from tests.support.postgresql import PostgreSQL, running_postgresql
from tests.support.server import PATIENCE, stops_in_one_line, wait_until

# What depends on the engine in the interface and in the storage.
from tests.test_app import (  # noqa: F401
    test_a_new_plant_is_answered_without_its_id_and_stored_once,
    test_a_plant_is_stored_and_answered_exactly,
    test_another_plant_with_the_id_is_a_409,
)
from tests.test_storage import (  # noqa: F401
    test_many_threads_of_many_processes_store_all,
    test_rows_are_one_snapshot_in_the_order_of_id,
)

SHORT = 4.0  # seconds; a wait limit that leaves the engine one second for a batch
NUMBERS = itertools.count()
MONSTERA, IVY = Plant(7, "Monstera"), Plant(8, "Ivy")
TABLE = "TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, tag text)"


@pytest.fixture
def url(postgresql: PostgreSQL) -> str:
    """The URL of a database with the schema and the user that a test has for itself."""
    name = f"test_{next(NUMBERS)}"
    postgresql.execute(f"CREATE ROLE {name} SUPERUSER LOGIN; CREATE SCHEMA AUTHORIZATION {name}")
    return f"{postgresql.url()}&user={name}"


@pytest.fixture
def connection(url: str) -> Iterator[psycopg.Connection]:
    """A connection of another program."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Runs what waits."""
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def sessions(postgresql: PostgreSQL, connection: psycopg.Connection) -> Callable[..., list[int]]:
    """Finds the server's processes for the service, all or those that wait for an event."""
    query = "SELECT pid, wait_event FROM pg_stat_activity WHERE application_name = 'plants' "
    query += f"AND usename = '{connection.info.user}'"
    return lambda *wanted: [pid for pid, *has in postgresql.execute(query) if {*wanted} <= {*has}]


@pytest.fixture
def role(connection: psycopg.Connection) -> str:
    """A role that looks into the test's schema, and has no rights to a table."""
    user, name = connection.info.user, f"{connection.info.user}_role"
    connection.execute(f"CREATE ROLE {name} LOGIN; GRANT USAGE ON SCHEMA {user} TO {name}")
    connection.execute(f"ALTER ROLE {name} SET search_path = {user}")
    return name


def before_insert(connection: psycopg.Connection, statements: str, each: str = "ROW") -> None:
    """Let the server run statements before it inserts a plant, NEW, or some with one STATEMENT."""
    connection.execute(
        "CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {statements} RETURN NEW; END $$; "
        f"CREATE TRIGGER acts BEFORE INSERT ON plants FOR EACH {each} EXECUTE FUNCTION act()"
    )


# the URL, the database and the table


@pytest.mark.parametrize("scheme", ["postgresql:", "postgres:"])
def test_a_url_is_what_libpq_takes(open_storage, connection, url, tmp_path, scheme):
    """Either scheme, any password and schema, several hosts of which one answers, parameters."""
    name = f'"{connection.info.user}%s{{0}}%(rows)s""{{table}}"'
    connection.execute(f"CREATE SCHEMA {name}".encode())
    several = url.replace("?host=", f"?host={tmp_path},")
    several = several.replace("postgresql://", f"{scheme}//postgres:a?b@")
    options = f"options=-csearch_path%3D{quote(name)}&client_encoding=LATIN1&connect_timeout=10"
    storage = open_storage(f"{several}&{options}")
    storage.add(Plant(7, "🌵"))
    assert list(storage.rows()) == [Plant(7, "🌵")]


@pytest.mark.parametrize(
    "what", [f"UNLOGGED {TABLE}", "VIEW plants AS SELECT 1", "TYPE plants AS ENUM ()"]
)
def test_what_is_no_table_for_plants_is_refused(storage, connection, sessions, what):
    """A crash empties an unlogged table, and a view may stand before one. No session is kept."""
    connection.execute(f"CREATE {what}")
    with pytest.raises(NeedsOperator, match="plants must be a table made by: CREATE TABLE plants"):
        storage.check(PATIENCE)
    wait_until(lambda: not sessions())


def test_a_database_or_a_host_that_can_not_be_is_refused(serve, postgresql):
    """Not every encoding has all characters; and a host's name has no empty part."""
    postgresql.execute("CREATE DATABASE latin ENCODING LATIN1 LOCALE 'C' TEMPLATE template0")
    stops_in_one_line(serve(DATABASE_URL=postgresql.url("latin")), "in LATIN1, not UTF8")
    stops_in_one_line(serve(DATABASE_URL="postgresql://a..b/d"), "no host can have this name")


def test_missing_rights_are_refused_and_no_others_are_needed(
    open_storage, storage, connection, url, role
):
    """A health check finds out, also while there is no table, or an empty one."""
    as_role = open_storage(f"{url}&user={role}")
    with pytest.raises(NeedsOperator, match=r"denied for schema .*or to create it: CREATE TABLE"):
        as_role.check(PATIENCE)
    storage.check(PATIENCE)
    rights = ("SELECT", "INSERT", "UPDATE")
    for missing in rights:
        connection.execute(f"GRANT {', '.join({*rights} - {missing})} ON plants TO {role}")
        with pytest.raises(NeedsOperator, match=r"denied for table .*needs SELECT, INSERT and UPD"):
            as_role.check(PATIENCE)
        connection.execute(f"REVOKE ALL ON plants FROM {role}")
    connection.execute(f"GRANT {', '.join(rights)} ON plants TO {role}")
    as_role.check(PATIENCE)
    as_role.add(MONSTERA)


def test_a_table_may_have_more_columns(storage, connection, sessions):
    """A newer version's are added under the service, and are there when it connects again.

    One that needs a value is for the operator.
    """
    storage.add(MONSTERA)
    connection.execute("ALTER TABLE plants ADD COLUMN height int NOT NULL DEFAULT 0")
    assert storage.add_all([MONSTERA, IVY]) == [None] * 2
    connection.execute("SELECT pg_terminate_backend(%s)", sessions())
    storage.add(Plant(9, "n"))
    assert list(storage.rows()) == [MONSTERA, IVY, Plant(9, "n")]
    connection.execute("ALTER TABLE plants ALTER height DROP DEFAULT")
    assert {type(outcome) for outcome in storage.add_all([MONSTERA, IVY])} == {NeedsOperator}


def test_a_dump_needs_the_right_to_read_alone_and_leaves_out_nothing(
    open_storage, storage, connection, url, role
):
    """Where a policy hides rows it fails, as pg_dump does."""
    storage.add(MONSTERA)
    connection.execute(f"GRANT SELECT ON plants TO {role}")
    reader = open_storage(f"{url}&user={role}")
    assert list(reader.rows()) == [MONSTERA]
    connection.execute("ALTER TABLE plants ENABLE ROW LEVEL SECURITY")
    with pytest.raises(NeedsOperator, match="affected by row-level security"):
        list(reader.rows())


def test_every_commit_waits_for_disks(open_storage, storage, url, connection):
    """synchronous_commit is raised where it would be too little."""
    storage.check(PATIENCE)
    default = "current_setting('synchronous_commit')"
    connection.execute(f"ALTER TABLE plants ADD setting text DEFAULT {default}")
    for number, setting in enumerate(["off", "local", "remote_write", "on", "remote_apply"]):
        other = open_storage(f"{url}&options=-csynchronous_commit%3D{setting}")
        other.add(Plant(number, "n"))
    rows = connection.execute("SELECT setting FROM plants ORDER BY id").fetchall()
    assert rows == [("on",)] * 4 + [("remote_apply",)]


# For each thing that PostgreSQL has, one of the same name. Whichever is used, it counts.
SHADOWS = """
    CREATE SEQUENCE public.uses;
    SET search_path = pg_catalog;
    CREATE FUNCTION public.is_used() RETURNS bool LANGUAGE plpgsql AS
        $$ BEGIN PERFORM nextval('public.uses'); RAISE 'used'; END $$;
    DO $do$ DECLARE shadow text; BEGIN FOR shadow IN
        SELECT format('VIEW public.%I AS SELECT * FROM %1$I WHERE public.is_used()', relname)
        FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')
    UNION ALL SELECT format('DOMAIN public.%I AS %1$I CHECK (public.is_used())', typname)
        FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b'
    UNION ALL SELECT format('FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS '
            '$$ BEGIN PERFORM public.is_used(); END $$', proname, types, result)
        FROM (SELECT proname, oidvectortypes(proargtypes), pg_get_function_result(oid)
            FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f'
            UNION VALUES ('concat', 'regnamespace, text', 'text')
        ) AS functions (proname, types, result)
    UNION ALL SELECT format('OPERATOR public.%s (%s RIGHTARG = %s, FUNCTION = public.%s)', oprname,
            'LEFTARG = ' || nullif(oprleft, 0)::regtype || ',', oprright::regtype, oprcode)
        FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace
    LOOP BEGIN EXECUTE 'CREATE ' || shadow; EXCEPTION WHEN OTHERS THEN END; END LOOP; END $do$"""


def test_no_code_of_other_roles_is_run(open_storage, postgresql_url):
    """Who may create in a schema of the search path does not get its code run as the service."""
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE other; GRANT CREATE ON SCHEMA public TO other")
        connection.execute(f"SET ROLE other; {SHADOWS}")
        for plant in (MONSTERA, IVY):  # the table is created, and found
            storage = open_storage(f"{postgresql_url}&options=-csearch_path%3Dpublic,pg_catalog")
            storage.check(PATIENCE)
            outcomes = storage.add_all([MONSTERA, plant, Plant(7, "other")])
            assert outcomes[:2] == [None] * 2 and isinstance(outcomes[2], Conflict)
        assert list(storage.rows()) == [MONSTERA, IVY]
        assert connection.execute("SELECT is_called FROM public.uses").fetchone() == (False,)


# servers that are away, or hang


def test_a_server_that_is_away_or_refuses_is_waited_for(serve):
    """The start goes on; requests get a 503 until it is there; then the table is made.

    The log says why once, not for each address, and without the password.
    """
    with running_postgresql("fsync=off") as own:
        own.stop()
        url = f"postgresql:///postgres?host={own.folder},{own.folder}&user=late&password=SECRET"
        server = serve(DATABASE_URL=url, WEB_CONCURRENCY="1")
        assert server.post({"id": 7, "name": "Monstera"})[0] == server.health() == 503
        assert "the database is not available now: PostgreSQL: connection" in server.err
        own.start("fsync=off")
        said = 'role \\"late\\" does not exist'
        wait_until(lambda: server.health() == 503 and said in server.out)
        assert all(line.count(said) <= 1 for line in server.out.splitlines())
        own.execute("CREATE ROLE late SUPERUSER LOGIN")
        wait_until(lambda: server.health() == 200)
        assert server.post({"id": 7, "name": "Monstera"})[0] == 200
        assert server.stored(7) == MONSTERA
        assert "SECRET" not in server.out + server.err


def test_a_server_that_never_answers_is_not_asked_by_each_request(open_storage, silent):
    """All fail at once while it is known to be away."""
    url, listener = silent
    storage, requests = open_storage(url), 6
    for _ in range(requests):
        with pytest.raises(Unavailable, match="PostgreSQL: "):
            storage.add(MONSTERA)
    listener.setblocking(False)
    asked = []
    with pytest.raises(BlockingIOError):
        asked.extend(iter(lambda: listener.accept()[0].close(), 0))
    assert 0 < len(asked) < requests


def test_each_batch_has_a_deadline_of_its_own(open_storage, url, sessions):
    """A connection is kept for longer than a batch may take."""
    storage = open_storage(url, SHORT)

    def is_kept() -> bool:
        before, end = sessions(), time.monotonic() + 1.1
        while time.monotonic() < end:
            storage.add_all([IVY])
        return bool(before) and before == sessions()

    wait_until(is_kept)


def test_a_batch_is_sent_again_where_its_connection_is_lost(serve, connection, sessions, pool):
    """What became of it is unknown, and does not matter. Other requests are served meanwhile."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.health() == 200
    connection.execute("CREATE SEQUENCE tries")
    before_insert(connection, "IF nextval('tries') = 1 THEN PERFORM pg_sleep(600); END IF;")
    posting = pool.submit(server.post, {"id": 7, "name": "Monstera"})
    session = wait_until(lambda: sessions("PgSleep"))
    assert server.request("GET", "/openapi.json").status == 200
    assert not posting.done()
    connection.execute("SELECT pg_terminate_backend(%s)", session)
    assert posting.result(PATIENCE)[0] == 200
    assert server.stored(7) == MONSTERA
    assert "AdminShutdown (57P01)" in server.err and "connecting again" in server.err


def test_a_session_that_becomes_read_only_is_left(open_storage, storage, connection, url, role):
    """Another one may take writes; while none does, as on a standby, nothing is available."""
    storage.check(PATIENCE)
    read_only = "default_transaction_read_only"
    before_insert(connection, f"PERFORM set_config('{read_only}', 'on', false);")
    connection.execute(f"GRANT ALL ON plants TO {role}")
    storage = open_storage(f"{url}&user={role}")
    storage.add(MONSTERA)
    storage.add(IVY)
    connection.execute(f"ALTER ROLE {role} SET {read_only} = on")
    with pytest.raises(Unavailable, match="session is read-only"):
        storage.check(PATIENCE)


# locks


@pytest.mark.parametrize(
    "lock",
    [
        "SELECT FROM plants WHERE id % 2 = 0 FOR UPDATE",
        "INSERT INTO plants SELECT id, 'other' FROM generate_series(0, 198, 2) AS id",
    ],
)
def test_plants_whose_rows_are_locked_fail_alone(storage, url, connection, sessions, pool, lock):
    """Others of their batch are stored, and so are they once nobody holds the rows.

    Where somebody waits for a row already, the server says less of who has it.
    """
    plants = [Plant(number, "n") for number in range(200)]
    storage.add_all(plants[1::2] if "INSERT" in lock else plants)
    other = psycopg.connect(f"{url}&application_name=plants")
    with other, connection.transaction(force_rollback=True):
        connection.execute(lock)
        waiting = pool.submit(other.execute, "SELECT FROM plants WHERE id = 0 FOR UPDATE")
        wait_until(lambda: waiting.done() or sessions("transactionid"))
        outcomes = storage.add_all(plants)
        storage.check(PATIENCE)
    assert {type(outcome) for outcome in outcomes[::2]} == {Blocked}
    assert outcomes[1::2] == [None] * 100
    wait_until(lambda: storage.add_all(plants) == [None] * 200)


@pytest.mark.parametrize("statement", [f"CREATE {TABLE}", "LOCK TABLE plants"])
@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout", "work_mem"])
def test_a_table_that_is_locked_is_waited_for_but_not_for_ever(
    open_storage, url, connection, sessions, pool, statement, setting
):
    """Somebody makes or alters it. No plant is at fault, whichever limit ends the wait.

    Who is no longer waited for does not wait on in the server, which has room for so many.
    """
    storage = open_storage()
    hasty = open_storage(f"{url}&options=-c{setting}%3D100", SHORT)
    if "LOCK" in statement:
        storage.check(PATIENCE)
    with connection.transaction():
        connection.execute(statement)
        adding = pool.submit(storage.add, MONSTERA)
        for outcome in hasty.add_all([MONSTERA, IVY]):
            assert isinstance(outcome, Unavailable)
            assert re.search("a lock of the table|due to \\w+ timeout", str(outcome))
        wait_until(lambda: len(sessions()) - len(sessions("ClientRead")) == 1)
        assert not adding.done()
    adding.result(PATIENCE)
    wait_until(lambda: hasty.add_all([MONSTERA, IVY]) == [None, None])


# triggers, constraints, policies and indexes of an operator


REFUSING = {
    "54000": "CREATE INDEX ON plants (name)",
    "23505, once": "CREATE UNIQUE INDEX once ON plants (tag)",
    "23514, known": "ALTER TABLE plants ADD CONSTRAINT known CHECK (name NOT LIKE 'secret%')",
    "42501": "ALTER TABLE plants ENABLE ROW LEVEL SECURITY; "
    "CREATE POLICY known ON plants USING (name NOT LIKE 'secret%')",
    "P0001": "IF NEW.id = 99 THEN RAISE EXCEPTION 'not %', NEW.name; END IF;",
    "it was not stored": "IF NEW.id = 99 THEN RETURN NULL; END IF;",
}
for code in ("08006", "40001", "53100", "55P03", "57014", "HV000"):  # what fails for now
    failure = f"RAISE EXCEPTION '%', NEW.name USING ERRCODE = '{code}';"
    REFUSING[f"({code}): PL/pgSQL function act()"] = f"IF NEW.id = 99 THEN {failure} END IF;"


@pytest.mark.parametrize("reason", REFUSING)
def test_a_plant_that_the_database_refuses_fails_alone(
    open_storage, storage, connection, url, role, reason
):
    """It is never taken, or not now; the reason has nothing of it. Others are stored."""
    storage.add(Plant(1, "n", "taken"))
    is_trigger = REFUSING[reason].startswith("IF")
    (before_insert if is_trigger else psycopg.Connection.execute)(connection, REFUSING[reason])
    connection.execute(f"GRANT ALL ON plants TO {role}")
    storage = open_storage(f"{url}&user={role}")
    name = f"secret{random.randbytes(5000).hex()}"  # too long for an index
    for _ in range(2):
        outcomes = storage.add_all([Plant(2, "n"), Plant(99, name, "taken"), Plant(3, "n")])
        refusal = outcomes.pop(1)
        assert type(refusal) is (Blocked if "PL/pgSQL" in reason else Rejected)
        assert reason in str(refusal)
        assert "secret" not in "".join(traceback.format_exception(refusal))
        assert outcomes == [None] * 2
    storage.check(PATIENCE)


def test_what_could_not_be_serialized_is_tried_again(open_storage, url, connection, sessions, pool):
    storage = open_storage(f"{url}&options=-cdefault_transaction_isolation%3Dserializable")
    storage.check(PATIENCE)
    connection.execute("CREATE SEQUENCE go; SET session_replication_role = replica")
    wait = "WHILE (SELECT NOT is_called FROM go) LOOP PERFORM pg_sleep(0.01); END LOOP;"
    before_insert(connection, wait)
    adding = pool.submit(storage.add, MONSTERA)
    wait_until(lambda: sessions("PgSleep"))
    connection.execute("INSERT INTO plants VALUES (7, 'Monstera'); SELECT nextval('go')")
    adding.result(PATIENCE)


def test_a_trigger_that_refuses_even_nothing_is_for_the_operator(storage, connection):
    """No client is told that its plant is never taken, and no health check that all is well."""
    storage.add(MONSTERA)
    before_insert(connection, "RAISE 'no';", each="STATEMENT")
    for batch in ([MONSTERA], [MONSTERA, IVY]):
        assert {type(outcome) for outcome in storage.add_all(batch)} == {NeedsOperator}
    with pytest.raises(NeedsOperator, match="PostgreSQL: no"):
        storage.check(PATIENCE)


def test_a_column_that_needs_a_value_is_for_the_operator(storage, connection):
    storage.add(MONSTERA)
    connection.execute("ALTER TABLE plants ADD height int NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE plants ALTER height DROP DEFAULT")
    assert {type(outcome) for outcome in storage.add_all([MONSTERA, IVY])} == {NeedsOperator}
