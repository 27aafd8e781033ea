"""The servers that are compared, and what has to be installed for them."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = HERE / ".build"  # all that is installed and compiled
SLOW_SYNC = BUILD / "sync.so"  # makes each sync take 5 ms more
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
    """Return the service of the working tree, started as README.md says; compile SLOW_SYNC."""
    programs, source = install("service", ROOT), ROOT / "tests" / "support" / "sync.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", SLOW_SYNC, source, "-ldl"], check=True)
    return Server("this service", programs / "gunicorn", BIND, ROOT, "service")


def service_of(commit: str) -> Server:
    """Return the service as it is in a commit."""
    shutil.rmtree(folder := BUILD / "against", ignore_errors=True)
    subprocess.run(["git", "clone", "-qs", ROOT, folder], check=True)
    subprocess.run(["git", "-C", folder, "checkout", "-q", commit], check=True)
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
    programs, requirements = BUILD / name / "bin", folder / "requirements.txt"
    subprocess.run([sys.executable, "-m", "venv", BUILD / name], check=True)
    subprocess.run([programs / "pip", "install", "-qq", "-r", requirements], check=True)
    return programs
