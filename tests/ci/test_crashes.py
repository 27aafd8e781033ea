"""An acknowledged plant is on the disk, whatever fails, and whatever is killed at any time."""

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from plant import Plant
from tests.support.server import HERE, ROOT, STORED, TOKEN, Server, wait_until
from tests.support.wire import Writers, post, statuses

SUFFIXES = "-wal", "-shm", "-lock"


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
        """Return the writes to the WAL that have `part` in them."""
        writes = [call for call in self.calls if call.name == "pwrite64" and "-wal>" in call.text]
        return [call for call in writes if part in call.text]

    def answers(self, request_id: str, status: str) -> list[Call]:
        """Return the responses with this request id whose status begins with `status`.

        A response that was sent by several calls is not among them.
        """
        head, line = f'"HTTP/1.1 {status}', rf"X-Request-ID: {request_id}\r\n"
        answers = [call for call in self.calls if call.name == "sendmsg" and head in call.text]
        return [call for call in answers if line in call.text and '}\\n", ' in call.text]

    def has_sync(self, begin: int, end: int) -> bool:
        """Tell if a whole sync of the WAL, from its begin to its end, is between two lines."""
        between = [call for call in self.calls if begin < call.begin and call.end < end]
        return any(
            call.name in ("fsync", "fdatasync") and "-wal>" in call.text and call.text[-3:] == "= 0"
            for call in between
        )


@pytest.fixture
def traced(serve, tmp_path) -> Callable[..., Server]:
    """A function that starts the service under strace, which fills the file `trace`."""
    calls = "trace=pwrite64,fsync,fdatasync,sendmsg"
    strace = f"strace -f -qq -yy --seccomp-bpf -s 5000 -e {calls}".split()
    command = [*strace, "-o", f"{tmp_path}/trace", *HERE]
    return lambda **environment: serve(command=command, **environment)


def end(server: Server, tmp_path: Path) -> Trace:
    """End a service under strace, so that all of the trace is written."""
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.wait() == 0
    return Trace(tmp_path / "trace")


@pytest.mark.parametrize("clients", [1, 8])
def test_every_acknowledgement_is_sent_after_a_sync(traced, tmp_path, clients):
    """The plant's write has been synced; with one client, so has every write before the 200."""
    server = traced()
    with Writers(server.port, count=clients) as writers:
        writers.wait_for_more(200)
    trace = end(server, tmp_path)
    for number, name in writers.acknowledged.items():
        sent = trace.answers(f"{number}", "2")[0].begin
        assert trace.has_sync(trace.writes(name)[0].end, sent)
        if clients == 1:
            last = max(write.end for write in trace.writes("") if write.begin < sent)
            assert trace.has_sync(last, sent)


def test_a_plant_whose_sync_failed_is_written_once_more(traced, tmp_path, failing_sync, stored):
    """Until then, the plant and /healthz get a 503.

    After a sync failed, the kernel may take the data for clean although the disk never got it. So
    the next sync proves something only about later writes. A new worker finds the plant in the
    file, but can't tell whether it would survive a power cut.
    """
    # A second worker might write the plant in place of the restarted one.
    server = traced(WEB_CONCURRENCY="1", **failing_sync)
    plant = {"id": 7, "name": "name of the plant"}
    vain = post(plant, b"X-Request-ID: in-vain", b"Connection: close")

    def fails() -> bool:
        found = [*statuses(server.send(vain)), server.health(), *statuses(server.send(vain))]
        return found == [503] * 3

    assert server.post({"id": 1, "name": "one"})[0] == STORED
    Path(failing_sync["SYNC_FAILS"]).touch()
    assert fails()
    before = server.workers(1)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: server.workers(1) != before)
    assert stored() == [(1, "one", None), (7, "name of the plant", None)]
    assert fails()
    Path(failing_sync["SYNC_FAILS"]).unlink()
    assert statuses(server.send(vain.replace(b"in-vain", b"again"))) == [STORED]
    assert server.health() == 200
    trace = end(server, tmp_path)
    in_vain, again = trace.answers("in-vain", "503")[-1], trace.answers("again", "2")[0]
    rewritten = [each for each in trace.writes("name of the plant") if each.begin > in_vain.end]
    assert trace.has_sync(rewritten[0].end, again.begin)


def pages(file: Path) -> list[bytes]:
    """Return the pages of a file, as the kernel keeps them."""
    content = file.read_bytes()
    return [content[start : start + 4096] for start in range(0, len(content), 4096)]


def test_plants_behind_pages_that_a_failed_sync_lost_survive_a_power_cut(
    serve, database, failing_sync, stored
):
    """The kernel takes the pages of a failed sync for clean: no later sync brings them to the disk.

    A new worker still reads them, and so could put plants behind a gap in the WAL. Here the test
    plays the disk: after the power cut it puts back what was there before such a sync.
    """
    wal = Path(f"{database}-wal")
    server = serve(WEB_CONCURRENCY="1", **failing_sync)
    assert server.post({"id": 1, "name": "one"})[0] == STORED
    before = pages(wal)
    Path(failing_sync["SYNC_FAILS"]).touch()
    assert server.post({"id": 2, "name": "n" * 10_000})[0] == 503
    after = pages(wal)
    Path(failing_sync["SYNC_FAILS"]).unlink()
    killed = server.workers(1)
    os.kill(killed[0], signal.SIGKILL)
    wait_until(lambda: server.workers(1) != killed)
    assert server.post({"id": 3, "name": "three"})[0] == STORED
    server.kill()
    on_disk = pages(wal)
    before += [b""] * (len(after) - len(before))
    for number, (old, lost) in enumerate(zip(before, after, strict=True)):
        if lost != old and lost == on_disk[number]:  # No later write made the page dirty again.
            on_disk[number] = old.ljust(len(lost), b"\0")
    wal.write_bytes(b"".join(on_disk))
    Path(f"{database}-shm").unlink()  # It is only in memory.
    assert {1, 3} <= {number for number, *_ in stored()}


def test_a_first_start_that_is_killed_is_harmless(open_storage, database, stored):
    """It is killed before each system call on the files that it makes. The next start works."""
    files = [database.parent, *[f"{database}{suffix}" for suffix in ("", "-journal", *SUFFIXES)]]
    strace = [
        "strace",
        "-f",
        "-qqq",
        "-o",
        "/dev/null",
        *[f"--trace-path={each}" for each in files],
    ]
    environment = {**os.environ, "DATABASE_URL": f"sqlite:///{database}", "PLANTS_TOKENS": TOKEN}
    for kills in itertools.count():
        fault = f"--inject=%file,%desc:signal=SIGKILL:when={kills + 1}"
        command = [*strace, fault, sys.executable, "start.py"]
        run = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
        storage = open_storage()
        storage.add(Plant(7, "Monstera"))
        storage.close()
        assert stored() == [(7, "Monstera", None)]
        if run.returncode == 0:
            break
        for file in database.parent.glob("plants.db*"):
            file.unlink()
    assert kills > 20
