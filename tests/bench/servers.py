"""The servers that are compared, and what has to be installed for them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = HERE / ".build"  # Everything that is installed or compiled goes here.
SLOW_SYNC = BUILD / "sync.so"  # makes each sync take longer, with LD_PRELOAD
NODE_PACKAGES = [
    *("fastify@5.12.8", "@fastify/bearer-auth@10.1.3", "better-sqlite3@12.11.1"),
    *("bun@1.4.5", "elysia@1.4.30", "@elysiajs/bearer@1.4.4"),
]
DEBIAN_GO = Path("/usr/share/gocode")  # where Debian's packages put Go libraries
GO_SQLITE = DEBIAN_GO / "src" / "github.com" / "mattn" / "go-sqlite3"
BIND = "--bind 127.0.0.1:PORT"


class Server(NamedTuple):
    """A server.

    Its `kind` says whether it creates its table ("service"), needs one ("peer"), or stores nothing
    ("ceiling").
    """

    title: str
    program: str | Path
    options: str
    folder: Path = HERE / "peers"
    kind: str = "peer"


def missing_packages(peers: bool) -> list[str]:
    """Return the Debian packages that are needed, but not installed."""
    programs = {"gcc": "cc", "wrk": "wrk"}
    if peers:
        programs |= {"golang-go": "go", "npm": "npm"}
    missing = [package for package, program in programs.items() if not shutil.which(program)]
    if peers and not GO_SQLITE.exists():
        missing.append("golang-github-mattn-go-sqlite3-dev")
    return missing


def this_service() -> Server:
    """Install the service of the working tree, compile SLOW_SYNC, and return the service."""
    programs, source = install("service", ROOT), ROOT / "tests" / "support" / "sync.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", SLOW_SYNC, source, "-ldl"], check=True)
    return Server("this service", programs / "gunicorn", BIND, ROOT, "service")


def service_of(commit: str) -> Server:
    """Install the service as it is in a commit, and return it."""
    shutil.rmtree(folder := BUILD / "against", ignore_errors=True)
    subprocess.run(["git", "clone", "-qs", ROOT, folder], check=True)
    subprocess.run(["git", "-C", folder, "checkout", "-q", commit], check=True)
    return Server(commit, install("other", folder) / "gunicorn", BIND, folder, "service")


def others() -> list[Server]:
    """Install the ceiling and the servers that people would pick instead, and return them."""
    gunicorn, peers = BUILD / "service" / "bin" / "gunicorn", install("peers", HERE)
    subprocess.run(["npm", "install", "--silent", "--prefix", BUILD, *NODE_PACKAGES], check=True)
    go = os.environ | {"GO111MODULE": "off", "GOPATH": str(DEBIAN_GO), "GOCACHE": str(BUILD / "go")}
    compile_go = ["go", "build", "-o", BUILD / "peer_go", HERE / "peers" / "peer_go.go"]
    subprocess.run(compile_go, env=go, check=True)
    ceiling = f"{BIND} --pythonpath tests/bench/peers ceiling:app"
    uvicorn = "--port PORT --loop uvloop --http httptools peer_fastapi:app"
    node = "NODE_PATH=../.build/node_modules NODE_ENV=production"
    elysia = f"{node} ../.build/node_modules/.bin/bun peer_elysia.js PORT"
    fastify = f"{node} node peer_fastify.js PORT"
    flask = f"{BIND} --worker-class gthread --threads 16 --access-logfile - peer_flask:app"
    return [
        Server("ceiling: the same settings, a constant", gunicorn, ceiling, ROOT, "ceiling"),
        Server("Elysia + bun:sqlite on Bun, cluster", "env", elysia),
        Server("Go: net/http + go-sqlite3", BUILD / "peer_go", "PORT"),
        Server("Fastify + better-sqlite3, cluster", "env", fastify),
        Server("FastAPI + SQLModel, uvloop, httptools", peers / "uvicorn", uvicorn),
        Server("Flask + Flask-SQLAlchemy, gunicorn", peers / "gunicorn", flask),
    ]


def install(name: str, folder: Path) -> Path:
    """Install what `folder` requires into an environment. Return the folder of its programs."""
    programs, requirements = BUILD / name / "bin", folder / "requirements.txt"
    subprocess.run([sys.executable, "-m", "venv", BUILD / name], check=True)
    subprocess.run([programs / "pip", "install", "-qq", "-r", requirements], check=True)
    return programs
