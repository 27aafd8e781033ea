"""What the benchmark runs with: Python packages, node packages and compiled C."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENTS = HERE / ".venv"
NODE = HERE / ".node"
BUILD = HERE / ".build"
SYNC = BUILD / "sync.so"


def environment(*requirements: Path) -> Path:
    """Return the programs' folder of an environment with these requirements.

    It is made only once for files with the same content and the same Python.
    """
    content = b"".join(file.read_bytes() for file in requirements)
    name = hashlib.sha256(sys.version.encode() + content).hexdigest()[:16]
    folder = ENVIRONMENTS / name
    complete = folder / "complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        options = [option for file in requirements for option in ("-r", file)]
        subprocess.run([folder / "bin" / "pip", "install", "-qq", *options], check=True)
        complete.touch()
    return folder / "bin"


def require(*programs: str) -> None:
    """End the benchmark if one of these programs is not installed."""
    for program in programs:
        if not shutil.which(program):
            sys.exit(f"the benchmark needs {program}")


def compile_c() -> None:
    """Compile the library that makes a sync slow."""
    BUILD.mkdir(exist_ok=True)
    source = ROOT / "tests" / "support" / "sync.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", SYNC, source, "-ldl"], check=True)


def install_node_packages() -> None:
    """Install the peer that runs on node."""
    require("node", "npm")
    wanted, installed = HERE / "servers" / "package.json", NODE / "complete.json"
    if not installed.exists() or installed.read_bytes() != wanted.read_bytes():
        print("installing the peer on node; to compile SQLite takes some minutes", flush=True)
        NODE.mkdir(exist_ok=True)
        shutil.copy(wanted, NODE / "package.json")
        settings = dict(os.environ)
        prefix = Path(shutil.which("node")).resolve().parent.parent
        if (prefix / "include" / "node").exists():  # else npm downloads the headers
            settings.setdefault("npm_config_nodedir", str(prefix))
        subprocess.run(["npm", "install", "--silent", "--prefix", NODE], env=settings, check=True)
        shutil.copy(wanted, installed)
