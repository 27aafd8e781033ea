"""A Linux host as docs/deploy.md makes it: a booted Debian, on which the page's lines are typed.

The machine is a container of systemd-nspawn, with a network of its own. It takes root.
"""

import contextlib
import ctypes
import http.client
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import make_server

import pytest

from tests.ci.test_bare_machine import IGNORED
from tests.ci.test_docs import DOWNLOAD_PATIENCE, running_s3
from tests.conftest import names_in
from tests.support.debian import ENVIRONMENT, make_system_with, unpack
from tests.support.readme import PAGES, block
from tests.support.server import HEADERS, PATIENCE, ROOT, TOKEN, Writers, wait_until

INSTALL = block("sh", "apt-get install caddy")
BACKUP = block("sh", "cp /srv/plants/deploy/plants-backup")
RESTORE = block("sh", "systemctl stop plants")
DUMP = block("sh", "(set -a;")
UPGRADE = block("sh", "git -C /srv/plants pull")
CHECK = "/srv/plants/deploy/check"
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
SYSTEM = f"""
    echo 'APT::Get::Assume-Yes "true";' >/etc/apt/apt.conf.d/90yes
    apt-get install -qq openssh-server rsync systemd-sysv dbus
    {INSTALL.splitlines()[0]}
    echo '127.0.0.1 localhost' >/etc/hosts
"""


class Machine:
    """A booted Debian."""

    def __init__(self, root: Path, leader: int) -> None:
        """Its files are in `root`; `leader` is its first process."""
        self.root, self.leader = root, leader
        self.settings = ""  # those of the installation

    def run(self, commands: str, fails: bool = False) -> str:
        """Run what the page has for a shell of root's; return what that prints.

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

    def often(self, timer: str) -> None:
        """Let a timer elapse every two seconds."""
        folder = self.root / f"etc/systemd/system/{timer}.timer.d"
        folder.mkdir()
        often = "OnActiveSec=1\nOnUnitInactiveSec=2\nAccuracySec=100ms\n"
        (folder / "often.conf").write_text(f"[Timer]\nOnCalendar=\n{often}")
        self.run(f"systemctl daemon-reload && systemctl restart {timer}.timer")

    def post(self, number: int, name: str, token: str = TOKEN) -> int:
        """Send a plant to the service; return the status."""
        headers = {**HEADERS, "Authorization": f"Bearer {token}"}
        client = http.client.HTTPConnection("127.0.0.1", 8000, timeout=PATIENCE)
        with self.network(), contextlib.closing(client):
            client.request("POST", "/plants", json.dumps({"id": number, "name": name}), headers)
            return client.getresponse().status

    def stored(self) -> set[tuple[int, str]]:
        """Ids and names of the plants, as the page's line with `dump` shows them."""
        self.run(DUMP)
        lines = (self.root / "plants.jsonl").read_text().splitlines()
        return {(plant["id"], plant["name"]) for plant in map(json.loads, lines)}

    def backups(self) -> list[str]:
        """The names of the backups, the newest last."""
        return sorted(file.name for file in self.root.glob("var/lib/plants-backups/*"))


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    """A machine on which the service was installed as the page says, from a git repository."""
    folder = tmp_path_factory.mktemp("host")
    root = folder / "root"
    unpack(make_system_with(SYSTEM), root)
    make_repository(root / "srv/upstream")
    # Where pytest or `unshare` ends, all that was begun in its namespace ends.
    enter = ["setpriv", "--pdeathsig=KILL", "unshare", "--pid", "--fork", "--kill-child"]
    nspawn = ["--mount-proc", "systemd-nspawn", "--quiet", "--boot", f"--directory={root}"]
    options = ["--register=no", "--keep-unit", "--private-network", "--link-journal=no"]
    with (folder / "console").open("w") as console:
        process = subprocess.Popen(
            [*enter, *nspawn, *options, f"--machine=plants-{os.getpid()}"],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
    try:
        leader = wait_until(lambda: booted(process))
        machine = Machine(root, leader)
        machine.run("systemctl is-system-running --wait || true")
        machine.run(INSTALL.replace("ADDRESS", "/srv/upstream"))
        machine.settings = (root / "etc/plants.env").read_text()
        with machine.network():
            healthz = machine.run(block("sh", "systemctl enable --now plants"))
        assert '{"status": "ok"}' in healthz
        yield machine
    finally:
        process.kill()
        process.wait()
        wait_until(lambda: subprocess.call(["rm", "-rf", folder]) == 0)  # once nobody writes there


def booted(process: subprocess.Popen[bytes]) -> int | None:
    """The first process of a machine, below unshare and nspawn, if it takes commands."""
    assert process.poll() is None
    pid = process.pid
    with contextlib.suppress(FileNotFoundError, IndexError):  # nspawn's first child is another one
        for _ in range(2):
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        if Path(f"/proc/{pid}/comm").read_text() == "systemd\n":
            look = ["nsenter", f"--target={pid}", "--mount", "test", "-S", "/run/systemd/private"]
            return None if subprocess.call(look) else pid
    return None


def make_repository(folder: Path) -> None:
    """Make a repository with the commit before this one, if that is known, and the files of now."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    git = ["git", "-c", "safe.directory=*", *identity]
    subprocess.run([*git, "init", "--quiet", "--initial-branch=main", folder], check=True)
    archive = [*git, "-C", ROOT, "archive", "HEAD~"]
    before = subprocess.run(archive, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    subprocess.run(["tar", "-x", "-C", folder], input=before.stdout, stderr=subprocess.DEVNULL)
    if not (folder / "deploy/backup").exists():
        shutil.copytree(ROOT, folder, ignore=IGNORED, dirs_exist_ok=True)
    for message in ("before", "now"):
        subprocess.run([*git, "-C", folder, "add", "--all"], check=True)
        commit = ["commit", "--quiet", "--allow-empty", f"--message={message}"]
        subprocess.run([*git, "-C", folder, *commit], check=True)
        if message == "before":
            subprocess.run([*git, "-C", folder, "rm", "-r", "--quiet", "."], check=True)
            shutil.copytree(ROOT, folder, ignore=IGNORED, dirs_exist_ok=True)


@pytest.fixture
def host(machine) -> Machine:
    """The machine with the service as after its first start, and one more token: the tests'."""
    machine.run(
        "systemctl stop 'plants*' && systemctl reset-failed\n"
        "journalctl --quiet --rotate --vacuum-size=1\n"
        "rm -rf /var/lib/plants /var/lib/plants-backups /etc/systemd/system/plants*.d\n"
        "git -C /srv/plants reset --quiet --hard origin/main && systemctl daemon-reload"
    )
    (machine.root / "etc/plants.env").write_text(f"{machine.settings.strip()},{TOKEN}\n")
    machine.run("systemctl start plants")
    return machine


@pytest.fixture
def alerts(host) -> Iterator[list[str]]:
    """What a webhook gets, by the example of a command and the lines of the page."""
    received: list[str] = []

    def hook(environ: Any, start_response: Any) -> list[bytes]:
        received.append(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])).decode())
        start_response("204 No Content", [])
        return []

    with host.network():
        server = make_server("127.0.0.1", 0, hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    example = re.search("(?m)^#(ALERT_COMMAND='curl .*) https:.*'$", host.settings)[1]
    with (host.root / "etc/plants.env").open("a") as settings:
        settings.write(f"{example} http://127.0.0.1:{server.server_port}'\n")
    host.run(BACKUP + block("sh", "cp /srv/plants/deploy/plants-check"))
    wait_until(lambda: received)
    yield received
    host.run("systemctl stop plants-check.timer; umount --lazy /var/lib/plants || true")
    server.shutdown()
    server.server_close()


def test_the_service_runs_as_the_page_says(host):
    """As a user of its own, also after a boot. Only root reads the tokens. The log is there."""
    assert host.post(7, "Monstera") == 200
    (generated,) = re.findall("(?m)^PLANTS_TOKENS=(.+)$", host.settings)
    assert host.post(7, "Monstera", generated) == 200
    assert host.stored() == {(7, "Monstera")}
    assert host.run("systemctl is-enabled plants") == "enabled\n"
    assert host.run("stat -c %A%U /etc/plants.env") == "-rw-------root\n"
    assert host.run("stat -c %A%U /var/lib/plants") == "drwxr-x---plants\n"
    assert host.run("stat -c %U /proc/$(systemctl show -P MainPID plants)") == "plants\n"
    assert '"POST /plants" 200 ' in host.run("journalctl --unit plants")


def test_a_restart_an_upgrade_and_going_back_are_noticed_by_nobody(host):
    """Under load behind Caddy: no error, no connection refused, and each plant sent once."""
    go_back = re.search("(?s)To go back, run `(.*?)`", PAGES[ROOT / "docs/deploy.md"])[1]
    again = UPGRADE.partition("&&\n")[2]
    site = ":8080 {\n reverse_proxy 127.0.0.1:8000\n}\n"
    (host.root / "etc/caddy/Caddyfile").write_text(site)
    host.run(f"systemctl reload caddy; git -C /srv/plants reset --hard HEAD~; {again}")
    with contextlib.ExitStack() as stack:
        with host.network():
            clients = stack.enter_context(Writers(8080))
        for commands, version in ((UPGRADE, "now"), (f"{go_back} && {again}", "before")):
            assert clients.goes_on()
            host.run(commands)
            assert host.run("git -C /srv/plants log -1 --format=%s") == f"{version}\n"
        host.run("systemctl reload plants")
        for _ in range(3):
            assert clients.goes_on()
            host.run("systemctl restart plants")
        assert clients.goes_on()
    assert set(clients.answers) == {200} and not clients.failures
    assert host.stored() == set(clients.acknowledged.items())
    assert clients.answers[200] == len(clients.acknowledged)


def test_a_token_is_replaced(host):
    """In two steps, between which the log shows who uses the old one; and by no wrong one."""
    settings, new = host.root / "etc/plants.env", "new-token-0123456789"
    text = settings.read_text()
    restart, find = block("sh", "systemd-run"), block("sh", "journalctl --unit plants")
    both, only = f"web-2:{new}, web:{TOKEN}", f"web-2:{new}"
    for tokens, status in ((both, 200), (only, 401), ("short", 401)):
        settings.write_text(re.sub("(?m)^PLANTS_TOKENS=.*", f"PLANTS_TOKENS={tokens}", text))
        host.run(restart, fails=tokens == "short")
        assert (host.post(7, "Monstera", new), host.post(7, "Monstera", TOKEN)) == (200, status)
    (line,) = wait_until(lambda: host.run(find).splitlines())
    assert '"POST /plants" 200 ' in line


def test_backups_are_made_by_timer_and_by_cron(host):
    """The page's first is made at once, others when their time comes, by a user who may.

    They get to another machine by ssh, which here is the same.
    """
    assert host.post(7, "Monstera") == 200
    host.run(BACKUP)
    count = len(host.backups())
    host.often("plants-backup")
    wait_until(lambda: len(host.backups()) > count > 0)
    host.run("systemctl stop plants-backup.timer plants-backup; rm -r /var/lib/plants-backups")
    host.run(re.search("`(install -d .*)`", PAGES[ROOT / "docs/deploy.md"])[1])
    *_, user, command = block("", "MAILTO=root\n").strip().split(maxsplit=7)
    assert "%" not in command  # it would end there
    host.run(f"runuser -u {user} -- env -i PATH=/usr/bin:/bin sh -c '{command}'")
    (backup,) = host.backups()
    file = host.root / "var/lib/plants-backups" / backup
    assert names_in(file) == {(7, "Monstera")} and file.stat().st_mode & 0o777 == 0o600
    key = "rm -f .ssh/*; ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519; cp .ssh/*.pub"
    know = f"{key} .ssh/authorized_keys; ssh-keyscan localhost >.ssh/known_hosts"
    copy = block("sh", "rsync").replace("HOST.EXAMPLE.ORG", "localhost")
    with host.network():
        host.run(f"export HOME=/root; cd; mkdir -p .ssh; systemctl start ssh; {know}; {copy}")
    assert (host.root / "root/plants-backups" / backup).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("commands", "line"),
    [
        ("systemctl stop plants.socket plants", "FAILED  the service is inactive"),
        ("touch -d -26hours /var/lib/plants-backups/*", "FAILED  the newest backup is 26 hours"),
        (
            "mount -t tmpfs -o size=1M plants /var/lib/plants;"
            "head -c 1M /dev/zero >/var/lib/plants/full",
            "FAILED  0 % of the disk of /var/lib/plants is free",
        ),
        (
            "sed -i s/^PLANTS_TOKENS=.*/PLANTS_TOKENS=short/ /etc/plants.env;"
            "systemctl restart plants || until systemctl show plants | grep ts=3; do :; done",
            "FAILED  the service has ended by itself",
        ),
        (
            # Which ends before anybody has read what it printed.
            "rm /var/lib/plants/plants.db; systemctl kill --signal=STOP systemd-journald;"
            "systemctl start plants-backup || systemctl kill --signal=CONT systemd-journald",
            "plants-backup.service failed\n/srv/plants/deploy/backup /var/lib/plants/plants.db",
        ),
    ],
    ids=["a stopped service", "an old backup", "a full disk", "a crash loop", "a failed backup"],
)
def test_what_is_not_well_is_an_alert(host, alerts, commands, line):
    """From the timer, with the line that says so; before that, the check finds nothing."""
    with host.network():
        assert "FAILED" not in host.run(CHECK)
        host.run(commands)
        host.often("plants-check")
        wait_until(lambda: any(line in each for each in alerts))


def test_a_backup_is_restored_by_the_pages_lines(host):
    """The service goes on from there, also on a new host, where it never ran.

    Without a backup it stays stopped, and the plants stay.
    """
    stat = "stat -c %A%U%G /var/lib/plants/plants.db"
    assert host.post(7, "Monstera") == 200
    before = host.run(stat)
    assert "No such file" in host.run(RESTORE, fails=True)
    assert host.run("systemctl is-active plants", fails=True) == "inactive\n"
    host.run("systemctl start plants")
    host.run(BACKUP)
    assert host.post(8, "Fern") == 200
    assert "restored: 1 plants from /var/lib/plants-backups/" in host.run(RESTORE)
    assert host.stored() == {(7, "Monstera")} and host.run(stat) == before
    assert (host.post(7, "another"), host.post(8, "another")) == (409, 200)
    host.run("systemctl stop plants.socket plants; rm -r /var/lib/plants")
    host.run(re.search("`(install -d .* /var/lib/plants)`", PAGES[ROOT / "docs/deploy.md"])[1])
    host.run(RESTORE)
    assert (host.post(7, "another"), host.post(8, "another")) == (409, 200)


def test_a_host_of_an_older_page_is_upgraded(host):
    """Its unit had a dynamic user, whose files systemd gives to the new one, and no socket."""
    unit = "/etc/systemd/system/plants.service"
    host.run(f"systemctl stop plants.socket plants; sed -i s/^User=.*/DynamicUser=yes/ {unit}")
    host.run(f"rm {unit[:-7]}socket; sed -i /^Requires=/d {unit}; userdel plants")
    host.run("rm -r /var/lib/plants; systemctl daemon-reload; systemctl start plants")
    assert host.post(7, "Monstera") == 200
    useradd, copy = (re.search(f"(?m)^{word} .*$", INSTALL)[0] for word in ("useradd", "cp"))
    host.run(f"systemctl stop plants\n{useradd}\n{copy}\nsystemctl daemon-reload")
    host.run("systemctl start plants")
    assert host.run("stat -c %U /var/lib/plants/plants.db") == "plants\n"
    assert host.run("systemctl is-active plants.socket") == "active\n"
    assert (host.post(7, "another"), host.post(8, "Fern")) == (409, 200)


def test_litestream_under_systemd(host):
    """It restores a lost file from S3, is started again after kill -9, and takes no SIGHUP."""
    keys = "LITESTREAM_ACCESS_KEY_ID=key\nLITESTREAM_SECRET_ACCESS_KEY=secret\n"
    commands = block("sh", "/srv/plants/.venv/bin/pip install litestream").splitlines()
    host.run(commands.pop(0))  # outside of its network
    with host.network(), running_s3() as url:
        with (host.root / "etc/plants.env").open("a") as settings:
            settings.write(f"REPLICA_URL='{url}'\n{keys}")
        host.run("\n".join(commands))
        with Writers(8000) as clients:
            assert clients.goes_on()
            host.run("systemctl reload plants", fails=True)
            assert clients.goes_on()
            host.run("systemctl kill --signal=KILL plants")
            assert clients.goes_on()
        host.run("systemctl stop plants && rm -r /var/lib/plants && systemctl start plants")
        assert host.post(0, "another") == 409
        host.run("systemctl stop plants")
    assert host.stored() >= clients.acknowledged.items()


def test_a_copy_that_stops_is_an_alert(host, alerts):
    """At the start, where a line of the unit is missing; later, where only the check sees it."""
    install, *commands = block("sh", "/srv/plants/.venv/bin/pip install litestream").splitlines()
    host.run(install)
    with (host.root / "etc/plants.env").open("a") as settings:
        settings.write("REPLICA_URL=file:///mnt/copy\n")
    folder = re.search("`(install -d .* /mnt/copy)`", PAGES[ROOT / "docs/deploy.md"])[1]
    host.run("\n".join([folder, *commands]), fails=True)
    assert "plants can't write to /mnt/copy" in host.run("journalctl --unit plants --since -10s")
    host.run("sed -i 's/^#ReadWritePaths=/ReadWritePaths=/' /etc/systemd/system/plants.service.d/*")
    host.run("systemctl daemon-reload; systemctl restart plants")
    with host.network():
        assert "ok      Litestream's copy is up to date" in host.run(CHECK)
    host.run("chown -R root: /mnt/copy; chmod -R a+rX /mnt/copy")
    host.run("systemctl start plants-check", fails=True)
    wait_until(lambda: "FAILED  Litestream's copy has nothing of the last" in alerts[-1])
    host.run("chown -R plants: /mnt/copy")  # else a stop takes 30 s, in which Litestream tries


def test_other_hosts_reach_it_through_caddy(host):
    """Encrypted, by a host name that gets a certificate of Caddy's own, and below a path.

    The request id leads from the service's log to the client's address in Caddy's.
    """
    commands = block("sh", "sed s/plants.example.org")
    host.run(commands.replace("HOST.EXAMPLE.ORG", "plants.localhost"))
    plant = f"""-H 'Authorization: Bearer {TOKEN}' --json '{{"id": 7, "name": "Monstera"}}'"""
    curl = f"curl --silent --insecure --include {plant} https://plants.localhost/plants || true"
    answer = r'(?is)x-request-id: (\S+).*\n\n{"name": "Monstera"}\n$'
    with host.network():
        request_id = wait_until(lambda: re.search(answer, host.run(curl)))[1]
    wait_until(lambda: f" {request_id}\n" in host.run("journalctl --unit plants"))
    logged = f'"remote_ip":"127.0.0.1".*{request_id}'
    wait_until(lambda: re.search(logged, host.run("journalctl --unit caddy")))
    caddyfile = host.root / "etc/caddy/Caddyfile"
    proxy = "reverse_proxy 127.0.0.1:8000\n"
    caddyfile.write_text(caddyfile.read_text().replace(proxy, block("", "handle_path")))
    with host.network():
        host.run("systemctl reload caddy")
        assert re.search(answer, host.run(curl.replace("/plants ", "/store/plants ")))
