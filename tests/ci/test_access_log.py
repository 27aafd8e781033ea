"""The access log: where it goes, what is in it after SIGHUP, and what if nobody reads it."""

import contextlib
import fcntl
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.server import HERE, is_alive, wait_until
from tests.support.wire import MONSTERA, post


@pytest.mark.parametrize("name", ["gunicorn.glogging.Logger", "worker.AccessLogger"])
def test_any_logger_of_gunicorns_kind_will_do(serve, name):
    """Also for what is not HTTP, and after SIGHUP."""
    server = serve(f"--logger-class={name}")
    before = server.workers()
    assert server.post(MONSTERA)[0] == 200
    assert server.send(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    server.signal(signal.SIGHUP)
    assert server.workers(besides=before)
    wait_until(lambda: not any(map(is_alive, before)))
    assert server.post({"id": 8, "name": "n"})[0] == 200
    found = wait_until(lambda: (all := server.out.splitlines())[2:] and all)
    assert [re.search('"([^ ]+).*" ([0-9]+) ', line).groups() for line in found] == [
        ("POST", "200"),
        ("InvalidRequestLine", "400"),
        ("POST", "200"),
    ]


def test_a_log_that_is_read_late_has_all_lines(serve, tmp_path):
    """Two workers that wait for room in it go on as soon as there is some."""
    fifo, lines, numbers = tmp_path / "fifo", [], range(100, 300)
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    server = serve(command=["sh", "-c", f'exec "$@" >{fifo}', "sh", *HERE])
    workers = server.workers()

    def store(number: int) -> bytes:
        request_id = b"X-Request-ID: %d%s" % (number, b"x" * 100)
        return server.send(post({"id": number, "name": "n"}, request_id, b"Connection: close"))

    def read() -> bool:
        with contextlib.suppress(BlockingIOError):
            lines.append(os.read(reader, 2**16))
        found = re.findall(rb" 200 .* (\d+)x{100}\n", b"".join(lines))
        return sorted(map(int, found)) == list(numbers)

    with ThreadPoolExecutor(16) as pool, contextlib.ExitStack() as stack:
        stack.callback(os.close, reader)
        stored = [pool.submit(store, number) for number in numbers]

        def are_stuck() -> bool:
            done = sum(each.done() for each in stored)
            time.sleep(1)  # none ends meanwhile; if one does, this is asked again
            return 0 < done == sum(each.done() for each in stored) < len(stored)

        wait_until(are_stuck)
        wait_until(read)
        assert {each.result()[:15] for each in stored} == {b"HTTP/1.1 200 OK"}
        for only in workers:  # each of them, while the other is stopped
            for pid in workers:
                os.kill(pid, signal.SIGCONT if pid == only else signal.SIGSTOP)
            assert store(1).startswith(b"HTTP/1.1 200 ")
    assert server.err.count("Booting worker") == 2


def test_the_access_log_is_opened_anew_at_sigusr1(serve, tmp_path):
    """As logrotate wants it."""
    log = tmp_path / "access.log"
    server = serve(f"--access-logfile={log}", WEB_CONCURRENCY="1")
    assert server.request("GET", "/before")[0] == 404
    wait_until(lambda: "/before" in log.read_text())
    log.rename(tmp_path / "old.log")
    server.signal(signal.SIGUSR1)
    wait_until(log.exists)  # the master has opened it, and now tells the worker

    def after() -> bool:
        assert server.request("GET", "/after")[0] == 404
        return "/after" in log.read_text()

    wait_until(after)


def test_a_log_of_the_operators_own_is_written_as_they_say(serve, tmp_path):
    """--log-config: their handlers and formats."""
    config = {
        "formatters": {"own": {"format": "own: %(message)s"}},
        "handlers": {
            "own": {
                "class": "logging.FileHandler",
                "filename": f"{tmp_path}/own",
                "formatter": "own",
            },
            "stderr": {"class": "logging.StreamHandler"},
        },
        "loggers": {"gunicorn.access": {"handlers": ["own"], "level": "INFO", "propagate": False}},
        "root": {"handlers": ["stderr"], "level": "INFO"},
    }
    (tmp_path / "log.json").write_text(json.dumps(config))
    server = serve(f"--log-config-json={tmp_path}/log.json", "--access-logfile=-")
    assert server.request("GET", "/nowhere")[0] == 404
    wait_until(lambda: re.search('own: .*"GET /nowhere"', (tmp_path / "own").read_text()))


def test_a_log_that_cannot_be_written_fails_no_request(serve, stored):
    """As on a full disk."""
    server = serve("--access-logfile=/dev/full")
    for _ in range(3):
        assert server.post(MONSTERA)[0] == 200
    assert stored() == [(7, "Monstera", "indoor")]
