"""The worker with options, with faults of its own, at a reload, and what it keeps in memory."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plant import Plant
from tests.support.processes import Usage, usage
from tests.support.server import (
    HERE,
    PATIENCE,
    SHORT,
    Server,
    receive,
    stops_in_one_line,
    wait_until,
)
from tests.support.wire import HALF_A_BODY, MONSTERA, answers, post
from tests.support.writers import Writers

CONNECTIONS, EACH = 64, 150  # at the same time; requests on a connection

CLOSE = b"Connection: close"


@pytest.mark.parametrize(
    ("option", "data", "statuses"),
    [
        ("--worker-class=tests.support.workers.FailingHandle", post(MONSTERA), []),
        ("--worker-class=tests.support.workers.FailingRequest", post(MONSTERA), [500]),
        ("--worker-class=tests.support.workers.FailingError", b"nonsense\r\n\r\n", []),
        ("--logger-class=tests.support.workers.FailingLogger", post(MONSTERA, CLOSE), [200]),
        ("--logger-class=gunicorn.glogging.Logger", b"nonsense\r\n\r\n", [400]),
    ],
)
def test_a_worker_survives_a_fault_of_its_own(serve, option, data, statuses):
    """The client gets one answer, or at least the end of its connection."""
    server = serve(option, WEB_CONCURRENCY="1")
    server.may_fail = True
    workers = server.workers(1)
    for _ in range(3):
        said = b""
        with contextlib.suppress(ConnectionResetError):
            said = server.send(data)
        assert [status for status, _ in answers(said)] == statuses
    assert server.workers(1) == workers


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--preload", "--preload is not possible, leave it out"),
        ("--certfile=c", "--certfile and --keyfile are not possible, leave them out: a proxy"),
    ],
)
def test_an_option_that_would_fail_later_stops_the_start(serve, option, words):
    """In one line, like a setting."""
    stops_in_one_line(serve(option), words)


def test_a_start_in_the_background_that_fails_says_why_in_its_log(serve, tmp_path):
    """As nobody sees its standard error, nor a token that is printed there."""
    log = tmp_path / "error.log"
    serve("--daemon", f"--error-logfile={log}", PLANTS_TOKENS=None)
    wait_until(lambda: log.exists() and "[ERROR] --daemon needs PLANTS_TOKENS\n" in log.read_text())


def test_nothing_listens_but_the_port_and_no_other_parser_is_used(serve, tmp_path):
    """gunicorn has a control socket unless it is told not to, and takes a parser that is there."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "gunicorn_h1c.py").write_text("open(__file__ + '.used', 'w')")
    paths = dict.fromkeys(("HOME", "XDG_RUNTIME_DIR", "PYTHONPATH"), str(home))
    server = serve(PYTHONDONTWRITEBYTECODE="1", **paths)
    assert server.post(MONSTERA)[0] == 200
    assert [file.name for file in home.iterdir()] == ["gunicorn_h1c.py"]


def test_sighup_under_load_drops_nothing_and_takes_changed_code(serve, tmp_path):
    """Nobody is refused while new workers take over."""
    code = tmp_path / "own_app.py"
    lines = "from start import get_app\n\n\ndef named():\n    app = get_app()\n"
    lines += "    app.wsgi = lambda environ, start, wsgi=app.wsgi: wsgi(\n"
    lines += "        {**environ, 'HTTP_X_REQUEST_ID': '%s'}, start)\n    return app\n"
    code.write_text(lines % "before")
    server = serve(f"--pythonpath={tmp_path}", "own_app:named()", PYTHONDONTWRITEBYTECODE="1")
    with Writers(server.port) as writers:
        assert writers.goes_on()
        assert server.request("GET", "/healthz").headers["x-request-id"] == "before"
        code.write_text(lines % "and_after")
        server.reload()
        assert writers.goes_on()
        assert server.request("GET", "/healthz").headers["x-request-id"] == "and_after"
    assert (set(writers.answers), set(writers.failures)) == ({200}, set())


def test_the_printed_curl_line_is_good_in_each_worker_and_after_sighup(serve):
    """Typed literally: its token is made once, and printed once."""
    server = serve(PLANTS_TOKENS=None)
    curl = wait_until(lambda: re.search(r"\ncurl .*\n.*\n.*}'\n", server.err))[0]
    for _ in range(2):
        said = {subprocess.check_output(["sh", "-c", curl], text=True) for _ in range(10)}
        assert said == {'{"name": "Monstera", "tag": "indoor"}\n'}
        server.reload()
    assert server.err.count("Bearer ") == 1


def test_the_end_does_not_wait_for_who_sends_no_request(serve):
    """Though they might go on for longer while the service runs."""
    server = serve(SHORT, "--graceful-timeout=600", "--keep-alive=600")
    idle = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as clients:
        for data in (b"", b"POST /pl", HALF_A_BODY, idle) * 10:
            clients.enter_context(server.connect()).sendall(data)
        wait_until(lambda: server.out.count("GET /") == 10)
        assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_first_process_of_a_container_can_be_stopped_while_it_starts(serve, silent, number):
    """For such a process, the system ignores signals that it has no handler for.

    The process of the check ends with it.
    """
    url, listener = silent
    command = ["unshare", "--pid", "--fork", *HERE]
    server = serve(command=command, DATABASE_URL=f"{url}?connect_timeout=600")
    with listener.accept()[0] as connection:
        unshare = server.process.pid
        (first,) = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        os.kill(int(first), number)
        assert server.wait() != 0
        connection.settimeout(PATIENCE)
        receive(connection)


def test_the_access_log_can_go_elsewhere_and_is_opened_anew_at_sigusr1(serve, tmp_path):
    """As logrotate wants it; to syslog, too."""
    log = tmp_path / "access.log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog:
        syslog.bind(f"{tmp_path}/syslog")
        syslog.settimeout(PATIENCE)
        options = [f"--access-logfile={log}", "--log-syslog"]
        server = serve(*options, f"--log-syslog-to=unix://{tmp_path}/syslog#dgram")
        assert server.request("GET", "/before").status == 404
        wait_until(lambda: b"GET /before" in syslog.recv(2**16))
        wait_until(lambda: '"GET /before" 404' in log.read_text())
        log.rename(tmp_path / "old.log")
        server.signal(signal.SIGUSR1)
        wait_until(log.exists)  # the master has opened it, and now tells the workers
        wait_until(lambda: server.request("GET", "/after") and "/after" in log.read_text())
        assert server.out == ""
        server.kill()


def test_a_log_of_the_operators_own_is_written_as_they_say(serve, tmp_path):
    """--log-config: their handlers and formats."""
    own = {"class": "logging.FileHandler", "filename": f"{tmp_path}/own", "formatter": "own"}
    config = {
        "formatters": {"own": {"format": "own: %(message)s"}},
        "handlers": {"own": own, "stderr": {"class": "logging.StreamHandler"}},
        "loggers": {"gunicorn.access": {"handlers": ["own"], "level": "INFO", "propagate": False}},
        "root": {"handlers": ["stderr"], "level": "INFO"},
    }
    (tmp_path / "log.json").write_text(json.dumps(config))
    server = serve(f"--log-config-json={tmp_path}/log.json", "--access-logfile=-")
    assert server.request("GET", "/nowhere").status == 404
    wait_until(lambda: re.search('own: .*"GET /nowhere"', (tmp_path / "own").read_text()))


def test_a_log_that_cannot_be_written_fails_no_request(serve):
    """As on a full disk."""
    server = serve("--access-logfile=/dev/full")
    assert {server.post(MONSTERA)[0] for _ in range(3)} == {200}


def post_all(server: Server, bodies: Iterable[bytes]) -> Counter[bytes]:
    """Post the bodies over connections that send all their requests at once; count the answers."""
    requests = [post(body) for body in bodies]
    last = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    batches = [b"".join(requests[i : i + EACH]) + last for i in range(0, len(requests), EACH)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        answers = pool.map(server.send, batches)
        return sum((Counter(re.findall(rb"HTTP/1.1 (\d+)", data)) for data in answers), Counter())


def test_memory_does_not_grow_with_what_was_stored_or_refused(serve, record_property):
    """15,000 plants, then as many refusals; some of both before is what it starts from."""
    server = serve()

    def store(first: int, end: int) -> list[Usage]:
        plants = [b'{"id": %d, "name": "Monstera"}' % number for number in range(first, end)]
        assert post_all(server, plants)[b"200"] == end - first
        return [usage(pid) for pid in server.workers()]

    def refuse(count: int) -> list[Usage]:
        bodies = (b'{"id": %d, "name": 5}', b'{"id": %d, "name": "another"}', b"%d nonsense")
        answers = post_all(server, [body % number for body in bodies for number in range(count)])
        assert (answers[b"400"], answers[b"409"]) == (2 * count, count)
        return [usage(pid) for pid in server.workers()]

    store(0, 5_000)
    stages = [refuse(5_000), store(5_000, 20_000), refuse(5_000)]
    grown = 0.0  # MiB
    for pid, before, *later in zip(server.workers(), *stages, strict=True):
        grown = max(grown, *(now.memory - before.memory for now in later))
        wait_until(lambda pid=pid, old=before: usage(pid).descriptors <= old.descriptors)
    assert grown < 5
    record_property("15,000 plants, then 15,000 refusals", f"{grown:.1f} MiB more in a worker")


def test_memory_does_not_grow_with_the_size_of_plants(open_storage, record_property):
    """Batches of large plants, of many sizes: nothing of them is kept once they are stored."""
    numbers, name, storage = itertools.count(), "n" * 60_000, open_storage()

    def memory_after(size: int) -> float:
        plants = [Plant(next(numbers), name) for _ in range(size)]
        assert storage.add_all(plants) == [None] * size
        return usage(os.getpid()).memory

    before = max(memory_after(17) for _ in range(5))  # the largest batch that is possible
    grown = max(memory_after(size) for size in [*range(1, 18)] * 3) - before
    record_property("large plants, in batches of many sizes", f"{grown:.1f} MiB more")
    assert grown < 5
