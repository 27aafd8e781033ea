"""README.md's first commands on machines that have Debian, Python and nothing else.

A machine is a folder made by debootstrap, in which an ordinary user works. It takes root.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.debian import make_machine
from tests.support.pages import block
from tests.support.server import PATIENCE, ROOT, free_port, wait_until

RELEASES = {"bookworm": "3.11", "trixie": "3.13", "forky": "3.14"}  # and their Pythons
IGNORED = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.db*")
ENTER = """
    mount -t proc proc "$0/proc" && mount -t tmpfs tmpfs "$0/dev/shm"
    mkdir -p "$0/dev/pts" && mount -t devpts -o ptmxmode=666 devpts "$0/dev/pts"
    chroot --userspec=somebody "$0" env -i "$@"
    exit $?  # else chroot would take the place of this shell, which waits for orphans
"""


@pytest.fixture(scope="module", params=RELEASES)
def machine(tmp_path_factory, request) -> Iterator[Path]:
    """The root folder of a machine with a user, who has a copy of the project."""
    root = tmp_path_factory.mktemp("machine") / "root"
    make_machine(root, request.param)
    subprocess.run(["chroot", root, "useradd", "--create-home", "somebody"], check=True)
    shutil.copytree(ROOT, root / "home/somebody/plant store", ignore=IGNORED)
    subprocess.run(["chroot", root, "chown", "-R", "somebody:", "/home/somebody"], check=True)
    yield root
    shutil.rmtree(root)


def on(machine: Path, command: str, **environment: str) -> list[str]:
    """Return the command line that runs a command there; it ends all that is begun there."""
    settings = {"HOME": "/home/somebody", "PATH": "/usr/bin:/bin", **environment}
    variables = [f"{name}={value}" for name, value in settings.items()]
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER]
    command = f"cd '/home/somebody/plant store' && {command}"
    return [*enter, str(machine), *variables, "sh", "-c", command]


def test_the_readme_works_as_it_stands(serve, machine, request):
    """The printed line stores a plant, and the tests for newcomers pass: none needs more.

    Also what the packages bring is pinned: nothing is missing if they may bring nothing.
    """
    python = RELEASES[request.node.callspec.params["machine"]]
    start = block("sh", "python3 -m venv").strip()
    test = block("sh", "python3 -m venv .venv && .venv/bin/pip install -r tests").strip()
    install = f"{start} --version && .venv/bin/python{python} -m pip check"
    subprocess.run(on(machine, install, PIP_NO_DEPS="1"), check=True)  # this may take its time
    server = serve(command=on(machine, start, GUNICORN_CMD_ARGS=f"--bind=127.0.0.1:{free_port()}"))
    curl = wait_until(lambda: re.search(r"\ncurl (?:.*\n){3}", server.err))[0]
    answer = subprocess.run(["sh", "-c", curl], stdout=subprocess.PIPE, timeout=PATIENCE)
    assert answer.stdout == b'{"name": "Monstera", "tag": "indoor"}\n'
    server.kill()
    subprocess.run(on(machine, f"{test} && .venv/bin/pip check", PIP_NO_DEPS="1"), check=True)
