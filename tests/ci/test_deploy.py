"""docs/deploy.md, and docs/data.md on a Linux host: the lines are typed, deploy/ is as it is.

The host is a Debian that systemd-nspawn boots, with a network of its own; buildah builds the
container. It takes root.
"""

import contextlib
import ctypes
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

import pytest
from moto.server import ThreadedMotoServer

from tests.ci.test_bare_machine import IGNORED, pinned
from tests.support.debian import ENVIRONMENT, make_machine
from tests.support.pages import PAGES, block, command, make_folder
from tests.support.rows import read_names
from tests.support.server import (
    GUNICORN,
    HEADERS,
    PATIENCE,
    ROOT,
    TOKEN,
    Server,
    free_port,
    wait_until,
)
from tests.support.wire import MONSTERA
from tests.support.writers import Writers

DEPLOY = PAGES[ROOT / "docs/deploy.md"]
INSTALL = block("sh", "apt-get install caddy").splitlines()
RESTART = block("sh", "systemd-run")  # after a look at the settings
CRON = block("crontab", "MAILTO=root\n")
LITESTREAM = block("sh", "/srv/plants/.venv/bin/pip install litestream").splitlines()
DOWNLOAD_PATIENCE = 300  # seconds for packages to be downloaded and installed
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
SYSTEM = f"""
    echo 'APT::Get::Assume-Yes "true";' >/etc/apt/apt.conf.d/90yes
    apt-get install -qq systemd-sysv dbus
    {INSTALL[0]}
    echo '127.0.0.1 localhost' >/etc/hosts
"""


class Machine:
    """A booted Debian."""

    def __init__(self, root: Path, leader: int) -> None:
        """Its files are in `root`; `leader` is its first process."""
        self.root, self.leader = root, leader

    def run(self, commands: str, fails: bool = False) -> str:
        """Type commands into a shell of root's; return what is printed.

        Its network is that of the calling thread: other hosts can be reached from outside of
        network(), and the service from inside.
        """
        namespaces = ["--mount", "--uts", "--ipc", "--pid"]
        command = ["nsenter", f"--target={self.leader}", *namespaces, "bash", "-ec", commands]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_PATIENCE, env=ENVIRONMENT
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Take the calling thread, and those that it starts, into the machine's network."""
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self.leader}/ns/net") as new:
            assert LIBC.setns(new.fileno(), CLONE_NEWNET) == 0
            try:
                yield
            finally:
                assert LIBC.setns(own.fileno(), CLONE_NEWNET) == 0

    def post(self, number: int, name: str, token: str = TOKEN) -> int:
        """Send a plant to the service; return the status."""
        headers = {**HEADERS, "Authorization": f"Bearer {token}"}
        client = http.client.HTTPConnection("127.0.0.1", 8000, timeout=PATIENCE)
        with self.network(), contextlib.closing(client):
            client.request("POST", "/plants", json.dumps({"id": number, "name": name}), headers)
            return client.getresponse().status

    def stored(self) -> dict[int, str]:
        """The names of the plants by id, as the page's line with `dump` shows them."""
        self.run(block("sh", "(set -a;"))
        lines = (self.root / "plants.jsonl").read_text().splitlines()
        return {plant["id"]: plant["name"] for plant in map(json.loads, lines)}


def make_repository(folder: Path) -> None:
    """Make a repository of the files of now, with two commits."""
    shutil.copytree(ROOT, folder, ignore=IGNORED)
    git = ["git", "-C", folder, "-c", "user.name=test", "-c", "user.email=test@localhost"]
    before, now = "commit --quiet -m before", "commit --quiet -m now --allow-empty"
    for arguments in ("init --quiet --initial-branch=main", "add --all", before, now):
        subprocess.run([*git, *arguments.split()], check=True)


def first_process(nspawn: int) -> int | None:
    """The first process of a machine, once it takes commands."""
    for child in Path(f"/proc/{nspawn}/task/{nspawn}/children").read_text().split():
        look = ["nsenter", f"--target={child}", "--mount", "test", "-S", "/run/systemd/private"]
        if Path(f"/proc/{child}/comm").read_text() == "systemd\n" and not subprocess.call(look):
            return int(child)
    return None


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    """A machine on which the service was installed as the page says, from a git repository."""
    folder = tmp_path_factory.mktemp("host")
    root = folder / "root"
    make_machine(root, "bookworm", SYSTEM)
    make_repository(root / "srv/upstream")
    options = ["--register=no", "--keep-unit", "--private-network", "--link-journal=no", "--quiet"]
    command = ["systemd-nspawn", "--boot", f"--directory={root}", *options]
    with (folder / "console").open("w") as console:
        nspawn = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *command, f"--machine=plants-{os.getpid()}"],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console,
        )  # fmt: skip
    try:
        machine = Machine(root, wait_until(lambda: first_process(nspawn.pid)))
        machine.run("systemctl is-system-running --wait || true")
        machine.run("\n".join(INSTALL[:-1]).replace("ADDRESS", "/srv/upstream"))
        with machine.network():
            assert '{"status": "ok"}' in machine.run(INSTALL[-1])
        yield machine
    finally:
        # Its first process would outlive it, and with that the machine, beside those that follow.
        children = Path(f"/proc/{nspawn.pid}/task/{nspawn.pid}/children").read_text()
        for child in children.split():
            os.kill(int(child), signal.SIGKILL)
        nspawn.kill()
        nspawn.wait()
        wait_until(lambda: subprocess.call(["rm", "-rf", folder]) == 0)  # once nobody writes there


@pytest.fixture
def host(machine) -> Machine:
    """The machine with the service as after its first start, and one more token: the tests'."""
    new = f"/^PLANTS_TOKENS=/ {{s/,{TOKEN}//; s/$/,{TOKEN}/}}"
    machine.run(
        "systemctl stop plants.socket plants; cp -n /etc/plants.env /root\n"
        "rm -rf /var/lib/plants* /etc/systemd/system/plants*.d; systemctl daemon-reload\n"
        "git -C /srv/plants reset --quiet --hard origin/main\n"
        f"sed '{new}' /root/plants.env >/etc/plants.env; systemctl start plants"
    )
    return machine


def test_the_service_runs_as_the_page_says(host):
    """As a user of its own, also after a boot. Only root reads the tokens. The log is there."""
    assert host.post(7, "Monstera") == 200
    (token,) = re.findall("(?m)^PLANTS_TOKENS=(.+),", (host.root / "etc/plants.env").read_text())
    assert host.post(7, "Monstera", token) == 200
    assert host.stored() == {7: "Monstera"}
    assert host.run("systemctl is-enabled plants") == "enabled\n"
    assert host.run("stat -c %A%U /etc/plants.env") == "-rw-------root\n"
    assert host.run("stat -c %A%U /var/lib/plants") == "drwxr-x---plants\n"
    assert host.run("stat -c %U /proc/$(systemctl show -P MainPID plants)") == "plants\n"
    assert '"POST /plants" 200 ' in host.run("journalctl --unit plants")
    assert host.run("systemd-analyze verify --man=no plants.service plants.socket") == ""


def test_a_restart_an_upgrade_and_going_back_are_noticed_by_nobody(host):
    """Under load behind Caddy: no error, no connection refused, and each plant sent once."""
    upgrade, go_back = block("sh", "git -C /srv/plants pull"), command("git -C /srv/plants reset")
    site = ":8080 {\n reverse_proxy 127.0.0.1:8000\n}\n"
    (host.root / "etc/caddy/Caddyfile").write_text(site)
    host.run(f"systemctl reload caddy; git -C /srv/plants reset --hard HEAD~; {RESTART}")
    with contextlib.ExitStack() as stack:
        with host.network():
            clients = stack.enter_context(Writers(8080))
        go_back = re.sub(r"git.* pull", go_back, upgrade)
        for commands, version in ((upgrade, "now"), (go_back, "before")):
            assert clients.goes_on()
            assert "SQLite 3." in host.run(f"{commands}\n{RESTART}")
            assert host.run("git -C /srv/plants log -1 --format=%s") == f"{version}\n"
        host.run("systemctl reload plants")
        assert clients.goes_on()
    assert set(clients.answers) == {200} and not clients.failures
    assert host.stored() == clients.acknowledged
    assert clients.answers[200] == len(clients.acknowledged)


def test_a_token_is_replaced(host):
    """In two steps, between which the log shows who uses the old one; and by no wrong one."""
    settings, new = host.root / "etc/plants.env", "new-token-0123456789"
    text = settings.read_text()
    both, only = f"web-2:{new}, web:{TOKEN}", f"web-2:{new}"
    for tokens, status in ((both, 200), (only, 401), ("short", 401)):
        settings.write_text(re.sub("(?m)^PLANTS_TOKENS=.*", f"PLANTS_TOKENS={tokens}", text))
        said = host.run(RESTART, fails=tokens == "short")
        assert "PLANTS_TOKENS" in said.splitlines()[-1] or tokens != "short"
        assert (host.post(7, "Monstera", new), host.post(7, "Monstera", TOKEN)) == (200, status)
    find = command("journalctl --unit plants --output cat")
    (line,) = wait_until(lambda: host.run(find).splitlines())
    assert '"POST /plants" 200 ' in line


def test_a_backup_is_made_by_cron_and_restored(host):
    """Under load. The copy is sound, the old -wal is gone, and what was stored before is there."""
    host.run(command("install -d -o plants -m 750 /var/lib/plants-backups"))
    old = "touch -d 2025-01-$day plants-2025-01-$day.db"
    host.run(f"cd /var/lib/plants-backups; for day in {{10..29}}; do {old}; done; chown plants *")
    with host.network(), Writers(8000) as clients:
        assert clients.goes_on()
        acknowledged = clients.acknowledged.copy()
        for line in CRON.splitlines()[1:]:
            user, commands = line.split(maxsplit=6)[5:]
            assert "%" not in commands  # it would end there
            cron = f"runuser -u {user} -- env -i PATH=/usr/bin:/bin sh -c {quote(commands)} || true"
            assert host.run(cron) == ""  # else it is mailed
        assert host.run("ls /var/lib/plants-backups | wc -l") == "14\n"
        assert clients.goes_on()
    host.run("systemctl kill --signal=KILL plants; systemctl stop plants.socket plants")
    look, restore = block("sh", "systemctl stop"), block("sh", "mkdir replaced")
    assert host.run(f"{look}{restore}").startswith("ok\n")
    assert acknowledged.items() <= host.stored().items()
    assert len(host.stored()) < len(clients.acknowledged)
    assert (host.root / "var/lib/plants/replaced/plants.db-wal").stat().st_size
    number = next(iter(acknowledged))
    assert (host.post(number, "another"), host.post(5, "another")) == (409, 200)


def test_other_hosts_reach_it_through_caddy(host):
    """Encrypted, by a host name that gets a certificate of Caddy's own, and below a path.

    The request id leads from the service's log to the client's address in Caddy's.
    """
    commands = block("sh", "sed s/plants.example.org")
    host.run(commands.replace("HOST.EXAMPLE.ORG", "plants.localhost"))
    plant = f"""-H 'Authorization: Bearer {TOKEN}' --json '{{"id": 7, "name": "Monstera"}}'"""
    curl = f"curl --silent --insecure --include --location {plant} https://plants.localhost"
    answer = r'(?is)x-request-id: (\S+).*\n\n{"name": "Monstera"}\n$'
    with host.network():
        request_id = wait_until(lambda: re.search(answer, host.run(f"{curl}/plants || true")))[1]
    wait_until(lambda: f" {request_id}\n" in host.run("journalctl --unit plants"))
    logged = f'"remote_ip":"127.0.0.1".*{request_id}'
    wait_until(lambda: re.search(logged, host.run("journalctl --unit caddy")))
    caddyfile = host.root / "etc/caddy/Caddyfile"
    proxy = "reverse_proxy 127.0.0.1:8000\n"
    caddyfile.write_text(caddyfile.read_text().replace(proxy, block("caddyfile", "redir")))
    with host.network():
        host.run("systemctl reload caddy")
        assert re.search(answer, host.run(f"{curl}/store/plants"))
        assert "<form" in host.run(f"{curl.replace(plant, '')}/store")


def test_litestream_under_systemd(host):
    """It restores a lost file from S3, is started again after kill -9, and takes no SIGHUP."""
    host.run(LITESTREAM[0])  # outside of its network
    with host.network(), running_s3() as url:
        with (host.root / "etc/plants.env").open("a") as settings:
            settings.write(f"REPLICA_URL='{url}'\n")
            settings.write("LITESTREAM_ACCESS_KEY_ID=key\nLITESTREAM_SECRET_ACCESS_KEY=secret\n")
        host.run("\n".join(LITESTREAM[1:]))
        with Writers(8000) as clients:
            assert clients.goes_on()
            host.run("systemctl reload plants", fails=True)
            assert clients.goes_on()
            host.run("systemctl kill --signal=KILL plants")
            assert clients.goes_on()
        host.run("systemctl stop plants && rm -r /var/lib/plants && systemctl start plants")
        assert host.stored().items() >= clients.acknowledged.items()
        host.run("systemctl stop plants.socket plants")


@contextlib.contextmanager
def running_s3() -> Iterator[str]:
    """An S3; the URL of a folder in it, as the page shows one."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with contextlib.closing(http.client.HTTPConnection(host, port, PATIENCE)) as client:
        client.request("PUT", "/bucket")
        assert client.getresponse().status == 200
    (example,) = re.findall(r"`(s3://\S+\?\S+)`", DEPLOY)
    try:
        yield example.replace("BUCKET", "bucket").replace("https://HOST", f"http://{host}:{port}")
    finally:
        server.stop()


def test_litestream_restores_what_it_copied(serve, tmp_path, record_property):
    """When all is killed and the disk lost, older plants are there; after SIGTERM, all are.

    The path of the database is a link, and the copy is in a folder.
    """
    folder, disk = make_folder(tmp_path / "plant store"), tmp_path / "a disk"
    install, start = block("sh", ".venv/bin/pip install litestream").splitlines()
    subprocess.run(["sh", "-c", install], cwd=folder, check=True, timeout=DOWNLOAD_PATIENCE)
    url, restored = f"file://{tmp_path}/copy", tmp_path / "restored.db"
    settings = {"REPLICA_URL": url, "GUNICORN_CMD_ARGS": "--bind 127.0.0.1:0"}
    (folder / "plants.db").symlink_to(disk / "plants.db")

    def start_anew() -> Server:
        """What a platform does: the disk has nothing that was written there."""
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir()
        command = ["sh", "-c", f"cd '{folder}' && exec {start}"]
        return serve(command=command, DATABASE_URL=None, **settings)

    def are_copied(plants: dict[int, str]) -> bool:
        restored.unlink(missing_ok=True)
        litestream = [folder / ".venv/bin/litestream", "restore", "-o", restored, url]
        done = subprocess.call(litestream, stderr=subprocess.DEVNULL) == 0
        return done and plants.items() <= read_names(f"sqlite:///{restored}").items()

    server = start_anew()
    with Writers(server.port) as clients:
        assert clients.goes_on(1000)
        older = clients.acknowledged.copy()
        wait_until(lambda: are_copied(older))
        server.kill()
    server, count = start_anew(), len(clients.acknowledged)
    assert server.post({"id": next(iter(older)), "name": "another"})[0] == 409
    there = read_names(f"sqlite:///{disk}/plants.db")
    assert older.items() <= there.items()
    found = f"{count} plants acknowledged, the last {count - len(there)} lost"
    record_property("Litestream, kill -9 and a lost disk", found)
    with Writers(server.port) as clients:
        assert clients.goes_on()
    assert server.stop() == 0 and start_anew().port
    there |= clients.acknowledged
    assert there.items() <= read_names(f"sqlite:///{disk}/plants.db").items()


def test_a_container_from_its_build_to_its_backup(serve, tmp_path, request):
    """It has the service alone, which is not root, and works with what platforms set.

    Its health check is true. Its plants outlive it, and are backed up from outside.
    """
    (folder := tmp_path / "buildah").mkdir()
    (volume := tmp_path / "volume").mkdir()
    os.chown(volume, 1000, 1000)  # as a new volume is
    make_machine(folder / "base", "trixie", "python3 -m venv /usr/local")
    request.addfinalizer(lambda: shutil.rmtree(folder))
    request.addfinalizer(lambda: subprocess.run(["umount", "-R", folder / "storage/overlay"]))
    settings = f"--env=PORT={free_port()} --env=PLANTS_TOKENS={TOKEN} --env=WEB_CONCURRENCY=3"
    settings += f" --env=FORWARDED_ALLOW_IPS=* --env=HOME=/nonexistent --volume={volume}:/data"
    places = f"--storage-driver=overlay --root={folder}/storage --runroot={folder}/run"
    docker = f"""
        export BUILDAH_ISOLATION=chroot
        buildah() {{ command buildah {places} "$@"; }}
        run() {{ buildah run {settings} "$@"; }}
    """

    def shell(commands: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", f"{docker}\n{commands}"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            timeout=DOWNLOAD_PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def start() -> Server:
        shell("buildah from --pull-never --name plants localhost/plants")
        return serve(command=["bash", "-c", f"{docker}\nrun plants {' '.join(image['Cmd'])}"])

    base = re.search("(?m)^FROM (.+)$", (ROOT / "deploy/Dockerfile").read_text())[1]
    shell(f"buildah from --name base scratch; buildah add --quiet base {folder}/base /")
    shell(f"buildah commit --quiet --format=docker base docker.io/library/{base}")
    build = "buildah build --pull=never --format=docker --network=host"
    shell(block("sh", "docker build").splitlines()[0].replace("docker build", build))
    image = json.loads(shell("buildah inspect --type=image plants"))["Docker"]["config"]
    health = " ".join(map(quote, image["Healthcheck"]["Test"][1:]))
    server = start()
    server.workers(3)
    master, *workers = dict.fromkeys(map(int, re.findall(r"\] \[(\d+)\] \[", server.err)))
    assert 0 not in {os.stat(f"/proc/{pid}").st_uid for pid in (master, *workers)}
    assert server.post(MONSTERA)[0] == 200
    shell(f"run plants {health}")
    backup = block("sh", "docker exec").replace("docker exec", "run")
    shell(f"cd {tmp_path}\n{backup.replace('docker cp plants:/data', f'cp {volume}')}")
    (backup,) = tmp_path.glob("plants-*.db")
    assert read_names(f"sqlite:///{backup}") == {7: "Monstera"}
    os.kill(master, signal.SIGTERM)
    assert server.wait() == 0
    shell(f"! run plants {health} 2>&-; buildah rm plants")
    server = start()
    assert server.post({**MONSTERA, "name": "another"})[0] == 409
    found = shell("run plants find /app -type f -not -name '*.pyc'").split()
    names = ("requirements.txt", "*.py", "engines/*.py", "schemas/*", "static/*")
    service = [file.relative_to(ROOT) for name in names for file in ROOT.glob(name)]
    assert sorted(found) == sorted(f"/app/{file}" for file in service)
    assert set(shell("run plants pip freeze").lower().split()) == pinned("requirements.txt", "3.13")


def test_nginx_logs_the_id_of_a_request(serve, tmp_path):
    """With the page's lines, it is the last field; it leads to the line in the service's log."""
    server, port = serve(), free_port()
    lines = block("nginx", "log_format").replace("/var/log/nginx", str(tmp_path))
    site = command("proxy_pass").replace("8000", str(server.port))
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/errors; events {{}}\n"
        f"http {{\n{lines}server {{ listen 127.0.0.1:{port}; location / {{ {site} }} }}\n}}\n"
    )
    nginx = subprocess.Popen(["nginx", "-c", tmp_path / "nginx.conf"])
    try:
        curl = f"curl --silent --retry 9 --retry-connrefused http://127.0.0.1:{port}/plants"
        assert json.loads(subprocess.check_output(curl.split()))["error"] == 405
        (line,) = wait_until((tmp_path / "plants.log").read_text).splitlines()
        assert line.startswith("127.0.0.1 ") and server.log_line(line.split()[-1])
    finally:
        nginx.terminate()
        nginx.wait(PATIENCE)


def test_a_container_may_have_a_read_only_root(serve, tmp_path):
    """If /tmp and the folder of the database can be written."""
    setup = """
        mount --bind /tmp /tmp; mount --bind "$0" "$0"
        for each in / /var/tmp /dev/shm; do
            ! mountpoint -q $each || mount -o remount,bind,ro $each
        done
        exec "$@" --bind 127.0.0.1:0"""
    command = ["unshare", "--mount", "sh", "-ec", setup, str(tmp_path), GUNICORN]
    assert serve(command=command).post(MONSTERA)[0] == 200


def test_fly_sends_requests_to_where_the_service_listens():
    """The port of the checks and of the service are the same, and the disk is the volume."""
    settings = tomllib.loads((ROOT / "deploy/fly.toml").read_text())
    assert settings["http_service"]["internal_port"] == int(settings["env"]["PORT"])
    folder = settings["mounts"]["destination"]
    assert settings["env"]["DATABASE_URL"] == f"sqlite:///{folder}/plants.db"
