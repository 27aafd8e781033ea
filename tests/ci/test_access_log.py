"""The access log: where it goes, what is in it after SIGHUP, and what if nobody reads it."""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket

import pytest

from tests.support.server import GUNICORN, PATIENCE, Server, free_port, wait_until
from tests.support.wire import MONSTERA


@pytest.mark.parametrize("name", ["gunicorn.glogging.Logger", "worker.AccessLogger"])
def test_any_logger_of_gunicorns_kind_will_do(serve, name):
    """Also for what is not HTTP, and after SIGHUP."""
    server = serve(f"--logger-class={name}")
    assert server.post(MONSTERA)[0] == 200
    assert server.send(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    server.reload()
    assert server.post({"id": 8, "name": "n"})[0] == 200
    found = wait_until(lambda: (all := server.out.splitlines())[2:] and all)
    assert [re.search('"([^ ]+).*" ([0-9]+) ', line).groups() for line in found] == [
        ("POST", "200"),
        ("InvalidRequestLine", "400"),
        ("POST", "200"),
    ]


def test_logs_that_nobody_reads_lose_whole_lines_and_say_so(serve, tmp_path, stored):
    """Requests, /healthz and SIGTERM do not wait for a reader of standard output and error."""
    fifo, count = tmp_path / "fifo", 600
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    port = free_port()
    command = ["sh", "-c", f'exec "$@" >{fifo} 2>&1', "sh", GUNICORN, "--log-level=debug"]
    server = serve(command=[*command, f"--bind=127.0.0.1:{port}"], WEB_CONCURRENCY="1")
    server.port = port
    wait_until(lambda: stored_by(server, MONSTERA))
    path = "/" + "x" * 100
    assert {server.request("GET", path)[0] for _ in range(count)} == {404}
    assert server.request("GET", "/healthz")[0] == 200
    with contextlib.closing(os.fdopen(reader, "rb", 0)) as log:
        said = log.read(2**16)

        def is_said() -> bool:
            nonlocal said
            server.request("GET", path)
            said += log.read(2**16) or b""
            return b" lines of this log were lost\n" in said

        wait_until(is_said)
    assert 0 < said.count(path.encode()) < count
    for line in said.splitlines():
        assert re.fullmatch(rb"127.* [0-9a-f]{32}|\d+ lines .* lost|\[.*\].*|  \w+: .*", line), line
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert stored() == [(7, "Monstera", "indoor")]


def stored_by(server: Server, plant: dict[str, object]) -> bool:
    """Store a plant if the server, which can't say so, listens already."""
    with contextlib.suppress(ConnectionRefusedError):
        return server.post(plant)[0] == 200
    return False


def test_a_service_without_standard_output_and_error_answers(serve, stored):
    port = free_port()
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", GUNICORN, f"--bind=127.0.0.1:{port}"]
    server = serve(command=command)
    server.port = port
    wait_until(lambda: stored_by(server, MONSTERA))
    assert server.request("GET", "/healthz")[0] == 200
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert stored() == [(7, "Monstera", "indoor")]


def test_statsd_without_a_listener_is_one_line(serve):
    """However many metrics are sent; who listens later gets them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as statsd:
        statsd.bind(("127.0.0.1", 0))
        address = statsd.getsockname()
        statsd.close()
        server = serve(f"--statsd-host=127.0.0.1:{address[1]}", WEB_CONCURRENCY="1")
        for _ in range(50):
            assert server.request("GET", "/nowhere")[0] == 404
        (worker,) = server.workers(1)
        lines = [line for line in server.err.splitlines() if "to statsd" in line]
        assert len(lines) == 1 and f"[{worker}] [WARNING] Error sending" in lines[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as statsd:
        statsd.bind(address)
        statsd.settimeout(PATIENCE)
        server.request("GET", "/nowhere")
        assert statsd.recv(2**16).startswith(b"gunicorn.")


def test_the_access_log_has_the_user_that_the_application_names(serve, tmp_path):
    """The third part of the common log format."""
    code = "def app(environ, start):\n    environ['REMOTE_USER'] = 'web'\n    start('200 OK', [])\n"
    (tmp_path / "named.py").write_text(f"{code}    return [b'']\n")
    server = serve(f"--pythonpath={tmp_path}", "named:app")
    server.send(b"GET / HTTP/1.0\r\n\r\n")
    wait_until(lambda: server.out.startswith("127.0.0.1 - web ["))


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
