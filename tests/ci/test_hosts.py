"""Odd hosts: on each the service works, or one line says why it does not start.

It takes root, for mounts in a namespace of their own and for a user who may do little.
"""

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.support.server import HERE, PATIENCE, wait_until
from tests.test_start import stops_in_one_line

# Shell commands; $0 is the folder of the database, and $@ starts the service.
READ_ONLY = """mount --bind "$0" "$0"
for each in / /tmp /var/tmp %s; do
    ! mountpoint -q $each || mount -o remount,bind,ro $each
done"""
RIGHTS = "+dac_read_search,+dac_override"  # to files, as root has
USER = f"setpriv --reuid=54321 --clear-groups --inh-caps={RIGHTS} --ambient-caps={RIGHTS}"
HOSTS = {
    "nobody can write /dev/shm": ("mount -t tmpfs -o ro none /dev/shm", ""),
    "only /dev/shm and the folder of the database can be written": (READ_ONLY % "", ""),
    "only the folder of the database can be written": (READ_ONLY % "/dev/shm", ""),
    "no folder can be written": (
        READ_ONLY % '/dev/shm "$0"',
        r"/plants\.db-lock: /.* is mounted read-only$",
    ),
    "whoever starts it ignores SIGCHLD": ('set -- env --ignore-signal=CHLD "$@"', ""),
    "the user may have one process": (
        f'set -- {USER} prlimit --nproc=1 "$@"',
        "Resource temporarily unavailable; see ulimit -u",
    ),
    "the user may have a process for each worker, but no thread": (
        f'set -- {USER} prlimit --nproc=4 "$@"',
        "can't start new thread",
    ),
    "a process may open 65 files": (
        'set -- prlimit --nofile=65 "$@"',
        "ulimit -n must be 74 or more for 10 connections",
    ),
}


@pytest.mark.parametrize(("setup", "words"), HOSTS.values(), ids=HOSTS)
def test_it_works_or_one_line_says_why_not_where(serve, tmp_path, setup, words):
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    command = ["unshare", "--mount", "sh", "-ec", f'{setup}\nexec "$@"', str(tmp_path), *HERE]
    server = serve(command=command, TMPDIR=None)
    if words:
        stops_in_one_line(server, words)
    else:
        assert server.post({"id": 7, "name": "Monstera"})[0] == 200


def test_a_signal_that_ends_the_check_is_named(serve):
    """SIGBUS comes where SQLite has mapped a file for which the disk has no room."""
    with socket.create_server(("127.0.0.1", 0)) as database:  # accepts, and never answers
        database.settimeout(PATIENCE)
        server = serve(DATABASE_URL=f"postgresql://127.0.0.1:{database.getsockname()[1]}/plants")
        with database.accept()[0]:
            master = server.process.pid
            children = Path(f"/proc/{master}/task/{master}/children")
            os.kill(int(wait_until(children.read_text)), signal.SIGBUS)
            stops_in_one_line(server, "Bus error: opening the database needs more disk or memory")
