"""The worker with options, with faults of its own, at a reload, and what it keeps in memory."""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from plant import Plant
from tests.support.processes import Usage, usage
from tests.support.server import TOKEN, Server, stops_in_one_line, wait_until
from tests.support.wire import MONSTERA, post, refused
from tests.support.writers import Writers

CONNECTIONS, EACH = 64, 150  # at the same time; requests on a connection


@pytest.mark.parametrize(
    ("name", "data", "status"),
    [
        ("FailingHandle", post(MONSTERA), None),
        ("FailingRequest", post(MONSTERA), 500),
        ("FailingError", b"nonsense\r\n\r\n", None),
    ],
)
def test_a_worker_survives_a_fault_of_its_own(serve, name, data, status):
    """The client gets an Error, or at least the end of its connection."""
    server = serve(f"--worker-class=tests.support.workers.{name}", WEB_CONCURRENCY="1")
    server.may_fail = True
    workers = server.workers(1)
    for _ in range(3):
        try:
            said = server.send(data)
        except ConnectionResetError:
            said = b""
        assert "the service failed" in refused(said, status) if status else said == b""
    wait_until(lambda: "a fault made by a test" in server.err)
    assert server.workers(1) == workers


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--preload", "--preload is not possible, leave it out"),
        ("--certfile=c", "--certfile and --keyfile are not possible, leave them out: a proxy"),
        ("--statsd-host=localhost:8125", "--statsd-host has no effect, leave it out"),
        ("--access-logformat=%(r)s", "--access-logformat has no effect, leave it out"),
        ("--workers=0", "--workers and WEB_CONCURRENCY must be 1 or more"),
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


def test_a_token_that_the_operator_gave_is_never_printed(serve):
    """Whatever the log level is, and however it was given; only one that was made is."""
    server = serve(f"--env=PLANTS_TOKENS={TOKEN}", "--log-level=debug", PLANTS_TOKENS=None)
    assert server.post(MONSTERA)[0] == 200
    assert TOKEN not in server.err + server.out and "curl" not in server.err


def test_sighup_under_load_drops_nothing_and_takes_changed_code(serve, tmp_path):
    """Nobody is refused while new workers take over; a token that was made stays good."""
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
