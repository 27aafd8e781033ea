"""Other processes, what they use, and another user than the one who runs the tests."""

import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.server import PATIENCE

NOBODY = 65534


def run_in_processes(*functions: Callable[[], object]) -> None:
    """Run functions at once, each in a process of its own, which has to end by itself."""
    processes = [multiprocessing.get_context("fork").Process(target=each) for each in functions]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * len(processes)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own can't."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        folder.chmod(0o777)
        shutil.rmtree(folder)


class Usage(NamedTuple):
    threads: int
    descriptors: int
    memory: float  # MiB, with its share of what it has in common with others (PSS)
    cpu_time: float  # seconds


def usage(pid: int | str) -> Usage:
    """What a process uses now."""
    process = Path(f"/proc/{pid}")
    memory = re.search(r"(?m)^Pss: +(\d+) kB", (process / "smaps_rollup").read_text())[1]
    threads, descriptors = (len(list((process / name).iterdir())) for name in ("task", "fd"))
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    cpu_time = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return Usage(threads, descriptors, int(memory) / 1024, cpu_time)
