"""The SQLite file after a power cut, on a full disk, and on a read-only one."""

import contextlib
import fcntl
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import STORED, Server, fails_with, wait_until
from tests.support.storage import read_names
from tests.support.wire import Writers

EXT4_IOC_SHUTDOWN = 0x8004587D  # fs/ext4/ext4.h in Linux
NO_LOG_FLUSH = struct.pack("I", 2)


class Disk:
    """An ext4 file system of 32 MiB in a file, mounted at its `root`."""

    def __init__(self, folder: Path) -> None:
        self.root, self._image = folder / "disk", folder / "image"
        self.root.mkdir()
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", self._image, "32M"], check=True)
        self._mount()

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self._image, self.root], check=True)

    def cut_power(self) -> None:
        """Let no later write reach the disk."""
        descriptor = os.open(self.root, os.O_RDONLY)
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH)
        os.close(descriptor)

    def power_up(self) -> None:
        """Mount it again, without unsynced data, once all processes that used it have ended."""
        wait_until(lambda: subprocess.run(["umount", self.root]).returncode == 0)
        # A container that was started meanwhile has the old mount in a namespace of its own. While
        # it has, a new mount of this image would be the same file system, still without power. So
        # mount a copy.
        shutil.copyfile(self._image, copy := self._image.with_name("copy"))
        copy.replace(self._image)
        self._mount()

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Leave no room on it for a while."""
        ballast = self.root / "ballast"
        # It fails once the disk is full.
        subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=1k"])
        yield
        ballast.unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Make it read-only for a while, once all processes that wrote to it have ended."""
        mount = ["mount", self.root, "-o"]
        wait_until(lambda: subprocess.run([*mount, "remount,ro"]).returncode == 0)
        yield
        subprocess.run([*mount, "remount,rw"], check=True)


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    yield (disk := Disk(tmp_path))
    subprocess.run(["umount", "--lazy", disk.root], check=True)


@pytest.fixture
def database(disk) -> Path:
    """The SQLite file, on a disk of its own."""
    return disk.root / "plants.db"


def acknowledged_before_a_power_cut(server: Server, disk: Disk, count: int) -> dict[int, str]:
    """Cut the power after `count` plants. Return all plants that were acknowledged by then."""
    with Writers(server.port) as writers:
        writers.wait_for_more(count)
        acknowledged = writers.acknowledged.copy()
        disk.cut_power()
    wait_until(lambda: server.health() == 503)
    server.kill()
    disk.power_up()
    return acknowledged


def test_every_acknowledged_plant_survives_a_power_cut(serve, disk, url):
    """There are several power cuts, and each time the service goes on with the file as it is."""
    acknowledged: dict[int, str] = {}
    for count in (100, 1000, 5000):  # The WAL is checkpointed after some 1,000 pages.
        acknowledged |= acknowledged_before_a_power_cut(serve(), disk, count)
        assert acknowledged.items() <= read_names(url).items()


def test_a_power_cut_takes_plants_that_were_not_synced(serve, disk, url, failing_sync):
    """If a sync does nothing, plants have to be lost. Otherwise the tests here prove nothing."""
    server = serve(**failing_sync)
    assert server.post({"id": 1, "name": "synced"})[0] == STORED
    Path(failing_sync["SYNC_SKIPS"]).touch()
    acknowledged = acknowledged_before_a_power_cut(server, disk, 300)
    names = read_names(url)
    assert acknowledged.items() - names.items() and names[1] == "synced"


def test_a_full_disk_causes_503s_until_there_is_room(serve, url, disk):
    """No acknowledged plant is lost, and nobody has to restart the service."""
    server = serve()
    with Writers(server.port) as writers:
        writers.wait_for_more(300)
        with disk.full():
            wait_until(lambda: writers.answers[503] > 100)
            wait_until(lambda: server.health() == 503)  # The last write is older than 1 s.
        writers.wait_for_more(300)
    assert server.health() == 200
    assert writers.answers.keys() == {STORED, 503}
    assert "database or disk is full" in server.out
    assert writers.acknowledged.items() <= read_names(url).items()


def test_conflicts_on_a_full_disk_do_not_make_the_health_check_succeed(serve, disk):
    """A batch in which every plant is a conflict writes nothing, and so proves nothing."""
    server = serve(WEB_CONCURRENCY="1")
    for number in range(100):
        assert server.post({"id": number, "name": "one"})[0] == STORED
    with disk.full():
        large = ({"id": number, "name": "n" * 10_000} for number in itertools.count(1000))
        wait_until(lambda: server.post(next(large))[0] == server.health() == 503)
        for _ in range(20):
            assert server.post({"id": 7, "name": "another"})[0] == 409
            assert server.health() == 503


def test_a_file_that_is_mounted_alone_ends_the_start_in_one_line(serve, disk, database, tmp_path):
    """`docker run -v ./plants.db:/data/plants.db` mounts it like this.

    Its -wal would be deleted with the container, and with it the plants that are only there.
    """
    (file := tmp_path / "my plants.db").touch()
    (target := database.with_name("my plants.db")).touch()
    subprocess.run(["mount", "--bind", file, target], check=True)
    try:
        url = f"sqlite:///{target}".replace(" ", "%20")
        fails_with(serve(DATABASE_URL=url), "is a mount; mount a folder, and name a file in it$")
    finally:
        subprocess.run(["umount", target], check=True)


@pytest.mark.parametrize("end", [None, Server.stop, Server.kill])
@pytest.mark.parametrize(
    ("state", "words"),
    [(Disk.full, "(No space left on device|.* disk is full)$"), (Disk.read_only, ".*read-?only")],
)
def test_a_disk_that_accepts_no_write_ends_the_start_in_one_line(serve, disk, state, words, end):
    """There may be a file or not. Later, a start works, and every plant is there."""
    if end:
        server = serve()
        assert server.post({"id": 1, "name": "one"})[0] == STORED
        end(server)
    with state(disk):
        fails_with(serve(), rf"plants\.db\S*: {words}")
    server = serve()
    assert server.post({"id": 1, "name": "another"})[0] == (409 if end else STORED)
