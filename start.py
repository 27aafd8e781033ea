"""The wiring: makes a storage and an application from the environment variables.

gunicorn.conf.py runs this file once, before the workers start. Then each worker calls get_app().
docs/host.md shows how to check the settings with it by hand. This file imports the service only
inside its functions: with --preload, gunicorn's master imports this file before gevent has patched
the workers.
"""

import argparse
import os
import re
import signal
import sys
from typing import TYPE_CHECKING
from urllib.parse import unquote

if __name__ == "__main__":  # In a worker, gunicorn has set its own handlers already.
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl+C ends it without a traceback.

# With PYTHONSAFEPATH, Python does not find the modules beside this file by itself.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

if TYPE_CHECKING:
    from app import App
    from storage import Storage

TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,}=*")  # a b64token (RFC 6750 section 2.1)


def get_app() -> "App":
    """Return the application that the environment describes. Raises ValueError.

    Call it in the process that serves the requests, or before a server forks that process.
    """
    from app import create_app

    if "PORT" in os.environ and "DATABASE_URL" not in os.environ:
        raise ValueError(
            "PORT is set, so set DATABASE_URL too: to a server, to a file on a disk that persists, "
            "like sqlite:////data/plants.db, or, if plants may be lost, to sqlite:///plants.db"
        )
    tokens = read_tokens()
    return create_app(get_storage(os.environ.get("DATABASE_URL", "sqlite:///plants.db")), tokens)


def get_storage(url: str) -> "Storage":
    """Return the storage that `url` names; nothing is opened yet. Raises ValueError."""
    from engines.sqlite import SQLiteEngine
    from storage import Storage

    url = url.strip()  # Secrets often end in a line break.
    if re.fullmatch(r"sqlite:///(?!:memory:)[^?]+", url):
        return Storage(SQLiteEngine(unquote(url.removeprefix("sqlite:///"))))
    if url.startswith(("postgresql://", "postgres://")):
        # SQLite needs no psycopg.
        from engines.postgresql import PostgreSQLEngine

        return Storage(PostgreSQLEngine(url))
    raise ValueError(
        "DATABASE_URL must name a file like sqlite:///plants.db (sqlite:////srv/plants.db with "
        "an absolute path) or a server like postgresql://user:password@host/database"
    )


def read_tokens() -> list[str]:
    """Return the tokens of PLANTS_TOKENS. Raises ValueError if there is none, or a bad one."""
    tokens = re.findall(r"[^,\s]+", os.environ.get("PLANTS_TOKENS", ""))
    if not tokens or not all(map(TOKEN.fullmatch, tokens)):
        raise ValueError(
            "PLANTS_TOKENS must be tokens of at least 16 letters, digits or -._~+/, separated by "
            "commas; to make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return tokens


def main() -> None:
    """Open or create the database, and say where it is.

    Exit with 1 if a setting is wrong, a SQLite file can't be used, or a table is gone.
    """
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--existing", action="store_true", help="fail if there is no database yet")
    arguments = parser.parse_args()

    from engines.sqlite import SQLiteEngine
    from storage import Misconfigured, Rejected, Unavailable

    try:
        storage = get_app().config["storage"]
    except ValueError as error:
        sys.exit(str(error))
    storage.engine.creates = not arguments.existing
    try:
        # Seconds. After a crash, SQLite first reads all of plants.db-wal, which may be large.
        storage.check(15.0)
        storage.close()
        report = f"plants are stored in {storage.engine.description}"
    except (Rejected, Unavailable) as error:
        report = f"plants can't be stored in {storage.engine.description}: {error}"
        # A server may come back by itself, so start anyway. Anything else needs the operator.
        if isinstance(error, Misconfigured) or isinstance(storage.engine, SQLiteEngine):
            sys.exit(report)
        report += "; the service answers 503 until they can"
    print(report, file=sys.stderr)


if __name__ == "__main__":
    main()
