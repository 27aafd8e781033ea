"""README.md's first commands on machines that have Debian, Python and nothing else."""

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
ENTER = """
    mount -t proc proc "$0/proc" && mount -t tmpfs tmpfs "$0/dev/shm"
    chroot --userspec=somebody "$0" env -i HOME=/home/somebody PATH=/usr/bin:/bin "$@"
    exit $?  # else chroot would take the place of this shell, which waits for orphans
"""


def make_machine(folder: Path, release: str, *packages: str) -> None:
    """Make a system with Python and packages, from an archive of the last week if there is one."""
    CACHE.mkdir(exist_ok=True)
    archive = CACHE / f"{'-'.join([release, *packages])}.tar"
    folder.mkdir(mode=0o755)
    if archive.exists() and archive.stat().st_mtime > time.time() - MAX_AGE:
        subprocess.run(["tar", "-C", folder, "-xf", archive], check=True)
    else:
        include = f"--include={','.join(['python3-venv', *packages])}"
        # With the script for all releases that are newer than it.
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
    """The root folder of a machine with a user, who has a copy of the project."""
    make_machine(root := tmp_path / "root", request.param)
    shutil.copytree(ROOT, root / "home/somebody/plant store", ignore=IGNORED)
    prepare = "useradd somebody && chown -R somebody: /home/somebody"
    subprocess.run(["chroot", root, "sh", "-c", prepare], check=True)
    yield root
    shutil.rmtree(root)


def on(machine: Path, command: str, setting: str = "PIP_NO_DEPS=1") -> list[str]:
    """Return the command line that runs a command there; it ends all that is begun there."""
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER]
    there = f"cd '/home/somebody/plant store' && {command}"
    return [*enter, str(machine), setting, "sh", "-c", there]


def test_the_readme_works_as_it_stands(serve, machine, request):
    """The printed line stores a plant, all tests pass, and what packages bring is pinned too."""
    python = RELEASES[request.node.callspec.params["machine"]]
    start = block("sh", "python3 -m venv").strip()
    test = block("sh", "python3 -m venv .venv && .venv/bin/pip install -r tests").strip()
    install = f"{start} --version && .venv/bin/python{python} -m pip check"
    subprocess.run(on(machine, install), check=True)  # this may take its time
    server = serve(command=on(machine, start, f"GUNICORN_CMD_ARGS=--bind=127.0.0.1:{free_port()}"))
    curl = wait_until(lambda: re.search(r"\ncurl (?:.*\n){3}", server.err))[0]
    answer = subprocess.run(["sh", "-c", curl], stdout=subprocess.PIPE, timeout=PATIENCE)
    assert answer.stdout == b'{"name": "Monstera", "tag": "indoor"}\n'
    server.kill()
    subprocess.run(on(machine, f"{test} && .venv/bin/pip check"), check=True)
