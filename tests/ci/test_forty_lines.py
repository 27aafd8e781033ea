"""docs/forty-lines.md is true: each of its commands is typed, for the forty lines and the service.

Each of its patches is applied. The fixtures here let tests of the interface's plain cases run with
the forty lines, and with what they are after the last patch.
"""

import ast
import contextlib
import importlib.util
import re
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from webtest import TestApp

from tests.ci import test_disk, test_docs
from tests.support.readme import PAGES
from tests.support.server import GUNICORN, PATIENCE, ROOT, TOKEN, Server, Writers, free_port
from tests.test_app import test_a_plant_is_stored_and_answered_exactly  # noqa: F401

disk, folder = test_disk.disk, test_docs.folder  # fixtures
FORTY = ROOT / "docs" / "forty-lines"
PAGE = FORTY.with_suffix(".md")
PARTS = re.split("(?m)^## ", PAGES[PAGE])[1:]
BLOCKS = {  # by the heading of a part: the languages and texts of its blocks
    part.partition("\n")[0]: re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", part) for part in PARTS
}
SETUP = "Both, side by side"
START_FORTY, START_SERVICE, POST, FIRST = [text for kind, text in BLOCKS[SETUP] if kind == "sh"]
COPY, START_COPY = START_FORTY.splitlines()
PATCHES = re.findall(r"`(patch -p1 < [\w.-]+)`", PAGES[PAGE])  # one a rung, as it is typed
TYPED = [(SETUP, 0)]  # names of parts, and after how many patches they are typed
for number, name in enumerate(list(BLOCKS)[2:][: len(PATCHES)], 1):
    if "power" not in name:
        TYPED += [(name, patches) for patches in sorted({0, number - 1, number})]
CLIMBED, RETRY = "climbed.py", "climbed.py, a retry"
SIDES = ["the forty lines", CLIMBED, "the service"]
VARYING = r'after [\d.]+ s|("(answers|seconds|p50|p99)": )[\d.]+'


@pytest.fixture(params=["app.py", "climbed.py"])
def client(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TestApp:
    """A client of the forty lines that has a token."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANTS_TOKENS", TOKEN)
    spec = importlib.util.spec_from_file_location("forty_lines", FORTY / request.param)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client = TestApp(module.app)
    client.authorization = ("Bearer", TOKEN)
    return client


@pytest.fixture
def start(serve: Callable[..., Server]) -> Callable[[str, Path], Server]:
    """Starts one of SIDES, with its file in a folder."""

    def start(side: str, folder: Path) -> Server:
        url = f"sqlite:///{folder}/plants.db"
        if side == "the service":
            return serve(DATABASE_URL=url)
        command = ["env", f"--chdir={folder}", GUNICORN, "--workers=2", "--bind=127.0.0.1:0"]
        command += ["--threads=16", "climbed:app"] if CLIMBED in side else ["app:app"]
        server = serve(command=command, PYTHONPATH=str(FORTY), DATABASE_URL=url)
        server.may_fail = True  # a worker that starts without power does
        return server

    return start


@pytest.fixture
def ports(serve: Callable[..., Server], folder: Path, name: str, patches: int) -> dict[int, int]:
    """Starts both as the page says, but on free ports; which are in place of the page's."""
    settings = dict.fromkeys(("DATABASE_URL", "PLANTS_TOKENS"))
    timeout = 4 if "slow" in name else 30  # seconds until gunicorn kills a worker that hangs
    settings["GUNICORN_CMD_ARGS"] = f"--bind 127.0.0.1:0 --timeout {timeout}"
    servers = {}
    climb(folder, patches)
    for number, command in ((8040, f"cd forty\n{START_COPY}"), (8000, START_SERVICE)):
        command = command.replace(f"--bind 127.0.0.1:{number}", "")
        servers[number] = serve(command=["bash", "-c", f"cd '{folder}'\n{command}"], **settings)
        servers[number].may_fail = True  # the forty lines do
    assert [server.post({})[0] for server in servers.values()] == [401, 401]  # the table is there
    found = {number: server.port for number, server in servers.items()}
    return found | {8041: free_port(), 8042: free_port()}


def climb(folder: Path, patches: int) -> None:
    """Copy the forty lines and apply some patches, which have to fit line by line."""
    commands = "\n".join([COPY, *PATCHES[:patches]])
    printed = subprocess.check_output(["bash", "-ec", commands], cwd=folder, text=True)
    assert re.fullmatch(r"(patching file (app|gunicorn\.conf)\.py\n)*", printed)


def test_after_the_last_patch_it_is_climbed_py(folder: Path) -> None:
    """And there is no patch that the page does not have."""
    climb(folder, len(PATCHES))
    assert (folder / "forty" / "app.py").read_text() == (FORTY / "climbed.py").read_text()
    names = [patch.removeprefix("patch -p1 < ") for patch in PATCHES]
    assert names == sorted(each.name for each in FORTY.glob("*.patch"))


@pytest.mark.parametrize(("name", "patches"), TYPED)
def test_what_is_typed_prints_what_is_shown(
    folder: Path, ports: dict[int, int], name: str, patches: int
) -> None:
    """Without patches, with those of the rungs before, and with its own; but for VARYING."""
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
    texts = [printed, *(text for language, text in BLOCKS[name] if not language)]
    lines, shown, *mended = [re.sub(VARYING, r"\1", text).splitlines() for text in texts]
    if name.startswith(f"{patches}."):  # the service prints the same as before
        assert [each for each in lines if each not in shown or "8000" not in each] == mended[0]
    else:
        assert lines == shown and ("slow" not in name or taken[0] > taken[1])


@pytest.mark.parametrize("side", SIDES)
def test_plants_that_come_together_share_a_commit_of_the_service(
    start: Callable[[str, Path], Server], database: Path, side: str
) -> None:
    """Of the forty lines each has its own; the file's formats are at sqlite.org/fileformat2.html"""
    with Writers(start(side, database.parent).port, count=32) as writers:
        assert writers.goes_on(200)
    if side != "the service":
        commits = int.from_bytes(database.read_bytes()[24:28])
        assert (commits > len(writers.acknowledged)) == (side == "the forty lines")
    else:
        frames = database.with_name("plants.db-wal").read_bytes()[32:]
        commits = sum(any(frames[at + 4 : at + 8]) for at in range(0, len(frames), 24 + 4096))
        assert 0 < commits < len(writers.acknowledged)


@pytest.mark.parametrize("side", [*SIDES, RETRY])
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
        if side == RETRY and number == 2:  # another process committed it, but for the last sync
            with contextlib.closing(sqlite3.connect(disk.root / "plants.db")) as file, file:
                file.execute("INSERT INTO plants VALUES (2, 'n', NULL)")
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
