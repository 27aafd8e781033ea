"""The storage on a SQLite file: what is refused at start, what is durable, who may write."""

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import Plant, SQLiteEngine, StartRefused, Storage, Unavailable
from tests.support.locks import can_lock, turn_taken
from tests.support.server import PATIENCE, wait_until

FORK = multiprocessing.get_context("fork")


def open_storage(path: Path) -> Storage:
    """A storage that gives up soon, not looked at yet."""
    return Storage(SQLiteEngine(str(path), "", write_limit=0.2), wait_limit=0.5)


@pytest.fixture
def url(database: Path) -> str:
    """SQLite alone."""
    return f"sqlite:///{database}"


@pytest.fixture
def storage(database: Path) -> Iterator[Storage]:
    """A storage that gives up soon."""
    storage = open_storage(database)
    storage.check_start()
    yield storage
    storage.close()


def run_as_nobody(function: Callable[[], None]) -> None:
    """Run a function in a process that file permissions apply to, unlike root's."""

    def child() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        function()

    process = FORK.Process(target=child)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own can't."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


# the file


def test_the_file_is_marked_as_ours_and_strict(storage, database):
    """application_id, user_version, WAL, a STRICT table with id as its key."""
    storage.check_start()
    connection = sqlite3.connect(database)
    assert connection.execute("PRAGMA application_id").fetchone() == (0x504C4E54,)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with pytest.raises(sqlite3.IntegrityError, match="cannot store BLOB"):
        connection.execute("INSERT INTO plants VALUES (7, x'00', NULL)")
    connection.close()


def test_every_connection_syncs_every_commit(storage):
    """synchronous=FULL (2), fullfsync and a busy timeout belong to a connection, not the file."""
    storage.check_start()
    for _ in range(2):
        pragmas = {}
        for name in ("synchronous", "fullfsync", "busy_timeout"):
            connection = storage._engine._connection
            pragmas[name] = connection.execute(f"PRAGMA {name}").fetchone()[0]
        assert pragmas == {"synchronous": 2, "fullfsync": 1, "busy_timeout": 200}
        storage.close()
        storage.check_start()


def test_a_url_can_have_any_path(tmp_path, monkeypatch):
    """Three slashes: relative to the working directory; four: absolute; %20 is a space."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my data").mkdir()
    for url in ("sqlite:///a.db", f"sqlite:///{tmp_path}/b.db", "sqlite:///my%20data/c.db"):
        storage = Storage.from_url(url)
        storage.check_start()
        storage.add(Plant(7, "Monstera"))
        storage.close()
    assert {path.name for path in tmp_path.glob("**/*.db")} == {"a.db", "b.db", "c.db"}


def test_a_file_that_is_no_database_is_refused(database):
    """It stays as it is."""
    database.write_bytes(b"Dear diary, " * 1000)
    with pytest.raises(StartRefused, match=r"plants\.db: file is not a database"):
        open_storage(database).check_start()
    assert database.read_bytes() == b"Dear diary, " * 1000


def test_another_programs_database_is_refused(database):
    """With or without an application_id; nothing in it is changed."""
    for statement in ("CREATE TABLE plants (id)", "PRAGMA application_id = 7"):
        database.unlink(missing_ok=True)
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute(statement)
        connection.close()
        before = database.read_bytes()
        with pytest.raises(StartRefused, match="another program's"):
            open_storage(database).check_start()
        assert database.read_bytes() == before


def test_a_newer_versions_database_is_refused(storage, database):
    """An older version of the service does not know what it would break."""
    storage.check_start()
    storage.close()
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(StartRefused, match="newer version"):
        storage.check_start()


def test_a_damaged_database_is_refused(storage, database):
    """A file that SQLite can open but not read."""
    storage.check_start()
    storage.close()
    with database.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 3000)
    with pytest.raises(StartRefused, match=r"plants\.db: .*malformed"):
        storage.check_start()


def test_a_folder_that_is_missing_is_refused(tmp_path):
    """One line that names the file."""
    with pytest.raises(StartRefused, match=r"none/plants\.db"):
        open_storage(tmp_path / "none" / "plants.db").check_start()


def test_a_folder_as_the_file_is_refused(tmp_path):
    """One line that names it."""
    with pytest.raises(StartRefused, match="is not a file"):
        open_storage(tmp_path).check_start()


@pytest.mark.parametrize("read_only", ["folder", "file"])
def test_what_cannot_be_written_is_refused(open_folder, read_only):
    """A look at whether the storage can write tries to: BEGIN IMMEDIATE would succeed."""
    database = open_folder / "plants.db"
    if read_only == "file":
        run_as_nobody(lambda: open_storage(database).check_start())
        database.chmod(0o444)
    else:
        open_folder.chmod(0o555)

    def check() -> None:
        with pytest.raises(StartRefused, match=r"plants\.db: "):
            open_storage(database).check_start()

    run_as_nobody(check)


def test_a_folder_that_becomes_read_only_loses_nothing(open_folder):
    """The files are there and can be written; what can't be made any more is not needed."""
    folder = open_folder / "own"
    database = folder / "plants.db"

    def work() -> None:
        folder.mkdir()
        storage = open_storage(database)
        storage.check_start()
        folder.chmod(0o555)
        for number, opened in enumerate([storage, open_storage(database)]):
            opened.add(Plant(number, "n"))
            opened.check()
        os._exit(0)

    run_as_nobody(work)
    folder.chmod(0o777)
    with contextlib.closing(open_storage(database)) as later:
        assert list(later.rows()) == [Plant(0, "n"), Plant(1, "n")]


def test_a_locked_file_is_no_reason_not_to_start(storage, database):
    """It is "not now": the start goes on, requests are told so, and later they are served."""
    storage.check_start()
    storage.close()
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    storage.check_start()
    with pytest.raises(Unavailable, match="locked"):
        storage.add(Plant(7, "Monstera"))
    with pytest.raises(Unavailable, match="locked"):
        storage.check()
    other.execute("ROLLBACK")
    other.close()
    storage.add(Plant(7, "Monstera"))
    assert list(storage.rows()) == [Plant(7, "Monstera")]


def test_a_file_that_is_locked_for_a_moment_is_waited_for(database):
    """Another program's transaction delays an answer, no more."""
    storage = Storage.from_url(f"sqlite:///{database}", wait_limit=PATIENCE)
    storage.check_start()
    other = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.1, other.execute, ["ROLLBACK"]).start()
    storage.add(Plant(7, "Monstera"))
    other.close()
    storage.close()


def test_a_link_leads_to_the_file(tmp_path, stored):
    """SQLite keeps its other files beside the file, not beside the link."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "plants.db").symlink_to(tmp_path / "disk" / "plants.db")
    storage = open_storage(tmp_path / "plants.db")
    storage.check_start()
    storage.add(Plant(7, "Monstera"))
    assert stored() == [(7, "Monstera", None)]
    assert (tmp_path / "disk" / "plants.db-wal").exists()
    storage.close()


@pytest.mark.parametrize("left", ["nothing", "an empty file", "an empty database"])
def test_only_a_start_makes_a_new_file(storage, database, left):
    """A worker that opens later never stores into another file than was there at the start.

    Nor does a start take an empty file for a new one: it may be what is left of an old one.
    """
    storage.close()
    database.unlink()
    if left == "an empty file":
        database.touch()
    elif left == "an empty database":
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
    before = database.exists() and database.read_bytes()
    for look in (lambda: storage.add(Plant(7, "Monstera")), storage.check):
        with pytest.raises(Unavailable, match=r"no such file|is empty"):
            look()
    assert before == (database.exists() and database.read_bytes())
    if left == "an empty file":
        with pytest.raises(StartRefused, match="is empty"):
            storage.check_start()
        database.unlink()
    storage.check_start()
    storage.add(Plant(7, "Monstera"))


# what is stored


def test_who_is_told_that_a_plant_is_there_already_can_rely_on_it(storage, database, tmp_path):
    """A plant that a killed process wrote but never synced is synced before it is answered for.

    Its frames are in the WAL, where the next process finds them. That they came into the main
    file, which no power cut takes back, shows that both files were synced.
    """
    storage.add(Plant(1, "one"))
    storage.close()

    def ids_in_the_main_file() -> list[int]:
        copy = tmp_path / "copy.db"  # by another process: one's own would undo SQLite's locks
        subprocess.run(["cp", database, copy], check=True)
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            return [row[0] for row in connection.execute("SELECT id FROM plants")]

    write_and_die(database, Plant(2, "two"))
    assert ids_in_the_main_file() == [1]
    storage.add(Plant(2, "two"))
    assert ids_in_the_main_file() == [1, 2]


def test_a_plant_does_not_depend_on_a_wal_whose_sync_failed(storage, database, tmp_path):
    """A sync that failed can leave in memory what never comes to the disk, and yet is read back.

    Here the disk has, of the WAL that a killed process left, only what was there before. A power
    cut later that is played into the file, unless another WAL has taken its place.
    """
    storage.close()
    write_and_die(database, Plant(1, "one"))
    on_the_disk = Path(f"{database}-wal").read_bytes()
    write_and_die(database, Plant(2, "two"))
    storage.add(Plant(2, "two"))
    after = tmp_path / "after.db"
    subprocess.run(["cp", database, after], check=True)
    wal = Path(f"{database}-wal").read_bytes()
    Path(f"{after}-wal").write_bytes(on_the_disk if wal.startswith(on_the_disk) else wal)
    with contextlib.closing(sqlite3.connect(after)) as connection:
        assert connection.execute("SELECT id FROM plants").fetchall() == [(1,), (2,)]


def write_and_die(database: Path, plant: Plant) -> None:
    """Store a plant as a process does that is killed between the write and its sync."""

    def work() -> None:
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("INSERT INTO plants VALUES (?, ?, ?)", plant)
        os._exit(0)

    process = FORK.Process(target=work)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0


# the turn


def test_a_folder_that_goes_away_is_unavailable(tmp_path):
    """What would refuse a start is, later, one more thing to wait for."""
    folder = tmp_path / "folder"
    storage = open_storage(folder / "plants.db")
    for look in (lambda: storage.add(Plant(7, "Monstera")), storage.check):
        with pytest.raises(Unavailable, match="its directory: No such file"):
            look()
    folder.mkdir()
    with pytest.raises(Unavailable, match="no such file"):
        storage.add(Plant(7, "Monstera"))
    storage.check_start()
    storage.add(Plant(7, "Monstera"))
    storage.close()


def test_a_turn_that_another_process_keeps_ends_in_time(storage, tmp_path, stored):
    """The wait is bounded, though flock's is not, and nothing was stored."""
    storage.check_start()
    with turn_taken(tmp_path):
        with pytest.raises(Unavailable, match="busy"):
            storage.add(Plant(7, "Monstera"))
        with pytest.raises(Unavailable, match="busy"):
            storage.check()
    assert stored() == []
    storage.add(Plant(7, "Monstera"))
    assert stored() == [(7, "Monstera", None)]


def test_a_turn_that_is_given_back_is_taken(storage, tmp_path, stored):
    """Who waits for the turn gets it."""
    storage.check_start()
    storage._wait_limit = storage._group._turn_limit = 2 * PATIENCE
    wanted = threading.Event()
    with turn_taken(tmp_path):
        submit = storage._engine._turn._thread.submit

        def observed(*arguments: object) -> object:
            wanted.set()
            return submit(*arguments)

        storage._engine._turn._thread.submit = observed
        adder = threading.Thread(target=storage.add, args=(Plant(7, "Monstera"),))
        adder.start()
        assert wanted.wait(PATIENCE)
    adder.join(PATIENCE)
    assert stored() == [(7, "Monstera", None)]


def test_the_connection_is_not_closed_under_a_writer(storage):
    """The turn keeps the threads of a process apart too: the one that ends it, for example."""
    storage.add(Plant(1, "one"))
    engine = storage._engine
    is_writing, may_end = threading.Event(), threading.Event()

    def write() -> None:
        with engine.turn(PATIENCE):
            is_writing.set()
            may_end.wait(PATIENCE)
            engine.insert([Plant(2, "two")])

    writer = threading.Thread(target=write)
    writer.start()
    assert is_writing.wait(PATIENCE)
    storage.close()  # gives up after the write limit
    assert engine._connection is not None
    may_end.set()
    writer.join(PATIENCE)
    storage.close()
    assert engine._connection is None


def test_a_process_can_end_while_another_keeps_the_turn(storage, database, tmp_path):
    """What waits for the lock, and can't be stopped from waiting, is not waited for."""
    storage.close()

    def work() -> None:
        other = open_storage(database)
        with pytest.raises(Unavailable, match="busy"):
            other.add(Plant(7, "Monstera"))

    with turn_taken(tmp_path):
        process = FORK.Process(target=work)
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0


def test_a_wait_that_was_given_up_frees_no_turn_of_another(storage, tmp_path):
    """When the turn comes after all, it is given back, and the next one is not disturbed."""
    storage.check_start()
    with turn_taken(tmp_path), pytest.raises(Unavailable, match="busy"):
        storage.add(Plant(1, "one"))
    for number in range(2, 50):
        with storage._engine.turn(PATIENCE):
            lock = os.open(tmp_path, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(lock)
        storage.add(Plant(number, "n"))


def test_a_turn_that_comes_too_late_is_given_back(storage, tmp_path):
    """Who has given up waiting does not keep the others waiting."""
    storage.check_start()
    with turn_taken(tmp_path), pytest.raises(Unavailable, match="busy"):
        storage.add(Plant(1, "one"))
    lock = os.open(tmp_path, os.O_RDONLY)
    wait_until(lambda: can_lock(lock))
    os.close(lock)


def test_a_killed_process_leaves_no_turn_behind(storage, tmp_path):
    """The lock dies with its holder."""

    def take_and_die() -> None:
        lock = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os._exit(9)

    process = FORK.Process(target=take_and_die)
    process.start()
    process.join(PATIENCE)
    storage.add(Plant(7, "Monstera"))


def test_opening_and_closing_wait_for_the_turn(tmp_path, database):
    """Both can checkpoint, which must not meet another process's write."""
    storage = open_storage(database)
    with turn_taken(tmp_path):
        storage.check_start()
        assert not database.exists()
    storage.check_start()
    with turn_taken(tmp_path):
        storage.close()
        assert Path(f"{database}-wal").exists()
    storage.close()
    assert not Path(f"{database}-wal").exists()


# a file that is taken away


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_no_plant_is_answered_for_into_the_void(storage, database, caplog, suffix, change):
    """If the file or what belongs to it goes away under the service, nothing is stored any more."""
    storage.add(Plant(1, "one"))
    file = Path(f"{database}{suffix}")
    kept = file.with_name("kept")
    if change == "replaced":
        subprocess.run(["cp", file, kept], check=True)
        os.replace(kept, file)
    else:
        os.rename(file, kept)
    for plant in (Plant(1, "one"), Plant(2, "two")):
        with pytest.raises(Unavailable, match="deleted or replaced"):
            storage.add(plant)
    with pytest.raises(Unavailable, match="deleted or replaced"):
        storage.check()
    if change == "deleted":
        os.rename(kept, file)
        with pytest.raises(Unavailable, match="restart"):
            storage.add(Plant(2, "two"))
    assert caplog.text.count("restart it") == 1


def test_what_was_moved_away_is_not_written_any_more(storage, database, stored):
    """The inodes are compared before the commit, so that a backup stays what it is."""
    storage.add(Plant(1, "one"))
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{database}{suffix}", f"{database}.moved{suffix}")
    with pytest.raises(Unavailable, match="deleted or replaced"):
        storage.add(Plant(2, "two"))
    storage.close()
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(f"{database}.moved{suffix}"):
            os.rename(f"{database}.moved{suffix}", f"{database}{suffix}")
    assert stored() == [(1, "one", None)]


def test_no_other_file_is_taken_up_later(database, stored):
    """SQLite would play the -wal of the old file into the one that was put in its place."""
    storage = open_storage(database)
    identity = storage.check_start()
    storage.add(Plant(1, "one"))
    other = open_storage(database.with_name("other.db"))
    other.check_start()
    other.add(Plant(2, "two"))
    other.close()
    os.replace(database.with_name("other.db"), database)
    worker = Storage.from_url(f"sqlite:///{database}", identity)
    with pytest.raises(Unavailable, match="replaced under the service"):
        worker.add(Plant(3, "three"))
    storage.close()
    for suffix in ("-wal", "-shm"):
        os.unlink(f"{database}{suffix}")
    assert stored() == [(2, "two", None)]


def test_a_file_replaced_while_it_is_opened_is_noticed(storage, database):
    """The connection has the old file, and its name leads to another one."""
    storage.add(Plant(1, "one"))
    storage.close()
    prepare = storage._engine._prepare

    def replace_then_prepare(*arguments: object, **options: object) -> None:
        prepare(*arguments, **options)
        subprocess.run(["cp", database, f"{database}.copy"], check=True)
        os.replace(f"{database}.copy", database)

    storage._engine._prepare = replace_then_prepare
    with pytest.raises(Unavailable, match="replaced under the service"):
        storage.add(Plant(2, "two"))


def test_a_file_replaced_during_the_commit_is_noticed(storage, database):
    """The inodes are compared after the commit as well as before it."""
    storage.add(Plant(1, "one"))
    connection = storage._engine._connection

    class Replacing:
        def execute(self, *arguments: object) -> sqlite3.Cursor:
            cursor = connection.execute(*arguments)
            os.rename(database, database.with_name("elsewhere"))
            return cursor

    storage._engine._connection = Replacing()
    with pytest.raises(Unavailable, match="deleted or replaced"):
        storage.add(Plant(2, "two"))
    storage._engine._connection = connection


def test_a_look_at_the_storage_writes(storage, database):
    """It changes nothing, but what could not be written would be noticed."""
    storage.add(Plant(1, "one"))
    wal = Path(f"{database}-wal")
    before = wal.stat().st_size
    storage.check()
    assert wal.stat().st_size > before
    assert list(storage.rows()) == [Plant(1, "one")]


def test_the_wal_does_not_grow_for_ever(storage, database):
    """It begins anew every few megabytes; after a reader that kept it from that, it shrinks."""
    wal, numbers = Path(f"{database}-wal"), itertools.count()

    def load(megabytes: int) -> int:
        sizes = []
        for _ in range(4 * megabytes):
            storage.add_all([Plant(next(numbers), "x" * 1024) for _ in range(250)])
            sizes.append(wal.stat().st_size)
        return max(sizes)

    assert load(20) < 2**23
    with contextlib.closing(sqlite3.connect(database)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT max(id) FROM plants").fetchone()
        assert load(20) > SQLiteEngine.WAL_LIMIT
    load(1)
    assert wal.stat().st_size <= SQLiteEngine.WAL_LIMIT
    assert load(20) <= SQLiteEngine.WAL_LIMIT


# dump and load from the shell are in tests/test_transfer.py
