"""The commands dump, load and copy: plants move and nothing changes on the way."""

import contextlib
import itertools
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from engine import Unavailable
from schemas import Plant
from start import get_storage
from storage import Outcomes
from tests.support.locks import lock_held
from tests.support.server import PATIENCE, ROOT, wait_until
from tests.support.users import open_folder, run_as_nobody
from transfer import BAR, LINE_LIMIT, load, main

COMMAND = [sys.executable, "transfer.py"]


def start(*command: str, out: Any = subprocess.PIPE, given: bytes = b"") -> tuple[int, bytes]:
    """Run a command in a process of its own; return its status and standard error."""
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # as it is for a user
    streams = {"input": given, "stdout": out, "stderr": subprocess.PIPE}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=PATIENCE, **streams)
    return done.returncode, done.stderr


@pytest.fixture
def run(capfdbinary) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs a command in this process; returns its status, standard output and standard error."""

    def run(command: str, *urls: str, given: bytes = b"") -> tuple[int, str, str]:
        capfdbinary.readouterr()
        with tempfile.TemporaryFile() as file:
            file.write(given)
            file.seek(0)
            os.dup2(file.fileno(), 0)
        status = main([command, *filter(None, urls)])
        out, errors = capfdbinary.readouterr()
        return status, out.decode(), errors.decode()

    stdin = os.dup(0)
    yield run
    os.dup2(stdin, 0)
    os.close(stdin)


PLANTS = [
    Plant(-(2**63), "", ""),
    Plant(-1, 'quote " backslash \\ newline \n', None),
    Plant(0, "🌵 é \x01 \u2028", "tag"),
    Plant(2**53 + 1, "n", None),
    Plant(2**63 - 1, "x" * 2**20, "y"),  # about as long as older versions took
]


def test_a_dump_loaded_elsewhere_gives_the_same_dump(run, storage, url, tmp_path):
    """JSON Lines in the order of id, ids with every digit, tags only where there are some."""
    storage.add_all(PLANTS[::-1])
    status, dumped, errors = run("dump", url)
    assert (status, errors) == (0, "")
    lines = [json.loads(line) for line in dumped.split("\n") if line]
    assert [Plant(**line) for line in lines] == PLANTS
    assert "tag" not in lines[1]
    assert '"🌵 é \\u0001 \u2028"' in dumped

    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    status, report, errors = run("load", elsewhere, given=dumped.encode())
    assert (status, errors) == (0, "")
    assert report == "5 new, 0 there already, 0 conflicting, 0 rejected, 0 invalid\n"
    assert not (tmp_path / "elsewhere.db-wal").exists()  # the database is closed
    assert run("dump", elsewhere) == (0, dumped, "")
    assert run("copy", elsewhere, f"{elsewhere}2") == (0, report, "")
    assert run("dump", f"{elsewhere}2") == (0, dumped, "")
    status, report, _ = run("copy", elsewhere, url)
    assert (status, report) == (0, "0 new, 5 there already, 0 conflicting, 0 rejected, 0 invalid\n")


def test_each_refused_line_is_named(run, storage, url, database, stored):
    """By its number in all of the input, which is stored in batches."""
    storage.add(Plant(7, "Monstera"))
    before = range(1001, 1991)
    lines = [b'{"id": %d, "name": "n"}' % number for number in before]
    lines += [
        b'{"id": 7, "name": "Monstera"}',
        b'{"id": 8, "name": "Sequoia", "height": 90}',
        b'{"id": 7, "name": "Sequoia"}',
        b'{"id": "9"}',
        b'{"id": \r',
        b'{"id": 9, "name": "\xff"}',
        b'{"id": 9, "name": "' + b"x" * LINE_LIMIT + b'"}',
        b'{"id": 9, "name": "Hemlock"}',
        b'{"id": 10, "name": "last, without an end"}',
    ]
    with contextlib.closing(sqlite3.connect(database)) as connection:
        refuse = "WHEN new.name = 'Hemlock' BEGIN SELECT raise(ABORT, 'poisonous'); END"
        connection.execute(f"CREATE TRIGGER poison BEFORE INSERT ON plants {refuse}")
    status, report, errors = run("load", url, given=b"\n".join(lines))
    assert status == 1
    assert report == "992 new, 1 there already, 1 conflicting, 1 rejected, 4 invalid\n"
    assert errors.splitlines() == [
        "line 993: id: 7 is taken by another plant, which stays as it is",
        'line 994: id: must be an integer, not "9"; name: required but missing',
        "line 995: the plant is not JSON: Expecting value at column 8",
        "line 996: the plant is not UTF-8: byte 0xff at offset 19",
        "line 997: longer than 1049600 bytes",
        "line 998: SQLite: SQLITE_CONSTRAINT_TRIGGER",
    ]
    assert stored() == [
        (7, "Monstera", None),
        (8, "Sequoia", None),
        (10, "last, without an end", None),
        *((number, "n", None) for number in before),
    ]


def test_what_is_too_long_is_one_line(run, url, stored):
    """Its rest is not taken for others, with an end or without, and the next line is taken."""
    plant = b'{"id": 7, "name": "n"}'
    lines = b"x" * (LINE_LIMIT - 1), plant, b"x" * 3 * LINE_LIMIT, b"x" * 2 * LINE_LIMIT
    status, report, _ = run("load", url, given=b"\n".join(lines))
    assert (status, report) == (1, "1 new, 0 there already, 0 conflicting, 0 rejected, 3 invalid\n")
    assert stored() == [(7, "n", None)]


def test_blank_lines_are_skipped_but_counted(run, url, stored):
    """As editors and other programs leave them; line ends may be of either kind."""
    lines = b'\n{"id": 7, "name": "n"} \r\n\r\n \t\n{"id": 8}\r\n\n'
    status, report, errors = run("load", url, given=lines)
    assert (status, report) == (1, "1 new, 0 there already, 0 conflicting, 0 rejected, 1 invalid\n")
    assert errors == "line 5: name: required but missing\n"
    assert stored() == [(7, "n", None)]


def test_large_plants_are_stored_in_small_batches(url):
    """What is sent at once has to come to its end within the time limit of a request."""
    sizes, lengths = [], []
    names = [b"x" * length for length in (LINE_LIMIT // 2, 4000, 10) for _ in range(500)][490:]
    lines = (b'{"id": %d, "name": "%s"}\n' % numbered for numbered in enumerate(names))
    with contextlib.closing(get_storage(url, wait_limit=PATIENCE)) as storage:
        add_all = storage.add_all

        def observed(plants: Sequence[Plant]) -> Outcomes:
            sizes.append(sum(len(plant.name) for plant in plants))
            lengths.append(len(plants))
            return add_all(plants)

        storage.add_all = observed
        load(storage, lines, counts := Counter())
    assert counts["new"] == len(names) and sum(sizes) == sum(map(len, names))
    assert max(sizes) < 2 * LINE_LIMIT and len(sizes) < 20
    assert max(lengths) == 250


NOTHING = "0 new, 0 there already, 0 conflicting, 0 rejected, 0 invalid\n"
OF_NO_KIND = ["", " ", "plants.db", "sqlite://plants.db", "sqlite:///", "sqlite:///:memory:",
              "sqlite:///a%00b", "sqlite:///plants.db?mode=ro", "SQLITE", "mysql://h/d",
              "postgresql://u:100%@h/d", "postgresql://h/d?ssl=yes",
              "postgresql+psycopg://h/d"]  # fmt: skip
NOT_THERE = ["sqlite:///{}", "sqlite:///{}/none/x.db"]


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        *itertools.product(["dump", "load"], OF_NO_KIND + NOT_THERE),
        ("dump", "postgresql:///?host={}"),
    ],
)
def test_what_is_no_storage_is_refused_in_one_line(run, command, wrong, tmp_path, monkeypatch):
    """What is in memory only is not stored; a part of a URL, maybe a password, is not repeated."""
    monkeypatch.setenv("DATABASE_URL", "")
    status, out, errors = run(command, wrong.format(tmp_path), given=b'{"id": 7, "name": "n"}')
    assert (status, out) in [(1, ""), (1, NOTHING)]
    assert errors.count("\n") == 1
    words = r"DATABASE_URL must (name a file|be like)" if wrong in OF_NO_KIND else str(tmp_path)
    assert re.search(words, errors)


@pytest.mark.parametrize("name", ["plant.db", "none/plants.db"])
@pytest.mark.parametrize("command", ["dump", "copy"])
def test_what_reads_a_missing_file_makes_none(run, tmp_path, command, name):
    to = f"sqlite:///{tmp_path}/to.db" if command == "copy" else ""
    status, out, errors = run(command, f"sqlite:///{tmp_path}/{name}", to)
    assert (status, out) == (1, NOTHING if to else "")
    assert errors == f"{tmp_path}/{name}: there is no such file\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["copy", "one"], ["dump", "one", "two"]])
def test_each_command_has_its_number_of_databases(arguments):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


def test_nothing_to_load_is_a_mistake_and_nothing_to_copy_is_none(run, storage, url, tmp_path):
    """In `dump | load` a dump that failed leaves nothing."""
    to = f"sqlite:///{tmp_path}/to.db"
    assert run("copy", url, to) == (0, NOTHING, "")
    said = "nothing was loaded: standard input has no plant\n"
    assert run("load", to, given=b"\n") == (1, NOTHING, said)


@pytest.mark.parametrize("command", ["dump", "copy"])
def test_what_can_be_read_of_a_damaged_file_is_not_lost(run, storage, url, database, command):
    """Before the exit status says that it is not all."""
    names = [letter * 3000 for letter in "abcde"]  # a page each
    storage.add_all([Plant(number, name) for number, name in enumerate(names)])
    storage.close()
    with database.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\xff" * 4096)
    status, out, errors = run(command, url, f"{url}2" if command == "copy" else "")
    assert (status, errors.count("\n")) == (1, 1)
    if command == "copy":
        assert out.startswith(("3 new, ", "4 new, "))
        _, out, _ = run("dump", f"{url}2")
    # Python's sqlite3 reads a row ahead.
    assert [json.loads(line)["name"] for line in out.splitlines()] in (names[:3], names[:4])


@pytest.mark.parametrize("service", ["runs", "has ended"])
def test_a_dump_is_for_other_users_too(capfd, service):
    """Who may only read gets all plants, or one line where SQLite itself can't read then."""

    def dump() -> None:
        print(f"status {main(['dump', url])}", file=sys.stderr)

    with open_folder() as folder:
        url = f"sqlite:///{folder}/plants.db"
        with contextlib.closing(get_storage(url, wait_limit=PATIENCE)) as storage:
            storage.open_or_create()
            storage.add(Plant(7, "Monstera"))
            if service == "has ended":
                storage.close()
            for file in folder.iterdir():
                file.chmod(0o644)
            folder.chmod(0o555)  # a -shm file, which SQLite needs, can't be made there
            run_as_nobody(dump)
            folder.chmod(0o777)
    dumped, said = capfd.readouterr()
    if service == "runs":
        assert (dumped, said) == ('{"id": 7, "name": "Monstera"}\n', "status 0\n")
    else:
        assert re.fullmatch(r"/.*/plants\.db: .*\nstatus 1\n", dumped + said)


@pytest.mark.parametrize("count", [1, 200])
def test_a_reader_that_goes_away_is_no_error(storage, url, count, tmp_path):
    """dump | head ends quietly, also where a shell looks at each command (pipefail)."""
    storage.add_all([Plant(n, "x" * 10_000) for n in range(count)])
    head = f"head -c 9 >{shlex.quote(str(tmp_path / 'head'))}"
    dump = f"set -o pipefail; {shlex.join([*COMMAND, 'dump', url])} | {head}"
    assert start("bash", "-c", dump) == (0, b"")
    assert (tmp_path / "head").read_bytes() == b'{"id": 0,'


def test_what_cannot_be_written_is_said_in_one_line(storage, url):
    """A full disk behind the shell's redirection."""
    storage.add(Plant(7, "n"))
    with open("/dev/full", "wb") as full:
        said = start(*COMMAND, "dump", url, out=full)
    assert said == (1, b"[Errno 28] No space left on device\n")


@pytest.mark.parametrize("reader", ["a full disk", "nobody"])
def test_a_report_that_cannot_be_written_fails_a_load(url, stored, reader):
    """Nobody would learn of refused lines; the others are stored."""
    unread, writer = os.pipe()
    os.close(unread)
    with open("/dev/full", "wb") as full, os.fdopen(writer, "wb") as pipe:
        out = full if reader == "a full disk" else pipe
        status, errors = start(*COMMAND, "load", url, out=out, given=b'{"id": 7, "name": "n"}')
    assert (status, errors.count(b"\n")) == (1, 1)
    assert stored() == [(7, "n", None)]


def test_a_lock_that_is_not_released_ends_a_load(database):
    """Loading the same lines again is safe."""
    with (
        lock_held(database),
        contextlib.closing(get_storage(f"sqlite:///{database}", wait_limit=0.1)) as storage,
        pytest.raises(Unavailable, match="hold the lock"),
    ):
        load(storage, iter([b'{"id": 7, "name": "n"}\n']), Counter())


@pytest.mark.parametrize(("command", "end"), [("dump", b"100 plants"), ("load", b"100%")])
def test_long_work_shows_on_a_terminal_how_far_it_is(
    storage, url, database, tmp_path, command, end
):
    storage.add_all([Plant(number, "x" * 10_000) for number in range(100)])  # a pipe takes less
    (tmp_path / "lines").write_text('{"id": 777, "name": "n"}\n' * 1000)
    terminal, error = os.openpty()
    termios.tcsetwinsize(error, (24, 80))
    with (tmp_path / "lines").open("rb") as lines, lock_held(database):
        process = subprocess.Popen(
            [*COMMAND, command, url], cwd=ROOT, stdin=lines, stdout=subprocess.PIPE, stderr=error
        )
        if command == "dump":
            process.stdout.read(1)
        else:
            wait_until(lambda: os.lseek(lines.fileno(), 0, os.SEEK_CUR))  # it has begun to read
        time.sleep(BAR["delay"] + 0.1)
    process.communicate(timeout=PATIENCE)
    os.set_blocking(terminal, False)
    assert end in os.read(terminal, 2**16)
    os.close(terminal)
    os.close(error)
