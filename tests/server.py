"""A gunicorn that runs the service in processes of its own."""

import contextlib
import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

GUNICORN = str(Path(sys.executable).with_name("gunicorn"))
PATIENCE = 30.0  # seconds until a test gives up on what should happen at once


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return what `condition` returns as soon as that is true; fail if it never is."""
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s in vain"
        time.sleep(0.01)
    return result


class Server:
    """A running master and its workers, with their output and what a client does with them."""

    def __init__(
        self,
        root: Path,
        folder: Path,
        arguments: Sequence[str],
        command: list[str] | None,
        environment: Mapping[str, str],
    ) -> None:
        kept = {k: v for k, v in os.environ.items() if k not in ("PORT", "WEB_CONCURRENCY")}
        self.may_fail = False  # whether a traceback is what the test is about
        number = len(list(folder.glob("server*.out")))
        self.files = [folder / f"server{number}.{name}" for name in ("out", "err")]
        bind = [] if command else ["--bind", "127.0.0.1:0"]
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            self.process = subprocess.Popen(
                [*(command or [GUNICORN]), *bind, *arguments],
                cwd=root,
                env={k: v for k, v in {**kept, **environment}.items() if v is not None},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        """What was written to standard output so far: the access log."""
        return self.files[0].read_text()

    @property
    def err(self) -> str:
        """What was written to standard error so far."""
        return self.files[1].read_text()

    @functools.cached_property
    def port(self) -> int:
        """The port it listens at, once it does."""

        def look() -> Any:
            assert self.process.poll() is None, self.err
            return re.search(r"Listening at: http://[\d.]+:(\d+)", self.err)

        return int(wait_until(look)[1])

    def workers(self, count: int = 2, besides: Collection[int] = ()) -> list[int]:
        """The process ids of the workers that are alive, once there are `count` new ones."""

        def look() -> list[int]:
            booted = map(int, re.findall(r"Booting worker with pid: (\d+)", self.err))
            found = [pid for pid in booted if pid not in besides and is_alive(pid)]
            return found if len(found) == count else []

        return wait_until(look)

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def send(self, data: bytes) -> bytes:
        """Send `data` on a connection of its own and return all that comes until its end."""
        with self.connect() as connection:
            connection.sendall(data)
            return receive(connection)

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Send a request; return the status, the headers in lower case and the JSON body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, names, json.loads(answer.read() or "null")
        finally:
            connection.close()

    def post(self, plant: Any, token: str = "test-token-0123456789") -> tuple[int, Any]:
        """Post a plant; return the status and the JSON body."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        status, _, answer = self.request("POST", "/plants", json.dumps(plant), headers)
        return status, answer

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the master."""
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Wait for the master's end; return its status."""
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Kill -9 the master and all workers at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


def receive(connection: socket.socket) -> bytes:
    """All that comes until the other side has ended."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
