"""README.md is true: its commands run, its samples are what comes, its tables are complete.

That its samples of errors are answers that really come is in tests/test_openapi.py, and what it has
for deploying is in tests/ci/test_deploy.py.
"""

import contextlib
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from storage import DEFAULT_URL
from tests.conftest import ROOT, ROWS, require_programs
from tests.support.postgresql import PostgreSQL
from tests.support.readme import README, block, table
from tests.support.server import GUNICORN, PATIENCE, Server, Writers, wait_until

CODE = ("app.py", "storage.py", "gunicorn.conf.py")


@pytest.fixture
def url(database: Path) -> str:
    """SQLite, as without any setting."""
    return f"sqlite:///{database}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like that of README.md, without plants."""
    folder = tmp_path / "plant store"
    folder.mkdir()
    for name in (*CODE, "schemas", "static"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def server(serve: Callable[..., Server], folder: Path) -> Server:
    """The service, started there without a setting."""
    start = ["env", f"--chdir={folder}", GUNICORN, "--bind", "127.0.0.1:0"]
    return serve(command=start, DATABASE_URL=None, PLANTS_TOKENS=None)


def shape(line: str) -> str:
    """A line with what differs from run to run made the same."""
    line = re.sub(r"[0-9a-f]{32}$", "ID", line)
    line = re.sub(r" (in|Bearer) [^';]+", r" \1 X", line)
    line = re.sub(r"http://[\d.:]+", "http://X", line)
    return re.sub(r"\[\d\d/\w{3}/.*?\]|[\d.]+s|\d+\.\d+\.\d+", "X", line)


def test_the_start_prints_the_curl_line_that_is_shown(server):
    """But for the token."""
    curl = wait_until(lambda: re.search(r"(?m)^curl (.*\n){3}", server.err))[0]
    assert shape(curl) == shape(block("sh", "curl"))


def test_the_logs_look_as_they_are_shown(server):
    """The line of the start, and that of a request."""
    assert server.port
    token = wait_until(lambda: re.search("Bearer ([^']+)", server.err))[1]
    plant = json.loads(re.search("-d '(.*)'", block("sh", "curl"))[1])
    assert server.post(plant, token) == (200, json.loads(block("json", "{")))
    assert shape(wait_until(lambda: server.out)) == shape(block("", "127.0.0.1"))
    (line,) = re.findall(r"\[INFO\] plants: .*\n", server.err)
    assert shape(line) == shape(block("", "[INFO] plants: "))


def run(folder: Path, commands: str, **environment: str) -> str:
    """Run what README.md has for a shell; return what it printed."""
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", commands],
        stdout=subprocess.PIPE, text=True, check=True, cwd=folder, timeout=PATIENCE,
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", **environment},
    )  # fmt: skip
    return done.stdout


def test_a_back_up_has_every_plant_that_was_answered_for(serve, folder, postgresql: PostgreSQL):
    """By each of the ways that are shown, while clients post; a copy of the file serves again."""
    require_programs("sqlite3")
    server = serve(f"--chdir={folder}", DATABASE_URL=DEFAULT_URL)
    elsewhere = postgresql.new_schema()
    with Writers(server.port) as writers:
        assert writers.goes_on()
        acknowledged = dict(writers.acknowledged)
        run(folder, block("sh", "sqlite3 plants.db 'SELECT").replace("| head", "> /dev/null"))
        assert " new, 0 there already, 0 conf" in run(
            folder, block("sh", ".venv/bin/python storage.py dump >")
        )
        run(folder, block("sh", 'sqlite3 plants.db "VACUUM'))
        move = block("sh", ".venv/bin/python storage.py dump sqlite:///plants.db |")
        run(folder, move, DATABASE_URL=elsewhere)
        assert writers.goes_on()
    assert set(writers.answers) == {200}
    for name in ("elsewhere.db", "copy.db"):
        with contextlib.closing(sqlite3.connect(folder / name)) as connection:
            assert acknowledged.items() <= names(connection.execute(ROWS))
    with psycopg.connect(elsewhere) as connection:
        assert acknowledged.items() <= names(connection.execute(ROWS))
    again = serve(DATABASE_URL=f"sqlite:///{folder}/copy.db")
    number, name = next(iter(acknowledged.items()))
    assert again.post({"id": number, "name": name})[0] == 200
    assert again.post({"id": number, "name": "another"})[0] == 409


def names(rows) -> set[tuple[int, str]]:
    """Ids and names of plants."""
    return {(number, name) for number, name, _ in rows}


def test_the_table_of_variables_has_all_that_are_read():
    """And no others; the service's own way to tell its workers something is not for operators."""
    code = "".join((ROOT / name).read_text() for name in CODE)
    read = re.findall(r'(?:os\.environ(?:\.get\(|\[)|number_from\()"(\w+)"', code)
    rows = table("variable")
    assert {variable.strip("`") for variable, _, _ in rows} == {*read} - {"PLANTS_STORAGE"}
    assert ["`DATABASE_URL`", f"`{DEFAULT_URL}`"] in [row[:2] for row in rows]


def test_links_lead_somewhere():
    """To files that exist, and to headings of the page."""
    headings = {
        re.sub(r"\W+", "-", heading.lower()) for heading in re.findall("(?m)^#+ (.*)$", README)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in headings
        elif not target.startswith("https://"):
            assert (ROOT / target).exists(), target
