"""The engine for a table on a PostgreSQL server, on a cluster of them, or behind a pooler."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from engines import Blocked, Engine, NeedsOperator, Rejected, Unavailable, log
from plant import Plant

CANCEL_LIMIT = 1.0  # seconds for a request to cancel a statement
PAUSE = 0.2  # seconds before a second try
LOCK_TIMEOUT, PART_TIMEOUT = "100ms", "1ms"  # for which a batch, or a part, waits for a locked row
COLUMNS = ", ".join(Plant._fields)
# Each name has its schema: who may create functions could put others in its place (CVE-2018-1058).
TYPES = "id pg_catalog.int8, name pg_catalog.text, tag pg_catalog.text"
SCHEMA = (
    "CREATE TABLE plants (id pg_catalog.int8 PRIMARY KEY, "
    "name pg_catalog.text NOT NULL, tag pg_catalog.text)"
)
# A crash empties an unlogged table, and a view may stand before one.
FIND_TABLE = """
    SELECT pg_catalog.concat(relnamespace::pg_catalog.regnamespace, '.plants'),
        relkind OPERATOR(pg_catalog.=) ANY('{r,p}') AND relpersistence OPERATOR(pg_catalog.=) 'p'
    FROM pg_catalog.pg_class WHERE oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass('plants')"""
# In each transaction, as a pooler gives each another session. A commit has to wait for the disk,
# and to tell if it does not wait for the standbys.
SETTINGS = """WITH settings AS MATERIALIZED (
        SELECT pg_catalog.set_config('lock_timeout', %(wait)s::pg_catalog.text, true),
            pg_catalog.set_config('client_min_messages', 'warning', true),
            pg_catalog.set_config('synchronous_commit', CASE
                WHEN pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=)
                    'remote_apply' THEN 'remote_apply' ELSE 'on' END, true))"""
# From JSON: psycopg takes longer for arrays, and PostgreSQL for a statement that is long. The
# update changes nothing, but its commit waits for the standbys, where a plant may be missing. It
# is not of the key, as that would wait for transactions whose foreign keys point to the plant.
INSERT = f"""{SETTINGS}
    INSERT INTO {{table}} AS plants ({COLUMNS}) SELECT {COLUMNS}
    FROM settings, pg_catalog.json_to_recordset(%(rows)s::pg_catalog.json) AS plant({TYPES})
    ON CONFLICT (id) DO UPDATE SET name = plants.name
    RETURNING {COLUMNS}"""
# A record that nobody reads, and that locks nothing: its commit waits like that of a plant.
TRY_A_WRITE = f"""{SETTINGS}
    SELECT pg_catalog.pg_logical_emit_message(true, 'plants', ''::pg_catalog.text) FROM settings"""
# What is not one plant's fault, by the first characters of its code (SQLSTATE).
RECONNECT = ("08", "25", "26", "40", "57P")  # connection, read-only standby, deadlock, shutdown
NOT_NOW = ("53", "55", "57", "58", "72", "F0", "HV", "XX")  # resources, locks and timeouts, disk


class LostConnection(Unavailable):
    """What was under way may have been done or not; it can be done again on another connection."""


class Connection(psycopg.Connection):
    """A connection whose statements have a deadline, as a hung server keeps no timeout itself."""

    deadline = float("inf")  # of time.monotonic()
    table = ""  # with its schema
    is_replicated = True  # whether all commits have waited for the standbys

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for the server until the deadline, not `timeout`. Raises OperationalError."""
        try:
            return super().wait(gen, interval, max(self.deadline - time.monotonic(), 0))
        except psycopg.OperationalError as error:
            if time.monotonic() < self.deadline:
                raise
            reason = "the server hangs, or waits for a standby, a trigger or a lock of the table"
            raise psycopg.OperationalError(reason) from error

    def prepare(self, may_create: bool) -> None:
        """Find the table, or create it. Raises NeedsOperator if it can't be used."""
        if (encoding := self.info.parameter_status("server_encoding")) != "UTF8":
            raise NeedsOperator(f"PostgreSQL: the database is in {encoding}, not UTF8; use another")
        if not (found := self.execute(FIND_TABLE).fetchone()) and may_create:
            # Of several processes that create it at once, those that come too late fail.
            with contextlib.suppress(*map(psycopg.errors.lookup, ("23505", "42710", "42P07"))):
                self.execute(SCHEMA)
            found = self.execute(FIND_TABLE).fetchone()
        if not found or not found[1]:
            raise NeedsOperator(f"PostgreSQL: plants must be a table made by: {SCHEMA}")
        self.table = found[0]
        self.add_notice_handler(self.note)

    def note(self, notice: psycopg.errors.Diagnostic) -> None:
        """Note that a commit gave up waiting for the standbys: no error, and no code of its own."""
        self.is_replicated &= notice.source_function != "SyncRepWaitForLSN"

    def close(self) -> None:
        """Close the connection, and tell the server if it may still be waiting for something."""
        if self.info.transaction_status == TransactionStatus.ACTIVE:
            with contextlib.suppress(psycopg.Error):
                self.cancel_safe(timeout=CANCEL_LIMIT)
        super().close()


class PostgreSQLEngine(Engine):
    """One connection to a server; psycopg's waits are cooperative under gevent."""

    max_batch = 1000  # plants

    def __init__(self, url: str, batch_limit: float) -> None:
        """Limit the seconds for a batch. Raises NeedsOperator, without a part of a password."""
        self._server, self._batch_limit = parse_url(url), batch_limit - CANCEL_LIMIT
        self._connection: Connection | None = None
        self._failure: Exception | None = None  # while the server is known to be away
        self._retry_at = 0.0  # when to try again
        self.description = "PostgreSQL, not reached yet"

    def check(self) -> None:
        self.insert([], is_part=False)

    def insert(self, plants: Sequence[Plant], is_part: bool) -> Mapping[int, Plant]:
        """Insert plants; do what was lost with its connection once more, on another."""
        if self._failure and time.monotonic() < self._retry_at:
            raise self._failure
        deadline, was_connected = time.monotonic() + self._batch_limit, self._connection is not None
        wait = PART_TIMEOUT if is_part else LOCK_TIMEOUT
        try:
            return self._insert(plants, wait, deadline)
        except LostConnection as failure:
            if not was_connected or time.monotonic() > deadline:
                raise
            log.warning("%s; connecting again", failure)
        time.sleep(PAUSE)
        return self._insert(plants, wait, deadline)

    def rows(self) -> Iterator[Plant]:
        try:
            connect = self._connect(float("inf"), may_create=False)
            with connect as connection, connection.transaction():
                # Rather an error than a part, where a policy hides rows from the role.
                connection.execute("SET LOCAL row_security = off")
                select = f"SELECT {COLUMNS} FROM {connection.table} ORDER BY id"
                yield from map(Plant._make, connection.cursor().stream(select, size=1000))
        except psycopg.Error as error:
            raise NeedsOperator(str(explain(error, []))) from None

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def _insert(self, plants: Sequence[Plant], wait: str, deadline: float) -> Mapping[int, Plant]:
        """Insert plants; without any, write what proves that this is possible."""
        start, rows = time.monotonic(), json.dumps([plant._asdict() for plant in plants])
        values = {"wait": wait, "rows": rows}
        try:
            connection = self._connection = self._connection or self._connect(self._batch_limit)
            self._failure, connection.deadline = None, max(deadline, connection.deadline)
            insert = INSERT.format(table=connection.table.replace("%", "%%"))
            found = map(Plant._make, connection.execute(insert, values))
            if not plants:
                connection.execute(TRY_A_WRITE, values)
            if not connection.is_replicated:
                raise psycopg.OperationalError("committed here, but maybe not on the standbys")
            return {plant.id: plant for plant in found}
        except psycopg.Error as error:
            # Its traceback is in a cycle, and would keep a connection that timed out open.
            failure = explain(error.with_traceback(None), plants)
        if self._connection and self._connection.closed:  # a pooler has codes of its own
            failure = LostConnection(str(failure))
        if isinstance(failure, LostConnection):
            if not self._connection:  # fail at once for as long as this try took
                self._failure, self._retry_at = failure, 2 * time.monotonic() - start
            self.close()
        raise failure

    def _connect(self, limit: float, may_create: bool = True) -> Connection:
        try:
            connection = Connection.connect(**self._server, autocommit=True, prepare_threshold=None)
        except UnicodeError:
            raise NeedsOperator("DATABASE_URL: no host can have this name") from None
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            connection.deadline = time.monotonic() + limit  # of its first batch, too
            connection.prepare(may_create)
            stack.pop_all()
        place = f"{connection.table} in {connection.info.dbname} at {connection.info.host}"
        self.description = f"PostgreSQL, {place}"
        return connection


def parse_url(url: str) -> dict[str, Any]:
    """Return libpq's parameters. Raises NeedsOperator, without a part of a password."""
    wrong = "DATABASE_URL must be like postgresql://user:pass@host/db, percent-encoded"
    try:
        given = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        # An @ behind the ? may be the end of a password.
        if "URI query parameter" in str(error) and "@" not in url.partition("?")[2]:
            wrong = f"DATABASE_URL: {error}".strip()
        raise NeedsOperator(wrong) from None
    if any("@" in str(given.get(name)) for name in ("host", "port", "dbname")):  # as may this one
        raise NeedsOperator(wrong)
    return {
        "connect_timeout": 2,  # seconds, for each address
        "fallback_application_name": "plants",
        "keepalives_idle": 60,  # seconds; routers forget connections that are long silent
        "target_session_attrs": "read-write",  # of several servers, that for writes
        **given,
        "client_encoding": "utf8",
    }


def explain(error: psycopg.Error, plants: Sequence[Plant]) -> Exception:
    """Return the error of ours that psycopg's means for `plants`: one line, nothing of them."""
    code, diag = error.sqlstate or "08", error.diag
    first_line = str(error).partition("\n")[0]  # what follows says the same of other addresses
    text = f"PostgreSQL: {diag.message_primary or first_line}"
    if diag.context:  # where it was in a trigger, or waited for a row
        if plants:  # of which the message may have parts
            text = f"PostgreSQL: {type(error).__name__} ({code})"
        text += f": {diag.context.splitlines()[-1]}"
    if code == "55P03" or (code.startswith((*RECONNECT, *NOT_NOW, "42")) and diag.context):
        return Blocked(text)
    if code.startswith(RECONNECT):
        return LostConnection(text)
    if code.startswith(NOT_NOW):
        return Unavailable(text)
    if code == "42501":
        text += f"; the role needs SELECT, INSERT and UPDATE on plants, or to create it: {SCHEMA}"
    is_operators = diag.table_name == "plants" and diag.column_name not in (None, *Plant._fields)
    if code == "23502" and is_operators:  # a column that is not ours, and has no default
        return NeedsOperator(text)
    if plants:
        text = f"PostgreSQL: {type(error).__name__} ({code}, {diag.constraint_name})"
    return Rejected(text)
