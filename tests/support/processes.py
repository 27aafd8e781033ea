"""Other processes, and what they use."""

import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path

from tests.support.server import PATIENCE


def run_in_processes(*functions: Callable[[], object]) -> None:
    """Run functions at once, each in a process of its own, which has to end by itself."""
    processes = [multiprocessing.get_context("fork").Process(target=each) for each in functions]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def memory(pid: int) -> float:
    """The MiB of a process, with its share of what it has in common with others (PSS)."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"(?m)^Pss: +(\d+) kB", rollup)[1]) / 1024
