"""The storage on a SQLite file: what is refused at start, what is durable, who may write."""

import contextlib
import errno
import fcntl
import functools
import operator
import os
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import Conflict, NeedsOperator, Rejected, Unavailable
from schemas import Plant
from sqlite import APPLICATION_ID, SQLiteEngine, explain
from start import get_storage
from storage import Storage, Stored
from tests.support.locks import can_lock, lock_held, locked
from tests.support.server import PATIENCE, succeeds, wait_until
from tests.support.users import open_folder, run_as_nobody, run_in_processes

SOON = 0.2  # seconds
_storages = contextlib.ExitStack()


def open_storage(path: Path, wait_limit: float = PATIENCE) -> Storage:
    """A storage that gives up soon where another program has locked the file."""
    engine = SQLiteEngine(str(path), None, busy_timeout=0.1)
    storage = Storage(engine, wait_limit, operator.call)
    return _storages.enter_context(contextlib.closing(storage))


def started(path: Path) -> Storage:
    storage = open_storage(path)
    storage.open_or_create()
    return storage


@pytest.fixture(autouse=True)
def _close_storages() -> Iterator[None]:
    """No thread of a storage outlives its test."""
    yield
    _storages.close()


@pytest.fixture
def after_statement(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets something happen after a statement that begins so, with the connection it was on."""

    def arrange(beginning: str, action: Callable[[sqlite3.Connection], object]) -> None:
        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *parameters: object) -> sqlite3.Cursor:
                cursor = super().execute(statement, *parameters)
                if statement.startswith(beginning):
                    action(self)
                return cursor

        connect = functools.partial(sqlite3.connect, factory=Connection)
        monkeypatch.setattr(sqlite3, "connect", connect)

    return arrange


# the file


def test_the_file_is_marked_as_ours_and_strict(storage, database):
    storage.check()
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (0x504C4E54,)
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        with pytest.raises(sqlite3.IntegrityError, match="cannot store BLOB"):
            connection.execute("INSERT INTO plants VALUES (7, x'00', NULL)")


def test_a_health_check_leaves_the_version_of_a_file_as_it_is(storage, database):
    """A new version may have changed it while the old one still runs."""
    storage.check()
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA user_version = 2")
    storage.engine.insert([])
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)


def test_every_connection_syncs_every_commit(database, after_statement):
    """synchronous=FULL (2), fullfsync and a busy timeout belong to a connection, not the file."""
    found = []

    def look(connection: sqlite3.Connection) -> None:
        for name in ("synchronous", "fullfsync", "busy_timeout"):
            found.append(connection.execute(f"PRAGMA {name}").fetchone()[0])

    after_statement("INSERT", look)
    for number in range(2):
        with contextlib.closing(get_storage(f"sqlite:///{database}", "", 9.0)) as storage:
            storage.add(Plant(number, "n"))
    assert found == [2, 1, 4500] * 2  # milliseconds: half of what a request waits


def test_a_url_can_have_any_path(tmp_path, monkeypatch):
    """Three slashes: relative to the working directory; four: absolute; %20 is a space.

    What is not UTF-8 can be written as it is or with percent signs too.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my data").mkdir()
    paths = ("a.db", f"{tmp_path}/b.db", "my%20data/c.db", "%ff%3F%23.db", os.fsdecode(b"\xfe.db"))
    for path in paths:
        with contextlib.closing(get_storage(f"sqlite:///{path}")) as storage:
            storage.open_or_create()
            storage.add(Plant(7, "Monstera"))
            assert list(storage.rows()) == [Plant(7, "Monstera")]
    found = {os.fsencode(path.name) for path in tmp_path.glob("**/*.db")}
    assert found == {b"a.db", b"b.db", b"c.db", b"\xff?#.db", b"\xfe.db"}


FOREIGN = 'is empty, damaged or another program\'s; see "The file is damaged" in docs/data.md'
NO_DATABASES = {
    "text": (b"Dear diary, " * 1000, r"is empty, damaged|plants\.db: file is not a database; see"),
    "empty": (b"", FOREIGN),
    "without an application id": ("CREATE TABLE plants (id)", FOREIGN),
    "another application's": ("PRAGMA application_id = 7", FOREIGN),
    "a newer version's": (
        f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 2", "newer version"),
    "in WAL mode": ("PRAGMA journal_mode = WAL; CREATE TABLE plants (id)", FOREIGN),
}  # fmt: skip


@pytest.mark.parametrize(("content", "words"), NO_DATABASES.values(), ids=NO_DATABASES)
def test_a_file_that_is_not_ours_is_refused_and_stays_as_it_is(database, content, words):
    if isinstance(content, bytes):
        database.write_bytes(content)
    else:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.executescript(content)
    before = database.read_bytes()
    with pytest.raises(NeedsOperator, match=words):
        open_storage(database).open_or_create()
    if "newer" not in words:
        assert [*database.parent.iterdir()] == [database]  # it can be anybody's folder
    with pytest.raises(NeedsOperator, match=words):
        list(open_storage(database).rows())
    assert database.read_bytes() == before


def test_a_file_with_two_names_is_refused(storage, database):
    """Each would have a -wal of its own, and what is in one is lost for the other."""
    storage.close()
    os.link(database, database.with_name("other.db"))
    with pytest.raises(NeedsOperator, match="has a hard link"):
        open_storage(database).open_or_create()


LEAF, INNER = 13, 5  # sqlite.org/fileformat.html, 1.6


@pytest.mark.parametrize(
    ("kind", "places"),
    [(LEAF, [0]), (LEAF, [-1]), (LEAF, [50, 52, 53, 90]), (INNER, [-1]), (INNER, [0])],
)
@pytest.mark.parametrize("step", [1, 2**49 - 1])
def test_a_damaged_file_gives_what_it_has(storage, database, kind, places, step):
    """Each plant that is not on a damaged page, in the order of id; then the gaps are named."""
    plants = {number: Plant(number, "x" * 1000) for number in range(-500 * step, 1500 * step, step)}
    for first in range(-500, 1500, 500):
        storage.add_all([plants[n * step] for n in range(first, first + 500)])
    storage.close()
    data = bytearray(database.read_bytes())
    pages = [start for start in range(4096, len(data), 4096) if data[start] == kind]
    for place in places:
        data[pages[place] : pages[place] + 4096] = b"\xff" * 4096
    database.write_bytes(data)
    rows = []
    with pytest.raises(NeedsOperator, match="The file is damaged") as error:
        rows.extend(open_storage(database).rows())
    gaps = [(int(a), int(b)) for a, b in re.findall(r"(-?\d+) to (-?\d+)", str(error.value))]
    assert len(gaps) == (3 if len(places) > 1 else 1)
    in_gaps = {n for n in plants if any(first <= n <= last for first, last in gaps)}
    assert rows == [plants[n] for n in plants if n not in in_gaps]
    if kind == LEAF:
        assert 0 < len(in_gaps) <= 4 * len(places)
    elif places == [-1]:
        assert 0 < len(in_gaps) < 1700


def test_a_damaged_plant_keeps_out_no_other(storage, database):
    """Nor is any of it in the message."""
    storage.add(Plant(2, "two"))
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("UPDATE plants SET name = 'secret' || CAST(x'ff' AS TEXT)")
    outcomes = storage.add_all([Plant(1, "one"), Plant(2, "two"), Plant(3, "three")])
    assert [type(each) for each in outcomes] == [Stored, NeedsOperator, Stored]
    assert re.search("no UTF-8 in a text(?!.*secret)", str(outcomes[1]))


def test_a_folder_that_is_missing_is_refused_until_it_is_there(tmp_path):
    """What refuses a start is, later, one more thing to wait for."""
    folder = tmp_path / "none"
    storage = open_storage(folder / "plants.db")
    for look in (storage.open_or_create, storage.check, lambda: storage.add(Plant(7, "Monstera"))):
        with pytest.raises(NeedsOperator, match=f"{folder}: no such folder; make or mount it"):
            look()
    folder.mkdir()
    storage.add(Plant(7, "Monstera"))


@pytest.mark.parametrize("read_only", ["folder", "file"])
def test_what_cannot_be_written_is_refused(read_only):
    """A look at whether the storage can write tries to: BEGIN IMMEDIATE would succeed."""

    def check() -> None:
        with pytest.raises(NeedsOperator, match=r"plants\.db.*: "):
            open_storage(database).open_or_create()

    with open_folder() as folder:
        database = folder / "plants.db"
        if read_only == "file":
            run_as_nobody(lambda: started(database).close())
            database.chmod(0o444)
        else:
            folder.chmod(0o555)
        run_as_nobody(check)


def test_a_folder_that_becomes_read_only_loses_nothing():
    """The files are there and can be written; what can't be made any more is not needed."""

    def work() -> None:
        folder.mkdir()
        storage = started(folder / "plants.db")
        folder.chmod(0o555)
        for number, opened in enumerate([storage, open_storage(folder / "plants.db")]):
            opened.add(Plant(number, "n"))
            opened.check()
        os._exit(0)

    with open_folder() as parent:
        folder = parent / "own"
        run_as_nobody(work)
        folder.chmod(0o777)
        assert list(open_storage(folder / "plants.db").rows()) == [Plant(0, "n"), Plant(1, "n")]


def test_a_locked_file_is_no_reason_not_to_start(database):
    """It is "not now": the start goes on, requests are told so, and later they are served."""
    started(database).close()
    storage = open_storage(database)
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        for use in (storage.open_or_create, lambda: storage.add(Plant(7, "n")), storage.check):
            with pytest.raises(Unavailable, match="locked") as failure:
                use()
            assert not isinstance(failure.value, NeedsOperator)
    storage.add(Plant(7, "Monstera"))
    assert list(storage.rows()) == [Plant(7, "Monstera")]


def test_a_link_leads_to_the_file(tmp_path, stored):
    """SQLite keeps its other files beside the file, not beside the link."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "plants.db").symlink_to(tmp_path / "disk" / "plants.db")
    with contextlib.closing(started(tmp_path / "plants.db")) as storage:
        storage.add(Plant(7, "Monstera"))
        assert stored() == [(7, "Monstera", None)]
        assert (tmp_path / "disk" / "plants.db-wal").exists()


@pytest.mark.parametrize("left", ["nothing", "an empty file", "an empty database"])
def test_only_a_start_makes_a_new_file(storage, url, database, left):
    """A worker that opens later never stores into another file than was there at the start.

    Nor does a start take an empty file for a new one: it may be what is left of an old one.
    """
    storage.open_or_create()
    identity = storage.engine.identity
    storage.close()
    database.unlink()
    if left == "an empty file":
        database.touch()
    elif left == "an empty database":
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
    before = database.exists() and database.read_bytes()
    with contextlib.closing(get_storage(url, identity)) as worker:
        for look in (lambda: worker.add(Plant(7, "Monstera")), worker.check):
            with pytest.raises(NeedsOperator, match=r"deleted or replaced|is empty"):
                look()
    assert before == (database.exists() and database.read_bytes())
    if left != "nothing":
        with pytest.raises(NeedsOperator, match="is empty"):
            open_storage(database).open_or_create()
        database.unlink()
    with contextlib.closing(open_storage(database)) as restarted:
        restarted.open_or_create()
        restarted.add(Plant(7, "Monstera"))


def test_a_wal_without_its_file_is_not_played_into_a_new_one(storage, database):
    """It may have the only copy of some plants, and a new file would throw them away."""
    storage.add(Plant(1, "one"))
    wal = Path(f"{database}-wal")
    shutil.copy(wal, kept := database.with_name("kept"))
    storage.close()
    database.unlink()
    os.rename(kept, wal)
    before = wal.read_bytes()
    with pytest.raises(NeedsOperator, match="is missing, but not its -wal"):
        open_storage(database).open_or_create()
    assert wal.read_bytes() == before and not database.exists()


# what is stored


def test_a_plant_does_not_depend_on_a_wal_whose_sync_failed(database, tmp_path):
    """A sync that failed can leave in memory what never comes to the disk, and yet is read back.

    Here the disk has, of the WAL that a killed process left, only what was there before. A power
    cut later that is played into the file, unless another WAL has taken its place.
    """
    started(database).close()
    write_and_die(database, Plant(1, "one"))
    on_the_disk = Path(f"{database}-wal").read_bytes()
    write_and_die(database, Plant(2, "two"))
    open_storage(database).add(Plant(2, "two"))
    after = tmp_path / "after.db"
    subprocess.run(["cp", database, after], check=True)
    wal = Path(f"{database}-wal").read_bytes()
    Path(f"{after}-wal").write_bytes(on_the_disk if wal.startswith(on_the_disk) else wal)
    with contextlib.closing(sqlite3.connect(after)) as connection:
        assert connection.execute("SELECT id FROM plants").fetchall() == [(1,), (2,)]


def test_while_another_program_checkpoints_nothing_is_answered_for(database):
    """What a killed process left can't be synced then."""

    def add() -> None:
        with pytest.raises(Unavailable, match="another program is at work on it"):
            open_storage(database).add(Plant(1, "one"))

    started(database).close()
    with contextlib.closing(sqlite3.connect(database)) as reader:
        reader.execute("SELECT * FROM plants")
        with open(f"{database}-shm", "r+b") as shm:
            fcntl.lockf(shm, fcntl.LOCK_EX, 1, 121)  # WAL_CKPT_LOCK, sqlite.org/walformat.html
            run_in_processes(add)


def write_and_die(database: Path, plant: Plant) -> None:
    """Store a plant as a process does that is killed between the write and its sync."""

    def work() -> None:
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("INSERT INTO plants VALUES (?, ?, ?)", plant)
        os._exit(0)

    run_in_processes(work)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("UNIQUE INDEX i ON plants (name)", "a trigger or a unique index keeps it out"),
        ("INDEX i ON plants (CASE WHEN id = 2 THEN abs(-9223372036854775807 - 1) END)",
         "SQLITE_ERROR"),
        ("INDEX i ON plants (CASE WHEN id = 2 THEN zeroblob(2000000000) END)", "SQLITE_TOOBIG"),
        ("TRIGGER t BEFORE INSERT ON plants WHEN new.id IN (2, 4) "
         "BEGIN SELECT raise(ABORT, 'one'); END", "SQLITE_CONSTRAINT_TRIGGER"),
        ("TRIGGER t BEFORE INSERT ON plants WHEN new.id IN (2, 4) "
         "BEGIN SELECT raise(FAIL, 'one'); END", "SQLITE_CONSTRAINT_TRIGGER"),
        ("TRIGGER t BEFORE INSERT ON plants WHEN new.id IN (2, 4) "
         "BEGIN SELECT raise(IGNORE); END", "a trigger or a unique index keeps it out"),
    ],
)  # fmt: skip
def test_what_an_operator_added_refuses_a_plant_and_harms_no_other(storage, database, made, reason):
    """It is the plant that is at fault, and neither the file nor the batch; it is not repeated.

    A plant that was stored before is stored.
    """
    storage.add(Plant(4, "four"))
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute(f"CREATE {made}")
    outcomes = storage.add_all(
        [Plant(n, name) for n, name in enumerate(("one", "one", "3", "four"), 1)]
    )
    assert [type(each) for each in outcomes] == [Stored, Rejected, Stored, Stored]
    assert str(outcomes[1]) == f"SQLite: {reason}"
    storage.check()


@pytest.mark.parametrize(
    ("constraint", "plant", "outcome"),
    [("PRIMARY KEY", Plant(1, "two"), Conflict), ("NOT NULL UNIQUE", Plant(2, "one"), Rejected)],
)
def test_a_table_that_replaces_rows_replaces_no_plant(
    storage, database, constraint, plant, outcome
):
    """Nor is what a trigger ignores in another table, or the case of a name, held against one."""
    storage.add(Plant(1, "one"))
    with contextlib.closing(sqlite3.connect(database)) as connection:
        (schema,) = connection.execute("SELECT sql FROM sqlite_schema").fetchone()
        old, new = constraint.removesuffix(" UNIQUE"), f"{constraint} ON CONFLICT REPLACE"
        schema = schema.replace(old, new).swapcase()
        connection.executescript(
            f"DROP TABLE plants; {schema}; CREATE TABLE one (x UNIQUE); CREATE TRIGGER t "
            "AFTER INSERT ON plants BEGIN INSERT OR IGNORE INTO one VALUES (1); END"
        )
    plants = Plant(1, "one"), plant, Plant(3, "three")
    outcomes = [type(each) for (each,) in (storage.add_all([plant]) for plant in plants)]
    assert outcomes == [Stored, outcome, Stored]
    assert list(storage.rows()) == [Plant(1, "one"), Plant(3, "three")]


WRONG_FOR_ALL = [
    ("ALTER TABLE plants RENAME TO other", "plants is missing|no such table: plants",
     "ALTER TABLE other RENAME TO plants"),
    ("ALTER TABLE plants RENAME COLUMN tag TO kind", "differs in tag;|no such column: tag",
     "ALTER TABLE plants RENAME COLUMN kind TO tag"),
    ("DROP TABLE plants; CREATE VIEW plants AS SELECT slug(1) AS id, '' AS name, '' AS tag",
     "a view|no such function: slug",
     "DROP VIEW plants; "
     "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT"),
    ("CREATE TRIGGER t AFTER INSERT ON plants BEGIN INSERT INTO gone VALUES (1); END",
     "no such table", "DROP TRIGGER t"),
    ("CREATE TRIGGER t AFTER INSERT ON plants BEGIN SELECT load_extension('x'); END",
     "unsafe use of load", "DROP TRIGGER t"),
    ("CREATE TRIGGER t AFTER INSERT ON plants BEGIN SELECT slug(new.name); END",
     "no such function: slug", "DROP TRIGGER t"),
]  # fmt: skip


@pytest.mark.parametrize("when", ["before a start", "while it runs"])
@pytest.mark.parametrize(("made", "reason", "undone"), WRONG_FOR_ALL)
def test_what_is_wrong_for_all_plants_is_the_files_fault(
    storage, database, made, reason, undone, when
):
    """A 503, not "never", until it is undone; nothing in a file makes SQLite use what is unsafe."""
    if when == "while it runs":
        storage.add(Plant(1, "one"))
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executescript(made)
        for look in (lambda: storage.add(Plant(2, "two")), storage.check):
            with pytest.raises(NeedsOperator, match=reason):
                look()
        connection.executescript(undone)
    storage.add(Plant(2, "two"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [(" STRICT", "", "not STRICT"), (")", ", height INTEGER NOT NULL)", r"plants\.height"),
     (" PRIMARY KEY", " NOT NULL", "in id;"), ("INTEGER PRIMARY", "TEXT PRIMARY", "in id;")],
)  # fmt: skip
def test_a_table_of_another_shape_stores_nothing(storage, database, old, new, words):
    """Without STRICT or a key others, or we, may store in it what is no plant."""
    storage.add(Plant(1, "one"))
    with contextlib.closing(sqlite3.connect(database)) as connection:
        (schema,) = connection.execute("SELECT sql FROM sqlite_schema").fetchone()
        assert old in schema
        connection.executescript(f"DROP TABLE plants; {schema.replace(old, new)}")
    with pytest.raises(NeedsOperator, match=words):
        storage.check()
        storage.add(Plant(2, "two"))
    with pytest.raises(NeedsOperator, match=words):
        open_storage(database).add(Plant(1, "one"))


def test_a_folder_that_was_deleted_is_no_error_at_the_end(serve, database, tmp_path):
    """Nothing is left to be written."""
    folder = tmp_path / "data"
    folder.mkdir()
    server = serve(DATABASE_URL=f"sqlite:///{folder}/plants.db")
    assert server.post({"id": 1, "name": "one"})[0] == 200
    shutil.rmtree(folder)
    assert server.post({"id": 2, "name": "two"})[0] == 503
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "Traceback" not in server.err


def test_reading_all_plants_leaves_the_files_as_they_are(database):
    """Whoever reads holds no lock, so the last to close must not checkpoint."""
    started(database).close()
    write_and_die(database, Plant(1, "one"))
    files = (database, Path(f"{database}-wal"))
    before = [file.read_bytes() for file in files]
    assert list(open_storage(database).rows()) == [Plant(1, "one")]
    assert [file.read_bytes() for file in files] == before


# the lock


def test_what_a_start_makes_is_for_its_user_alone(database):
    """Who can open a file, even to read it, can lock it and keep the service waiting."""
    started(database)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in database.parent.iterdir()}
    assert modes == {f"plants.db{suffix}": 0o600 for suffix in ("", "-lock", "-shm", "-wal")}


def test_a_link_in_place_of_the_lock_harms_no_other_file(database):
    """What somebody else may have put there is neither made nor given other rights."""
    started(database).close()
    lock, other = Path(f"{database}-lock"), database.with_name("other")
    lock.unlink()
    lock.symlink_to(other)
    with pytest.raises(NeedsOperator, match="symbolic links"):
        open_storage(database).add(Plant(1, "one"))
    assert not other.exists()
    lock.unlink()
    other.touch(0o640)
    os.link(other, lock)
    open_storage(database).add(Plant(1, "one"))
    assert stat.S_IMODE(other.stat().st_mode) == 0o640


def test_the_wait_for_a_lock_ends_in_time(database, stored):
    """Nothing is stored then. When the lock comes after all, it is released."""
    started(database).close()
    storage = open_storage(database, wait_limit=SOON)
    message = f"gave up after {SOON} s: other processes hold the lock {database}-lock;"
    with lock_held(database):
        with pytest.raises(Unavailable, match=message):
            storage.add(Plant(7, "Monstera"))
        assert stored() == []
    lock = os.open(f"{database}-lock", os.O_RDONLY)
    wait_until(lambda: can_lock(lock))
    os.close(lock)


@pytest.mark.parametrize("holder", ["another program", "another process of the service"])
def test_a_lock_that_is_released_in_time_delays_no_more_than_the_answer(
    storage, database, stored, holder
):
    """A request waits for SQLite's own lock, and for that of the service, and goes on."""
    storage.check()
    with locked(database) if holder == "another program" else lock_held(database):
        adder = threading.Thread(target=storage.add, args=(Plant(7, "Monstera"),))
        adder.start()
        adder.join(SOON)
        assert adder.is_alive() and stored() == []
    adder.join(PATIENCE)
    assert stored() == [(7, "Monstera", None)]


def test_opening_and_closing_wait_for_the_lock(database):
    """Both can checkpoint, which must not meet another process's write; the waits end in time."""
    wal = Path(f"{database}-wal")
    storage = open_storage(database, wait_limit=SOON)
    with lock_held(database):
        with pytest.raises(Unavailable, match="gave up"):
            storage.open_or_create()
        assert not database.exists()
    wait_until(lambda: succeeds(lambda: storage.add(Plant(7, "Monstera"))))
    with lock_held(database):
        closing = threading.Thread(target=storage.close)
        closing.start()
        closing.join(SOON)
        assert wal.exists()
    closing.join(PATIENCE)
    wait_until(lambda: not wal.exists())


def test_a_process_can_end_while_another_holds_the_lock(database):
    """What waits for the lock, and can't be stopped from waiting, is not waited for."""

    def work() -> None:
        with (
            contextlib.closing(open_storage(database, wait_limit=SOON)) as storage,
            pytest.raises(Unavailable, match="hold the lock"),
        ):
            storage.add(Plant(7, "Monstera"))

    with lock_held(database):
        run_in_processes(work)


def test_a_lock_file_that_was_deleted_is_made_again(database):
    """Whoever comes later locks the new one, so the old one keeps nobody out."""
    storage = open_storage(database, wait_limit=SOON)
    wait_until(lambda: succeeds(lambda: storage.add(Plant(1, "one"))))
    os.unlink(f"{database}-lock")
    with lock_held(database), pytest.raises(Unavailable, match="hold the lock"):
        storage.add(Plant(2, "two"))


def test_the_locks_of_sqlite_outlive_the_lock_file(storage, database):
    """They would be gone if this process closed the database once more (fcntl(2))."""
    storage.add(Plant(1, "one"))
    os.unlink(f"{database}-lock")
    storage.add(Plant(2, "two"))
    leave_wal = f"import sqlite3; sqlite3.connect({str(database)!r}, timeout=0).execute"
    command = [sys.executable, "-c", f"{leave_wal}('PRAGMA journal_mode = DELETE')"]
    other = subprocess.run(command, capture_output=True, text=True)
    assert other.stderr.endswith("database is locked\n")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(errno.ENOSPC, "full"), Unavailable), (OSError(errno.EDQUOT, "full"), Unavailable),
     (OSError(errno.EROFS, "read-only"), NeedsOperator),
     (sqlite3.ProgrammingError("a bug"), sqlite3.ProgrammingError)],
)  # fmt: skip
def test_what_may_pass_is_told_from_what_does_not(database, error, kind):
    assert type(explain(str(database), error)) is kind


# a file that is taken away


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_no_plant_is_answered_for_into_the_void(storage, database, suffix, change):
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
        with pytest.raises(Unavailable, match="only then restart"):
            storage.add(Plant(2, "two"))


def test_no_other_file_is_taken_up_later(database, stored):
    """SQLite would play the -wal of the old file into the one that was put in its place."""
    storage = open_storage(database)
    storage.open_or_create()
    identity = storage.engine.identity
    storage.add(Plant(1, "one"))
    with contextlib.closing(started(database.with_name("other.db"))) as other:
        other.add(Plant(2, "two"))
    os.replace(database.with_name("other.db"), database)
    with (
        contextlib.closing(get_storage(f"sqlite:///{database}", identity)) as worker,
        pytest.raises(Unavailable, match="deleted or replaced"),
    ):
        worker.add(Plant(3, "three"))
    storage.close()
    for suffix in ("-wal", "-shm"):
        os.unlink(f"{database}{suffix}")
    assert stored() == [(2, "two", None)]


@pytest.mark.parametrize("statement", ["PRAGMA wal_checkpoint", "INSERT"])
def test_a_file_replaced_during_the_work_is_noticed(storage, database, after_statement, statement):
    def replace(_: sqlite3.Connection) -> None:
        subprocess.run(["cp", database, f"{database}.copy"], check=True)
        os.replace(f"{database}.copy", database)
        if statement == "INSERT":
            raise sqlite3.OperationalError("disk I/O error")

    after_statement(statement, replace)
    with pytest.raises(Unavailable, match="deleted or replaced"):
        storage.add(Plant(2, "two"))


def test_the_wal_does_not_grow_for_ever(storage, database):
    """It begins anew every few megabytes."""
    for first in range(0, 8000, 250):
        storage.add_all([Plant(first + number, "x" * 1024) for number in range(250)])
    assert Path(f"{database}-wal").stat().st_size < 6 * 2**20
