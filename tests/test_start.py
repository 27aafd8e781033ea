"""What stops the start: one clear line, a status that is not 0, no worker that fails for ever."""

import contextlib
import re
import sqlite3
from pathlib import Path

import pytest

from storage import SQLiteEngine
from tests.support.server import TOKEN

LOG_LINE = re.compile(r"\[.*\] \[\d+\] \[INFO\] .*\n")


@pytest.fixture
def url(database: Path) -> str:
    """SQLite; what refuses a start on PostgreSQL is in tests/test_postgresql.py."""
    return f"sqlite:///{database}"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PLANTS_TOKENS": ""}, "PLANTS_TOKENS must be .*token_urlsafe"),
        ({"PLANTS_TOKENS": " , "}, "PLANTS_TOKENS must be .*token_urlsafe"),
        ({"PLANTS_TOKENS": "too-short"}, "PLANTS_TOKENS must be .*at least 16"),
        ({"PLANTS_TOKENS": f"{TOKEN} with:colon-0123456789"}, "PLANTS_TOKENS must be"),
        ({"DATABASE_URL": ""}, "DATABASE_URL must name a file"),
        ({"DATABASE_URL": "mysql://host/plants"}, "DATABASE_URL must name a file"),
        ({"DATABASE_URL": "sqlite:///:memory:"}, "DATABASE_URL must name a file"),
        ({"DATABASE_URL": "sqlite:////no/such/folder/plants.db"}, "/no/such/folder/plants.db"),
        ({"DATABASE_URL": "sqlite:////dev/full"}, "/dev/full is not a file"),
        ({"DATABASE_URL": "sqlite:///a%00b"}, "DATABASE_URL must name a file"),
        ({"PLANTS_CORS_ORIGINS": "garden.example"}, "PLANTS_CORS_ORIGINS must be"),
        ({"PORT": ""}, "PORT must be a number from 1 to 65535, not ''"),
        ({"PORT": "http"}, "PORT must be a number from 1 to 65535, not 'http'"),
        ({"PORT": "0"}, "PORT must be a number from 1 to 65535, not '0'"),
        ({"PORT": "65536"}, "PORT must be a number from 1 to 65535, not '65536'"),
        ({"WEB_CONCURRENCY": "0"}, "WEB_CONCURRENCY must be a number from 1 to"),
        ({"WEB_CONCURRENCY": "-1"}, "must be positive|WEB_CONCURRENCY"),
    ],
    ids=str,
)
def test_a_wrong_setting_stops_the_start_in_one_line(serve, environment, words):
    """The line says which and what to do; the master has started no worker."""
    server = serve(**environment)
    assert server.wait() != 0
    said = LOG_LINE.sub("", server.err).strip()
    assert len(said.splitlines()) == 1, server.err
    assert re.search(words, said, re.IGNORECASE)
    assert "Traceback" not in server.err and "Booting worker" not in server.err


def test_preloading_stops_the_start(serve):
    """The threads that the application has begun would be missing in the workers."""
    server = serve("--preload")
    assert server.wait() != 0
    assert "--preload is not possible" in server.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("CREATE TABLE diary (entry)", " is another program's; name another in DATABASE_URL"),
        (
            f"PRAGMA application_id = {SQLiteEngine.APPLICATION_ID}; PRAGMA user_version = 2",
            " is of a newer version of this service; run that",
        ),
        (
            b"Dear diary," * 999,
            ": file is not a database; mend it, move it or name another in DATABASE_URL",
        ),
        (b"", " is empty; put it back, or remove it for a new one"),
    ],
    ids=["another program's", "a newer version's", "no database", "empty"],
)
def test_a_file_that_cannot_be_used_stops_the_start(serve, database, content, words):
    """It is named, and stays as it is."""
    if isinstance(content, bytes):
        database.write_bytes(content)
    else:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.executescript(content)
    before = database.read_bytes()
    server = serve()
    assert server.wait() != 0
    assert LOG_LINE.sub("", server.err).strip() == f"{database}{words}"
    assert database.read_bytes() == before


@pytest.mark.parametrize("setting", ["", "many"])
def test_gunicorn_itself_stops_where_web_concurrency_is_no_number(serve, setting):
    """It reads the variable before it reads gunicorn.conf.py, so the line is not ours."""
    server = serve(WEB_CONCURRENCY=setting)
    server.may_fail = True
    assert server.wait() != 0
    assert "invalid literal for int()" in server.err


def test_a_locked_file_does_not_stop_the_start(serve, database):
    """Another program has it now; requests are answered with 503 until it has not."""
    assert serve().post({"id": 7, "name": "n"})[0] == 200
    lock = sqlite3.connect(database, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    server = serve()
    assert server.request("GET", "/nowhere")[0] == 404
    lock.execute("ROLLBACK")
    lock.close()
    assert server.post({"id": 8, "name": "n"})[0] == 200


def test_the_settings_that_the_service_depends_on(serve):
    """As gunicorn has them after it has read gunicorn.conf.py and its defaults."""
    server = serve("--print-config")
    assert server.wait() == 0
    settings = dict(re.findall(r"^(\w+) += (.*)$", server.out, re.MULTILINE))
    expected = {
        "control_socket_disable": "True",
        "http_parser": "python",
        "forwarder_headers": "[]",
        "workers": "2",
        "keepalive": "125",
        "graceful_timeout": "25",
        "accesslog": "-",
        "preload_app": "False",
        "reuse_port": "False",
    }
    assert {name: settings[name] for name in expected} == expected
