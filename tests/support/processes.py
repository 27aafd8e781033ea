"""Other processes, what they use, and another user than the one who runs the tests."""

import multiprocessing
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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


def memory(pid: int) -> float:
    """The MiB of a process, with its share of what it has in common with others (PSS)."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"(?m)^Pss: +(\d+) kB", rollup)[1]) / 1024
