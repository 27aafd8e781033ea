"""The commands dump and load: plants move and nothing changes on the way."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from plant import Plant
from start import get_storage
from tests.support.locks import lock_held
from tests.support.server import PATIENCE, ROOT
from transfer import BAR, main

COMMAND = [sys.executable, "transfer.py"]


def start(*command: str, given: bytes = b"", **streams: Any) -> tuple[int, str]:
    """Run a command in a process of its own; return its status and standard error."""
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # as it is for a user
    streams = {"input": given, "stdout": subprocess.PIPE, **streams}
    options = {"cwd": ROOT, "env": environment, "timeout": PATIENCE, "stderr": subprocess.PIPE}
    done = subprocess.run(command, **options, **streams)
    return done.returncode, done.stderr.decode()


@pytest.fixture
def run(capfd, monkeypatch) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs a command in this process; returns its status, standard output and standard error."""
    stdin = os.dup(0)

    def run(*arguments: str, given: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["transfer.py", *arguments])
        capfd.readouterr()
        with tempfile.TemporaryFile() as file, open(0, closefd=False) as text:
            file.write(given)
            file.seek(0)
            os.dup2(file.fileno(), 0)
            monkeypatch.setattr(sys, "stdin", text)
            try:
                status = main() or 0
            except SystemExit as end:
                status = end.code
        if isinstance(status, str):  # Python prints it then
            print(status, file=sys.stderr)
            status = 1
        return status, *capfd.readouterr()

    yield run
    os.dup2(stdin, 0)
    os.close(stdin)


PLANTS = [
    Plant(-(2**63), "", ""),
    Plant(-1, 'quote " backslash \\ newline \n', None),
    Plant(0, "🌵 é \x01 \u2028", "tag"),
    Plant(2**53 + 1, "n", None),
    Plant(2**63 - 1, "x" * 2**20, "y"),  # as long as older versions took
]


def test_a_dump_loaded_elsewhere_gives_the_same_dump(run, storage, url):
    """JSON Lines in the order of id, ids with every digit, tags only where there are some."""
    storage.add_all(PLANTS[::-1])
    status, dumped, errors = run("dump", url)
    assert (status, errors) == (0, "")
    lines = [json.loads(line) for line in dumped.split("\n") if line]
    assert [Plant(**line) for line in lines] == PLANTS
    assert "tag" not in lines[1] and '"🌵 é \\u0001 \u2028"' in dumped

    dump, load = (shlex.join([*COMMAND, *end]) for end in (["dump", url], ["load", f"{url}2"]))
    report = "5 stored, 0 refused\n"
    assert start("bash", "-c", f"set -o pipefail; {dump} | {load} | grep '^{report[:-1]}$'") == (
        0,
        "",
    )
    assert run("load", f"{url}2", given=dumped.encode()) == (0, report, "")  # once more
    assert run("dump", f"{url}2") == (0, dumped, "")


def test_each_refused_line_is_named(run, storage, url, stored):
    """By its number in all of the input; blank lines count, and line ends are of either kind."""
    storage.add(Plant(7, "Monstera"))
    many = range(1001, 1991)
    lines = [b'{"id": %d, "name": "n"}' % number for number in many]
    lines += [
        b'{"id": 7, "name": "Monstera"} \r',
        b'{"id": 7, "name": "Sequoia"}',
        b" \t\r",
        b'{"id": "9"}',
        b'{"id": \r',
        b'{"id": 9, "name": "\xff"}',
        b'{"id": 8, "name": "last, without an end"}',
    ]
    status, report, errors = run("load", url, given=b"\n".join(lines))
    assert (status, report) == (1, "992 stored, 4 refused\n")
    assert re.fullmatch(
        "line 992: id: is taken by another plant, which stays as it is\n"
        "line 994: id: must be an integer, not a string; name: .*\n"
        "line 995: the plant is not JSON .*\n"
        "line 996: the plant is not .*UTF-8.*\n",
        errors,
    )
    assert stored() == [
        (7, "Monstera", None),
        (8, "last, without an end", None),
        *((number, "n", None) for number in many),
    ]


NO_STORAGE = ["", " ", "plants.db", "sqlite://plants.db", "sqlite:///", "sqlite:///:memory:",
              "sqlite:///a%00b", "sqlite:///plants.db?mode=ro", "SQLITE", "mysql://h/d",
              "postgresql://u:secret%@h/d", "postgresql://u:secret@h/d?ssl=yes",
              "postgresql+psycopg://h/d", "sqlite:///{}", "sqlite:///{}/none/x.db"]  # fmt: skip


@pytest.mark.parametrize("command", ["dump", "load"])
@pytest.mark.parametrize("wrong", NO_STORAGE)
def test_what_is_no_storage_is_refused_in_one_line(run, command, wrong, tmp_path, monkeypatch):
    """What is in memory only is not stored; and nothing of a password is repeated."""
    monkeypatch.setenv("DATABASE_URL", "")
    status, _, errors = run(command, wrong.format(tmp_path), given=b'{"id": 7, "name": "n"}')
    assert (status, errors.count("\n")) == (1, 1)
    assert ("DATABASE_URL" in errors or str(tmp_path) in errors) and "secret" not in errors


def test_a_dump_of_a_missing_file_makes_none(run, url, database):
    status, out, errors = run("dump", url)
    assert (status, out, errors.count("\n")) == (1, "", 1)
    assert str(database) in errors and list(database.parent.iterdir()) == []


def test_what_can_be_read_of_a_damaged_file_is_dumped(run, storage, url, database):
    """Before a line and the exit status say that it is not all."""
    storage.add_all([Plant(number, "x" * 3000) for number in range(100)])  # a page each
    storage.close()
    with database.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\xff" * 4096)
    status, out, errors = run("dump", url)
    assert (status, out.count("\n") >= 90) == (1, True)
    assert re.fullmatch(r'.*malformed; see "The file is damaged" in docs/data\.md\n', errors)


def test_a_reader_that_goes_away_is_no_error(storage, url):
    """dump | head ends quietly, also where a shell looks at each command (pipefail)."""
    storage.add_all([Plant(number, "x" * 10_000) for number in range(100)])
    dump = shlex.join([*COMMAND, "dump", url])
    assert start("bash", "-c", f"set -o pipefail; {dump} | head -c 9") == (0, "")


def test_what_cannot_be_written_is_a_failure(storage, url, stored):
    """A full disk behind the shell's redirection: a line for a dump, a status for a report."""
    with open("/dev/full", "wb") as full:
        status, _ = start(*COMMAND, "load", url, given=b'{"id": 7, "name": "n"}', stdout=full)
        assert status != 0 and stored() == [(7, "n", None)]
        errors = "[Errno 28] No space left on device\n"
        assert start(*COMMAND, "dump", url, stdout=full) == (1, errors)


def test_a_lock_that_is_not_released_ends_a_load(run, url, database, monkeypatch):
    monkeypatch.setattr("transfer.get_storage", partial(get_storage, wait_limit=0.2))
    with lock_held(database):
        status, _, errors = run("load", url, given=b'{"id": 7, "name": "n"}\n')
    assert (status, errors) == (1, "the storage is busy or hangs\n")


@pytest.mark.parametrize(("command", "end"), [("dump", "100 plants"), ("load", "9.00 plants")])
def test_long_work_shows_on_a_terminal_how_far_it_is(run, storage, url, monkeypatch, command, end):
    """If it takes longer than the delay; elsewhere, nothing is shown."""
    storage.add_all([Plant(number, "n") for number in range(100)])
    lines = b'{"id": 7, "name": "n"}\n' * 9
    assert run(command, url, given=lines)[2] == ""
    monkeypatch.setitem(BAR, "delay", 0)
    terminal, error = os.openpty()
    termios.tcsetwinsize(error, (24, 80))
    with open(error, "w") as shown, closing(open(terminal, "rb", buffering=0)) as screen:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", shown)
            run(command, url, given=lines)
        assert end in screen.read(2**16).decode()
