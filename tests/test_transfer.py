"""The commands dump and load: plants move and nothing changes on the way."""

import json
import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from engines import NeedsOperator
from plant import Plant
from start import get_storage
from tests.support.disk import damage_last_page
from tests.support.server import PATIENCE, ROOT

COMMAND = [sys.executable, "transfer.py"]
ONE = '{"id": 7, "name": "n"}'


def start(*command: str, given: str | bytes = b"", **streams: Any) -> tuple[int, str, str]:
    """Run a command; return its status, standard output and standard error."""
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # as it is for a user
    streams = {"stdout": subprocess.PIPE, **streams}
    options = {"cwd": ROOT, "env": environment, "timeout": PATIENCE, "stderr": subprocess.PIPE}
    given = given.encode() if isinstance(given, str) else given
    done = subprocess.run(command, input=given, **options, **streams)
    return done.returncode, (done.stdout or b"").decode(), done.stderr.decode()


PLANTS = [
    Plant(-(2**63), "", ""),
    Plant(-1, 'quote " backslash \\ newline \n', None),
    Plant(0, "🌵 é \x01 \u2028", "tag"),
    Plant(2**53 + 1, "n", None),
    Plant(2**63 - 1, "x" * 2**20, "y"),  # as long as older versions took
]


def test_a_dump_loaded_elsewhere_gives_the_same_dump(storage, url):
    """JSON Lines in the order of id, ids with every digit, tags only where there are some."""
    storage.add_all(PLANTS[::-1])
    status, dumped, errors = start(*COMMAND, "dump", url)
    assert (status, errors) == (0, "")
    lines = [json.loads(line) for line in dumped.split("\n") if line]
    assert [Plant(**line) for line in lines] == PLANTS
    assert "tag" not in lines[1] and '"🌵 é \\u0001 \u2028"' in dumped
    for _ in range(2):
        loaded = start(*COMMAND, "load", f"{url}2", given=dumped)
        assert loaded == (0, "5 stored, 0 refused\n", "")
    assert start(*COMMAND, "dump", f"{url}2") == (0, dumped, "")


def test_each_refused_line_is_named(storage, url, stored):
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
    status, report, errors = start(*COMMAND, "load", url, given=b"\n".join(lines))
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
              "postgresql+psycopg://h/d"]  # fmt: skip


@pytest.mark.parametrize("wrong", NO_STORAGE)
def test_what_is_no_storage_is_refused_in_one_line(wrong):
    """What is in memory only is not stored; and nothing of a password is repeated."""
    with pytest.raises(NeedsOperator, match=r"\A.*DATABASE_URL.*\Z") as refusal:
        get_storage(wrong)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(("command", "name"), [("dump", "plants.db"), ("load", "none/plants.db")])
def test_a_storage_that_cannot_be_used_is_a_failure_in_one_line(command, name, tmp_path):
    """A dump makes no file, and a load refuses no line for it."""
    status, out, errors = start(*COMMAND, command, f"sqlite:///{tmp_path}/{name}", given=ONE)
    assert (status, out, errors.count("\n")) == (1, "", 1)
    assert f"{tmp_path}/{name}" in errors and "line 1" not in errors
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_read_of_a_damaged_file_is_dumped(storage, url, database):
    """Before a line and the exit status say that it is not all."""
    storage.add_all([Plant(number, "x" * 3000) for number in range(100)])  # a page each
    storage.close()
    damage_last_page(database)
    status, out, errors = start(*COMMAND, "dump", url)
    assert (status, out.count("\n") >= 90) == (1, True)
    assert re.fullmatch(r".*malformed; see docs/data\.md\n", errors)


def test_a_reader_that_goes_away_is_no_error_of_a_dump_but_of_a_load(storage, url):
    """dump | head ends quietly, also where a shell looks at each command (pipefail)."""
    storage.add_all([Plant(number, "x" * 10_000) for number in range(100)])
    dump = shlex.join([*COMMAND, "dump", url])
    status, out, errors = start("bash", "-c", f"set -o pipefail; {dump} | head -c 5")
    assert (status, out, errors) == (0, '{"id"', "")
    load = shlex.join([*COMMAND, "load", url])
    assert start("bash", "-c", f"set -o pipefail; {load} 2>&1 | true", given="no")[0] != 0


def test_what_cannot_be_written_is_a_failure(url, stored):
    """A full disk behind the shell's redirection: a line for a dump, a status for a report."""
    with open("/dev/full", "wb") as full:
        assert start(*COMMAND, "load", url, given=ONE, stdout=full)[0] != 0
        assert stored() == [(7, "n", None)]
        errors = "[Errno 28] No space left on device\n"
        assert start(*COMMAND, "dump", url, stdout=full) == (1, "", errors)
