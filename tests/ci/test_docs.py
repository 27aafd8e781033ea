"""The pages are true: the tests type their commands, which print what the pages show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import BLOCK, ELSEWHERE, PAGES, TYPED, block
from tests.support.server import ROOT, TOKEN, free_port

PATIENCE = 120  # seconds for a page: the commands of one download packages
VARYING = r"\b[0-9a-f]{32}\b|(?<=Bearer )[^'\n]+|http://[\w.:]+|\b[\dT:+-]+\.\d+[\d+:]*"
START = ".venv/bin/gunicorn &\nuntil curl -sf localhost:8000/healthz; do kill -0 $!; done\n"
STOP = "kill %% 2>&- && wait || true\n"  # This stands for Ctrl+C, if a service is running.
POST = block("sh", ". ./.env").partition("\n")[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like that of README.md, without plants."""
    (folder := tmp_path / "plant store").mkdir()
    for source in ROOT.glob("[!.]*"):
        if not source.name.startswith("plants.db"):
            (folder / source.name).symlink_to(source)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def run(folder: Path, commands: str, **settings: str) -> str:
    """Type commands in a folder, with a free port in place of 8000. Return what they print."""
    port = f":{free_port()}"
    kept = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    kept |= {"PATH": "/usr/bin:/bin", "GUNICORN_CMD_ARGS": f"--bind localhost{port}", **settings}
    bash = ["unshare", "--pid", "--fork", "--kill-child", "bash", "-eo", "pipefail", "-c"]
    done = subprocess.run(
        [*bash, commands.replace(":8000", port)], cwd=folder, env=kept, timeout=PATIENCE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def typed(page: Path) -> str:
    """Return the commands of a page. Each service runs in the background until the next one."""
    lines = "" if page == TYPED[0] else f"export TOKEN={TOKEN}\n{START}{POST}"
    for language, text in BLOCK.findall(PAGES[page]):
        if language == "python":
            lines += f"cat >client.py <<'END'\n{text}END\n"
            lines += "PATH=.client/bin:.venv/bin:$PATH python client.py\n"
        elif text.rstrip(")\n").endswith("gunicorn"):
            # The first block installs what the test has already. The second one is a subshell.
            commands = re.sub(r"^python3 .* && ", "", text).replace("gunicorn)\n", "gunicorn\n")
            commands = commands.replace("(set -ae; . ./.env; ", "set -a; . ./.env\n")
            lines += STOP + commands.replace(".venv/bin/gunicorn\n", START)
        elif language == "sh" and not re.search(ELSEWHERE, text):
            lines += text
    return lines


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_a_page_is_typed_from_top_to_bottom(page, folder):
    """The commands print all that the page shows.

    On all pages but the first, the service is already running.
    """
    printed = run(folder, typed(page), **({"PLANTS_TOKENS": TOKEN} if page != TYPED[0] else {}))
    for language, text in BLOCK.findall(PAGES[page]):
        if language in ("", "json"):
            assert re.sub(VARYING, "X", text) in re.sub(VARYING, "X", printed)
