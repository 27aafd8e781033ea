"""A cluster that fails over by itself, three nodes of Patroni with etcd, under load.

Not a test, as it takes minutes: `.venv/bin/python -m tests.ci.patroni_cluster`, on a machine with
Debian's packages etcd-server, patroni and postgresql. It prints a line a round: what happened, for
how long no plant was answered with 200, and how many of those that were are not there at the end.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg

from tests.conftest import ROWS
from tests.support.postgresql import USER, processes_in, program
from tests.support.server import ROOT, TOKEN, Server, Writers

NODES = 3
TIME_LIMIT = 180.0  # seconds until a script that gets nowhere fails


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


class Node:
    """A Patroni with its PostgreSQL, as on a machine of their own."""

    def __init__(self, folder: Path, name: str, etcd: int, ports: list[int]) -> None:
        self.folder, self.name, (api, self.port) = folder / name, name, ports
        self.folder.mkdir()
        shutil.chown(self.folder, USER, USER)
        trusted = ["local all all trust", "host all all 127.0.0.1/32 trust",
                   "host replication all 127.0.0.1/32 trust"]  # fmt: skip
        settings = {
            "scope": "plants",
            "name": name,
            "restapi": {"listen": f"127.0.0.1:{api}", "connect_address": f"127.0.0.1:{api}"},
            "etcd3": {"host": f"127.0.0.1:{etcd}"},
            "bootstrap": {
                # Without the second, a primary that is left alone commits alone.
                "dcs": {"synchronous_mode": True, "synchronous_mode_strict": True},
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{self.port}",
                "connect_address": f"127.0.0.1:{self.port}",
                "data_dir": str(self.folder / "data"),
                "bin_dir": os.path.dirname(os.path.realpath(program("postgres"))),
                "authentication": {
                    "superuser": {"username": USER, "password": "unused"},
                    "replication": {"username": USER, "password": "unused"},
                },
                "pgpass": str(self.folder / "pgpass"),
                "use_pg_rewind": True,
                "pg_hba": trusted,
                "parameters": {"unix_socket_directories": str(self.folder)},
            },
        }
        (self.folder / "patroni.json").write_text(json.dumps(settings))
        self.start()

    def start(self) -> None:
        """Start Patroni, which starts PostgreSQL."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["patroni", str(self.folder / "patroni.json")],
                stdout=log, stderr=log, cwd=self.folder, user=USER, group=USER, extra_groups=[],
            )  # fmt: skip

    def processes(self) -> list[int]:
        """Return the process ids of Patroni, and then of PostgreSQL and its children."""
        return [self.process.pid, *set(processes_in(self.folder)) - {self.process.pid}]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of them, as if it happened to the machine."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def asks(self, question: str) -> list[tuple[Any, ...]]:
        """Ask the node's PostgreSQL; nothing if it does not answer."""
        with contextlib.suppress(psycopg.Error):
            url = f"postgresql://{USER}@127.0.0.1:{self.port}/postgres?connect_timeout=2"
            with psycopg.connect(url) as connection:
                return connection.execute(question).fetchall()
        return []


class Cluster:
    """The nodes and what they agree in."""

    def __init__(self, folder: Path) -> None:
        client, peer, *ports = free_ports(2 + 2 * NODES)
        roles = {"client": client, "peer": peer}
        urls = [f"--listen-{role}-urls=http://127.0.0.1:{port}" for role, port in roles.items()]
        urls.append(f"--advertise-client-urls=http://127.0.0.1:{client}")
        urls.append(f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}")
        member = f"--initial-cluster=default=http://127.0.0.1:{peer}"
        with (folder / "etcd.log").open("wb") as log:
            self.etcd = subprocess.Popen(
                ["etcd", f"--data-dir={folder}/etcd", member, *urls], stdout=log, stderr=log
            )
        self.nodes = [
            Node(folder, f"node{n}", client, ports[2 * n : 2 * n + 2]) for n in range(NODES)
        ]

    def url(self) -> str:
        """The URL of all nodes."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"postgresql://{USER}@{hosts}/postgres"

    def wait_until_whole(self) -> Node:
        """Wait for a primary and its standbys, of which one is synchronous; return the primary."""
        deadline = time.monotonic() + TIME_LIMIT
        while time.monotonic() < deadline:
            for node in self.nodes:
                states = node.asks("SELECT sync_state FROM pg_stat_replication")
                if len(states) == NODES - 1 and ("sync",) in states:
                    return node
            time.sleep(0.5)
        sys.exit("the cluster did not become whole")

    def end(self) -> None:
        """Kill all that was started."""
        for node in self.nodes:
            node.signal(signal.SIGKILL)
        self.etcd.kill()


def kill_the_primary(primary: Node) -> None:
    """kill -9 of the primary's machine: Patroni, PostgreSQL and all its children"""
    primary.signal(signal.SIGKILL)


def kill_postgresql(primary: Node) -> None:
    """kill -9 of the primary's PostgreSQL; its Patroni lives"""
    for pid in primary.processes()[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def freeze_the_primary(primary: Node) -> None:
    """the primary's machine freezes for 60 s, and comes back"""
    frozen = primary.processes()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(60)


def switch_over(primary: Node) -> None:
    """a planned switchover (patronictl)"""
    config = str(primary.folder / "patroni.json")
    subprocess.run(
        ["patronictl", "-c", config, "switchover", "--force"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def watch(writers: Writers, seconds: float) -> float:
    """Watch for some seconds and until there are plants again; how long none was acknowledged."""
    longest, count, last = 0.0, -1, time.monotonic()
    end = last + seconds
    while time.monotonic() < end + TIME_LIMIT:
        if len(writers.acknowledged) != count:
            longest = max(longest, time.monotonic() - last)
            count, last = len(writers.acknowledged), time.monotonic()
            if last > end:
                return longest
        time.sleep(0.02)
    sys.exit("no plant was acknowledged any more")


def run_round(cluster: Cluster, server: Server, number: int, happens: Any) -> int:
    """Let it happen under load; print what came of it, and return how many plants are lost."""
    primary = cluster.wait_until_whole()
    with Writers(server.port, first=number * 10**7) as writers:
        watch(writers, 3)
        with ThreadPoolExecutor() as pool:
            event = pool.submit(happens, primary)
            pause = watch(writers, 120)
        event.result()
    if primary.process.poll() is not None:
        primary.start()
    new = cluster.wait_until_whole()
    stored = {(id, name) for id, name, _ in new.asks(ROWS)}
    lost = len(writers.acknowledged.items() - stored)
    print(
        f"{happens.__doc__}: {primary.name} -> {new.name}, no 200 for {pause:.1f} s, "
        f"{len(writers.acknowledged)} plants acknowledged, {lost} lost, "
        f"answers {dict(writers.answers)}, failures {dict(writers.failures)}",
        flush=True,
    )
    return lost


def main() -> int:
    """Run all rounds; return 1 if a plant was lost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        with contextlib.ExitStack() as stack:
            cluster = Cluster(folder)
            stack.callback(cluster.end)
            cluster.wait_until_whole()
            subprocess.run(["patroni", "--version"], check=True)
            environment = {"DATABASE_URL": cluster.url(), "PLANTS_TOKENS": TOKEN}
            server = Server(ROOT, folder, [], None, environment)
            stack.callback(server.kill)
            happenings = [kill_the_primary, kill_postgresql, freeze_the_primary, switch_over]
            return int(
                any([run_round(cluster, server, n, each) for n, each in enumerate(happenings)])
            )


if __name__ == "__main__":
    sys.exit(main())
