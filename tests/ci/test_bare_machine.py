"""README.md's first commands on machines that have Debian, Python and nothing else.

A machine is a folder made by debootstrap, in which an ordinary user works. It takes root.
"""

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import block
from tests.support.server import PATIENCE, ROOT, free_port, wait_until

RELEASES = {"bookworm": "3.11", "trixie": "3.13", "forky": "3.14"}  # and their Pythons
IGNORED = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.db*")
CACHE = Path("/var/cache/plants-ci")
MAX_AGE = 7 * 24 * 3600  # seconds
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
PIP = {"PIP_INDEX_URL": "index_url", "PIP_DEFAULT_TIMEOUT": "timeout", "https_proxy": "proxy"}
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}
ENVIRONMENT |= {name: os.environ[name] for name in ("http_proxy",) if name in os.environ}
ENTER = """
    mount -t proc proc "$0/proc" && mount -t tmpfs tmpfs "$0/dev/shm"
    mkdir -p "$0/dev/pts" && mount -t devpts -o ptmxmode=666 devpts "$0/dev/pts"
    chroot --userspec=somebody "$0" env -i "$@"
    exit $?  # else chroot would take the place of this shell, which waits for orphans
"""


def make_machine(folder: Path, release: str, commands: str = "") -> None:
    """Make a system with Python in which shell commands were run, and pip finds its registry.

    It is copied from an archive of the last week if there is one, since it takes a minute.
    """
    CACHE.mkdir(exist_ok=True)
    archive = CACHE / f"{hashlib.sha256(f'{release} {commands}'.encode()).hexdigest()[:16]}.tar"
    folder.mkdir(mode=0o755)
    if archive.exists() and archive.stat().st_mtime > time.time() - MAX_AGE:
        subprocess.run(["tar", "-C", folder, "-xf", archive], check=True)
    else:
        _bootstrap(folder, release, commands)
        subprocess.run(["tar", "-C", folder, "-cf", new := f"{archive}.new", "."], check=True)
        os.rename(new, archive)
    shutil.copy(os.environ.get("PIP_CERT", f"/{CERTIFICATES}"), folder / CERTIFICATES)
    settings = [f"{key} = {os.environ[name]}\n" for name, key in PIP.items() if name in os.environ]
    (folder / "etc/pip.conf").write_text(f"[global]\ncert = /{CERTIFICATES}\n{''.join(settings)}")


def _bootstrap(folder: Path, release: str, commands: str) -> None:
    targets = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
    mirror = subprocess.check_output([*targets, "Origin: Debian"], text=True).split()[0]
    command = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv"]
    command += [release, folder, mirror, "sid"]  # the script for all that are newer than it
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if commands:  # the list of packages of a new release may have expired
        command = ["chroot", folder, "sh", "-euc", f"apt-get update -qq\n{commands}\napt-get clean"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)


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
