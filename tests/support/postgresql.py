"""PostgreSQL servers of the tests' own, started from the programs that are installed."""

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

from tests.support.server import PATIENCE, wait_until

FOLDERS = ["/usr/bin", "/usr/sbin", *sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)]
USER = "postgres"  # who runs them where the tests are run by root, whom they refuse
OWNER: dict[str, Any] = {"user": USER, "group": USER, "extra_groups": []} if not os.getuid() else {}


def program(name: str) -> str:
    """The path of a program."""
    found = shutil.which(name, path=os.pathsep.join(FOLDERS))
    assert found, f"{name} is not installed"
    return found


def processes_in(folder: Path) -> list[int]:
    """The ids of the processes that work in a folder, as all of a server do in its own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (process / "cwd").readlink().is_relative_to(folder):
                found.append(int(process.name))
    return found


class PostgreSQL:
    """A server with a folder of its own; it trusts everybody, and listens on a socket there."""

    def __init__(self, primary: "PostgreSQL | None" = None) -> None:
        """Make a new one, or a standby of a primary."""
        self.folder = Path(tempfile.mkdtemp(prefix="plants-"))  # a socket's path must not be long
        self._data, self.log = self.folder / "data", self.folder / "log"
        self._names = itertools.count()
        if OWNER:
            shutil.chown(self.folder, USER, USER)
        if primary:
            source = ["-h", str(primary.folder), "-U", USER, "--write-recovery-conf"]
            self._run("pg_basebackup", *source, "--checkpoint=fast", "--no-sync")
        else:
            self._run("initdb", "-U", USER, "-A", "trust", "-N", "--encoding=UTF8", "--locale=C")

    def _run(self, name: str, *arguments: str) -> None:
        command = [program(name), "-D", self._data, *arguments]
        options = {"cwd": self.folder, "stdout": subprocess.DEVNULL, **OWNER}
        subprocess.run(command, check=True, timeout=PATIENCE, **options)

    def start(self, *settings: str) -> None:
        """Start, and wait until it takes connections; `settings` are like "fsync=off"."""
        all_settings = ["listen_addresses=", f"unix_socket_directories={self.folder}", *settings]
        command = [program("postgres"), "-D", self._data]
        command += [option for setting in all_settings for option in ("-c", setting)]
        with self.log.open("ab") as log:
            options = {"cwd": self.folder, "stdout": log, "stderr": log, **OWNER}
            self._process = subprocess.Popen(command, start_new_session=True, **options)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        with contextlib.suppress(psycopg.OperationalError):
            return bool(self.execute("SELECT true"))
        return False

    def url(self, database: str = "postgres") -> str:
        """The URL of one of its databases."""
        return f"postgresql:///{database}?host={self.folder}&user={USER}"

    def new_url(self) -> str:
        """The URL of a new, empty database."""
        name = f"test{next(self._names)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Execute statements; return the rows of the last one, if it has any."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def set_synchronous(self, standbys: str) -> None:
        """Let commits wait for these standbys from now on: "*" for any, "" for none."""
        self.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standbys}'")
        self.execute("SELECT pg_reload_conf()")
        show = "SHOW synchronous_standby_names"
        wait_until(lambda: self.execute(show) == [(standbys,)])
        self.execute("CHECKPOINT")  # the process that makes it tells all others

    def stop(self) -> None:
        """Stop it, and end its connections."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes: each has a process group of its own."""
        self._process.send_signal(signal.SIGSTOP)  # so that there are no new ones meanwhile
        for pid in processes_in(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill -9 all its processes, in whatever state they are."""
        self.signal(signal.SIGKILL)
        self._process.wait(PATIENCE)


@contextlib.contextmanager
def running_postgresql(*settings: str, primary: PostgreSQL | None = None) -> Iterator[PostgreSQL]:
    """A server, or a standby of a `primary`, with `settings`; nothing of it is left in the end."""
    server = PostgreSQL(primary)
    try:
        server.start(*settings)
        yield server
    finally:
        server.kill()
        wait_until(lambda: not processes_in(server.folder))
        shutil.rmtree(server.folder)


@contextlib.contextmanager
def running_pooler(server: PostgreSQL, name: str) -> Iterator[str]:
    """The URL of a PgBouncer in transaction mode, for a database and a role of that name."""
    folder = Path(tempfile.mkdtemp(prefix="pooler-", dir=server.folder))
    (folder / "settings").write_text(
        f"[databases]\n{name} = host={server.folder} user={name}\n"
        f"[pgbouncer]\npool_mode = transaction\nunix_socket_dir = {folder}\n"
        "auth_type = any\nlisten_addr =\nlisten_port = 6432\n"
    )
    if OWNER:
        shutil.chown(folder, USER)
    with (folder / "log").open("wb") as log:
        command = [program("pgbouncer"), folder / "settings"]
        pooler = subprocess.Popen(command, stderr=log, cwd=folder, **OWNER)
    try:
        wait_until((folder / ".s.PGSQL.6432").exists)
        yield f"postgresql:///{name}?host={folder}&port=6432&user={name}"
    finally:
        pooler.kill()
        pooler.wait(PATIENCE)
