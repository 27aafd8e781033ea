"""README.md and docs/ are true: commands run, samples are what comes, tables are complete.

That samples of errors are answers that really come is in test_openapi.py.
"""

import contextlib
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from shlex import quote

import psycopg
import pytest

from storage import DEFAULT_URL
from tests.conftest import ROWS
from tests.support.postgresql import PostgreSQL
from tests.support.readme import PAGES, block, blocks, table
from tests.support.server import GUNICORN, PATIENCE, ROOT, Server, Writers, wait_until

#: How each block of commands begins, and what runs it.
COMMANDS = {
    "python3 -m venv": "test_bare_machine.py, and .ci/run",
    "curl": "test_bare_machine.py, as the service prints it",
    "openapi-python-client": "test_contract.py",
    "sqlite3 plants.db 'SELECT": "test_a_backup_has_every_plant_that_was_acknowledged",
    ".venv/bin/python transfer.py dump >": "test_a_backup_has_every_plant_that_was_acknowledged",
    'sqlite3 plants.db "VACUUM': "test_a_backup_has_every_plant_that_was_acknowledged",
    ".venv/bin/python transfer.py dump sql": "test_a_backup_has_every_plant_that_was_acknowledged",
    "DATABASE_URL=": "test_the_start_with_postgresql_stores_a_plant",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like that of README.md, without plants."""
    folder = tmp_path / "plant store"
    folder.mkdir()
    for source in (*ROOT.glob("*.py"), ROOT / "schemas", ROOT / "static"):
        (folder / source.name).symlink_to(source)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def server(serve: Callable[..., Server], folder: Path) -> Server:
    """The service, started there without a setting."""
    start = ["env", f"--chdir={folder}", GUNICORN, "--bind", "127.0.0.1:0"]
    return serve(command=start, DATABASE_URL=None, PLANTS_TOKENS=None)


def shape(line: str) -> str:
    """A line with what differs from run to run made the same."""
    line = re.sub(r"[0-9a-f]{32}$", "ID", line)
    line = re.sub(r" (in|Bearer) [^';]+", r" \1 X", line)
    line = re.sub(r"http://[\d.:]+", "http://X", line)
    return re.sub(r"\[\d\d/\w{3}/.*?\]|[\d.]+s|\d+\.\d+\.\d+", "X", line)


def test_each_command_is_run_by_a_test() -> None:
    """Whoever adds one to a page runs it in a test, and names that above."""
    for commands in blocks("sh"):
        assert any(commands.startswith(beginning) for beginning in COMMANDS), commands


def test_the_start_prints_the_curl_line_that_is_shown(server: Server) -> None:
    """It differs in the token alone."""
    curl = wait_until(lambda: re.search(r"(?m)^curl (.*\n){3}", server.err))[0]
    assert shape(curl) == shape(block("sh", "curl"))


def test_the_logs_look_as_they_are_shown(server: Server) -> None:
    """A page shows the line of the start, and that of a request."""
    assert server.port
    token = wait_until(lambda: re.search("Bearer ([^']+)", server.err))[1]
    plant = json.loads(re.search("-d '(.*)'", block("sh", "curl"))[1])
    assert server.post(plant, token) == (200, json.loads(block("json", "{")))
    assert shape(wait_until(lambda: server.out)) == shape(block("", "127.0.0.1"))
    (line,) = re.findall(r"\[INFO\] plants: .*\n", server.err)
    assert shape(line) == shape(block("", "[INFO] plants: "))


def run(folder: Path, commands: str, **environment: str) -> str:
    """Run what a page has for a shell; return what it printed."""
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", commands],
        stdout=subprocess.PIPE, text=True, check=True, cwd=folder, timeout=PATIENCE,
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", **environment},
    )  # fmt: skip
    return done.stdout


def test_a_backup_has_every_plant_that_was_acknowledged(
    serve: Callable[..., Server], folder: Path, postgresql_url: str
) -> None:
    """By each of the ways that are shown, while clients post; a copy of the file serves again."""
    server = serve(f"--chdir={folder}", DATABASE_URL=DEFAULT_URL)
    with Writers(server.port) as writers:
        assert writers.goes_on()
        acknowledged = dict(writers.acknowledged)
        run(folder, block("sh", "sqlite3 plants.db 'SELECT").replace("| head", "> /dev/null"))
        loaded = run(folder, block("sh", ".venv/bin/python transfer.py dump >"))
        assert " new, 0 there already, 0 conf" in loaded
        run(folder, block("sh", 'sqlite3 plants.db "VACUUM'))
        move = block("sh", ".venv/bin/python transfer.py dump sqlite:///plants.db |")
        run(folder, move, DATABASE_URL=postgresql_url)
        assert writers.goes_on()
    assert set(writers.answers) == {200}
    for name in ("elsewhere.db", "copy.db"):
        with contextlib.closing(sqlite3.connect(folder / name)) as file:
            assert acknowledged.items() <= names(file.execute(ROWS))
    with psycopg.connect(postgresql_url) as connection:
        assert acknowledged.items() <= names(connection.execute(ROWS))
    again = serve(DATABASE_URL=f"sqlite:///{folder}/copy.db")
    number, name = next(iter(acknowledged.items()))
    assert again.post({"id": number, "name": name})[0] == 200
    assert again.post({"id": number, "name": "another"})[0] == 409


def names(rows: Iterable[tuple[int, str, str | None]]) -> set[tuple[int, str]]:
    """Ids and names of plants."""
    return {(number, name) for number, name, _ in rows}


@pytest.mark.parametrize(
    "command", [text.strip() for text in blocks("sh") if text.startswith("DATABASE_URL=")]
)
def test_the_start_with_postgresql_stores_a_plant(
    serve: Callable[..., Server], postgresql: PostgreSQL, tmp_path: Path, command: str
) -> None:
    """The command is as it is shown, but for the host, the database and the port."""
    setting, _, program = command.partition(" ")
    example, names = re.search("postgresql://user:password@([a-z,]+)/database", setting).group(0, 1)
    hosts = [str(tmp_path)] * names.count(",") + [str(postgresql.folder)]
    url = postgresql.new_schema().replace(str(postgresql.folder), ",".join(hosts))
    here = (
        f"export {setting.replace(example, quote(url))}; exec {quote(GUNICORN)} --bind 127.0.0.1:0"
    )
    assert program in ("", ".venv/bin/gunicorn")
    server = serve(command=["sh", "-c", here], DATABASE_URL=None)
    assert server.post({"id": 7, "name": "Monstera"})[0] == 200


def test_the_table_of_variables_has_all_that_are_read() -> None:
    """And no others; the service's own way to tell its workers something is not for operators."""
    code = "".join(source.read_text() for source in ROOT.glob("*.py"))
    calls = r"(?:os\.environ\.get\(|os\.environ\[|number_from\(|read_list\()"
    read = re.findall(rf'{calls}"(\w+)"', code)
    rows = table("variable")
    assert {variable.strip("`") for variable, _, _ in rows} == {*read} - {"PLANTS_STORAGE"}
    assert ["`DATABASE_URL`", f"`{DEFAULT_URL}`"] in [row[:2] for row in rows]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To files that exist, and to headings of the page that is named."""
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            headings = re.findall("(?m)^#+ (.*)$", file.read_text("utf-8")) if heading else []
            slugs = {re.sub(r"\W+", "-", each.lower()).strip("-") for each in headings}
            assert not heading or heading in slugs, target
