"""The engine for a table on a PostgreSQL server, on a cluster of them, or behind a pooler.

Contains no queue: storage.py has that, and imports this only for the URL of such a server.
"""

import contextlib
import functools
import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from engine import Engine, Inserted, NeedsOperator, Rejected, Unavailable, log
from schemas import Plant

CANCEL_LIMIT = 1.0  # seconds for a request to cancel a statement
PAUSE = 0.2  # seconds between two attempts
WARNING_INTERVAL = 60.0  # seconds between two warnings that the connection was lost
LOCK_TIMEOUT = "100ms"  # for which a batch waits for a row
SHORT_TIMEOUT = "1ms"  # for which its parts do, and others, once one has waited in vain
LOCKED_FOR = 5.0  # seconds for which a row that was locked is not tried again
HURRY_FOR = 1.0  # seconds for which SHORT_TIMEOUT holds
COLUMNS = ", ".join(Plant._fields)
# Each name has its schema, as whoever may create functions, operators or types in a schema of the
# search path could put others in their place: of all that match, PostgreSQL takes the best.
TYPES = {"id": "pg_catalog.int8 NOT NULL", "name": "pg_catalog.text NOT NULL",
         "tag": "pg_catalog.text"}  # fmt: skip
DEFINITIONS = [f"{name} {TYPES[name]}" for name in Plant._fields]
SCHEMA = f"CREATE TABLE plants ({', '.join(DEFINITIONS)}, PRIMARY KEY (id))"
MEMBER = "(plant OPERATOR(pg_catalog.->>) {})::{}"
MEMBERS = [MEMBER.format(n, TYPES[name].split()[0]) for n, name in enumerate(Plant._fields)]
# The table, its columns as above, whether each needs a value; a crash empties an unlogged one.
FIND_TABLE = """
    SELECT pg_catalog.concat(relnamespace::pg_catalog.regnamespace, '.plants'),
        pg_catalog.concat(attname, ' ', typnamespace::pg_catalog.regnamespace, '.', typname,
            CASE WHEN attnotnull THEN ' NOT NULL' END),
        attnotnull AND NOT atthasdef AND attidentity OPERATOR(pg_catalog.=) ''
    FROM pg_catalog.pg_attribute
        JOIN pg_catalog.pg_class ON attrelid OPERATOR(pg_catalog.=) pg_class.oid
        JOIN pg_catalog.pg_type ON atttypid OPERATOR(pg_catalog.=) pg_type.oid
    WHERE attrelid OPERATOR(pg_catalog.=) pg_catalog.to_regclass(%s::pg_catalog.text)
        AND NOT attisdropped AND attnum OPERATOR(pg_catalog.>) 0
        AND relpersistence OPERATOR(pg_catalog.=) 'p'
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_index WHERE NOT indimmediate
            AND indkey::pg_catalog.text OPERATOR(pg_catalog.=) attnum::pg_catalog.text
            AND attname OPERATOR(pg_catalog.=) 'id' AND indrelid OPERATOR(pg_catalog.=) attrelid)"""
NOT_FOUND = "PostgreSQL: plants is missing, temporary or unlogged, or has a deferrable key"
# In each transaction, as a pooler gives each another session. A commit has to wait for the disk,
# and to tell if it does not wait for the standbys.
SETTINGS = """WITH settings AS MATERIALIZED (
        SELECT pg_catalog.set_config('lock_timeout', '{wait}', true),
            pg_catalog.set_config('client_min_messages', 'warning', true),
            pg_catalog.set_config('synchronous_commit', CASE
                WHEN pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=)
                    'remote_apply' THEN 'remote_apply' ELSE 'on' END, true))"""
# From JSON: psycopg takes longer for arrays, and PostgreSQL for a statement that is long.
INSERT = f"""{SETTINGS}
    INSERT INTO {{plants}} ({COLUMNS}) SELECT {", ".join(MEMBERS)}
    FROM settings, pg_catalog.json_array_elements(%(rows)s::pg_catalog.json) AS plant
    ON CONFLICT (id) DO NOTHING RETURNING id"""
# FOR SHARE makes it a write, whose commit waits for the standbys too: a plant that is there could
# be on this server alone. Workers that share a row do not wait for each other's slow commits.
SELECT = f"""{SETTINGS}
    SELECT {COLUMNS} FROM settings, {{plants}}
    WHERE id OPERATOR(pg_catalog.=) ANY(%(ids)s::pg_catalog.int8[]) FOR SHARE OF plants"""
# Locks a row, if nobody else has, and changes nothing.
TRY_A_WRITE = f"""{SETTINGS} SELECT id FROM settings, {{plants}}
    WHERE id OPERATOR(pg_catalog.=) (SELECT id FROM {{plants}} LIMIT 1)
    FOR SHARE OF plants SKIP LOCKED"""
# What is not one plant's fault, by the first characters of its code (SQLSTATE).
RECONNECT = ("08", "25", "26", "40", "57P")  # connection, read-only standby, deadlock, shutdown
NOT_NOW = ("53", "55", "57", "58", "72", "F0", "HV", "XX")  # resources, locks and timeouts, disk
NEEDS_OPERATOR = ("0A", "28", "3D", "3F", "42")  # rights, and what is missing
# libpq has no codes for why it could not connect, and its messages are translated.
CONFIG_ERRORS = re.compile(
    r"authentication failed|does not exist|no password supplied|no pg_hba\.conf entry|"
    r"no such database|not permitted to log in|permission denied|SSL was required|: invalid "
)
fill = functools.cache(str.format)  # a text of those above, once for each table


class LostConnection(Unavailable):
    """What was under way may have been done or not; it can be done again on another connection."""


class Connection(psycopg.Connection):
    """A connection whose statements have a deadline, as a hung server keeps no timeout itself."""

    deadline = float("inf")  # of time.monotonic()
    table = ""  # with its schema, once it was found and is as it has to be

    def find_table(self, name: str | None) -> tuple[str, dict[str, bool]]:
        """Return the table, with its schema, and its columns: whether each needs a value."""
        rows = self.execute(FIND_TABLE, [name or "plants"]).fetchall()
        if not rows:
            return "", {}
        return rows[0][0], {column.replace('"', ""): is_needed for _, column, is_needed in rows}

    def run(self, text: str, wait: str = LOCK_TIMEOUT, **values: Any) -> psycopg.Cursor[Any]:
        """Execute a text of those above; `wait` for a row that another transaction has locked."""
        return self.execute(fill(text, plants=self.table.replace("%", "%%"), wait=wait), values)

    def insert(self, plants: Sequence[Plant], wait: str) -> Inserted:
        """Insert the plants whose id is new."""
        ids, new = [plant.id for plant in plants], set[int]()
        for _ in range(2):  # a plant may be deleted between the two statements
            refusal = None
            try:
                new |= {key for (key,) in self.run(INSERT, wait, rows=json.dumps(plants))}
            except psycopg.Error as error:
                if not isinstance(explain(error, plants), Rejected):
                    raise
                refusal = error
            if sorted(new) == ids:
                return Inserted(new)
            found = map(Plant._make, self.run(SELECT, wait, ids=ids))
            existing = {plant.id: plant for plant in found}
            if existing.keys() >= set(ids):
                return Inserted(new, existing=existing)
            if refusal:  # else it was stored before something came that is against it
                raise refusal
        raise Rejected("PostgreSQL: a trigger or a policy of the table keeps it out, or hides it")

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for the server until the deadline, not `timeout`. Raises OperationalError."""
        try:
            return super().wait(gen, interval, max(self.deadline - time.monotonic(), 0))
        except psycopg.OperationalError as error:
            if (late := time.monotonic() - self.deadline) < 0:
                raise
            is_own = late > 1  # as after SIGSTOP, of which the server does not know
            reason = "the service itself was stopped" if is_own else PostgreSQLEngine.obstacle
            raise psycopg.OperationalError(reason) from error

    def close(self) -> None:
        """Close the connection, and tell the server if it may still be waiting for something."""
        if self.info.transaction_status == TransactionStatus.ACTIVE:
            with contextlib.suppress(psycopg.Error):
                self.cancel_safe(timeout=CANCEL_LIMIT)
        super().close()


class PostgreSQLEngine(Engine):
    """One connection to a server; psycopg's waits are cooperative under gevent."""

    obstacle = "the server hangs, or a trigger does, or another transaction has locked the table"

    def __init__(self, url: str, identity: str | None, write_limit: float) -> None:
        """Limit the seconds for a batch; create no table if there was one, of this `identity`."""
        self._server = parse_url(url)
        self._write_limit = write_limit - CANCEL_LIMIT
        self._connection: Connection | None = None
        self._failure: Exception | None = None  # while the server is known to be away
        self._retry_at = 0.0  # when to connect again
        self._is_not_replicated = False  # whether a commit did not wait for the standbys
        self._locked: dict[int, float] = {}  # when to try rows again, by id
        self._hurry_until = 0.0  # as others hold rows
        self._lost, self._warn_at = 0, 0.0  # how often since the last warning, when again
        self.description, self.identity = "PostgreSQL, not reached yet", identity

    def insert(self, plants: Sequence[Plant]) -> Inserted:
        deadline = time.monotonic() + self._write_limit
        if self._failure and time.monotonic() < self._retry_at:
            raise self._failure
        while True:
            start = time.monotonic()
            try:
                self._connection = connection = self._connection or self._connect()
                connection.deadline = deadline
                inserted = self._insert(connection, plants)
                self._failure, self.obstacle = None, PostgreSQLEngine.obstacle
                return inserted
            except psycopg.Error as error:
                # Its traceback is in a cycle, and would keep a connection that timed out open.
                failure, now = explain(error.with_traceback(None), plants), time.monotonic()
            if self._connection and self._connection.closed:  # a pooler has codes of its own
                failure = LostConnection(str(failure))
            if not isinstance(failure, LostConnection):
                raise failure
            if self._connection is None:  # fail at once for as long as this try took
                self._retry_at = now + (now - start)
            self.close()
            self.obstacle = str(failure)
            if self._failure or now > deadline:
                self._failure = failure
                raise failure
            self._lost += 1
            if now >= self._warn_at:
                log.warning("%s; connecting again (since the last time: %d)", failure, self._lost)
                self._lost, self._warn_at = 0, now + WARNING_INTERVAL
            time.sleep(PAUSE)

    def rows(self) -> Iterator[Plant]:
        try:
            with self._connect() as connection, connection.transaction():
                # Rather an error than a part, where a policy hides rows from the role.
                connection.execute("SET LOCAL row_security = off")
                table, _ = connection.find_table(self.identity)
                if not table:
                    raise NeedsOperator(NOT_FOUND)
                select = f"SELECT {COLUMNS} FROM {table} ORDER BY id"
                yield from map(Plant._make, connection.cursor().stream(select, size=1000))
        except psycopg.Error as error:
            raise explain(error) from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> Connection:
        try:
            connection = Connection.connect(**self._server, autocommit=True, prepare_threshold=None)
        except UnicodeError:
            raise NeedsOperator("DATABASE_URL: no host can have this name") from None
        connection.add_notice_handler(self._notice)
        return connection

    def _notice(self, notice: psycopg.errors.Diagnostic) -> None:
        """Note that a commit gave up waiting for the standbys: no error, and no code of its own."""
        self._is_not_replicated |= notice.source_function == "SyncRepWaitForLSN"

    def _insert(self, connection: Connection, plants: Sequence[Plant]) -> Inserted:
        """Insert the plants, but for those whose rows other transactions hold."""
        self._is_not_replicated, now = False, time.monotonic()
        # Only trying tells which these are: nobody can see what others have not committed.
        self._locked = {key: at for key, at in self._locked.items() if at > now}
        rest, inserted = [plant for plant in plants if plant.id not in self._locked], Inserted()
        if not (plants and connection.table):
            self._prepare(connection)
        if not plants:
            connection.run(INSERT, rows="[]")
            connection.run(TRY_A_WRITE)
        try:
            if rest:
                wait = SHORT_TIMEOUT if now < self._hurry_until else LOCK_TIMEOUT
                inserted = connection.insert(rest, wait)
        except psycopg.errors.LockNotAvailable as error:
            if not error.diag.context:  # it is not a row's lock
                raise
            if wait == LOCK_TIMEOUT:
                self._hurry_until = now + HURRY_FOR
            if len(rest) > 1 or "\n" in error.diag.context:  # a trigger waited for another row
                raise
            self._locked[rest[0].id] = now + LOCKED_FOR
        if self._is_not_replicated:
            raise psycopg.OperationalError("committed here, but maybe not on the standbys")
        return inserted._replace(locked=self._locked.keys())

    def _prepare(self, connection: Connection) -> None:
        """Check that the table is ours, or create it if there is none."""
        info = connection.info
        if (encoding := info.parameter_status("server_encoding")) != "UTF8":
            raise NeedsOperator(f"PostgreSQL: the database is in {encoding}, not UTF8; use another")
        table, found = connection.find_table(self.identity)
        if not table and not self.identity:
            # Of several processes that create it at once, those that come too late fail.
            with contextlib.suppress(*map(psycopg.errors.lookup, ("23505", "42710", "42P07"))):
                connection.execute(SCHEMA)
            table, found = connection.find_table(None)
        needed = {each for each, is_needed in found.items() if is_needed}
        connection.table = ""  # so that plants are refused, too
        if wrong := ", ".join(sorted({*DEFINITIONS} - found.keys() | needed - {*DEFINITIONS})):
            raise NeedsOperator(
                f"{NOT_FOUND}, or it differs in {wrong}; "
                f"it is made by: {SCHEMA}; a column by: ALTER TABLE plants ADD"
            )
        version = info.parameter_status("server_version")
        self.description = f"PostgreSQL {version}, database {info.dbname} at {info.host}"
        self.identity = connection.table = table


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


def explain(error: psycopg.Error, plants: Sequence[Plant] = ()) -> Exception:
    """Return the error of ours that psycopg's means for `plants`: one line, nothing of them."""
    message = error.diag.message_primary or str(error)
    text = " ".join(f"PostgreSQL: {message}".split())
    # With several hosts, what each of them said comes after the first lines.
    failures = message.partition("All failures were:")[2].split("\n- ")[1:] or [message]
    if error.sqlstate is None and all(map(CONFIG_ERRORS.search, failures)):
        return NeedsOperator(text)
    code = error.sqlstate or ("42" if isinstance(error, psycopg.ProgrammingError) else "08")
    context = error.diag.context  # where it was in a trigger, or waited for a row
    if context:
        if plants:  # of which the message may have parts
            text = f"PostgreSQL: {type(error).__name__} ({code})"
        text += f": {context.splitlines()[-1]}"
    if code.startswith(RECONNECT) and not context:
        return LostConnection(text)
    # Whose fault it is, each plant alone will show.
    is_ones = context and len(plants) > 1
    if code.startswith(NOT_NOW + RECONNECT) and not is_ones:
        return Unavailable(text)
    # What row-level security refuses has the code of a right that is missing.
    is_policy = error.diag.source_function == "ExecWithCheckOptions"
    if plants and (is_ones or is_policy or not code.startswith(NEEDS_OPERATOR)):
        name = error.diag.constraint_name or "no constraint"
        return Rejected(f"PostgreSQL: {type(error).__name__} ({code}, {name})")
    if code == "42501" and not context:
        text += f"; the role needs SELECT, INSERT and UPDATE on plants, or to create it: {SCHEMA}"
    return NeedsOperator(text)
