"""A small disk: an ext4 file system in a file, whose power can be cut. Takes root."""

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.server import wait_until

EXT4_IOC_SHUTDOWN = 0x8004587D  # fs/ext4/ext4.h in Linux
NO_LOG_FLUSH = struct.pack("I", 2)
SIZE = 2**25


class Disk:
    """A disk of 32 MiB. A `with` block mounts it, and leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self.root, self._image = folder / "disk", folder / "image"
        self.root.mkdir()
        with self._image.open("wb") as image:
            image.truncate(SIZE)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", self._image], check=True)

    def __enter__(self) -> "Disk":
        self.mount()
        return self

    def __exit__(self, *_: object) -> None:
        if os.path.ismount(self.root):
            subprocess.run(["umount", "--lazy", self.root], check=True)

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
