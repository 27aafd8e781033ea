"""README.md's first commands, on machines with Debian and Python and nothing else installed."""

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

RELEASES = {"bookworm": "3.11", "trixie": "3.13", "forky": "3.14"}  # Debian's, and their Pythons.
IGNORED = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.db*")
CACHE = Path("/var/cache/plants-ci")
MAX_AGE = 7 * 24 * 3600  # Seconds for which an archive in CACHE is used.
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
PIP = {"PIP_INDEX_URL": "index_url", "PIP_DEFAULT_TIMEOUT": "timeout", "https_proxy": "proxy"}
ENTER = """
    mount -t proc proc "$0/proc" && mount -t tmpfs tmpfs "$0/dev/shm"
    chroot --userspec=somebody "$0" env -i HOME=/home/somebody PATH=/usr/bin:/bin "$@"
    exit $?  # Without this, the shell would exec chroot. It has to stay to reap orphaned processes.
"""


def make_machine(folder: Path, release: str, *packages: str) -> None:
    """Make a system with Python and `packages` in `folder`.

    An archive that is younger than a week is unpacked. Otherwise debootstrap makes a new one.
    """
    CACHE.mkdir(exist_ok=True)
    archive = CACHE / f"{'-'.join([release, *packages])}.tar"
    folder.mkdir(mode=0o755)
    if archive.exists() and archive.stat().st_mtime > time.time() - MAX_AGE:
        subprocess.run(["tar", "-C", folder, "-xf", archive], check=True)
    else:
        include = f"--include={','.join(['python3-venv', *packages])}"
        # An old debootstrap does not know the newest releases. Its script for sid fits all of them.
        made_of = [release, folder, "http://deb.debian.org/debian", "sid"]
        make = ["debootstrap", "--variant=minbase", include, *made_of]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["tar", "-C", folder, "-cf", new := f"{archive}.new", "."], check=True)
        os.rename(new, archive)
    shutil.copy(os.environ.get("PIP_CERT", f"/{CERTIFICATES}"), folder / CERTIFICATES)
    settings = [f"{key} = {os.environ[name]}\n" for name, key in PIP.items() if name in os.environ]
    (folder / "etc/pip.conf").write_text(f"[global]\ncert = /{CERTIFICATES}\n{''.join(settings)}")


@pytest.fixture(params=RELEASES)
def machine(tmp_path, request) -> Iterator[Path]:
    """The root folder of a machine. Its user "somebody" has a copy of the project."""
    make_machine(root := tmp_path / "root", request.param)
    shutil.copytree(ROOT, root / "home/somebody/plant store", ignore=IGNORED)
    prepare = "useradd somebody && chown -R somebody: /home/somebody"
    subprocess.run(["chroot", root, "sh", "-c", prepare], check=True)
    yield root
    shutil.rmtree(root)


def on(machine: Path, command: str, setting: str = "PIP_NO_DEPS=1") -> list[str]:
    """Return a command line that runs `command` on a machine, in the copy of the project.

    It runs in a PID namespace of its own, so that its end also ends all processes that it started.
    """
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER]
    there = f"cd '/home/somebody/plant store' && {command}"
    return [*enter, str(machine), setting, "sh", "-c", there]


def test_the_readme_works_as_it_stands(serve, machine, request):
    """The start prints a command that stores a plant, and all tests pass.

    pip installs without dependencies, so this also shows that requirements.txt pins all of them.
    """
    python = RELEASES[request.node.callspec.params["machine"]]
    start = block("sh", "python3 -m venv").strip()
    test = block("sh", "python3 -m venv .venv && .venv/bin/pip install -r tests").strip()
    install = f"{start} --version && .venv/bin/python{python} -m pip check"
    # Installing may take longer than `serve` waits for a start, so install first.
    subprocess.run(on(machine, install), check=True)
    server = serve(command=on(machine, start, f"GUNICORN_CMD_ARGS=--bind=127.0.0.1:{free_port()}"))
    curl = wait_until(lambda: re.search(r"\ncurl (?:.*\n){3}", server.err))[0]
    response = subprocess.run(["sh", "-c", curl], stdout=subprocess.PIPE, timeout=PATIENCE)
    assert response.stdout == b'{"name": "Monstera", "tag": "indoor"}\n'
    server.kill()
    subprocess.run(on(machine, f"{test} && .venv/bin/pip check"), check=True)
