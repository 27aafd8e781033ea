"""One run: starts a server with an empty database, posts to it, and measures."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

from servers import HERE, SLOW_SYNC, Server

TOKEN = "benchmark-token-0123456789"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
PATIENCE = 30  # seconds for a server to start
FOLDER = "/var/tmp"  # Every database is written here: /tmp may be in memory.
PEERS_TABLE = """
    PRAGMA journal_mode = WAL;
    CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT)"""


class Setting(NamedTuple):
    """How many clients post at once, and how many microseconds longer each sync takes."""

    connections: int
    sync_waits: int = 0


SETTINGS = {
    "1 connection": Setting(1),
    "32 connections": Setting(32),
    "128 connections": Setting(128),
    "32, sync + 1 ms": Setting(32, 1000),
    "32, sync + 5 ms": Setting(32, 5000),
}


class Run(NamedTuple):
    """The figures of a run: plants a second, p50 and p99 in ms, MB, seconds to the first 200."""

    rate: float
    p50: float
    p99: float
    memory: float
    start: float


def time_of_sync() -> float:
    """Return how many ms a sync takes on this machine: the median after writes of 4 KiB."""
    times = []
    with tempfile.TemporaryFile(dir=FOLDER, buffering=0) as file:
        for _ in range(200):
            file.write(bytes(4096))
            begin = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1000


def measure(server: Server, setting: str, seconds: int) -> Run:
    """Post to the server for some seconds, kill it, and check that each 200 is a row.

    The clients end without waiting for the last response on each connection, so there may be a few
    more rows: at most one for each connection, and one for the connection with which wrk first
    tests the address. A plant that got an error may have a row, too.
    """
    connections, sync_waits = SETTINGS[setting]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        file = Path(folder, "plants.db")
        if server.kind == "peer":
            sqlite3.connect(file).executescript(PEERS_TABLE).connection.close()
        with running(server, file, sync_waits) as (group, address, start):
            load = f"wrk -c {connections} -t {min(connections, 2)} -d {seconds}s --timeout 30s"
            command = [*load.split(), "-s", HERE / "post.lua", address, "--", TOKEN]
            told = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
            memory = memory_of(group)
        print(f"{server.title}, {setting}: {told}", flush=True)
        stored = told["responses"] - told["refused"]
        if server.kind != "ceiling":
            with contextlib.closing(sqlite3.connect(file)) as connection:
                (rows,) = connection.execute("SELECT count(*) - 1 FROM plants").fetchone()
            if not 0 <= rows - stored <= connections + 1 + told["refused"]:
                sys.exit(f"{server.title} sent {stored} times 200, but stored {rows} rows")
    return Run(stored / told["seconds"], told["p50"], told["p99"], memory, start)


@contextlib.contextmanager
def running(server: Server, file: Path, sync_waits: int) -> Iterator[tuple[int, str, float]]:
    """Run a server. Yield its process group, its address, and the seconds that its start took."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [server.program, *server.options.replace("PORT", port).split()]
    environment = os.environ | {"PLANTS_TOKENS": TOKEN, "WEB_CONCURRENCY": "2"}
    environment["DATABASE_URL"] = f"sqlite:///{file}"
    if sync_waits:
        # LD_PRELOAD is split at spaces. The relative path has none.
        library = os.path.relpath(SLOW_SYNC, server.folder)
        environment |= {"LD_PRELOAD": library, "SYNC_WAITS": str(sync_waits)}
    begin, address = time.monotonic(), f"http://127.0.0.1:{port}"
    # No client sends id -1.
    first = Request(f"{address}/plants", b'{"id": -1, "name": "first"}', HEADERS)
    with (log := file.with_name("log")).open("wb") as out:
        process = subprocess.Popen(
            command, cwd=server.folder, env=environment, stdout=out, stderr=out, process_group=0
        )
    try:
        while True:
            with contextlib.suppress(OSError):
                urlopen(first, timeout=5).close()
                break
            if time.monotonic() > begin + PATIENCE:
                sys.exit(f"{server.title} does not start: {log.read_text()}")
            time.sleep(0.01)  # The server is still starting.
        start = time.monotonic() - begin
        time.sleep(1)  # Otherwise all clients might connect to the worker that started first.
        yield process.pid, address, start
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def memory_of(group: int) -> float:
    """Return the memory of a process group in MB. Shared memory counts once (PSS)."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process has ended.
            if os.getpgid(int(folder.name)) == group:
                total += int((folder / "smaps_rollup").read_text().partition("Pss:")[2].split()[0])
    return total / 1024
