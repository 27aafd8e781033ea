"""Clients that are slow, rude or too many: hundreds of each kind keep nobody out."""

import contextlib
import http.client
import os
import re
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.processes import usage
from tests.support.server import HERE, PATIENCE, SHORT, Server, free_port, receive, wait_until
from tests.support.wire import (
    GET,
    HALF_A_BODY,
    HEAD,
    MONSTERA,
    new_plant,
    post,
    receive_answer,
    refused,
    statuses,
)
from tests.support.writers import Writers

PATIENT = "--worker-class=tests.support.workers.Patient"
SMALL, LARGE = 1, 2**16  # bytes
LAST = GET + b"Connection: close\r\n\r\n"
NOBODY = b"POST /plants HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
LINE = b"X: " + b"x" * 995 + b"\r\n"
PIPELINED = b"GET /script.js HTTP/1.1\r\nHost: h\r\n\r\n" * 30
KINDS = {  # what they send at first, whether bytes follow, and how much they read at once
    "nothing": (b"", False, LARGE),
    "half a head": (b"POST /pl", False, LARGE),
    "half a body": (HALF_A_BODY, False, LARGE),
    "a byte at a time": (HEAD, True, LARGE),
    "a long head, then a byte at a time": (GET + LINE * 15, True, LARGE),
    "trailers, then a byte at a time": (NOBODY + b"0\r\n" + LINE * 15, True, LARGE),
    "a chunk's extension, then a byte at a time": (NOBODY + b"1;x=" + b"x" * 4000, True, LARGE),
    "a refused body without its last byte": (
        HEAD.replace(b"Bearer", b"Basic") + b"Content-Length: 65536\r\n\r\n" + b"x" * 65535,
        False,
        LARGE,
    ),
    "idle": (GET + b"\r\n", False, LARGE),
    "holding the connection after the answer": (LAST, True, LARGE),
    "reading the answer a byte at a time": (LAST, False, SMALL),
    "pipelining, and reading nothing": (PIPELINED, False, SMALL),
    "taking no 100 Continue": ((GET + b"Expect: 100-continue\r\n\r\n") * 130, False, SMALL),
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


def is_ready(client: socket.socket, event: int) -> bool:
    """Return whether a call would not wait; unlike select(), for any number of descriptors."""
    poll = select.poll()
    poll.register(client, event)
    return bool(poll.poll(0))


def send_on(client: socket.socket) -> bool:
    """Send another byte where that does not wait; return whether the connection is gone."""
    try:
        if is_ready(client, select.POLLOUT):
            client.send(b"x")
    except ConnectionError:
        return True
    return False


def test_slow_clients_of_each_kind_are_cut_off(serve, connect):
    """A good client is served beside them until then."""
    server = serve(SHORT, "--keep-alive=1")
    clients = {connect(server, data, size): (drips, size) for data, drips, size in KINDS.values()}

    def is_gone(client: socket.socket, drips: bool, size: int) -> bool:
        with contextlib.suppress(ConnectionError):
            has_ended = not drips and is_ready(client, select.POLLIN) and not client.recv(size)
            return (has_ended or drips or size == SMALL) and send_on(client)
        return True

    def are_cut_off() -> bool:
        assert server.post(new_plant())[0] == 200
        for client in [client for client, way in clients.items() if is_gone(client, *way)]:
            del clients[client]
        return not clients

    wait_until(are_cut_off)


@pytest.mark.parametrize("kind", KINDS)
def test_more_clients_than_there_is_room_for_keep_nobody_out(serve, connect, kind, record_property):
    """A good client on new connections is answered; memory is bounded, costs are printed."""
    data, drips, size = KINDS[kind]
    server, took = serve(PATIENT, "--keep-alive=600", WEB_CONCURRENCY="1"), []
    assert server.post(MONSTERA)[0] == 200
    (worker,) = server.workers(1)
    before = usage("self"), usage(worker)
    strangers = [connect(server, data, size) for _ in range(1500)]
    for _ in range(50):
        for stranger in strangers if drips else ():
            send_on(stranger)
        begin = time.monotonic()
        assert server.post(new_plant())[0] == 200
        took.append(time.monotonic() - begin)
    after = usage("self"), usage(worker)
    assert server.workers(1) == [worker]
    more = after[1].memory - before[1].memory
    assert more < 100  # MiB: a connection with all that it may send is 64 KiB
    spent = [now.cpu_time - then.cpu_time for now, then in zip(after, before, strict=True)]
    figures = f"slowest good answer {1000 * max(took):.0f} ms, {more:.0f} MiB more in the worker"
    record_property(kind, f"{figures}, CPU of strangers {spent[0]:.1f} s, of it {spent[1]:.1f} s")


def test_an_idle_client_may_wait_for_longer_than_a_request_takes(serve):
    server = serve(SHORT, "--keep-alive=600", WEB_CONCURRENCY="1")
    with server.connect() as new, server.connect() as idle, server.connect() as late:
        idle.sendall(post(MONSTERA))
        receive_answer(idle)
        late.sendall(HALF_A_BODY)
        refused(receive(late), 408)
        for client in (new, idle):
            client.sendall(post(MONSTERA))
            assert statuses(receive_answer(client)) == [200]


def test_clients_that_send_all_their_requests_at_once_are_served_in_turn(server):
    """One request of each in a round, however many of them are there."""
    nowhere = b"GET /nowhere HTTP/1.1\r\nHost: h\r\nX-Request-ID: %s\r\n\r\n"
    assert server.health() == 200
    (worker,) = server.workers(1)
    with server.connect() as one, server.connect() as other:
        for client in (one, other):
            client.sendall(nowhere % b"first")
            receive_answer(client)
        os.kill(worker, signal.SIGSTOP)  # until all has come
        for name, client in ((b"one", one), (b"other", other)):
            client.sendall(b"".join(nowhere % (b"%s-%d" % (name, i)) for i in range(20)))
        os.kill(worker, signal.SIGCONT)
        assert server.log_line("one-19") and server.log_line("other-19")
    order = re.findall(r" (one|other)-\d+\b", server.out)
    assert 5 <= order[:20].count("one") <= 15


def test_clients_that_send_without_end_do_not_hold_up_others(serve):
    """What is read of a body that nobody wants is bounded, also for a client in a hurry."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    (worker,) = server.workers(1)
    before = usage(worker).descriptors

    def send(head: bytes) -> None:
        with contextlib.suppress(OSError), server.connect() as client:
            client.settimeout(5)  # the system may not reset a connection that had no room left
            client.sendall(head)
            while True:
                client.sendall(b" " * 2**20)

    heads = [HEAD + b"Content-Length: 9999999999\r\n\r\n", b"nonsense\r\n\r\n"] * 2
    senders = [threading.Thread(target=send, args=[head]) for head in heads]
    for sender in senders:
        sender.start()
    for _ in range(20):
        assert server.request("GET", "/openapi.json").status == 200
    wait_until(lambda: usage(worker).descriptors <= before)
    for sender in senders:
        sender.join(PATIENCE)
        assert not sender.is_alive()


def test_few_descriptors_keep_nobody_out(serve, connect):
    """As many as possible are asked for; then one makes room sooner."""
    limits = 'ulimit -S -n 64; ulimit -H -n 96; exec "$@"'
    server = serve(command=["sh", "-c", limits, "sh", *HERE, PATIENT])
    wait_until(lambda: "2 workers of up to 32 connections" in server.err)
    for _ in range(100):
        connect(server, HALF_A_BODY)
    for _ in range(20):
        assert server.post(new_plant())[0] == 200


def test_running_out_of_descriptors_kills_no_worker(serve, connect):
    """Connections wait until there are descriptors again."""
    server = serve()
    server.may_fail = True  # gevent says so with a traceback
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


def test_ten_thousand_connections_leave_nothing_behind(serve, connect, record_property):
    """Opened and closed at once: no thread, no descriptor, and no memory that grows."""
    server, peaks = serve(WEB_CONCURRENCY="1"), []
    assert server.post(MONSTERA)[0] == 200
    (worker,) = server.workers(1)
    before = usage(worker)
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


NGINX = (
    "daemon off; pid pid; error_log error; events {{}} http {{ access_log off; "
    "client_body_temp_path 1; proxy_temp_path 2; fastcgi_temp_path 3; uwsgi_temp_path 4; "
    "scgi_temp_path 5; upstream plants {{ server 127.0.0.1:{server}; keepalive 8; }} "
    "server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://plants; "
    "proxy_http_version 1.1; proxy_set_header Connection ''; proxy_set_header Host $host; "
    "proxy_request_buffering off; proxy_next_upstream off; }} }} }}"
)


def test_strangers_break_no_request_of_others_behind_a_proxy(serve, tmp_path):
    """Bodies that are refused unread, by length and in chunks, on connections that all share."""
    server, port, found = serve(), free_port(), set()
    (tmp_path / "proxy").write_text(NGINX.format(port=port, server=server.port))
    proxy = subprocess.Popen(["nginx", "-p", tmp_path, "-c", "proxy"], stderr=subprocess.DEVNULL)

    def ask(body: object) -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, PATIENCE)) as client:
            client.request("POST", "/plants", body, {"Content-Type": "application/json"})
            return client.getresponse().status

    def is_up() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            return ask(b"") == 401
        return False

    try:
        wait_until(is_up)
        with Writers(port, count=6) as writers:
            for _ in range(200):
                found |= {ask(bytes(100_000)), ask(iter([bytes(10_000)] * 10))}
            assert writers.goes_on()
        assert (found, set(writers.answers), dict(writers.failures)) == ({401}, {200}, {})
    finally:
        proxy.terminate()
        proxy.wait()
