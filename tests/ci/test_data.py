"""docs/data.md is true: the tests type its commands while a service runs."""

import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from plant import Plant
from tests.support.pages import block, command
from tests.support.server import ROOT, STORED, wait_until
from tests.support.storage import Row, read_names, read_rows
from tests.support.wire import MONSTERA, Writers

TYPING_LIMIT = 120  # seconds for all blocks of one run()
SERVER = "postgresql://user:password@host/database"
BACKUP, CHECK = block("sh", "mkdir -p backups && backup="), block("sh", "sqlite3 -readonly")
CHOOSE, RESTORE = block("sh", "backup=$(ls -t "), block("sh", "replaced=replaced-")
ADD = block("sh", "other=$replaced/plants.db")
FIND, LOOK = block("sh", "find /proc"), block("sh", "lslocks")
RESCUE = block("sh", "(umask 77 && python3 /srv").replace("/srv/plants", f"'{ROOT}'")
PAGE = 4096  # bytes of a page of SQLite
STORE = f"""sqlite3 plants.db 'WITH RECURSIVE new (id) AS (
    VALUES ({{}}) UNION ALL SELECT id + 1 FROM new WHERE id < {{}}
) INSERT INTO plants SELECT id * {2**50}, hex(zeroblob(IIF(id % 99, 20, 5000))), NULL FROM new'"""
TEXTS = ["", "\\.", "a\n\\.\nb", "\r\n", "\t", '"', "'", "NULL", "\\N", "é\x7f🌵"]
PLANTS = [Plant(-(2**63), "n"), *map(Plant, range(10), TEXTS, TEXTS), Plant(2**63 - 1, "n")]


def run(folder: Path, *blocks: str) -> str:
    """Type blocks into one shell in a folder. Return what they print."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)], cwd=folder, timeout=TYPING_LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def plant(number: int, name: str = "n") -> dict[str, object]:
    """Return a plant as a client sends it."""
    return {"id": number, "name": name}


def test_a_second_backup_on_one_day_is_another_file_and_both_are_private(serve, tmp_path):
    """The service runs meanwhile. The check prints what the page says."""
    server = serve()
    assert server.post(MONSTERA)[0] == STORED
    assert run(tmp_path, BACKUP) == "ok\n1\n"
    second = int(time.time())
    wait_until(lambda: time.time() > second + 1)
    assert run(tmp_path, BACKUP) == "ok\n1\n"
    backups = [*(tmp_path / "backups").iterdir()]
    assert [backup.stat().st_mode & 0o777 for backup in backups] == [0o600] * 2


def test_after_a_crash_sqlite3_copies_the_wal_into_the_file(serve, tmp_path):
    """A large one would take longer than a start waits."""
    with serve() as server:
        assert server.post(MONSTERA)[0] == STORED
    assert (wal := tmp_path / "plants.db-wal").stat().st_size
    assert run(tmp_path, command("flock plants.db-lock sqlite3 plants.db")) == "0|0|0\n"
    assert not wal.exists() and b"Monstera" in (tmp_path / "plants.db").read_bytes()


def test_a_backup_is_restored_and_what_is_newer_is_added(serve, tmp_path, url):
    """The service was killed and left plants in the -wal. A plant of the restored file stays."""
    with serve() as server:
        assert [server.post(plant(number))[0] for number in (1, 2)] == [STORED] * 2
        run(tmp_path, BACKUP)
        assert [server.post(plant(number))[0] for number in (3, 4)] == [STORED] * 2
    assert run(tmp_path, CHOOSE, CHECK, RESTORE) == "ok\n2\n"
    assert read_names(url) == {1: "n", 2: "n"}
    server = serve()
    assert server.post(plant(4, "another"))[0] == STORED
    assert run(tmp_path, "replaced=$(ls -d replaced-*)", ADD) == "4\n"
    assert read_names(url) == {1: "n", 2: "n", 3: "n", 4: "another"}
    assert server.post(plant(5))[0] == STORED


def test_a_backup_is_restored_where_there_is_no_file(tmp_path, open_storage, url):
    """This is so on a new host."""
    open_storage().add(Plant(1, "n"))
    run(tmp_path, BACKUP)
    (new := tmp_path / "new").mkdir()
    run(new, f"cd {tmp_path}", CHOOSE, f"cd {new}", CHECK, RESTORE)
    assert read_names(f"sqlite:///{new}/plants.db") == {1: "n"}


def test_a_backup_is_restored_for_a_container(tmp_path, open_storage, url, database):
    """The file is on the volume, and belongs to the container's user. A function plays Docker."""
    open_storage().add(Plant(1, "n"))
    run(tmp_path, BACKUP)
    (volume := tmp_path / "the volume").mkdir()
    (volume / "plants.db").write_text("damaged")
    docker = f'docker() {{ test "$1" != volume || echo {str(volume)!r}; }}'
    run(tmp_path, docker, CHOOSE, block("sh", "docker stop plants"))
    assert read_names(f"sqlite:///{volume}/plants.db") == {1: "n"}
    status = (volume / "plants.db").stat()
    assert (status.st_uid, status.st_mode & 0o777) == (1000, 0o600)
    (replaced,) = volume.glob("replaced-*")
    assert (replaced / "plants.db").read_text() == "damaged"


def test_a_deleted_file_is_rescued_under_load(serve, database, tmp_path, url):
    """It has all plants that got a 200, even from a worker that was started too early."""
    with Writers((server := serve()).port) as clients:
        clients.wait_for_more()
        for file in database, Path(f"{database}-wal"), Path(f"{database}-shm"):
            file.unlink()
        wait_until(lambda: server.health() == 503)
        # Other processes of this machine may end while `find` looks at them.
        found = run(tmp_path, f"({FIND}) || true")
        copy = block("sh", "mkdir -m 700 rescued")
        for example, name in (("8069/fd/11", ""), ("8069/fd/12", "-wal")):
            pattern = rf"(?m)^(/proc/(\d+)/fd/\d+) {database}{name} \(deleted\)$"
            descriptor, holder = re.search(pattern, found).groups()
            copy = copy.replace(f"/proc/{example}", descriptor)
        os.kill(next(pid for pid in server.workers() if pid != int(holder)), signal.SIGKILL)
        # Each post is a connection of its own, so one of them reaches the new worker.
        wait_until(lambda: server.post(MONSTERA)[0] == STORED)
        checked = run(tmp_path, copy, block("sh", "sqlite3 rescued/plants.db"))
        assert re.fullmatch(r"ok\n\d{3,}\n", checked)
    server.stop()
    run(tmp_path, "backup=$PWD/rescued/plants.db", RESTORE)
    assert serve().health() == 200
    assert run(tmp_path, "replaced=$(ls -d replaced-*)", ADD) == ""
    assert {**clients.acknowledged, 7: "Monstera"}.items() <= read_names(url).items()


@pytest.mark.parametrize("has_backup", [True, False])
def test_all_that_can_be_read_is_read_from_a_damaged_file(has_backup, tmp_path, open_storage, url):
    """The test overwrites halves of some pages. The ids are far apart, so not each can be tried."""
    open_storage().close()
    run(tmp_path, STORE.format(-3000, 2000))
    backups = [run(tmp_path, BACKUP), CHOOSE, CHECK, block("sh", "install -m 600")]
    old = set(read_rows(url)) if has_backup else set()
    run(tmp_path, STORE.format(2001, 3000))
    plants = read_rows(url)
    with (database := tmp_path / "plants.db").open("r+b") as file:
        pages = database.stat().st_size // PAGE
        # These pages have plants, or the ends of long names, as 2 and 3 do.
        for number in (2, 3, 20, 21, 60, 61, 62, 90, pages - 1):
            file.seek(number * PAGE + (PAGE // 2 if number == 60 else 0))
            file.write(b"\xff" * (PAGE // 2))
    readable = {row for row in plants if row in read_one(database, row[0])}
    assert readable < set(plants)
    printed = run(tmp_path, *backups[1:] * has_backup, RESCUE)
    run(tmp_path, "backup=$PWD/rescued.db", RESTORE)
    rescued = read_rows(url)
    assert printed.endswith(f"\n{len(rescued)} plants are in rescued.db\n")
    assert set(plants) & set(rescued) == old | readable
    unread = [[*map(int, ids)] for ids in re.findall(r"ids (-?\d+) to (-?\d+)", printed)]
    for number in {row[0] for row in set(plants) - readable}:
        assert any(first <= number <= last for first, last in unread)
    assert open_storage().add(Plant(5, "n")) is None


def read_one(database: Path, number: int) -> list[Row]:
    """Return the plant with this id, in a list. The list is empty if the plant can't be read."""
    with closing(sqlite3.connect(database)) as file, suppress(sqlite3.Error):
        return file.execute("SELECT id, name, tag FROM plants WHERE id = ?", [number]).fetchall()
    return []


def test_a_program_that_locks_the_file_is_found_and_ended(serve, database, tmp_path):
    """The service then goes on by itself."""
    server = serve()
    assert server.post(MONSTERA)[0] == STORED
    with subprocess.Popen(["sqlite3", database], stdin=subprocess.PIPE, text=True) as program:
        # A worker may just be writing, at its start. Wait for its lock, which the shell does not do
        # by itself.
        program.stdin.write(".timeout 30000\nBEGIN IMMEDIATE;\n")
        program.stdin.flush()
        line = rf"(?m)^sqlite3 +{program.pid} WRITE {database}-shm$"
        wait_until(lambda: re.search(line, run(tmp_path, f"({LOOK}) || true")))
        wait_until(lambda: server.health() == 503)
        run(tmp_path, block("sh", "kill").replace("5162", str(program.pid)))
    assert server.post(MONSTERA)[0] == STORED
    assert server.health() == 200


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    (folder := tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_has_room_again_without_a_restart(serve, small_disk):
    """The page's commands delete old backups, and keep the newest three."""
    server = serve(DATABASE_URL=f"sqlite:///{small_disk}/plants.db")
    assert server.post(MONSTERA)[0] == STORED
    for number in range(6):
        (small_disk / f"plants-{number}.db").write_bytes(bytes(2**18))
        os.utime(small_disk / f"plants-{number}.db", (number, number))
    with suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(2**12))
    big = {**plant(8), "name": "n" * 10_000}
    wait_until(lambda: server.post({**big, "id": time.monotonic_ns()})[0] == 503)
    assert "100%" in run(small_disk, block("sh", "df -h ."))
    run(small_disk, block("sh", "ls -t plants-"))
    assert sorted(each.name for each in small_disk.glob("plants-*.db")) == [
        f"plants-{number}.db" for number in (3, 4, 5)
    ]
    asked = block("sh", "curl http://127.0.0.1:8000/healthz").replace("8000", str(server.port))
    wait_until(lambda: '{"status": "ok"}' in run(small_disk, asked))
    assert server.post(big)[0] == STORED


THERE, BACK = block("sh", "# From SQLite to PostgreSQL"), block("sh", "# From PostgreSQL to SQLite")


def test_a_move_changes_no_plant(tmp_path, open_storage, url, postgresql_url):
    """The plants move there and back: to no file, and to one that lacks some plants."""
    storage = open_storage()
    for each in PLANTS:
        storage.add(each)
    there, back = (each.replace(SERVER, postgresql_url) for each in (THERE, BACK))
    assert "(0 rows)" in run(tmp_path, there)
    assert "(0 rows)" in run(tmp_path, there)
    assert read_rows(postgresql_url) == PLANTS
    run(tmp_path, "sqlite3 plants.db 'DELETE FROM plants WHERE id > 3'", back)
    assert read_rows(url) == PLANTS
    (new := tmp_path / "new").mkdir()
    run(new, back, "chown 1000 .", command("chown --reference"))
    assert {file.stat().st_uid for file in new.glob("plants.db*")} == {1000}
    open_storage(f"sqlite:///{new}/plants.db").check(30)  # The service accepts the file.
    assert read_rows(f"sqlite:///{new}/plants.db") == PLANTS
    assert (new / "plants.db").stat().st_mode & 0o777 == 0o600
    assert (new / "plants.db-lock").stat().st_mode & 0o777 == 0o600


def test_a_move_lists_the_ids_that_have_another_plant_there(tmp_path, open_storage, postgresql_url):
    """Both databases have a plant with the id 900, and one of these has a tag."""
    there, back = (each.replace(SERVER, postgresql_url) for each in (THERE, BACK))
    old, new = open_storage(), open_storage(postgresql_url)
    old.add(Plant(1, "n", "t"))
    run(tmp_path, there)
    old.add(Plant(900, "n"))
    new.add(Plant(900, "n", "t"))
    assert re.search(r"-\n +900\n\(1 row\)", run(tmp_path, there))
    assert '{"id":900,"name":"n","tag":null}\n' in run(tmp_path, command('grep \'"id":900'))
    assert run(tmp_path, back) == "900\n"
    assert read_rows(postgresql_url) == [(1, "n", "t"), (900, "n", "t")]


def test_postgresql_is_restored(serve, tmp_path, postgresql_url):
    """The service would create the table again at once, so the operator stops it first."""
    dump = block("sh", "# A dump").replace(SERVER, postgresql_url)
    with serve(DATABASE_URL=postgresql_url) as server:
        assert server.post(plant(1))[0] == STORED
        assert run(tmp_path, dump) == "ok\n"
        assert server.post(plant(2))[0] == STORED
        run(tmp_path, f"psql -q '{postgresql_url}' -c 'DROP TABLE plants'")
        wait_until(lambda: server.post(plant(1, "another"))[0] == STORED)
        assert server.post(plant(3))[0] == STORED
        server.stop()
    name = next((tmp_path / "backups").iterdir())
    assert name.stat().st_mode & 0o777 == 0o600
    add = block("sh", 'psql "$server"')
    restore = (f"server='{postgresql_url}' dump={name}", block("sh", "replaced=replaced_"), add)
    assert "\n     1\n" in run(tmp_path, *restore, command('psql "$server" -c "DROP'))
    assert read_names(postgresql_url) == {1: "n", 3: "n"}
    assert serve(DATABASE_URL=postgresql_url).post(plant(1))[0] == STORED
