"""What a power cut or a full disk does to the SQLite file: on a file system that is there for that.

It takes root, to mount one.
"""

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from schemas import Plant
from sqlite import SCHEMA
from start import get_storage
from tests.conftest import names_in
from tests.support.server import Server, Writers, wait_until
from tests.test_start import stops_in_one_line

EXT4_IOC_SHUTDOWN = 0x8004587D  # fs/ext4/ext4.h in Linux
NO_LOG_FLUSH = struct.pack("I", 2)


class Disk:
    """An ext4 file system in a file."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "disk"
        self.root.mkdir()
        self._image = folder / "image"
        with self._image.open("wb") as image:
            image.truncate(2**25)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", self._image], check=True)
        self.mount()

    def mount(self) -> None:
        """Mount it; the file system replays its journal, as after any crash."""
        subprocess.run(["mount", "-o", "loop", self._image, self.root], check=True)

    def remount(self, mode: str) -> None:
        """Let it be "ro" or "rw", when the last of the killed processes has gone."""
        command = ["mount", "-o", f"remount,{mode}", self.root]
        wait_until(lambda: subprocess.run(command).returncode == 0)

    def unmount(self) -> None:
        """Unmount it, when the last of the killed processes has gone; then mount() takes a copy."""
        wait_until(lambda: subprocess.run(["umount", self.root]).returncode == 0)
        # A container that was started meanwhile has this mount in a namespace of its own, and as
        # long as it has, a mount of the same image is the same file system, still without power.
        replacement = self._image.with_name("replacement")
        shutil.copyfile(self._image, replacement)
        replacement.replace(self._image)

    def remove(self) -> None:
        """Unmount it, whoever uses it."""
        if os.path.ismount(self.root):
            subprocess.run(["umount", "--lazy", self.root], check=True)

    def cut_power(self) -> None:
        """Let nothing more come to the disk: what was not synced is not there after a mount."""
        descriptor = os.open(self.root, os.O_RDONLY)
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH)
        os.close(descriptor)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Leave no room on it for a while."""
        ballast = self.root / "ballast"
        with ballast.open("wb", buffering=0) as file:
            for size in (2**20, 2**10, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
        yield
        ballast.unlink()


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    """A disk of 32 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    disk = Disk(tmp_path)
    yield disk
    disk.remove()


@pytest.fixture
def database(disk) -> Path:
    """The SQLite file, on that disk."""
    return disk.root / "plants.db"


def acknowledged_before_a_power_cut(
    server: Server, disk: Disk, count: int, first: int = 0
) -> set[tuple[int, str]]:
    """Cut the power after `count` plants; return all that had been answered with 200 by then."""
    with Writers(server.port, first) as writers:
        assert writers.goes_on(count)
        acknowledged = set(writers.acknowledged.copy().items())
        disk.cut_power()
    wait_until(lambda: server.request("GET", "/healthz")[0] == 503)
    reboot(server, disk)
    return acknowledged


def reboot(server: Server, disk: Disk) -> None:
    """End what runs, and mount the disk anew."""
    server.kill()
    disk.unmount()
    disk.mount()


def test_every_acknowledged_plant_survives_a_power_cut(serve, disk, database, record_property):
    """Several, one after another, and each time the service goes on with the file as it is."""
    acknowledged: set[tuple[int, str]] = set()
    counts = (100, 1000, 5000)  # within the first checkpoint of the WAL, and beyond it
    for number, count in enumerate(counts):
        acknowledged |= acknowledged_before_a_power_cut(serve(), disk, count, first=number * 10**6)
        lost = acknowledged - names_in(database)
        assert lost == set()
    record_property(
        f"{len(counts)} power cuts", f"{len(acknowledged)} plants acknowledged, {len(lost)} lost"
    )


def test_a_power_cut_takes_what_was_not_synced(serve, stored, disk, failing_sync, record_property):
    """Where a sync does nothing, plants are lost: else the tests here would prove nothing."""
    server = serve(**failing_sync)
    assert server.post({"id": 10**6, "name": "synced"})[0] == 200
    Path(failing_sync["SYNC_SKIPS"]).touch()
    acknowledged = acknowledged_before_a_power_cut(server, disk, 300)
    lost = acknowledged - {(number, name) for number, name, _ in stored()}
    assert lost != set()
    record_property(
        "a power cut where a sync does nothing",
        f"{len(acknowledged)} plants acknowledged, {len(lost)} lost",
    )


def test_a_full_disk_is_a_503_until_there_is_room(serve, stored, disk, record_property):
    """Nothing that was acknowledged is lost, and nobody restarts the service."""
    server = serve()
    with Writers(server.port) as writers:
        assert writers.goes_on(300)
        with disk.full():
            wait_until(lambda: writers.answers[503] > 100)
            wait_until(lambda: server.request("GET", "/healthz")[0] == 503)  # the last write is old
        assert writers.goes_on(300)
    assert server.request("GET", "/healthz")[0] == 200
    assert writers.answers.keys() == {200, 503}
    lost = writers.acknowledged.items() - {(number, name) for number, name, _ in stored()}
    assert lost == set()
    record_property(
        "a full disk",
        f"{writers.answers[503]} answers 503, "
        f"{len(writers.acknowledged)} plants acknowledged, {len(lost)} lost",
    )


FILES = ("", "-wal", "-shm")


@pytest.fixture
def stopped(serve, disk, database) -> Callable[[Collection[str]], None]:
    """Leaves these of the database's files: as after a power cut, or without -wal after a stop."""

    def leave(files: Collection[str]) -> None:
        server = serve()
        assert server.post({"id": 1, "name": "one"})[0] == 200
        kept = {suffix: Path(f"{database}{suffix}").read_bytes() for suffix in FILES}
        server.kill() if "-wal" in files else server.signal(signal.SIGTERM)
        server.wait()
        for suffix in FILES:
            file = Path(f"{database}{suffix}")
            if suffix not in files:
                file.unlink(missing_ok=True)
            elif not file.exists():
                file.write_bytes(kept[suffix])

    return leave


@pytest.mark.parametrize(
    "files",
    [files for count in range(4) for files in itertools.combinations(FILES, count)],
    ids=lambda files: " ".join(f"plants.db{suffix}" for suffix in files) or "none",
)
def test_a_start_on_a_full_disk_serves_once_there_is_room(serve, stopped, disk, files):
    """Whatever is there already. Nobody restarts it, and no worker is ended by SQLite's mapping.

    A -wal without its file may have the only copy of some plants: that needs an operator.
    """
    stopped(files)
    with disk.full():
        server = serve()
        if "" not in files and "-wal" in files:
            return stops_in_one_line(server, "is missing, but not its -wal: restore a backup")
        for _ in range(8):  # so that either worker is asked
            assert server.post({"id": 2, "name": "two"})[0] == 503
        assert "not available at the start: " in server.err
        assert re.search(r"plants\.db\S*: (No space left|database or disk is full)", server.err)
    assert server.post({"id": 2, "name": "two"})[0] == 200
    assert server.post({"id": 1, "name": "another"})[0] == (409 if "" in files else 200)
    assert server.err.count("Booting worker") == 2


def test_a_read_only_disk_stops_the_start_until_it_can_be_written(serve, stopped, disk):
    """In a line that says so, not to another, empty file; a backup on it can be dumped."""
    stopped(FILES)
    backup = disk.root / "backup.db"
    with contextlib.closing(sqlite3.connect(backup)) as connection:
        connection.executescript(f"{SCHEMA}; INSERT INTO plants VALUES (1, 'one', NULL)")
    for mode in ("ro", "rw"):
        disk.remount(mode)
        server = serve()
        if mode == "ro":
            stops_in_one_line(server, r"plants\.db\S*: .*read-?only")
            assert "DATABASE_URL" not in server.err
            with contextlib.closing(get_storage(f"sqlite:///{backup}")) as storage:
                assert list(storage.rows()) == [Plant(1, "one")]
    assert server.post({"id": 1, "name": "another"})[0] == 409


def test_a_disk_that_is_mounted_late_is_no_reason_for_a_new_file(serve, disk):
    """If the file has a folder of its own there, which the start then misses and names."""
    folder = disk.root / "data"
    folder.mkdir()
    url = f"sqlite:///{folder}/plants.db"
    for mounted in (True, False, True):
        server = serve(DATABASE_URL=url)
        if not mounted:
            stops_in_one_line(server, f"{folder}: no such folder; make or mount it")
            disk.mount()
            continue
        assert server.post({"id": 1, "name": "n"})[0] == 200
        server.kill()
        if not list(disk.root.parent.glob("server1.*")):
            disk.unmount()
