"""The service starts, serves and stops as hosting platforms run it.

No real platform is involved. Each row of PLATFORMS is one environment: its variables, its user, its
read-only folders, its router and its signals, as the platform's documentation or its public code
has them. The pages say what has to be set there, and a test compares them.
"""

import base64
import contextlib
import dataclasses
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ci.test_bare_machine import IGNORED
from tests.support.pages import PAGES, table
from tests.support.postgresql import PostgreSQL
from tests.support.server import (
    PATIENCE,
    ROOT,
    STORED,
    Server,
    fails_with,
    free_port,
    receive,
    wait_until,
)
from tests.support.storage import lock_held, read_names
from tests.support.wire import CLOSE, new_plant, receive_response, statuses

FLY = tomllib.loads((ROOT / "deploy/fly.toml").read_text())
(RENDER,) = yaml.safe_load((ROOT / "deploy/render.yaml").read_text())["services"]
RENDER_SETS = {each["key"]: each for each in RENDER["envVars"]}
RENDER_URL = RENDER_SETS["DATABASE_URL"]["value"].replace(RENDER["disk"]["mountPath"], "{data}")
IMAGE = dict(re.findall(r"(?m)^ENV (\w+)=(\S+)$", (ROOT / "deploy/Dockerfile").read_text()))
PAGE = PAGES[ROOT / "docs/deploy.md"]

# DATABASE_URL, as platforms write it. Here, the host is the folder of a socket.
SQLITE = "sqlite:///{data}/plants.db"
POSTGRES = "postgres://postgres:secret@{host}:5432/{name}"
POSTGRESQL = POSTGRES.replace("postgres:", "postgresql:", 1)
CLOUD_SQL = "postgresql://postgres:secret@/{name}?host={folder}"

# Tokens, as platforms generate them.
HEXADECIMAL = secrets.token_hex(32)
BASE64 = base64.b64encode(bytes.fromhex("fbff") * 16).decode()  # It has a plus, a slash and a =.

CNB = "1000:1000"  # The user of Cloud Native Buildpacks.
# Exported by the profile script of Heroku's buildpack, and of buildpacks made from it.
# Python's own packages are not in a virtual environment there, and PYTHONHOME names their place.
HEROKU = {
    "PYTHONUNBUFFERED": "true",
    "PYTHONHOME": sys.base_prefix,
    "PYTHONPATH": sysconfig.get_path("purelib"),
    "LIBRARY_PATH": "/app/.heroku/vendor/lib:/app/.heroku/python/lib",
    "LD_LIBRARY_PATH": "/app/.heroku/vendor/lib:/app/.heroku/python/lib",
    "LANG": "en_US.UTF-8",
    "FORWARDED_ALLOW_IPS": "*",
    "GUNICORN_CMD_ARGS": "--access-logfile -",
}
RAILPACK = {
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONHASHSEED": "random",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_DEFAULT_TIMEOUT": "100",
}
# By default, Railway sends SIGKILL right after the signal, and Azure 5 seconds after it.
RAILWAY = {"RAILWAY_DEPLOYMENT_DRAINING_SECONDS": "30"}
AZURE = {"WEBSITES_CONTAINER_STOP_TIME_LIMIT": "30"}
READ_ONLY = """
    for place in {writable}; do mount --bind "$place" "$place"; done
    mount --bind /dev/shm /dev/shm && mount -o remount,bind,{shm} /dev/shm
    mount -o remount,bind,ro / && exec "$@"
"""
NGINX_FORWARDS = """
    proxy_set_header Host $host;
    proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    proxy_set_header X-Forwarded-Proto $scheme;
"""
NGINX = """
    daemon off; master_process off; pid {folder}/pid; error_log stderr crit;
    events {{}}
    http {{
        server {{ listen 127.0.0.1:{port}; location / {{ {settings} proxy_pass {service}; }} }}
    }}
"""


@dataclasses.dataclass(frozen=True)
class Platform:
    """How some platforms run the service. {port} and {data} stand for a port and a folder."""

    names: str
    presets: dict[str, str]  # Variables that the platform sets.
    settings: dict[str, str] = dataclasses.field(default_factory=dict)  # An operator's.
    note: str = ""  # What docs/platforms.md says about it, if it has no section of its own.
    port: int = 8080  # The one that the platform or the operator chooses. Tests use free ones.
    database: str = SQLITE
    token: str = HEXADECIMAL
    start: str = "bash -c gunicorn"
    user: str = ""  # uid:gid, or root
    writable: str | None = None  # The only writable folders, apart from the database's.
    shm: str = "rw"
    address: str = "127.0.0.1"  # Where the router connects to.
    headers: tuple[str, ...] = ()  # What the router adds to each request.
    nginx: str = ""  # Settings of a router that is nginx, and so speaks HTTP in its own way.
    signal: str = "SIGTERM"
    signals_all: bool = False  # All processes get it, not only the one that was started.
    repeats: bool = False  # They get it once a second.
    seconds: float = 30  # From the first signal to SIGKILL.
    overlaps: bool = False  # A new version starts before the old one is stopped.


PLATFORMS = [
    Platform(
        "Heroku",
        {**HEROKU, "HOME": "/app", "PORT": "{port}", "DYNO": "web.1", "DYNO_RAM": "512"}
        | {"WEB_CONCURRENCY": "2", "WEB_CONCURRENCY_SET_BY": "heroku/python"},
        database=POSTGRES,
        user="30000:30000",
        headers=("X-Request-Start: 1790000000000", "Via: 1.1 vegur"),
        signals_all=True,
        repeats=True,
    ),
    Platform(
        "Heroku Fir",
        {"PYTHONUNBUFFERED": "1", "PORT": "{port}"},
        database=POSTGRES,
        user=CNB,
        address="::1",
        signals_all=True,
    ),
    Platform(
        "Render",
        {
            "RENDER": "true",
            "FORWARDED_ALLOW_IPS": "*",
            "GUNICORN_CMD_ARGS": "--preload --access-logfile - --bind=0.0.0.0:{port}",
            "PIPENV_YES": "true",
            "VENV_ROOT": "/opt/render/project/src/.venv",
            "RENDER_WEB_CONCURRENCY": "1",
            "WEB_CONCURRENCY": "1",
            "PORT": "{port}",
        },
        port=10000,
        database=RENDER_URL,
        token=BASE64,
        user="1000:1000",
        start=f"bash -c {RENDER['startCommand']}",
        seconds=RENDER["maxShutdownDelaySeconds"],
    ),
    Platform(
        "Railway",
        {**RAILPACK, "PORT": "{port}", "RAILWAY_VOLUME_MOUNT_PATH": "/data"},
        RAILWAY,
        start="/bin/bash -c gunicorn",
        seconds=int(RAILWAY["RAILWAY_DEPLOYMENT_DRAINING_SECONDS"]),
        headers=("X-Forwarded-Host: plants.up.railway.app", "Host: healthcheck.railway.app"),
        address="::1",
    ),
    Platform(
        "Fly.io",
        {"FLY_APP_NAME": "plants", "PRIMARY_REGION": FLY["primary_region"]},
        {"PORT": FLY["env"]["PORT"].replace(str(FLY["http_service"]["internal_port"]), "{port}")},
        port=FLY["http_service"]["internal_port"],
        database=FLY["env"]["DATABASE_URL"].replace(FLY["mounts"]["destination"], "{data}"),
        start="gunicorn",
        user="1000:1000",
        headers=("Fly-Client-IP: 203.0.113.9", "Via: 2 fly.io", "X-Forwarded-SSL: on"),
        signal=FLY["kill_signal"],
        seconds=FLY["kill_timeout"],
    ),
    Platform(
        "Cloud Run",
        {"PYTHONUNBUFFERED": "TRUE", "PYTHONUSERBASE": "/layers/google.python.pip/pip"}
        | {"PORT": "{port}", "K_SERVICE": "plants", "K_REVISION": "plants-1"}
        | {"K_CONFIGURATION": "plants"},
        {"GUNICORN_CMD_ARGS": "--timeout 0 --graceful-timeout 8"},
        database=CLOUD_SQL,
        user=CNB,
        headers=("X-Cloud-Trace-Context: 1/2;o=1", "traceparent: 00-1-2-01"),
        seconds=10,
    ),
    Platform(
        "Dokku",
        {**HEROKU, "HOME": "/app", "PORT": "{port}"},
        port=5000,
        user="32767:32767",
        start="bash -c gunicorn",
        headers=("X-Request-Start: 1790000000.000",),
        overlaps=True,
    ),
    Platform(
        "DigitalOcean App Platform",
        {**HEROKU, "HOME": "/workspace", "PORT": "{port}"},
        note="Run command `gunicorn`. Set `DATABASE_URL` to `${db.DATABASE_URL}`.",
        database=f"{POSTGRESQL}?sslmode=require",
        user="1000:1000",
        seconds=120,
    ),
    Platform(
        "Scalingo",
        {**HEROKU, "HOME": "/app", "PORT": "{port}", "CONTAINER": "web-1", "STACK": "scalingo-24"}
        | {"WEB_CONCURRENCY": "2", "WEB_CONCURRENCY_SET_BY": "scalingo/python"},
        note="The add-on sets `DATABASE_URL`. Add it before the first push.",
        database=f"{POSTGRESQL}?sslmode=prefer",
        user="1000:1000",
        writable="/tmp",
        shm="ro",
        headers=("X-Request-ID: 3f2c-1", "X-Forwarded-Port: 443"),
    ),
    Platform(
        "Cloud Foundry",
        HEROKU
        | {"PYTHONHASHSEED": "random", "HOME": "/home/vcap/app", "USER": "vcap", "PORT": "{port}"}
        | {"TMPDIR": "{data}", "VCAP_APPLICATION": "{}"},
        {"GUNICORN_CMD_ARGS": "--graceful-timeout 8"},
        "Put `python-3.13.x` into `runtime.txt`, and copy `.gitignore` to `.cfignore`: otherwise "
        "`.env` and `plants.db` are uploaded. A bound service sets `DATABASE_URL`. `SIGKILL` comes "
        "after 10 seconds.",
        database=POSTGRES,
        user="2000:2000",
        headers=("X-Vcap-Request-Id: 3f2c-1",),
        seconds=10,
    ),
    Platform(
        "Azure App Service",
        {"HOST": "0.0.0.0", "PORT": "{port}", "LANG": "en_US.UTF-8", "LC_ALL": "en_US.UTF-8"}
        | {"WEBSITE_SITE_NAME": "plants", "NUM_CORES": "1"},
        AZURE,
        "Startup command `exec gunicorn`: without `exec`, a shell would swallow the `SIGTERM`. "
        "Without the variable, `SIGKILL` comes after 5 seconds. If a start fails, Azure may show a "
        "page of its own, so read the log.",
        port=8000,
        database=f"{POSTGRESQL}?sslmode=require",
        start="sh -c 'exec gunicorn'",
        seconds=int(AZURE["WEBSITES_CONTAINER_STOP_TIME_LIMIT"]),
    ),
    Platform(
        "Azure App Service, with the flags of its own start",
        {
            "PORT": "{port}",
            "GUNICORN_CMD_ARGS": "--timeout 600 --access-logfile '-' --error-logfile '-' "
            f"--bind=0.0.0.0:{{port}} --chdir='{ROOT}'",
        },
        port=8000,
        database=f"{POSTGRESQL}?sslmode=require",
        start="sh -c 'exec gunicorn'",
        seconds=5,
    ),
    Platform(
        "AWS Elastic Beanstalk",
        {"PYTHONPATH": "/var/app/venv/staging-LQM1lest/bin"},
        {"PORT": "{port}"},
        "Its databases set other variables, so set `DATABASE_URL` yourself. The disk is deleted "
        "with the instance.",
        port=8000,
        database=POSTGRESQL,
        start="/bin/sh -c gunicorn",
        user="900:900",
        headers=("X-Real-IP: 203.0.113.9",),
        signals_all=True,
    ),
    Platform(
        "piku",
        {"APP": "plants", "DATA_ROOT": "{data}", "BIND_ADDRESS": "127.0.0.1"}
        | {"PROC_TYPE": "web", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "UTF_8:replace"},
        {"PORT": "{port}", "GUNICORN_CMD_ARGS": "--bind=127.0.0.1:{port}"},
        "Set `DATABASE_URL='sqlite:///$DATA_ROOT/plants.db'`, with the quotes. Without `--bind`, "
        "clients could go around its nginx and send tokens unencrypted. `SIGKILL` comes after 3 "
        "seconds. Do not use `ps:scale`: it starts a second service on the same port.",
        port=8000,
        start="sh -c gunicorn",
        user="1000:1000",
        nginx=f"{NGINX_FORWARDS} proxy_http_version 1.1; proxy_set_header Connection upgrade;",
        signals_all=True,
        repeats=True,
        seconds=3,
    ),
    Platform(
        "CapRover",
        {"PORT": "{port}"},
        {"GUNICORN_CMD_ARGS": "--graceful-timeout 8"},
        "Add a `captain-definition` with `dockerfilePath` `./deploy/Dockerfile`. Set the container "
        "HTTP port to 8000, and make `/data` a persistent directory. `SIGKILL` comes after 10 "
        "seconds.",
        port=8000,
        start="gunicorn",
        user="1000:1000",
        nginx=f"{NGINX_FORWARDS} proxy_http_version 1.0;",
        seconds=10,
    ),
    Platform(
        "Coolify",
        {**RAILPACK, "PIP_NO_CACHE_DIR": "1", "HOST": "0.0.0.0", "PORT": "{port}"},
        note="Add a volume at `/data`, and have the health check request `/livez`.",
        port=3000,
        start="/bin/bash -c gunicorn",
        overlaps=True,
    ),
    Platform(
        "Koyeb",
        {"PORT": "{port}", "KOYEB_REPLICA_INDEX": "0", "KOYEB_INSTANCE_MEMORY_MB": "512"},
        note="Run command `gunicorn`. Have an HTTP health check request `/livez`.",
        port=8000,
        database=POSTGRESQL,
        user=CNB,
    ),
    Platform(
        "Google App Engine, standard",
        {"PORT": "{port}", "GAE_ENV": "standard", "GAE_RUNTIME": "python313"},
        note="Put `runtime: python313` and `entrypoint: gunicorn` into app.yaml, and the lines "
        "`.git` and `#!include:.gitignore` into `.gcloudignore`: otherwise `.env` and `plants.db` "
        "are uploaded.",
        database=CLOUD_SQL,
        writable="/tmp",
        shm="ro",
    ),
    Platform(
        "Clever Cloud",
        {"PORT": "8080", "INSTANCE_NUMBER": "0", "CC_REVERSE_PROXY_IPS": "203.0.113.1"},
        {"CC_PYTHON_VERSION": "3.13", "CC_RUN_COMMAND": "env PORT={port} gunicorn"},
        "Its own nginx takes port 8080. The add-on sets other variables, so set `DATABASE_URL` "
        "yourself.",
        port=9000,
        database=POSTGRESQL,
        start="bash -c 'env PORT={port} gunicorn'",
        user="1000:1000",
    ),
    Platform(
        "Zeabur",
        {},
        {"PORT": "{port}", "ZBPACK_START_COMMAND": "exec gunicorn"},
        "It does not read the Procfile. Add a volume at `/data`, or a database, and set "
        "`DATABASE_URL` yourself.",
        start="bash -c 'true; exec gunicorn'",
    ),
    Platform(
        "OpenShift, Kubernetes",
        {"PORT": "{port}"},
        port=8000,
        start="gunicorn",
        user="1000650000:0",
        writable="",
    ),
    Platform(
        "GitHub Codespaces",
        {"CODESPACES": "true", "CODESPACE_NAME": "plants", "GITHUB_TOKEN": "ghu_secret"},
        note="Set neither `PLANTS_TOKENS` nor `DATABASE_URL`. In its terminal, type the command of "
        "[Run it](../README.md#run-it), and in a second one the `curl` that it prints. Only you "
        "can reach the port.",
        port=8000,
        start="gunicorn --bind 127.0.0.1:{port}",
        user="1000:1000",
    ),
]


class Service(contextlib.AbstractContextManager["Service"]):
    """The service on a platform, and requests to it as the router of the platform sends them."""

    def __init__(
        self, platform: Platform, folder: Path, places: dict[str, str], **others: None
    ) -> None:
        """Start it with exactly the variables of the platform, except for `others`.

        `places` says where its database is, `folder` is for the output.
        """
        self.platform, port = platform, free_port()
        self.address = platform.address, port
        places = places | {"port": str(port)}
        own = platform.presets | platform.settings
        own |= {"PLANTS_TOKENS": platform.token, "DATABASE_URL": platform.database}
        own = {name: fill(value, places) for name, value in own.items()}
        own["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        command = shlex.split(fill(platform.start, places))
        if platform.user:
            uid, gid = platform.user.split(":")
            ids = [f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
            command = ["setpriv", *ids, *command]
        if platform.writable is not None:
            places["writable"] = f"{platform.writable} {places['data']}"
            script = fill(READ_ONLY, places | {"shm": platform.shm})
            command = ["unshare", "--mount", "sh", "-euc", script, "sh", *command]
        environment = dict.fromkeys(os.environ) | own | others
        self.server = Server(folder, command=command, **environment)
        self.url = own["DATABASE_URL"]

    def __exit__(self, *error: Any) -> None:
        self.server.__exit__(*error)

    def connect(self, seconds: float = PATIENCE) -> socket.socket:
        """Return a new connection from the router."""
        return socket.create_connection(self.address, seconds)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request as the router sends them."""
        headers = {"Host": "plants.example.org", "X-Forwarded-For": "203.0.113.9"}
        headers |= {"X-Forwarded-Proto": "https", "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.platform.token}"}
        headers |= {"Content-Length": str(len(body))}
        headers |= dict(header.split(": ", 1) for header in self.platform.headers)
        if self.platform.nginx or path == "/livez":
            headers["Connection"] = "close"
        lines = [f"{method} {path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def is_live(self) -> bool:
        """Ask /livez as the platform's health check does, which waits a second."""
        assert self.server.process.poll() is None, self.server.err
        try:
            with self.connect(seconds=1) as connection:
                connection.sendall(self.request("GET", "/livez"))
                return receive(connection).startswith(b"HTTP/1.1 200 ")
        except OSError:
            return False

    def stop(self) -> None:
        """Stop the service as the platform does. Fail if the platform would have to kill it."""
        platform, process = self.platform, self.server.process
        began, number, sent = time.monotonic(), getattr(signal, platform.signal), 0
        # gunicorn's master writes this when all workers have ended.
        while "Shutting down: Master" not in self.server.err:
            seconds = time.monotonic() - began
            assert seconds < platform.seconds, self.server.err
            if not sent or (platform.repeats and seconds >= sent):
                if platform.signals_all:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
                sent += 1
            time.sleep(0.01)


def fill(text: str, places: dict[str, str]) -> str:
    """Replace the names in braces by what they stand for."""
    return re.sub(r"\{(\w+)\}", lambda name: places[name[1]], text)


class Router(contextlib.AbstractContextManager["Router"]):
    """Eight clients that post plants through the router of a platform.

    Each uses one connection for as long as the service keeps that open, and then makes a new one.
    """

    def __init__(self, service: Service) -> None:
        self.stored: dict[int, str] = {}  # Names by id of the plants that got a 200.
        self._service, self._lock, self._is_open = service, threading.Lock(), True
        self._pool = ThreadPoolExecutor(8)

    def __enter__(self) -> "Router":
        self._clients = [self._pool.submit(self._run) for _ in range(8)]
        return self

    def __exit__(self, *_: object) -> None:
        """Fail if a request was not answered with a 200."""
        self.close()
        for client in self._clients:
            client.result(PATIENCE)

    def close(self) -> None:
        """Make no more connections. Those that are open may go on."""
        with self._lock:
            self._is_open = False

    def _run(self) -> None:
        while begun := self._begin():
            connection, plant = begun
            with connection:
                while CLOSE not in (response := receive_response(connection)):
                    self._note(plant, response)
                    plant = self._send(connection)
                self._note(plant, response)

    def _begin(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """Send a plant on a new connection. Return both, or None if the router is closed."""
        with self._lock:
            if not self._is_open:
                return None
            connection = self._service.connect()
            return connection, self._send(connection)

    def _send(self, connection: socket.socket) -> dict[str, Any]:
        plant = new_plant()
        body = json.dumps(plant).encode()
        connection.sendall(self._service.request("POST", "/plants", body))
        return plant

    def _note(self, plant: dict[str, Any], response: bytes) -> None:
        assert statuses(response) == [STORED], response
        self.stored[plant["id"]] = plant["name"]


def run_nginx(settings: str, port: int, service: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start nginx on a port, in front of a service on another one."""
    values = {"settings": settings, "port": port, "service": f"http://127.0.0.1:{service}"}
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, **values))
    return subprocess.Popen(["nginx", "-c", folder / "nginx.conf", "-e", "stderr"])


@pytest.fixture
def places(postgresql: PostgreSQL, postgresql_url: str) -> Iterator[dict[str, str]]:
    """The places of a new database, as a platform gives it: on a disk, and on a server."""
    postgresql.folder.chmod(0o755)  # The service is another user.
    folder = str(postgresql.folder)
    name = re.match("postgresql:///([^?]+)", postgresql_url)[1]
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="plants-") as data:
        yield {"data": data, "host": folder.replace("/", "%2F"), "folder": folder, "name": name}


@pytest.fixture
def run(tmp_path: Path, places: dict[str, str]) -> Iterator[Any]:
    """A function that runs the service on a platform, and waits until it is live."""
    with contextlib.ExitStack() as services:

        def run(platform: Platform) -> Service:
            uid, gid = map(int, (platform.user or "0:0").split(":"))
            # OpenShift's user reaches the disk through its group.
            os.chown(places["data"], 1000 if gid == 0 < uid else uid, gid)
            os.chmod(places["data"], 0o770)
            service = services.enter_context(Service(platform, tmp_path, places))
            if platform.nginx:
                host, port = service.address
                service.address = host, free_port()
                router = run_nginx(platform.nginx, service.address[1], port, tmp_path)
                services.enter_context(router)
                services.callback(router.terminate)
            wait_until(service.is_live)
            return service

        yield run


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.names)
def test_the_service_starts_serves_and_stops_as_the_platform_does_it(platform, run, places):
    """At the stop, clients send plants all the time. Each request that arrived gets a 200.

    While a database on a disk is locked, /livez responds, too, and requests are waiting when the
    platform sends its signal.
    """
    service = run(platform)
    with Router(service) as router:
        wait_until(lambda: len(router.stored) > 20)
        newer = run(platform) if platform.overlaps else None
        on_disk = platform.database == SQLITE
        database = Path(places["data"], "plants.db")
        with lock_held(database) if on_disk else contextlib.nullcontext():
            router.close()
            # The service accepts connections in order. When it has accepted this one, it has
            # accepted all of the router's.
            wait_until(service.is_live)
            stop = ThreadPoolExecutor(1).submit(service.stop)
            if on_disk:
                wait_until(lambda: "Handling signal" in service.server.err)
        stop.result(PATIENCE + platform.seconds)
    assert read_names(service.url) == router.stored
    line = json.loads(service.server.out.splitlines()[-1])
    assert line["client"] == platform.address
    assert line["forwarded"].startswith("203.0.113.9")
    if newer:
        with Router(newer) as router:
            wait_until(lambda: len(router.stored) > 20)
            router.close()
            newer.stop()


def test_a_platform_may_freeze_the_service_between_requests(run):
    """Cloud Run does.

    With gunicorn's default --timeout of 30 seconds, the workers would be killed when they go on.
    """
    (platform,) = (each for each in PLATFORMS if each.names == "Cloud Run")
    service = run(platform)

    def post(connection: socket.socket) -> list[int]:
        body = json.dumps(new_plant()).encode()
        connection.sendall(service.request("POST", "/plants", body))
        return statuses(receive_response(connection))

    with contextlib.ExitStack() as connections:
        kept = [connections.enter_context(service.connect()) for _ in range(8)]
        assert [post(connection) for connection in kept] == [[STORED]] * 8
        master = service.server.process.pid
        os.killpg(master, signal.SIGSTOP)
        time.sleep(33)
        # Any process may wake first. Let it be the master, which could kill the others.
        os.kill(master, signal.SIGCONT)
        time.sleep(2)
        os.killpg(master, signal.SIGCONT)
        assert [post(connection) for connection in kept] == [[STORED]] * 8
    assert service.server.err.count("Booting worker") == 2


@pytest.mark.parametrize("names", ["Cloud Run", "Heroku", "OpenShift, Kubernetes"])
def test_without_a_database_the_start_ends_in_one_line(names, tmp_path, places):
    """Otherwise a plant that got a 200 would be deleted with the container."""
    (platform,) = (each for each in PLATFORMS if each.names == names)
    with Service(platform, tmp_path, places, DATABASE_URL=None) as service:
        fails_with(service.server, "PORT is set, so set DATABASE_URL too: ")


def test_gunicorn_gives_up_before_the_platform_kills_it():
    """Where a platform gives less than 10 seconds, no setting would help."""
    (standard,) = re.findall(
        r"(?m)^graceful_timeout = (\d+)$", (ROOT / "gunicorn.conf.py").read_text()
    )
    for platform in PLATFORMS:
        arguments = platform.settings.get("GUNICORN_CMD_ARGS", "")
        found = re.search(r"--graceful-timeout (\d+)", arguments)
        seconds = int(found[1] if found else standard)
        assert seconds < platform.seconds or platform.seconds < 10, platform.names


def test_the_files_for_platforms_say_what_the_platforms_of_this_file_do():
    """Their other values are in PLATFORMS, so services have been started with them."""
    assert IMAGE == {"PORT": "8000"}
    (check,) = FLY["http_service"]["checks"]
    assert check["path"] == RENDER["healthCheckPath"] == "/livez"
    assert RENDER_SETS["PLANTS_TOKENS"] == {"key": "PLANTS_TOKENS", "generateValue": True}
    manifest = json.loads((ROOT / "app.json").read_text())
    assert manifest["env"]["PLANTS_TOKENS"]["generator"] == "secret"
    assert len(manifest["name"]) <= 30 and len(manifest["description"]) <= 140
    (addon,) = manifest["addons"]
    assert f"heroku addons:create {addon} " in PAGE
    container = re.sub("(?m)^ *//.*$", "", (ROOT / ".devcontainer/devcontainer.json").read_text())
    assert json.loads(container)["forwardPorts"] == [8000]
    version = (ROOT / ".python-version").read_text().strip()
    assert json.loads(container)["image"].endswith(f"/python:{version}")


def test_a_checkout_on_windows_has_the_same_line_endings(tmp_path):
    """Its Git sets core.autocrlf. With CRLF, no script starts, and no patch applies."""
    shutil.copytree(ROOT, tmp_path / "origin", ignore=IGNORED)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for arguments in (
        ["-C", tmp_path / "origin", "init", "--quiet"],
        ["-C", tmp_path / "origin", "add", "--all"],
        ["-C", tmp_path / "origin", "commit", "--quiet", "--message=test"],
        ["clone", "--quiet", "-c", "core.autocrlf=true", tmp_path / "origin", tmp_path / "clone"],
    ):
        subprocess.run([*git, *arguments], check=True)
    for name in (".ci/run", "Procfile", ".python-version", "docs/exercises/field.patch"):
        assert (tmp_path / "clone" / name).read_bytes() == (ROOT / name).read_bytes()


def settings(platform: Platform) -> list[str]:
    """Return what an operator sets on a platform, as the pages write it."""
    places = {"port": str(platform.port)}
    return [f"{name}={fill(value, places)}" for name, value in platform.settings.items()]


def test_the_page_says_what_was_set_here():
    """Each platform has a row, or a section whose commands set exactly this."""
    sections = {text.partition("\n")[0]: text for text in re.split("(?m)^## ", PAGE)}
    rows = []
    for platform in PLATFORMS:
        if text := sections.get(re.sub(r" Fir|\.io", "", platform.names)):
            text += (ROOT / "deploy/fly.toml").read_text() if platform.names == "Fly.io" else ""
            text = re.sub(r"(?m)^( *\w+) = ", r"\1=", text).replace('"', "")
            assert [each for each in settings(platform) if each not in text] == []
            others = set(re.findall(r"\b(PORT|GUNICORN_\w+|WEB_\w+|RAILWAY_\w+)=", text))
            assert others <= platform.settings.keys()
        elif platform.note:
            database = "either" if platform.database == SQLITE else "PostgreSQL"
            sets = ", ".join(f"`{each}`" for each in settings(platform)) or "nothing"
            rows.append([platform.names, database, sets, platform.note])
    assert table("other platform") == rows
