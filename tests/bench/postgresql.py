"""A PostgreSQL server of the benchmark's own. It syncs to disk, as it does by default."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = os.pathsep.join(map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"))[::-1]))
USER = "postgres"  # who the server runs as where the benchmark runs as root: it refuses to
PATIENCE = 30  # seconds for it to start
database_names = (f"bench{number}" for number in itertools.count())


def program(name: str) -> str:
    """The path of one of PostgreSQL's programs."""
    found = shutil.which(name) or shutil.which(name, path=PROGRAMS)
    return found or sys.exit(f"the benchmark needs PostgreSQL's {name}")


def url_of(folder: Path, database: str) -> str:
    """The URL of a database of the server that listens in `folder`."""
    return f"postgresql:///{database}?host={folder}&user={USER}"


def execute(url: str, statement: str) -> str:
    """Run a statement; return what psql prints."""
    options = ["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "-c", statement, url]
    done = subprocess.run(
        [program("psql"), *options], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def count(url: str) -> int:
    """The number of plants that are stored."""
    return int(execute(url, "SELECT count(*) FROM plants"))


@contextlib.contextmanager
def server() -> Iterator[Path]:
    """Start a server in a new folder, where it listens; kill it and remove the folder at last."""
    owner: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="plants-bench-", dir="/var/tmp"))  # not in memory
    if not os.getuid():
        owner = {"user": USER, "group": USER, "extra_groups": []}
        shutil.chown(folder, USER, USER)
    data, process = str(folder / "data"), None
    try:
        make = [program("initdb"), "-D", data, "-U", USER, "-A", "trust", "--encoding=UTF8"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, cwd=folder, **owner)
        run = [program("postgres"), "-D", data, "-c", "listen_addresses="]
        run += ["-c", f"unix_socket_directories={folder}"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(run, stdout=log, stderr=log, cwd=folder, **owner)
        wait_until_it_answers(folder, process)
        yield folder
    finally:
        if process:
            process.send_signal(signal.SIGQUIT)  # end at once: nothing of it is kept
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()
            process.wait()
        shutil.rmtree(folder)


def wait_until_it_answers(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the server takes connections; end the benchmark if it doesn't."""
    end = time.monotonic() + PATIENCE
    ready = [program("pg_isready"), "--quiet", "-h", str(folder), "-U", USER]
    while subprocess.run(ready).returncode:
        if process.poll() is not None or time.monotonic() > end:
            sys.exit(f"PostgreSQL does not start: {(folder / 'log').read_text()}")
        time.sleep(0.1)


@contextlib.contextmanager
def database(folder: Path) -> Iterator[str]:
    """Make a database on the server in `folder`, and drop it at last; its URL."""
    name = next(database_names)
    execute(url_of(folder, "postgres"), f"CREATE DATABASE {name}")
    try:
        yield url_of(folder, name)
    finally:
        execute(url_of(folder, "postgres"), f"DROP DATABASE {name} WITH (FORCE)")
