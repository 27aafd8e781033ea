"""The engine for a PostgreSQL server, a cluster of them, or a pooler."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gevent
import psycopg
from psycopg import errors

from engines import gather
from plant import Plant
from storage import Engine, Locked, Rejected, Unavailable

BATCH_TIMEOUT = 8.0  # seconds, connecting included
COLUMNS = ", ".join(Plant._fields)
SCHEMA = "CREATE TABLE plants (id int8 PRIMARY KEY, name text NOT NULL, tag text)"
# A role, a database or a neighbour behind the same pooler may have other settings. Rivals for one
# id would fail at any isolation level above this one, which has to be set before anything is read.
SETTINGS = """
    SET LOCAL transaction_isolation = 'read committed';
    SET LOCAL synchronous_commit = on;
    SET LOCAL client_min_messages = warning;
    SET LOCAL statement_timeout = '4s';
    SET LOCAL lock_timeout = %s;"""
# ClientCursor puts the values into the text, so settings and statement are one message and one
# transaction, even behind a pooler. A row that is there gets an UPDATE that changes nothing: a
# commit that wrote nothing would not wait for the standbys, which may lack the row.
INSERT = f"""{SETTINGS}
    INSERT INTO plants ({COLUMNS})
    SELECT {COLUMNS} FROM json_to_recordset(%s::json) AS plant (id int8, name text, tag text)
    ON CONFLICT (id) DO UPDATE SET name = plants.name RETURNING {COLUMNS}"""
# An INSERT of no row needs the same rights. The message is a record that nobody reads and that
# locks nothing, but whose commit waits as that of a plant does.
TRY_A_WRITE = f"""{INSERT};
    SELECT {COLUMNS} FROM plants ORDER BY id DESC LIMIT 1;
    SELECT pg_logical_emit_message(true, 'plants', '')"""
# The classes of errors for which one plant may be at fault. ProgramLimitExceeded: an index limits
# the length of a text.
PLANT_ERRORS = errors.IntegrityError, errors.DataError, errors.ProgramLimitExceeded
# The functions of the server that raise what a trigger raises on purpose, whatever its SQLSTATE.
RAISES = "exec_stmt_raise", "exec_stmt_assert"


class PostgreSQLEngine(Engine):
    """One connection to a server. psycopg notices gevent, and its waits are cooperative."""

    def __init__(self, url: str) -> None:
        """Name a database. Raises ValueError, without any part of a password."""
        self._server, self.description = parse_url(url), "PostgreSQL"
        self._connection: psycopg.Connection | None = None

    def run(self, store: Callable[[], None]) -> None:
        """Call `store`, for a limited time under gevent: a server may accept us and then hang."""
        gather()
        reason = "the server hangs, or waits for a standby or a lock of the table"
        with gevent.Timeout(BATCH_TIMEOUT, Unavailable(reason)):
            store()

    def insert(self, plants: Sequence[Plant], lock_limit: int) -> Mapping[int, Plant]:
        previous = self._connection
        # Without escapes: a database whose encoding is not UTF8 would refuse them.
        rows = json.dumps([plant._asdict() for plant in plants], ensure_ascii=False)
        try:
            connection = previous or self._connect()
            cursor = connection.execute(INSERT if plants else TRY_A_WRITE, [lock_limit, rows])
            if not self._is_replicated:
                raise Unavailable("committed, but maybe not on the standbys")
            found = cursor.set_result(-1).fetchall() if plants else []  # of the last statement
            return {plant.id: plant for plant in map(Plant._make, found)}
        except psycopg.Error as error:
            if is_plants_fault(error):
                raise Rejected(describe(error)) from None
            # A policy that refuses a plant, and a missing GRANT, which concerns all plants, have
            # the same SQLSTATE. So a plant that is refused alone may still be accepted later.
            if isinstance(error, errors.LockNotAvailable | errors.InsufficientPrivilege):
                raise Locked(describe(error)) from None
            was_lost = previous is not None and previous.closed
            self.close()
            if was_lost:  # The server may have been restarted: try once more on a new connection.
                return self.insert(plants, lock_limit)
            raise Unavailable(describe(error)) from None
        except BaseException as error:
            # An error of ours or a timeout: nobody knows what the connection is still doing.
            self.close()
            if isinstance(error, UnicodeError):  # The name of a host is too long for DNS.
                raise Unavailable(str(error)) from None
            raise

    def close(self) -> None:
        """Close the connection, and cancel what the server may still be waiting for."""
        connection, self._connection = self._connection, None
        if connection:
            with contextlib.closing(connection), contextlib.suppress(psycopg.Error):
                if connection.info.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                    connection.cancel_safe(timeout=1)  # seconds

    def _connect(self) -> psycopg.Connection:
        """Connect, and create the table if there is none."""
        connection = self._connection = psycopg.connect(
            **self._server, autocommit=True, cursor_factory=psycopg.ClientCursor
        )
        connection.add_notice_handler(self._note)
        self._is_replicated = True  # until a commit has not waited for the standbys
        try:
            if connection.execute("SELECT to_regclass('plants')").fetchone() == (None,):
                # Several processes may create it at once: all but the first one fail.
                with contextlib.suppress(errors.DuplicateTable, errors.UniqueViolation):
                    connection.execute(SCHEMA)
        except psycopg.Error as error:  # No plant is at fault, whatever it is.
            raise Unavailable(describe(error)) from None
        self.description = f"PostgreSQL in {connection.info.dbname} at {connection.info.host}"
        return connection

    def _note(self, notice: errors.Diagnostic) -> None:
        """Notice that a commit gave up waiting for the standbys, which is no error to PostgreSQL.

        The notice has no SQLSTATE of its own, only the name of the server's function.
        """
        self._is_replicated &= notice.source_function != "SyncRepWaitForLSN"


def is_plants_fault(error: psycopg.Error) -> bool:
    """Tell whether the database may refuse one plant for good, rather than fail for a while."""
    return error.diag.source_function in RAISES or isinstance(error, PLANT_ERRORS)


def describe(error: psycopg.Error) -> str:
    """Return one line for the log, in which no plant is quoted."""
    # A context tells of a function, as of a trigger, which can put a plant into any message.
    if is_plants_fault(error) or error.diag.context:
        return f"{type(error).__name__} ({error.sqlstate}, {error.diag.constraint_name})"
    return str(error).partition("\n")[0]


def parse_url(url: str) -> dict[str, Any]:
    """Return libpq's parameters. Raises ValueError, without any part of a password."""
    wrong = "DATABASE_URL must be like postgresql://user:password@host/database, percent-encoded"
    try:
        given = psycopg.conninfo.conninfo_to_dict(url)
    except (psycopg.ProgrammingError, UnicodeError) as error:
        # An @ behind the ? may be the end of a password.
        if "invalid URI query parameter" in str(error) and "@" not in url.partition("?")[2]:
            wrong = f"DATABASE_URL: {str(error).strip()}; remove it"
        raise ValueError(wrong) from None
    # A password with an unescaped / or @ can end up in the port, the host or the database name, so
    # refuse those without quoting them.
    port = str(given.get("port", 0)).replace(",", "0")
    if not port.isdecimal() or "@" in f"{given.get('host')}{given.get('dbname')}":
        raise ValueError(wrong)
    require_possible_values(given)
    hosts = given.get("hostaddr") or given.get("host") or ""
    # Of several servers, find the one that accepts writes. Do not ask a single one: PgBouncer
    # repeats what its first server said, even after that has become a primary.
    several = {"target_session_attrs": "read-write"} if "," in str(hosts) else {}
    return {
        "connect_timeout": 2,  # seconds, for each address
        "keepalives_idle": 60,  # seconds; routers forget silent connections
        **several,
        **given,
        "client_encoding": "utf8",
    }


def require_possible_values(given: Mapping[str, Any]) -> None:
    """Raise ValueError if libpq or psycopg can never accept a value. Sends nothing."""
    # They check most values only when they connect. So connect to a multicast address, which the
    # system refuses to TCP at once. A service needs a file, which may appear later.
    hosts = str(given.get("hostaddr") or given.get("host") or "").split(",")
    trial = {name: value for name, value in given.items() if name != "service"}
    trial |= {"host": ",".join(hosts), "hostaddr": ",".join(["224.0.0.1"] * len(hosts))}
    try:
        psycopg.connect(**trial).close()
    except (psycopg.Error, UnicodeError) as error:
        if found := re.search(r"(invalid|bad value|could not match) .*", str(error)):
            # The value may be a part of a password.
            reason = re.sub(r"""(value|number|timeout):? ["'].*?["']""", r"\1", found[0])
            raise ValueError(f"DATABASE_URL: {reason}") from None
