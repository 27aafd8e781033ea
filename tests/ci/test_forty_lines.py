"""Every command of docs/forty-lines.md is typed, and prints what the page shows."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import count_code, table
from tests.support.server import ROOT, Server, free_port, wait_until

PAGE = (ROOT / "docs" / "forty-lines.md").read_text("utf-8")
PARTS = [part for part in re.split("(?m)^## ", PAGE) if "\n```" in part]
SETUP, *RUNGS, LAST = [re.findall(r"(?ms)^```(?:sh)?\n(.*?)^```$", part) for part in PARTS]
START_FORTY, START_SERVICE, POST = SETUP
COPY, START_COPY = START_FORTY.splitlines()
AGAIN = ["rm -rf forty", COPY]
FOLDERS = ["forty", "docs/forty-lines"]  # of the patched program, and of the forty lines
PATCHES = re.findall(r"`(patch -p1 < [\w.-]+)`", PAGE)  # one for each rung, as a reader types it
FIXED = "# After the patch:\n"  # This line stands between the two outputs of a rung.
PORTS = {number: str(free_port()) for number in ("8040", "8043", "8000")}
# How many commits 400 plants take with the patch differs from run to run.
FEWER = r"(?!400 )\b\d+ commits"


def shell(folder: Path, commands: str) -> str:
    """Type commands of the page, with free ports in place of its own. Return what they print."""
    for number, port in PORTS.items():
        commands = re.sub(rf"\b{number}\b", port, commands)
    bash = ["bash", "-c", commands]
    printed = subprocess.run(bash, cwd=folder, stdout=subprocess.PIPE, timeout=120).stdout.decode()
    for number, port in PORTS.items():
        printed = re.sub(rf"\b{port}\b", number, printed)
    return re.sub(FEWER, "fewer commits", printed)


@contextlib.contextmanager
def running(folder: Path, command: str, number: str) -> Iterator[None]:
    """Run one of the two servers at the port that the page calls `number`.

    Ctrl+C ends it, in less than the 30 seconds that gunicorn has by default.
    """
    bind = f"--bind 127.0.0.1:{PORTS[number]}"
    bash = ["bash", "-c", f"cd '{folder}'\n" + re.sub(rf"--bind \S+{number}", "", command)]
    variables = {"GUNICORN_CMD_ARGS": bind, "DATABASE_URL": None}
    server = Server(folder.parent, command=bash, **variables)
    try:
        wait_until(lambda: shell(folder, f"curl -s http://127.0.0.1:{number}"))
        yield
        os.killpg(server.process.pid, signal.SIGINT)
        server.process.wait(20)
    finally:
        server.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder like the one of README.md, in which the service runs."""
    folder = tmp_path_factory.mktemp("ladder") / "plant store"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "forty", "tests", "*.db*"))
    (folder / ".venv").symlink_to(sys.prefix)
    with running(folder, START_SERVICE, "8000"):
        yield folder


def climb(folder: Path, patching: list[str]) -> str:
    """Copy the forty lines and patch them. Return the files that result."""
    printed = shell(folder, "\n".join(patching))
    # Nothing is printed about fuzz or an offset, so each patch fits exactly.
    assert re.fullmatch(r"(patching file (app|gunicorn\.conf)\.py\n)*", printed)
    return shell(folder, "cat forty/*.py")


@pytest.mark.parametrize(("number", "rung"), list(enumerate(RUNGS)))
def test_a_rung_prints_what_is_shown(folder: Path, number: int, rung: list[str]) -> None:
    """The forty lines fail, and the rung's patch fixes them. The service prints the same twice."""
    typed, shown = [re.sub(FEWER, "fewer commits", text) for text in rung]
    before, after = shown.split(FIXED)
    for is_fixed, lines in enumerate([before, after]):
        climb(folder, [*AGAIN, *PATCHES[: number + is_fixed]])
        with running(folder, f"cd forty\n{START_COPY}", "8040"):
            printed = shell(folder, POST + typed).splitlines(keepends=True)
        of_the_service = re.findall("(?m)^(?:8000: |.*service).*\n", before) if is_fixed else []
        assert "".join(line for line in printed if line not in of_the_service) == lines


def test_the_last_command_makes_the_program_of_the_last_rung(folder: Path) -> None:
    """It replaces what is there already. The page has every patch, and says how long it all is."""
    assert climb(folder, [*AGAIN, *PATCHES]) == climb(folder, LAST)
    assert len(PATCHES) == len(list((folder / "docs" / "forty-lines").glob("*.patch")))
    top, bottom = [count_code((folder / name / "app.py").read_text()) for name in FOLDERS]
    service = [file for name in ("*.py", "engines/*.py") for file in ROOT.glob(name)]
    hundreds = round(sum(count_code(file.read_text("utf-8")) for file in service), -2)
    assert f"It has {bottom} lines of code, and the service has about {hundreds}." in PAGE
    assert f"your app.py now has {top} lines of code" in PAGE


def test_the_bridge_leads_from_the_last_rung_to_functions_of_the_service(folder: Path) -> None:
    """docs/teach.md names where each part of the program is in the service."""
    climb(folder, LAST)
    program = (folder / "forty" / "app.py").read_text()
    for here, there in table("in app.py after the last rung"):
        for name in re.findall(r"`(\w+)`", here):
            assert re.search(rf"\b{name}\b", program), name
        for names, file in re.findall(r"((?:`\w+`,? )+)in \[([\w./]+)\]", there):
            for name in re.findall(r"\w+", names):
                assert f"def {name}(" in (ROOT / file).read_text("utf-8"), name
