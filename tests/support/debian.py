"""Debian systems in folders, for tests that need a machine or an image of their own. Takes root."""

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

CACHE = Path("/var/cache/plants-ci")
MAX_AGE = 7 * 24 * 3600  # seconds
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
PIP = {"PIP_INDEX_URL": "index_url", "PIP_DEFAULT_TIMEOUT": "timeout", "https_proxy": "proxy"}
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}


def make_system(release: str) -> Path:
    """Return an archive of a fresh system; it is kept for a week, since it takes a minute."""

    def bootstrap(folder: Path) -> None:
        targets = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
        mirror = subprocess.check_output([*targets, "Origin: Debian"], text=True).split()[0]
        command = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv"]
        command += [release, folder, mirror, "sid"]  # the script for all that are newer than it
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    return make_archive(release, time.time() - MAX_AGE, bootstrap)


def make_system_with(commands: str) -> Path:
    """Return an archive of a system in which these were run; it is kept for as long as its base."""
    base = make_system("bookworm")

    def install(folder: Path) -> None:
        unpack(base, folder)
        proxies = {name: os.environ[name] for name in ("http_proxy",) if name in os.environ}
        script = f"apt-get update -qq\n{commands}\napt-get clean"
        subprocess.run(
            ["chroot", folder, "sh", "-euc", script],
            check=True, stdout=subprocess.DEVNULL, env={**ENVIRONMENT, **proxies},
        )  # fmt: skip

    name = hashlib.sha256(commands.encode()).hexdigest()[:16]
    return make_archive(name, base.stat().st_mtime, install)


def make_archive(name: str, oldest: float, fill: Callable[[Path], None]) -> Path:
    """Return an archive of the folder that `fill` makes, or one from before if it is not older."""
    CACHE.mkdir(exist_ok=True)
    archive, new = CACHE / f"{name}.tar", CACHE / f"{name}.new"
    if not archive.exists() or archive.stat().st_mtime < oldest:
        subprocess.run(["rm", "-rf", new], check=True)
        fill(new)
        subprocess.run(["tar", "-C", new, "-cf", f"{archive}.new", "."], check=True)
        os.rename(f"{archive}.new", archive)
        subprocess.run(["rm", "-rf", new], check=True)
    return archive


def unpack(archive: Path, folder: Path) -> None:
    """Make a system from its archive, with what pip here needs to reach a registry."""
    folder.mkdir()
    folder.chmod(0o755)
    subprocess.run(["tar", "-C", folder, "-xf", archive], check=True)
    shutil.copy(os.environ.get("PIP_CERT", f"/{CERTIFICATES}"), folder / CERTIFICATES)
    settings = [f"{PIP[name]} = {os.environ[name]}\n" for name in PIP if name in os.environ]
    lines = ["[global]\n", f"cert = /{CERTIFICATES}\n", *settings]
    (folder / "etc/pip.conf").write_text("".join(lines))
