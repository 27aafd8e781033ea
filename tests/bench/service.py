"""A competitor that runs: its processes, its database and the memory that it takes."""

import contextlib
import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psycopg
from competitors import WORKERS, Competitor
from environments import NODE, SYNC

TOKEN = "benchmark-token-0123456789"
PATIENCE = 30  # seconds for it to start, and to end
PEERS_TABLE = "plants (id INTEGER PRIMARY KEY, name VARCHAR NOT NULL, tag VARCHAR)"


class Service:
    """A competitor that runs on a database of its own."""

    def __init__(self, competitor: Competitor, folder: Path, url: str, slow: bool) -> None:
        self.competitor = competitor
        self.database = folder / "plants.db"
        self.database_url = url or f"sqlite:///{self.database}"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.seconds_to_first = math.nan
        self._log = folder / "log"
        self._start = time.monotonic()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [part.replace("PORT", str(self.port)) for part in competitor.command],
                cwd=competitor.folder or folder, env=self._environment(slow),
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _environment(self, slow: bool) -> dict[str, str]:
        environment = {
            **os.environ,
            "DATABASE_URL": self.database_url,
            "NODE_PATH": str(NODE / "node_modules"),
            "PLANTS_TOKENS": TOKEN,
            "PYTHONPATH": str(self.competitor.source),
            "WEB_CONCURRENCY": str(WORKERS),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # it would make each start slow
        if slow:
            environment |= {"LD_PRELOAD": str(SYNC), "SYNC_WAITS": str(SYNC)}  # which is there
        return environment

    def wait_until_it_answers(self) -> None:
        """Post a first plant until it is stored, and see how long that took from the start."""
        body = json.dumps({"id": -time.time_ns() // 1000, "name": "first"}).encode()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/plants", body, headers)
        while True:
            try:
                urllib.request.urlopen(request, timeout=5).close()
                self.seconds_to_first = time.monotonic() - self._start
                return
            except OSError:
                late = time.monotonic() > self._start + PATIENCE
                if late or self.process.poll() is not None:
                    sys.stderr.write(self._log.read_text()[-2000:])
                    sys.exit(f"{self.competitor.title} does not start")
                time.sleep(0.01)

    def memory(self) -> float:
        """The memory of all its processes in MB, what they share counted once (PSS)."""
        total = 0
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.getsid(int(process.name)) == self.process.pid:
                    rollup = (process / "smaps_rollup").read_text()
                    total += int(rollup.partition("Pss:")[2].split()[0])
        return total / 1024

    def count(self) -> int:
        """The number of plants that are stored."""
        if not self.competitor.stores:
            return 0
        select = "SELECT count(*) FROM plants"
        if self.database_url.startswith("postgresql:"):
            with psycopg.connect(self.database_url) as connection:
                return int(connection.execute(select).fetchone()[0])
        with contextlib.closing(sqlite3.connect(self.database)) as file:
            return int(file.execute(select).fetchone()[0])

    def stop(self) -> None:
        """End all its processes."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def running(
    competitor: Competitor, folder: Path, url: str = "", slow: bool = False
) -> Iterator[Service]:
    """Start a competitor on the database at `url`, by default a file in `folder`; stop it at last.

    With `slow` each sync takes 5 ms more.
    """
    service = Service(competitor, folder, url, slow)
    try:
        service.wait_until_it_answers()
        time.sleep(1)  # or all clients may be with the worker that was the first to start
        yield service
    finally:
        service.stop()


def make_table(folder: Path) -> None:
    """Make the table of the Python peers, whose workers else make it at the same time and fail."""
    with contextlib.closing(sqlite3.connect(folder / "plants.db")) as connection:
        connection.executescript(f"PRAGMA journal_mode = WAL; CREATE TABLE {PEERS_TABLE}")
