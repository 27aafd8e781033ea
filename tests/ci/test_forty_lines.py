"""docs/forty-lines.md is true: each of its commands is typed, for the forty lines and the service.

The fixtures here let tests of the interface's plain cases run with the forty lines.
"""

import ast
import contextlib
import importlib.util
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from webtest import TestApp

from tests.ci import test_disk
from tests.support.readme import PAGES
from tests.support.server import GUNICORN, PATIENCE, ROOT, TOKEN, Server, Writers, free_port
from tests.test_app import test_a_plant_is_stored_and_answered_exactly  # noqa: F401

disk = test_disk.disk  # a fixture
FORTY = ROOT / "docs" / "forty-lines"
PAGE = FORTY.with_suffix(".md")
PARTS = re.split("(?m)^## ", PAGES[PAGE])[1:]
BLOCKS = {  # by the heading of a part: the languages and texts of its blocks
    part.partition("\n")[0]: re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", part) for part in PARTS
}
SETUP = "Both, side by side"
START_FORTY, START_SERVICE, POST, FIRST = [text for kind, text in BLOCKS[SETUP] if kind == "sh"]
PRINTING = [name for name in BLOCKS if "" in dict(BLOCKS[name])]
SIDES = ["the forty lines", "the service"]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestApp:
    """A client of the forty lines that has a token."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANTS_TOKENS", TOKEN)
    spec = importlib.util.spec_from_file_location("forty_lines", FORTY / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client = TestApp(module.app)
    client.authorization = ("Bearer", TOKEN)
    return client


@pytest.fixture
def start(serve: Callable[..., Server]) -> Callable[[str, Path], Server]:
    """Starts one of the two, with its file in a folder."""

    def start(side: str, folder: Path) -> Server:
        url = f"sqlite:///{folder}/plants.db"
        if side == "the service":
            return serve(DATABASE_URL=url)
        command = ["env", f"--chdir={folder}", GUNICORN, "--workers=2", "--bind=127.0.0.1:0"]
        return serve(command=[*command, "app:app"], PYTHONPATH=str(FORTY), DATABASE_URL=url)

    return start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like that of README.md, without plants."""
    folder = tmp_path / "plant store"
    (folder / "docs" / "forty-lines").mkdir(parents=True)
    for source in (*ROOT.glob("*.py"), ROOT / "schemas", ROOT / "static"):
        (folder / source.name).symlink_to(source)
    (folder / ".venv").symlink_to(sys.prefix)
    shutil.copy(FORTY / "app.py", folder / "docs" / "forty-lines")
    return folder


@pytest.fixture
def ports(serve: Callable[..., Server], folder: Path, name: str) -> dict[int, int]:
    """Starts both as the page says, but on free ports; which are in place of the page's."""
    settings = dict.fromkeys(("DATABASE_URL", "PLANTS_TOKENS"))
    timeout = 4 if "slow" in name else 30  # seconds until gunicorn kills a worker that hangs
    settings["GUNICORN_CMD_ARGS"] = f"--bind 127.0.0.1:0 --timeout {timeout}"
    servers = {}
    for number, command in ((8040, START_FORTY), (8000, START_SERVICE)):
        command = command.replace(f"--bind 127.0.0.1:{number}", "")
        servers[number] = serve(command=["bash", "-c", f"cd '{folder}'\n{command}"], **settings)
        servers[number].may_fail = True  # the forty lines do
    assert [server.post({})[0] for server in servers.values()] == [401, 401]  # the table is there
    found = {number: server.port for number, server in servers.items()}
    return found | {8041: free_port(), 8042: free_port()}


@pytest.mark.parametrize("name", [name for name in PRINTING if "power" not in name])
def test_what_is_typed_prints_what_is_shown(folder: Path, ports: dict[int, int], name: str) -> None:
    """But for the ports, and for the seconds that it takes."""
    typed = [text for language, text in BLOCKS[name] if language == "sh"]
    commands = POST + (FIRST if name == SETUP else "".join(typed))
    for number, port in ports.items():
        commands = re.sub(rf"\b{number}\b", f"{port}", commands)
    printed = subprocess.run(
        ["bash", "-c", commands], cwd=folder, stdout=subprocess.PIPE, text=True, timeout=PATIENCE
    ).stdout
    for number, port in ports.items():
        printed = re.sub(rf"(?m)^{port}:", f"{number}:", printed)
    taken = [float(seconds) for seconds in re.findall(r"after ([\d.]+) s\n", printed)]
    assert "slow" not in name or taken[0] > taken[1]
    shown = dict(BLOCKS[name])[""]
    assert re.sub(r"after [\d.]+ s", "", printed) == re.sub(r"after [\d.]+ s", "", shown)


@pytest.mark.parametrize("side", SIDES)
def test_plants_that_come_together_share_a_commit_of_the_service(
    start: Callable[[str, Path], Server], database: Path, side: str
) -> None:
    """Of the forty lines each has its own; the file's formats are at sqlite.org/fileformat2.html"""
    with Writers(start(side, database.parent).port, count=32) as writers:
        assert writers.goes_on(200)
    if side == "the forty lines":
        assert int.from_bytes(database.read_bytes()[24:28]) > len(writers.acknowledged)
    else:
        frames = database.with_name("plants.db-wal").read_bytes()[32:]
        commits = sum(any(frames[at + 4 : at + 8]) for at in range(0, len(frames), 24 + 4096))
        assert 0 < commits < len(writers.acknowledged)


@pytest.mark.parametrize("side", SIDES)
def test_a_power_cut_takes_the_last_plant_of_the_forty_lines_only(
    start: Callable[[str, Path], Server],
    disk: test_disk.Disk,
    side: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Those before it were synced with the next."""
    # Else the file system might sync by itself in the moment between.
    subprocess.run(["mount", "-o", "remount,commit=600", disk.root], check=True)
    server = start(side, disk.root)
    for number in range(3):
        assert server.post({"id": number, "name": "n"})[0] == 200
    disk.cut_power()
    test_disk.reboot(server, disk)
    with contextlib.closing(sqlite3.connect(disk.root / "plants.db")) as connection:
        ((stored,),) = connection.execute("SELECT count(*) FROM plants")
    name, figures = f"a power cut, {side}", f"3 plants acknowledged, {3 - stored} lost"
    record_property(name, figures)
    assert f"{name}: {figures}\n" in PAGES[PAGE]


def test_the_code_that_is_shown_is_in_the_service() -> None:
    """Line by line."""
    sources = "".join(file.read_text() for file in [*ROOT.glob("*.py"), *ROOT.glob("schemas/*.py")])
    shown = [
        text for blocks in BLOCKS.values() for language, text in blocks if language == "python"
    ]
    assert len(shown) == 12
    assert [text for text in shown if text not in sources] == []


def test_the_code_is_as_long_as_the_page_says() -> None:
    """A function or a class, from its def to its end; "about" is within ten lines."""
    assert sum(map(bool, (FORTY / "app.py").read_text().splitlines())) <= 42
    named = r"`([\w.]+)` in\s\[[^]]+\]\(([^)]+)\),\s(about )?(\d+)\slines"
    found = re.findall(named, PAGES[PAGE])
    assert len(found) > 20
    for name, file, about, lines in found:
        node = ast.parse((PAGE.parent / file).read_text())
        for part in name.split("."):
            (node,) = [each for each in node.body if getattr(each, "name", "") == part]
        length = node.end_lineno - node.lineno + 1
        assert abs(length - int(lines)) <= (10 if about else 0), (name, length)
