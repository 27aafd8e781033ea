"""The servers that are compared: this service, what it could reach at most, and its peers."""

from pathlib import Path
from typing import NamedTuple

from environments import HERE, ROOT

WORKERS = 2
SERVERS = HERE / "servers"
FORTY = ROOT / "docs" / "forty-lines"
PYTHON_PEERS = ("uvicorn", "uvloop", "flask")


class Competitor(NamedTuple):
    """A server: how its name is shown, its command line, where that is run, and whether it stores.

    `folder` is None for the folder of its database; `source` is where its Python imports from.
    """

    title: str
    command: list[str]
    folder: Path | None = SERVERS
    stores: bool = True
    source: Path = ROOT


def this_service(title: str, tools: Path, source: Path) -> Competitor:
    """This service as it stands in the folder `source`, started as its README says."""
    command = [str(tools / "gunicorn"), "--bind", "127.0.0.1:PORT"]
    return Competitor(title, command, folder=source, source=source)


def competitors(tools: Path) -> dict[str, Competitor]:
    """All competitors, with the Python programs in the folder `tools`."""
    gunicorn = [str(tools / "gunicorn"), "--bind", "127.0.0.1:PORT"]
    own = [*gunicorn, "--chdir", str(SERVERS), "--config", str(ROOT / "gunicorn.conf.py")]
    stock = [*gunicorn, "--workers", str(WORKERS), "--threads", "16", "--worker-class", "gthread"]
    uvicorn = [str(tools / "uvicorn"), "peer_fastapi:app", "--port", "PORT"]
    uvicorn += ["--workers", str(WORKERS)]
    h11 = [*uvicorn, "--loop", "asyncio", "--http", "h11"]
    uvloop = [*uvicorn, "--loop", "uvloop", "--http", "httptools"]
    forty = [*gunicorn, "--workers", str(WORKERS), "app:app"]
    flask = [*stock, "--access-logfile", "-", "peer_flask:app"]
    fastify = ["node", "peer_fastify.js", "PORT"]
    return {
        "ours": this_service("this service", tools, ROOT),
        "ceiling": Competitor(
            "ceiling: the same settings, a constant", [*own, "ceiling:app"], ROOT, stores=False
        ),
        "forty": Competitor("forty lines, a commit for each request", forty, None, source=FORTY),
        "fastify": Competitor("Fastify + better-sqlite3, cluster", fastify),
        "uvicorn": Competitor("FastAPI + SQLModel, uvicorn", h11),
        "uvloop": Competitor("FastAPI + SQLModel, uvloop, httptools", uvloop),
        "flask": Competitor("Flask + Flask-SQLAlchemy, gunicorn", flask),
    }
