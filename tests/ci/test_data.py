"""backup.py, restore.py and the pages about the data: no plant is lost, whatever is typed."""

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from plant import Plant
from tests.support.pages import SENTENCES, block, command
from tests.support.server import PATIENCE, ROOT, STORED, wait_until
from tests.support.storage import Row, read_names, read_rows
from tests.support.wire import MONSTERA, Writers

PROGRAMS = ROOT / "deploy"
# Python that can import no package, and no file of the service or of the program's folder.
PYTHON = [sys.executable, "-I", "-S"]
OTHER = 1000  # the id of a user who is not root
COPY = re.compile(r"plants-\d{4}-\d\d-\d\d-\d{6}\.db")
PAGE = 4096  # bytes of a page of SQLite
OURS = f"PRAGMA application_id = {0x504C4E54}"
TABLE = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT{}) STRICT"


def start(program: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
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
    done = start(program, *arguments, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def fail(program: str, *arguments: object, **options) -> str:
    """Run one of the two programs, and return the one line that says why it failed."""
    done = start(program, *arguments, **options)
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
    return {str(each): each.read_bytes() if each.is_file() else None for each in folder.rglob("*")}


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
    "not a file, empty, or": lambda path: path.write_bytes(b""),
    "has no table of plants, or belongs to another program": lambda path: run_sql(
        path, "DROP TABLE plants"
    ),
    "belongs to another program": lambda path: run_sql(path, "PRAGMA application_id = 1"),
    "not a database": lambda path: path.write_bytes(b"x" * 9999),
    "plants.db is damaged: ": lambda path: overwrite(path, 1),
}


def run_sql(path: Path, *statements: str) -> None:
    """Execute statements in a SQLite file."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def overwrite(path: Path, page: int, start: int = 0) -> None:
    """Overwrite half a page of a SQLite file, from byte `start` of the page on."""
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
    """An argument from an empty variable is wrong, too."""
    make(database, {1: "n"})
    before = files(tmp_path)
    fail("backup", *arguments, cwd=tmp_path)
    assert files(tmp_path) == before


def test_old_backups_are_deleted_unless_they_have_more_plants(tmp_path, database):
    """While there is such a copy, each run fails. So does each run while a copy can't be read."""
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


# Restores


@pytest.mark.parametrize("arguments", [["--merge"], []])
def test_no_plant_is_lost_by_a_restore_under_load(serve, tmp_path, url, arguments):
    """From the swap to the restart nobody gets a 200. All plants are in the new file or the old."""
    server = serve()
    with Writers(server.port) as clients:
        clients.wait_for_more()
        succeed("backup")
        clients.wait_for_more()
        (copy,) = backups(tmp_path)
        assert "\nrestart the service; " in succeed("restore", copy, *arguments)
        # A response to a plant that was stored before the swap may still be on its way.
        wait_until(lambda: clients.answers[503] > 100)
        acknowledged = clients.acknowledged.copy()
        wait_until(lambda: clients.answers[503] > 1000)
        assert clients.acknowledged == acknowledged
    assert set(clients.answers) == {STORED, 503}
    wait_until(lambda: server.health() == 503)  # It reuses a write that is less than a second old.
    assert server.stop() == 0
    assert (acknowledged.items() <= read_names(url).items()) == bool(arguments)
    assert acknowledged.items() <= all_plants(tmp_path).items()
    assert serve().post(MONSTERA)[0] == STORED
    assert acknowledged.items() <= all_plants(tmp_path).items()


def test_a_restore_typed_twice_loses_nothing(tmp_path, database, url):
    """Whatever the present file had is in a folder, from which it can be added later."""
    make(database, {1: "one", 2: "two"})
    succeed("backup")
    (copy,) = backups(tmp_path)
    run_sql(database, "INSERT INTO plants VALUES (3, 'three', NULL)")
    printed = [succeed("restore", copy) for _ in range(2)]
    first, second = sorted(tmp_path.glob("replaced-*"))
    assert f"{database}: 3 plants before, 2 now\nthe old files are in {first}\n" in printed[0]
    assert f"{database}: 2 plants before, 2 now\nthe old files are in {second}\n" in printed[1]
    run_sql(database, "INSERT INTO plants VALUES (4, 'four', NULL)")
    for count in (3, 4):
        printed = succeed("restore", first / "plants.db", "--merge")
        assert f"{database}: {count} plants before, 4 now\n" in printed
        assert read_names(url) == {1: "one", 2: "two", 3: "three", 4: "four"}


def test_merging_prints_the_ids_that_differ_and_keeps_the_plants_of_the_backup(tmp_path, url):
    """An equal plant does not count, nor does one that the old file lacks."""
    make(tmp_path / "backup.db", {1: "one", 2: "two", 3: "three", -5: "five"})
    make(tmp_path / "plants.db", {1: "one", 2: "other", -5: "other", 9: "nine"})
    printed = succeed("restore", tmp_path / "backup.db", "--merge")
    assert "1 plants of the old file were added\n2 ids have another plant" in printed
    assert ": -5 2\n" in printed and "can't be read" not in printed
    assert read_names(url) == {1: "one", 2: "two", 3: "three", -5: "five", 9: "nine"}


def test_columns_that_somebody_added_are_kept_and_merged(tmp_path, database, url):
    """A column that only the old file has is named: it is not in the new one."""
    make(tmp_path / "backup.db", {}, columns=", height REAL")
    run_sql(tmp_path / "backup.db", "INSERT INTO plants VALUES (1, 'one', NULL, 1.5)")
    make(database, {}, columns=", year INTEGER, height REAL")
    run_sql(
        database, "INSERT INTO plants VALUES (1, 'one', NULL, 2000, 1.5), (2, 'two', 't', 9, 2)"
    )
    printed = succeed("restore", tmp_path / "backup.db", "--merge")
    assert "columns that the backup does not have were left out: year\n" in printed
    assert "another plant" not in printed
    with contextlib.closing(sqlite3.connect(database)) as file:
        rows = file.execute("SELECT * FROM plants").fetchall()
    assert rows == [(1, "one", None, 1.5), (2, "two", "t", 2.0)]


def test_a_backup_is_restored_where_there_is_no_database(serve, tmp_path, database, url):
    """A new host has none. Afterwards, a service starts there with the plants of the backup."""
    make(tmp_path / "backup.db", {1: "one"})
    printed = succeed("restore", tmp_path / "backup.db", "--merge")
    assert f"{database}: there was no file before, 1 plants now" in printed
    assert [*tmp_path.glob("replaced-*")] == []
    assert serve().post({"id": 1, "name": "another"})[0] == 409
    assert database.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_the_files_of_a_service_that_has_ended_are_replaced_with_their_wal(serve, url, end):
    """If the service was killed, plants are only in the -wal."""
    with serve() as server:
        assert server.post({"id": 1, "name": "one"})[0] == STORED
        database = Path(url.removeprefix("sqlite:///"))
        succeed("backup")
        assert server.post({"id": 2, "name": "two"})[0] == STORED
        getattr(server, end)()
    (copy,) = backups(database.parent)
    succeed("restore", copy)
    assert read_names(url) == {1: "one"}
    assert {each.name for each in database.parent.glob("plants.db*")} == {
        "plants.db",
        "plants.db-lock",
    }
    (replaced,) = database.parent.glob("replaced-*")
    succeed("restore", replaced / "plants.db", "--merge")
    assert read_names(url) == {1: "one", 2: "two"}


def test_a_journal_of_the_old_file_does_not_change_the_new_one(tmp_path, database, url):
    """SQLite leaves one if it is killed while it writes to a file that is not in WAL mode."""
    make(tmp_path / "backup.db", {1: "one"})
    make(database, {2: "two"})
    program = "import os, sqlite3, sys; file = sqlite3.connect(sys.argv[1])\n"
    program += "file.execute('PRAGMA cache_size = 1'); file.execute('DELETE FROM plants')\n"
    program += "file.executemany('INSERT INTO plants VALUES (?, ?, NULL)', \n"
    program += "    ((number, 'n' * 1000) for number in range(1000)))\nos._exit(1)"
    subprocess.run([sys.executable, "-c", program, database])
    assert (journal := Path(f"{database}-journal")).exists()
    succeed("restore", tmp_path / "backup.db")
    assert read_names(url) == {1: "one"} and not journal.exists()
    (replaced,) = tmp_path.glob("replaced-*/plants.db")
    run_sql(replaced, "SELECT * FROM plants")  # SQLite undoes what was not committed.
    assert read_names(f"sqlite:///{replaced}") == {2: "two"}


def test_a_link_is_followed(tmp_path, url):
    """The backup may be one, and so may the database, whose files are beside its target."""
    (folder := tmp_path / "disk").mkdir()
    make(tmp_path / "backup.db", {1: "one"})
    make(folder / "plants.db", {2: "two"})
    (tmp_path / "plants.db").symlink_to(folder / "plants.db")
    (tmp_path / "newest.db").symlink_to("backup.db")
    printed = succeed("restore", "newest.db", "--merge", cwd=tmp_path)
    assert f"{folder}/plants.db: 1 plants before, 2 now" in printed
    assert read_names(url) == {1: "one", 2: "two"}
    assert (tmp_path / "plants.db").is_symlink() and [*folder.glob("replaced-*/plants.db")]
    (tmp_path / "newest.db").unlink()
    (tmp_path / "newest.db").symlink_to("disk/plants.db")
    assert "is the database itself" in fail("restore", "newest.db", cwd=tmp_path)


REFUSALS: dict[str, tuple[str, ...]] = {
    "BACKUP is missing or empty": (),
    "BACKUP is missing or empty ": ("",),
    "BACKUP is missing or empty  ": ("--merge",),
    "BACKUP is missing or empty   ": ("", "--merge"),
    "is missing, empty or not a file": ("nowhere.db",),
    "is missing, empty or not a file ": ("backups",),
    "is missing, empty or not a file  ": ("empty.db",),
    "belongs to another program": ("foreign.db",),
    "is damaged: ": ("damaged.db",),
    "text.db can't be read: file is not a database": ("text.db",),
    "is the database itself": ("plants.db",),
    "is the database itself ": ("./backups/../plants.db", "--merge"),
    "is the database itself  ": ("hard-link.db",),
    "left from a restore": ("plants.db-new",),
    "left from a restore ": ("plants.db-new-copy", "--merge"),
    "unrecognized arguments": ("backup.db", "text.db"),
    "unrecognized arguments ": ("backup.db", "--merg"),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_a_restore_of_what_is_no_backup_is_refused_before_anything_is_touched(tmp_path, words):
    """So are wrong arguments, such as an empty variable, or two backups in place of one."""
    (tmp_path / "backups").mkdir()
    leftover = [each for each in REFUSALS[words] if each.startswith("plants.db-new")]
    for name in ("plants.db", "backup.db", "foreign.db", "damaged.db", *leftover):
        make(tmp_path / name, dict.fromkeys(range(1000), "n"))
    run_sql(tmp_path / "foreign.db", "PRAGMA application_id = 1")
    overwrite(tmp_path / "damaged.db", 3)
    (tmp_path / "empty.db").touch()
    (tmp_path / "empty.db-wal").write_text("the newest plants")
    (tmp_path / "text.db").write_text("no database" * 999)
    os.link(tmp_path / "plants.db", tmp_path / "hard-link.db")
    (tmp_path / "plants.db-lock").touch()
    before = files(tmp_path)
    assert words.strip() in fail("restore", *REFUSALS[words], cwd=tmp_path)
    assert files(tmp_path) == before


def test_the_file_of_another_program_is_not_replaced(tmp_path, database):
    """DATABASE_URL is mistyped."""
    make(tmp_path / "backup.db", {1: "one"})
    run_sql(make(database, {}), "PRAGMA application_id = 1")
    line = fail("restore", tmp_path / "backup.db")
    assert "belongs to another program; correct DATABASE_URL" in line
    assert [*tmp_path.glob("replaced-*")] == []
    assert database.exists() and not Path(f"{database}-new").exists()


def test_a_file_that_another_program_locks_is_not_taken_for_a_damaged_one(tmp_path, database):
    """Its plants would seem to be unreadable."""
    make(tmp_path / "backup.db", {1: "one"})
    make(database, {2: "two"})
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert "database is locked" in fail("restore", tmp_path / "backup.db", "--merge")
    assert all_plants(tmp_path) == {2: "two"}


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody can enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_programs_that_root_runs_leave_the_files_to_the_owner(shared):
    """The backup that root restores may be one that only root can read."""
    (home := shared / "root").mkdir(0o700)
    (folder := shared / "data").mkdir()
    make(folder / "plants.db", {1: "one"})
    for each in (folder, folder / "plants.db"):
        os.chown(each, OTHER, OTHER)
    url = {"DATABASE_URL": f"sqlite:///{folder}/plants.db"}
    succeed("backup", **url)
    shutil.move(backups(folder)[0], home / "backup.db")
    os.chown(home / "backup.db", 0, 0)
    succeed("restore", home / "backup.db", "--merge", **url)
    # A -wal that only root may read is read, too. The copies of a deleted file are like this.
    run_sql(home / "backup.db", "PRAGMA journal_mode = WAL")
    with contextlib.closing(sqlite3.connect(home / "backup.db")) as open_backup:
        open_backup.execute("INSERT INTO plants VALUES (9, 'in the -wal', NULL)")
        open_backup.commit()
        for each in home.iterdir():
            os.chown(each, 0, 0)
        succeed("restore", home / "backup.db", **url)
    assert read_names(url["DATABASE_URL"])[9] == "in the -wal"
    run_sql(home / "backup.db", "PRAGMA journal_mode = DELETE")
    for missing in ("plants.db", "plants.db*"):  # The lock file, or the folder, shows the owner.
        for each in folder.glob(missing):
            each.unlink()
        succeed("restore", home / "backup.db", **url)
    # If the file is root's, the page's chown has to come before the restore.
    (folder / "plants.db").unlink()
    (folder / "plants.db").touch()
    os.chown(folder, 0, 0)
    assert "plants.db-new: unable to open" in fail("restore", home / "backup.db", **url)
    os.chown(folder, OTHER, OTHER)
    type_here(folder, block("sh", 'chown --reference="$db"'))
    succeed("restore", home / "backup.db", **url)
    assert len([*folder.rglob("*")]) == 9
    assert {(each.stat().st_uid, each.stat().st_gid) for each in folder.rglob("*")} == {
        (OTHER, OTHER)
    }
    assert "Permission denied" in fail("backup", home, **url)
    assert [*home.iterdir()] == [home / "backup.db"]


# Crashes and full disks


CALLS = "fdatasync,flock,fsync,ftruncate,link,mkdir,pwrite64,rename,rmdir,unlink"


def trace_calls(folder: Path, program: str, *arguments: object) -> list[tuple[str, int]]:
    """Run a program. Return those of its system calls that change something: name and number."""
    trace = folder / "trace"
    prefix = ["strace", "-o", trace, f"--trace={CALLS}", "--signal=none"]
    succeed(program, *arguments, prefix=prefix)
    names = re.findall(r"(?m)^(\w+)\(", trace.read_text())
    assert len(names) > 10
    return [(name, names[: at + 1].count(name)) for at, name in enumerate(names)]


def crash(database: Path, *statements: str) -> None:
    """Execute statements in a process that ends without closing the database."""
    program = "import os, sqlite3, sys; file = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
    program += "for each in sys.argv[2:]: file.execute(each)\nos._exit(1)"
    subprocess.run([sys.executable, "-c", program, database, *statements])


@pytest.fixture
def crashed(tmp_path) -> Callable[[], Path]:
    """A function that makes a folder with a backup and a database that was left by a crash.

    Of its plants, the first is in the backup, and the third is only in its -wal.
    """
    (model := tmp_path / "model").mkdir()
    make(model / "plants.db", {1: "one"})
    (model / "plants.db-lock").touch()
    shutil.copy(model / "plants.db", model / "backup.db")
    insert = "INSERT INTO plants VALUES (2, 'two', NULL)"
    wal = ["PRAGMA journal_mode = WAL", insert, "PRAGMA wal_checkpoint", insert.replace("2", "3")]
    crash(model / "plants.db", *wal)
    assert (model / "plants.db-wal").stat().st_size

    def copy() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return Path(shutil.copytree(model, tmp_path / "copy"))

    return copy


CRASHED = {1: "one", 2: "two", 3: "two"}


@pytest.mark.parametrize("fault", ["signal=KILL", "error=EIO"])
def test_a_restore_that_fails_at_any_step_loses_nothing(tmp_path, crashed, monkeypatch, fault):
    """Everything is as it was, or the file is missing, which a start notices. Then run it again.

    strace kills the program at each system call that changes something, or makes the call fail.
    """
    folder = crashed()
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{folder}/plants.db")
    states = set()
    for name, number in trace_calls(tmp_path, "restore", folder / "backup.db", "--merge"):
        crashed()
        inject = f"--inject={name}:{fault}:when={number}"
        prefix = ["strace", "-o", "/dev/null", f"--trace={CALLS}", inject]
        done = start("restore", folder / "backup.db", "--merge", prefix=prefix)
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1
        assert (done.returncode == 0) == (done.stderr == "" and "KILL" not in fault)
        states.add(is_there := (folder / "plants.db").exists())
        assert not is_there or read_names(f"sqlite:///{folder}/plants.db") == CRASHED
        assert all_plants(folder) == CRASHED and (folder / "plants.db-lock").exists()
        if "KILL" in fault:
            succeed("restore", folder / "backup.db", "--merge")
            assert read_names(f"sqlite:///{folder}/plants.db") == CRASHED
            assert not [*folder.glob("plants.db-new*")]
    assert states == {True, False}


LOSSES = {
    "first page": lambda path: overwrite(path, 0),
    "emptied": lambda path: os.truncate(path, 0),
    "deleted": os.remove,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_restore_after_a_loss_can_be_killed_and_run_again(tmp_path, crashed, monkeypatch, loss):
    """What the killed run moved can't be restored as a backup: only --merge can read it."""
    folder = crashed()
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{folder}/plants.db")
    LOSSES[loss](folder / "plants.db")
    for name, number in trace_calls(tmp_path, "restore", folder / "backup.db", "--merge"):
        crashed()
        LOSSES[loss](folder / "plants.db")
        inject = f"--inject={name}:signal=KILL:when={number}"
        prefix = ["strace", "-o", "/dev/null", f"--trace={CALLS}", inject]
        start("restore", folder / "backup.db", "--merge", prefix=prefix)
        succeed("restore", folder / "backup.db", "--merge")
        assert read_names(f"sqlite:///{folder}/plants.db") == CRASHED
        assert not [*folder.glob("plants.db-new*")]


@pytest.mark.parametrize("fault", ["signal=KILL", "error=EIO"])
def test_a_backup_that_fails_at_any_step_leaves_no_half_copy(tmp_path, crashed, monkeypatch, fault):
    """What a kill leaves has another name, and the next backup removes it."""
    folder = crashed()
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{folder}/plants.db")
    for name, number in trace_calls(tmp_path, "backup"):
        crashed()
        inject = f"--inject={name}:{fault}:when={number}"
        done = start("backup", prefix=["strace", "-o", "/dev/null", f"--trace={CALLS}", inject])
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1
        for copy in backups(folder):
            assert read_names(f"sqlite:///{copy}") == CRASHED
        succeed("backup")
        assert sorted((folder / "backups").iterdir()) == backups(folder)
        assert read_names(f"sqlite:///{folder}/plants.db") == CRASHED


def test_a_restore_that_was_killed_twice_reads_what_each_run_has_moved(tmp_path, database, url):
    """The first run moved the file and the second its -wal. Folders of other files do not count."""
    backup = make(tmp_path / "backup.db", {1: "one"})
    for name, plants in (("20", {2: "stale"}), ("21", {3: "three"}), ("22", {})):
        (folder := tmp_path / f"replaced-{name}").mkdir()
        if plants:
            make(folder / "plants.db", plants)
    (tmp_path / "replaced-22" / "plants.db-wal").write_bytes(b"the first frames")
    (tmp_path / "replaced-23").mkdir()
    make(tmp_path / "replaced-23" / "other.db", {4: "four"})
    (tmp_path / "replaced-old").mkdir()
    make(tmp_path / "replaced-old" / "plants.db", {5: "five"})
    succeed("restore", backup, "--merge")
    assert read_names(url) == {1: "one", 3: "three"}
    succeed("restore", backup, "--merge")
    assert read_names(url) == {1: "one", 3: "three"}


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    (folder := tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("program", ["backup", "restore"])
def test_a_full_disk_changes_nothing(tmp_path, small_disk, program):
    """The program removes what it has begun to write."""
    make(small_disk / "plants.db", {1: "n" * 2_500_000})
    make(tmp_path / "backup.db", {2: "n" * 1_500_000})
    (small_disk / "plants.db-lock").touch()
    before = files(small_disk)
    arguments = [tmp_path / "backup.db", "--merge"] * (program == "restore")
    line = fail(program, *arguments, DATABASE_URL=f"sqlite:///{small_disk}/plants.db")
    assert "disk is full" in line or "disk I/O error" in line
    assert files(small_disk) == before


# Files that are damaged


def read_one(database: Path, number: int) -> list[Row]:
    """Return the plant with this id, in a list. The list is empty if the plant can't be read."""
    with contextlib.closing(sqlite3.connect(database)) as file, contextlib.suppress(sqlite3.Error):
        return file.execute("SELECT id, name, tag FROM plants WHERE id = ?", [number]).fetchall()
    return []


def store(database: Path, first: int, last: int) -> None:
    """Store plants with ids too far apart to try every one; some have long names."""
    long = "hex(zeroblob(IIF(id % 99, 20, 5000)))"
    run_sql(
        database,
        f"""WITH RECURSIVE new (id) AS (
            VALUES ({first}) UNION ALL SELECT id + 1 FROM new WHERE id < {last}
        ) INSERT INTO plants SELECT id * {2**50}, {long}, NULL FROM new""",
    )


@pytest.mark.parametrize("has_backup", [True, False])
def test_all_that_can_be_read_is_read_from_a_damaged_file(tmp_path, database, url, has_backup):
    """The test overwrites halves of some pages. The program prints the ids that it can't read."""
    store(make(database, {}), -3000, 2000)
    backup = make(tmp_path / "empty.db", {})
    if has_backup:
        succeed("backup")
        (backup,) = backups(tmp_path)
    old = set(read_rows(f"sqlite:///{backup}"))
    store(database, 2001, 3000)
    plants = read_rows(url)
    pages = database.stat().st_size // PAGE
    # Pages 2, 3, 62 and 90 hold the ends of long names, the others plants.
    for number in (2, 3, 20, 21, 60, 61, 62, 90, pages - 1):
        overwrite(database, number, PAGE // 2 if number == 60 else 0)
    readable = {row for row in plants if row in read_one(database, row[0])}
    assert readable < set(plants)
    assert f"{database} is damaged: " in fail("backup")
    printed = succeed("restore", backup, "--merge")
    rescued = read_rows(url)
    assert set(plants) & set(rescued) == old | readable
    assert f"an unknown number of plants before, {len(rescued)} now\n" in printed
    unread = [[*map(int, ids)] for ids in re.findall(r"ids (-?\d+) to (-?\d+) of the", printed)]
    for number in {row[0] for row in set(plants) - readable}:
        assert any(first <= number <= last for first, last in unread)
    assert all(one[1] + 1 < other[0] for one, other in pairwise(unread))
    # A range of ids is useful only if it is short.
    assert sum(last - first < 2**60 for first, last in unread) >= len(unread) - 1


def test_a_file_whose_table_has_another_name_is_no_loss(tmp_path, database, url):
    make(tmp_path / "backup.db", {1: "one"})
    run_sql(make(database, {2: "two"}), "ALTER TABLE plants RENAME TO old")
    succeed("restore", tmp_path / "backup.db", "--merge")
    assert read_names(url) == {1: "one", 2: "two"}


def test_a_file_without_a_table_is_not_damaged(tmp_path, database, url):
    """A first start that is killed may leave such a file."""
    make(tmp_path / "backup.db", {1: "one"})
    run_sql(database, "PRAGMA journal_mode = WAL")
    assert "damaged" not in succeed("restore", tmp_path / "backup.db", "--merge")


def test_plants_on_a_page_in_a_wrong_place_are_added(tmp_path, database, url):
    """A disk may write a page to the place of another one. A search by id misses its plants."""
    make(tmp_path / "backup.db", {})
    make(database, {number: "n" * 500 for number in range(300)})
    plants = read_rows(url)
    content = bytearray(database.read_bytes())
    one, other = slice(10 * PAGE, 11 * PAGE), slice(20 * PAGE, 21 * PAGE)
    content[one], content[other] = content[other], content[one]
    database.write_bytes(content)
    assert len([row for row in plants if row in read_one(database, row[0])]) < 300
    printed = succeed("restore", tmp_path / "backup.db", "--merge")
    assert "the old file is damaged: it may have more plants" in printed
    assert read_rows(url) == plants


FIRST_PAGES: dict[str, tuple[int | bytes, bytes]] = {  # Where the damage begins, and what is there.
    "other text": (0, b"x" * PAGE),
    "zeros": (0, bytes(PAGE)),
    "list of tables": (100, b"\xff" * 50),
    "format of the schema": (47, b"\x09"),
    "text that is not UTF-8": (b"plants (id", b"\xff"),
    "name of a column": (b"name TEXT", b"mame"),
}


@pytest.mark.parametrize("damage", FIRST_PAGES)
def test_a_file_whose_first_page_is_damaged_is_read_with_that_of_the_backup(
    tmp_path, database, url, damage
):
    """Nothing lists the other pages any more, but they are there. The old file is left as it is.

    The newest plant is in the -wal, which does not have the first page.
    """
    backup = make(tmp_path / "backup.db", {1: "of the backup", 999: "n"})
    make(database, {number: "n" * 500 for number in range(300)})
    insert = "INSERT INTO plants VALUES (300, 'n', NULL)"
    wal = ["PRAGMA journal_mode = WAL", insert, "PRAGMA wal_checkpoint(RESTART)"]
    crash(database, *wal, insert.replace("300", "301"))
    (look := tmp_path / "look").mkdir()
    for each in (database, f"{database}-wal"):
        shutil.copy(each, look)
    plants = read_names(f"sqlite:///{look}/plants.db")
    assert len(plants) == 302
    content = bytearray(database.read_bytes())
    where, text = FIRST_PAGES[damage]
    at = where if isinstance(where, int) else content.index(where)
    content[at : at + len(text)] = text
    database.write_bytes(content)
    printed = succeed("restore", backup, "--merge")
    assert read_names(url) == plants | {1: "of the backup", 999: "n"}
    assert "damaged" not in printed
    (replaced,) = tmp_path.glob("replaced-*/plants.db")
    assert replaced.read_bytes() == content
    assert not [*tmp_path.glob("plants.db-new*")]


@pytest.mark.parametrize("has_wal", [True, False])
def test_files_are_copied_from_a_disk_that_fails(tmp_path, database, url, has_wal):
    """The copies keep their owner. There may be no -wal. Typed again, the block changes nothing."""
    make(database, {1: "n"})
    os.chown(tmp_path, OTHER, OTHER)
    if has_wal:
        (tmp_path / "plants.db-wal").touch()
    (tmp_path / "disk").mkdir()
    commands = block("sh", "(umask 77; mkdir /mnt/disk/plants")
    type_here(tmp_path, commands.replace("/mnt/disk", f"{tmp_path}/disk"))
    copy = tmp_path / "disk" / "plants" / "plants.db"
    assert read_rows(f"sqlite:///{copy}") == read_rows(url)
    assert {each.stat().st_uid for each in (copy, copy.parent)} == {OTHER}
    assert copy.stat().st_mode & 0o777 == 0o600
    run_sql(copy, "INSERT INTO plants VALUES (2, 'stored since then', NULL)")
    with pytest.raises(AssertionError, match="File exists"):
        type_here(tmp_path, commands.replace("/mnt/disk", f"{tmp_path}/disk"))
    assert read_names(f"sqlite:///{copy}") == {1: "n", 2: "stored since then"}


def test_the_wal_says_which_pages_a_damaged_file_has(tmp_path, database, url):
    """The page with the list of all others is damaged in the file. The -wal has a newer one."""
    make(tmp_path / "backup.db", {})
    make(database, {number: "n" * 500 for number in range(300)})
    more = f"""WITH RECURSIVE new (id) AS (
        VALUES (300) UNION ALL SELECT id + 1 FROM new WHERE id < 350
    ) INSERT INTO plants SELECT id, '{"n" * 500}', NULL FROM new"""
    crash(database, "PRAGMA journal_mode = WAL", more)
    plants = read_rows(url)
    for page in (1, 10, 20):
        overwrite(database, page)
    # Look at a copy: the last connection to be closed would copy the -wal into the file.
    for suffix in ("", "-wal", "-shm"):
        shutil.copy(f"{database}{suffix}", tmp_path / f"copy.db{suffix}")
    readable = {row for row in plants if row in read_one(tmp_path / "copy.db", row[0])}
    assert 300 < len(readable) < 350
    succeed("restore", tmp_path / "backup.db", "--merge")
    assert set(read_rows(url)) == readable


@pytest.mark.parametrize("first", range(1, 40, 3))
def test_a_disk_that_can_read_only_some_pages_loses_nothing(tmp_path, database, url, first):
    """What it can't read is reported, or the restore is refused."""
    make(tmp_path / "backup.db", {-1: "n"})
    plants = {-1: "n", **dict.fromkeys(range(5000), "n" * 50)}
    make(database, plants)
    inject = f"--inject=pread64:error=EIO:when={first}+5"
    prefix = ["strace", "-o", "/dev/null", "-P", database, inject]
    done = start("restore", tmp_path / "backup.db", "--merge", prefix=prefix)
    assert all_plants(tmp_path) == plants and "Traceback" not in done.stderr
    unread = re.findall(r"ids (-?\d+) to (-?\d+) of the", done.stdout)
    lost = plants.keys() - read_names(url)
    assert all(any(int(low) <= each <= int(high) for low, high in unread) for each in lost)


@pytest.mark.parametrize("damage", [b"x" * 9999, b"", b"SQLite format 3\0" + b"\xff" * 9999])
def test_a_file_in_which_nothing_can_be_read_is_replaced(tmp_path, database, url, damage):
    """An empty file has no plants, and that is no error."""
    make(tmp_path / "backup.db", {1: "one"})
    database.write_bytes(damage)
    printed = succeed("restore", tmp_path / "backup.db", "--merge")
    assert ("ids -9223372036854775808 to 9223372036854775807 of" in printed) == bool(damage)
    assert read_names(url) == {1: "one"}
    (replaced,) = tmp_path.glob("replaced-*/plants.db")
    assert replaced.read_bytes() == damage


@pytest.mark.parametrize("options", [(), ("--merge",)])
@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "missing"])
def test_no_program_deletes_a_wal_that_has_lost_its_file(crashed, options, is_empty):
    """SQLite does, as soon as it opens an empty file. The newest plants may be in the -wal."""
    folder = crashed()
    wal = (folder / "plants.db-wal").read_bytes()
    (folder / "plants.db").write_bytes(b"") if is_empty else (folder / "plants.db").unlink()
    url = {"DATABASE_URL": f"sqlite:///{folder}/plants.db"}
    assert "plants.db is missing, not a file, empty" in fail("backup", **url)
    assert (folder / "plants.db-wal").read_bytes() == wal
    printed = succeed("restore", folder / "backup.db", *options, **url)
    assert ("2 plants of the old file were added" in printed) == bool(options)
    assert "an unknown number of plants before, " in printed
    assert "if it answered 503 before this, first read docs/emergencies.md" in printed
    assert read_names(url["DATABASE_URL"]) == (CRASHED if options else {1: "one"})
    (replaced,) = folder.glob("replaced-*/plants.db-wal")
    assert replaced.read_bytes() == wal


# The pages


DB = block("sh", "db=/var/lib/plants")


def type_here(folder: Path, *blocks: str, cwd: Path = ROOT) -> str:
    """Type blocks of a page into one shell, for a database in `folder`. Return what they print."""
    commands = "\n".join((DB, *blocks)).replace("/var/lib/plants", str(folder))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # As `activate` sets it.
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands.replace("/var/tmp", str(folder))], cwd=cwd,
        env={**os.environ, "PATH": path}, timeout=4 * PATIENCE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


COPIED = "plants-2026-11-28-030000.db"  # the backup in the page's examples


def test_the_page_shows_plants_backs_them_up_and_restores_them(serve, tmp_path, database, url):
    """The programs print what the page shows. The last one adds the plants of the old file."""
    server = serve()
    for number in (1, 2):
        assert server.post({"id": number, "name": "n"})[0] == STORED
    see = block("sh", "sqlite3 -readonly plants.db 'SELECT * FROM")
    assert type_here(tmp_path, see, cwd=tmp_path) == "2|n|\n1|n|\n2\n"
    printed = type_here(tmp_path, block("sh", "python deploy/backup.py"))
    shown = block("", "/var/lib/plants/backups").replace("/var/lib/plants", str(tmp_path))
    assert re.sub(r"\d+", "N", printed) == re.sub(r"\d+", "N", shown)
    (copy,) = backups(tmp_path)
    copy.rename(copy.with_name(COPIED))
    listed = type_here(tmp_path, block("sh", "ls -l /var/lib/plants/backups"))
    assert listed.endswith(f" {COPIED}\n")
    assert server.post({"id": 3, "name": "n"})[0] == STORED
    restore = block("sh", "python deploy/restore.py /var/lib/plants/backups")
    printed = type_here(tmp_path, restore)
    shown = block("", "/var/lib/plants/plants.db: 9914").replace("/var/lib/plants", str(tmp_path))
    assert re.sub(r"\d+", "N", printed) == re.sub(r"\d+", "N", shown)
    server.stop()
    assert sorted(read_names(url)) == [1, 2, 3]
    assert "which is new" in type_here(tmp_path, block("sh", "PLANTS_TOKENS=unused"))
    merge = command("python deploy/restore.py BACKUP").replace("BACKUP", f"{tmp_path}/empty.db")
    assert f"{database}: 3 plants before, 3 now" in type_here(tmp_path, merge)


FIND = block("sh", "find /proc/[0-9]*/fd -lname '*/plants.db*'")


@pytest.mark.parametrize("other", [{}, {10**6: "n"}], ids=["gone", "replaced"])
def test_deleted_files_are_copied_from_the_workers_and_restored(
    serve, database, tmp_path, url, other
):
    """Under load, and after a worker was replaced: every plant that got a 200 is there.

    So are those of a file that has taken the place of the deleted one.
    """
    with Writers((server := serve()).port) as clients:
        clients.wait_for_more()
        if other:  # The -wal of the deleted file is still there.
            os.replace(make(tmp_path / "other.db", other), database)
        else:
            for file in tmp_path.glob("plants.db*"):
                file.unlink()
        wait_until(lambda: server.health() == 503)
        # Other processes of this machine may end while `find` looks at them.
        found = type_here(tmp_path, f"({FIND}) || true")
        copy = block("sh", "mkdir -m 700 /var/tmp/rescued")
        for example, name in (("8069/fd/11", ""), ("8069/fd/12", "-wal")):
            pattern = rf"(?m)^(/proc/(\d+)/fd/\d+) {database}{name}(?: \(deleted\))?$"
            descriptor, holder = re.search(pattern, found).groups()
            copy = copy.replace(f"/proc/{example}", descriptor)
        os.kill(next(pid for pid in server.workers() if pid != int(holder)), signal.SIGKILL)
        server.workers()
        wait_until(lambda: server.health() == 503)
        assert database.exists() == bool(other)
        if other:
            type_here(tmp_path, command('mv -n "$db/plants.db" "$db/new.db"'))
        before = "an unknown number of plants" if other else "there was no file"
        assert f"{database}: {before} before, " in type_here(tmp_path, copy)
        if other:
            type_here(tmp_path, command('python deploy/restore.py "$db/new.db" --merge'))
    server.stop()
    assert serve().health() == 200
    assert (clients.acknowledged | other).items() <= read_names(url).items()
    assert f"{database} (deleted)" not in type_here(tmp_path, f"({FIND}) || true")


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_restart_after_a_restore_is_safe_if_the_files_of_the_workers_were_kept(
    serve, database, tmp_path, is_deleted
):
    """A restore over a deleted file keeps nothing, even if it is run twice: only workers do."""
    assert serve().post({"id": 1, "name": "n"})[0] == STORED
    succeed("backup")
    (copy,) = backups(tmp_path)
    kept = block("sh", 'find -L "$db"/replaced-*')
    found = type_here(tmp_path, f"({FIND}) || true")
    for example, name in (("8069/fd/11", ""), ("8069/fd/12", "-wal")):
        descriptor = re.search(rf"(?m)^(/proc/\d+/fd/\d+) {database}{name}$", found)[1]
        kept = kept.replace(f"/proc/{example}", descriptor)
    if is_deleted:
        for file in tmp_path.glob("plants.db*"):
            file.unlink()
    for _ in range(2):
        succeed("restore", copy, "--merge")
    assert type_here(tmp_path, kept).count("\n") == (0 if is_deleted else 2)


def test_the_plants_of_a_file_that_was_emptied_are_in_its_wal(serve, database, tmp_path, url):
    """Under load: the service notices it at the next commit, and need not be stopped."""
    empty = make(tmp_path / "empty.db", {})
    with Writers((server := serve()).port) as clients:
        clients.wait_for_more()
        os.truncate(database, 0)
        wait_until(lambda: server.health() == 503)
        succeed("restore", empty, "--merge")
    server.stop()
    assert clients.acknowledged.items() <= read_names(url).items()
    assert serve().health() == 200


def test_a_program_that_locks_the_file_is_found_and_ended(serve, database, tmp_path):
    """The service then recovers by itself."""
    server = serve()
    assert server.post(MONSTERA)[0] == STORED
    look = block("sh", "lslocks")
    with subprocess.Popen(["sqlite3", database], stdin=subprocess.PIPE, text=True) as program:
        # A worker may just be writing, at its start. Have sqlite3 wait for its lock, which it does
        # not do by default.
        program.stdin.write(".timeout 30000\nBEGIN IMMEDIATE;\n")
        program.stdin.flush()
        line = rf"(?m)^sqlite3 +{program.pid} WRITE +{database}-shm$"
        wait_until(lambda: re.search(line, type_here(tmp_path, f"({look}) || true")))
        wait_until(lambda: server.health() == 503)
        type_here(tmp_path, block("sh", "kill").replace("5162", str(program.pid)))
    assert server.post(MONSTERA)[0] == STORED
    assert server.health() == 200


def test_after_a_crash_sqlite3_copies_the_wal_into_the_file(serve, tmp_path):
    """A large one would take longer than a start waits."""
    with serve() as server:
        assert server.post(MONSTERA)[0] == STORED
    assert (wal := tmp_path / "plants.db-wal").stat().st_size
    checkpoint = command('flock "$db/plants.db-lock" sqlite3')
    assert type_here(tmp_path, checkpoint) == "0|0|0\n"
    assert not wal.exists() and b"Monstera" in (tmp_path / "plants.db").read_bytes()


def test_a_full_disk_has_room_again_without_a_restart(serve, small_disk):
    """The page's commands keep the largest three backups, and of equal ones the newer."""
    server = serve(DATABASE_URL=f"sqlite:///{small_disk}/plants.db")
    assert server.post(MONSTERA)[0] == STORED
    (folder := small_disk / "backups").mkdir()
    for number in range(6):
        (folder / f"plants-{number}.db").write_bytes(bytes(2**18 + number // 2))
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(2**12))
    big = {"id": 8, "name": "n" * 10_000}
    wait_until(lambda: server.post({**big, "id": time.monotonic_ns()})[0] == 503)
    assert "100%" in type_here(small_disk, block("sh", 'df -h "$db"'))
    type_here(small_disk, block("sh", "stat -c '%s %n'"))
    assert sorted(each.name for each in folder.glob("plants-*.db")) == [
        f"plants-{number}.db" for number in (3, 4, 5)
    ]
    asked = block("sh", "curl http://127.0.0.1:8000/healthz").replace("8000", str(server.port))
    wait_until(lambda: '{"status": "ok"}' in type_here(small_disk, asked))
    assert server.post(big)[0] == STORED


def test_files_of_root_are_given_to_the_owner_of_the_folder(tmp_path):
    """Root has run a command there."""
    for name in ("plants.db", "plants.db-wal"):
        (tmp_path / name).touch()
    os.chown(tmp_path, OTHER, OTHER)
    type_here(tmp_path, block("sh", 'chown --reference="$db"'))
    assert {each.stat().st_uid for each in tmp_path.iterdir()} == {OTHER}


# PostgreSQL

TEXTS = ["", "\\.", "a\n\\.\nb", "\r\n", "\t", '"', "'", "NULL", "\\N", "é\x7f🌵"]
PLANTS = [Plant(-(2**63), "n"), *map(Plant, range(10), TEXTS, TEXTS), Plant(2**63 - 1, "n")]
THERE, BACK = block("sh", "# From SQLite to PostgreSQL"), block("sh", "# From PostgreSQL to SQLite")


def test_a_server_is_set_up(serve, tmp_path, postgresql):
    """The service stores plants with a role and a database of its own, and the page shows them."""
    secret = "a-secret"
    commands = f"admin='{postgresql.url()}' password={secret}", block("sh", 'psql "$admin" -c "CR')
    type_here(tmp_path, *commands, commands[0], block("sh", 'psql "$admin" -c \'ALTER ROLE'))
    url = f"postgresql://plants:{secret}@/plants?host={postgresql.folder}"
    with serve(DATABASE_URL=url) as server:
        assert server.post(MONSTERA)[0] == STORED
    see = block("sh", 'psql "$server" -c \'SELECT * FROM plants')
    assert "7 | Monstera | indoor" in type_here(tmp_path, f"server='{url}'", see)
    find = "SELECT setconfig FROM pg_db_role_setting JOIN pg_roles ON oid = setrole"
    assert postgresql.execute(f"{find} WHERE rolname = 'plants'") == [
        (["log_min_error_statement=panic", "log_error_verbosity=terse"],)
    ]
    postgresql.execute("DROP DATABASE plants WITH (FORCE)")
    postgresql.execute("DROP ROLE plants")


def test_a_move_changes_no_plant(tmp_path, open_storage, url, postgresql_url):
    """They move there and back: once into a new file, and once into one that lacks some plants."""
    storage = open_storage()
    for each in PLANTS:
        storage.add(each)
    server = f"server='{postgresql_url}'"
    for _ in range(2):
        assert "(0 rows)" in type_here(tmp_path, server, THERE, cwd=tmp_path)
    assert read_rows(postgresql_url) == PLANTS
    (new := tmp_path / "new").mkdir()
    type_here(tmp_path, server, BACK, cwd=new)
    assert (new / "moved.db").stat().st_mode & 0o777 == 0o600
    assert read_rows(f"sqlite:///{new}/moved.db") == PLANTS
    restore = command("python deploy/restore.py FOLDER").replace("FOLDER", str(new)).split()[2:]
    succeed("restore", *restore, cwd=new, DATABASE_URL=f"sqlite:///{new}/plants.db")
    open_storage(f"sqlite:///{new}/plants.db").check(30)  # The service accepts the file.
    storage.close()
    run_sql(tmp_path / "plants.db", "DELETE FROM plants WHERE id > 3")
    succeed("restore", *restore, cwd=new)
    assert read_rows(url) == PLANTS


def test_a_move_lists_the_ids_that_have_another_plant_there(tmp_path, open_storage, postgresql_url):
    """Both databases have a plant with the id 900, and one of these has a tag."""
    server = f"server='{postgresql_url}'"
    old, new = open_storage(), open_storage(postgresql_url)
    old.add(Plant(1, "n", "t"))
    type_here(tmp_path, server, THERE, cwd=tmp_path)
    old.add(Plant(900, "n"))
    new.add(Plant(900, "n", "t"))
    assert re.search(r"-\n +900\n\(1 row\)", type_here(tmp_path, server, THERE, cwd=tmp_path))
    type_here(tmp_path, server, BACK, cwd=tmp_path)
    assert "not added: 900\n" in succeed("restore", "moved.db", "--merge", cwd=tmp_path)


def test_postgresql_is_restored(serve, tmp_path, postgresql_url):
    """The operator stops the service first, and adds what was stored after the dump."""
    server = f"server='{postgresql_url}'"
    with serve(DATABASE_URL=postgresql_url) as service:
        assert service.post({"id": 1, "name": "n"})[0] == STORED
        assert type_here(tmp_path, server, block("sh", "# A dump"), cwd=tmp_path) == "ok\n"
        assert service.post({"id": 3, "name": "n"})[0] == STORED
        service.stop()
    (name,) = (tmp_path / "backups").iterdir()
    assert name.stat().st_mode & 0o777 == 0o600
    add = block("sh", 'psql "$server" -c "INSERT')
    restore = (f"{server} dump={name}", block("sh", "replaced=replaced_"), add)
    drop = command('psql "$server" -c "DROP SCHEMA')
    assert "\n     1\n" in type_here(tmp_path, *restore, drop)
    assert read_names(postgresql_url) == {1: "n", 3: "n"}
    with serve(DATABASE_URL=postgresql_url) as service:
        assert service.post({"id": 1, "name": "n"})[0] == STORED
        service.stop()  # A worker that is just starting would create the table below.
    # What the page shows for a pg_restore that is newer than the server.
    again = block("sh", "pg_restore --file=- ")
    type_here(tmp_path, restore[0], "psql $server -c 'DROP TABLE plants'", again)
    assert read_names(postgresql_url) == {1: "n"}


def test_a_restore_of_postgresql_that_fails_can_be_undone(tmp_path, open_storage, postgresql_url):
    """A dump that can't be read is refused before anything is moved."""
    open_storage(postgresql_url).add(Plant(1, "n"))
    (tmp_path / "bad.dump").write_text("no dump")
    server = f"server='{postgresql_url}' dump=bad.dump"
    with pytest.raises(AssertionError):
        type_here(tmp_path, server, block("sh", "replaced=replaced_"), cwd=tmp_path)
    assert read_names(postgresql_url) == {1: "n"}
    move = "ALTER TABLE plants SET SCHEMA replaced_1"
    psql = f"psql '{postgresql_url}' -c 'CREATE SCHEMA replaced_1' -c '{move}'"
    back = command('psql "$server" -c "ALTER TABLE $replaced.plants')
    type_here(tmp_path, server, "replaced=replaced_1", psql, back)
    assert read_names(postgresql_url) == {1: "n"}


def test_a_table_that_was_moved_is_found_and_moved_back(serve, tmp_path, postgresql_url):
    """The service recovers by itself. It has created no other table."""
    server, moved = f"server='{postgresql_url}'", "replaced_1732789200"
    # With a second worker, that one might just be starting, and create a table.
    service = serve(DATABASE_URL=postgresql_url, WEB_CONCURRENCY="1")
    assert service.post(MONSTERA)[0] == STORED
    move = f"-c 'CREATE SCHEMA {moved}' -c 'ALTER TABLE plants SET SCHEMA {moved}'"
    type_here(tmp_path, f"psql '{postgresql_url}' {move}")
    wait_until(lambda: service.post(MONSTERA)[0] == 503)
    look = block("sh", 'psql "$server" -c "SELECT schemaname')
    assert re.search(rf"{moved} +\| plants", type_here(tmp_path, server, look))
    words = re.search("The log says `(.+?)` or `(.+?)`", SENTENCES).groups()
    assert any(each.replace('"', r"\"") in service.out for each in words)
    type_here(tmp_path, server, block("sh", 'psql "$server" -c "ALTER TABLE replaced_'))
    wait_until(lambda: service.post(MONSTERA)[0] == STORED)
    assert read_names(postgresql_url) == {7: "Monstera"}
