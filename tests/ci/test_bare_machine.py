"""README.md's first commands on machines that have Debian, Python and nothing else.

A machine is a folder made by debootstrap, in which an ordinary user works. It takes root.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.debian import CERTIFICATES, make_system, unpack
from tests.support.readme import README, block
from tests.support.server import PATIENCE, ROOT, free_port, wait_until

RELEASES = {"bookworm": "3.11", "trixie": "3.13", "forky": "3.14"}  # and their Pythons
REGISTRY = ("PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT", "http_proxy", "https_proxy", "no_proxy")
IGNORED = shutil.ignore_patterns(".git", ".venv", ".node", ".*_cache", "__pycache__", "*.db*")
ENTER = """
    mount -t proc proc "$0/proc" && mount -t tmpfs tmpfs "$0/dev/shm"
    mkdir -p "$0/dev/pts" && mount -t devpts -o ptmxmode=666 devpts "$0/dev/pts"
    chroot --userspec=somebody "$0" env -i "$@"
    exit $?  # else chroot would take the place of this shell, which waits for orphans
"""
VERSION = """python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])'"""


def pinned(requirements: Path, python: str) -> set[str]:
    """The lines that concern a version of Python, as pip freeze prints them, in lower case."""
    lines = re.findall(r"(?m)^\w[^#\n]*?(?=\s+#|$)", requirements.read_text())
    pins = [
        pin
        for pin in map(Requirement, lines)
        if not pin.marker or pin.marker.evaluate({"python_version": python})
    ]
    return {f"{pin.name}{pin.specifier}".lower() for pin in pins}


@pytest.fixture(scope="module", params=RELEASES)
def machine(tmp_path_factory, request) -> Iterator[Path]:
    """The root folder of a machine with a user, who has a copy of the project."""
    root = tmp_path_factory.mktemp("machine") / "root"
    unpack(make_system(request.param), root)
    subprocess.run(["chroot", root, "useradd", "--create-home", "somebody"], check=True)
    shutil.copytree(ROOT, root / "home/somebody/plant store", ignore=IGNORED)
    subprocess.run(["chroot", root, "chown", "-R", "somebody:", "/home/somebody"], check=True)
    yield root
    shutil.rmtree(root)


def on(machine: Path, command: str, **environment: str) -> list[str]:
    """Return the command line that runs a command there; it ends all that is begun there."""
    settings = {"HOME": "/home/somebody", "PATH": "/usr/bin:/bin", "PIP_CERT": f"/{CERTIFICATES}"}
    settings |= {name: os.environ[name] for name in REGISTRY if name in os.environ}
    variables = [f"{name}={value}" for name, value in {**settings, **environment}.items()]
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER]
    command = f"cd '/home/somebody/plant store' && {command}"
    return [*enter, str(machine), *variables, "sh", "-c", command]


def test_the_first_command_leads_to_a_stored_plant(serve, machine, request):
    """Its curl line works as it is printed, and the plant is in the file."""
    command = block("sh", "python3 -m venv").strip()
    assert command.endswith("/gunicorn")
    subprocess.run(on(machine, f"{command} --version"), check=True)  # this may take its time
    server = serve(command=on(machine, command, PORT=str(free_port())))
    curl = wait_until(lambda: re.search(r"\ncurl (?:.*\n){3}", server.err))[0]
    assert f" Python {RELEASES[request.node.callspec.params['machine']]}." in server.err
    answer = subprocess.run(["sh", "-c", curl], stdout=subprocess.PIPE, timeout=PATIENCE)
    assert answer.stdout == b'{"name": "Monstera", "tag": "indoor"}\n'
    server.kill()
    dump = subprocess.check_output(on(machine, ".venv/bin/python transfer.py dump"))
    assert dump == b'{"id": 7, "name": "Monstera", "tag": "indoor"}\n'


def test_the_tests_for_newcomers_need_nothing_more(machine):
    """They pass there, none is skipped, and none needs root, a compiler or another program."""
    command = re.search(r"(?m)^.*/pytest$", README)[0]
    done = subprocess.run(on(machine, command), stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed in ", done.stdout.splitlines()[-1]), done.stdout


def test_the_environment_has_what_is_pinned_and_no_more(machine):
    """Also what the packages bring: the same commit is the same program next month."""
    pins: set[str] = set()
    command = "python3 -m venv --clear .venv"
    for file in ("requirements.txt", "tests/requirements.txt"):
        command += f" && .venv/bin/pip install -q -r {file} && .venv/bin/pip check >&2"
        show = f"{command} && .venv/bin/pip freeze && {VERSION}"
        *installed, python = subprocess.check_output(on(machine, show), text=True).splitlines()
        pins |= pinned(ROOT / file, python)
        assert {line.lower() for line in installed} == pins
