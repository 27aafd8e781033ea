"""The service as it runs: a gunicorn with its workers, and what a client does with it."""

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
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.rows import Row, read_rows

ROOT = Path(__file__).parent.parent.parent
HERE = [str(Path(sys.executable).with_name("gunicorn")), "--bind=127.0.0.1:0"]  # any free port
TOKEN = "test-token-0123456789"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
LOG_LINE = re.compile(r"\[.*\] \[\d+\] \[INFO\] .*\n")  # of gunicorn, when all is well
PATIENCE = 30.0  # seconds until a test gives up on what should happen at once
QUICK, SHORT, PATIENT = (  # see workers.py
    f"--worker-class=tests.support.workers.{name}" for name in ("Quick", "Short", "Patient")
)


class Success(int):
    """Equal to each status of success; the one that is sent is said in one test of test_app.py."""

    __hash__ = int.__hash__

    def __eq__(self, status: object) -> bool:
        return isinstance(status, int) and 200 <= status < 300

    def __ne__(self, status: object) -> bool:
        return not self == status


STORED = Success(200)  # what says that a plant is stored


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return what `condition` returns as soon as that is true; fail if it never is."""
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s in vain"
        time.sleep(0.005)
    return result


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def receive(connection: socket.socket) -> bytes:
    """All that comes until the other side has ended."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]  # by their names in lower case
    body: Any  # None, or what the JSON says


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
        number = len(list(folder.glob("server*.out")))
        self.files = [folder / f"server{number}.{name}" for name in ("out", "err")]
        if listener:
            command = [HERE[0], f"--bind=fd://{listener.fileno()}"]
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            self.process = subprocess.Popen(
                [*(command or HERE), *arguments],
                cwd=ROOT,
                env={k: v for k, v in {**os.environ, **own}.items() if v is not None},
                stdout=out,
                stderr=err,
                pass_fds=[listener.fileno()] if listener else [],
                start_new_session=True,
            )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.kill()
        assert kind or "Traceback" not in self.err, self.err

    @property
    def out(self) -> str:
        """What was written to standard output so far: the log."""
        return self.files[0].read_text()

    @property
    def err(self) -> str:
        """What was written to standard error so far: gunicorn's log."""
        return self.files[1].read_text()

    def logged(self, request_id: str) -> dict[str, Any]:
        """The line of the log for the request with this X-Request-ID, once it is there."""
        line = wait_until(lambda: re.search(rf'(?m)^.*"id": "{request_id}".*$', self.out))
        return dict(json.loads(line[0]))

    @functools.cached_property
    def port(self) -> int:
        """The port, once it listens there."""

        def look() -> Any:
            assert self.process.poll() is None, self.err
            return re.search(r"Listening at: https?://[\d.]+:(\d+)", self.err)

        return int(wait_until(look)[1])

    def workers(self, count: int = 2, besides: Collection[int] = ()) -> list[int]:
        """The process ids of the workers that are alive, once there are `count` new ones.

        One that has answered nothing yet may still be starting: then each signal ends it.
        """

        def look() -> list[int]:
            booted = map(int, re.findall(r"Booting worker with pid: (\d+)", self.err))
            new = [pid for pid in booted if pid not in besides]
            found = [pid for pid in new if Path(f"/proc/{pid}").exists()]
            return found if len(found) == count else []

        return wait_until(look)

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
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request on a connection of its own; return its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, json.loads(answer.read() or "null"))

    def post(self, plant: Any, token: str = TOKEN) -> tuple[int, Any]:
        """Post a plant; return the status and the JSON body."""
        headers = {**HEADERS, "Authorization": f"Bearer {token}"}
        status, _, answer = self.request("POST", "/plants", json.dumps(plant), headers)
        return status, answer

    def health(self) -> int:
        """The status of a health check."""
        return self.request("GET", "/healthz").status

    def stored(self, number: int) -> Row | None:
        """The row of a plant in its table, read past the service; None if there is none."""
        return next((row for row in read_rows(self.url) if row[0] == number), None)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the master alone."""
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """The exit status, once the master has ended."""
        return self.process.wait(PATIENCE)

    def stop(self) -> int:
        """Send SIGTERM to the master; return its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill -9 the master and all workers at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


def stops_in_one_line(server: Server, words: str) -> None:
    """Assert that a start fails with one line beside those of a log, which matches `words`."""
    assert server.wait() != 0
    said = LOG_LINE.sub("", server.err).strip()
    assert len(said.splitlines()) == 1, server.err
    assert re.search(words, said, re.IGNORECASE), said
    assert "Booting worker" not in server.err
