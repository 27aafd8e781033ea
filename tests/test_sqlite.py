"""The storage on a SQLite file: what is refused, what is durable, and who may write when."""

import contextlib
import fcntl
import functools
import itertools
import os
import resource
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import Conflict, NeedsOperator, Rejected, Unavailable
from engines.sqlite import APPLICATION_ID, SCHEMA, WAL_LIMIT
from plant import Plant
from tests.support.locks import lock_held, locked
from tests.support.processes import open_folder, run_as_nobody, run_in_processes
from tests.support.server import PATIENCE, wait_until

SOON = 0.1  # seconds
ONE, TWO = Plant(1, "one"), Plant(2, "two")


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets something happen after each statement that has `part` in it, with its connection."""

    def arrange(part: str, action: Callable[[sqlite3.Connection], object]) -> None:
        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *parameters: object) -> sqlite3.Cursor:
                cursor = super().execute(statement, *parameters)
                if part in statement:
                    action(self)
                return cursor

            def executescript(self, script: str) -> sqlite3.Cursor:
                cursor = super().executescript(script)
                if part in script:
                    action(self)
                return cursor

        connect = functools.partial(sqlite3.connect, factory=Connection)
        monkeypatch.setattr(sqlite3, "connect", connect)

    return arrange


def execute(database: Path, script: str) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executescript(script)


def replace(database: Path) -> None:
    """Put a copy in the place of a file, as a restore may do."""
    shutil.copy(database, copy := database.with_name("copy"))
    os.replace(copy, database)


def write_and_die(database: Path, plant: Plant) -> None:
    """Store a plant as a process does that is killed between the write and its sync."""

    def work() -> None:
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("INSERT INTO plants VALUES (?, ?, ?)", plant)
        os._exit(0)

    run_in_processes(work)


def test_a_new_file_is_marked_as_ours_and_for_its_user_alone(open_storage, database):
    """Who can open a file, even to read it, can lock it and keep the service waiting."""
    open_storage().check(PATIENCE)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in database.parent.iterdir()}
    assert modes == {f"plants.db{suffix}": 0o600 for suffix in ("", "-lock", "-shm", "-wal")}
    with contextlib.closing(sqlite3.connect(database)) as connection:
        for name, value in ("application_id", 0x504C4E54), ("user_version", 1):
            assert connection.execute(f"PRAGMA {name}").fetchone() == (value,)
        with pytest.raises(sqlite3.IntegrityError, match="cannot store BLOB"):
            connection.execute("INSERT INTO plants VALUES (7, x'00', NULL)")


def test_every_connection_syncs_every_commit(open_storage, after):
    """synchronous=FULL (2), fullfsync and a busy timeout belong to a connection, not the file."""
    found = []

    def look(connection: sqlite3.Connection) -> None:
        for name in ("synchronous", "fullfsync", "busy_timeout", "journal_mode"):
            found.append(connection.execute(f"PRAGMA {name}").fetchone()[0])

    after("INSERT OR ABORT INTO plants (id, name, tag) VALUES (?", look)
    for plant in ONE, TWO:
        open_storage(wait_limit=9.0).add(plant)
    assert found == [2, 1, 4500, "wal"] * 2  # milliseconds: half of what a request waits


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


FOREIGN = 'is empty, damaged or another program\'s; see "The file is damaged" in docs/data.md'
NO_DATABASES = {
    "text": (b"Dear diary, " * 1000, r"plants\.db: file is not a database; see|is empty, damaged"),
    "empty": (b"", FOREIGN),
    "without an application id": ("CREATE TABLE plants (id)", FOREIGN),
    "another application's": ("PRAGMA application_id = 7", FOREIGN),
    "a newer version's": (
        f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 2",
        "is of a newer version of this service",
    ),
    "in WAL mode": ("PRAGMA journal_mode = WAL; CREATE TABLE plants (id)", FOREIGN),
}


@pytest.mark.parametrize(("content", "words"), NO_DATABASES.values(), ids=NO_DATABASES)
def test_a_file_that_is_not_ours_is_refused_and_stays_as_it_is(
    open_storage, database, content, words
):
    if isinstance(content, bytes):
        database.write_bytes(content)
    else:
        execute(database, content)
    before = database.read_bytes()
    for use in (lambda storage: storage.add(ONE), lambda storage: list(storage.rows())):
        with pytest.raises(NeedsOperator, match=words):
            use(open_storage())
    assert database.read_bytes() == before


def test_a_wal_without_its_file_is_not_played_into_a_new_one(storage, open_storage, database):
    """It may have the only copy of some plants, and a new file would throw them away."""
    storage.add(ONE)
    wal = Path(f"{database}-wal")
    shutil.copy(wal, kept := database.with_name("kept"))
    storage.close()
    database.unlink()
    os.rename(kept, wal)
    before = wal.read_bytes()
    with pytest.raises(NeedsOperator, match="is missing, but not its -wal: restore a backup"):
        open_storage().add(TWO)
    assert wal.read_bytes() == before and not database.exists()


def test_a_file_that_is_moved_into_place_while_one_is_made_stays(
    open_storage, new_database, database, after, stored
):
    """Nothing ever overwrites a database file."""
    shutil.copy(new_database, backup := database.with_name("backup"))
    execute(backup, "INSERT INTO plants VALUES (1, 'one', NULL)")
    storage = open_storage()
    after("CREATE TABLE", lambda _: os.rename(backup, database))
    with pytest.raises(Unavailable, match="File exists"):
        storage.add(TWO)
    storage.add(TWO)
    assert stored() == [(1, "one", None), (2, "two", None)]


def test_a_folder_that_is_missing_is_refused_until_it_is_there(open_storage, tmp_path):
    folder = tmp_path / "none"
    storage = open_storage(f"sqlite:///{folder}/plants.db")
    for use in (lambda: storage.check(PATIENCE), lambda: storage.add(ONE)):
        with pytest.raises(NeedsOperator, match=f"{folder}.* the folder must be there"):
            use()
    folder.mkdir()
    storage.add(ONE)


@pytest.mark.parametrize("read_only", ["folder", "file"])
def test_what_cannot_be_written_is_refused(open_storage, read_only):
    """A health check tries to write: BEGIN IMMEDIATE would succeed."""

    def start() -> None:
        with contextlib.closing(open_storage(url)) as storage:
            storage.check(PATIENCE)

    def fail() -> None:
        with pytest.raises(NeedsOperator, match=rf"plants\.db.*: .* user {os.geteuid()} able to"):
            start()

    with open_folder() as folder:
        url = f"sqlite:///{folder}/plants.db"
        if read_only == "file":
            run_as_nobody(start)
            (folder / "plants.db").chmod(0o444)
        else:
            folder.chmod(0o555)
        run_as_nobody(fail)


def test_a_failure_of_the_disk_at_the_opening_is_not_for_an_operator(
    storage, open_storage, database
):
    """It will pass: here a limit of files lets no checkpoint through of what was left."""
    storage.close()
    write_and_die(database, Plant(1, "x" * 2**18))

    def start() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, resource.RLIM_INFINITY))
        with pytest.raises(Unavailable, match="disk I/O error") as failure:
            open_storage().add(TWO)
        assert failure.type is Unavailable

    run_in_processes(start)
    open_storage().add(TWO)


def test_a_plant_does_not_depend_on_a_wal_whose_sync_failed(
    storage, open_storage, database, tmp_path
):
    """A sync that failed can leave in memory what never comes to the disk, and yet is read back.

    Here the disk has, of the WAL that a killed process left, only what was there before. A power
    cut later that is played into the file, unless another WAL has taken its place.
    """
    storage.close()
    write_and_die(database, ONE)
    on_the_disk = Path(f"{database}-wal").read_bytes()
    write_and_die(database, TWO)
    open_storage().add(TWO)
    shutil.copy(database, later := tmp_path / "later.db")
    wal = Path(f"{database}-wal").read_bytes()
    Path(f"{later}-wal").write_bytes(on_the_disk if wal.startswith(on_the_disk) else wal)
    with contextlib.closing(sqlite3.connect(later)) as connection:
        assert connection.execute("SELECT id FROM plants").fetchall() == [(1,), (2,)]


def test_while_another_program_checkpoints_nothing_is_answered_for(storage, open_storage, database):
    """What a killed process left can't be synced then."""

    def add() -> None:
        with pytest.raises(Unavailable, match="another program is at work on it"):
            open_storage(wait_limit=2 * SOON).add(ONE)

    storage.close()
    with contextlib.closing(sqlite3.connect(database)) as reader:
        reader.execute("SELECT * FROM plants")
        with open(f"{database}-shm", "r+b") as shm:
            fcntl.lockf(shm, fcntl.LOCK_EX, 1, 121)  # WAL_CKPT_LOCK, sqlite.org/walformat.html
            run_in_processes(add)


TRIGGER = "TRIGGER t BEFORE INSERT ON plants WHEN new.id IN (2, 4) BEGIN SELECT raise({}); END"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("UNIQUE INDEX i ON plants (name)", "SQLITE_CONSTRAINT_UNIQUE"),
        ("INDEX i ON plants (CASE WHEN id = 2 THEN abs(-9223372036854775807 - 1) END)", "ERROR"),
        ("INDEX i ON plants (CASE WHEN id = 2 THEN zeroblob(2000000000) END)", "SQLITE_TOOBIG"),
        (TRIGGER.format("ABORT, 'one'"), "SQLITE_CONSTRAINT_TRIGGER"),
        (TRIGGER.format("FAIL, 'one'"), "SQLITE_CONSTRAINT_TRIGGER"),
        (TRIGGER.format("IGNORE"), "a trigger or a policy keeps it out"),
    ],
)
def test_what_an_operator_added_refuses_a_plant_and_harms_no_other(storage, database, made, reason):
    """The plant is at fault, neither the file nor the batch; and nothing of it is repeated."""
    execute(database, f"CREATE {made}")
    outcomes = storage.add_all([ONE, Plant(2, "one"), Plant(3, "three")])
    assert [outcome and type(outcome) for outcome in outcomes] == [None, Rejected, None]
    assert reason in str(outcomes[1]) and "one" not in str(outcomes[1])
    storage.check(PATIENCE)
    assert list(storage.rows()) == [ONE, Plant(3, "three")]


@pytest.mark.parametrize(
    ("constraint", "plant", "outcome"),
    [("PRIMARY KEY", Plant(1, "two"), Conflict), ("NOT NULL UNIQUE", Plant(2, "one"), Rejected)],
)
def test_a_table_that_replaces_rows_replaces_no_plant(
    storage, database, constraint, plant, outcome
):
    storage.add(ONE)
    old, new = constraint.removesuffix(" UNIQUE"), f"{constraint} ON CONFLICT REPLACE"
    script = SCHEMA.partition("BEGIN;")[2].replace(old, new)
    execute(database, f"BEGIN; DROP TABLE plants; {script}")
    outcomes = [storage.add_all([each])[0] for each in (ONE, plant, Plant(3, "three"))]
    assert [each and type(each) for each in outcomes] == [None, outcome, None]
    assert list(storage.rows()) == [ONE, Plant(3, "three")]


TABLE = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT"
AFTER = "CREATE TRIGGER t AFTER INSERT ON plants BEGIN {}; END"
WRONG_FOR_ALL = [
    ("ALTER TABLE plants RENAME TO other", "no such table: plants",
     "ALTER TABLE other RENAME TO plants"),
    ("ALTER TABLE plants RENAME COLUMN tag TO kind", "has no column named tag",
     "ALTER TABLE plants RENAME COLUMN kind TO tag"),
    (f"DROP TABLE plants; {TABLE.replace('tag TEXT', 'tag TEXT, height INTEGER NOT NULL')}",
     r"NOT NULL constraint failed: plants\.height",
     "ALTER TABLE plants DROP COLUMN height"),
    ("DROP TABLE plants; CREATE VIEW plants AS SELECT 1 AS id, '' AS name, '' AS tag",
     "it is a view", f"DROP VIEW plants; {TABLE}"),
    (AFTER.format("INSERT INTO gone VALUES (1)"), "no such table", "DROP TRIGGER t"),
    (AFTER.format("SELECT load_extension('x')"), "unsafe use of load", "DROP TRIGGER t"),
    (AFTER.format("SELECT slug(new.name)"), "no such function: slug", "DROP TRIGGER t"),
]  # fmt: skip


@pytest.mark.parametrize("when", ["before a start", "while it runs"])
@pytest.mark.parametrize(("made", "reason", "undone"), WRONG_FOR_ALL)
def test_what_is_wrong_for_all_plants_is_for_an_operator(
    storage, database, made, reason, undone, when
):
    """A 503, not "never", until it is undone; nothing in a file makes SQLite use what is unsafe."""
    if when == "while it runs":
        storage.add(ONE)
    execute(database, made)
    for _ in range(2):
        outcomes = storage.add_all([TWO, Plant(3, "three")])
        assert {type(outcome) for outcome in outcomes} == {NeedsOperator}
        with pytest.raises(NeedsOperator, match=reason):
            storage.add(TWO)
    if "height" not in made:
        with pytest.raises(NeedsOperator, match=reason):
            storage.check(PATIENCE)
    execute(database, undone)
    storage.add(TWO)


def test_a_text_that_is_not_utf_8_is_a_conflict_for_its_id_alone(storage, database):
    """Nor is any of it in the message."""
    storage.add(TWO)
    execute(database, "UPDATE plants SET name = 'secret' || CAST(x'ff' AS TEXT)")
    outcomes = storage.add_all([ONE, TWO, Plant(3, "three")])
    assert [outcome and type(outcome) for outcome in outcomes] == [None, Conflict, None]
    assert "secret" not in str(outcomes[1])


def test_reading_all_plants_leaves_the_files_as_they_are(storage, open_storage, database):
    """Whoever reads holds no lock, so the last to close must not checkpoint."""
    storage.close()
    write_and_die(database, ONE)
    files = (database, Path(f"{database}-wal"))
    before = [file.read_bytes() for file in files]
    assert list(open_storage().rows()) == [ONE]
    assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize(
    ("held", "words"), [(lock_held, "busy or hangs"), (locked, "database is locked")]
)
def test_a_lock_that_is_not_released_is_unavailable_in_time(
    open_storage, storage, database, stored, held, words
):
    """Nothing is stored then, not later either; and it is nothing that an operator has to do."""
    late = open_storage(wait_limit=2 * SOON if held is locked else SOON)
    wait_until(lambda: late.add_all([TWO]) == [None])
    with held(database):
        for use in (lambda: late.add(ONE), lambda: late.check(2 * SOON)):
            with pytest.raises(Unavailable, match=words) as failure:
                use()
            assert failure.type is Unavailable
    storage.add(Plant(3, "three"))
    assert stored() == [TWO, Plant(3, "three")]


@pytest.mark.parametrize("held", [locked, lock_held])
def test_a_lock_that_is_released_in_time_delays_the_answer_only(storage, database, stored, held):
    """That of another program, or of another process of the service."""
    storage.check(PATIENCE)
    with held(database):
        adder = threading.Thread(target=storage.add, args=[ONE])
        adder.start()
        adder.join(SOON)
        assert adder.is_alive() and stored() == []
    adder.join(PATIENCE)
    assert stored() == [ONE]


def test_opening_and_closing_wait_for_the_lock(open_storage, database):
    """Both can checkpoint, which must not meet another process's write; the waits end in time."""
    wal = Path(f"{database}-wal")
    storage = open_storage(wait_limit=SOON)
    with lock_held(database):
        with pytest.raises(Unavailable, match="busy or hangs"):
            storage.check(SOON)
        assert not database.exists()
    wait_until(lambda: storage.add_all([ONE]) == [None])
    with lock_held(database):
        storage.close()
        assert wal.exists()
    wait_until(lambda: not wal.exists())


def test_a_process_can_end_while_another_holds_the_lock(open_storage, database):
    """What waits for the lock, and can't be stopped from waiting, is not waited for."""

    def work() -> None:
        with contextlib.closing(open_storage(wait_limit=SOON)) as storage:
            assert "busy or hangs" in str(*storage.add_all([ONE]))

    with lock_held(database):
        run_in_processes(work)


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
        replace(file)
    uses = [lambda: storage.add(ONE), lambda: storage.add(TWO), lambda: storage.check(PATIENCE)]
    for number, use in enumerate([*uses, *uses]):
        with pytest.raises(NeedsOperator, match="deleted or replaced: see docs/data"):
            use()
        if number == 2 and change == "deleted":
            os.rename(kept, file)


@pytest.mark.parametrize("statement", ["PRAGMA application_id", "INSERT OR ABORT INTO plants"])
def test_a_file_that_is_replaced_during_the_work_is_noticed(storage, database, after, statement):
    """While it is opened, or by the time the plant is stored, also where that fails."""

    def act(_: sqlite3.Connection) -> None:
        replace(database)
        if statement.startswith("INSERT"):
            raise sqlite3.OperationalError("disk I/O error")

    after(statement, act)
    with pytest.raises(Unavailable, match="replaced"):
        storage.add(TWO)


def test_a_folder_that_was_deleted_is_no_error_at_the_end(open_storage, tmp_path):
    """Nothing is left to be written."""

    def work() -> None:
        threading.excepthook = lambda _: os._exit(1)
        with contextlib.closing(open_storage(f"sqlite:///{folder}/plants.db")) as storage:
            storage.add(ONE)
            shutil.rmtree(folder)
            assert isinstance(*storage.add_all([TWO]), NeedsOperator)

    (folder := tmp_path / "data").mkdir()
    run_in_processes(work)


def test_the_wal_does_not_stay_large(storage, database):
    """It grows while somebody reads, and begins anew once nobody does."""
    wal = Path(f"{database}-wal")
    numbers = itertools.count()

    def store(count: int) -> None:
        plants = [Plant(next(numbers), "x" * 16_000) for _ in range(count)]
        assert storage.add_all(plants) == [None] * count

    store(1)
    with contextlib.closing(sqlite3.connect(database)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM plants").fetchone()
        store(1000)
        assert wal.stat().st_size > WAL_LIMIT
    store(1)
    store(1)
    assert wal.stat().st_size <= WAL_LIMIT


def test_a_plant_waits_while_another_process_has_the_lock(storage, open_storage, database):
    """No two write at the same time, though SQLite would let them take turns."""
    storage.add(ONE)
    with open(f"{database}-lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(Unavailable):
            open_storage(wait_limit=0.2).add(TWO)
