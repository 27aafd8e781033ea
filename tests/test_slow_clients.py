"""Clients that are slow, rude or too many: they keep nobody else out, and nothing of them stays."""

import contextlib
import resource
import runpy
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.locks import locked
from tests.support.server import (
    HERE,
    PATIENCE,
    ROOT,
    TOKEN,
    Server,
    receive,
    settings_with,
    usage,
    wait_until,
)
from tests.support.wire import HEAD, MONSTERA, chunked, post, refused

FOR_EVER = 600  # seconds: longer than a test waits
HALF_A_BODY = HEAD + b"Content-Length: 9\r\n\r\n{"
GET = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
LAST = GET + b"Connection: close\r\n\r\n"
SMALL, LARGE = 1, 2**16  # bytes
HOGS = {  # what they send at first, seconds between further bytes, and how much they read at once
    "half a header": (b"POST /pl", FOR_EVER, LARGE),
    "half a body": (HALF_A_BODY, FOR_EVER, LARGE),
    "a byte every three seconds": (HEAD, 3, LARGE),
    "holding the connection after the answer": (LAST, FOR_EVER, LARGE),
    "reading the answer a byte at a time": (LAST, 1, SMALL),
}


@pytest.fixture
def url(database: Path) -> str:
    """SQLite alone: what is tested here is the server."""
    return f"sqlite:///{database}"


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Lets the clients have as many connections as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def connect() -> Iterator[Callable[..., socket.socket]]:
    """Makes connections that are kept open until the end of the test."""
    with contextlib.ExitStack() as connections:

        def connect(server: Server, data: bytes = b"", buffer: int = LARGE) -> socket.socket:
            connection = connections.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            connection.settimeout(PATIENCE)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(data)
            return connection

        yield connect


class Hog:
    """A connection that does not let go as long as the server lets it."""

    def __init__(self, connection: socket.socket, pause: float, size: int) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._pause, self._size = pause, size
        self._next = time.monotonic() + pause
        self._has_ended = False  # the server sends no more, but may still hold the connection

    def is_cut_off(self) -> bool:
        """Go on as before; return whether that is no longer possible."""
        try:
            if self._has_ended or time.monotonic() > self._next:
                self._connection.send(b"x")
                self._next += self._pause
            self._has_ended = self._connection.recv(self._size) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False


def test_two_hundred_hogs_of_each_kind_keep_nobody_out(serve, connect, record_property):
    """Beside them a good client's p99 is under a second, and each is cut off within 30 s."""
    server = serve()
    hogs = [
        Hog(connect(server, data, buffer=size), pause, size)
        for data, pause, size in list(HOGS.values()) * 200
    ]
    took = []

    def are_cut_off() -> bool:
        begin = time.monotonic()
        assert server.post({"id": len(took), "name": "n"})[0] == 200
        took.append(time.monotonic() - begin)
        return all([hog.is_cut_off() for hog in hogs])

    wait_until(are_cut_off)  # for 30 s
    p99 = sorted(took)[int(len(took) * 0.99)]
    assert p99 < 1
    figures = f"{len(took)} requests of a good client, p99 {1000 * p99:.0f} ms"
    record_property(f"beside {len(hogs)} hogs", figures)


@pytest.mark.parametrize("kind", ["nothing", "nothing for long", *HOGS, "idle"])
def test_more_connections_than_there_is_room_for_keep_nobody_out(serve, connect, tmp_path, kind):
    """Though each might wait for longer than the test does, those that wait longest make room."""
    limits = {"REQUEST_LIMIT": FOR_EVER, "LINGER_LIMIT": FOR_EVER, "keepalive": FOR_EVER}
    server = serve(settings_with(tmp_path, 0.001, **limits), "--worker-connections=50")
    sends = {"idle": GET + b"\r\n", **{name: data for name, (data, *_) in HOGS.items()}}
    for _ in range(150):
        connect(server, sends.get(kind, b""))
        if kind in ("nothing for long", "idle"):
            time.sleep(0.01)  # longer than a thread waits for what comes
    for number in range(50):
        assert server.post({"id": number, "name": "n"})[0] == 200


def test_who_comes_late_is_not_who_makes_room(serve, connect, tmp_path):
    """It is who has kept the service waiting longest."""
    settings = settings_with(tmp_path, REQUEST_LIMIT=FOR_EVER)
    server = serve(settings, "--worker-connections=50", WEB_CONCURRENCY="1")
    for _ in range(60):
        connect(server, HALF_A_BODY)
    late = connect(server, HALF_A_BODY)
    for number in range(20):
        assert server.post({"id": number, "name": "n"})[0] == 200
    late.sendall(b" " * 7 + b"}" + LAST)
    assert b'"message": "id: required' in receive(late)


def test_who_has_just_come_is_not_who_makes_room(serve, connect):
    """Also where there is room for no other: who comes next has to wait for the answer."""
    server = serve("--worker-connections=1", WEB_CONCURRENCY="1")
    client = connect(server)
    time.sleep(1.5)  # longer than until the next look at who takes too long
    client.sendall(LAST)
    assert receive(client).startswith(b"HTTP/1.1 200")


def test_who_makes_room_gets_an_answer_if_the_request_is_there(serve, connect, database, tmp_path):
    """Though it waits for the storage for longer than the answer's time to be read."""
    settings = settings_with(tmp_path, LINGER_LIMIT=0.1)
    server = serve(settings, "--worker-connections=20", WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    with locked(database):
        begin = time.monotonic()
        waiting = [connect(server, post(MONSTERA, b"Connection: close")) for _ in range(60)]
        time.sleep(max(begin + 2 - time.monotonic(), 0))
    assert {receive(client)[:12] for client in waiting} == {b"HTTP/1.1 200"}


def test_gunicorns_own_worker_does_not_bear_half_sent_requests(serve, connect):
    """If it does, most of the Worker in gunicorn.conf.py has become superfluous."""
    server = serve("--worker-class=gthread", "--threads=2", WEB_CONCURRENCY="1")
    head = HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"
    hogs = [connect(server, head) for _ in range(2)]
    assert all(hog.recv(100).startswith(b"HTTP/1.1 100") for hog in hogs)
    good = connect(server, LAST)
    good.settimeout(2)
    with pytest.raises(TimeoutError):
        good.recv(1)
    for hog in hogs:
        hog.close()
    good.settimeout(PATIENCE)
    assert receive(good).startswith(b"HTTP/1.1 200")


def test_no_call_waits_for_a_thread_that_has_been_given_another(monkeypatch):
    """Where one is idle and two calls come at once, a second thread is made."""
    monkeypatch.setenv("PLANTS_TOKENS", TOKEN)
    pool = runpy.run_path(str(ROOT / "gunicorn.conf.py"))["ThreadPool"](9)
    pool.submit(str).result(PATIENCE)
    wait_until(lambda: pool._idle == 1)
    meeting = threading.Barrier(2)
    with pool._changed:  # so that the idle thread does not take the first before the second comes
        calls = [pool.submit(meeting.wait, PATIENCE) for _ in range(2)]
    assert sorted(call.result(PATIENCE) for call in calls) == [0, 1]


def test_a_half_sent_request_is_cut_off(serve, connect, tmp_path):
    """Its time is limited, so that its thread comes back; what can be told is told."""
    server = serve(settings_with(tmp_path, REQUEST_LIMIT=0.2))
    empty = HALF_A_BODY.removesuffix(b"{")
    said = [receive(connect(server, half)) for half in (b"POST /pl", empty, HALF_A_BODY)]
    assert said[0] == b""
    assert "ended after 0 of 9 bytes" in refused(said[1], 400)
    assert "ended after 1 of 9 bytes" in refused(said[2], 400)


def test_who_reads_none_of_many_answers_is_cut_off(serve, connect, tmp_path):
    """They are more than the system keeps for a connection, so that a thread waits with them."""
    server = serve(settings_with(tmp_path, REQUEST_LIMIT=0.5, LINGER_LIMIT=0.1))
    number = 2000
    reader = connect(server, (GET + b"\r\n") * number)
    wait_until(lambda: is_closed(reader))
    assert 0 < server.out.count("GET /openapi.json") < number


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side takes no more."""
    try:
        connection.send(b"x")
    except OSError:
        return True
    return False


@pytest.mark.parametrize("token", [TOKEN, "another-token-0123456789"])
def test_a_body_in_very_many_pieces_is_not_read_to_its_end(server, connect, token):
    """Each costs as much time as a large one. It is the last of its connection, read or not."""
    head = HEAD.replace(TOKEN.encode(), token.encode()) + b"Transfer-Encoding: chunked\r\n\r\n"
    connection = connect(server, head + chunked(*[b" "] * 20_000, b"") + LAST)
    message = refused(receive(connection), 400 if token == TOKEN else 401)
    assert "pieces" in message or token != TOKEN


def test_few_descriptors_keep_nobody_out(serve, connect, tmp_path):
    """Then there are fewer connections at a time, and who has waited longest makes room sooner."""
    settings = settings_with(tmp_path, REQUEST_LIMIT=FOR_EVER)
    server = serve(command=["sh", "-c", 'ulimit -n 96; exec "$@"', "sh", *HERE, settings])
    wait_until(lambda: "2 workers of up to 24 connections" in server.err)
    for _ in range(100):
        connect(server, HALF_A_BODY)
    for number in range(20):
        assert server.post({"id": number, "name": "n"})[0] == 200


def test_as_many_descriptors_as_needed_are_asked_for(serve):
    """Systems allow 1024 or fewer until one does."""
    server = serve(command=["sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh", *HERE])
    wait_until(lambda: "2 workers of up to 1000 connections" in server.err)


def test_running_out_of_descriptors_kills_no_worker(serve, connect):
    """Connections wait until there are descriptors again."""
    many = "--worker-connections=1000"
    server = serve(command=["sh", "-c", 'ulimit -n 48; exec "$@"', "sh", *HERE, many])
    server.may_fail = True  # gunicorn logs it with a traceback
    assert server.post(MONSTERA)[0] == 200
    before = server.workers()
    hogs = [connect(server) for _ in range(150)]
    wait_until(lambda: "a connection has to wait" in server.err)
    for hog in hogs:
        hog.close()
    assert server.post(MONSTERA)[0] == 200
    assert server.workers() == before


def test_running_out_of_threads_kills_no_worker(serve, connect, tmp_path):
    """Platforms limit them; here it is the memory for their stacks. Who waits is served in turn."""
    settings = settings_with(tmp_path, REQUEST_LIMIT=1.0)
    limited = ["sh", "-c", 'ulimit -v 1500000; exec "$@"', "sh", *HERE, settings]
    server = serve(command=limited, WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    before = server.workers(1)
    hogs = [connect(server, b"POST /pl") for _ in range(300)]
    assert server.request("GET", "/healthz")[0] == 200
    for hog in hogs:
        hog.close()
    assert server.post({"id": 8, "name": "n"})[0] == 200
    assert server.workers(1) == before


def test_ten_thousand_connections_leave_nothing_behind(serve, connect, tmp_path, record_property):
    """Opened and closed at once: no thread, no descriptor, and no memory that grows."""
    server = serve(settings_with(tmp_path, SPARE_THREADS=1), WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    (worker,) = server.workers(1)
    before = usage(worker)
    peaks = []
    for _ in range(3):
        for _ in range(10):
            for connection in [connect(server) for _ in range(1000)]:
                connection.close()
        wait_until(lambda: usage(worker).threads <= before.threads)  # one of them is idle
        wait_until(lambda: usage(worker).descriptors <= before.descriptors)
        peaks.append(usage(worker).memory)
    assert peaks[-1] < peaks[0] + 5
    memory = ", ".join(f"{peak:.0f}" for peak in peaks)
    record_property("three times 10,000 connections", f"{memory} MiB after each (PSS of a worker)")
