"""The engine for a PostgreSQL server, a cluster of them, or a pooler."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import errors

from plant import Plant
from storage import Engine, Locked, Rejected, Unavailable

COLUMNS = ", ".join(Plant._fields)
SCHEMA = "CREATE TABLE plants (id int8 PRIMARY KEY, name text NOT NULL, tag text)"
# One message, as ClientCursor puts the values into its text: so one transaction, behind a pooler
# too. What is there already is updated without a change, as a commit that only reads would not wait
# for the standbys, where that plant may be missing.
INSERT = f"""
    SET LOCAL synchronous_commit = on;
    SET LOCAL client_min_messages = warning;
    SET LOCAL statement_timeout = '4s';
    SET LOCAL lock_timeout = %s;
    INSERT INTO plants ({COLUMNS})
    SELECT {COLUMNS} FROM json_to_recordset(%s::json) AS plant (id int8, name text, tag text)
    ON CONFLICT (id) DO UPDATE SET name = plants.name RETURNING {COLUMNS}"""
# A record that nobody reads, and that locks nothing: its commit waits like that of a plant.
TRY_A_WRITE = f"{INSERT}; SELECT pg_logical_emit_message(true, 'plants', '')"
# What one plant may be at fault for. An index limits the length of a text.
FAULTS = errors.IntegrityError, errors.DataError, errors.RaiseException, errors.ProgramLimitExceeded


class PostgreSQLEngine(Engine):
    """One connection to a server; psycopg's waits are cooperative under gevent."""

    def __init__(self, url: str) -> None:
        """Name a database. Raises ValueError, without a part of a password."""
        self._server, self.description = parse_url(url), "PostgreSQL"
        self._connection: psycopg.Connection | None = None

    def insert(self, plants: Sequence[Plant], lock_limit: int) -> Mapping[int, Plant]:
        previous = self._connection
        rows = json.dumps([plant._asdict() for plant in plants])
        try:
            connection = self._connection or self._connect()
            cursor = connection.execute(INSERT if plants else TRY_A_WRITE, [lock_limit, rows])
            if not self._is_replicated:
                raise Unavailable("committed, but maybe not on the standbys")
            found = cursor.set_result(-1).fetchall() if plants else []  # of the last statement
            return {plant.id: plant for plant in map(Plant._make, found)}
        except FAULTS as error:  # without its message, which may quote the plant
            code = f"{type(error).__name__} ({error.sqlstate}, {error.diag.constraint_name})"
            raise Rejected(code) from None
        except errors.LockNotAvailable as error:
            raise Locked(str(error).partition("\n")[0]) from None
        except (psycopg.Error, UnicodeError) as error:  # a host's name is too long for DNS
            is_lost = previous is not None and previous.closed
            self.close()
            if is_lost:  # as after the server's restart: once more, on another
                return self.insert(plants, lock_limit)
            raise Unavailable(str(error).partition("\n")[0]) from None
        except BaseException:  # ours, or a timeout: nobody knows what the connection still does
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, and cancel what the server may still wait for."""
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
        self._is_replicated = True  # whether its commits have waited for the standbys
        if connection.execute("SELECT to_regclass('plants')").fetchone() == (None,):
            # Of several processes that create it at once, those that come too late fail.
            with contextlib.suppress(errors.DuplicateTable, errors.UniqueViolation):
                connection.execute(SCHEMA)
        self.description = f"PostgreSQL in {connection.info.dbname} at {connection.info.host}"
        return connection

    def _note(self, notice: errors.Diagnostic) -> None:
        """Note that a commit gave up waiting for the standbys: no error, no code of its own."""
        self._is_replicated &= notice.source_function != "SyncRepWaitForLSN"


def parse_url(url: str) -> dict[str, Any]:
    """Return libpq's parameters. Raises ValueError, without a part of a password."""
    wrong = "DATABASE_URL must be like postgresql://user:password@host/database, percent-encoded"
    try:
        given = psycopg.conninfo.conninfo_to_dict(url)
    except (psycopg.ProgrammingError, UnicodeError) as error:
        # An @ behind the ? may be the end of a password.
        if "invalid URI query parameter" in str(error) and "@" not in url.partition("?")[2]:
            wrong = f"DATABASE_URL: {error}".strip()
        raise ValueError(wrong) from None
    port = str(given.get("port", 0)).replace(",", "0")
    if not port.isdecimal() or "@" in f"{given.get('host')}{given.get('dbname')}":  # as may these
        raise ValueError(wrong)
    return {
        "connect_timeout": 2,  # seconds, for each address
        "keepalives_idle": 60,  # seconds; routers forget silent connections
        "target_session_attrs": "read-write",  # of several servers, that for writes
        **given,
        "client_encoding": "utf8",
    }
