"""deploy/backup and deploy/restore, as an operator runs them, and what they refuse.

That both are of use beside the service, also from a timer, is in test_docs.py and test_host.py.
"""

import contextlib
import fcntl
import os
import re
import sqlite3
import subprocess
from pathlib import Path

import pytest

from schemas import Plant
from tests.support.server import GUNICORN, ROOT, wait_until

NOBODY = 65534


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder for backups, whose name has what shells and SQL treat specially."""
    folder = tmp_path / "the owner's backups"
    folder.mkdir()
    return folder


def run(script: str, *arguments: object, url: str = "") -> subprocess.CompletedProcess[str]:
    """Run one of the scripts with the environment that cron has, and a database's URL."""
    environment = ["-i", "PATH=/usr/bin:/bin", f"DATABASE_URL={url}"]
    command = ["env", *environment, ROOT / "deploy" / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def contents(folder: Path) -> dict[str, bytes]:
    """All files in a folder; a -shm has nothing that is not in the others."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".db-shm")
    return {str(file): file.read_bytes() for file in files}


def rows(database: Path) -> list[tuple[int, str, str | None]]:
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


@pytest.mark.parametrize(("century", "word"), [(20, "ok    "), (21, "FAILED")])
def test_the_newest_backups_are_kept(storage, database, folder, century, word):
    """As many as the third argument says; each is the owner's alone; success is silent.

    The new one is kept also if others are from the future: the check says so. Other files stay.
    """
    others = [folder / f"plants-{century}{year}-01-01T00-00-00.db" for year in (24, 25, 26)]
    for file in (*others, own := folder / "plants-before the upgrade.db"):
        file.touch()
        os.utime(file, (2**32, 2**32))
    for name in ("new.db", "new.db-journal"):  # of one that was killed
        (folder / name).touch()
    storage.add(Plant(7, "Monstera", None))
    done = run("backup", database, folder, 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {own, others[2]} < set(folder.iterdir())
    (new,) = {*folder.iterdir()} - {own, others[2]}
    assert new.stat().st_mode & 0o777 == 0o600
    assert rows(new) == [(7, "Monstera", None)]
    assert f"{word}  the newest backup is" in run("check", folder).stdout


def test_a_backup_that_fails_says_so_in_a_line(storage, database, folder, tmp_path):
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
    assert "has to name a folder" in refused(database, "")
    assert "to keep 0 is to keep none" in refused(database, folder, 0)
    assert "to keep all is to keep none" in refused(database, folder, "all")
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert "another backup is running" in refused(database, folder)
    os.close(other)


@pytest.mark.parametrize("script", ["backup", "check", "restore", "start-with-litestream"])
def test_other_arguments_get_a_line_that_says_which(script):
    """And exit status 2."""
    done = run(script, "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"usage: .*{script}.*\n", done.stderr)


@pytest.fixture
def killed(serve, database, folder) -> Path:
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


def test_a_backup_leaves_the_files_as_they_are(killed, tmp_path):
    """Also those of a service that was killed: whoever opens them to write ends the -wal."""
    before = contents(killed.parent)
    (tmp_path / "new").mkdir()
    assert run("backup", killed, tmp_path / "new").returncode == 0
    assert before.items() <= contents(killed.parent).items()
    (backup,) = (tmp_path / "new").iterdir()
    assert [number for number, _, _ in rows(backup)] == [7, 8]


def test_a_restored_file_is_the_services_own(killed, folder, serve):
    """It has the old file's owner and mode. The old files are kept, and can be restored too."""
    (backup,) = folder.iterdir()
    left = killed.with_name("restored.db-journal")  # of one that was killed
    left.touch()
    done = run("restore", backup, killed)
    assert (done.returncode, done.stderr, left.exists()) == (0, "", False)
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


@pytest.mark.parametrize(
    ("target", "name"),
    [("[1]/plants.db", "link"), ("[1]", "link/plants.db"), ("", "data/[1]/plants.db")],
    ids=["a linked file", "a linked folder", "a container's volume"],
)
def test_a_restore_sees_the_service_under_another_name(serve, folder, tmp_path, target, name):
    """It is refused; once the service has ended, it goes to where the link leads."""
    (tmp_path / "[1]").mkdir()  # which `find` would take for a pattern
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / target)
    mount = f'mount --bind {tmp_path} {tmp_path}/data && exec "$0" --bind 127.0.0.1:0'
    command = ["unshare", "--mount", "sh", "-c", mount, GUNICORN]
    server = serve(command=command, DATABASE_URL=f"sqlite:///{tmp_path / name}")
    assert server.post({"id": 7, "name": "Monstera"})[0] == 200
    path = tmp_path / name.removeprefix("data/")
    assert "stop the service first" in run("restore", path, path).stderr
    assert f" {tmp_path}/[1] is" in run("check", folder, url=f"sqlite:///{path}").stdout
    server.kill()
    wait_until(lambda: run("restore", path, path).returncode == 0)  # the workers end after it
    assert (tmp_path / "link").is_symlink() and rows(path) == [(7, "Monstera", None)]


@pytest.mark.parametrize("endings", [[""], ["", "-wal", "-shm"]])
def test_a_file_that_was_deleted_can_be_rescued(serve, database, tmp_path, endings):
    """Its plants are there until the service ends.

    A restore before that is refused, also before the service's first request.
    """
    server = serve(WEB_CONCURRENCY="1")
    find = ["find", f"/proc/{server.workers(1)[0]}/fd", "-lname", str(database)]
    wait_until(lambda: subprocess.run(find, capture_output=True).stdout)
    assert "stop the service first" in run("restore", database, database).stderr
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


def test_without_a_sound_backup_nothing_is_changed(killed, folder):
    """There is none, a path is that of a folder, or it is something else, or damaged."""
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
    choices = ("", folder, *(folder / f"{name}.db" for name in names))
    for choice, place in (*((choice, killed) for choice in choices), (backup, folder)):
        done = run("restore", choice, place)
        assert (done.returncode != 0, done.stdout) == (True, "")
        assert done.stderr.endswith("restore: failed, and nothing was changed\n")
        assert contents(killed.parent) == before
