"""Requests that are there as a whole: no thread handles them, and their answers are held back.

A client must not be able to tell, but for the time that it takes.
"""

import contextlib
import fcntl
import os
import re
import runpy
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gunicorn.config import Config
from gunicorn.http.unreader import SocketUnreader
from gunicorn.workers.gthread import TConn

from tests.support.locks import locked
from tests.support.server import (
    PATIENCE,
    ROOT,
    TOKEN,
    Server,
    change,
    copy_service,
    settings_with,
    usage,
    wait_until,
)
from tests.support.wire import HEAD, MONSTERA, answers, post, receive_answer, refused

ENOUGH = 1  # seconds in which what must not happen would have happened
UNAUTHORIZED = post(MONSTERA, head=HEAD.replace(TOKEN.encode(), b"x" * 20))
REQUESTS = {
    "new": post({"id": 8, "name": "Ivy"}),
    "the same again": post(MONSTERA),
    "a conflict": post({**MONSTERA, "name": "Ivy"}),
    "a conflict, and the last": post({**MONSTERA, "name": "Ivy"}, b"Connection: close"),
    "a new plant, and the last": post({"id": 9, "name": "Ivy"}, b"Connection: close"),
    "HTTP/1.0": post({"id": 10, "name": "Ivy"}, head=HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")),
    "no plant": post({"id": "x"}),
    "nothing": post(b""),
    "no token": UNAUTHORIZED,
    "another path": post(MONSTERA, head=HEAD.replace(b"/plants", b"/")),
    "another type": post(MONSTERA, head=HEAD.replace(b"application/json", b"text/plain")),
    "two lengths": post(MONSTERA, b"Content-Length: 46"),
    "a bad header": post(MONSTERA, b"a b: c"),
}


@pytest.fixture
def url(database: Path) -> str:
    """SQLite alone: what is tested here is the server."""
    return f"sqlite:///{database}"


def is_unanswered(connection: socket.socket) -> bool:
    """Whether nothing has come on a connection."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
        return False
    except BlockingIOError:
        return True
    finally:
        connection.settimeout(PATIENCE)


def used(server: Server) -> socket.socket:
    """A connection on which a request was answered already, as most are."""
    connection = server.connect()
    connection.sendall(post(MONSTERA))
    assert answers(receive_answer(connection))[0][0] == 200
    return connection


def whole(data: bytes, is_new: bool = False, **settings: Any) -> bytes:
    """What the server sees as a whole request when `data` has come; it loses none of it."""
    take_request = runpy.run_path(str(ROOT / "gunicorn.conf.py"))["take_request"]
    config = Config()
    for name, value in settings.items():
        config.set(name, value)
    client, sock = socket.socketpair()
    with client, sock:
        client.sendall(data)
        conn = TConn(config, sock, ("127.0.0.1", 1), ("127.0.0.1", 2))
        if not is_new:
            conn.init()
        request = take_request(conn)
        unreader = conn.parser.unreader if conn.initialized else SocketUnreader(sock)
        assert not request or unreader.buf.getvalue() == request  # what comes now is another
        assert unreader.read(len(data)) == data
    return request


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_a_request_in_one_piece_is_answered_as_one_in_two(serve, request_):
    """Byte for byte but for the id of the request; and so it is with what follows."""
    server = serve(WEB_CONCURRENCY="1")
    assert whole(request_) == whole(request_, is_new=True) == request_
    found = []
    for pieces in ([request_], [request_[:30], request_[30:]]):
        with used(server) as connection:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.05)  # so that it is read before the next comes
            data = receive_answer(connection)
            with contextlib.suppress(OSError):
                connection.sendall(post(MONSTERA))
                if after := connection.recv(2**16):
                    data += after
        found.append(re.sub(rb"(X-Request-ID|Date): [^\r]+", rb"\1", data))
    assert found[0] == found[1]
    count = 2 * len(answers(found[0])) + 2
    wait_until(lambda: len(server.out.splitlines()) >= count)  # it is written after the answer
    assert len(re.findall('" [0-9]{3} ', server.out)) == count


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST",
        REQUESTS["new"][:-1],
        REQUESTS["new"] + b"P",
        HEAD + b"\r\n",
        HEAD + b"Content-Length: 0",
        HEAD + b"Content-Length: 0\r\n",
        b"GET /openapi.json HTTP/1.1\r\n\r\n",
        post({"id": 8, "name": "x" * 2**13}),
        post(MONSTERA, b"Expect: 100-continue"),
        post(MONSTERA, b"expect : 100-continue"),
        post(MONSTERA, b"TRANSFER-ENCODING: chunked"),
        post(MONSTERA, b"Upgrade: h2c", b"Connection: Upgrade"),
        REQUESTS["new"].replace(b"\r\n", b"\n"),
    ],
)
def test_what_may_have_to_wait_is_not_whole(data):
    """A thread looks into it."""
    assert not whole(data)
    assert not whole(data, is_new=True)


@pytest.mark.parametrize(
    "settings", [{"certfile": __file__}, {"http2_cleartext": "prior-knowledge"}]
)
def test_nothing_is_whole_where_another_protocol_may_be_spoken(settings):
    """To find out which takes a handshake, which may have to wait."""
    assert whole(REQUESTS["new"], is_new=True)
    assert not whole(REQUESTS["new"], is_new=True, **settings)


def test_a_storage_that_hangs_keeps_no_other_request_waiting(serve, database):
    """The answer is held back, without a thread for it, and given when the plant is stored."""
    server = serve(settings_with(database.parent, HOLD_LIMIT=600), WEB_CONCURRENCY="1")
    (worker,) = server.workers(1)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(used(server)) for _ in range(50)]
        other = stack.enter_context(used(server))
        with locked(database):
            for number, client in enumerate(clients):
                client.sendall(post({"id": 100 + number, "name": "Ivy"}))
            other.sendall(UNAUTHORIZED)
            assert answers(receive_answer(other))[0][0] == 401
            assert all(map(is_unanswered, clients))
            assert usage(worker).threads < len(clients)
        found = [answers(receive_answer(client)) for client in clients]
    assert found == [[(200, {"name": "Ivy"})]] * len(clients)


def test_an_answer_is_not_held_back_for_ever(serve, database, stored, tmp_path):
    """Threads wait from then on; each request is answered, logged and stored once."""
    options = copy_service(tmp_path / "copy")
    change(tmp_path / "copy" / "storage.py", "WAIT_LIMIT = 10.0", "WAIT_LIMIT = 600.0")
    server = serve(*options, WEB_CONCURRENCY="1")
    (worker,) = server.workers(1)
    numbers = range(100, 150)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(used(server)) for _ in numbers]
        with locked(database):
            for number, client in zip(numbers, clients, strict=True):
                client.sendall(post({"id": number, "name": "Ivy"}, b"X-Request-ID: n%d" % number))
            wait_until(lambda: usage(worker).threads > len(clients))
            assert all(map(is_unanswered, clients))
        found = [answers(receive_answer(client)) for client in clients]
    assert found == [[(200, {"name": "Ivy"})]] * len(clients)
    lines = wait_until(lambda: len(found := re.findall(r"n1\d\d\n", server.out)) >= 50 and found)
    assert sorted(lines) == [f"n{number}\n" for number in numbers]
    assert stored() == [(7, "Monstera", "indoor"), *((number, "Ivy", None) for number in numbers)]


def test_the_time_in_the_log_is_that_until_the_answer(serve, database):
    """The wait for the storage is part of it."""
    server = serve(settings_with(database.parent, HOLD_LIMIT=600), WEB_CONCURRENCY="1")
    with used(server) as client:
        with locked(database):
            client.sendall(post({"id": 8, "name": "Ivy"}, b"X-Request-ID: held"))
            time.sleep(ENOUGH)
            assert "held" not in server.out
        receive_answer(client)
    (held,) = wait_until(lambda: re.findall(r'" 200 \d+ ([\d.]+)s held\n', server.out))
    assert ENOUGH / 2 < float(held) < 600


def test_a_client_that_reads_late_gets_all_answers(serve, database):
    """What it has no room for yet is sent by a thread, and nobody else waits for that."""
    server = serve(WEB_CONCURRENCY="1")
    limit, name = 2000, "x" * 7000

    def is_stored(number: int) -> bool:
        until = time.monotonic() + ENOUGH
        while time.monotonic() < until:
            if table.execute("SELECT 1 FROM plants WHERE id = ?", [number]).fetchone():
                return True
        return False

    with contextlib.ExitStack() as stack:
        other, client = stack.enter_context(used(server)), stack.enter_context(socket.socket())
        table = stack.enter_context(contextlib.closing(sqlite3.connect(database)))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.settimeout(PATIENCE)
        client.connect(("127.0.0.1", server.port))
        for sent in range(1, limit):  # until the answers fill what there is between the two
            client.sendall(post({"id": 100 + sent, "name": name}))
            if not is_stored(100 + sent):
                break
        assert 1 < sent < limit - 1
        other.sendall(post(MONSTERA))
        assert answers(receive_answer(other))[0][0] == 200
        data = b""
        while data.count(b"HTTP/1.1 200") < sent or not data.endswith(b"}"):
            data += client.recv(2**16)
    assert answers(data) == [(200, {"name": name})] * sent


def test_the_rest_of_a_request_is_not_a_whole_one(serve):
    """Though it looks like one, and comes apart from the request's head."""
    server = serve(WEB_CONCURRENCY="1")
    rest = REQUESTS["new"]
    head = HEAD + b"Content-Length: %d\r\n\r\n" % (len(rest) + 1)
    unfilled = post(MONSTERA, b"X-Filling: ")
    first = post(MONSTERA, b"X-Filling: " + b"x" * (2**13 - len(unfilled + head)))
    assert len(first + head) == 2**13  # which is what gunicorn reads at once
    with used(server) as client:
        client.sendall(first + head + rest)
        assert answers(receive_answer(client))[0][0] == 200
        time.sleep(0.1)  # in which it has looked at the rest
        client.sendall(b"}")
        ((status, error),) = answers(receive_answer(client))
    assert (status, error["message"][:21]) == (400, "the plant is not JSON")


@contextlib.contextmanager
def unread(
    serve: Callable[..., Server], folder: Path, lines_limit: int
) -> Iterator[tuple[Server, list[socket.socket], Callable[[], bool]]]:
    """A server and 50 connections on which it has answered, with a log that nobody has read yet.

    The log has room for 4 KiB only, and its lines take more; the last of the three reads on, and
    tells whether all are there.
    """
    log, numbers = folder / "log", range(100, 150)
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    data = b""

    def all_logged() -> bool:
        nonlocal data
        with contextlib.suppress(BlockingIOError):
            data += os.read(reader, 2**16)
        found = re.findall(rb'[^ ]+ - - [^"]+ "POST /plants" 200 .* (\d+)x{100}\n', data)
        return sorted(map(int, found)) == list(numbers)

    with contextlib.ExitStack() as stack:
        stack.callback(os.close, reader)
        with contextlib.suppress(AttributeError):  # only Linux has it
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
        options = [settings_with(folder, LINES_LIMIT=lines_limit), f"--access-logfile={log}"]
        server = serve(*options, WEB_CONCURRENCY="1")
        clients = [stack.enter_context(server.connect()) for _ in numbers]
        for number, client in zip(numbers, clients, strict=True):
            request_id = b"X-Request-ID: %d%s" % (number, b"x" * 100)
            client.sendall(post({"id": number, "name": "Ivy"}, request_id))
            assert answers(receive_answer(client)) == [(200, {"name": "Ivy"})]
        yield server, clients, all_logged


@pytest.mark.parametrize("lines_limit", [10, 1000])
def test_a_log_that_nobody_reads_keeps_no_answer_back(serve, tmp_path, lines_limit):
    """Lines wait for room in it, and threads with some; all are there when it is read."""
    with unread(serve, tmp_path, lines_limit) as (_, _, all_logged):
        wait_until(all_logged)


def test_a_log_that_is_read_late_has_all_lines(serve, tmp_path):
    """The worker waits with its end until they are written."""
    with unread(serve, tmp_path, 1000) as (server, clients, all_logged):
        server.process.terminate()
        assert [client.recv(1) for client in clients] == [b""] * len(clients)
        wait_until(all_logged)
        assert server.process.wait(PATIENCE) == 0


def test_what_fails_after_the_answer_does_not_answer_again(serve, tmp_path):
    """A signal that ends the process, for example; the connection ends instead."""
    options = copy_service(tmp_path / "copy")
    settings = tmp_path / "copy" / "gunicorn.conf.py"
    change(settings, "        self.when_sent(resp.sock", "        sys.exit(1)\n        (resp.sock")
    server = serve(*options, WEB_CONCURRENCY="1")
    server.may_fail = True
    assert refused(server.send(UNAUTHORIZED), 401)
