"""The worker with options, at a reload and at its end, and what it keeps in memory."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from tests.support.processes import memory
from tests.support.server import PATIENCE, ROOT, SHORT, Server, wait_until
from tests.support.wire import HALF_A_BODY, MONSTERA, post
from tests.support.writers import Writers

CONNECTIONS, EACH = 64, 150  # at the same time; requests on a connection


def test_sighup_under_load_drops_nothing_and_takes_changed_code(serve, tmp_path):
    """Nobody is refused while new workers take over."""
    code = tmp_path / "code"
    shutil.copytree(ROOT, code, ignore=shutil.ignore_patterns(".*", "*cache*", "tests"))
    server = serve("--chdir", str(code), "--config", f"{code}/gunicorn.conf.py")
    with Writers(server.port) as writers:
        assert writers.goes_on()
        assert server.request("GET", "/healthz").body == {"status": "ok"}
        app = code / "app.py"
        app.write_text(app.read_text().replace('"status": "ok"', '"status": "new"'))
        server.reload()
        assert server.request("GET", "/healthz").body == {"status": "new"}
        assert writers.goes_on()
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


def test_a_worker_that_hangs_is_replaced(serve):
    server = serve("--timeout=2", WEB_CONCURRENCY="1")
    (worker,) = server.workers(1)
    assert server.health() == 200
    os.kill(worker, signal.SIGSTOP)
    assert server.workers(1, besides=[worker])


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
        answers = b"".join(pool.map(server.send, batches))
    return Counter(re.findall(rb"HTTP/1.1 (\d+)", answers))


def test_memory_does_not_grow_with_what_was_stored_or_refused(serve, record_property):
    """15,000 plants, then as many refusals and 5,000 connections; it starts from some of each."""
    server = serve()

    def store(first: int, end: int) -> list[float]:
        plants = [b'{"id": %d, "name": "Monstera"}' % number for number in range(first, end)]
        assert post_all(server, plants)[b"200"] == end - first
        return list(map(memory, server.workers()))

    def refuse() -> list[float]:
        for _ in range(5_000):
            server.connect().close()
        bodies = (b'{"id": %d, "name": 5}', b'{"id": %d, "name": "another"}', b"%d nonsense")
        answers = post_all(server, [body % number for body in bodies for number in range(5_000)])
        assert (answers[b"400"], answers[b"409"]) == (10_000, 5_000)
        return list(map(memory, server.workers()))

    store(0, 5_000)
    before, *stages = refuse(), store(5_000, 20_000), refuse()
    grown = max(now - then for stage in stages for now, then in zip(stage, before, strict=True))
    record_property("15,000 plants, then 15,000 refusals", f"{grown:.1f} MiB more in a worker")
    assert grown < 5
