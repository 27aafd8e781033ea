"""The engine for SQLite: which files it accepts, what is durable, and who may write when."""

import contextlib
import fcntl
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from engines.sqlite import SQLiteEngine
from plant import Plant
from start import get_storage
from storage import Unavailable
from tests.support.server import PATIENCE, fails_with, memory
from tests.support.storage import lock_held, queue_up, read_names, run_in_processes

START = [sys.executable, "start.py"]
GONE = "was deleted or replaced: read docs/emergencies.md before you restart"
ONE, TWO = Plant(1, "one"), Plant(2, "two")
# The previous version made its files like this, and so must this one.
TABLE = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT"
PRAGMAS = "journal_mode = WAL; PRAGMA application_id = 0x504C4E54; PRAGMA user_version = 1"
SCHEMA = f"PRAGMA {PRAGMAS}; {TABLE}"


def execute(database: Path, script: str) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executescript(script)


@pytest.fixture
def engine(database) -> Iterator[SQLiteEngine]:
    """An engine for a file that does not exist yet. It creates the file, as the start does."""
    with contextlib.closing(SQLiteEngine(str(database))) as engine:
        engine.creates = True
        yield engine


def test_a_new_file_is_marked_as_ours_and_for_its_user_alone(engine, database):
    """Everybody who can open it, even to read it, can lock it and keep the service waiting."""
    with engine.locked():
        engine.insert([ONE], 100)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in database.parent.iterdir()}
    assert modes == {f"plants.db{suffix}": 0o600 for suffix in ("", "-lock", "-shm", "-wal")}
    with contextlib.closing(sqlite3.connect(database)) as connection:
        ((made,),) = connection.execute("SELECT sql FROM sqlite_schema")
        assert made.startswith(TABLE.removesuffix(") STRICT")) and made.endswith(") STRICT")
        for name, value in ("application_id", 0x504C4E54), ("user_version", 1):
            assert connection.execute(f"PRAGMA {name}").fetchone() == (value,)


def store_and_close(url: str) -> None:
    """Store a plant, and close the database as a service does when it is stopped."""
    with contextlib.closing(get_storage(url)) as storage:
        storage.engine.creates = True
        storage.add(ONE)


LOST = r"plants.db is missing or empty, but .*-lock shows that a .* move .*plants\.db\* away"


@pytest.mark.parametrize("left", [None, "", PRAGMAS])
def test_a_start_ends_in_one_line_where_the_plants_are_gone(serve, url, database, left):
    """A new database would hide the loss, and nightly backups of it would replace the good ones.

    A look by `sqlite3` without -readonly leaves an empty file in the place of a deleted one.
    """
    store_and_close(url)
    database.unlink()
    if left is not None:
        database.touch()
    if left:
        execute(database, f"PRAGMA {left}")
    start, check = serve(command=START), serve(command=[*START, "--existing"])
    for server, words in (start, LOST), (check, f"plants.db {GONE}"):
        fails_with(server, words)
        assert server.wait() == 1
    # As the line says, this allows an empty database. Move a -wal, too: the start would delete it.
    for path in database.parent.glob("plants.db-*"):
        path.rename(path.with_name(f"moved-{path.name}"))
    assert serve(command=START).wait() == 0


def test_a_table_that_was_deleted_is_not_created_again(serve, url, database):
    """Everything else of the file is as it was."""
    store_and_close(url)
    execute(database, "ALTER TABLE plants RENAME TO moved")
    fails_with(serve(command=START), "no such table: plants$")


def test_a_check_before_a_restart_refuses_a_database_that_is_not_there(serve, url, database):
    """A mistyped DATABASE_URL would otherwise restart the service onto an empty file."""
    fails_with(server := serve(command=[*START, "--existing"]), "correct DATABASE_URL, or make a")
    assert server.wait() == 1 and not list(database.parent.glob("plants.db*"))
    store_and_close(url)
    assert serve(command=[*START, "--existing"]).wait() == 0
    assert serve(command=[*START, "--exist"]).wait() == 2  # argparse's status for a mistyped flag.


def test_the_writer_has_the_name_by_which_an_operator_finds_the_workers(storage):
    """Python 3.14 gives it to the whole worker. lslocks and ss print it."""
    storage.add(ONE)
    assert "gunicorn" in {each.name for each in threading.enumerate()}


def test_starts_at_the_same_time_do_not_harm_each_other(serve, database):
    """The first of them makes the database. The others wait, and find it."""
    servers = [serve(command=START) for _ in range(4)]
    assert [server.wait() for server in servers] == [0] * 4
    assert sorted("which is new" in server.err for server in servers) == [False] * 3 + [True]


@pytest.mark.parametrize("deleted", [[""], ["-lock"], ["", "-lock"], ["", "-wal", "-shm", "-lock"]])
def test_no_worker_creates_a_file(open_storage, storage, database, deleted):
    """One that is started after a deletion answers 503, and so does one that has the files open.

    If only the lock file is gone, a worker that has the others open makes it again.
    """
    storage.add(ONE)
    for suffix in deleted:
        os.remove(f"{database}{suffix}")
    new = open_storage(creates=False)
    with pytest.raises(Unavailable, match=GONE):
        new.add(TWO)
    if "" in deleted:
        for _ in range(2):
            for each in storage, new:
                with pytest.raises(Unavailable, match=GONE):
                    each.add(TWO)
        assert not database.exists()
    else:
        storage.add(TWO)
        new.add(TWO)
    assert Path(f"{database}-lock").stat().st_mode & 0o777 == 0o600


def test_whatever_sqlite_says_a_deletion_is_named(storage, database):
    """An operator who reads "disk I/O error" would look at the disk, and stop the service."""
    storage.add(ONE)
    database.unlink()
    execute(database, "PRAGMA schema_version")  # `sqlite3` without -readonly makes an empty file.
    Path(f"{database}-shm").write_bytes(b"no index" * 4096)
    for _ in range(2):
        with pytest.raises(Unavailable, match=GONE):
            storage.add(TWO)


REFUSED = {
    "text": (b"Dear diary, " * 1000, "file is not a database"),
    "no id": (TABLE, "belongs to another program; correct DATABASE_URL"),
    "another id": (f"{SCHEMA}; PRAGMA application_id = 7", "belongs to another program"),
    # An older version may have made the file. The start reads all columns of a plant.
    "no column": (SCHEMA.replace(", tag TEXT", ""), "plants.db: no such column: tag$"),
}


@pytest.mark.parametrize(("content", "words"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_can_not_be_used_ends_the_start_in_one_line(serve, database, content, words):
    """The start does not change the file."""
    if isinstance(content, bytes):
        database.write_bytes(content)
    else:
        execute(database, content)
    before = database.read_bytes()
    fails_with(serve(command=[sys.executable, "start.py"]), words)
    assert database.read_bytes() == before


@pytest.mark.parametrize("place", ["root", "last leaf"])
def test_a_damaged_end_of_the_table_fails_the_health_check(engine, serve, database, place):
    """The next plant would go there. A write somewhere else in the file proves nothing."""
    engine.insert([Plant(number, "x" * 500) for number in range(200)], 100)
    engine.close()
    with contextlib.closing(sqlite3.connect(database)) as connection:
        page = "SELECT rootpage FROM sqlite_schema"
        if place != "root":
            page = "SELECT max(pageno) FROM dbstat WHERE name = 'plants' AND pagetype = 'leaf'"
        ((number,),) = connection.execute(page)
        ((size,),) = connection.execute("PRAGMA page_size")
    with database.open("r+b") as file:
        file.seek((number - 1) * size)
        file.write(b"\xff" * size)
    with contextlib.closing(SQLiteEngine(str(database))) as damaged:
        for plants in ([Plant(1000, "n")], []):
            with pytest.raises(Unavailable, match="malformed"):
                damaged.insert(plants, 100)
    fails_with(serve(command=[sys.executable, "start.py"]), "malformed$")


def test_every_connection_syncs_each_commit(engine, database):
    """All of these but journal_mode belong to a connection, not to the file."""
    execute(database, SCHEMA)
    engine.insert([ONE], 100)
    (connection,) = [each for each in vars(engine).values() if isinstance(each, sqlite3.Connection)]
    names = ("synchronous", "fullfsync", "journal_mode", "journal_size_limit")
    found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
    assert found == [2, 1, "wal", 2**23]
    assert engine.description.endswith("plants.db")  # It does not say "which is new".


def test_a_health_check_is_a_write(engine, database):
    """It fails where a plant's write would fail, and changes nothing."""
    engine.insert([ONE], 100)
    before = Path(f"{database}-wal").read_bytes()
    assert engine.insert([], 100) == {}
    assert Path(f"{database}-wal").read_bytes() != before
    assert read_names(f"sqlite:///{database}") == {1: "one"}


def test_a_url_can_have_any_path(open_storage, tmp_path, monkeypatch):
    """It may be relative, absolute or percent-encoded. The WAL is beside the file of a link."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my data").mkdir()
    (tmp_path / "link.db").symlink_to("my data/d.db")
    for path in ("a.db", f"{tmp_path}/b%3F%23.db", "my%20data/c.db", "link.db"):
        open_storage(f"sqlite:///{path}").add(ONE)
    found = {f"{path.relative_to(tmp_path)}" for path in tmp_path.glob("**/*-wal")}
    assert found == {"a.db-wal", "b?#.db-wal", "my data/c.db-wal", "my data/d.db-wal"}


def test_a_file_that_is_replaced_while_it_is_opened_takes_no_plant(engine, database, monkeypatch):
    """Its name now belongs to another file, so a plant in it would be lost."""
    execute(database, SCHEMA)
    shutil.copy(database, backup := database.with_name("backup"))
    connect = sqlite3.connect

    def connect_and_replace(*arguments: object, **options: object) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        os.replace(backup, database)
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect_and_replace)
        with pytest.raises(Unavailable, match=GONE):
            engine.insert([ONE], 100)
    with pytest.raises(Unavailable, match=GONE):
        engine.insert([TWO], 100)


def test_a_batch_is_committed_before_the_files_are_compared(engine, url, monkeypatch):
    """An error after the commit leaves no transaction open that later batches would join."""
    found = []
    engine.insert([ONE], 100)
    monkeypatch.setattr(engine, "_check_files", lambda: found.append(read_names(url)))
    engine.insert([TWO], 100)
    assert found == [{1: "one"}, {1: "one", 2: "two"}]


def test_no_plant_is_acknowledged_once_the_folder_is_deleted(open_storage, tmp_path):
    """A new folder would not help. A restart would end the workers that still hold its files."""
    (folder := tmp_path / "folder").mkdir()
    (storage := open_storage(f"sqlite:///{folder}/plants.db")).add(ONE)
    folder.rename(tmp_path / "kept")
    for use in (lambda: storage.add(TWO), lambda: storage.check(PATIENCE)):
        with pytest.raises(Unavailable, match=f"folder {GONE}"):
            use()


def test_a_file_in_the_place_of_the_folder_is_a_deletion(open_storage, tmp_path):
    """The plant gets a 503, and the log says what to do."""
    (folder := tmp_path / "folder").mkdir()
    (storage := open_storage(f"sqlite:///{folder}/plants.db")).add(ONE)
    folder.rename(tmp_path / "kept")
    folder.touch()
    with pytest.raises(Unavailable, match=f"folder {folder} {GONE}"):
        storage.add(TWO)


def test_a_folder_that_cant_be_read_is_no_bug(storage, database, monkeypatch):
    """Its mode may be wrong. The plant gets a 503, not a 500."""
    storage.add(ONE)
    # The error is made up, since root may read every folder.
    refused = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("engines.sqlite.file_ids", refused)
    with pytest.raises(Unavailable, match=f"{database}: Permission denied"):
        storage.add(TWO)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_no_plant_is_acknowledged_once_a_file_is_deleted_or_replaced(
    storage, database, suffix, change
):
    """This holds for the file, its -wal and its -shm."""
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
        with pytest.raises(Unavailable, match=GONE):
            use()


def test_no_plant_is_acknowledged_once_the_file_is_emptied(storage, database):
    """SQLite would go on with what is in the -wal, and fill the file after 1,000 pages of it."""
    storage.add(ONE)
    content = database.read_bytes()
    os.truncate(database, 0)
    for number in range(2, 1200):
        with pytest.raises(Unavailable, match=GONE):
            storage.add(Plant(number, "n" * 3000, None))
    assert not database.stat().st_size
    database.write_bytes(content)
    storage.add(TWO)


@pytest.mark.parametrize("deleted", [["-shm"], ["-wal"], ["-shm", "-wal"]])
def test_no_process_opens_a_database_whose_deleted_files_another_one_has_open(
    engine, serve, database, deleted
):
    """Each would overwrite what the other one writes, and lose plants that got a 200."""
    engine.insert([ONE], 100)
    for suffix in deleted:
        os.remove(f"{database}{suffix}")
    fails_with(serve(command=[sys.executable, "start.py"]), GONE)


@pytest.mark.parametrize("exchanged", [["-shm"], ["-shm", "-wal"], [""]])
def test_no_process_opens_a_database_with_new_files_while_another_one_has_the_old_ones(
    engine, serve, database, exchanged
):
    """The new ones come from a look at the plants, or from a backup that somebody copied."""
    engine.insert([ONE], 100)
    # Not by this process: its locks would end when it closes the file.
    subprocess.run(["cp", database, backup := database.with_name("backup")], check=True)
    for suffix in exchanged:
        os.remove(f"{database}{suffix}")
    if "" in exchanged:
        os.rename(backup, database)
    # Closing the database deletes the -wal, so keep it open.
    reader = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM plants')"
    subprocess.run([sys.executable, "-c", f"{reader}; import os; os._exit(0)", str(database)])
    for server in serve(command=START), serve(command=[*START, "--existing"]):
        fails_with(server, GONE)


def test_opening_the_file_copies_the_wal_into_it(engine, database, tmp_path):
    """A process that was killed may leave plants in the WAL that no later sync covers."""
    execute(database, SCHEMA)
    with contextlib.closing(sqlite3.connect(database)) as writer:
        writer.executescript("PRAGMA synchronous = OFF; INSERT INTO plants VALUES (1, 'one', NULL)")
        engine.insert([ONE], 100)
        shutil.copy(database, copy := tmp_path / "copy.db")
    assert read_names(f"sqlite:///{copy}") == {1: "one"}


def test_no_plant_is_acknowledged_while_another_program_checkpoints(engine, database):
    """The checkpoint that has to come first can't run then."""

    def insert() -> None:
        with pytest.raises(Unavailable, match="another program is checkpointing it"):
            engine.insert([ONE], 100)

    execute(database, SCHEMA)
    with contextlib.closing(sqlite3.connect(database)) as reader:
        reader.execute("SELECT * FROM plants")
        with open(f"{database}-shm", "r+b") as shm:
            fcntl.lockf(shm, fcntl.LOCK_EX, 1, 121)  # WAL_CKPT_LOCK, sqlite.org/walformat.html
            run_in_processes(insert)


def test_a_plant_that_an_operators_index_or_row_refuses_harms_no_other(storage, database, stored):
    """Only this plant is refused, and the message repeats nothing of it.

    Somebody may fix an expression that fails for a plant, so a retry may help.
    """
    latin_1 = "INSERT INTO plants (id, name) VALUES (4, CAST(x'6fff' AS TEXT))"
    positive = "CREATE INDEX positive ON plants (abs(id))"
    execute(database, f"CREATE UNIQUE INDEX single ON plants (name); {positive}; {latin_1}")
    with lock_held(database):
        plants = ONE, Plant(3, "one"), Plant(4, "o\ufffd"), Plant(-(2**63), "min"), TWO
        requests = [queue_up(storage.add, plant) for plant in plants]
    assert [repr(each.exception(PATIENCE)) for each in requests] == [
        "None",
        "Rejected('SQLite: SQLITE_CONSTRAINT_UNIQUE')",
        "Conflict('id: already used by a different plant, which was not changed')",
        f"Locked('{database}: integer overflow')",
        "None",
    ]
    execute(database, "DELETE FROM plants WHERE id = 4")  # It would fail if the file were locked.
    assert [number for number, *_ in stored()] == [1, 2]


@pytest.mark.parametrize("queued", [[], [TWO]])
def test_closing_waits_for_the_lock_and_stores_the_queue(storage, database, queued):
    """The last connection to be closed checkpoints. No other process may write meanwhile."""
    wal = Path(f"{database}-wal")
    storage.add(ONE)
    with lock_held(database):
        requests = [queue_up(storage.add, plant) for plant in queued]
        closing = threading.Thread(target=storage.close)
        closing.start()
        closing.join(0.1)  # If closing did not need the lock, it would end meanwhile.
        assert closing.is_alive() and wal.exists()
    assert [request.result(PATIENCE) for request in requests] == [None] * len(queued)
    closing.join(PATIENCE)
    assert not wal.exists()


def test_no_plant_stays_in_memory(storage):
    """Python's sqlite3 keeps statements with their last values: here no more than one."""
    sizes = []
    for count in range(80, 0, -2):  # Each batch fits into the memory that the first one has freed.
        storage.add(Plant(-count, "x" * 1_200_000))
        storage.engine.insert([Plant(number, "x" * 32_000) for number in range(count)], 100)
        sizes.append(memory(os.getpid()))
    # Without the limit, the single plants kept some 50 MiB, and so did the batches.
    assert max(sizes) - sizes[0] < 5
