"""The engine for a table on a PostgreSQL server, on a cluster of them, or behind a pooler.

Contains no queue: storage.py has that, and imports this only for the URL of such a server.
"""

import contextlib
import json
import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from engine import Engine, Inserted, NeedsOperator, Unavailable
from schemas import Plant

CANCEL_LIMIT = 1.0  # seconds for a request to cancel a statement
PAUSE = 0.2  # seconds between two attempts
LOCK_TIMEOUT = 0.1  # seconds that a batch waits for a row
LOCKED_FOR = 1.0  # seconds for which a row that was locked is not tried again
COLUMNS = ", ".join(Plant._fields)
TYPES = {"id": "bigint NOT NULL", "name": "text NOT NULL", "tag": "text"}
DEFINITIONS = [f"{name} {TYPES[name]}" for name in Plant._fields]
SCHEMA = f"CREATE TABLE plants ({', '.join(DEFINITIONS)}, PRIMARY KEY (id))"
MEMBERS = [f"(plant ->> {n})::{TYPES[name].split()[0]}" for n, name in enumerate(Plant._fields)]
# The columns as above, and whether a row needs a value for each; a crash empties an unlogged table.
FIND_COLUMNS = """
    SELECT concat(attname, ' ', format_type(atttypid, atttypmod),
            CASE WHEN attnotnull THEN ' NOT NULL' END),
        attnotnull AND NOT atthasdef AND attidentity = ''
    FROM pg_attribute JOIN pg_class ON attrelid = pg_class.oid
    WHERE attrelid = to_regclass('plants') AND attnum > 0 AND NOT attisdropped
        AND relpersistence = 'p'"""
# In each transaction, as a pooler gives each another session. A commit has to wait for the disk,
# and to tell if it does not wait for the standbys.
SETTINGS = f"""
    WITH settings AS MATERIALIZED (
        SELECT set_config('lock_timeout', '{LOCK_TIMEOUT}s', true),
            set_config('client_min_messages', 'warning', true),
            set_config('synchronous_commit', CASE current_setting('synchronous_commit')
                WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true))"""
# From JSON: psycopg takes longer for arrays, and PostgreSQL for a statement that is long.
INSERT = f"""{SETTINGS}
    INSERT INTO plants ({COLUMNS}) SELECT {", ".join(MEMBERS)}
    FROM settings, json_array_elements(%s) AS plant ON CONFLICT (id) DO NOTHING"""
# FOR SHARE makes it a write, whose commit waits for the standbys too: a plant that is there could
# be on this server alone. Workers that share a row do not wait for each other's slow commits.
SELECT = f"""{SETTINGS}
    SELECT {COLUMNS} FROM settings, plants
    WHERE id = ANY(%s::bigint[]) FOR SHARE OF plants"""
# Locks a row, if nobody else has, and changes nothing.
TRY_A_WRITE = f"""{SETTINGS}, one AS (
        SELECT {COLUMNS} FROM settings, plants WHERE id = (SELECT id FROM plants LIMIT 1)
        FOR SHARE OF plants SKIP LOCKED)
    INSERT INTO plants ({COLUMNS}) SELECT {COLUMNS} FROM one ON CONFLICT (id) DO NOTHING"""
FIND_LOCKED = f"""{SETTINGS}, free AS MATERIALIZED (
        SELECT id FROM settings, plants
        WHERE id = ANY(%(ids)s::bigint[]) FOR SHARE OF plants SKIP LOCKED)
    SELECT id FROM plants WHERE id = ANY(%(ids)s::bigint[]) EXCEPT SELECT id FROM free"""
# Connection, read-only standby, deadlock, shutdown.
RECONNECT = ("08", "25006", "40", "57P")
# libpq has no codes for why it could not connect, and its messages are translated.
CONFIG_ERRORS = re.compile(
    r"authentication failed|does not exist|no password supplied|no pg_hba\.conf entry|"
    r"not permitted to log in|permission denied|SSL was required|: invalid "
)

log = logging.getLogger("gunicorn.error.plants")  # a child of gunicorn's error log


class LostConnection(Unavailable):
    """What was under way may have been done or not; it can be done again on another connection."""


class Connection(psycopg.Connection):
    """A connection whose statements have a deadline, as a hung server keeps no timeout itself."""

    deadline = math.inf  # of time.monotonic()

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for the server until the deadline, not `timeout`. Raises OperationalError."""
        try:
            return super().wait(gen, interval, max(self.deadline - time.monotonic(), 0))
        except psycopg.OperationalError as error:
            if time.monotonic() < self.deadline:
                raise
            raise psycopg.OperationalError(PostgreSQLEngine.obstacle) from error

    def close(self) -> None:
        """Close the connection, and tell the server if it may still be waiting for something."""
        if self.info.transaction_status == TransactionStatus.ACTIVE:
            with contextlib.suppress(psycopg.Error):
                self.cancel_safe(timeout=CANCEL_LIMIT)
        super().close()


class PostgreSQLEngine(Engine):
    """One connection to a server; psycopg's waits are cooperative under gevent."""

    obstacle = "the server hangs, or another transaction has locked the table"

    def __init__(self, url: str, identity: str, write_limit: float) -> None:
        """Limit the seconds for a batch; create no table if there was one, of this `identity`."""
        self._parameters = parse_url(url)
        self._write_limit = write_limit - CANCEL_LIMIT
        self._connection: Connection | None = None
        self._failure: Exception | None = None  # while the server is known to be away
        self._retry_at = 0.0  # when to connect again
        self._is_not_replicated = False  # whether a commit did not wait for the standbys
        self._locked: dict[int, float] = {}  # when to try rows again that others hold, by id
        self.description, self.identity = "PostgreSQL, not reached yet", identity

    def insert(self, plants: Sequence[Plant]) -> Inserted:
        deadline = time.monotonic() + self._write_limit
        if self._failure and time.monotonic() < self._retry_at:
            raise self._failure
        while True:
            start = time.monotonic()
            try:
                connection = self._connection or self._open(deadline)
                connection.deadline = deadline
                inserted = self._insert(connection, plants)
                self._failure, self.obstacle = None, PostgreSQLEngine.obstacle
                return inserted
            except psycopg.Error as error:
                # Its traceback is in a cycle, and would keep a connection that timed out open.
                failure, now = explain(error.with_traceback(None)), time.monotonic()
            if not isinstance(failure, LostConnection):
                raise failure
            if self._connection is None:  # fail at once for as long as this try took
                self._retry_at = now + (now - start)
            self.close()
            self.obstacle = str(failure)
            if self._failure or now > deadline:
                self._failure = failure
                raise failure
            log.warning("%s; connecting again", failure)
            time.sleep(PAUSE)

    def rows(self) -> Iterator[Plant]:
        select = f"SELECT {COLUMNS} FROM plants ORDER BY id"
        try:
            with self._connect() as connection:
                yield from map(Plant._make, connection.cursor().stream(select, size=1000))
        except psycopg.Error as error:
            raise explain(error) from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self, deadline: float) -> Connection:
        """Connect; check that the table is ours, or create it if there is none."""
        connection = self._connect()
        try:
            connection.deadline = deadline
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _connect(self) -> Connection:
        try:
            connection = Connection.connect(
                **self._parameters, autocommit=True, prepare_threshold=None
            )
        except UnicodeError:
            raise NeedsOperator("DATABASE_URL: no host can have this name") from None
        connection.add_notice_handler(self._notice)
        return connection

    def _notice(self, notice: psycopg.errors.Diagnostic) -> None:
        """Note that a commit gave up waiting for the standbys, which is no error to libpq."""
        self._is_not_replicated |= notice.source_function == "SyncRepWaitForLSN"

    def _insert(self, connection: Connection, plants: Sequence[Plant]) -> Inserted:
        """Insert the plants, but for those whose rows are locked; one look finds all of these."""
        self._is_not_replicated, new, existing = False, 0, None
        while True:
            now = time.monotonic()
            self._locked = {key: until for key, until in self._locked.items() if until > now}
            free = [plant for plant in plants if plant.id not in self._locked]
            ids = [plant.id for plant in free]
            try:
                added = insert_new(connection, free) if free or not plants else 0
                new += added
                if added < len(free):
                    found = map(Plant._make, connection.execute(SELECT, [ids]))
                    existing = {plant.id: plant for plant in found}
                break
            except psycopg.errors.LockNotAvailable:
                held = [row[0] for row in connection.execute(FIND_LOCKED, {"ids": ids})]
                if not held and len(ids) > 1:  # a row that can't be seen yet: somebody's insert
                    raise
                self._locked |= dict.fromkeys(held or ids, time.monotonic() + LOCKED_FOR)
        if self._is_not_replicated:
            raise psycopg.OperationalError("committed here, but maybe not on the standbys")
        return Inserted(new, self._locked, existing)

    def _prepare(self, connection: Connection) -> None:
        info = connection.info
        if (encoding := info.parameter_status("server_encoding")) != "UTF8":
            raise NeedsOperator(
                f"PostgreSQL: the database is in {encoding}, not UTF8; name another in DATABASE_URL"
            )
        found: dict[str, bool] = dict(connection.execute(FIND_COLUMNS).fetchall())
        if not found and not self.identity:
            # Of several processes that create it at once, those that come too late fail.
            with contextlib.suppress(*map(psycopg.errors.lookup, ("23505", "42710", "42P07"))):
                connection.execute(SCHEMA)
            found = dict(connection.execute(FIND_COLUMNS).fetchall())
        wrong = [each for each in DEFINITIONS if each not in found]
        wrong += [
            each for each, is_needed in found.items() if is_needed and each not in DEFINITIONS
        ]
        if wrong:
            raise NeedsOperator(
                "PostgreSQL: the table plants is missing or unlogged, or differs in "
                f"{', '.join(wrong)}; it is made by: {SCHEMA}; a column by: ALTER TABLE plants ADD"
            )
        version = info.parameter_status("server_version")
        self.description = f"PostgreSQL {version}, database {info.dbname} at {info.host}"
        self.identity = "seen"


def insert_new(connection: Connection, plants: Sequence[Plant]) -> int:
    """Insert the plants whose id is new, return how many; without plants, change nothing."""
    if not plants:
        connection.execute(TRY_A_WRITE)
        return 0
    return connection.execute(INSERT, [json.dumps(plants)]).rowcount


def parse_url(url: str) -> dict[str, Any]:
    """Return libpq's parameters. Raises NeedsOperator, without repeating a part of `url`."""
    with contextlib.suppress(psycopg.ProgrammingError):
        given = psycopg.conninfo.conninfo_to_dict(url)
        # An @ there shows that a part of a password was taken for it.
        if not any("@" in str(given.get(name)) for name in ("host", "dbname")):
            return {
                "connect_timeout": 2,  # seconds, for each address
                "fallback_application_name": "plants",
                "keepalives_idle": 60,  # seconds; routers forget connections that are long silent
                "target_session_attrs": "read-write",  # of several servers, that for writes
                **given,
                "client_encoding": "utf8",
            }
    raise NeedsOperator(
        "DATABASE_URL must be like postgresql://user:password@host/database, with special "
        "characters percent-encoded"
    )


def explain(error: psycopg.Error) -> Exception:
    """Return the error of ours that psycopg's means: one line, nothing of the plant."""
    message = error.diag.message_primary or str(error)
    text = " ".join(f"PostgreSQL: {message}".split())
    # With several hosts, what each of them said comes after the first lines.
    failures = message.partition("All failures were:")[2].split("\n- ")[1:] or [message]
    if error.sqlstate is None and all(map(CONFIG_ERRORS.search, failures)):
        return NeedsOperator(text)
    unknown = "" if isinstance(error, psycopg.ProgrammingError) else "08"
    if (error.sqlstate or unknown).startswith(RECONNECT):
        return LostConnection(text)
    at_fault = psycopg.DataError | psycopg.IntegrityError | psycopg.errors.LockNotAvailable
    if isinstance(error, at_fault):  # one of the plants is
        return ValueError(text)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        text += f"; the role needs SELECT, INSERT and UPDATE on plants, or to create it: {SCHEMA}"
    if isinstance(error, psycopg.ProgrammingError):
        return NeedsOperator(text)
    return Unavailable(text)
