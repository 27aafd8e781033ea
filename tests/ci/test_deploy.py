"""docs/deploy.md, and docs/data.md on a Linux host: the lines are typed, deploy/ is as it is."""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

import pytest

from tests.ci.test_bare_machine import IGNORED, make_machine
from tests.support.pages import block, command
from tests.support.server import ROOT, STORED, TOKEN, Server, free_port, receive, wait_until
from tests.support.storage import lock_held, read_names
from tests.support.wire import MONSTERA, Writers, answers, post

*INSTALL, CHECK = block("sh", "apt-get install caddy").splitlines()
PACKAGES = INSTALL[0].split()[2:]  # they are there, as the machine reaches no mirror
RESTART = block("sh", "systemctl reset-failed")
DOWNLOAD_PATIENCE = 300  # seconds for packages to be downloaded and installed
LIBC = ctypes.CDLL(None, use_errno=True)
UPSTREAM = """
    systemctl is-system-running --wait || true
    cd /srv/upstream && git init --quiet --initial-branch=main && git add --all
    export GIT_AUTHOR_NAME=test GIT_COMMITTER_NAME=test EMAIL=test@localhost
    for version in before now; do git commit --quiet --allow-empty -m $version; done
"""
# Without encryption, for clients of ours.
SITE = (ROOT / "deploy/Caddyfile").read_text().replace("plants.example.org", ":8080")


class Machine:
    """A booted Debian."""

    port, request, post = 8000, Server.request, Server.post

    def __init__(self, root: Path, leader: int) -> None:
        """Its files are in `root`; `leader` is its first process."""
        self.leader, self.database = leader, root / "var/lib/plants/plants.db"
        self.url = f"sqlite:///{self.database}"

    def run(self, commands: str, fails: bool = False) -> str:
        """Type commands into a shell of root's, in the network of the test; return the output."""
        enter = ["nsenter", f"--target={self.leader}", "--mount", "--uts", "--ipc", "--pid"]
        done = subprocess.run(
            [*enter, "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "bash", "-ec", commands],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DOWNLOAD_PATIENCE,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout
        return done.stdout


def find_systemd(parent: int) -> int:
    """The child of a process that is systemd, or 0."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = (pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "systemd\n")
    return int(next(found, 0))


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    """A machine on which the service was installed as the page says, from a git repository."""
    root = tmp_path_factory.mktemp("host") / "root"
    make_machine(root, "bookworm", "systemd-sysv", "dbus", *PACKAGES)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    shutil.copytree(ROOT, root / "srv/upstream", ignore=IGNORED)
    options = ["--register=no", "--keep-unit", "--private-network", "--link-journal=no", "--quiet"]
    options += [f"--machine=plants-{os.getpid()}", "--kill-signal=SIGKILL"]  # at once
    boot = ["setpriv", "--pdeathsig=TERM", "systemd-nspawn", "-b", f"-D{root}", *options]
    null = subprocess.DEVNULL
    nspawn = subprocess.Popen(boot, stdin=null, stdout=null, stderr=null)
    try:
        machine = Machine(root, wait_until(lambda: find_systemd(nspawn.pid)))
        machine.run(f"until test -S /run/systemd/private; do sleep 0.1; done\n{UPSTREAM}")
        install = "\n".join(["umask 27", *INSTALL]).replace("ADDRESS", "/srv/upstream")
        machine.run(install.replace("HOST.EXAMPLE.ORG", "plants.localhost"))
        machine.run(f"echo {quote(SITE)} >>/etc/caddy/Caddyfile; systemctl reload caddy")
        yield machine
    finally:
        nspawn.terminate()
        nspawn.wait()
        shutil.rmtree(root)


@pytest.fixture
def host(machine) -> Iterator[Machine]:
    """The machine, whose network the test is in; the service, with one more token, is as new."""
    machine.run(
        "systemctl stop plants.socket plants; cp -n /etc/plants.env /root\n"
        "rm -rf /var/lib/plants*; git -C /srv/plants reset --quiet --hard origin/main\n"
        f"sed '/^PLANTS_TOKENS=/ s/$/,{TOKEN}/' /root/plants.env >/etc/plants.env\n{RESTART}"
    )
    with open("/proc/thread-self/ns/net") as own, open(f"/proc/{machine.leader}/ns/net") as new:
        assert LIBC.setns(new.fileno(), 0) == 0
        yield machine
        assert LIBC.setns(own.fileno(), 0) == 0


def test_the_service_runs_as_the_page_says(host):
    """As a user of its own, also after a boot. Only root reads the tokens. The log is there."""
    assert '{"status": "ok"}' in host.run(CHECK)
    assert host.run("systemctl is-enabled plants") == "enabled\n"
    assert host.run("stat -c %A%U /etc/plants.env") == "-rw-------root\n"
    assert host.run("stat -c %A%U /var/lib/plants") == "drwxr-x---plants\n"
    assert host.run("stat -c %U /proc/$(systemctl show -P MainPID plants)") == "plants\n"
    assert host.run("systemd-analyze verify --man=no plants.service plants.socket") == ""


def test_other_hosts_reach_it_through_caddy(host):
    """Encrypted, with the token that was made. The request id leads from log to log."""
    (token,) = re.findall("PLANTS_TOKENS=(.+),", host.run("cat /etc/plants.env"))
    plant = f"-H 'Authorization: Bearer {token}' --json '{json.dumps(MONSTERA)}'"
    curl = f"curl --silent --insecure --include {plant} https://plants.localhost/plants || true"
    answer = r'(?is)x-request-id: (\S+).*\n\n{"name": "Monstera", .*}\n$'
    request_id = wait_until(lambda: re.search(answer, host.run(curl)))[1]
    wait_until(lambda: request_id in host.run("journalctl --unit plants"))
    logged = f'"remote_ip":"127.0.0.1".*{request_id}'
    wait_until(lambda: re.search(logged, host.run("journalctl --unit caddy")))
    with socket.create_connection(("127.0.0.1", 8080)) as client:  # who has sent all may say so
        client.sendall(post(MONSTERA))
        client.shutdown(socket.SHUT_WR)
        assert answers(receive(client)) == [(STORED, {"name": "Monstera", "tag": "indoor"})]


def test_a_restart_an_upgrade_and_going_back_are_noticed_by_nobody(host):
    """Under load behind Caddy: no error, no connection refused, and each plant sent once."""
    upgrade = block("sh", "cd /srv/plants && git log")
    host.run(f"git -C /srv/plants reset --hard HEAD~; {RESTART}")
    with Writers(8080) as clients:
        assert clients.goes_on()
        (commit,) = re.findall("(?m)^[0-9a-f]{40}$", host.run(upgrade))
        back = upgrade.replace("git pull", command("git reset --hard").replace("COMMIT", commit))
        for commands, version in ((RESTART, "now"), (back, "before")):
            assert clients.goes_on()
            host.run(commands)
            assert host.run("git -C /srv/plants log -1 --format=%s") == f"{version}\n"
        assert clients.goes_on()
    assert [*clients.answers] == [STORED] and not clients.failures
    assert read_names(host.url) == clients.acknowledged
    assert clients.answers[200] == len(clients.acknowledged)


def test_a_start_that_cannot_succeed_ends_in_a_refused_port(host):
    """Who waits is let go, others are refused. Started again, it has the settings of then."""
    host.run("systemctl stop plants.socket plants")
    curl = "curl --silent --show-error --max-time 120 http://127.0.0.1:8000/healthz"
    with lock_held(host.database):  # which takes longest to be refused
        host.run(RESTART, fails=True)
        assert "Connection reset" in host.run(curl, fails=True)
        assert "Failed to connect" in host.run(curl, fails=True)
    assert host.run("systemctl is-failed plants.service plants.socket") == "failed\n" * 2
    assert "the storage is busy or hangs" in host.run("journalctl --unit plants --lines 40")
    new = "new-token-0123456789"
    host.run(f"sed -i '/^PLANTS_TOKENS=/ s/$/,{new}/' /etc/plants.env; {RESTART}")
    assert [host.post(MONSTERA, token)[0] for token in (TOKEN, new)] == [STORED] * 2


def test_a_backup_is_made_by_cron_and_restored(host):
    """Under load. The copy is sound, the old -wal is gone, and what was stored before is there."""
    host.run(block("sh", "install -d -o plants"))
    old = "touch -d 2025-01-$day plants-2025-01-$day.db"
    host.run(f"cd /var/lib/plants-backups; for day in {{10..29}}; do {old}; done; chown plants *")
    with Writers(8000) as clients:
        assert clients.goes_on()
        acknowledged = clients.acknowledged.copy()
        (line,) = host.run("cat /etc/cron.d/plants-backup").splitlines()[1:]
        user, commands = line.split(maxsplit=6)[5:]
        assert "%" not in commands  # it would end there
        cron = f"runuser -u {user} -- env -i PATH=/usr/bin:/bin sh -c {quote(commands)}"
        assert host.run(cron) == ""  # else it is mailed
        names = host.run("cd /var/lib/plants-backups; stat -c %A%U *").splitlines()
        assert len(names) == 14
        assert names[-1] == "-rw-------plants"
        assert clients.goes_on()
    host.run("systemctl kill --signal=KILL plants; systemctl stop plants.socket plants")
    choose, look = block("sh", "backup=$(ls -t /var/lib"), block("sh", "sqlite3 -readonly")
    restore = block("sh", "systemctl stop plants.socket plants && cd")
    assert host.run(f"{choose}{look}{restore}").startswith("ok\n")
    assert acknowledged.items() <= (stored := read_names(host.url)).items()
    assert len(stored) < len(clients.acknowledged)
    (left,) = host.database.parent.glob("replaced-*/plants.db-wal")
    assert left.stat().st_size
    for number, status in ((next(iter(acknowledged)), 409), (5, STORED)):
        assert host.post({"id": number, "name": "another"})[0] == status


@pytest.fixture
def docker(tmp_path) -> Iterator[Callable[[str], list[str]]]:
    """Makes command lines of what is typed for Docker, in place of which buildah runs."""
    (folder := tmp_path / "buildah").mkdir()
    (volume := tmp_path / "volume").mkdir()
    os.chown(volume, 1000, 1000)  # as a new volume is
    make_machine(folder / "base", "trixie")
    environment = f"--env=PORT={free_port()} --env=PLANTS_TOKENS={TOKEN}"
    functions = f"""
        export BUILDAH_ISOLATION=chroot
        places="--storage-driver=overlay --root={folder}/storage --runroot={folder}/run"
        buildah() {{ command buildah $places "$@"; }}
        docker-build() {{ buildah build --pull=never --format=docker --network=host "$@"; }}
        docker-exec() {{ buildah run {environment} --volume={volume}:/data "$@"; }}
        docker-cp() {{ cp "$(buildah mount plants)${{1#plants:}}" "$2"; }}
        docker() {{ "docker-$@"; }}
    """
    yield lambda commands: ["bash", "-euc", f"{functions}\n{commands}"]
    subprocess.run(["umount", "-R", folder / "storage/overlay"])
    shutil.rmtree(folder)


def test_a_container_from_its_build_to_its_backup(serve, docker, tmp_path):
    """It is not root, its health check is true, and its plants are on the volume."""

    def run(commands: str, folder: Path = tmp_path) -> str:
        timeout = DOWNLOAD_PATIENCE
        return subprocess.check_output(docker(commands), cwd=folder, text=True, timeout=timeout)

    base = re.search("(?m)^FROM (.+)$", (ROOT / "deploy/Dockerfile").read_text())[1]
    (tmp_path / "Base").write_text("FROM scratch\nADD . /\nRUN python3 -m venv /usr/local")
    run(f"docker build -f Base -t docker.io/library/{base} buildah/base")
    run(block("sh", "docker build").splitlines()[0], ROOT)
    run("buildah from --pull-never --name plants localhost/plants")
    image = json.loads(run("buildah inspect --type=image plants"))["Docker"]["config"]
    health = f"docker exec plants {' '.join(map(quote, image['Healthcheck']['Test'][1:]))}"
    server = serve(command=docker(f"docker exec plants {' '.join(image['Cmd'])}"))
    assert server.post(MONSTERA)[0] == STORED
    (master,) = re.findall(r"\[(\d+)\] \[INFO\] Listening", server.err)
    assert os.stat(f"/proc/{master}").st_uid == 1000
    run(health)
    assert "('ok',)\n(1,)\n" in run(block("sh", "backup=plants-"))
    (backup,) = tmp_path.glob("plants-*.db")
    assert read_names(f"sqlite:///{backup}") == {7: "Monstera"}
    os.kill(int(master), signal.SIGTERM)
    assert server.wait() == 0
    run(f"! {health} 2>&-")
