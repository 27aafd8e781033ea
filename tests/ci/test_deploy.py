"""docs/deploy.md, and docs/data.md on a Linux host: the lines are typed, deploy/ is as it is.

The host is a Debian that systemd-nspawn boots, with a network of its own; buildah builds the
container. It takes root.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer

from tests.ci.test_bare_machine import IGNORED
from tests.support.debian import ENVIRONMENT, make_machine
from tests.support.pages import PAGES, block, command, make_folder
from tests.support.rows import read_names
from tests.support.server import ROOT, TOKEN, Server, free_port, wait_until
from tests.support.wire import MONSTERA
from tests.support.writers import Writers

INSTALL = block("sh", "apt-get install caddy").splitlines()
RESTART = block("sh", "systemd-run")  # after a look at the settings
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
UPSTREAM = """
    cd /srv/upstream && git init --quiet --initial-branch=main && git add --all
    git config user.name test && git config user.email test@localhost
    for version in before now; do git commit --quiet --allow-empty -m $version; done
"""


class Machine:
    """A booted Debian."""

    port, request, post = 8000, Server.request, Server.post

    def __init__(self, root: Path, leader: int) -> None:
        """Its files are in `root`; `leader` is its first process."""
        self.root, self.leader = root, leader

    def run(self, commands: str, fails: bool = False) -> str:
        """Type commands into a shell of root's, in the network of the test; return the output."""
        namespaces = ["--mount", "--uts", "--ipc", "--pid"]
        done = subprocess.run(
            ["nsenter", f"--target={self.leader}", *namespaces, "bash", "-ec", commands],
            capture_output=True, text=True, timeout=DOWNLOAD_PATIENCE, env=ENVIRONMENT,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    def stored(self) -> dict[int, str]:
        """The names of the plants by id, as the page's line with `dump` shows them."""
        self.run(block("sh", "(set -a;"))
        lines = (self.root / "plants.jsonl").read_text().splitlines()
        return {plant["id"]: plant["name"] for plant in map(json.loads, lines)}


def find_systemd(pids: str) -> int:
    """The one of these processes that is systemd, or 0."""
    found = (pid for pid in pids.split() if Path(f"/proc/{pid}/comm").read_text() == "systemd\n")
    return int(next(found, 0))


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    """A machine on which the service was installed as the page says, from a git repository."""
    folder = tmp_path_factory.mktemp("host")
    make_machine(root := folder / "root", "bookworm", SYSTEM)
    shutil.copytree(ROOT, root / "srv/upstream", ignore=IGNORED)
    options = ["--register=no", "--keep-unit", "--private-network", "--link-journal=no", "--quiet"]
    options += [f"--machine=plants-{os.getpid()}", "--kill-signal=SIGKILL"]  # at once
    with (folder / "console").open("w") as console:
        nspawn = subprocess.Popen(
            ["setpriv", "--pdeathsig=TERM", "systemd-nspawn", "-b", f"-D{root}", *options],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console,
        )  # fmt: skip
    try:
        children = Path(f"/proc/{nspawn.pid}/task/{nspawn.pid}/children")
        machine = Machine(root, wait_until(lambda: find_systemd(children.read_text())))
        machine.run("until test -S /run/systemd/private; do sleep 0.1; done")
        machine.run("systemctl is-system-running --wait || true")
        machine.run(UPSTREAM)
        machine.run("\n".join([*INSTALL[:-1], LITESTREAM[0]]).replace("ADDRESS", "/srv/upstream"))
        yield machine
    finally:
        nspawn.terminate()
        nspawn.wait()
        shutil.rmtree(folder)


@pytest.fixture
def host(machine) -> Iterator[Machine]:
    """The machine with the service as after its first start, and one more token: the tests'.

    The thread of the test, and those that it starts, are in the machine's network.
    """
    machine.run(
        "systemctl stop plants.socket plants; cp -n /etc/plants.env /root\n"
        "rm -rf /var/lib/plants* /etc/systemd/system/plants*.d; systemctl daemon-reload\n"
        "git -C /srv/plants reset --quiet --hard origin/main\n"
        f"sed '/^PLANTS_TOKENS=/ s/$/,{TOKEN}/' /root/plants.env >/etc/plants.env\n"
        "systemctl start plants"
    )
    with open("/proc/thread-self/ns/net") as own, open(f"/proc/{machine.leader}/ns/net") as new:
        assert LIBC.setns(new.fileno(), CLONE_NEWNET) == 0
        yield machine
        assert LIBC.setns(own.fileno(), CLONE_NEWNET) == 0


def test_the_service_runs_as_the_page_says(host):
    """As a user of its own, also after a boot. Only root reads the tokens. The log is there."""
    assert '{"status": "ok"}' in host.run(INSTALL[-1])
    (token,) = re.findall("(?m)^PLANTS_TOKENS=(.+),", (host.root / "etc/plants.env").read_text())
    assert host.post(MONSTERA, token)[0] == 200
    assert host.run("systemctl is-enabled plants") == "enabled\n"
    assert host.run("stat -c %A%U /etc/plants.env") == "-rw-------root\n"
    assert host.run("stat -c %A%U /var/lib/plants") == "drwxr-x---plants\n"
    assert host.run("stat -c %U /proc/$(systemctl show -P MainPID plants)") == "plants\n"
    assert '"POST /plants" 200 ' in host.run("journalctl --unit plants")
    assert host.run("systemd-analyze verify --man=no plants.service plants.socket") == ""


def test_a_restart_an_upgrade_and_going_back_are_noticed_by_nobody(host):
    """Under load behind Caddy: no error, no connection refused, and each plant sent once."""
    upgrade, go_back = block("sh", "git -C /srv/plants pull"), command("git -C /srv/plants reset")
    go_back = re.sub(r"git.* pull", go_back, upgrade)
    site = ":8080 {\n reverse_proxy 127.0.0.1:8000\n}\n"
    (host.root / "etc/caddy/Caddyfile").write_text(site)
    host.run(f"systemctl reload caddy; git -C /srv/plants reset --hard HEAD~; {RESTART}")
    with Writers(8080) as clients:
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
        assert (host.post(MONSTERA, new)[0], host.post(MONSTERA)[0]) == (200, status)
    find = command("journalctl --unit plants --output cat")
    (line,) = wait_until(lambda: host.run(find).splitlines())
    assert '"POST /plants" 200 ' in line


def test_a_backup_is_made_by_cron_and_restored(host):
    """Under load. The copy is sound, the old -wal is gone, and what was stored before is there."""
    host.run(command("install -d -o plants -m 750 /var/lib/plants-backups"))
    old = "touch -d 2025-01-$day plants-2025-01-$day.db"
    host.run(f"cd /var/lib/plants-backups; for day in {{10..29}}; do {old}; done; chown plants *")
    with Writers(8000) as clients:
        assert clients.goes_on()
        acknowledged = clients.acknowledged.copy()
        for line in block("crontab", "MAILTO=root\n").splitlines()[1:]:
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
    for number, status in ((next(iter(acknowledged)), 409), (5, 200)):
        assert host.post({"id": number, "name": "another"})[0] == status


def test_other_hosts_reach_it_through_caddy(host):
    """Encrypted, by a host name that gets a certificate of Caddy's own, and below a path.

    The request id leads from the service's log to the client's address in Caddy's.
    """
    commands = block("sh", "sed s/plants.example.org")
    host.run(commands.replace("HOST.EXAMPLE.ORG", "plants.localhost"))
    plant = f"-H 'Authorization: Bearer {TOKEN}' --json '{json.dumps(MONSTERA)}'"
    curl = f"curl --silent --insecure --include --location {plant} https://plants.localhost"
    answer = r'(?is)x-request-id: (\S+).*\n\n{"name": "Monstera", .*}\n$'
    request_id = wait_until(lambda: re.search(answer, host.run(f"{curl}/plants || true")))[1]
    wait_until(lambda: f" {request_id}\n" in host.run("journalctl --unit plants"))
    logged = f'"remote_ip":"127.0.0.1".*{request_id}'
    wait_until(lambda: re.search(logged, host.run("journalctl --unit caddy")))
    caddyfile, below = host.root / "etc/caddy/Caddyfile", block("caddyfile", "redir")
    caddyfile.write_text(re.sub("reverse_proxy.*\n", below, caddyfile.read_text()))
    host.run("systemctl reload caddy")
    assert re.search(answer, host.run(f"{curl}/store/plants"))
    assert "<form" in host.run(f"{curl.replace(plant, '')}/store")


def test_litestream_under_systemd(host):
    """A lost file is restored from a folder after a stop; kill -9 and SIGHUP do no harm."""
    host.run(command("install -d -o plants /mnt/copy"))
    host.run("sed -i 's/^#Read/Read/' /srv/plants/deploy/litestream.conf")  # its last line
    host.run("echo REPLICA_URL=file:///mnt/copy >>/etc/plants.env")
    host.run("\n".join(LITESTREAM[1:]))
    with Writers(8000) as clients:
        assert clients.goes_on()
        host.run("systemctl reload plants", fails=True)
        assert clients.goes_on()
        host.run("systemctl kill --signal=KILL plants")
        assert clients.goes_on()
    host.run("systemctl stop plants && rm -r /var/lib/plants && systemctl start plants")
    assert host.stored().items() >= clients.acknowledged.items()


def test_litestream_restores_what_it_copied_to_s3(serve, tmp_path, request):
    """When all is killed and the disk lost, older plants are there. The file's path is a link."""
    folder, disk = make_folder(tmp_path / "plant store"), tmp_path / "a disk"
    (folder / "plants.db").symlink_to(disk / "plants.db")
    install, start = block("sh", ".venv/bin/pip install litestream").splitlines()
    subprocess.run(["sh", "-c", install], cwd=folder, check=True, timeout=DOWNLOAD_PATIENCE)
    s3 = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    s3.start()
    request.addfinalizer(s3.stop)
    address = "http://{}:{}".format(*s3.get_host_and_port())
    urlopen(Request(f"{address}/bucket", method="PUT")).close()
    (url,) = re.findall(r"`(s3://\S+\?\S+)`", PAGES[ROOT / "docs/deploy.md"])
    url = url.replace("BUCKET", "bucket").replace("https://HOST", address)
    keys = {"LITESTREAM_ACCESS_KEY_ID": "key", "LITESTREAM_SECRET_ACCESS_KEY": "secret"}
    keys |= {"REPLICA_URL": url, "GUNICORN_CMD_ARGS": "--bind 127.0.0.1:0"}

    def start_anew() -> Server:
        disk.mkdir()
        command = ["sh", "-c", f"cd '{folder}' && exec {start}"]
        return serve(command=command, DATABASE_URL=None, AWS_CA_BUNDLE=None, **keys)

    def are_copied(plants: dict[int, str]) -> bool:
        (restored := tmp_path / "restored.db").unlink(missing_ok=True)
        litestream = [folder / ".venv/bin/litestream", "restore", "-o", restored, url]
        done = subprocess.call(litestream, stderr=subprocess.DEVNULL, env=keys) == 0
        return done and plants.items() <= read_names(f"sqlite:///{restored}").items()

    server = start_anew()
    with Writers(server.port) as clients:
        assert clients.goes_on(1000)
        older = clients.acknowledged.copy()
        wait_until(lambda: are_copied(older))
        server.kill()
    shutil.rmtree(disk)
    server = start_anew()
    assert server.post({"id": next(iter(older)), "name": "another"})[0] == 409
    assert older.items() <= read_names(f"sqlite:///{disk}/plants.db").items()


def test_a_container_from_its_build_to_its_backup(serve, tmp_path, request):
    """It is not root, its health check is true, and its plants are on the volume."""
    (folder := tmp_path / "buildah").mkdir()
    (volume := tmp_path / "volume").mkdir()
    os.chown(volume, 1000, 1000)  # as a new volume is
    make_machine(folder / "base", "trixie", "python3 -m venv /usr/local")
    request.addfinalizer(lambda: shutil.rmtree(folder))
    request.addfinalizer(lambda: subprocess.run(["umount", "-R", folder / "storage/overlay"]))
    settings = f"--env=PORT={free_port()} --env=PLANTS_TOKENS={TOKEN} --volume={volume}:/data"
    places = f"--storage-driver=overlay --root={folder}/storage --runroot={folder}/run"
    docker = f"""
        export BUILDAH_ISOLATION=chroot
        buildah() {{ command buildah {places} "$@"; }}
        run() {{ buildah run {settings} "$@"; }}
    """

    def shell(commands: str) -> str:
        bash = ["bash", "-euc", f"{docker}\n{commands}"]
        return subprocess.check_output(bash, cwd=ROOT, text=True, timeout=DOWNLOAD_PATIENCE)

    base = re.search("(?m)^FROM (.+)$", (ROOT / "deploy/Dockerfile").read_text())[1]
    shell(f"buildah from --name base scratch; buildah add --quiet base {folder}/base /")
    shell(f"buildah commit --quiet --format=docker base docker.io/library/{base}")
    build = "buildah build --pull=never --format=docker --network=host"
    shell(block("sh", "docker build").splitlines()[0].replace("docker build", build))
    shell("buildah from --pull-never --name plants localhost/plants")
    image = json.loads(shell("buildah inspect --type=image plants"))["Docker"]["config"]
    health = " ".join(map(quote, image["Healthcheck"]["Test"][1:]))
    server = serve(command=["bash", "-c", f"{docker}\nrun plants {' '.join(image['Cmd'])}"])
    assert server.post(MONSTERA)[0] == 200
    (master,) = re.findall(r"\[(\d+)\] \[INFO\] Listening", server.err)
    assert os.stat(f"/proc/{master}").st_uid == 1000
    shell(f"run plants {health}")
    backup = block("sh", "docker exec").replace("docker exec", "run")
    shell(f"cd {tmp_path}\n{backup.replace('docker cp plants:/data', f'cp {volume}')}")
    (backup,) = tmp_path.glob("plants-*.db")
    assert read_names(f"sqlite:///{backup}") == {7: "Monstera"}
    os.kill(int(master), signal.SIGTERM)
    assert server.wait() == 0
    shell(f"! run plants {health} 2>&-")


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
        nginx.wait(60)
