"""deploy/backup and deploy/restore, as an operator runs them, and what they refuse.

That both are of use beside the service, also from a timer, is in test_docs.py and test_host.py.
"""

import contextlib
import fcntl
import os
import re
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas import Plant
from storage import Storage
from tests.support.server import ROOT, Server

Rows = list[tuple[int, str, str | None]]
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for backups, whose name has what shells and SQL treat specially."""
    folder = tmp_path / "the owner's backups"
    folder.mkdir()
    return folder


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts with the environment that cron has."""
    command = ["env", "-i", "PATH=/usr/bin:/bin", ROOT / "deploy" / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def contents(folder: Path) -> dict[str, bytes]:
    """All files in a folder; a -shm has nothing that is not in the others."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".db-shm")
    return {str(file): file.read_bytes() for file in files}


def rows(database: Path) -> Rows:
    """The plants in a file."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT id, name, tag FROM plants").fetchall()


def make_inconsistent(database: Path) -> None:
    """Make a file of plants that can be copied, but in which a name is missing."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executescript(
            "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT); INSERT INTO plants (id)"
            "VALUES (7); PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = 'CREATE TABLE "
            "plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL)'"
        )


def test_the_newest_backups_are_kept(storage: Storage, database: Path, folder: Path) -> None:
    """As many as the third argument says; each is the owner's alone; success is silent."""
    for year in (2024, 2025, 2026):
        (folder / f"plants-{year}-01-01T00-00-00.db").touch()
    (folder / "new.db").touch()  # of one that was killed
    storage.add(Plant(7, "Monstera", None))
    done = run("backup", database, folder, 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    old, new = sorted(folder.iterdir())
    assert old.name == "plants-2026-01-01T00-00-00.db"
    assert new.stat().st_mode & 0o777 == 0o600
    assert rows(new) == [(7, "Monstera", None)]


def test_a_backup_that_fails_says_so_in_a_line(
    storage: Storage, database: Path, folder: Path, tmp_path: Path
) -> None:
    """It leaves the older ones, nothing half-made, and no file where there was none."""
    storage.add(Plant(7, "Monstera", None))
    (folder / "plants-2026-01-01T00-00-00.db").touch()
    (tmp_path / "other.db").write_text("no database")
    make_inconsistent(tmp_path / "damaged.db")
    (tmp_path / "empty.db").touch()
    before = contents(folder)

    def refused(*arguments: object) -> str:
        done = run("backup", *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert contents(folder) == before
        return done.stderr

    assert "No such file" in refused(tmp_path / "nothing.db", folder)
    assert not (tmp_path / "nothing.db").exists()
    assert "not a database" in refused(tmp_path / "other.db", folder)
    assert "NULL value in plants.name" in refused(tmp_path / "damaged.db", folder)
    assert "no such table: plants" in refused(tmp_path / "empty.db", folder)
    assert "can't cd" in refused(database, tmp_path / "nowhere")
    assert "to keep 0 is to keep none" in refused(database, folder, 0)
    assert "to keep all is to keep none" in refused(database, folder, "all")
    assert "parameter not set" in refused(database)
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert "another backup is running" in refused(database, folder)
    os.close(other)


@pytest.fixture
def killed(serve: Callable[..., Server], database: Path, folder: Path) -> Path:
    """The file of a service that was killed: its last plant is in the -wal. A backup has others."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.post({"id": 7, "name": "Monstera"})[0] == 200
    assert run("backup", database, folder).returncode == 0
    assert server.post({"id": 8, "name": "Fern"})[0] == 200
    server.kill()
    assert database.with_name("plants.db-wal").stat().st_size
    os.chown(database, NOBODY, NOBODY)
    database.chmod(0o640)
    return database


def test_a_backup_leaves_the_files_as_they_are(killed: Path, tmp_path: Path) -> None:
    """Also those of a service that was killed: whoever opens them to write ends the -wal."""
    before = contents(killed.parent)
    (tmp_path / "new").mkdir()
    assert run("backup", killed, tmp_path / "new").returncode == 0
    assert before.items() <= contents(killed.parent).items()
    (backup,) = (tmp_path / "new").iterdir()
    assert [number for number, _, _ in rows(backup)] == [7, 8]


def test_a_restored_file_is_the_services_own(
    killed: Path, folder: Path, serve: Callable[..., Server]
) -> None:
    """It has the old file's owner and mode. The old files are kept, and can be restored too."""
    (backup,) = folder.iterdir()
    done = run("restore", backup, killed)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"restored: 1 plants from {backup}; the old files are in ")
    assert rows(killed) == [(7, "Monstera", None)]
    status = killed.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (NOBODY, NOBODY, 0o640)
    old = Path(done.stdout.rpartition(" in ")[2].strip())
    assert {file.suffix for file in old.iterdir()} >= {".db", ".db-wal", ".db-shm"}
    elsewhere = killed.parent / "elsewhere"
    elsewhere.mkdir()
    os.chown(elsewhere, NOBODY, NOBODY)
    done = run("restore", old / "plants.db", elsewhere / "plants.db")
    assert done.stdout.startswith("restored: 2 plants ")
    assert (elsewhere / "plants.db").stat().st_uid == NOBODY  # that of the folder
    server = serve(DATABASE_URL=f"sqlite:///{elsewhere}/plants.db")
    assert server.post({"id": 8, "name": "another"})[0] == 409
    beside = run("restore", backup, elsewhere / "plants.db")
    told = "stop the service first; if it was deleted, see docs/data.md\n"
    assert beside.returncode == 1 and told in beside.stderr
    assert server.post({"id": 9, "name": "new"})[0] == 200
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.parametrize("endings", [[""], ["", "-wal", "-shm"]])
def test_a_file_that_was_deleted_can_be_rescued(
    serve: Callable[..., Server], database: Path, tmp_path: Path, endings: list[str]
) -> None:
    """Its plants are there until the service ends, and a restore before that is refused."""
    server = serve(WEB_CONCURRENCY="1")
    for number in range(20):
        assert server.post({"id": number, "name": "n"})[0] == 200
    for ending in endings:
        database.with_name(f"plants.db{ending}").unlink()
    assert server.post({"id": 20, "name": "n"})[0] == 503
    assert "see docs/data.md" in server.err
    (command,) = re.findall(r"`(find /proc.*)`", (ROOT / "docs" / "data.md").read_text())
    found = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
    (tmp_path / "rescued").mkdir()
    for link, file in (line.split(" ", 1) for line in found.splitlines()):
        if file.startswith(f"{database}"):
            name = Path(file.removesuffix(" (deleted)")).name
            (tmp_path / "rescued" / name).write_bytes(Path(link).read_bytes())
    refused = run("restore", tmp_path / "rescued" / "plants.db", database)
    assert refused.returncode == 1 and "if it was deleted, see docs/data.md" in refused.stderr
    server.kill()
    assert run("restore", tmp_path / "rescued" / "plants.db", database).returncode == 0
    assert [number for number, _, _ in rows(database)][:20] == list(range(20))


def test_without_a_sound_backup_nothing_is_changed(killed: Path, folder: Path) -> None:
    """There is none, its path is that of a folder, or it is something else, or damaged."""
    (backup,) = folder.iterdir()
    (folder / "other.db").write_text("no database")
    sqlite3.connect(folder / "empty.db").close()
    with contextlib.closing(sqlite3.connect(folder / "others.db")) as connection:
        connection.execute("CREATE TABLE animals (id INTEGER)")
    data = backup.read_bytes()
    (folder / "damaged.db").write_bytes(data[:4096] + b"\1" * (len(data) - 4096))
    make_inconsistent(folder / "inconsistent.db")
    before = contents(killed.parent)
    names = ("no", "other", "empty", "others", "damaged", "inconsistent")
    for choice in ("", folder, *(folder / f"{name}.db" for name in names)):
        done = run("restore", choice, killed)
        assert (done.returncode != 0, done.stdout) == (True, "")
        assert done.stderr.endswith("restore: failed, and nothing was changed\n")
        assert contents(killed.parent) == before
