"""The pages are true: what they have for a shell is typed, and prints what they show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import BLOCK, ELSEWHERE, PAGES, TYPED, block
from tests.support.server import ROOT, TOKEN, free_port

PATIENCE = 120  # seconds for a page: one of them downloads packages
VARYING = r"\b[0-9a-f]{32}\b|(?<=Bearer )[^'\n]+|http://[\w.:]+|\b[\dT:+-]+\.\d+[\d+:]*"
START = ".venv/bin/gunicorn &\nuntil curl -sf localhost:8000/healthz; do kill -0 $!; done\n"
STOP = "kill %% 2>&- && wait || true\n"  # as Ctrl+C does, if it runs
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
    """Type commands there, with a free port in place of 8000; return what they print."""
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
    """What a page has for a shell; a service runs in the background until the next is started."""
    lines = "" if page == TYPED[0] else f"export TOKEN={TOKEN}\n{START}{POST}"
    for language, text in BLOCK.findall(PAGES[page]):
        if language == "python":
            lines += f"cat >client.py <<'END'\n{text}END\n.client/bin/python client.py\n"
        elif text.endswith("gunicorn\n"):
            lines += STOP + re.sub(r"(?m)^(python3 .*)?\.venv/bin/gunicorn\n", START, text)
        elif language == "sh" and not re.search(ELSEWHERE, text):
            lines += text
    return lines


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_a_page_is_typed_from_top_to_bottom(page, folder):
    """All that it shows as printed is printed; where none is started on it, the service runs."""
    printed = run(folder, typed(page), **({"PLANTS_TOKENS": TOKEN} if page != TYPED[0] else {}))
    for language, text in BLOCK.findall(PAGES[page]):
        if language in ("", "json"):
            assert re.sub(VARYING, "X", text) in re.sub(VARYING, "X", printed)
