"""The engine for a PostgreSQL server, a cluster of them, or a pooler."""

import contextlib
import json
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gevent
import psycopg
from psycopg import errors

from engines import gather
from plant import Plant
from storage import (
    PART_LOCK_LIMIT,
    Engine,
    Locked,
    Misconfigured,
    Rejected,
    Unavailable,
)

COLUMNS = ", ".join(Plant._fields)
SCHEMA = "CREATE TABLE plants (id int8 PRIMARY KEY, name text NOT NULL, tag text)"
# ClientCursor puts the values into the text, so this is one message and one transaction, even
# behind a pooler. The settings replace those of the role, of the database, and of other clients of
# the pooler. The isolation level has to be set before the INSERT: at a higher one, transactions
# that insert the same id at once would fail. A row that is there already gets an UPDATE that
# changes nothing: a commit that wrote nothing would not wait for the standbys, which may lack the
# row.
INSERT = f"""
    SET LOCAL transaction_isolation = 'read committed'; SET LOCAL synchronous_commit = on;
    SET LOCAL client_min_messages = warning;
    SET LOCAL statement_timeout = '4s'; SET LOCAL lock_timeout = %s;
    INSERT INTO plants ({COLUMNS})
    SELECT {COLUMNS} FROM json_to_recordset(%s::json) AS plant (id int8, name text, tag text)
    ON CONFLICT (id) DO UPDATE SET name = plants.name RETURNING {COLUMNS}"""
# The INSERT, of no rows, fails if the role may not insert plants. The SELECT reads the end of the
# table, where the next plant goes. pg_logical_emit_message() writes a record into the write-ahead
# log. Nobody reads it and it locks nothing, but its commit waits for the standbys, as a plant's
# does.
TRY_A_WRITE = f"""{INSERT};
    SELECT {COLUMNS} FROM plants ORDER BY id DESC LIMIT 1;
    SELECT pg_logical_emit_message(true, 'plants', '')"""
# Errors for which one plant may be at fault. ProgramLimitExceeded: an index limits a text's length.
PLANT_ERRORS = errors.IntegrityError, errors.DataError, errors.ProgramLimitExceeded
# The server's functions for RAISE and ASSERT, with which a trigger refuses a plant on purpose,
# under any SQLSTATE. Other errors inside a trigger, such as a full disk, are temporary, unless they
# are among PLANT_ERRORS.
RAISES = "exec_stmt_raise", "exec_stmt_assert"

GONE = (
    "is missing: if plants were stored there, read docs/postgresql.md before you restart; "
    "otherwise correct DATABASE_URL, or make the table with start.py"
)


class PostgreSQLEngine(Engine):
    """One connection to a server. psycopg notices gevent, and its waits are cooperative."""

    # A worker creates the table, too: the server may come up after the start. But it does so only
    # until it has seen the table. A table that was there and is gone is a loss.
    creates = True

    def __init__(self, url: str) -> None:
        """Name a database. Raises ValueError, without any part of a password."""
        self._server = parse_url(url)
        self.description = "PostgreSQL"
        self._connection: psycopg.Connection | None = None
        # Seconds that each of the last batches took. Before the first one, assume a slow server.
        self._durations = deque([0.5], maxlen=10)

    def run(self, store: Callable[[], None]) -> None:
        """Call `store`. Under gevent, give up in time: a server may accept us and then hang."""
        gather()
        # Eight seconds, connecting included.
        with gevent.Timeout(8.0, Unavailable("the server hangs, or waits for a standby or a lock")):
            store()

    def insert(self, plants: Sequence[Plant], lock_limit: int) -> Mapping[int, Plant]:
        previous = self._connection
        # Another worker's commit also locks its rows, for about as long as one of ours takes. Add
        # twice our shortest recent commit, since that one hardly waited for a row itself.
        # Parts of a batch do not wait that long: they only find out which plant is at fault. That
        # plant then waits, alone.
        if lock_limit > PART_LOCK_LIMIT or len(plants) == 1:
            lock_limit += int(2 * 1000 * min(self._durations))
        # Without escapes: a database whose encoding is not UTF8 would refuse them.
        rows = json.dumps([plant._asdict() for plant in plants], ensure_ascii=False)
        try:
            connection = previous or self._connect()
            began = time.monotonic()
            cursor = connection.execute(INSERT if plants else TRY_A_WRITE, [lock_limit, rows])
            if plants:  # A health check may take less.
                self._durations.append(time.monotonic() - began)
            if not self._is_replicated:
                raise Unavailable("committed, but maybe not on the standbys")
            found = cursor.set_result(-1).fetchall() if plants else []  # of the last statement
            return {plant.id: plant for plant in map(Plant._make, found)}
        except psycopg.Error as error:
            failure = translate(error)
            if not isinstance(failure, Locked | Rejected):
                was_lost = previous is not None and previous.closed
                self.close()
                if was_lost:
                    # The server may have been restarted. Try once more, on a new connection.
                    return self.insert(plants, lock_limit)
            raise failure from None
        except BaseException:
            # An error of ours or a timeout: nobody knows what the connection is still doing.
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, and cancel what the server may still be waiting for."""
        connection, self._connection = self._connection, None
        if connection:
            with contextlib.closing(connection), contextlib.suppress(psycopg.Error):
                if connection.info.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                    connection.cancel_safe(timeout=1)  # seconds

    def _connect(self) -> psycopg.Connection:
        """Connect. Create the table if there is none, unless this worker has seen one before."""
        connection = self._connection = connect(self._server)
        connection.add_notice_handler(self._note)
        self._is_replicated = True  # False once a commit gave up waiting for the standbys
        try:
            if connection.execute("SELECT to_regclass('plants')").fetchone() == (None,):
                if not self.creates:
                    name = f"the table plants of the database {connection.info.dbname}"
                    raise Misconfigured(f"{name} {GONE}")
                # Several processes may create it at once: all but the first one fail.
                with contextlib.suppress(errors.DuplicateTable, errors.UniqueViolation):
                    connection.execute(SCHEMA)
        except psycopg.Error as error:  # Whatever it is, no plant is at fault.
            raise Unavailable(str(translate(error))) from None
        self.creates = False
        self.description = f"PostgreSQL in {connection.info.dbname} at {connection.info.host}"
        return connection

    def _note(self, notice: errors.Diagnostic) -> None:
        """Notice that a commit gave up waiting for the standbys, which is no error to PostgreSQL.

        The notice has no SQLSTATE of its own, only the name of the server's function.
        """
        if notice.source_function == "SyncRepWaitForLSN":
            self._is_replicated = False


def connect(server: Mapping[str, Any]) -> psycopg.Connection:
    """Connect with libpq's parameters. Raises Misconfigured if libpq never accepts one of them."""
    try:
        return psycopg.connect(**server, autocommit=True, cursor_factory=psycopg.ClientCursor)
    except UnicodeError as error:  # from the codec for host names
        raise Misconfigured(f"DATABASE_URL: the host's name is not valid: {error}") from None
    except psycopg.Error as error:
        # libpq and psycopg check most values only when they connect. Such an error has no SQLSTATE.
        # Nor does the error for a server that is down, so look at the words.
        found = re.search(
            r"((?<!received )invalid |weak |bad value |could not match ).*", str(error)
        )
        if error.sqlstate or not found:
            raise
        # The value may be a part of a password.
        reason = re.sub(r"""(value|number|timeout):? ["'].*?["']""", r"\1", found[0])
        raise Misconfigured(f"DATABASE_URL: {reason}") from None


def translate(error: psycopg.Error) -> Rejected | Unavailable:
    """Return our exception for one of psycopg's: one line, without plants."""
    code = f"{type(error).__name__} ({error.sqlstate}, {error.diag.constraint_name})"
    if error.diag.source_function in RAISES or isinstance(error, PLANT_ERRORS):
        return Rejected(code)
    # `alone` lists errors that one plant may cause, and that a retry may fix. The storage then
    # tries each half of the batch by itself, and the plant gets a 503, not a 400, which would say
    # that a retry will not help. A policy that refuses a plant has the SQLSTATE of a missing GRANT,
    # so both are treated alike.
    alone: tuple[type[psycopg.Error], ...] = (errors.LockNotAvailable, errors.InsufficientPrivilege)
    reason = str(error).partition("\n")[0]
    if error.diag.context:
        # It comes from a function, such as a trigger's, which may fail for one plant only, for
        # example because a table is missing. Any text can be in its message, even a plant.
        alone = (errors.LockNotAvailable, psycopg.ProgrammingError)
        reason = code
    if isinstance(error, alone):
        return Locked(reason)
    return Unavailable(reason)


def parse_url(url: str) -> dict[str, Any]:
    """Return libpq's parameters. Raises ValueError, without any part of a password."""
    wrong = (
        "DATABASE_URL must be like postgresql://user:password@host/database, with the password "
        "percent-encoded: @ is %40, / is %2F, % is %25"
    )
    try:
        given: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(url)
    except (psycopg.ProgrammingError, UnicodeError) as error:
        # An @ behind the ? may be the end of a password.
        if "invalid URI query parameter" in str(error) and "@" not in url.partition("?")[2]:
            wrong = f"DATABASE_URL: {str(error).strip()}; correct or remove it"
        raise ValueError(wrong) from None
    # A password with an unescaped / or @ can end up in the port, the host or the database name. A
    # URL with a line break is a mistake, too. Refuse such a URL without quoting it.
    port = str(given.get("port", 0)).replace(",", "0")
    if not port.isdecimal() or "\n" in url or "@" in f"{given.get('host')}{given.get('dbname')}":
        raise ValueError(wrong)
    hosts = str(given.get("hostaddr") or given.get("host") or "").split(",")
    return {
        "connect_timeout": 2,  # seconds, for each address
        "keepalives_idle": 60,  # seconds; routers forget silent connections
        # Of several servers, find the one that accepts writes. If there is only one, do not ask it:
        # PgBouncer repeats its server's first answer, even after that server became the primary.
        "target_session_attrs": "read-write" if len(hosts) > 1 else "any",
        **given,
        "client_encoding": "utf8",
    }
