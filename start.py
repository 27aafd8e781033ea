"""The wiring: what the environment says, made into a storage and an application."""

import os
import re
import sys
from urllib.parse import unquote

import gevent
from gevent.util import wrap_errors

from app import App, create_app
from engines.sqlite import SQLiteEngine
from storage import Function, Rejected, Storage, Unavailable

GATHER_LIMIT = 0.001  # seconds that a batch waits for requests, which in a flood never end
CALL_LIMIT = 8.0  # seconds for a batch on a server, connecting included
START_LIMIT = 3.0  # seconds that the check at the start waits
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,}=*")  # a b64token (RFC 6750 section 2.1)


def get_app() -> App:
    """Return the application that the environment describes. Raises ValueError."""
    if "PORT" in os.environ and "DATABASE_URL" not in os.environ:
        raise ValueError(
            "DATABASE_URL must be set where PORT is: to a PostgreSQL server, a file that lasts, "
            "like sqlite:////data/plants.db, or, where it need not last, sqlite:///plants.db"
        )
    tokens = read_tokens()
    return create_app(get_storage(os.environ.get("DATABASE_URL", "sqlite:///plants.db")), tokens)


def get_storage(url: str) -> Storage:
    """Return the storage that `url` names; its writer opens it. Raises ValueError."""
    if url.startswith("sqlite:///") and "?" not in url:
        return Storage(SQLiteEngine(unquote(url.removeprefix("sqlite:///"))), call_in_thread)
    if url.startswith(("postgresql://", "postgres://")):
        from engines.postgresql import PostgreSQLEngine  # SQLite does without psycopg

        return Storage(PostgreSQLEngine(url), call_with_limit)
    raise ValueError(
        "DATABASE_URL must name a file like sqlite:///plants.db (sqlite:////srv/plants.db with "
        "an absolute path) or a server like postgresql://user:password@host/database"
    )


def call_in_thread(function: Function) -> None:
    """Call what blocks in a real thread, as under gevent all others are greenlets."""
    gather()
    # The pool would print what is raised in it, with plants; so it is returned.
    if error := gevent.get_hub().threadpool.apply(wrap_errors(Exception, function)):
        raise error


def call_with_limit(function: Function) -> None:
    """Call what waits cooperatively, under gevent for no longer than a batch may take."""
    gather()
    reason = "the server hangs, or waits for a standby or a lock of the table"
    with gevent.Timeout(CALL_LIMIT, Unavailable(reason)):
        function()


def gather() -> None:
    """Let all requests that have arrived go on first, to share a batch."""
    with gevent.Timeout(GATHER_LIMIT, False):
        gevent.idle()


def read_tokens() -> list[str]:
    """Return the tokens of PLANTS_TOKENS. Raises ValueError for a bad one, or none."""
    tokens = re.findall(r"[^,\s]+", os.environ.get("PLANTS_TOKENS", ""))
    if not tokens or not all(map(TOKEN.fullmatch, tokens)):
        raise ValueError(
            "PLANTS_TOKENS must be tokens of at least 16 letters, digits or -._~+/, separated by "
            "commas; to make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return tokens


def main() -> None:
    """Open or make the database, and say where it is; exit with 1 if that can't succeed."""
    try:
        storage = get_app().config["storage"]
    except ValueError as error:
        sys.exit(str(error))
    try:
        storage.check(START_LIMIT)
        storage.close()
        report = f"plants are stored in {storage.engine.description}"
    except (Rejected, Unavailable) as error:
        report = f"plants can't be stored in {storage.engine.description}: {error}"
        if isinstance(storage.engine, SQLiteEngine):  # only a server is waited for
            sys.exit(report)
    print(report, file=sys.stderr)


if __name__ == "__main__":
    main()
