"""A running service: gunicorn's master and its workers, their output, and requests to them."""

import contextlib
import functools
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
HERE = [str(Path(sys.executable).with_name("gunicorn")), "--bind=127.0.0.1:0"]  # On any free port.
TOKEN = "test-token-0123456789"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
LOG_LINE = re.compile(r"\[.*\] \[\d+\] \[INFO\] .*\n")  # What gunicorn writes if nothing is wrong.
PATIENCE = 30.0  # Seconds to wait for something that should happen at once, before a test fails.
SHORT, PATIENT = (f"--worker-class=tests.support.workers.{name}" for name in ("Short", "Patient"))


class Success(int):
    """A status that equals every status from 200 to 299.

    One test in test_app.py pins which of them the service sends for a stored plant.
    """

    __hash__ = int.__hash__

    def __eq__(self, status: object) -> bool:
        return status in range(200, 300)

    def __ne__(self, status: object) -> bool:
        return not self == status


STORED = Success(200)  # The status of a response that says that a plant is stored.


def wait_until(condition: Callable[[], Any]) -> Any:
    """Call `condition` until it returns something true, and return that. Fail after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline, f"the condition was still not true after {PATIENCE} s"
        time.sleep(0.005)
    return result


def free_port() -> int:
    """Return a TCP port on which nothing listens.

    It is below the ports that Linux gives to outgoing connections, so no client takes it meanwhile.
    """
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def receive(connection: socket.socket) -> bytes:
    """Return all bytes that arrive until the other side closes the connection."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


class Server(contextlib.AbstractContextManager["Server"]):
    """A master and its workers, with their output. At the end of a `with` block they are killed."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        command: list[str] | None = None,
        listener: socket.socket | None = None,
        **environment: str | None,
    ) -> None:
        """Start gunicorn, or `command`, and keep the SQLite file and the output in `folder`.

        `environment` is added to the test's own; a variable whose value is None is left out.
        `listener` is a socket of the test on which the server accepts connections. It stays open
        before and after the server, so that no connection is refused.
        """
        own = {"PLANTS_TOKENS": TOKEN, "DATABASE_URL": f"sqlite:///{folder}/plants.db"}
        own |= {**dict.fromkeys(("GUNICORN_CMD_ARGS", "PORT", "WEB_CONCURRENCY")), **environment}
        self.url = own["DATABASE_URL"]
        if listener:
            command = [HERE[0], f"--bind=fd://{listener.fileno()}"]
        self._output = Path(tempfile.mkdtemp(dir=folder))
        options = {"cwd": ROOT, "start_new_session": True}
        options["env"] = {k: v for k, v in {**os.environ, **own}.items() if v is not None}
        options["pass_fds"] = [listener.fileno()] if listener else []
        command = [*(command or HERE), *arguments]
        with (self._output / "out").open("w") as out, (self._output / "err").open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, **options)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.kill()
        print(self.out)  # pytest shows this if the test fails.
        assert kind or "Traceback" not in self.err, self.err

    @property
    def out(self) -> str:
        """The log of requests: what was written to standard output so far."""
        return (self._output / "out").read_text()

    @property
    def err(self) -> str:
        """gunicorn's own log: what was written to standard error so far."""
        return (self._output / "err").read_text()

    def said(self) -> list[str]:
        """Return the lines of standard error, without those that gunicorn always writes."""
        return LOG_LINE.sub("", self.err).strip().splitlines()

    def logged(self, request_id: str) -> dict[str, Any]:
        """Wait for the log line of the request with this X-Request-ID, and return it."""
        line = wait_until(lambda: re.search(rf'(?m)^.*"id": "{request_id}".*$', self.out))
        return dict(json.loads(line[0]))

    @functools.cached_property
    def port(self) -> int:
        """The TCP port of the server. Waits until the server listens on it."""
        line = r"Listening at: https?://(?:[\d.]+|\[::\]):(\d+)"
        found = wait_until(lambda: self.process.poll() or re.search(line, self.err))
        assert isinstance(found, re.Match), self.err
        return int(found[1])

    def workers(self, count: int = 2) -> list[int]:
        """Wait until exactly `count` workers are alive, and return their process ids.

        A worker that has not answered a request yet may still be starting. Any signal ends it then.
        """

        def look() -> list[int]:
            booted = re.findall(r"Booting worker with pid: (\d+)", self.err)
            return [int(pid) for pid in booted if Path(f"/proc/{pid}").exists()]

        wait_until(lambda: len(look()) == count)
        return look()

    def connect(self) -> socket.socket:
        """Return a new connection to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def send(self, data: bytes, ends: bool = False) -> bytes:
        """Send `data` on a new connection. Return all bytes until the server closes it.

        With `ends`, the client shuts down its sending side after `data`. Otherwise it stays
        connected and sends nothing more.
        """
        with self.connect() as connection:
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            return receive(connection)

    def request(
        self, method: str, path: str, body: Any = None, headers: Any = ()
    ) -> tuple[int, Any]:
        """Send a request on a new connection. Return the status and the JSON body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def post(self, plant: Any, token: str = TOKEN) -> tuple[int, Any]:
        """Post a plant on a new connection. Return the status and the JSON body."""
        headers = {**HEADERS, "Authorization": f"Bearer {token}"}
        return self.request("POST", "/plants", json.dumps(plant), headers)

    def health(self) -> int:
        """Ask GET /healthz, and return the status of the response."""
        return self.request("GET", "/healthz")[0]

    def wait(self) -> int:
        """Wait until the master has ended, and return its exit status."""
        return self.process.wait(PATIENCE)

    def stop(self) -> int:
        """Send SIGTERM to the master, wait until it has ended, and return its exit status."""
        self.process.terminate()
        return self.wait()

    def kill(self) -> None:
        """Kill the master and all workers with SIGKILL, all at the same time."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()


def fails_with(server: Server, words: str) -> None:
    """Assert that a start fails before it starts a worker, with one line that matches `words`.

    The lines that gunicorn always writes do not count.
    """
    assert server.wait() != 0
    assert len(said := server.said()) == 1, server.err
    assert re.search(words, said[0], re.IGNORECASE), said
    assert "Booting worker" not in server.err


def memory(pid: int) -> float:
    """Return the memory of a process in MiB.

    This is its PSS: memory that several processes share is divided among them. Files do not count:
    its share of a library grows whenever another process that uses it ends.
    """
    sizes = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"Pss_Anon: +(\d+)", sizes)[1]) / 1024
