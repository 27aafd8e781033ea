"""What was answered with 200 is on the disk, whatever is killed or fails at whatever moment.

What takes a disk of its own, like a power cut, is in tests/ci/test_disk.py.
"""

import http.client
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from plant import Plant
from tests.support.rows import read_names
from tests.support.server import HEADERS, HERE, ROOT, TOKEN, Server, wait_until
from tests.support.writers import Writers
from tests.test_crashes import test_every_acknowledged_plant_survives_kill_minus_9  # noqa: F401

ROUNDS = 10


@pytest.fixture
def victims() -> list[str]:
    """What is killed, one after another."""
    return random.choices(["a worker", "the service"], k=ROUNDS)


class Rivals(Writers):
    """Clients that post plants with the same ids and different names, all the time."""

    def __init__(self, port: int) -> None:
        super().__init__(port, count=12)
        self.told: defaultdict[int, set[tuple[str, int]]] = defaultdict(set)  # names and statuses

    def write(self, client: http.client.HTTPConnection) -> None:
        """Post a plant, and keep what the answer was."""
        number, name = random.randrange(400), random.choice("abc")
        self.told[number].add((name, self.post(client, {"id": number, "name": name})))

    def go_on(self) -> None:
        """Wait for some hundred answers that are no 503."""
        goal = self.answers[200] + self.answers[409] + 300
        wait_until(lambda: self.answers[200] + self.answers[409] > goal)


@pytest.mark.parametrize("url", ["url", "postgresql_url"], indirect=True)
def test_one_plant_of_an_id_is_stored_and_all_are_told_so(serve, url, record_property):
    """Of an id one plant gets 200s and all others 409, while workers and connections are killed."""
    server = serve()
    with Rivals(server.port) as rivals:
        for _ in range(5):
            rivals.go_on()
            os.kill(random.choice(server.workers()), signal.SIGKILL)
            if url.startswith("postgresql:"):
                rivals.go_on()
                with psycopg.connect(url) as fault:
                    fault.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
                        "current_database() AND pid <> pg_backend_pid()"
                    )
        rivals.go_on()
    names = read_names(url)
    for number, told in rivals.told.items():
        for name, status in told - {(name, status) for name in "abc" for status in (503, 0)}:
            assert status == (200 if names[number] == name else 409)
    assert rivals.answers[200] and rivals.answers[409]
    record_property("rivals", dict(rivals.answers))


class Call(NamedTuple):
    """A system call on a file or connection, from one line of the trace to another."""

    name: str
    text: str
    begin: int
    end: int


class Trace:
    """The calls of all threads of a service, in their order."""

    def __init__(self, file: Path) -> None:
        """`file` is what `strace -f -yy -o` wrote."""
        begun: dict[str, tuple[str, int]] = {}  # by thread
        self.calls: list[Call] = []
        for number, line in enumerate(file.read_text(errors="replace").splitlines()):
            thread, _, text = line.partition(" ")
            text = text.strip()
            if text.endswith("<unfinished ...>"):
                begun[thread] = text, number
                continue
            before, begin = begun.pop(thread) if text.startswith("<...") else ("", number)
            if call := re.match(r"(\w+)\(", before + text):
                self.calls.append(Call(call[1], before + text, begin, number))

    def writes(self, part: str) -> list[Call]:
        """The writes to the WAL that have `part` in them."""
        writes = [call for call in self.calls if call.name == "pwrite64" and "-wal>" in call.text]
        return [call for call in writes if part in call.text]

    def answers(self, request_id: str, status: int) -> list[Call]:
        """The answers of this status to requests with this id."""
        head, line = f'"HTTP/1.1 {status} ', rf"X-Request-ID: {request_id}\r\n"
        answers = [call for call in self.calls if call.name == "sendto" and head in call.text]
        return [call for call in answers if line in call.text]

    def has_sync(self, begin: int, end: int) -> bool:
        """Whether the WAL was synced, from begin to end of it, between two lines."""
        between = [call for call in self.calls if begin < call.begin and call.end < end]
        return any(
            call.name in ("fsync", "fdatasync") and "-wal>" in call.text and call.text[-3:] == "= 0"
            for call in between
        )


@pytest.fixture
def traced(serve, tmp_path) -> Callable[..., Server]:
    """Starts the service under strace, which fills the file `trace`."""
    calls = "trace=pwrite64,fsync,fdatasync,sendto"
    strace = f"strace -f -qq -yy --seccomp-bpf -s 5000 -e {calls}".split()
    command = [*strace, "-o", f"{tmp_path}/trace", *HERE]
    return lambda **environment: serve(command=command, **environment)


def end(server: Server, tmp_path: Path) -> Trace:
    """End a service under strace, so that all of the trace is written."""
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.wait() == 0
    return Trace(tmp_path / "trace")


@pytest.mark.parametrize("clients", [1, 8])
def test_every_200_is_sent_after_a_sync(traced, tmp_path, clients, record_property):
    """The WAL is synced between the write that carries a plant and the plant's 200.

    With one client, also between the last write of all and the 200.
    """
    server = traced()
    with Writers(server.port, count=clients) as writers:
        assert writers.goes_on(200)
    trace = end(server, tmp_path)
    for number, name in writers.acknowledged.items():
        sent = trace.answers(f"{number}", 200)[0].begin
        assert trace.has_sync(trace.writes(name)[0].end, sent)
        if clients == 1:
            last = max(write.end for write in trace.writes("") if write.begin < sent)
            assert trace.has_sync(last, sent)
    record_property(
        f"strace, {clients} clients", f"{len(writers.acknowledged)} answers, each after its sync"
    )


def test_a_plant_whose_sync_failed_is_written_again(traced, tmp_path, failing_sync, stored):
    """Meanwhile it is answered with 503, and so is /healthz.

    A sync that failed may have left nothing to be synced, and yet nothing on the disk: the next one
    proves something of what is written after it only.
    """
    server = traced(**failing_sync)

    def status_of_post(request_id: str) -> int:
        headers = {**HEADERS, "X-Request-ID": request_id}
        plant = json.dumps({"id": 7, "name": "name of the plant"})
        return server.request("POST", "/plants", plant, headers).status

    assert server.post({"id": 1, "name": "one"})[0] == 200
    Path(failing_sync["SYNC_FAILS"]).touch()
    for _ in range(8):  # so that either worker is asked
        assert status_of_post("in-vain") == 503
        assert server.health() == 503
    Path(failing_sync["SYNC_FAILS"]).unlink()
    assert status_of_post("again") == 200
    assert server.health() == 200
    trace = end(server, tmp_path)
    assert stored() == [(1, "one", None), (7, "name of the plant", None)]
    in_vain, again = trace.answers("in-vain", 503)[-1], trace.answers("again", 200)[0]
    anew = [each for each in trace.writes("name of the plant") if each.begin > in_vain.end]
    assert trace.has_sync(anew[0].end, again.begin)


def test_a_plant_that_was_never_synced_is_not_answered_for(serve, failing_sync, stored):
    """A worker that comes after the one that wrote it finds it, but can't tell that it stays."""
    plant = {"id": 7, "name": "Monstera"}
    server = serve(WEB_CONCURRENCY="1", **failing_sync)  # another would not get to write it
    assert server.post({"id": 1, "name": "one"})[0] == 200
    Path(failing_sync["SYNC_FAILS"]).touch()
    assert server.post(plant)[0] == 503
    before = server.workers(1)
    os.kill(before[0], signal.SIGKILL)
    assert server.workers(1, besides=before)
    assert stored() == [(1, "one", None), (7, "Monstera", None)]
    for _ in range(2):
        assert server.post(plant)[0] == 503
    Path(failing_sync["SYNC_FAILS"]).unlink()
    assert server.post(plant)[0] == 200


def start_with_a_fault(database: Path, fault: str) -> int:
    """Run the check at the start with an injected fault, in calls on the database's files."""
    strace = ["strace", "-f", "-qqq", "-o", "/dev/null", "-P", database.parent]
    for suffix in ("", "-new", "-new-journal", "-lock", "-journal", "-wal", "-shm"):
        strace += ["-P", f"{database}{suffix}"]
    command = [*strace, "-e", f"inject={fault}", sys.executable, "start.py"]
    environment = {"DATABASE_URL": f"sqlite:///{database}", "PLANTS_TOKENS": TOKEN}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode


@pytest.mark.parametrize("call", ["fdatasync", "link", "unlink"])
def test_a_first_start_that_is_killed_is_harmless(
    open_storage, database, stored, call, record_property
):
    """Between any two steps in which it makes the file: the next start makes it."""
    for kills in itertools.count():
        status = start_with_a_fault(database, f"{call}:signal=SIGKILL:when={kills + 1}")
        storage = open_storage()
        storage.add(Plant(7, "Monstera"))
        storage.close()
        assert stored() == [(7, "Monstera", None)]
        if status == 0:
            break
        for file in database.parent.glob("plants.db*"):
            file.unlink()
    assert kills > 0
    record_property(f"a first start, killed at {call}", f"{kills} times, each start after it works")


def test_a_file_that_cannot_be_looked_at_is_not_made_anew(storage, database, stored):
    """Where the disk fails for a moment, no empty file takes the place of the one that is there."""
    storage.add(Plant(7, "Monstera"))
    storage.close()
    statuses = [start_with_a_fault(database, f"newfstatat:error=EIO:when={n}") for n in (1, 2)]
    assert statuses == [0, 0]  # "not now", if anything
    assert stored() == [(7, "Monstera", None)]
