"""The storage's engine for a table on a PostgreSQL server, or on a cluster of them.

Imported only where DATABASE_URL names such a server: SQLite does without psycopg.
"""

import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from schemas import Plant
from storage import ALL_PLANTS, Engine, Inserted, RowLocked, StartRefused, Unavailable, insert_new

CANCEL_LIMIT = 1.0  # seconds for a request to cancel a statement
PAUSE = 0.2  # seconds between two attempts
SCHEMA = "CREATE TABLE plants (id bigint PRIMARY KEY, name text NOT NULL, tag text)"
COLUMNS = [("id", "bigint", True), ("name", "text", True), ("tag", "text", False)]
# An unlogged table would be empty after a crash.
FIND_COLUMNS = """
    SELECT attname, format_type(atttypid, atttypmod), attnotnull
    FROM pg_attribute JOIN pg_class ON attrelid = pg_class.oid
    WHERE attrelid = to_regclass('plants') AND attnum > 0 AND NOT attisdropped
        AND relpersistence = 'p'
    ORDER BY attnum"""
# Locks a row that nobody else has locked, and changes nothing.
TRY_A_WRITE = """
    WITH one AS (SELECT id, name, tag FROM plants LIMIT 1 FOR UPDATE SKIP LOCKED)
    INSERT INTO plants SELECT * FROM one ON CONFLICT (id) DO NOTHING"""
# A batch with a locked row is tried again one by one, so the limit is short.
SESSION = """
    SET client_min_messages = warning; SET lock_timeout = '300ms';
    SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')"""
# Connection, changed table, read-only standby, lost statement, deadlock, shutdown.
RECONNECT = ("08", "0A", "25006", "26", "40", "57P")
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
        return super().wait(gen, interval, max(self.deadline - time.monotonic(), 0))

    def close(self) -> None:
        """Close the connection, and tell the server if it may still be waiting for something."""
        if self.info.transaction_status == TransactionStatus.ACTIVE:
            with contextlib.suppress(psycopg.Error):
                self.cancel_safe(timeout=CANCEL_LIMIT)
        super().close()


class PostgreSQLEngine(Engine):
    """One connection to a server, cooperative under gevent; a thread reconnects."""

    def __init__(self, url: str, identity: str, write_limit: float) -> None:
        """Limit the seconds for a batch; create no table if there was one, of this `identity`."""
        self._parameters = parse_url(url)
        self._write_limit = write_limit - CANCEL_LIMIT
        self._connection: Connection | None = None
        self._reconnecting: threading.Thread | None = None
        self._failure: Exception = Unavailable("PostgreSQL: connecting")
        self._fails_fast = False  # whether a batch has waited for a connection in vain
        self._is_not_replicated = False  # whether a commit did not wait for the standbys
        self.description, self.identity = "PostgreSQL, not reached yet", identity

    def insert(self, plants: Sequence[Plant]) -> Inserted:
        deadline = time.monotonic() + self._write_limit
        while True:
            connection = self._wait_for_connection(deadline)
            try:
                connection.deadline = deadline
                return self._insert(connection, plants)
            except psycopg.Error as error:
                self._failure = explain(error)
                if not isinstance(self._failure, LostConnection):
                    raise self._failure from None
            log.warning("%s; connecting again", self._failure)
            connection.close()
            self._connection = None
            time.sleep(PAUSE)

    def rows(self) -> Iterator[Plant]:
        try:
            with self._connect() as connection:
                yield from map(Plant._make, connection.cursor().stream(ALL_PLANTS, size=1000))
        except psycopg.Error as error:
            raise explain(error) from None

    def close(self) -> None:
        self._reconnecting = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _wait_for_connection(self, deadline: float) -> Connection:
        """Return the connection by the `deadline`, or raise what keeps it from being there."""
        if self._connection is None and self._reconnecting is None:
            self._reconnecting = threading.Thread(target=self._reconnect, daemon=True)
            self._reconnecting.start()
        if (connecting := self._reconnecting) is not None and not self._fails_fast:
            connecting.join(max(deadline - time.monotonic(), 0))
        # What begins after the deadline would be cut off at once.
        if self._connection is None or time.monotonic() > deadline:
            self._fails_fast = self._reconnecting is not None
            raise self._failure
        return self._connection

    def _reconnect(self) -> None:
        """Try to connect until that succeeds, an operator has to act, or the engine is closed."""
        while self._reconnecting is threading.current_thread():
            try:
                with contextlib.ExitStack() as stack:
                    connection = stack.enter_context(contextlib.closing(self._connect()))
                    connection.deadline = time.monotonic() + self._write_limit
                    self._prepare(connection)
                    if self._reconnecting is threading.current_thread():
                        stack.pop_all()  # it stays open
                        self._connection = connection
            except Exception as error:
                self._failure = explain(error) if isinstance(error, psycopg.Error) else error
            is_over = self._connection or isinstance(self._failure, StartRefused)
            if is_over and self._reconnecting is threading.current_thread():
                self._reconnecting, self._fails_fast = None, False
            else:
                time.sleep(PAUSE)

    def _connect(self) -> Connection:
        try:
            connection = Connection.connect(**self._parameters, autocommit=True)
        except UnicodeError:
            raise StartRefused("DATABASE_URL: no host can have this name") from None
        connection.add_notice_handler(self._notice)
        return connection

    def _notice(self, notice: psycopg.errors.Diagnostic) -> None:
        """Note that a commit gave up waiting for the standbys, which is no error to libpq."""
        self._is_not_replicated |= notice.source_function == "SyncRepWaitForLSN"

    def _insert(self, connection: Connection, plants: Sequence[Plant]) -> Inserted:
        self._is_not_replicated = False
        result: Inserted = 0, {}
        if plants:
            # FOR UPDATE makes the SELECT wait for the standbys too: it could confirm a row that
            # a fail-over loses.
            result = insert_new(connection.execute, plants, "%s", " ORDER BY id FOR UPDATE")
        else:
            connection.execute(TRY_A_WRITE)
        if self._is_not_replicated:
            raise psycopg.OperationalError("committed here, but maybe not on the standbys")
        return result

    def _prepare(self, connection: Connection) -> None:
        """Set the session up; check that the table is ours, or create it if there is none."""
        connection.execute(SESSION)
        info = connection.info
        if (encoding := info.parameter_status("server_encoding")) != "UTF8":
            raise StartRefused(
                f"PostgreSQL: the database is in {encoding}, not UTF8; name another in DATABASE_URL"
            )
        found = connection.execute(FIND_COLUMNS).fetchall()
        if not found and not self.identity:
            # Of several processes that create it at once, those that come too late fail.
            with contextlib.suppress(*map(psycopg.errors.lookup, ("23505", "42710", "42P07"))):
                connection.execute(SCHEMA)
            found = connection.execute(FIND_COLUMNS).fetchall()
        if found != COLUMNS:
            raise StartRefused(
                "PostgreSQL: there is no table plants, or one of another shape; the right one is "
                f"made by: {SCHEMA}"
            )
        version = info.parameter_status("server_version")
        self.description = f"PostgreSQL {version}, database {info.dbname} at {info.host}"
        self.identity = "seen"


def parse_url(url: str) -> dict[str, Any]:
    """Return libpq's parameters. Raises StartRefused, without repeating a part of `url`."""
    try:
        given: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        given = {"host": "@"}
    if any("@" in str(given.get(name)) for name in ("host", "dbname")):
        raise StartRefused(
            "DATABASE_URL must be like postgresql://user:password@host/database, with special "
            "characters percent-encoded"
        )
    return {
        "connect_timeout": 2,  # seconds, for each address
        "fallback_application_name": "plants",
        "keepalives_idle": 60,  # seconds; routers forget connections that are long silent
        "target_session_attrs": "read-write",  # of several servers, the one that takes writes
        **given,
        "client_encoding": "utf8",
    }


def explain(error: psycopg.Error) -> Exception:
    """Return the error of ours that psycopg's means: one line, nothing of the plant."""
    message = error.diag.message_primary or str(error)
    text = " ".join(f"PostgreSQL: {message}".split())
    # With several hosts, what each of them said comes after the first lines.
    failures = message.partition("All failures were:")[2].split("\n- ")[1:] or [message]
    if error.sqlstate is None and all(map(CONFIG_ERRORS.search, failures)):
        return StartRefused(text)
    unknown = "" if isinstance(error, psycopg.ProgrammingError) else "08"
    if (error.sqlstate or unknown).startswith(RECONNECT):
        return LostConnection(text)
    if isinstance(error, psycopg.DataError | psycopg.IntegrityError):
        return ValueError(text)
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return RowLocked(text)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        text += "; the role needs SELECT, INSERT and UPDATE on plants, or to create it"
    if isinstance(error, psycopg.ProgrammingError):
        return StartRefused(text)
    return Unavailable(text)
