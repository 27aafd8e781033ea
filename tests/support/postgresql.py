"""PostgreSQL servers of the tests' own, started from the programs that are installed."""

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from tests.support.server import PATIENCE, wait_until

FOLDERS = [*sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True), "/usr/sbin"]
USER = "postgres"  # runs the programs if root runs the tests: they refuse root
OWNER = {"user": USER, "group": USER, "extra_groups": []} if not os.getuid() else {}
OPTIONS: dict[str, Any] = {  # for run() and Popen() of any of these programs
    "env": {**os.environ, "PATH": os.pathsep.join([*FOLDERS, os.environ["PATH"]])},
    "cwd": "/",
    **OWNER,
}


class PostgreSQL:
    """A server with a folder of its own. It trusts everybody and listens on a socket in there.

    A `with` block runs it and removes it. It does not sync, since tests kill its processes and
    never the machine.
    """

    def __init__(self, primary: "PostgreSQL | None" = None) -> None:
        """Create a new database cluster, or a standby of a primary."""
        self.folder = Path(tempfile.mkdtemp(prefix="plants-"))  # a socket's path must not be long
        self._data = self.folder / "data"
        if OWNER:
            shutil.chown(self.folder, USER, USER)
        make = ["initdb", "-U", USER, "-A", "trust", "-N", "--encoding=UTF8", "--locale=C"]
        if primary:
            make = ["pg_basebackup", "-h", primary.folder, "-U", USER, "-R", "-c", "fast", "-N"]
        make += ["-D", self._data]
        subprocess.run(make, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL, **OPTIONS)

    def __enter__(self) -> "PostgreSQL":
        command = ["postgres", "-D", self._data, "-F", "-h", "", "-k", self.folder]
        self._process = subprocess.Popen(command, **OPTIONS)
        self.wait_for("5432")
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait(PATIENCE)
        shutil.rmtree(self.folder)

    def wait_for(self, port: str) -> None:
        """Wait until a server accepts connections at the socket of this port in its folder."""
        ready = ["pg_isready", "-q", "-h", self.folder, "-p", port]
        wait_until(lambda: subprocess.run(ready, **OPTIONS).returncode == 0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each of its processes. They do not share a process group."""
        self._process.send_signal(signal.SIGSTOP)  # so that it starts no process meanwhile
        pid = self._process.pid
        with contextlib.suppress(FileNotFoundError):  # it has ended
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for each in (*children, pid):
                os.kill(int(each), number)

    def url(self, database: str = "postgres") -> str:
        """Return the URL of one of its databases."""
        return f"postgresql:///{database}?host={self.folder}&user={USER}"

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Execute statements. Return the rows of the last one, if it has any."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def set_synchronous(self, standbys: str) -> None:
        """Make commits wait for these standbys from now on: "*" means any, "" means none."""
        self.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standbys}'")
        self.execute("SELECT pg_reload_conf()")
        show = "SHOW synchronous_standby_names"
        wait_until(lambda: self.execute(show) == [(standbys,)])
        # The process that makes a checkpoint tells all others of the change.
        self.execute("CHECKPOINT")
