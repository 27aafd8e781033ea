"""The service beside its peers: runs everything in turn, and draws what came of it."""

import contextlib
import json
import sqlite3
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from calls import measure_calls
from competitors import PYTHON_PEERS, Competitor, competitors
from environments import HERE, ROOT, environment, node_packages
from load import SETTINGS, post
from results import ORDERS, ROWS, Results
from service import empty_folder, make_table, running

PARTS = ("1", "32", "128", "packets", "slow", "rows", "calls", "bodies")


class Peers:
    """The competitors, and a folder for what they store."""

    def __init__(self, parts: Collection[str], seconds: int) -> None:
        """`parts` are what is measured, each run for so many seconds."""
        requirements = ROOT / "requirements.txt", HERE / "requirements.txt"
        self.tools = environment(*requirements)
        self.parts, self.seconds = parts, seconds
        self.competitors = competitors(self.tools)
        if not node_packages():
            title = self.competitors.pop("fastify").title
            print(f"left out: {title}, as npm is not installed", flush=True)
        self.results = Results(self.competitors)

    def measure(self, rounds: int) -> Results:
        """Measure all of them, in turn."""
        with tempfile.TemporaryDirectory(dir=HERE, prefix=".") as temporary:
            folder = Path(temporary)
            if "rows" in self.parts:
                for order in ORDERS:
                    fill(self.competitors["ours"], folder / order, order)
            for _ in range(rounds):
                for name in self.competitors:
                    self._measure_load(folder, name, slow=False)
                for name in self.competitors:
                    if self.competitors[name].stores:
                        self._measure_load(folder, name, slow=True)
                if "rows" in self.parts:
                    self._measure_rows(folder)
                if "calls" in self.parts:
                    self.results.calls.append(measure_calls(self.tools, ROOT))
        if "bodies" in self.parts:
            program = [self.tools / "python", "-m", "tests.support.costs"]
            self.results.bodies = subprocess.check_output(program, cwd=ROOT, text=True)
        return self.results

    def _measure_load(self, folder: Path, name: str, slow: bool) -> None:
        """One competitor, in all settings with or without the slow disk."""
        settings = [part for part in self.parts if part in SETTINGS]
        settings = [part for part in settings if SETTINGS[part].slow == slow]
        if not settings:
            return
        with empty_folder(folder) as own:
            if name in PYTHON_PEERS:
                make_table(own)
            with running(self.competitors[name], own, slow=slow) as service:
                for part in settings:
                    run = post(service, SETTINGS[part], self.seconds)
                    self.results.add(name, part, run)
                if not slow:
                    self.results.starts[name].append(service.seconds_to_first)
                    if service.process.poll() is None:
                        self.results.memory[name].append(service.memory())

    def _measure_rows(self, folder: Path) -> None:
        """This service, with an empty table and with a full one."""
        ours = self.competitors["ours"]
        for order in ORDERS:
            with empty_folder(folder) as own, running(ours, own) as service:
                run = post(service, SETTINGS["32"], self.seconds, order)
                self.results.add("ours", f"empty, {order}", run)
            with running(ours, folder / order) as service:
                run = post(service, SETTINGS["32"], self.seconds, order)
                self.results.add("ours", f"full, {order}", run)

    def draw(self, file: Path) -> None:
        """Draw plants a second of those that store them in SQLite."""
        rates = {
            competitor.title: self.results.median(name, "32").rate
            for name, competitor in self.competitors.items()
            if competitor.stores and self.results.runs[name, "32"]
        }
        program = [self.tools / "python", HERE / "draw.py", file]
        subprocess.run(program, input=json.dumps(rates), text=True, check=True)


def fill(ours: Competitor, folder: Path, order: str) -> None:
    """Make a database with a full table."""
    folder.mkdir()
    with running(ours, folder) as service:
        pass
    number = "n" if order == "in-order" else "((n * 2654435761) & 0xFFFFFFFF) << 20"
    with contextlib.closing(sqlite3.connect(service.database)) as connection, connection:
        connection.execute(
            "WITH RECURSIVE numbers (n) AS "
            f"(SELECT 1 UNION ALL SELECT n + 1 FROM numbers LIMIT {ROWS}) "
            f"INSERT OR IGNORE INTO plants SELECT {number}, 'Monstera', 'indoor' FROM numbers"
        )
