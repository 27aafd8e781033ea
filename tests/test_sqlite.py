"""The storage on a SQLite file: what is refused, what is durable, and who may write when."""

import contextlib
import fcntl
import os
import re
import shutil
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from engines import Conflict, NeedsOperator, Rejected, Unavailable
from engines.sqlite import APPLICATION_ID, SCHEMA, WAL_LIMIT
from plant import Plant
from tests.support.disk import damage_last_page
from tests.support.locks import lock_held, locked
from tests.support.processes import run_in_processes
from tests.support.server import PATIENCE, wait_until

SOON = 0.1  # seconds
ONE, TWO = Plant(1, "one"), Plant(2, "two")


def execute(database: Path, script: str) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executescript(script)


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


def test_every_connection_syncs_every_commit(storage, open_storage, monkeypatch):
    """synchronous=FULL (2), fullfsync and a busy timeout belong to a connection, not the file."""
    connections = []
    connect = sqlite3.connect

    def note(*arguments: object, **options: object) -> sqlite3.Connection:
        connections.append(connect(*arguments, **options))
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", note)
    for plant in ONE, TWO:
        open_storage(wait_limit=9.0).add(plant)
    names = ("synchronous", "fullfsync", "busy_timeout", "journal_mode")
    found = [[each.execute(f"PRAGMA {n}").fetchone()[0] for n in names] for each in connections]
    assert found == [[2, 1, 4500, "wal"]] * 2  # milliseconds: half of what a request waits


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


FOREIGN = "is empty, damaged or another program's; see docs/data.md"
NO_DATABASES = {
    "text": (b"Dear diary, " * 1000, r"plants\.db: file is not a database; see|is empty, damaged"),
    "empty": (b"", FOREIGN),
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
    storage.close()
    write_and_die(database, ONE)
    database.unlink()
    before = (wal := Path(f"{database}-wal")).read_bytes()
    with pytest.raises(NeedsOperator, match="is missing, but not its -wal: restore a backup"):
        open_storage().add(TWO)
    assert wal.read_bytes() == before and not database.exists()


def test_a_file_that_is_moved_into_place_while_one_is_made_stays(
    open_storage, new_database, database, monkeypatch, stored
):
    """Nothing ever overwrites a database file."""
    shutil.copy(new_database, backup := database.with_name("backup"))
    execute(backup, "INSERT INTO plants VALUES (1, 'one', NULL)")
    storage, link = open_storage(), os.link
    monkeypatch.setattr(os, "link", lambda *names: os.rename(backup, database) or link(*names))
    with pytest.raises(Unavailable, match="File exists"):
        storage.add(TWO)
    storage.add(TWO)
    assert stored() == [(1, "one", None), (2, "two", None)]


def test_a_file_that_is_replaced_while_it_is_opened_takes_no_plant(
    open_storage, new_database, database, monkeypatch, stored
):
    """It would take them under a name that it has no more."""
    shutil.copy(new_database, database)
    shutil.copy(new_database, backup := database.with_name("backup"))
    storage, connect = open_storage(), sqlite3.connect

    def connect_and_replace(*arguments: object, **options: object) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        with contextlib.suppress(FileNotFoundError):
            os.replace(backup, database)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_and_replace)
    with pytest.raises(Unavailable, match="was replaced while it was opened"):
        storage.add(ONE)
    storage.add(TWO)
    assert stored() == [(2, "two", None)]


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


TABLE = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT"
WRONG_FOR_ALL = [
    ("ALTER TABLE plants RENAME TO other", "no such table: plants",
     "ALTER TABLE other RENAME TO plants"),
    (f"DROP TABLE plants; {TABLE.replace('tag TEXT', 'tag TEXT, height INTEGER NOT NULL')}",
     r"NOT NULL constraint failed: plants\.height",
     "ALTER TABLE plants DROP COLUMN height"),
    ("DROP TABLE plants; CREATE VIEW plants AS SELECT 1 AS id, '' AS name, '' AS tag",
     "it is a view", f"DROP VIEW plants; {TABLE}"),
    ("CREATE TRIGGER t AFTER INSERT ON plants BEGIN INSERT INTO gone VALUES (1); END",
     "no such table: main.gone", "DROP TRIGGER t"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "reason", "undone"), WRONG_FOR_ALL)
def test_what_is_wrong_for_all_plants_is_for_an_operator(storage, database, made, reason, undone):
    """A 503, not "never", until it is undone, while the service runs."""
    storage.add(ONE)
    execute(database, made)
    for plants in [TWO], [TWO, Plant(3, "three")]:
        for outcome in storage.add_all(plants):
            assert isinstance(outcome, NeedsOperator) and re.search(reason, str(outcome))
    if "height" not in made:
        with pytest.raises(NeedsOperator, match=reason):
            storage.check(PATIENCE)
    execute(database, undone)
    storage.check(PATIENCE)
    storage.add(TWO)


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


def test_a_health_check_finds_damage_where_plants_are_stored(storage, open_storage, database):
    storage.add_all([Plant(number, "x" * 3000) for number in range(100)])  # a page each
    storage.close()
    damage_last_page(database)
    with pytest.raises(NeedsOperator, match="malformed"):
        open_storage().check(PATIENCE)


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
def test_a_lock_delays_an_answer_but_not_for_ever(
    open_storage, storage, database, stored, held, words
):
    """Of another process of the service, or another program: it is not for an operator.

    Who gave up stores nothing later.
    """
    storage.check(PATIENCE)
    late = open_storage(wait_limit=2 * SOON)
    wait_until(lambda: late.add_all([TWO]) == [None])
    with held(database):
        for use in (lambda: late.add(Plant(3, "three")), lambda: late.check(2 * SOON)):
            with pytest.raises(Unavailable, match=words) as failure:
                use()
            assert failure.type is Unavailable
        adder = threading.Thread(target=storage.add, args=[ONE])
        adder.start()
        adder.join(SOON)
        assert adder.is_alive() and stored() == [TWO]
    adder.join(PATIENCE)
    wait_until(lambda: late.add_all([Plant(4, "four")]) == [None])
    assert stored() == [ONE, TWO, Plant(4, "four")]


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
        with pytest.raises(NeedsOperator, match="deleted or replaced: see docs/data"):
            use()
        if kept.exists():
            os.rename(kept, file)  # too late


def test_the_wal_does_not_stay_large(storage, database):
    """It grows while somebody reads, and begins anew once nobody does."""
    wal = Path(f"{database}-wal")
    storage.add(ONE)
    with contextlib.closing(sqlite3.connect(database)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM plants").fetchone()
        assert not any(storage.add_all([Plant(number, "x" * 16_000) for number in range(2, 1000)]))
        assert wal.stat().st_size > WAL_LIMIT
    for number in 1000, 1001:
        storage.add(Plant(number, "n"))
    assert wal.stat().st_size <= WAL_LIMIT
