"""Debian systems in folders, for tests that need a machine or an image of their own. Takes root."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.ci.test_bare_machine import CACHE, CERTIFICATES, make_system

PIP = {"PIP_INDEX_URL": "index_url", "PIP_DEFAULT_TIMEOUT": "timeout", "https_proxy": "proxy"}
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}


def make_system_with(commands: str) -> Path:
    """Return an archive of a system in which these were run; it is kept for as long as its base."""
    CACHE.mkdir(exist_ok=True)
    archive = CACHE / f"{hashlib.sha256(commands.encode()).hexdigest()[:16]}.tar"
    base = make_system("bookworm")
    if not archive.exists() or archive.stat().st_mtime < base.stat().st_mtime:
        new = archive.with_suffix(".new")
        subprocess.run(["rm", "-rf", new], check=True)
        unpack(base, new)
        proxies = {name: os.environ[name] for name in ("http_proxy",) if name in os.environ}
        command = ["chroot", new, "sh", "-euc", f"apt-get update -qq\n{commands}\napt-get clean"]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env={**ENVIRONMENT, **proxies}
        )
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
