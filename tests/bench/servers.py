"""The servers that are compared, and what has to be installed for them."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = HERE / ".build"  # all that is installed and compiled
SLOW_SYNC = BUILD / "sync.so"
NODE_PACKAGES = ["fastify@5.12.8", "@fastify/bearer-auth@10.1.3", "better-sqlite3@12.11.1"]
BIND = "--bind 127.0.0.1:PORT"


class Server(NamedTuple):
    """A server. The service makes its table, a peer needs one, the ceiling stores nothing."""

    title: str
    program: str | Path
    options: str
    folder: Path = HERE / "peers"
    kind: str = "peer"


def this_service() -> Server:
    """Return the service of the working tree, started as README.md says."""
    return Server("this service", install("service", ROOT) / "gunicorn", BIND, ROOT, "service")


def service_of(commit: str) -> Server:
    """Return the service as it is in a commit."""
    folder = BUILD / "against"
    shutil.rmtree(folder, ignore_errors=True)
    git = ["git", "-C", ROOT, "archive", f"--prefix={folder.name}/", commit]
    subprocess.run(["tar", "-x", "-C", BUILD], input=subprocess.check_output(git), check=True)
    return Server(commit, install("other", folder) / "gunicorn", BIND, folder, "service")


def others() -> list[Server]:
    """Return what the service could reach at most, and what people would pick instead."""
    gunicorn, peers = BUILD / "service" / "bin" / "gunicorn", install("peers", HERE)
    subprocess.run(["npm", "install", "--silent", "--prefix", BUILD, *NODE_PACKAGES], check=True)
    ceiling = f"{BIND} --pythonpath tests/bench/peers ceiling:app"
    uvicorn = "--port PORT --loop uvloop --http httptools peer_fastapi:app"
    node = "NODE_PATH=../.build/node_modules node peer_fastify.js PORT"
    flask = f"{BIND} --worker-class gthread --threads 16 --access-logfile - peer_flask:app"
    return [
        Server("ceiling: the same settings, a constant", gunicorn, ceiling, ROOT, "ceiling"),
        Server("Fastify + better-sqlite3, cluster", "env", node),
        Server("FastAPI + SQLModel, uvloop, httptools", peers / "uvicorn", uvicorn),
        Server("Flask + Flask-SQLAlchemy, gunicorn", peers / "gunicorn", flask),
    ]


def install(name: str, folder: Path) -> Path:
    """Return the folder of the programs of an environment with what `folder` requires."""
    environment, requirements = BUILD / name, folder / "requirements.txt"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "pip", "install", "-qq", "-r", requirements], check=True)
    return environment / "bin"


def compile_slow_sync() -> None:
    """Compile what makes each sync take 5 ms more, into the folder that install() has made."""
    source = ROOT / "tests" / "support" / "sync.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", SLOW_SYNC, source, "-ldl"], check=True)
