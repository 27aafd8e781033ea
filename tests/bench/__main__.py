"""How fast the service is beside what people would pick instead: `python tests/bench`.

Needs wrk (of Debian's packages) and a C compiler; makes an environment of its own with the peers.
Writes results.md and chart.svg beside this file. The servers run on this machine, one at a time and
in turn, in several rounds; only ratios of one run mean something.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENT = HERE / ".venv"
TOOLS = ENVIRONMENT / "bin"
NODE = HERE / ".node"
TOKEN = "benchmark-token-0123456789"
WORKERS = 2
CONNECTIONS = (1, 32, 128)
FULL = 5_000_000  # rows
TARGETS = {  # of the ratios at 32 connections
    "ceiling": 0.80,
    "bare": 0.50,
    "uvicorn": 12,
    "uvloop": 7,
    "flask": 9,
    "each": 3.5,
}


class Competitor(NamedTuple):
    """A server: how its name is shown, its command line, where that is run, and what it stores."""

    title: str
    command: list[str]
    folder: Path | None = HERE / "servers"
    stores: str = "sqlite"


def gunicorn(*options: str) -> list[str]:
    """A command line of gunicorn, which reads the service's settings where it runs in ROOT."""
    return [str(TOOLS / "gunicorn"), "--bind", "127.0.0.1:PORT", *options]


def uvicorn(loop: str, http: str) -> list[str]:
    """A command line of uvicorn."""
    command = [str(TOOLS / "uvicorn"), "peer_fastapi:app", "--port", "PORT", "--loop", loop]
    return [*command, "--http", http, "--workers", str(WORKERS)]


OWN = ["--chdir", str(HERE / "servers"), "--config", str(ROOT / "gunicorn.conf.py")]
STOCK = ["--workers", str(WORKERS), "--threads", "16", "--worker-class", "gthread"]
FLASK = [*STOCK, "--access-logfile", "-", "peer_flask:app"]
COMPETITORS = {
    "ours": Competitor("this service", gunicorn(), ROOT),
    "ceiling": Competitor(
        "ceiling: the same settings, a constant", gunicorn(*OWN, "ceiling:app"), ROOT, ""
    ),
    "bare": Competitor(
        "bare gunicorn, no log, a constant", gunicorn(*STOCK, "bare:app"), stores=""
    ),
    "each": Competitor("this service, a commit for each request", gunicorn(*OWN, "each:app"), ROOT),
    "uvicorn": Competitor("FastAPI + SQLModel, uvicorn", uvicorn("asyncio", "h11")),
    "uvloop": Competitor("FastAPI + SQLModel, uvloop, httptools", uvicorn("uvloop", "httptools")),
    "flask": Competitor("Flask + Flask-SQLAlchemy, gunicorn", gunicorn(*FLASK)),
    "json": Competitor(
        "json-server (checks nothing, syncs nothing)",
        [f"{NODE}/node_modules/.bin/json-server", "--host", "127.0.0.1", "--port", "PORT",
         "plants.json"], None, "json",
    ),
}  # fmt: skip
PEERS = ("uvicorn", "uvloop", "flask")
PEERS_TABLE = "plants (id INTEGER PRIMARY KEY, name VARCHAR NOT NULL, tag VARCHAR)"


class Run(NamedTuple):
    """What one run of wrk has measured: plants a second, and milliseconds."""

    rate: float
    p50: float
    p99: float


class Service:
    """A competitor that runs on a database of its own."""

    def __init__(self, name: str, folder: Path, slow: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.competitor = COMPETITORS[name]
        self.database = folder / "plants.db"
        (folder / "plants.json").write_text('{"plants": []}')
        environment = {
            **os.environ,
            "DATABASE_URL": f"sqlite:///{self.database}",
            "PLANTS_TOKENS": TOKEN,
            "PYTHONPATH": str(ROOT),
            "WEB_CONCURRENCY": str(WORKERS),
        }
        if slow:
            environment["LD_PRELOAD"] = str(slow_sync(folder.parent))
        if name in PEERS:  # their workers make the table at the same time, and some end at that
            with contextlib.closing(sqlite3.connect(self.database)) as connection:
                connection.executescript(f"PRAGMA journal_mode = WAL; CREATE TABLE {PEERS_TABLE}")
        self.seconds_to_first = math.nan
        self._start = time.monotonic()
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [part.replace("PORT", str(port)) for part in self.competitor.command],
                cwd=self.competitor.folder or folder, env=environment,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait_until_it_answers(self) -> None:
        """Post a first plant until it is stored, and see how long that took from the start."""
        body = json.dumps({"id": -time.time_ns(), "name": "first"}).encode()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/plants", body, headers)
        while True:
            try:
                urllib.request.urlopen(request, timeout=5).close()
                self.seconds_to_first = time.monotonic() - self._start
                return
            except OSError:
                if time.monotonic() > self._start + 30 or self.process.poll() is not None:
                    sys.exit(f"{self.competitor.title} does not start")
                time.sleep(0.01)

    def memory(self) -> float:
        """The memory of all its processes in MB, what they share counted once (PSS)."""
        found = subprocess.run(
            ["ps", "-o", "pid=", "-s", str(self.process.pid)], stdout=subprocess.PIPE, text=True
        )
        rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in found.stdout.split()]
        return sum(int(rollup.partition("Pss:")[2].split()[0]) for rollup in rollups) / 1024

    def load(
        self, connections: int, seconds: int, first: int, order: str = "in-order"
    ) -> Run | None:
        """Post for some seconds; None for a run in which not each 200 is a row.

        wrk ends without waiting for the last answer on each connection, so there may be a few more
        rows: at most one for each connection, and one of the connection that wrk tries out first.
        """
        before = self.count()
        done = subprocess.run(
            ["wrk", "-t", str(min(connections, 2)), "-c", str(connections), "-d", f"{seconds}s",
             "--latency", "--timeout", "30s", "-s", HERE / "post.lua", self.url,
             "--", TOKEN, str(first), order],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if done.returncode:
            print(f"thrown out: {self.competitor.title}: it is not there any more", flush=True)
            return None
        told = json.loads(done.stdout.splitlines()[-1])
        time.sleep(0.5)  # for what was under way when wrk went
        extra = self.count() - before - told["answers"] if self.competitor.stores else 0
        if told["refused"] or told["broken"] or not 0 <= extra <= connections + 1:
            print(f"thrown out: {self.competitor.title}: {told}, {extra} more rows", flush=True)
            return None
        return Run(told["answers"] / told["seconds"], told["p50"], told["p99"])

    def count(self) -> int:
        """The number of rows."""
        if self.competitor.stores == "json":
            return len(json.loads(self.database.with_suffix(".json").read_text())["plants"])
        if not self.competitor.stores:
            return 0
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            return int(connection.execute("SELECT count(*) FROM plants").fetchone()[0])

    def stop(self) -> None:
        """End all its processes."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def running(name: str, folder: Path, slow: bool = False) -> Iterator[Service]:
    """Start a competitor in a folder, with the database that is there already, if one is."""
    service = Service(name, folder, slow)
    try:
        service.wait_until_it_answers()
        yield service
    finally:
        service.stop()


@contextlib.contextmanager
def empty_folder(parent: Path) -> Iterator[Path]:
    """A folder for one run."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    yield folder
    shutil.rmtree(folder)


def slow_sync(folder: Path) -> Path:
    """The library that makes every sync 5 ms longer."""
    library = folder / "slow_sync.so"
    if not library.exists():
        source = HERE / "slow_sync.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def set_up() -> None:
    """Make the environments of this service, its peers and what draws."""
    for program in ("wrk", "cc", "ps"):
        if not shutil.which(program):
            sys.exit(f"the benchmark needs {program}")
    if not (TOOLS / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    requirements = ["-r", ROOT / "requirements.txt", "-r", HERE / "requirements.txt"]
    subprocess.run([TOOLS / "pip", "install", "-q", *requirements], check=True)
    if not shutil.which("npm"):
        print("left out: json-server, as npm is not installed")
        del COMPETITORS["json"]
    elif not Path(COMPETITORS["json"].command[0]).exists():
        NODE.mkdir(exist_ok=True)
        install = ["npm", "install", "--silent", "--prefix", NODE, "json-server@0.17.4"]
        subprocess.run(install, check=True)


class Results:
    """All that was measured."""

    def __init__(self) -> None:
        self.runs: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
        self.memory: defaultdict[str, list[float]] = defaultdict(list)
        self.starts: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, setting: str, run: Run | None) -> None:
        """Keep a run that was not thrown out, and say what it was."""
        if run:
            self.runs[name, setting].append(run)
            print(f"{name} {setting}: {run.rate:.0f}/s, p99 {run.p99:.1f} ms", flush=True)

    def median(self, name: str, setting: str) -> Run:
        """The median of each figure."""
        if not self.runs[name, setting]:  # all were thrown out
            return Run(math.nan, math.nan, math.nan)
        columns = zip(*self.runs[name, setting], strict=True)
        return Run(*(statistics.median(column) for column in columns))

    def shown(self, name: str, setting: str) -> str:
        """Plants a second, as median and spread, and the latencies."""
        rates = [run.rate for run in self.runs[name, setting]] or [math.nan]
        run = self.median(name, setting)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        return f"{run.rate:,.0f} ({spread}) | {run.p50:.1f} | {run.p99:.1f}"

    def ratio(self, setting: str, other: str, other_setting: str | None = None) -> float:
        """Ours to another's plants a second."""
        theirs = self.median(other, other_setting or setting).rate
        return self.median("ours", setting).rate / theirs


def measure(rounds: int, seconds: int) -> Results:
    """Run everything, in turn."""
    results, firsts = Results(), itertools.count(10**9, 10**9)
    with tempfile.TemporaryDirectory(dir=HERE, prefix=".") as temporary:
        folder = Path(temporary)
        for name in ("in-order", "at-random"):
            fill(folder / name, name)
        for _ in range(rounds):
            for name in COMPETITORS:
                with empty_folder(folder) as own, running(name, own) as service:
                    results.starts[name].append(service.seconds_to_first)
                    for number in CONNECTIONS:
                        run = service.load(number, seconds, next(firsts))
                        results.add(name, f"{number} connections", run)
                    if service.process.poll() is None:
                        results.memory[name].append(service.memory())
            for name in [name for name in COMPETITORS if COMPETITORS[name].stores == "sqlite"]:
                with empty_folder(folder) as own, running(name, own, slow=True) as service:
                    results.add(name, "slow disk", service.load(32, seconds, next(firsts)))
            for order in ("in-order", "at-random"):
                with empty_folder(folder) as own, running("ours", own) as service:
                    run = service.load(32, seconds, next(firsts), order)
                    results.add("ours", f"empty, {order}", run)
                with running("ours", folder / order) as service:
                    run = service.load(32, seconds, next(firsts), order)
                    results.add("ours", f"full, {order}", run)
    return results


def fill(folder: Path, order: str) -> None:
    """Make a database with FULL rows."""
    folder.mkdir()
    with running("ours", folder) as service:
        pass
    number = "n" if order == "in-order" else "((n * 2654435761) & 0xFFFFFFFF) << 20"
    with contextlib.closing(sqlite3.connect(service.database)) as connection, connection:
        connection.execute(
            "WITH RECURSIVE numbers (n) AS "
            f"(SELECT 1 UNION ALL SELECT n + 1 FROM numbers LIMIT {FULL}) "
            f"INSERT OR IGNORE INTO plants SELECT {number}, 'Monstera', 'indoor' FROM numbers"
        )


def report(results: Results, rounds: int, seconds: int) -> str:
    """The results as Markdown."""
    lines = [
        f"# {platform.python_implementation()} {platform.python_version()}, "
        f"{os.cpu_count()} cores shared with the load generator, SQLite {sqlite3.sqlite_version}",
        "",
        f"Medians of {rounds} rounds of {seconds} s (lowest to highest), plants a second, and "
        "latencies in ms. `python tests/bench` writes this.",
    ]
    settings = [f"{number} connections" for number in CONNECTIONS]
    for setting in [*settings, "slow disk"]:
        lines += [
            "",
            f"## {setting}" + (", 5 ms more for each sync" if setting == "slow disk" else ""),
            "",
        ]
        lines += ["| | plants/s | p50 | p99 |", "|---|---|---|---|"]
        for name, competitor in COMPETITORS.items():
            if setting != "slow disk" or competitor.stores == "sqlite":
                lines.append(f"| {competitor.title} | {results.shown(name, setting)} |")
    lines += ["", "## Ratios at 32 connections", "", "| | ratio | target |", "|---|---|---|"]
    for name, target in TARGETS.items():
        ratio = results.ratio("32 connections", name)
        lines.append(f"| this service / {COMPETITORS[name].title} | {ratio:.2f} | {target} |")
    best = max(PEERS, key=lambda name: results.median(name, "slow disk").rate)
    slow = results.ratio("slow disk", best)
    lines.append(
        f"| with a slow disk / the best peer ({COMPETITORS[best].title}) | {slow:.1f} | 25 |"
    )
    own, ceiling = (results.median(name, "32 connections").p99 for name in ("ours", "ceiling"))
    lines.append(f"| p99 / p99 of the ceiling | {own / ceiling:.2f} | 1.3 |")
    for order, target in (("in-order", 0.95), ("at-random", 0.7)):
        full = results.ratio(f"full, {order}", "ours", f"empty, {order}")
        lines.append(f"| {FULL:,} rows / an empty table, ids {order} | {full:.2f} | {target} |")
    lines += ["", "## Memory and start", "", "| | MB (PSS) | s to the first 200 |", "|---|---|---|"]
    for name, competitor in COMPETITORS.items():
        memory = statistics.median(results.memory[name] or [math.nan])
        start = statistics.median(results.starts[name])
        lines.append(f"| {competitor.title} | {memory:.0f} | {start:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write what came of it."""
    parser = argparse.ArgumentParser(description="See the first lines of this file.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=4, help="of each run")
    options = parser.parse_args()
    set_up()
    results = measure(options.rounds, options.seconds)
    text = report(results, options.rounds, options.seconds)
    print(text)
    (HERE / "results.md").write_text(text)
    rates = {
        competitor.title: results.median(name, "32 connections").rate
        for name, competitor in COMPETITORS.items()
        if competitor.stores == "sqlite" and results.runs[name, "32 connections"]
    }
    subprocess.run(
        [TOOLS / "python", HERE / "draw.py", HERE / "chart.svg"],
        input=json.dumps(rates),
        text=True,
        check=True,
    )


if __name__ == "__main__":
    main()
