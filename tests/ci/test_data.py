"""deploy/backup.py, deploy/restore.py and docs/data.md: no plant is lost, whatever is typed."""

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plant import Plant
from tests.support.pages import block, command
from tests.support.server import PATIENCE, ROOT, STORED, wait_until
from tests.support.storage import Row, lock_held, read_names, read_rows
from tests.support.wire import MONSTERA, Writers

PROGRAMS = ROOT / "deploy"
# Without the modules of the service or of a package, and without the folder of the program.
PYTHON = [sys.executable, "-I", "-S"]
OTHER = 1000  # the id of a user who is not root
COPY = re.compile(r"plants-\d{4}-\d\d-\d\d-\d{6}\.db")
PAGE = 4096  # bytes of a page of SQLite
OURS = f"PRAGMA application_id = {0x504C4E54}"
TABLE = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT{}) STRICT"


def type_(program: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run one of the two programs. The options are variables of the environment, and `cwd`."""
    where = {"cwd": options.pop("cwd", "/")}
    prefix = options.pop("prefix", [])
    line = [*prefix, *PYTHON, PROGRAMS / f"{program}.py", *map(str, arguments)]
    environment = {k: v for k, v in {**os.environ, **options}.items() if v is not None}
    return subprocess.run(
        line, env=environment, timeout=4 * PATIENCE, capture_output=True, text=True, **where
    )


def succeed(program: str, *arguments: object, **options) -> str:
    """Run one of the two programs, and return what it prints."""
    done = type_(program, *arguments, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def fail(program: str, *arguments: object, **options) -> str:
    """Run one of the two programs, and return the one line that says why it failed."""
    done = type_(program, *arguments, **options)
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    return line


@pytest.fixture(autouse=True)
def setting(monkeypatch, url) -> None:
    """DATABASE_URL names the database of the test."""
    monkeypatch.setenv("DATABASE_URL", url)


def make(path: Path, plants: dict[int, str], *statements: str, columns: str = "") -> Path:
    """Make a database of ours."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in (OURS, TABLE.format(columns), *statements):
            database.execute(statement)
        database.execute("BEGIN")
        database.executemany("INSERT INTO plants (id, name) VALUES (?, ?)", plants.items())
        database.execute("COMMIT")
    return path


def backups(folder: Path) -> list[Path]:
    """Return the copies that were made, the oldest first."""
    return sorted(each for each in folder.glob("backups/*") if COPY.fullmatch(each.name))


def files(folder: Path) -> dict[str, bytes | None]:
    """Return the contents of all files and folders in a folder, by their paths."""
    return {
        str(each): each.read_bytes() if each.is_file() else None for each in folder.rglob("*")
    }


def all_plants(folder: Path) -> dict[int, str]:
    """Return the plants of the database and of all files that were replaced."""
    found = {}
    for path in [*sorted(folder.glob("replaced-*/plants.db")), folder / "plants.db"]:
        if path.exists():
            found |= read_names(f"sqlite:///{path}")
    return found


# Backups


def test_a_backup_is_made_while_the_service_runs(serve, tmp_path, url):
    """A second one in the same second is another file. Only the owner can read them."""
    server = serve()
    assert server.post(MONSTERA)[0] == STORED
    printed = [succeed("backup") for _ in range(2)]
    copies = backups(tmp_path)
    assert printed == [f"{copy}: 1 plants of {tmp_path}/plants.db\n" for copy in copies]
    for copy in copies:
        assert read_names(f"sqlite:///{copy}") == {7: "Monstera"}
        assert copy.stat().st_mode & 0o777 == 0o600
    assert sorted((tmp_path / "backups").iterdir()) == copies
    assert (tmp_path / "backups").stat().st_mode & 0o777 == 0o700
    assert server.post(MONSTERA)[0] == STORED


def test_a_backup_goes_to_the_folder_that_is_named(tmp_path, database):
    """A relative path begins in the current folder; so does a relative path in DATABASE_URL."""
    make(database, {1: "n"})
    (tmp_path / "elsewhere").mkdir()
    assert succeed("backup", "copies", cwd=tmp_path / "elsewhere").startswith(f"{tmp_path}/elsewhe")
    for value in (None, " sqlite:///plants.db\n", "sqlite:///pl%61nts.db"):
        assert ": 1 plants" in succeed("backup", "elsewhere", cwd=tmp_path, DATABASE_URL=value)
    assert len([*(tmp_path / "elsewhere").glob("plants-*")]) == 3
    link = tmp_path / "link.db"
    link.symlink_to(database)
    succeed("backup", DATABASE_URL=f"sqlite:///{link}")
    assert len(backups(tmp_path)) == 1


DAMAGES = {
    "is missing": lambda path: path.unlink(),
    "has no plants, or belongs to another program": lambda path: path.write_bytes(b""),
    "belongs to another program": lambda path: run_sql(path, "PRAGMA application_id = 1"),
    "not a database": lambda path: path.write_bytes(b"x" * 9999),
    "malformed": lambda path: overwrite(path, 1),
}


def run_sql(path: Path, *statements: str) -> None:
    """Execute statements in a SQLite file."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def overwrite(path: Path, page: int, start: int = 0) -> None:
    """Overwrite half of a page of a SQLite file, or what of it begins at `start`."""
    with path.open("r+b") as file:
        file.seek(page * PAGE + start)
        file.write(b"\xff" * (PAGE // 2))


@pytest.mark.parametrize("words", DAMAGES)
def test_a_backup_that_cannot_be_made_leaves_nothing(tmp_path, database, words):
    """Neither a folder, nor a database."""
    make(database, {1: "n"})
    DAMAGES[words](database)
    before = files(tmp_path)
    assert words in fail("backup")
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://user:secret@host/database", "pg_dump"),
        (" postgres://user:secret@host/database", "pg_dump"),
        ("sqlite:///:memory:", "must name a file"),
        ("", "must name a file"),
        ("mysql://user:secret@host", "must name a file"),
    ],
)
@pytest.mark.parametrize("program", ["backup", "restore"])
def test_a_url_that_names_no_file_is_refused_in_one_line(tmp_path, program, url, words):
    """It shows no password."""
    line = fail(program, "backups", DATABASE_URL=url, cwd=tmp_path)
    assert words in line and "secret" not in line
    assert files(tmp_path) == {}


@pytest.mark.parametrize(
    "arguments", [[""], ["--keep", ""], ["--keep", "0"], ["--keep", "-1"], ["--keep"], ["a", "b"]]
)
def test_a_backup_with_wrong_arguments_is_refused(tmp_path, database, arguments):
    """An empty variable is one, too."""
    make(database, {1: "n"})
    before = files(tmp_path)
    fail("backup", *arguments, cwd=tmp_path)
    assert files(tmp_path) == before


def test_old_backups_are_deleted_unless_they_have_more_plants(tmp_path, database):
    """While there is such a copy, each run fails. So does one with a copy that can't be read."""
    (folder := tmp_path / "backups").mkdir()
    old = [make(folder / f"plants-2020-01-0{day}-000000.db", {1: "n"}) for day in range(1, 7)]
    (other := folder / "plants-of-mine.db").touch()
    make(database, {1: "n", 2: "n"})
    succeed("backup")
    assert set(old) < set(folder.iterdir())
    succeed("backup", "--keep", 4)
    assert backups(tmp_path)[:2] == old[4:]
    assert len(backups(tmp_path)) == 4
    make(good := folder / "plants-2020-01-01-000000.db", {1: "n", 2: "n", 3: "n"})
    (unknown := folder / "plants-2020-01-02-000000.db").write_bytes(b"x" * 9999)
    for _ in range(3):
        line = fail("backup", "--keep", 1)
        assert f"has 2 plants, but {unknown} can't be read" in line
        assert f"{good} has 3 plants" in line
    assert backups(tmp_path)[:-1] == [good, unknown]
    assert other.exists()
    for each in (good, unknown):
        each.unlink()
    succeed("backup", "--keep", 1)
    assert len(backups(tmp_path)) == 1


def test_fourteen_backups_of_an_empty_file_keep_the_good_one(tmp_path, database):
    """The service began anew, and nobody noticed."""
    make(database, dict.fromkeys(range(9), "n"))
    succeed("backup", "--keep", 2)
    (good,) = backups(tmp_path)
    database.unlink()
    make(database, {})
    for _ in range(4):
        assert f"{good} has 9 plants" in fail("backup", "--keep", 2)
    assert good in backups(tmp_path) and len(backups(tmp_path)) == 3
