"""A gunicorn that runs the service in processes of its own."""

import contextlib
import functools
import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine import Unavailable

ROOT = Path(__file__).parent.parent.parent
GUNICORN = str(Path(sys.executable).with_name("gunicorn"))
HERE = [GUNICORN, "--bind", "127.0.0.1:0"]  # a command line, on any free port
TOKEN = "test-token-0123456789"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
PATIENCE = 30.0  # seconds until a test gives up on what should happen at once


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return what `condition` returns as soon as that is true; fail if it never is."""
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s in vain"
        time.sleep(0.01)
    return result


def succeeds(call: Callable[[], None]) -> bool:
    """Return whether a call finds the storage available."""
    with contextlib.suppress(Unavailable):
        call()
        return True
    return False


class Server:
    """A running master and its workers, with their output and what a client does with them."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        command: list[str] | None = None,
        listener: socket.socket | None = None,
        **environment: str | None,
    ) -> None:
        """Keep the SQLite file and the output in `folder`; leave out variables that are None.

        A `listener` is there before it and after it, so that no client is ever turned away.
        """
        own = {"PLANTS_TOKENS": TOKEN, "DATABASE_URL": f"sqlite:///{folder}/plants.db"}
        own |= {**dict.fromkeys(("GUNICORN_CMD_ARGS", "PORT", "WEB_CONCURRENCY")), **environment}
        self.may_fail = False  # whether a traceback is what the test is about
        self.url = own["DATABASE_URL"]
        number = len(list(folder.glob("server*.out")))
        self.files = [folder / f"server{number}.{name}" for name in ("out", "err")]
        descriptors = [listener.fileno()] if listener else []
        address = f"fd://{listener.fileno()}" if listener else "127.0.0.1:0"
        bind = [] if command else ["--bind", address]
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            self.process = subprocess.Popen(
                [*(command or [GUNICORN]), *bind, *arguments],
                cwd=ROOT,
                env={k: v for k, v in {**os.environ, **own}.items() if v is not None},
                stdout=out,
                stderr=err,
                pass_fds=descriptors,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        """What was written to standard output so far: the access log."""
        return self.files[0].read_text()

    @property
    def err(self) -> str:
        return self.files[1].read_text()

    @functools.cached_property
    def port(self) -> int:
        def look() -> Any:
            assert self.process.poll() is None, self.err
            return re.search(r"Listening at: https?://[\d.]+:(\d+)", self.err)

        return int(wait_until(look)[1])

    def workers(self, count: int = 2, besides: Collection[int] = ()) -> list[int]:
        """The process ids of the workers that are alive, once there are `count` new ones."""

        def look() -> list[int]:
            booted = map(int, re.findall(r"Booting worker with pid: (\d+)", self.err))
            found = [pid for pid in booted if pid not in besides and is_alive(pid)]
            return found if len(found) == count else []

        return wait_until(look)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def send(self, data: bytes, ends: bool = False) -> bytes:
        """Send `data`, and its end or nothing more; return all that comes until the end of that."""
        with self.connect() as connection:
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            return receive(connection)

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, names, json.loads(answer.read() or "null")
        finally:
            connection.close()

    def post(self, plant: Any, token: str = TOKEN) -> tuple[int, Any]:
        """Post a plant; return the status and the JSON body."""
        headers = {**HEADERS, "Authorization": f"Bearer {token}"}
        status, _, answer = self.request("POST", "/plants", json.dumps(plant), headers)
        return status, answer

    def stored(self, number: int) -> tuple[int, str, str | None] | None:
        """The row of a plant in the SQLite file, read past the service; None if there is none."""
        path = self.url.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
            select = "SELECT id, name, tag FROM plants WHERE id = ?"
            return file.execute(select, [number]).fetchone()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def reload(self) -> None:
        """Send SIGHUP; return once new workers have taken over and the old ones have ended."""
        before = self.workers()
        self.signal(signal.SIGHUP)
        assert self.workers(besides=before)
        wait_until(lambda: not any(map(is_alive, before)))

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Kill -9 the master and all workers at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


@contextlib.contextmanager
def running(folder: Path, *arguments: str, **environment: str | None) -> Iterator[Server]:
    """A server for several tests, whose SQLite file is in `folder`."""
    server = Server(folder, *arguments, **environment)
    try:
        yield server
    finally:
        server.kill()
    assert "Traceback" not in server.err, server.err


class Writers:
    """Clients that post plants at the same time, each again and again until it gets its 200."""

    def __init__(self, port: int, first: int = 0, count: int = 8) -> None:
        """`first` is the lowest id, `count` the number of clients."""
        self.sent: dict[int, str] = {}  # names by id
        self.acknowledged: dict[int, str] = {}  # those of them that were answered with 200
        self.answers: Counter[int] = Counter()  # by status
        self.failures: Counter[type[Exception]] = Counter()  # of connections
        self._numbers = itertools.count(first)
        self.port, self.end = port, threading.Event()
        self._threads = [threading.Thread(target=self.write) for _ in range(count)]

    def __enter__(self) -> "Writers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def goes_on(self, count: int = 100) -> bool:
        """Wait until `count` more plants were acknowledged."""
        goal = len(self.acknowledged) + count
        return bool(wait_until(lambda: len(self.acknowledged) >= goal))

    def write(self) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(client):
            for number in self._numbers:
                name = self.sent[number] = f"{random.random()}"
                while number not in self.acknowledged:
                    if self.end.is_set():
                        return
                    if self.post(client, {"id": number, "name": name}) == 200:
                        self.acknowledged[number] = name
                self.afterwards(client, number)

    def post(self, client: http.client.HTTPConnection, plant: Mapping[str, Any]) -> int:
        """Post a plant; return the status of the answer, or 0 if there was none."""
        headers = {**HEADERS, "X-Request-ID": f"{plant['id']}"}
        try:
            client.request("POST", "/plants", json.dumps(plant), headers)
            answer = client.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.failures[type(error)] += 1
            client.close()
            time.sleep(0.01)
            return 0
        self.answers[answer.status] += 1
        return answer.status

    def afterwards(self, client: http.client.HTTPConnection, number: int) -> None:
        """What a client does after each plant of its own."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def receive(connection: socket.socket) -> bytes:
    """All that comes until the other side has ended."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


class Usage(NamedTuple):
    threads: int
    descriptors: int
    memory: float  # MiB, with its share of what it has in common with others (PSS)
    cpu_time: float  # seconds


def usage(pid: int | str) -> Usage:
    process = Path(f"/proc/{pid}")
    memory = re.search(r"(?m)^Pss: +(\d+) kB", (process / "smaps_rollup").read_text())[1]
    threads, descriptors = (len(list((process / name).iterdir())) for name in ("task", "fd"))
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    cpu_time = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return Usage(threads, descriptors, int(memory) / 1024, cpu_time)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
