"""Clients that are slow, rude or too many: hundreds of each kind keep nobody out."""

import contextlib
import http.client
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.locks import locked
from tests.support.server import (
    HERE,
    PATIENCE,
    Server,
    Writers,
    free_port,
    receive,
    usage,
    wait_until,
)
from tests.support.wire import HEAD, MONSTERA, post
from tests.test_slow_clients import GET, HALF_A_BODY

FOR_EVER = 600  # seconds: longer than a test waits
PATIENT = "--worker-class=tests.support.workers.Patient"
LAST = GET + b"Connection: close\r\n\r\n"
SMALL, LARGE = 1, 2**16  # bytes
KINDS = {  # what they send at first, seconds between further bytes, and how much they read at once
    "half a header": (b"POST /pl", FOR_EVER, LARGE),
    "half a body": (HALF_A_BODY, FOR_EVER, LARGE),
    "a byte every three seconds": (HEAD, 3, LARGE),
    "holding the connection after the answer": (LAST, FOR_EVER, LARGE),
    "reading the answer a byte at a time": (LAST, 1, SMALL),
}


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


class SlowClient:
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


def test_two_hundred_slow_clients_of_each_kind_keep_nobody_out(serve, connect, record_property):
    """Beside them a good client's p99 is under a second, and each is cut off within 30 s."""
    server = serve()
    clients = [
        SlowClient(connect(server, data, buffer=size), pause, size)
        for data, pause, size in list(KINDS.values()) * 200
    ]
    took = []

    def are_cut_off() -> bool:
        begin = time.monotonic()
        assert server.post({"id": len(took), "name": "n"})[0] == 200
        took.append(time.monotonic() - begin)
        return all([client.is_cut_off() for client in clients])

    wait_until(are_cut_off)  # for 30 s
    p99 = sorted(took)[int(len(took) * 0.99)]
    assert p99 < 1
    figures = f"{len(took)} requests of a good client, p99 {1000 * p99:.0f} ms"
    record_property(f"beside {len(clients)} slow clients", figures)


@pytest.mark.parametrize("kind", ["nothing", *KINDS, "idle"])
def test_more_connections_than_there_is_room_for_keep_nobody_out(serve, connect, kind):
    """Though each might wait for longer than the test does, those that wait longest make room."""
    server = serve(PATIENT, f"--keep-alive={FOR_EVER}", "--worker-connections=50")
    sends = {"idle": GET + b"\r\n", **{name: data for name, (data, *_) in KINDS.items()}}
    for _ in range(150):
        connect(server, sends.get(kind, b""))
    for number in range(50):
        assert server.post({"id": number, "name": "n"})[0] == 200


def test_a_client_that_makes_room_gets_an_answer_if_its_request_is_there(serve, connect, database):
    """Though it waits for the storage for longer than the answer's time to be read."""
    server = serve(
        "--worker-class=tests.support.workers.Hasty", "--worker-connections=20", WEB_CONCURRENCY="1"
    )
    assert server.post(MONSTERA)[0] == 200
    with locked(database):
        begin = time.monotonic()
        waiting = [connect(server, post(MONSTERA, b"Connection: close")) for _ in range(60)]
        time.sleep(max(begin + 2 - time.monotonic(), 0))
    assert {receive(client)[:12] for client in waiting} == {b"HTTP/1.1 200"}


def test_clients_that_send_without_end_do_not_hold_up_others(serve):
    """What is read of a body that nobody wants is bounded, also for a client in a hurry."""
    server = serve(WEB_CONCURRENCY="1")
    endless = [HEAD + b"Content-Length: 9999999999\r\n\r\n", b"nonsense\r\n\r\n"]

    def send(head: bytes) -> None:
        with contextlib.suppress(OSError), server.connect() as connection:
            connection.sendall(head)
            while True:
                connection.sendall(b" " * 2**20)

    senders = [threading.Thread(target=send, args=[head]) for head in endless * 2]
    for sender in senders:
        sender.start()
    for _ in range(20):
        assert server.request("GET", "/openapi.json")[0] == 200
    for sender in senders:
        sender.join(PATIENCE)
        assert not sender.is_alive()


def test_few_descriptors_keep_nobody_out(serve, connect):
    """Then there are fewer connections at a time, and one makes room sooner."""
    server = serve(command=["sh", "-c", 'ulimit -n 96; exec "$@"', "sh", *HERE, PATIENT])
    wait_until(lambda: "2 workers of up to 32 connections" in server.err)
    for _ in range(100):
        connect(server, HALF_A_BODY)
    for number in range(20):
        assert server.post({"id": number, "name": "n"})[0] == 200


def test_running_out_of_descriptors_kills_no_worker(serve, connect):
    """Connections wait until there are descriptors again."""
    server = serve()
    server.may_fail = True  # gunicorn logs it with a traceback
    assert server.post(MONSTERA)[0] == 200
    before = server.workers()
    for pid in before:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (48, 48))
    clients = [connect(server) for _ in range(150)]
    wait_until(lambda: "Too many open files" in server.err)
    for client in clients:
        client.close()
    assert server.post(MONSTERA)[0] == 200
    assert server.workers() == before


def test_a_100_continue_that_nobody_takes_holds_nothing(serve, connect):
    """gunicorn sends it by itself; after ids of one length it is what finds the buffer full."""
    server = serve("--worker-class=tests.support.workers.Short", WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    (worker,) = server.workers(1)
    before = usage(worker).descriptors
    head = b"GET /healthz HTTP/1.1\r\nHost: h\r\nX-Request-ID: %s\r\nExpect: 100-continue\r\n\r\n"
    for number in range(200):
        connect(server, head % (b"a" * (20 + number % 5)) * 130, SMALL)
    wait_until(lambda: usage(worker).descriptors <= before + 1)


def test_ten_thousand_connections_leave_nothing_behind(serve, connect, record_property):
    """Opened and closed at once: no thread, no descriptor, and no memory that grows."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    (worker,) = server.workers(1)
    before = usage(worker)
    peaks = []
    for _ in range(3):
        for _ in range(20):
            for connection in [connect(server) for _ in range(500)]:
                connection.close()
        wait_until(lambda: usage(worker).threads <= before.threads)
        wait_until(lambda: usage(worker).descriptors <= before.descriptors)
        peaks.append(usage(worker).memory)
    assert peaks[-1] < peaks[0] + 5
    memory = ", ".join(f"{peak:.0f}" for peak in peaks)
    record_property("three times 10,000 connections", f"{memory} MiB after each (PSS of a worker)")


NOBODY = b"POST /plants HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
LINE = b"X: " + b"x" * 995 + b"\r\n"
LONG = b"1;x=" + b"x" * 4000
PIPELINED = b"GET /script.js HTTP/1.1\r\nHost: h\r\n\r\n" * 30
REFUSED = b"POST /plants HTTP/1.1\r\nHost: localhost\r\nContent-Length: 65536\r\n\r\n"
ROUGH = {  # how many, what they send at first, whether bytes follow, and how much they read at once
    "pipelining, and reading nothing": (2500, PIPELINED, False, SMALL),
    "a long head, then a byte at a time": (900, GET + LINE * 15, True, LARGE),
    "trailers, then a byte at a time": (300, NOBODY + b"0\r\n" + LINE * 15, True, LARGE),
    "a chunk's extension, then a byte at a time": (300, NOBODY + LONG, True, LARGE),
    "a refused body without its last byte": (1700, REFUSED + b"x" * 65535, False, LARGE),
}


@pytest.mark.parametrize("kind", ROUGH)
def test_what_a_stranger_sends_costs_others_nothing(serve, connect, kind, record_property):
    """A good client on new connections beside it is answered; the costs of both are printed."""
    count, data, drips, size = ROUGH[kind]
    server, took = serve(), []
    workers = server.workers()
    assert server.post(MONSTERA)[0] == 200
    before = [usage(pid) for pid in ("self", *workers)]
    strangers = [connect(server, data, buffer=size) for _ in range(count)]
    for number in range(100, 200):
        for stranger in strangers if drips else ():
            with contextlib.suppress(OSError):
                stranger.send(b"x")
        begin = time.monotonic()
        assert server.post({"id": number, "name": "n"})[0] == 200
        took.append(time.monotonic() - begin)
    after = [usage(pid) for pid in ("self", *workers)]
    spent = [now.cpu_time - then.cpu_time for now, then in zip(after, before, strict=True)]
    more = max(now.memory - then.memory for now, then in zip(after[1:], before[1:], strict=True))
    assert server.workers() == workers
    assert more < 60  # MiB: a connection with all that it may send is 64 KiB
    figures = (
        f"slowest good answer {1000 * max(took):.0f} ms, {more:.0f} MiB more in a worker, CPU of "
    )
    record_property(
        kind, figures + f"strangers {spent[0]:.1f} s, of workers {sum(spent[1:]):.1f} s"
    )


PROXIES = {  # configuration and command
    "caddy": (
        "{{\nadmin off\n}}\nhttp://127.0.0.1:{port} {{\nreverse_proxy 127.0.0.1:{server}\n}}",
        "caddy run --adapter caddyfile --config",
    ),
    "nginx": (
        "daemon off; pid pid; error_log error; events {{}} http {{ access_log off; "
        "client_body_temp_path 1; proxy_temp_path 2; fastcgi_temp_path 3; uwsgi_temp_path 4; "
        "scgi_temp_path 5; upstream plants {{ server 127.0.0.1:{server}; keepalive 8; }} "
        "server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://plants; "
        "proxy_http_version 1.1; proxy_set_header Connection ''; proxy_set_header Host $host; "
        "proxy_request_buffering off; proxy_next_upstream off; }} }} }}",
        "nginx -p . -c",
    ),
}


@pytest.mark.parametrize("name", PROXIES)
def test_strangers_break_no_request_of_others_behind_a_proxy(serve, tmp_path, name):
    """Bodies that are refused unread, by length and in chunks, on connections that all share."""
    server, port = serve(), free_port()
    text, command = PROXIES[name]
    (tmp_path / "proxy").write_text(text.format(port=port, server=server.port))
    environment = {**os.environ, "HOME": f"{tmp_path}"}
    proxy = subprocess.Popen(
        [*command.split(), f"{tmp_path}/proxy"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    found = set()

    def refused(body: object) -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, PATIENCE)) as client:
            client.request("POST", "/plants", body, {"Content-Type": "application/json"})
            return client.getresponse().status

    def is_up() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            return refused(b"") == 401
        return False

    try:
        wait_until(is_up)
        with Writers(port, count=6) as writers:
            for _ in range(200):
                found |= {refused(bytes(100_000)), refused(iter([bytes(10_000)] * 10))}
            assert writers.goes_on()
        assert (found, set(writers.answers), dict(writers.failures)) == ({401}, {200}, {})
    finally:
        proxy.terminate()
        proxy.wait()
