"""The wiring: what the environment says, made into a storage and an application.

Contains no SQL and no HTTP. gunicorn.conf.py runs all of it, transfer.py get_storage() alone.
"""

import atexit
import contextlib
import logging
import operator
import os
import re
import threading
from urllib.parse import unquote

import gevent
from gevent import monkey
from gevent.threadpool import ThreadPool

from app import WSGIApp, create_app
from engine import Engine, NeedsOperator, Unavailable, log
from sqlite import SQLiteEngine
from storage import WAIT_LIMIT, Storage

DEFAULT_URL = "sqlite:///plants.db"
GATHER_LIMIT = 0.001  # seconds that a batch waits for requests, which in a flood never end
# A name, if it has one, and a b64token (RFC 6750 section 2.1).
TOKEN = re.compile(r"([A-Za-z0-9_-]{1,32}:)?[A-Za-z0-9._~+/-]{16,}=*")
ORIGIN = re.compile(  # serialized: in lower case, without the default port
    r"\*|(http(?!.*:80$)|https(?!.*:443$))://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?"
)
EXPECTED = {
    "PLANTS_TOKENS": "tokens of at least 16 letters, digits or -._~+/, separated by commas, each "
    "with or without a name before it, as in web:TOKEN; to make one: "
    "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'",
    "PLANTS_CORS_ORIGINS": "* or origins like https://example.org, separated by commas",
}

log.parent = logging.getLogger("gunicorn.error")


def get_app(wait_limit: float = WAIT_LIMIT) -> WSGIApp:
    """Return the application that the environment describes; `wait_limit` is in seconds.

    Creates the database, unless gunicorn.conf.py has tried and has set PLANTS_STORAGE: workers use
    the database that was seen then and no other, if one was. Raises NeedsOperator.
    """
    is_worker = "PLANTS_STORAGE" in os.environ
    identity = os.environ["PLANTS_STORAGE"] if is_worker else create_database(wait_limit)[0]
    storage, app = read_environment(wait_limit, identity)
    if is_worker:  # others may fork after this
        threading.Thread(target=open_early, args=[storage], daemon=True).start()
    atexit.register(storage.close)
    return app


def create_database(wait_limit: float = WAIT_LIMIT) -> tuple[str, str]:
    """Create the database if there is none; return its identity and description.

    The identity is "" if the database is not available now. Raises NeedsOperator if anything in
    the environment is wrong.
    """
    # With a storage of its own, as no connection may cross a fork.
    with contextlib.closing(read_environment(wait_limit)[0]) as storage:
        try:
            storage.open_or_create()
        except NeedsOperator:
            raise
        except Unavailable as error:
            log.warning("the database is not available at the start: %s", error)
        return storage.engine.identity or "", storage.engine.description


def open_early(storage: Storage) -> None:
    """Open the database, so that the first request is not the one that finds out that it can't."""
    try:
        storage.open_or_create()
    except Unavailable as error:
        log.warning("the database is not available: %s", error)


def read_environment(wait_limit: float = WAIT_LIMIT, identity: str = "") -> tuple[Storage, WSGIApp]:
    """Return the storage of DATABASE_URL, if it is that of `identity`, and the application.

    Raises NeedsOperator.
    """
    storage = get_storage(os.environ.get("DATABASE_URL", DEFAULT_URL), identity, wait_limit)
    tokens = read_list("PLANTS_TOKENS", TOKEN)
    has_origins = "PLANTS_CORS_ORIGINS" in os.environ
    origins = read_list("PLANTS_CORS_ORIGINS", ORIGIN) if has_origins else []
    return storage, create_app(storage, tokens, origins)


def get_storage(url: str, identity: str = "", wait_limit: float = WAIT_LIMIT) -> Storage:
    """Return the storage that `url` names, if it is that of `identity`, or any without one.

    Touches nothing: the first use opens the database. Raises NeedsOperator.
    """
    has_gevent = monkey.is_module_patched("threading")
    wait_for_others = gather if has_gevent else lambda: None
    call = operator.call
    if url.startswith("sqlite:///") and "?" not in url:
        path = unquote(url.removeprefix("sqlite:///"), errors="surrogateescape")
        engine: Engine = SQLiteEngine(path, identity or None, wait_limit / 2)
        if has_gevent:  # sqlite3 blocks, so it has a real thread, as all others are greenlets
            call = ThreadPool(1).apply
    elif url.startswith(("postgresql://", "postgres://")):
        from postgresql import PostgreSQLEngine  # SQLite does without psycopg

        engine = PostgreSQLEngine(url, identity or None, wait_limit / 2)
    else:
        raise NeedsOperator(
            "DATABASE_URL must name a file like sqlite:///plants.db (sqlite:////srv/plants.db with "
            "an absolute path) or a server like postgresql://user:password@host/database"
        )
    return Storage(engine, wait_limit, call, wait_for_others)


def gather() -> None:
    """Let all requests that have arrived go on first, so that they share a batch."""
    with gevent.Timeout(GATHER_LIMIT, False):
        gevent.idle()


def read_list(variable: str, form: re.Pattern[str]) -> list[str]:
    """Return the parts of an environment variable. Raises NeedsOperator for a bad one, or none."""
    parts = re.findall(r"[^,\s]+", os.environ.get(variable, ""))
    if not parts or not all(map(form.fullmatch, parts)):
        raise NeedsOperator(f"{variable} must be {EXPECTED[variable]}")
    return parts
