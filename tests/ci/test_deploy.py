"""Types the commands of docs/deploy.md, and those of docs/data.md for a Linux host, as they are.

The files of deploy/ are used unchanged. The hosting platforms themselves are not tested.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

import pytest
from gunicorn.config import KNOWN_SETTINGS

from tests.ci.test_bare_machine import IGNORED, make_machine
from tests.support.pages import PAGES, block, command, table
from tests.support.server import ROOT, STORED, TOKEN, Server, free_port, receive, wait_until
from tests.support.storage import lock_held, read_names
from tests.support.wire import MONSTERA, Writers, answers, post

*INSTALL, START, CHECK = block("sh", "apt-get install caddy").splitlines()
PACKAGES = INSTALL[0].split()[2:]  # The machine reaches no mirror, so it is made with them.
CHANGE = block("sh", "cd /srv/plants && systemd-run")
UPGRADE = block("sh", "cd /srv/plants && git log")
RESTART = block("sh", "systemctl reset-failed")
STOP = command("systemctl stop plants.socket plants")
RESTORE = block("sh", "backup=$(ls -t /var/lib") + block("sh", "sqlite3 -readonly")
RESTORE += block("sh", "systemctl stop plants.socket plants && cd")
BUILD, MAKE_TOKEN, *RUN_IMAGE = block("sh", "docker build").splitlines()
CHECK_IMAGE = block("sh", "docker run --rm").strip()
DOWNLOAD_PATIENCE = 300  # seconds for a command, which may download and install packages
LIBC = ctypes.CDLL(None, use_errno=True)
UPSTREAM = """
    systemctl is-system-running --wait || true
    cd /srv/upstream && git init --quiet --initial-branch=main && git add --all
    export GIT_AUTHOR_NAME=test GIT_COMMITTER_NAME=test EMAIL=test@localhost
    for version in before now; do git commit --quiet --allow-empty -m $version; done
"""
# A second site, without encryption, for the clients of these tests.
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
    """Return the process id of the child that is systemd, or 0 if there is none yet."""
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
    options += [f"--machine=plants-{os.getpid()}", "--kill-signal=SIGKILL"]  # So it ends at once.
    boot = ["setpriv", "--pdeathsig=TERM", "systemd-nspawn", "-b", f"-D{root}", *options]
    null = subprocess.DEVNULL
    nspawn = subprocess.Popen(boot, stdin=null, stdout=null, stderr=null)
    try:
        machine = Machine(root, wait_until(lambda: find_systemd(nspawn.pid)))
        machine.run(f"until test -S /run/systemd/private; do sleep 0.1; done\n{UPSTREAM}")
        install = "\n".join(["umask 27", *INSTALL, START]).replace("ADDRESS", "/srv/upstream")
        machine.run(install.replace("HOST.EXAMPLE.ORG", "plants.localhost"))
        machine.run(f"echo {quote(SITE)} >>/etc/caddy/Caddyfile; systemctl reload caddy")
        yield machine
    finally:
        nspawn.terminate()
        nspawn.wait()
        shutil.rmtree(root)


@pytest.fixture
def host(machine) -> Iterator[Machine]:
    """The machine, with a new service that has one more token. The test is in its network."""
    machine.run(
        f"{STOP}; cp -n /etc/plants.env /root\n"
        "rm -rf /var/lib/plants*; git -C /srv/plants reset --quiet --hard origin/main\n"
        f"sed '/^PLANTS_TOKENS=/ s/$/,{TOKEN}/' /root/plants.env >/etc/plants.env\n{RESTART}"
    )
    with open("/proc/thread-self/ns/net") as own, open(f"/proc/{machine.leader}/ns/net") as new:
        assert LIBC.setns(new.fileno(), 0) == 0
        yield machine
        assert LIBC.setns(own.fileno(), 0) == 0


def test_the_service_runs_as_the_page_says(host):
    """It has a user of its own and starts at a boot. Only root can read the tokens."""
    assert '{"status": "ok"}' in host.run(CHECK)
    assert host.run("systemctl is-enabled plants") == "enabled\n"
    assert host.run("stat -c %A%U /etc/plants.env") == "-rw-------root\n"
    assert host.run("stat -c %A%U /var/lib/plants") == "drwxr-x---plants\n"
    assert host.run("stat -c %U /proc/$(systemctl show -P MainPID plants)") == "plants\n"
    assert host.run("systemd-analyze verify --man=no plants.service plants.socket") == ""


def test_other_hosts_reach_it_through_caddy(host):
    """The connection is encrypted. A request id of the service's log is in Caddy's log, too."""
    (token,) = re.findall("PLANTS_TOKENS=(.+),", host.run("cat /etc/plants.env"))
    plant = f"-H 'Authorization: Bearer {token}' --json '{json.dumps(MONSTERA)}'"
    curl = f"curl --silent --insecure --include {plant} https://plants.localhost/plants || true"
    answer = r'(?is)x-request-id: (\S+).*\n\n{"name": "Monstera", .*}\n$'
    request_id = wait_until(lambda: re.search(answer, host.run(curl)))[1]
    complaint = block("sh", "journalctl --unit plants --output cat | grep ID")
    given = {"ID": request_id, "05:30 UTC": "-1h", "05:40 UTC": "now", "ADDRESS": "127.0.0.1"}
    complaint = re.sub("|".join(given), lambda found: given[found[0]], complaint)
    logged = f'"id": "{request_id}"(?s:.*)"remote_ip":"127.0.0.1".*{request_id}'
    wait_until(lambda: re.search(logged, host.run(f"set +e\n{complaint}true")))
    with socket.create_connection(("127.0.0.1", 8080)) as client:  # It half-closes after sending.
        client.sendall(post(MONSTERA))
        client.shutdown(socket.SHUT_WR)
        assert answers(receive(client)) == [(STORED, {"name": "Monstera", "tag": "indoor"})]


def test_clients_notice_no_restart_no_upgrade_and_no_rollback(host):
    """Under load behind Caddy, no request fails, and no client has to send a plant twice."""
    host.run(f"git -C /srv/plants reset --hard HEAD~; {RESTART}")
    with Writers(8080) as clients:
        clients.wait_for_more()
        (commit,) = re.findall("(?m)^[0-9a-f]{40}$", host.run(UPGRADE))
        back = UPGRADE.replace("git pull", command("git reset --hard").replace("COMMIT", commit))
        for commands, version in ((RESTART, "now"), (back, "before")):
            clients.wait_for_more()
            host.run(commands)
            assert host.run("git -C /srv/plants log -1 --format=%s") == f"{version}\n"
        clients.wait_for_more()
    assert [*clients.answers] == [STORED] and not clients.failures
    assert read_names(host.url) == clients.acknowledged
    assert clients.answers[200] == len(clients.acknowledged)


def test_a_wrong_setting_is_refused_before_anything_stops(host):
    """A change of a setting and an upgrade print what is wrong. The service goes on serving.

    systemd does not give up after five good changes in a row.
    """
    process = host.run("systemctl show -P MainPID plants")
    host.run("sed -i 's/^PLANTS_TOKENS=/PLANTS_TOKENS=web:/' /etc/plants.env")
    for commands in (CHANGE, UPGRADE):
        assert "PLANTS_TOKENS must be" in host.run(commands, fails=True)
    assert host.run("systemctl show -P MainPID plants") == process
    assert host.post(MONSTERA)[0] == STORED
    host.run("sed -i 's/web://' /etc/plants.env")
    for commands in (*[CHANGE] * 5, UPGRADE):
        assert "plants are stored in" in host.run(commands)
        assert host.run("systemctl show -P MainPID plants") != process
        process = host.run("systemctl show -P MainPID plants")


def test_the_log_tells_who_still_uses_a_token(host):
    """Two tokens both work. The page's commands find the requests with one, and whose they are."""
    new = host.run(command("python3 -c 'import secrets; print(")).strip()
    host.run(f"sed -i '/^PLANTS_TOKENS=/ s/$/,{new}/' /etc/plants.env; {CHANGE}")
    assert [host.post(MONSTERA, token)[0] for token in (TOKEN, new)] == [STORED] * 2
    search = block("sh", "journalctl --unit plants --since -1d").replace("OLD", new)
    (line,) = wait_until(lambda: host.run(f"set +e\n{search}true").splitlines())
    digits = host.run(command("printf %s OLD").replace("OLD", new)).strip()
    assert json.loads(line)["token"] == digits
    plant = f"-H 'Authorization: Bearer {new}' --json '{json.dumps(MONSTERA)}'"
    host.run(f"curl --silent --fail {plant} http://127.0.0.1:8080/plants")
    count = block("sh", "journalctl --unit caddy --since -1d").replace("OLD", new)
    counted = '1 "remote_ip":"127.0.0.1"'
    wait_until(lambda: host.run(f"set +e\n{count}true").strip() == counted)


def test_a_line_of_the_log_is_as_the_page_shows_it(host):
    """It has the same members in the same order, and the same reason."""
    page = PAGES[ROOT / "docs/deploy.md"]
    shown = json.loads(re.search('(?m)^{"time".*$', page)[0])
    assert [row[0].strip("`") for row in table("member")] == list(shown)
    host.post({"id": "7"})
    search = "journalctl --unit plants --output cat | grep 'id: must' || true"
    lines = wait_until(lambda: host.run(search))
    logged = json.loads(lines.splitlines()[-1])
    assert list(logged) == list(shown)
    for member in ("client", "request", "status", "reason"):
        assert logged[member] == shown[member]


def test_fly_asks_whether_the_process_answers():
    """Its check must not take the machine away while the database is unavailable."""
    (check,) = tomllib.loads((ROOT / "deploy/fly.toml").read_text())["http_service"]["checks"]
    assert check["path"] == "/livez"


def test_the_page_names_every_setting_of_gunicorn():
    """Each one that has a flag is in the table, and each flag in the table is one of gunicorn's."""
    named = set(re.findall(r"--[\w-]+", " ".join(row[0] for row in table("setting"))))
    flags = [set(setting.cli) for setting in KNOWN_SETTINGS if setting.cli]
    assert [each for each in flags if not each & named] == []
    assert named <= set().union(*flags)


def test_what_to_watch_can_be_seen(host):
    """The page's commands count POSTs, 503s and 401s, and list backups and failed units."""
    host.run("cd /var/lib; mkdir plants-backups; touch plants-backups/plants-1.db")
    host.run("touch -d 2025-01-01 /var/lib/plants-backups/plants-2.db")
    commands = "set +e\n" + block("sh", "journalctl --unit plants --since -5min")

    def look() -> list[int]:
        return [int(line) for line in host.run(commands).splitlines()[:3]]

    host.post(MONSTERA, "wrong-token-0123456789")
    wait_until(lambda: look()[2])
    before = look()
    host.post(MONSTERA)
    with lock_held(host.database):
        assert host.post(MONSTERA)[0] == 503
    wait_until(lambda: look() == [before[0] + 2, before[1] + 1, before[2]])
    seen = host.run(commands)
    assert "plants-1.db" in seen and "plants-2.db" not in seen
    assert "Filesystem" in seen and "0 loaded units" in seen


def test_a_start_that_cannot_succeed_ends_in_a_refused_port(host):
    """Waiting connections end, and new ones are refused, until the unit is started again."""
    host.run(STOP)
    curl = "curl --silent --show-error --max-time 120 http://127.0.0.1:8000/healthz"
    with lock_held(host.database):  # Of all failing starts, this one takes longest.
        host.run(RESTART, fails=True)
        assert "Connection reset" in host.run(curl, fails=True)
        assert "Failed to connect" in host.run(curl, fails=True)
    assert host.run("systemctl is-failed plants.service plants.socket") == "failed\n" * 2
    assert "the storage is busy or hangs" in host.run(command("journalctl --unit 'plants.*'"))
    new = "new-token-0123456789"
    host.run(f"sed -i '/^PLANTS_TOKENS=/ s/$/,{new}/' /etc/plants.env; {RESTART}")
    assert [host.post(MONSTERA, token)[0] for token in (TOKEN, new)] == [STORED] * 2


def test_a_backup_is_made_by_cron_and_restored(host):
    """A backup under load is sound. A restored one has no old -wal beside it."""
    host.run(block("sh", "install -d -o plants"))
    old = "touch -d 2025-01-$day plants-2025-01-$day.db"
    host.run(f"cd /var/lib/plants-backups; for day in {{10..29}}; do {old}; done; chown plants *")
    with Writers(8000) as clients:
        clients.wait_for_more()
        acknowledged = clients.acknowledged.copy()
        (line,) = host.run("cat /etc/cron.d/plants-backup").splitlines()[1:]
        user, commands = line.split(maxsplit=6)[5:]
        assert "%" not in commands  # Cron would end the command there.
        cron = f"runuser -u {user} -- env -i PATH=/usr/bin:/bin sh -c {quote(commands)}"
        assert host.run(cron) == ""  # Cron would mail any output.
        names = host.run("cd /var/lib/plants-backups; stat -c %A%U *").splitlines()
        assert len(names) == 14
        assert names[-1] == "-rw-------plants"
        clients.wait_for_more()
    host.run(f"systemctl kill --signal=KILL plants; {STOP}")
    assert host.run(RESTORE).startswith("ok\n")
    assert acknowledged.items() <= (stored := read_names(host.url)).items()
    assert len(stored) < len(clients.acknowledged)
    (left,) = host.database.parent.glob("replaced-*/plants.db-wal")
    assert left.stat().st_size
    for number, status in ((next(iter(acknowledged)), 409), (5, STORED)):
        assert host.post({"id": number, "name": "another"})[0] == status


def test_a_lost_host_is_replaced(host):
    """A new one without a database gets a backup before its first start, and has its plants."""
    host.post(MONSTERA)
    host.run(f"{STOP}; systemctl disable plants; mkdir /var/lib/plants-backups")
    os.rename(host.database, host.database.parent.parent / "plants-backups/plants-1.db")
    host.run("rm -r /var/lib/plants")
    host.run(command("install -d -o plants -g plants -m 750 /var/lib/plants"))
    assert host.run(RESTORE).startswith("ok\n1\n")
    assert '{"status": "ok"}' in host.run(f"{START}\n{CHECK}")
    assert host.run("systemctl is-enabled plants") == "enabled\n"
    assert host.post({"id": 7, "name": "another"})[0] == 409


@pytest.fixture(scope="module")
def docker(tmp_path_factory) -> Iterator[Callable[..., list[str]]]:
    """A function that makes a command line of Docker's commands. buildah runs in place of Docker.

    The page's image is built already. A container gets a volume and, if given, another user id.
    """
    folder = tmp_path_factory.mktemp("buildah")
    make_machine(folder / "base", "trixie")
    functions = f"""
        export BUILDAH_ISOLATION=chroot
        places="--storage-driver=overlay --root={folder}/storage --runroot={folder}/run"
        buildah() {{ command buildah $places "$@"; }}
        docker-build() {{ buildah build --pull=never --format=docker --network=host "$@"; }}
        docker-exec() {{ buildah run $options "$@"; }}
        docker-run() {{ while [[ $1 = -* ]]; do shift; done; docker-exec "$@"; }}
        docker-cp() {{ cp "$(buildah mount plants)${{1#plants:}}" "$2"; }}
        docker() {{ "docker-$@"; }}
    """
    environment = f"--env=PORT={free_port()} --env=PLANTS_TOKENS={TOKEN}"

    def make(commands: str, volume: Path | None = None, user: str = "") -> list[str]:
        options = f"{environment} --volume={volume}:/data {user and f'--user={user}'}"
        return ["bash", "-euc", f"options='{options}'\n{functions}\n{commands}"]

    base = re.search("(?m)^FROM (.+)$", (ROOT / "deploy/Dockerfile").read_text())[1]
    (folder / "Base").write_text("FROM scratch\nADD . /\nRUN python3 -m venv /usr/local")
    build = f"docker build -f {folder}/Base -t docker.io/library/{base} {folder}/base\n"
    build += BUILD
    try:
        subprocess.run(make(build), cwd=ROOT, timeout=DOWNLOAD_PATIENCE, check=True)
        yield make
    finally:
        subprocess.run(["umount", "-R", folder / "storage/overlay"])
        shutil.rmtree(folder)


@pytest.mark.parametrize("user", ["", "1000650000:0"], ids=["its own user", "as on OpenShift"])
def test_a_container_starts_stores_plants_and_is_backed_up(serve, docker, tmp_path, user):
    """It works as its own user and, as on OpenShift, under any user id with group 0.

    Its health check passes while the database is gone, and fails once the service has ended.
    """
    (volume := tmp_path / "volume").mkdir()

    def run(commands: str) -> str:
        line, timeout = docker(commands, volume, user), DOWNLOAD_PATIENCE
        return subprocess.check_output(line, cwd=tmp_path, text=True, timeout=timeout)

    run("buildah rm --all; buildah from --pull-never --name plants localhost/plants")
    data = os.stat(f"{run('buildah mount plants').strip()}/data")
    os.chown(volume, data.st_uid, data.st_gid)  # A new volume begins as the image's folder.
    volume.chmod(data.st_mode)
    image = json.loads(run("buildah inspect --type=image plants"))["Docker"]["config"]
    check = " ".join(map(quote, image["Healthcheck"]["Test"][1:]))
    health = f"docker exec --env=http_proxy=http://127.0.0.1:9 plants {check}"  # No proxy is there.
    run(MAKE_TOKEN)
    assert re.fullmatch(r"PLANTS_TOKENS=\S{43}\n", (tmp_path / ".env").read_text())
    # The container stays in the foreground.
    server = serve(command=docker(" ".join(["\n".join(RUN_IMAGE), *image["Cmd"]]), volume, user))
    assert server.post(MONSTERA)[0] == STORED
    (master,) = re.findall(r"\[(\d+)\] \[INFO\] Listening", server.err)
    assert os.stat(f"/proc/{master}").st_uid == int((user or "1000").split(":")[0])
    assert "plants are stored" in run(f"{CHECK_IMAGE} 2>&1")
    assert "('ok',)\n(1,)\n" in run(block("sh", "backup=plants-"))
    (backup,) = tmp_path.glob("plants-*.db")
    assert read_names(f"sqlite:///{backup}") == {7: "Monstera"}
    run(health)
    (volume / "plants.db").unlink()
    wait_until(lambda: server.health() == 503)
    run(health)
    os.kill(int(master), signal.SIGTERM)
    assert server.wait() == 0
    run(f"! {health} 2>&-")
