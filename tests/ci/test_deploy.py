"""Types the commands of docs/host.md, docs/operate.md and docs/container.md (by buildah).

The files of deploy/ are used unchanged. The hosting platforms themselves are not tested.
"""

import ctypes
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

import pytest
from gunicorn.config import KNOWN_SETTINGS

from tests.ci.test_bare_machine import IGNORED, make_machine
from tests.support.pages import PAGES, block, command, table
from tests.support.server import (
    HEADERS,
    PATIENCE,
    ROOT,
    STORED,
    TOKEN,
    Server,
    free_port,
    receive,
    wait_until,
)
from tests.support.storage import lock_held, read_names
from tests.support.wire import MONSTERA, Writers, answers, post

*INSTALL, START, CHECK = block("sh", "apt-get install --yes caddy").splitlines()
PACKAGES = INSTALL[0].split()[3:]  # The machine reaches no mirror, so it is made with them.
STORE = block("sh", "(. /etc/plants.env && echo")
CHANGE = block("sh", "cd /srv/plants && systemd-run")
BACK_UP = block("sh", "systemctl start plants-backup && git")
UPGRADE = block("sh", "cd /srv/plants && umask 22 && git pull")
RESTART = block("sh", "systemctl reset-failed")
STOP = command("systemctl stop plants.socket plants")
TOKENS = block("sh", "(. /etc/plants.env; for token")
SHELL = command("cd /srv/plants; . .venv/bin/activate")  # for the programs of deploy/
BACKUP = "/var/lib/plants/backups/plants-2026-11-28-030000.db"  # the page's example
BACK_UP_BY_HAND = block("sh", "python deploy/backup.py").strip()
RESTORE = f"{SHELL}\n{block('sh', f'python deploy/restore.py {BACKUP}')}"
BUILD, MAKE_TOKEN, *RUN_IMAGE = block("sh", "docker build").splitlines()
NEW_CONTAINER = "buildah rm --all; buildah from --pull-never --name plants localhost/plants"
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
        self.root, self.leader = root, leader
        self.database = root / "var/lib/plants/plants.db"
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


def fill_in(*lines: str) -> str:
    """Return lines of the page with the test's own address and name in place of the page's."""
    text = "\n".join(lines).replace("ADDRESS", "/srv/upstream")
    return text.replace("HOST.EXAMPLE.ORG", "plants.localhost")


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
        machine.run(fill_in("umask 27", *INSTALL, START))
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
        f"{STOP}; systemctl reset-failed 'plants*'; cp -n /etc/plants.env /root\n"
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


def test_the_installation_overwrites_nothing_if_it_is_run_again(host):
    """Settings, tokens, other sites of Caddy and the plants stay. The service goes on."""
    host.run("echo WEB_CONCURRENCY=3 >>/etc/plants.env")
    files = "cat /etc/plants.env /etc/caddy/Caddyfile"
    before = host.run(files)
    assert host.post(MONSTERA)[0] == STORED
    shell = "set +e\n" + fill_in(*INSTALL, START)  # The user and the clone are there already.
    said = host.run(shell)
    assert "user 'plants' already exists" in said and "'/srv/plants' already exists" in said
    assert host.run(files) == before
    assert host.post({**MONSTERA, "name": "another"})[0] == 409


def test_caddy_serves_what_it_served_before(host):
    """Debian's page, which its Caddyfile has before the installation, is still there."""
    curl = "curl --silent --output /dev/null --write-out '%{http_code}'"
    assert host.run(f"{curl} http://127.0.0.1/") == "200"
    assert host.run(f"{curl} http://plants.localhost/") == "308"


def test_other_hosts_reach_it_through_caddy(host):
    """The connection is encrypted. A request id of the service's log is in Caddy's log, too.

    `forwarded` is the client's address, even if the client has sent another one.
    """
    curl = "curl --silent --insecure --include -H 'X-Forwarded-For: 203.0.113.7' "
    store = fill_in("set +e", STORE.replace("curl ", curl))
    answer = r'(?is)x-request-id: (\S+).*\n\n{"name": "Monstera", .*}\n7\|Monstera\|indoor\n$'
    request_id = wait_until(lambda: re.search(answer, host.run(store)))[1]
    complaint = block("sh", "journalctl --unit plants --output cat | grep ID")
    given = {"ID": request_id, "05:30 UTC": "-1h", "05:40 UTC": "now", "ADDRESS": "127.0.0.1"}
    complaint = re.sub("|".join(given), lambda found: given[found[0]], complaint)
    line = f'(?m)^{{.*"id": "{request_id}", "forwarded": "127.0.0.1".*$'
    logged = f'{line}(?s:.*)"remote_ip":"127.0.0.1".*{request_id}'
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
        (date, commit) = host.run(BACK_UP).split()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        host.run(UPGRADE)
        assert host.run("git -C /srv/plants log -1 --format=%s") == "now\n"
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


def test_a_mistyped_database_is_refused_before_anything_stops(host):
    """A change of a setting and an upgrade make no empty file. The service goes on serving."""
    process = host.run("systemctl show -P MainPID plants")
    assert host.post(MONSTERA)[0] == STORED
    host.run("sed -i /^DATABASE_URL=/s/plants.db/plant.db/ /etc/plants.env")
    for commands in (CHANGE, UPGRADE):
        assert "/var/lib/plants/plant.db" in host.run(commands, fails=True)
    assert not host.database.with_name("plant.db").exists()
    assert host.run("systemctl show -P MainPID plants") == process
    assert host.post({**MONSTERA, "name": "another"})[0] == 409


def test_the_service_in_the_folder_of_the_readme_is_upgraded(host):
    """The page's lines copy the plants, get the new code and check that it starts with them."""
    host.run("rm -rf /root/plants; git clone --quiet /srv/upstream /root/plants")
    host.run("cd /root/plants; git reset --quiet --hard HEAD~; ln -s /srv/plants/.venv .")
    host.run(f"echo PLANTS_TOKENS={TOKEN} >/root/plants/.env")
    start = "cd /root/plants; PLANTS_TOKENS=$(seq -s - 9) .venv/bin/python start.py"
    assert "which is new" in host.run(start)
    upgrade = block("sh", "(set -ae; . ./.env; python3")
    said = host.run(f"cd /root/plants\n{upgrade}")
    assert "plants are stored in" in said and "which is new" not in said
    assert host.run("git -C /root/plants log -1 --format=%s") == "now\n"
    assert host.run("ls /root/plants/backups").startswith("plants-")
    host.run("rm /root/plants/plants.db*")
    assert "plants are stored in" not in host.run(f"cd /root/plants\n{upgrade}", fails=True)


def test_the_log_tells_who_still_uses_a_token(host):
    """Two tokens both work once the service is restarted. The page's commands tell them apart."""
    new = host.run(command("python3 -c 'import secrets; print(")).strip()
    host.run(f"sed -i '/^PLANTS_TOKENS=/ s/$/,{new}/' /etc/plants.env")
    (*_, token, added) = [line.split() for line in host.run(TOKENS).splitlines()]
    assert (token[1], added[1]) == ("415", "401")
    host.run(CHANGE)
    lines = [line.split() for line in host.run(TOKENS).splitlines()]
    assert lines[-2:] == [[token[0], "415"], [added[0], "415"]]
    digits = command("sha256sum | cut")
    assert host.run(f"printf %s {new} | {digits}").strip() == added[0]
    plant = f"-H 'Authorization: Bearer {new}' --json '{json.dumps(MONSTERA)}'"
    host.run(f"curl --silent --fail {plant} http://127.0.0.1:8080/plants")
    count = block("sh", "journalctl --unit plants --since -1d").replace("DIGITS", added[0])
    # The other requests are those of TOKENS, without Caddy and so without `forwarded`.
    wait_until(lambda: host.run(f"set +e\n{count}").split() == ["2", "127.0.0.1"])


def test_a_line_of_the_log_is_as_the_page_shows_it(host):
    """It has the same members in the same order, and the same reason."""
    page = PAGES[ROOT / "docs/operate.md"]
    shown = json.loads(re.search('(?m)^{"time".*$', page)[0])
    assert [row[0].strip("`") for row in table("member")] == list(shown)
    host.request("POST", "/plants", '{"id": "7"}', {**HEADERS, "X-Forwarded-For": "203.0.113.7"})
    search = "journalctl --unit plants --output cat | grep 'id: must' || true"
    lines = wait_until(lambda: host.run(search))
    logged = json.loads(lines.splitlines()[-1])
    assert list(logged) == list(shown)
    for member in ("client", "request", "status", "forwarded", "reason"):
        assert logged[member] == shown[member]


def test_the_page_names_every_setting_of_gunicorn():
    """Each one that has a flag is in the table, and each flag in the table is one of gunicorn's."""
    named = set(re.findall(r"--[\w-]+", " ".join(row[0] for row in table("setting"))))
    flags = [set(setting.cli) for setting in KNOWN_SETTINGS if setting.cli]
    assert [each for each in flags if not each & named] == []
    assert named <= set().union(*flags)


def test_the_page_names_the_settings_that_are_refused(monkeypatch):
    """They are those that gunicorn.conf.py refuses with the service's own worker."""
    monkeypatch.setenv("PLANTS_TOKENS", TOKEN)  # Otherwise gunicorn.conf.py makes one.
    names = runpy.run_path(str(ROOT / "gunicorn.conf.py"))["UNSUPPORTED"]
    refused = [row[0] for row in table("setting") if row[1].startswith("is refused")]
    assert re.findall(r"--[\w-]+", " ".join(refused)) == [
        f"--{name.replace('_', '-')}" for name in names
    ]


def test_what_to_watch_can_be_seen(host):
    """The page's commands list failed units and backups, and count requests, errors and 401s."""
    host.run(BACK_UP)
    host.run("cd /var/lib/plants/backups; touch -d 2025-01-01 plants-2025-01-01-030000.db")
    watch = "set +e\n" + block("sh", "systemctl list-units --failed")
    minutes = block("sh", "journalctl --unit plants --since -15min")

    def look() -> list[int]:
        """Count requests, errors and 401s."""
        line = r"(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d  (\d+) requests  (\d+) errors  99 %: [\d.]+ s$"
        found = re.findall(line, host.run(minutes))
        counts = [sum(map(int, column)) for column in zip(*found, strict=True)]
        return [*counts, int(host.run(watch).splitlines()[-1])]

    host.post(MONSTERA, "wrong-token-0123456789")
    wait_until(lambda: look()[2:] and look()[2])
    before = look()
    host.post(MONSTERA)
    with lock_held(host.database):
        assert host.post(MONSTERA)[0] == 503
    wait_until(lambda: look() == [before[0] + 2, before[1] + 1, before[2]])
    seen = host.run(watch)
    assert re.search(r"/plants-20\S+\.db", seen) and "plants-2025-01-01-030000.db" not in seen
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


def test_a_backup_is_made_by_the_timer_and_restored(host):
    """It is intact even though clients are writing. It can be restored while they go on."""
    timer = json.loads(host.run("systemctl list-timers --output=json plants-backup.timer"))
    assert [each["activates"] for each in timer] == ["plants-backup.service"]
    assert host.run("systemctl is-enabled plants-backup.timer") == "enabled\n"
    with Writers(8000) as clients:
        clients.wait_for_more()
        host.run("systemctl start plants-backup")
        older = "for day in {10..29}; do cp -p $first plants-2025-01-$day-030000.db; done"
        host.run(f"cd /var/lib/plants/backups; first=$(ls); {older}")
        acknowledged = clients.acknowledged.copy()
        host.run("systemctl start plants-backup")
        names = host.run("cd /var/lib/plants/backups; stat -c %A%U%n *").splitlines()
        assert len(names) == 14
        assert all(re.match("-rw-------plantsplants-20", name) for name in names)
        clients.wait_for_more()
        newest = f"/var/lib/plants/backups/{names[-1].removeprefix('-rw-------plants')}"
        assert " plants of the old file were added" in host.run(RESTORE.replace(BACKUP, newest))
        host.run(RESTART)
        clients.wait_for_more()
    assert acknowledged.items() <= read_names(f"sqlite:///{host.root}{newest}").items()
    assert read_names(host.url) == clients.acknowledged


def test_a_failed_backup_is_a_failed_unit(host):
    """The page lists it among what to watch, until a backup succeeds."""
    watch = block("sh", "systemctl list-units --failed").splitlines()[0]
    host.database.rename(moved := host.database.with_name("moved.db"))
    host.run("systemctl start plants-backup", fails=True)
    assert "plants-backup.service" in host.run(watch)
    reason = host.run(command("journalctl --unit plants-backup"))
    assert "/var/lib/plants/plants.db is missing" in reason
    moved.rename(host.database)
    host.run("systemctl start plants-backup")
    assert "0 loaded units" in host.run(watch)


def test_a_lost_host_is_replaced(host):
    """A new one without a database gets a backup before its first start, and has its plants."""
    host.post(MONSTERA)
    host.run(BACK_UP)
    host.run(f"{STOP}; systemctl disable plants; mv /var/lib/plants/backups/plants-*.db /root/1.db")
    host.run("rm -r /var/lib/plants")
    host.run(command("install -d -o plants -g plants -m 750 /var/lib/plants"))
    host.run(RESTORE.replace(BACKUP, "/root/1.db"))
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
        docker-exec() {{ buildah run $options $(<{folder}/given) "$@"; }}
        docker-run() {{  # Of its options, only the environment counts, also for docker-exec.
            : >{folder}/given
            while [[ $1 = -* ]]; do
                if [[ $1 = --env=* ]]; then echo "$1" >>{folder}/given; fi
                shift
            done
            docker-exec "$@"
        }}
        docker-cp() {{ cp -r "$volume${{1#plants:/data}}" "$2"; }}
        docker() {{ "docker-$@"; }}
    """
    environment = f"--env=PORT={free_port()} --env=PLANTS_TOKENS={TOKEN}"

    def make(commands: str, volume: Path | str = "", user: str = "") -> list[str]:
        options = (
            f"{environment} {volume and f'--volume={volume}:/data'} {user and f'--user={user}'}"
        )
        return ["bash", "-euc", f"options='{options}' volume='{volume}'\n{functions}\n{commands}"]

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


def test_a_container_without_a_database_does_not_start(docker):
    """Without --env and --volume, plants would be thrown away with the container."""
    subprocess.run(docker(NEW_CONTAINER), check=True)
    line = docker("docker run plants gunicorn")
    done = subprocess.run(line, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert done.returncode and "PORT is set, so set DATABASE_URL" in done.stderr
    assert "Booting worker" not in done.stderr


@pytest.mark.parametrize("user", ["", "1000650000:0"], ids=["its own user", "as on OpenShift"])
def test_a_container_starts_stores_plants_and_is_backed_up(serve, docker, tmp_path, user):
    """It works as its own user and, as on OpenShift, under any user id with group 0.

    Its health check passes while the database is gone, and fails once the service has ended.
    """
    (volume := tmp_path / "volume").mkdir()

    def run(commands: str) -> str:
        line, timeout = docker(commands, volume, user), DOWNLOAD_PATIENCE
        return subprocess.check_output(line, cwd=tmp_path, text=True, timeout=timeout)

    run(NEW_CONTAINER)
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
    assert "plants are stored" in (checked := run(f"{CHECK_IMAGE} 2>&1"))
    assert "which is new" not in checked
    shell = command("docker exec --interactive").replace("--interactive --tty ", "")
    assert ": 1 plants of /data/plants.db" in run(f"{shell} -c '{BACK_UP_BY_HAND}'")
    run(command("docker cp plants:/data/backups"))
    (backup,) = tmp_path.glob("backups/plants-*.db")
    assert read_names(f"sqlite:///{backup}") == {7: "Monstera"}
    (made,) = volume.glob("backups/plants-*.db")
    assert made.stat().st_uid == volume.joinpath("plants.db").stat().st_uid
    run(health)
    (volume / "plants.db").unlink()
    wait_until(lambda: server.health() == 503)
    run(health)
    os.kill(int(master), signal.SIGTERM)
    assert server.wait() == 0
    run(f"! {health} 2>&-")
