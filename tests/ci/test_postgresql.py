"""The storage on PostgreSQL: refused plants, locks, and servers that are down or hang."""

import contextlib
import random
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from engines.postgresql import SCHEMA, PostgreSQLEngine
from plant import Plant
from storage import LOCK_LIMIT, Conflict, Unavailable
from tests.support.postgresql import PostgreSQL
from tests.support.server import PATIENCE, STORED, fails_with, wait_until
from tests.support.storage import read_names
from tests.support.wire import MONSTERA

# The tests of the interface and of the storage that depend on the engine.
from tests.test_app import (  # noqa: F401
    test_a_different_plant_with_the_same_id_gets_a_409,
    test_a_new_plant_is_stored_once_and_returned_without_its_id_with_a_200,
    test_a_plant_is_stored_and_returned_exactly,
)
from tests.test_storage import test_many_threads_of_many_processes_store_every_plant  # noqa: F401


@pytest.fixture
def url(postgresql_url: str) -> str:
    """The URL of a database that a test has for itself."""
    return postgresql_url


@pytest.fixture
def connection(url: str) -> Iterator[psycopg.Connection]:
    """A connection of another program."""
    with psycopg.connect(url, autocommit=True, application_name="other") as connection:
        yield connection


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for responses. Requests that are sent at once share batches."""
    with ThreadPoolExecutor(200) as pool:
        yield pool


@pytest.fixture
def sessions(postgresql: PostgreSQL, connection: psycopg.Connection) -> Callable[..., list[int]]:
    """A function that finds the processes for the service: all, or those that wait for an event."""
    query = "SELECT pid, wait_event FROM pg_stat_activity WHERE application_name <> 'other' "
    query += f"AND datname = '{connection.info.dbname}'"
    return lambda *wanted: [pid for pid, *has in postgresql.execute(query) if {*wanted} <= {*has}]


@pytest.mark.parametrize("scheme", ["postgresql:", "postgres:"])
def test_a_url_can_have_every_parameter_of_libpq(open_storage, connection, url, tmp_path, scheme):
    """This one has two hosts of which one is up, a schema, and an encoding without emojis."""
    connection.execute("CREATE SCHEMA garden")
    url = url.replace("postgresql:", scheme).replace("?host=", f"?host={tmp_path},")
    storage = open_storage(f"{url}&options=-csearch_path%3Dgarden&client_encoding=LATIN1")
    storage.add(Plant(7, "🌵"))
    assert connection.execute("SELECT * FROM garden.plants").fetchall() == [(7, "🌵", None)]


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_several_workers_create_the_table_at_once(url, connection, sessions, pool, end):
    """A worker that comes too late uses the table that another one, or another program, made."""
    connection.execute(f"BEGIN; {SCHEMA}")
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(contextlib.closing(PostgreSQLEngine(url))) for _ in range(4)]
        openings = [pool.submit(engine.insert, [], LOCK_LIMIT) for engine in engines]
        wait_until(lambda: len(sessions("transactionid")) == 4)
        connection.execute(end)
        assert [opening.result(PATIENCE) for opening in openings] == [{}] * 4


def test_a_role_needs_three_rights_and_no_others(open_storage, connection, url):
    """A health check notices a missing right, even if there is no table yet, or no plant in it."""
    role = f"{connection.info.dbname}_role"
    connection.execute(f"CREATE ROLE {role} LOGIN")
    storage = open_storage(f"{url}&user={role}")
    for _ in range(2):  # The second check connects and tries to create the table again.
        with pytest.raises(Unavailable, match="permission denied for schema"):
            storage.check(PATIENCE)
    connection.execute(SCHEMA)
    for right in ("SELECT", "INSERT", "UPDATE"):
        with pytest.raises(Unavailable, match="permission denied for table"):
            storage.check(PATIENCE)
        connection.execute(f"GRANT {right} ON plants TO {role}")
    storage.check(PATIENCE)
    storage.add(Plant(7, "Monstera"))


def test_a_table_that_was_there_is_not_created_again(serve, connection, url):
    """It would be empty, and a 200 would hide that plants are gone. A worker may create the first.

    The check before a restart refuses a database without a table.
    """
    check = [sys.executable, "start.py", "--existing"]
    fails_with(serve(command=check), "the table plants of the database test.* is missing")
    server = serve(WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == STORED
    assert serve(command=check).wait() == 0
    connection.execute("ALTER TABLE plants RENAME TO moved")
    for _ in range(5):
        assert server.post({**MONSTERA, "id": 8})[0] == 503
    assert server.health() == 503
    wait_until(lambda: "is missing: if plants were stored there, read docs/postg" in server.out)
    connection.execute("ALTER TABLE moved RENAME TO plants")
    assert server.post(MONSTERA)[0] == STORED


RULES = """
    ALTER TABLE plants ADD CONSTRAINT known CHECK (tag <> 'unknown');
    CREATE UNIQUE INDEX single ON plants (tag) WHERE tag = 'taken';
    CREATE INDEX short ON plants (name) WHERE tag = 'too long';
    CREATE INDEX number ON plants ((CASE tag WHEN 'no number' THEN name::int END));
    CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.tag = 'raises' THEN RAISE 'not %', NEW.name; END IF;
        IF NEW.tag = 'own' THEN RAISE SQLSTATE 'PT400' USING message = 'no ' || NEW.name; END IF;
        ASSERT NEW.tag IS DISTINCT FROM 'asserts', NEW.name;
        RETURN CASE WHEN NEW.tag = 'ignored' THEN NULL ELSE NEW END; END $$;
    CREATE TRIGGER acts BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION act()"""
REASONS = {  # The reasons in the log, by the tag of the plant.
    "unknown": "CheckViolation (23514, known)",
    "taken": "UniqueViolation (23505, single)",
    "too long": "ProgramLimitExceeded (54000, None)",
    "no number": "InvalidTextRepresentation (22P02, None)",
    "raises": "RaiseException (P0001, None)",
    "own": "ProgrammingError (PT400, None)",
    "asserts": "AssertFailure (P0004, None)",
    "ignored": "the plant was not stored",
}


def test_plants_that_the_database_rejects_fail_alone(serve, connection, pool):
    """The other plants of their batch are stored, and no log line quotes a rejected one."""
    server, name = serve(WEB_CONCURRENCY="1"), f"secret{random.randbytes(5000).hex()}"
    assert server.post({**MONSTERA, "tag": "taken"})[0] == STORED
    connection.execute(RULES)
    plants = [{"id": 10 + number, "name": name, "tag": tag} for number, tag in enumerate(REASONS)]
    plants += [{"id": number, "name": "n"} for number in range(20, 50)]
    random.shuffle(plants)
    for _ in range(2):
        statuses = [status for status, _ in pool.map(server.post, plants)]
        assert statuses == [400 if "tag" in plant else STORED for plant in plants]
    assert server.health() == 200
    assert "secret" not in server.out + server.err
    assert [reason for reason in REASONS.values() if reason not in server.out] == []


FAILS = {  # An action of a trigger that fails, and the reason in the log.
    "EXECUTE format('SELECT 1 FROM %I', NEW.name)": "UndefinedTable (42P01, None)",
    "SET LOCAL statement_timeout = 1; PERFORM pg_sleep(600)": "QueryCanceled (57014, None)",
}


@pytest.mark.parametrize(("action", "reason"), FAILS.items(), ids=FAILS.values())
def test_a_plant_gets_a_503_as_long_as_a_trigger_fails(serve, connection, action, reason):
    """The plant is not at fault. The database's message may quote it, so the log does not."""
    connection.execute(
        f"{SCHEMA}; CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {action}; RETURN NEW; END $$; "
        "CREATE TRIGGER acts BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION act()"
    )
    server = serve(WEB_CONCURRENCY="1")
    assert server.post({**MONSTERA, "name": "secret"})[0] == 503
    assert reason in server.out and "secret" not in server.out + server.err
    connection.execute("DROP TRIGGER acts ON plants")
    assert server.post({**MONSTERA, "name": "secret"})[0] == STORED


FAIL_FOR_ONE = {  # What fails for one plant, and the reason in the log.
    "ALTER TABLE plants ENABLE ROW LEVEL SECURITY; "
    "CREATE POLICY known ON plants USING (name <> 'secret')": "violates row-level security policy",
    "CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "IF NEW.name = 'secret' THEN PERFORM * FROM missing; END IF; RETURN NEW; END $$; "
    "CREATE TRIGGER acts BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION act()": (
        "UndefinedTable (42P01, None)"
    ),
}


@pytest.mark.parametrize(("rule", "reason"), FAIL_FOR_ONE.items(), ids=["policy", "trigger"])
def test_a_rule_that_fails_for_a_plant_keeps_out_no_others(
    serve, connection, url, pool, rule, reason
):
    """The plant gets a 503 and not a 400, since a retry may help.

    A missing right has the same SQLSTATE as a policy, and a missing table may be created.
    """
    role = f"{connection.info.dbname}_role"
    connection.execute(
        f"CREATE ROLE {role} LOGIN; {SCHEMA}; GRANT SELECT, INSERT, UPDATE ON plants TO {role}; "
        f"{rule}"
    )
    server = serve(WEB_CONCURRENCY="1", DATABASE_URL=f"{url}&user={role}")
    plants = [{"id": n, "name": "n" if n != 7 else "secret"} for n in range(20)]
    for _ in range(3):
        statuses = [status for status, _ in pool.map(server.post, plants)]
        assert statuses == [503 if n == 7 else STORED for n in range(20)]
    assert reason in server.out and "secret" not in server.out


def test_rivals_for_an_id_do_not_fail_each_other_at_any_isolation_level(serve, connection, pool):
    """The database's default is a higher level, at which a commit makes concurrent rivals fail."""
    name = connection.info.dbname
    connection.execute(
        f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'; "
        f"{SCHEMA}; CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.002); RETURN NEW; END $$; "
        "CREATE TRIGGER acts BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION act()"
    )
    server = serve(WEB_CONCURRENCY="3")
    rivals = [{"id": n % 10, "name": f"{n}"} for n in range(400)]
    statuses = [status for status, _ in pool.map(server.post, rivals)]
    assert statuses.count(STORED) == 10 and "could not serialize" not in server.out


def test_a_database_without_an_encoding_stores_any_plant(open_storage, postgresql):
    """SQL_ASCII takes bytes as they are, but no escapes of JSON."""
    name = f"ascii{random.getrandbits(32)}"
    postgresql.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0")
    storage = open_storage(url := postgresql.url(name))
    for _ in range(2):
        storage.add(Plant(7, "é🌵"))
    with pytest.raises(Conflict):
        storage.add(Plant(7, "è"))
    assert read_names(f"{url}&client_encoding=utf8") == {7: "é🌵"}


def test_a_damaged_end_of_the_table_fails_the_health_check(open_storage, postgresql, connection):
    """The next plant would go there. A write somewhere else proves nothing."""
    connection.execute(f"{SCHEMA}; INSERT INTO plants VALUES (1, 'one')")
    ((path,),) = connection.execute("SELECT pg_relation_filepath('plants')").fetchall()
    name = connection.info.dbname
    connection.close()
    # The server has no page of a copied database in its memory yet.
    postgresql.execute(f"CREATE DATABASE {name}_copy TEMPLATE {name} STRATEGY file_copy")
    find = f"SELECT oid FROM pg_database WHERE datname = '{name}_copy'"
    ((number,),) = postgresql.execute(find)
    file = postgresql.folder / "data" / "base" / str(number) / path.rpartition("/")[2]
    file.write_bytes(b"\xff" * file.stat().st_size)
    storage = open_storage(postgresql.url(f"{name}_copy"))
    for use in (lambda: storage.add(Plant(2, "two")), lambda: storage.check(PATIENCE)):
        with pytest.raises(Unavailable, match="invalid page"):
            use()


@pytest.mark.parametrize(
    ("first", "lock"),
    [(0, "UPDATE plants SET name = 'I'"), (1, "INSERT INTO plants SELECT id + 1, 'I' FROM plants")],
)
def test_rows_that_are_locked_keep_out_no_others(serve, connection, pool, first, lock):
    """Only the plants in these rows get a 503, until the locks are released."""
    each_second = "INSERT INTO plants SELECT id, 'n' FROM generate_series(0, 198, 2) AS id"
    connection.execute(f"{SCHEMA}; {each_second}")
    server, plants = serve(WEB_CONCURRENCY="1"), [{"id": n, "name": "n"} for n in range(200)]
    with connection.transaction(force_rollback=True):
        connection.execute(lock)
        statuses = [status for status, _ in pool.map(server.post, plants)]
        assert statuses[first::2] == [503] * 100 and statuses[1 - first :: 2] == [STORED] * 100
        for _ in range(15):  # No plant is stored for over a second, so a health check has to write.
            assert (server.post(plants[first])[0], server.health()) == (503, 200)
    assert {status for status, _ in pool.map(server.post, plants)} == {STORED}


def test_a_slow_commit_of_another_worker_is_not_taken_for_a_locked_row(serve, connection, pool):
    """A commit takes 300 ms, as with a standby in another region. Each plant is sent twice."""
    connection.execute(
        f"{SCHEMA}; CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF current_setting('test.slept', true) IS DISTINCT FROM pg_current_xact_id()::text THEN "
        "PERFORM set_config('test.slept', pg_current_xact_id()::text, true), pg_sleep(0.3); END IF;"
        "RETURN NULL; END $$; CREATE CONSTRAINT TRIGGER acts AFTER INSERT OR UPDATE ON plants "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION act()"
    )
    server = serve()
    server.workers()
    plants = [{"id": n // 2, "name": "n"} for n in range(200)]
    for _ in range(3):
        assert {status for status, _ in pool.map(server.post, plants)} == {STORED}
    assert "LockNotAvailable" not in server.out


def test_while_another_program_creates_or_locks_the_table_health_checks_fail_too(serve, connection):
    """The service starts meanwhile, and works as soon as the table is free."""
    with connection.transaction():
        connection.execute(SCHEMA)
        server = serve(WEB_CONCURRENCY="1")
        assert server.health() == 503
    wait_until(lambda: server.health() == 200)
    with connection.transaction():
        connection.execute("LOCK TABLE plants")
        assert server.post(MONSTERA)[0] == 503
        wait_until(lambda: server.health() == 503)
    wait_until(lambda: server.health() == 200)
    assert server.post(MONSTERA)[0] == STORED


def test_while_a_server_is_down_or_hangs_plants_get_a_503(serve):
    """The service starts, responds meanwhile, and recovers by itself. No log has the password."""
    url = (own := PostgreSQL()).url().replace("user=postgres", "user=late&password=SECRET")
    server = serve(DATABASE_URL=url, WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == server.health() == 503
    said = "plants can't be stored in PostgreSQL: connection .*; the service answers 503"
    assert re.search(said, server.err)
    with own:
        said = 'role \\"late\\" does not exist'
        wait_until(lambda: server.health() == 503 and said in server.out)
        own.execute("CREATE ROLE late SUPERUSER LOGIN")
        wait_until(lambda: server.health() == 200)
        own.signal(signal.SIGSTOP)
        assert server.post(MONSTERA)[0] == server.health() == 503
        assert "the server hangs" in server.out  # the batch ends before its requests give up
        own.signal(signal.SIGCONT)
        wait_until(lambda: server.health() == 200)
        assert server.post(MONSTERA)[0] == STORED
        assert "SECRET" not in server.out + server.err


def test_three_of_four_addresses_may_be_dead(serve, postgresql, url):
    """Something accepts connections there and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        hosts = f"?host={'127.0.0.1,' * 3}{postgresql.folder}&port={f'{port},' * 3}5432"
        own = f"{url.partition('?')[0]}{hosts}&user=postgres"
        assert serve(DATABASE_URL=own, WEB_CONCURRENCY="1").post(MONSTERA)[0] == STORED


def test_a_batch_whose_connection_was_lost_is_sent_once_more(serve, connection, sessions, pool):
    """Its outcome is unknown, and storing it twice is safe. Other requests are served meanwhile."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.post({**MONSTERA, "id": 8})[0] == STORED
    connection.execute(
        "CREATE SEQUENCE tries; CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF nextval('tries') = 1 THEN PERFORM pg_sleep(600); END IF; RETURN NEW; END $$; "
        "CREATE TRIGGER acts BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION act()"
    )
    posting = pool.submit(server.post, MONSTERA)
    (session,) = wait_until(lambda: sessions("PgSleep"))
    assert server.request("GET", "/openapi.json")[0] == 200
    assert not posting.done()
    connection.execute("SELECT pg_terminate_backend(%s)", [session])
    assert posting.result(PATIENCE)[0] == STORED
    assert read_names(server.url) == {7: "Monstera", 8: "Monstera"}
