"""A PostgreSQL server of the tests' own, started from the programs that are installed."""

import contextlib
import glob
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from tests.support.server import PATIENCE, wait_until

FOLDERS = [  # where they are when they are not on the PATH
    *sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True),  # Debian, Ubuntu
    *sorted(glob.glob("/usr/pgsql-*/bin"), reverse=True),  # Red Hat
    *sorted(glob.glob("/opt/homebrew/opt/postgresql*/bin"), reverse=True),  # macOS
]
USER = "postgres"  # who they run as where the tests run as root: they refuse to


def program(name: str) -> str | None:
    """The path of one of PostgreSQL's programs, if it is installed."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(FOLDERS))


class PostgreSQL:
    """A server with a folder of its own, that listens on a Unix socket there."""

    def __init__(self, *settings: str, copy_of: "PostgreSQL | None" = None) -> None:
        """`settings` are like "fsync=off"; a copy is a standby of the server that is copied."""
        self.folder = Path(tempfile.mkdtemp(prefix="plants-"))
        self._owner = {"user": USER, "group": USER, "extra_groups": []} if not os.getuid() else {}
        if self._owner:
            shutil.chown(self.folder, USER, USER)
        if copy_of:
            source = ["-h", str(copy_of.folder), "-U", USER, "--write-recovery-conf"]
            self._run("pg_basebackup", "-D", self._data, *source, "--checkpoint=fast", "--no-sync")
        else:
            encoding = ["--encoding=UTF8", "--locale=C"]
            self._run("initdb", "-D", self._data, "-U", USER, "-A", "trust", "-N", *encoding)
        self._names = itertools.count()
        self.start(*settings)

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    def _run(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [program(name) or name, *arguments],
            check=True, stdout=subprocess.DEVNULL, cwd=self.folder, timeout=PATIENCE, **self._owner,
        )  # fmt: skip

    def start(self, *settings: str) -> None:
        """Start, and wait until it takes connections."""
        all_settings = ["listen_addresses=", f"unix_socket_directories={self.folder}", *settings]
        options = [option for setting in all_settings for option in ("-c", setting)]
        self.log = self.folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [program("postgres") or "postgres", "-D", self._data, *options],
                stdout=log, stderr=log, cwd=self.folder, start_new_session=True, **self._owner,
            )  # fmt: skip
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(psycopg.OperationalError):
            return bool(self.execute("SELECT true"))
        return False

    def url(self, database: str = "postgres") -> str:
        """The URL of one of its databases."""
        return f"postgresql:///{database}?host={self.folder}&user={USER}"

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement; return what rows it gives."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def new_schema(self) -> str:
        """Make an empty schema, which is faster made than a database; return the URL of it."""
        name = f"test{next(self._names)}"
        self.execute(f"CREATE SCHEMA {name}")
        return f"{self.url()}&options=-csearch_path%3D{name}"

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it: SIGINT ends connections, SIGQUIT is a crash of all its processes."""
        self.process.send_signal(how)
        self.process.wait(PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        self.process.send_signal(signal.SIGSTOP)  # so that there are no new ones meanwhile
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], stdout=subprocess.PIPE
        )
        for pid in [*map(int, children.stdout.split()), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill -9 all its processes at once."""
        self.signal(signal.SIGKILL)
        self.process.wait(PATIENCE)

    def remove(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder)
