"""The engine for SQLite: which file is taken, what is durable, and who may write when."""

import contextlib
import fcntl
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from engines.sqlite import SQLiteEngine
from plant import Plant
from storage import Rejected, Unavailable
from tests.support.server import PATIENCE, memory, stops_in_one_line
from tests.support.storage import lock_held, locked, queue_up, read_rows, run_in_processes

ONE, TWO = Plant(1, "one"), Plant(2, "two")
# How the version before made its file, and how this one must.
TABLE = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT"
PRAGMAS = "journal_mode = WAL; PRAGMA application_id = 0x504C4E54; PRAGMA user_version = 1"
SCHEMA = f"PRAGMA {PRAGMAS}; {TABLE}"


def execute(database: Path, script: str) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executescript(script)


def write_and_die(database: Path, plant: Plant) -> None:
    """Store a plant as a process does that is killed between the write and its sync."""

    def work() -> None:
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("INSERT INTO plants (id, name) VALUES (?, ?)", plant[:2])
        os._exit(0)

    run_in_processes(work)


@pytest.fixture
def engine(database) -> Iterator[SQLiteEngine]:
    """An engine of a file that is not there yet."""
    with contextlib.closing(SQLiteEngine(str(database))) as engine:
        yield engine


def test_a_new_file_is_marked_as_ours_and_for_its_user_alone(engine, database):
    """Who can open a file, even to read it, can lock it and keep the service waiting."""
    with engine.locked():
        engine.insert([ONE], 100)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in database.parent.iterdir()}
    assert modes == {f"plants.db{suffix}": 0o600 for suffix in ("", "-lock", "-shm", "-wal")}
    with contextlib.closing(sqlite3.connect(database)) as connection:
        ((made,),) = connection.execute("SELECT sql FROM sqlite_schema")
        assert made.startswith(TABLE.removesuffix(") STRICT")) and made.endswith(") STRICT")
        for name, value in ("application_id", 0x504C4E54), ("user_version", 1):
            assert connection.execute(f"PRAGMA {name}").fetchone() == (value,)


@pytest.mark.parametrize("content", ["", "PRAGMA application_id = 7; VACUUM", SCHEMA])
def test_the_description_says_once_that_a_file_is_new(engine, database, content):
    """It has no table then. Whoever has mistyped a path sees it."""
    database.touch()
    execute(database, content)
    for plant in ONE, TWO:
        engine.insert([plant], 100)
    is_new = content != SCHEMA
    assert engine.description.partition(f" in {database}")[2] == ", which is new" * is_new


REFUSED = {
    "text": (b"Dear diary, " * 1000, "file is not a database"),
    "no id": (TABLE, "is another program's; correct DATABASE_URL"),
    "another id": (f"{SCHEMA}; PRAGMA application_id = 7", "is another program's"),
}


@pytest.mark.parametrize(("content", "words"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_not_ours_ends_the_start_in_one_line(serve, database, content, words):
    """And it stays as it is."""
    if isinstance(content, bytes):
        database.write_bytes(content)
    else:
        execute(database, content)
    before = database.read_bytes()
    stops_in_one_line(serve(), words)
    assert database.read_bytes() == before


def test_every_connection_syncs_every_commit(engine, database, monkeypatch):
    """synchronous=FULL (2) and fullfsync belong to a connection, not to the file."""
    connections, connect = [], sqlite3.connect

    def note(*arguments: object, **options: object) -> sqlite3.Connection:
        connections.append(connect(*arguments, **options))
        return connections[-1]

    execute(database, SCHEMA)
    monkeypatch.setattr(sqlite3, "connect", note)
    engine.insert([ONE], 100)
    names = ("synchronous", "fullfsync", "journal_mode")
    found = [connections[0].execute(f"PRAGMA {name}").fetchone()[0] for name in names]
    assert found == [2, 1, "wal"]


def test_a_url_can_have_any_path(open_storage, tmp_path, monkeypatch):
    """Three slashes: relative to the working directory; four: absolute; %20 is a space.

    A link leads to its file: SQLite keeps its other files beside that.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my data").mkdir()
    (tmp_path / "link.db").symlink_to("my data/d.db")
    for path in ("a.db", f"{tmp_path}/b%3F%23.db", "my%20data/c.db", "link.db"):
        open_storage(f"sqlite:///{path}").add(ONE)
    found = {f"{path.relative_to(tmp_path)}" for path in tmp_path.glob("**/*-wal")}
    assert found == {"a.db-wal", "b?#.db-wal", "my data/c.db-wal", "my data/d.db-wal"}


def test_a_file_that_is_replaced_while_it_is_opened_takes_no_plant(
    engine, database, monkeypatch, stored
):
    """It would take them under a name that it has no more."""
    execute(database, SCHEMA)
    shutil.copy(database, backup := database.with_name("backup"))
    connect = sqlite3.connect

    def connect_and_replace(*arguments: object, **options: object) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        with contextlib.suppress(FileNotFoundError):
            os.replace(backup, database)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_and_replace)
    with pytest.raises(Unavailable, match="was replaced while it was opened"):
        engine.insert([ONE], 100)
    engine.insert([TWO], 100)
    assert read_rows(f"sqlite:///{database}") == [(2, "two", None)]


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_no_plant_is_answered_for_into_the_void(storage, database, suffix, change):
    """If the file or what belongs to it goes away under the service, nothing is stored any more."""
    storage.add(ONE)
    file = Path(f"{database}{suffix}")
    kept = file.with_name("kept")
    if change == "deleted":
        os.rename(file, kept)
    else:
        shutil.copy(file, kept)
        os.replace(kept, file)
    uses = [lambda: storage.add(ONE), lambda: storage.add(TWO), lambda: storage.check(PATIENCE)]
    for use in [*uses, *uses]:
        with pytest.raises(Unavailable, match="deleted or replaced: see docs/data"):
            use()


def test_a_folder_that_is_away_for_a_while_is_a_503_meanwhile(open_storage, tmp_path):
    (folder := tmp_path / "data").mkdir()
    storage = open_storage(f"sqlite:///{folder}/plants.db")
    storage.add(ONE)
    folder.rename(tmp_path / "moved")
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"data/plants\.db-lock: No such file or directory"):
            storage.add(ONE)
    (tmp_path / "moved").rename(folder)
    storage.add(ONE)


def test_a_plant_does_not_depend_on_a_wal_whose_sync_failed(engine, database, tmp_path):
    """A sync that failed can leave in memory what never comes to the disk, and yet is read back.

    Here the disk has, of the WAL that a killed process left, only what was there before. A power
    cut later that is played into the file, unless another WAL has taken its place.
    """
    execute(database, SCHEMA)
    write_and_die(database, ONE)
    on_the_disk = Path(f"{database}-wal").read_bytes()
    write_and_die(database, TWO)
    engine.insert([TWO], 100)
    shutil.copy(database, later := tmp_path / "later.db")
    wal = Path(f"{database}-wal").read_bytes()
    Path(f"{later}-wal").write_bytes(on_the_disk if wal.startswith(on_the_disk) else wal)
    with contextlib.closing(sqlite3.connect(later)) as connection:
        assert connection.execute("SELECT id FROM plants").fetchall() == [(1,), (2,)]


def test_while_another_program_checkpoints_nothing_is_answered_for(engine, database):
    """What a killed process left can't be synced then."""

    def insert() -> None:
        with pytest.raises(Unavailable, match="another program is at work on it"):
            engine.insert([ONE], 100)

    execute(database, SCHEMA)
    with contextlib.closing(sqlite3.connect(database)) as reader:
        reader.execute("SELECT * FROM plants")
        with open(f"{database}-shm", "r+b") as shm:
            fcntl.lockf(shm, fcntl.LOCK_EX, 1, 121)  # WAL_CKPT_LOCK, sqlite.org/walformat.html
            run_in_processes(insert)


TRIGGER = "TRIGGER t BEFORE INSERT ON plants WHEN new.id IN (2, 4) BEGIN SELECT raise({}); END"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("UNIQUE INDEX i ON plants (name)", "SQLite: SQLITE_CONSTRAINT_UNIQUE"),
        (TRIGGER.format("ABORT, 'one'"), "SQLite: SQLITE_CONSTRAINT_TRIGGER"),
        (TRIGGER.format("IGNORE"), "it was not stored: a trigger keeps it out"),
    ],
)
def test_what_an_operator_added_refuses_a_plant_and_harms_no_other(
    storage, database, stored, made, reason
):
    """The plant is at fault, neither the file nor the batch; and nothing of it is repeated."""
    execute(database, f"CREATE {made}")
    with lock_held(database):
        batch = (ONE, Plant(2, "one"), Plant(3, "three"))
        requests = [queue_up(storage.add, plant) for plant in batch]
    outcomes = [error and (type(error), str(error)) for error in map(Future.exception, requests)]
    assert outcomes == [None, (Rejected, reason), None]
    storage.check(PATIENCE)
    assert [number for number, *_ in stored()] == [1, 3]


@pytest.mark.parametrize("held", [lock_held, locked])
def test_a_lock_delays_an_answer_but_not_for_ever(
    open_storage, database, stored, monkeypatch, held
):
    """Of another process of the service, or another program; it delays the opening, too.

    Who gives up stores nothing later, unless SQLite itself waits already.
    """
    execute(database, SCHEMA)
    with held(database):
        storage = open_storage()
        with monkeypatch.context() as patch, pytest.raises(Unavailable, match="busy or hangs"):
            patch.setattr("storage.ADD_LIMIT", 0.05)
            storage.add(ONE)
        request = queue_up(storage.add, TWO)
        assert stored() == []
    request.result(PATIENCE)
    assert [number for number, *_ in stored()] in ([2], [1, 2] if held is locked else [])


def test_closing_waits_for_the_lock(storage, database):
    """It checkpoints, which must not meet another process's write."""
    wal = Path(f"{database}-wal")
    storage.add(ONE)
    with lock_held(database):
        closing = threading.Thread(target=storage.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive() and wal.exists()
    closing.join(PATIENCE)
    assert not wal.exists()


def test_the_wal_does_not_stay_large(engine, database):
    """It grows while somebody reads, and begins anew once nobody does."""
    wal = Path(f"{database}-wal")
    engine.insert([ONE], 100)
    with contextlib.closing(sqlite3.connect(database)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM plants").fetchone()
        engine.insert([Plant(number, "x" * 16_000) for number in range(2, 1000)], 100)
        assert wal.stat().st_size > 2**23
    for number in 1000, 1001:
        engine.insert([Plant(number, "n")], 100)
    assert wal.stat().st_size <= 2**23


def test_no_plant_stays_in_memory(engine):
    """Python's module would keep statements, each with what it was last used for."""
    before = memory(os.getpid())
    for count in range(1, 80):  # each time another statement
        engine.insert([Plant(number, "x" * 16_000) for number in range(count)], 100)
    assert memory(os.getpid()) - before < 20  # MiB, of 50
