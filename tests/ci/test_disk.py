"""What a power cut, a full disk and other users do to the SQLite file.

It takes root, to mount a file system that is there for that, and to become another user.
"""

import contextlib
import re
import sqlite3
import stat
from pathlib import Path

import pytest

from plant import Plant
from tests.support.disk import Disk
from tests.support.processes import NOBODY, open_folder
from tests.support.rows import read_names
from tests.support.server import Server, stops_in_one_line, wait_until
from tests.support.writers import Writers


@pytest.fixture
def database(disk) -> Path:
    """The SQLite file, on a disk of its own."""
    return disk.root / "plants.db"


def acknowledged_before_a_power_cut(server: Server, disk: Disk, count: int) -> dict[int, str]:
    """Cut the power after `count` plants; return all that had been answered with 200 by then."""
    with Writers(server.port) as writers:
        assert writers.goes_on(count)
        acknowledged = writers.acknowledged.copy()
        disk.cut_power()
    wait_until(lambda: server.health() == 503)
    server.kill()
    disk.unmount()
    disk.mount()
    return acknowledged


def test_every_acknowledged_plant_survives_a_power_cut(serve, disk, url, record_property):
    """Several, one after another, and each time the service goes on with the file as it is."""
    acknowledged: dict[int, str] = {}
    counts = (100, 1000, 5000)  # within the first checkpoint of the WAL, and beyond it
    for count in counts:
        acknowledged |= acknowledged_before_a_power_cut(serve(), disk, count)
        lost = acknowledged.items() - read_names(url).items()
        assert lost == set()
    record_property(
        f"{len(counts)} power cuts", f"{len(acknowledged)} plants acknowledged, {len(lost)} lost"
    )


def test_a_power_cut_takes_what_was_not_synced(serve, disk, url, failing_sync, record_property):
    """Where a sync does nothing, plants are lost: else the tests here would prove nothing."""
    server = serve(**failing_sync)
    assert server.post({"id": 1, "name": "synced"})[0] == 200
    Path(failing_sync["SYNC_SKIPS"]).touch()
    acknowledged = acknowledged_before_a_power_cut(server, disk, 300)
    lost = acknowledged.items() - read_names(url).items()
    assert lost != set()
    record_property(
        "a power cut where a sync does nothing",
        f"{len(acknowledged)} plants acknowledged, {len(lost)} lost",
    )


def test_a_full_disk_is_a_503_until_there_is_room(serve, url, disk, record_property):
    """Nothing that was acknowledged is lost, and nobody restarts the service."""
    server = serve()
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
        with disk.full():
            wait_until(lambda: writers.answers[503] > 100)
            wait_until(lambda: server.health() == 503)  # the last write is old
        assert writers.goes_on(300)
    assert server.health() == 200
    assert writers.answers.keys() == {200, 503} and "the disk is full" in server.out
    lost = writers.acknowledged.items() - read_names(url).items()
    assert lost == set()
    record_property(
        "a full disk",
        f"{writers.answers[503]} answers 503, "
        f"{len(writers.acknowledged)} plants acknowledged, {len(lost)} lost",
    )


@pytest.mark.parametrize("end", [None, Server.stop, Server.kill])
def test_a_start_on_a_full_disk_serves_once_there_is_room(serve, disk, end):
    """Whatever is there already. Nobody restarts it, and no worker is ended by SQLite's mapping."""
    if end:
        server = serve()
        assert server.post({"id": 1, "name": "one"})[0] == 200
        end(server)
    with disk.full():
        server = serve()
        for _ in range(8):  # so that either worker is asked
            assert server.post({"id": 2, "name": "two"})[0] == 503
        reason = (
            r"plants\.db\S*: (No space left on device|database or disk is full); the disk is full"
        )
        assert re.search(f"the database is not available now: .*{reason}", server.err)
        assert re.search(f'" 503 .*{reason}', server.out)
    assert server.post({"id": 2, "name": "two"})[0] == 200
    assert server.post({"id": 1, "name": "another"})[0] == (409 if end else 200)
    assert server.err.count("Booting worker") == 2


def test_a_read_only_disk_stops_the_start_until_it_can_be_written(serve, open_storage, disk, url):
    """In a line that says so, not to another, empty file; a backup on it can be dumped."""
    server = serve()
    assert server.post({"id": 1, "name": "one"})[0] == 200
    with contextlib.closing(sqlite3.connect(disk.root / "plants.db")) as connection:
        connection.execute("VACUUM INTO ?", [f"{disk.root}/backup.db"])
    server.kill()
    disk.remount("ro")
    stops_in_one_line(serve(), r"plants\.db\S*: .*read-?only")
    backup = open_storage(url.replace("plants.db", "backup.db"))
    assert list(backup.rows()) == [Plant(1, "one")]
    disk.remount("rw")
    assert serve().post({"id": 1, "name": "another"})[0] == 409


def test_who_runs_the_workers_makes_the_files_and_must_be_able_to_write(serve):
    """A first start as root, with --user, in a folder that anybody may write.

    A file that this user may not write stops a start.
    """
    user = ["--user", "nobody", "--group", f"{NOBODY}"]
    with open_folder() as folder:
        url = f"sqlite:///{folder}/plants.db"
        server = serve(*user, DATABASE_URL=url)
        assert server.post({"id": 7, "name": "n"}) == (200, {"name": "n"})
        found = [file.stat() for file in folder.iterdir()]
        owned = {(stat.S_IMODE(each.st_mode), each.st_uid, each.st_gid) for each in found}
        assert owned == {(0o600, NOBODY, NOBODY)} and len(found) == 4
        server.stop()
        (folder / "plants.db").chmod(0o400)
        stops_in_one_line(serve(*user, DATABASE_URL=url), f"and user {NOBODY} able to write")
