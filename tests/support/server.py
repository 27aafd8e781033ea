"""The service as it runs: a gunicorn with its workers, and what a client does with it."""

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
HERE = [str(Path(sys.executable).with_name("gunicorn")), "--bind=127.0.0.1:0"]  # any free port
TOKEN = "test-token-0123456789"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
LOG_LINE = re.compile(r"\[.*\] \[\d+\] \[INFO\] .*\n")  # of gunicorn, when all is well
PATIENCE = 30.0  # seconds until a test gives up on what should happen at once
SHORT, PATIENT = (f"--worker-class=tests.support.workers.{name}" for name in ("Short", "Patient"))


class Success(int):
    """Equal to each status of success; the one that is sent is said in one test of test_app.py."""

    __hash__ = int.__hash__

    def __eq__(self, status: object) -> bool:
        return status in range(200, 300)


STORED = Success(200)  # what says that a plant is stored


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return what `condition` returns as soon as that is true; fail if it never is."""
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s in vain"
        time.sleep(0.005)
    return result


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to clients."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def receive(connection: socket.socket) -> bytes:
    """All that comes until the other side has ended."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


class Server(contextlib.AbstractContextManager["Server"]):
    """A master and its workers, with their output. A `with` block ends it, without mercy."""

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
        print(self.out)  # pytest shows it where a test fails
        assert kind or "Traceback" not in self.err, self.err

    @property
    def out(self) -> str:
        """What was written to standard output so far: the log."""
        return (self._output / "out").read_text()

    @property
    def err(self) -> str:
        """What was written to standard error so far: gunicorn's log."""
        return (self._output / "err").read_text()

    def said(self) -> list[str]:
        """The lines of standard error, but those of gunicorn when all is well."""
        return LOG_LINE.sub("", self.err).strip().splitlines()

    def logged(self, request_id: str) -> dict[str, Any]:
        """The line of the log for the request with this X-Request-ID, once it is there."""
        line = wait_until(lambda: re.search(rf'(?m)^.*"id": "{request_id}".*$', self.out))
        return dict(json.loads(line[0]))

    @functools.cached_property
    def port(self) -> int:
        """The port, once it listens there."""
        line = r"Listening at: https?://[\d.]+:(\d+)"
        found = wait_until(lambda: self.process.poll() or re.search(line, self.err))
        assert isinstance(found, re.Match), self.err
        return int(found[1])

    def workers(self, count: int = 2) -> list[int]:
        """The process ids of the workers that are alive, once there are so many.

        One that has answered nothing yet may still be starting: then each signal ends it.
        """

        def look() -> list[int]:
            booted = re.findall(r"Booting worker with pid: (\d+)", self.err)
            return [int(pid) for pid in booted if Path(f"/proc/{pid}").exists()]

        wait_until(lambda: len(look()) == count)
        return look()

    def connect(self) -> socket.socket:
        """A new connection to it."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def send(self, data: bytes, ends: bool = False) -> bytes:
        """Send `data`, and its end or nothing more; return all that comes until the end of that."""
        with self.connect() as connection:
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            return receive(connection)

    def request(
        self, method: str, path: str, body: Any = None, headers: Any = ()
    ) -> tuple[int, Any]:
        """Send a request on a connection of its own; return the status and the JSON body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def post(self, plant: Any, token: str = TOKEN) -> tuple[int, Any]:
        """Post a plant; return the status and the JSON body."""
        headers = {**HEADERS, "Authorization": f"Bearer {token}"}
        return self.request("POST", "/plants", json.dumps(plant), headers)

    def health(self) -> int:
        """The status of a health check."""
        return self.request("GET", "/healthz")[0]

    def wait(self) -> int:
        """The exit status, once the master has ended."""
        return self.process.wait(PATIENCE)

    def stop(self) -> int:
        """Send SIGTERM to the master; return its exit status."""
        self.process.terminate()
        return self.wait()

    def kill(self) -> None:
        """Kill -9 the master and all workers at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()


def fails_with(server: Server, words: str) -> None:
    """Assert that a start fails with one line beside those of a log, which matches `words`."""
    assert server.wait() != 0
    assert len(said := server.said()) == 1, server.err
    assert re.search(words, said[0], re.IGNORECASE), said
    assert "Booting worker" not in server.err


def memory(pid: int) -> float:
    """The MiB of a process, with its share of what it has in common with others (PSS)."""
    return int(re.search(r"Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())[1]) / 1024
