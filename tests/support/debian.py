"""Debian systems in folders, for tests that need a machine or an image of their own. Takes root."""

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

CACHE = Path("/var/cache/plants-ci")
MAX_AGE = 7 * 24 * 3600  # seconds
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
PIP = {"PIP_INDEX_URL": "index_url", "PIP_DEFAULT_TIMEOUT": "timeout", "https_proxy": "proxy"}
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}
ENVIRONMENT |= {name: os.environ[name] for name in ("http_proxy",) if name in os.environ}


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
