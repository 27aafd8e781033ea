"""A PostgreSQL server of the tests' own, started from the programs that are installed."""

import contextlib
import glob
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.server import PATIENCE, wait_until

FOLDERS = [  # where they are when they are not on the PATH
    *sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True),  # Debian, Ubuntu
    *sorted(glob.glob("/usr/pgsql-*/bin"), reverse=True),  # Red Hat
]
USER = "postgres"  # who runs them where the tests are run by root, whom they refuse


def program(name: str) -> str:
    """Return the path of one of PostgreSQL's programs; skip the test where it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(FOLDERS))
    if not found:
        pytest.skip(f"PostgreSQL's program {name} is not installed")
    return found


def processes_in(folder: Path) -> list[int]:
    """Return the ids of the processes that work in a folder, as all of a server do in its own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if (process / "cwd").readlink().is_relative_to(folder):
                found.append(int(process.name))
    return found


class PostgreSQL:
    """A server with a folder of its own, that listens on a Unix socket there."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="plants-"))  # a socket's path must not be long
        self._data, self.log = self.folder / "data", self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._names = itertools.count()
        self._owner = {"user": USER, "group": USER, "extra_groups": []} if not os.getuid() else {}
        if self._owner:
            shutil.chown(self.folder, USER, USER)

    def create(self) -> None:
        self._run("initdb", "-U", USER, "-A", "trust", "-N", "--encoding=UTF8", "--locale=C")

    def copy(self, primary: "PostgreSQL") -> None:
        source = ["-h", str(primary.folder), "-U", USER, "--write-recovery-conf"]
        self._run("pg_basebackup", *source, "--checkpoint=fast", "--no-sync")

    def _run(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [program(name), "-D", self._data, *arguments],
            check=True, stdout=subprocess.DEVNULL, cwd=self.folder, timeout=PATIENCE, **self._owner,
        )  # fmt: skip

    def start(self, *settings: str) -> None:
        """Start, and wait until it takes connections; `settings` are like "fsync=off"."""
        all_settings = ["listen_addresses=", f"unix_socket_directories={self.folder}", *settings]
        options = [option for setting in all_settings for option in ("-c", setting)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [program("postgres"), "-D", self._data, *options],
                stdout=log, stderr=log, cwd=self.folder, start_new_session=True, **self._owner,
            )  # fmt: skip
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        with contextlib.suppress(psycopg.OperationalError):
            return bool(self.execute("SELECT true"))
        return False

    def url(self, database: str = "postgres") -> str:
        return f"postgresql:///{database}?host={self.folder}&user={USER}"

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def new_schema(self) -> str:
        """Make an empty schema, which is faster made than a database.

        Return its URL, which gives connections the application_name that the schema has.
        """
        name = f"test{next(self._names)}"
        self.execute(f"CREATE SCHEMA {name}")
        return f"{self.url()}&application_name={name}&options=-csearch_path%3D{name}"

    def stop(self, how: str = "SIGINT") -> None:
        """Stop it: SIGINT ends connections, SIGQUIT is a crash of all its processes."""
        self._process.send_signal(signal.Signals[how])
        self._process.wait(PATIENCE)

    def signal(self, name: str) -> None:
        """Send a signal to all its processes: each has a process group of its own."""
        self._process.send_signal(signal.SIGSTOP)  # so that there are no new ones meanwhile
        for pid in processes_in(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[name])

    def kill(self) -> None:
        self.signal("SIGKILL")
        self._process.wait(PATIENCE)

    def remove(self) -> None:
        """Leave nothing behind, in whatever state it is."""
        wait_until(self._kill_all)
        if self._process:
            self._process.wait(PATIENCE)
        shutil.rmtree(self.folder)

    def _kill_all(self) -> bool:
        for pid in processes_in(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not processes_in(self.folder)


@contextlib.contextmanager
def running_postgresql(*settings: str, primary: PostgreSQL | None = None) -> Iterator[PostgreSQL]:
    """A server, or a standby of a `primary`, with `settings`; nothing of it is left in the end."""
    server = PostgreSQL()
    try:
        if primary:
            server.copy(primary)
        else:
            server.create()
        server.start(*settings)
        yield server
    finally:
        server.remove()
