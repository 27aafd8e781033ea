"""The wiring: what the environment says, made into a storage and an application. No SQL."""

import logging
import operator
import os
import re
import signal
import sys
from urllib.parse import unquote

import gevent
from gevent import monkey
from gevent.threadpool import ThreadPool

from app import App, create_app
from engines import Engine, NeedsOperator, Unavailable, log
from engines.sqlite import SQLiteEngine
from storage import WAIT_LIMIT, Storage

DEFAULT_URL = "sqlite:///plants.db"
GATHER_LIMIT = 0.001  # seconds that a batch waits for requests, which in a flood never end
START_LIMIT = 3.0  # seconds that the check at the start waits
# A name, if it has one, and a b64token (RFC 6750 section 2.1).
TOKEN = re.compile(r"([A-Za-z0-9_-]{1,32}:)?[A-Za-z0-9._~+/-]{16,}=*")

log.parent = logging.getLogger("gunicorn.error")


def get_app() -> App:
    """Return the application that the environment describes. Raises NeedsOperator."""
    storage = get_storage(os.environ.get("DATABASE_URL", DEFAULT_URL))
    app = create_app(storage, read_tokens())
    storage.open_soon()
    return app


def get_storage(url: str, wait_limit: float = WAIT_LIMIT) -> Storage:
    """Return the storage that `url` names; its first use opens it. Raises NeedsOperator."""
    has_gevent = monkey.is_module_patched("threading")
    call = operator.call
    if url.startswith("sqlite:///") and "?" not in url:
        engine: Engine = SQLiteEngine(unquote(url.removeprefix("sqlite:///")), wait_limit / 2)
        if has_gevent:  # sqlite3 blocks, so it has a real thread, as all others are greenlets
            call = ThreadPool(1).apply
    elif url.startswith(("postgresql://", "postgres://")):
        from engines.postgresql import PostgreSQLEngine  # SQLite does without psycopg

        engine = PostgreSQLEngine(url, wait_limit / 2)
    else:
        raise NeedsOperator(
            "DATABASE_URL must name a file like sqlite:///plants.db (sqlite:////srv/plants.db with "
            "an absolute path) or a server like postgresql://user:password@host/database"
        )
    return Storage(engine, wait_limit, call, gather if has_gevent else lambda: None)


def gather() -> None:
    """Let all requests that have arrived go on first, so that they share a batch."""
    with gevent.Timeout(GATHER_LIMIT, False):
        gevent.idle()


def read_tokens() -> list[str]:
    """Return the tokens of PLANTS_TOKENS. Raises NeedsOperator for a bad one, or none."""
    tokens = re.findall(r"[^,\s]+", os.environ.get("PLANTS_TOKENS", ""))
    if not tokens or not all(map(TOKEN.fullmatch, tokens)):
        raise NeedsOperator(
            "PLANTS_TOKENS must be tokens of at least 16 letters, digits or -._~+/, separated by "
            "commas, each with or without a name before it, as in web:TOKEN; to make one: "
            "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return tokens


def main() -> None:
    """Print what the database is, made if there is none; exit with 1 if an operator has to act."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl+C ends it without a traceback
    try:
        storage = get_app().config["storage"]
        try:
            storage.check(START_LIMIT)
            storage.close()
        finally:
            print(storage.engine.description)
    except NeedsOperator as error:
        sys.exit(str(error))
    except Unavailable as error:
        print(f"the database is not available now: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
