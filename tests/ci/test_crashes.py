"""What was answered with 200 is on the disk, whatever is killed or fails at whatever moment.

What takes a disk of its own, like a power cut, is in tests/ci/test_disk.py.
"""

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from schemas import Plant
from start import get_storage
from tests.support.server import HEADERS, HERE, ROOT, TOKEN, Server, Writers
from tests.test_crashes import test_every_acknowledged_plant_survives_kill_minus_9  # noqa: F401


@pytest.fixture
def victims(pytestconfig) -> list[str]:
    """What is killed, one after another: --crash-rounds says how often."""
    rounds = pytestconfig.getoption("crash_rounds")
    return random.choices(["a worker", "the service"], k=rounds)


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
            begin = number
            if text.startswith("<..."):
                before, begin = begun.pop(thread)
                text = before + text
            if call := re.match(r"(\w+)\(", text):
                self.calls.append(Call(call[1], text, begin, number))

    def writes(self, part: str) -> list[Call]:
        """The writes to the WAL that have `part` in them."""
        return [
            call
            for call in self.calls
            if call.name == "pwrite64" and "-wal>" in call.text and part in call.text
        ]

    def answers(self, request_id: str, status: int) -> list[Call]:
        """The answers of this status to requests with this id."""
        head, line = f'"HTTP/1.1 {status} ', rf"X-Request-ID: {request_id}\r\n"
        return [
            call
            for call in self.calls
            if call.name == "sendto" and head in call.text and line in call.text
        ]

    def has_sync(self, begin: int, end: int) -> bool:
        """Whether the WAL was synced, from begin to end of it, between two lines."""
        return any(
            begin < call.begin and call.end < end and call.text.endswith("= 0")
            for call in self.calls
            if call.name in ("fsync", "fdatasync") and "-wal>" in call.text
        )


@pytest.fixture
def traced(serve, tmp_path) -> Callable[..., Server]:
    """Starts the service under strace, which fills the file `trace`."""
    calls = "trace=pwrite64,fsync,fdatasync,sendto"
    strace = f"strace -f -qq -yy --seccomp-bpf -s 5000 -e {calls}".split()
    command = [*strace, "-o", f"{tmp_path}/trace", *HERE]
    return lambda **environment: serve(command=command, **environment)


def end(server: Server) -> None:
    """End a service under strace, so that all of the trace is written."""
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.parametrize("clients", [1, 8])
def test_every_200_is_sent_after_a_sync(traced, tmp_path, clients, record_property):
    """The WAL is synced between the write that carries a plant and the plant's 200.

    With one client, also between the last write of all and the 200.
    """
    server = traced()
    with Writers(server.port, first=10**9, count=clients) as writers:
        assert writers.goes_on(200)
    end(server)
    trace = Trace(tmp_path / "trace")
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
    plant = {"id": 7, "name": "name of the plant"}
    server = traced(**failing_sync)

    def status_of_post(request_id: str) -> int:
        headers = {**HEADERS, "X-Request-ID": request_id}
        return server.request("POST", "/plants", json.dumps(plant), headers)[0]

    assert server.post({"id": 1, "name": "one"})[0] == 200
    Path(failing_sync["SYNC_FAILS"]).touch()
    for _ in range(8):  # so that either worker is asked
        assert status_of_post("in-vain") == 503
        assert server.request("GET", "/healthz")[0] == 503
    Path(failing_sync["SYNC_FAILS"]).unlink()
    assert status_of_post("again") == 200
    assert server.request("GET", "/healthz")[0] == 200
    assert server.out.count('"GET /healthz" 503') == server.out.count("/healthz") == 8
    end(server)
    assert stored() == [(1, "one", None), (7, "name of the plant", None)]
    trace = Trace(tmp_path / "trace")
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


FIRST_START = "import start; start.read_environment()[0].open_or_create()"


@pytest.mark.parametrize("call", ["openat", "pwrite64", "fdatasync", "rename", "unlink"])
def test_a_first_start_that_is_killed_is_harmless(url, database, stored, call, record_property):
    """At each call that it makes in the folder of the database: the next start makes the file."""
    environment = {**os.environ, "DATABASE_URL": url, "PLANTS_TOKENS": TOKEN}
    start = [sys.executable, "-c", FIRST_START]
    for kills in itertools.count():
        inject = f"inject={call}:signal=SIGKILL:when={kills + 1}"
        strace = ["strace", "-f", "-qqq", "-o", "/dev/null", "-P", database.parent]
        for name in ("", "-new", "-new-journal", "-lock", "-journal", "-wal", "-shm"):
            strace += ["-P", f"{database}{name}"]
        run = subprocess.run([*strace, "-e", inject, *start], cwd=ROOT, env=environment, timeout=60)
        with contextlib.closing(get_storage(url)) as storage:
            storage.open_or_create()
            storage.add(Plant(7, "Monstera"))
        assert stored() == [(7, "Monstera", None)]
        assert not database.with_name("plants.db-new").exists()
        if run.returncode == 0:
            break
        for file in database.parent.glob("plants.db*"):
            file.unlink()
    assert kills > 0
    record_property(f"a first start, killed at {call}", f"{kills} times, each start after it works")
