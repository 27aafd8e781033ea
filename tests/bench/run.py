"""One run: a server with an empty database, clients that post to it, and what was measured."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from servers import HERE, SLOW_SYNC, Server

TOKEN = "benchmark-token-0123456789"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
PATIENCE = 30  # seconds for a server to start
PEERS_TABLE = "CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT)"


class Setting(NamedTuple):
    """What a run is like."""

    connections: int = 32
    slow: bool = False
    postgresql: bool = False


SETTINGS = {
    "1 connection": Setting(connections=1),
    "32 connections": Setting(),
    "128 connections": Setting(connections=128),
    "slow disk": Setting(slow=True),
    "PostgreSQL": Setting(postgresql=True),
}


class Run(NamedTuple):
    """What a run has measured: plants a second, ms until the answer, MB, s to the first 200."""

    rate: float
    p50: float
    p99: float
    memory: float
    start: float


def measure(server: Server, setting: Setting, seconds: int, postgresql: str | None) -> Run:
    """Post to the server for some seconds, kill it, and see that each 200 is a row.

    The clients end without waiting for the last answer on each connection, so there may be a few
    more rows: at most one for each connection, and one of the connection that wrk tries out first.
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # /tmp may be in memory
        url = f"sqlite:///{folder}/plants.db"
        if setting.postgresql:
            url = postgresql
            query(url, "DROP TABLE IF EXISTS plants")
        elif server.kind == "peer":
            query(url, "PRAGMA journal_mode = WAL")
            query(url, PEERS_TABLE)
        with running(server, url, setting.slow, Path(folder, "log")) as (group, address, start):
            told = post(address, setting.connections, seconds)
            memory = memory_of(group)
        rows = int(query(url, "SELECT count(*) FROM plants"))
    stored = told["answers"] - told["refused"]
    extra = 0 if server.kind == "ceiling" else rows - 1 - stored
    print(f"{server.title}, {setting}: {told}, {extra} more rows", flush=True)
    if not 0 <= extra <= setting.connections + 1 + told["refused"]:
        sys.exit("not each 200 is a row")
    return Run(stored / told["seconds"], told["p50"], told["p99"], memory, start)


@contextlib.contextmanager
def running(server: Server, url: str, slow: bool, log: Path) -> Iterator[tuple[int, str, float]]:
    """Run a server; give its process group, its address, and how many seconds its start took."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [server.program, *server.options.replace("PORT", port).split()]
    environment = os.environ | {"DATABASE_URL": url, "PLANTS_TOKENS": TOKEN, "WEB_CONCURRENCY": "2"}
    if slow:
        library = os.path.relpath(SLOW_SYNC, server.folder)  # as LD_PRELOAD ends at a space
        environment |= {"LD_PRELOAD": library, "SYNC_WAITS": library}
    begin, address = time.monotonic(), f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=server.folder, env=environment, stdout=out, stderr=out, process_group=0
        )
    try:
        while not stores_one(address):
            if time.monotonic() > begin + PATIENCE:
                sys.exit(f"{server.title} does not start: {log.read_text()}")
            time.sleep(0.01)
        start = time.monotonic() - begin
        time.sleep(1)  # or all clients may be with the worker that was the first to start
        yield process.pid, address, start
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def stores_one(address: str) -> bool:
    """Post a plant whose id no client uses; tell if it was stored."""
    request = urllib.request.Request(f"{address}/plants", b'{"id": -1, "name": "first"}', HEADERS)
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(request, timeout=5).status == 200
    return False


def post(address: str, connections: int, seconds: int) -> dict[str, float]:
    """Post plants, and return what post.lua tells."""
    options = f"-t {min(connections, 2)} -c {connections} -d {seconds}s --timeout 30s"
    command = ["wrk", *options.split(), "-s", HERE / "post.lua", address, "--", TOKEN, "0"]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


def memory_of(group: int) -> float:
    """Return the memory of a process group in MB, what they share counted once (PSS)."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(int(folder.name)) == group:
                total += int((folder / "smaps_rollup").read_text().partition("Pss:")[2].split()[0])
    return total / 1024


def query(url: str, statement: str) -> str:
    """Execute a statement on a database; return what it gives, if that is one value."""
    if not url.startswith("sqlite:///"):
        return subprocess.check_output(["psql", url, "-qAtc", statement], text=True)
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        row = connection.execute(statement).fetchone()
        return str(row[0]) if row else ""
