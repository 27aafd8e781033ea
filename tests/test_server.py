"""The service as it runs: real gunicorn processes, real sockets, a kill, signals, the log.

What takes longer, or other options of gunicorn, is in tests/ci/test_server.py.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import SimpleNamespace

import gevent.socket
import pytest
from gunicorn.workers.ggevent import GeventWorker

from app import BODY_LIMIT
from tests.support.locks import lock_held
from tests.support.server import (
    PATIENCE,
    ROOT,
    TOKEN,
    Writers,
    free_port,
    receive,
    wait_until,
)
from tests.support.wire import HEAD, MONSTERA, answers, chunked, post, receive_answer, refused
from worker import HEAD_LIMIT, PAUSE, PIECES, Connection, Worker, pass_chunks

# start and end


def test_the_procfile_and_the_printed_curl_line_store_a_plant_for_good(serve, stored):
    """From nothing to a plant that survives kill -9, with what a newcomer has before them."""
    procfile = (ROOT / "Procfile").read_text()
    assert procfile == "web: gunicorn\n"
    port = free_port()
    server = serve(
        command=["sh", "-c", f"exec {procfile.removeprefix('web: ')}"],
        PLANTS_TOKENS=None,
        PORT=str(port),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    curl = wait_until(lambda: re.search(r"\ncurl .*\n.*\n.*}'\n", server.err))[0]
    _, url, *options = shlex.split(curl.replace("\\\n", ""))
    assert url == f"http://127.0.0.1:{port}/plants"  # though it listens at all addresses
    assert options[::2] == ["-H", "-H", "-d"]
    headers = dict(option.split(": ") for option in options[1:4:2])
    status, _, answer = server.request("POST", "/plants", options[5], headers)
    assert (status, answer) == (200, {"name": "Monstera", "tag": "indoor"})
    assert f"A page to try it is at http://127.0.0.1:{port}/\n" in server.err
    assert server.send(b"GET / HTTP/1.0\r\n\r\n").endswith(b"</html>\n")
    assert re.search(rf"2 workers of up to \d+ connections at http://0.0.0.0:{port}\n", server.err)
    server.kill()
    assert stored() == [(7, "Monstera", "indoor")]


def test_sigterm_drops_nothing(serve, database, stored):
    """Each connection that was made gets its answer, also for a request that was only begun.

    Idle clients are not waited for, though they may wait for longer than this test does.
    """
    lenient = "--worker-class=tests.support.workers.Lenient"
    server = serve(lenient, "--keep-alive=600", "--graceful-timeout=600")
    with (
        Writers(server.port, first=100) as writers,
        server.connect() as begun,
        server.connect() as idle,
    ):
        idle.sendall(post(MONSTERA))
        assert receive_answer(idle).startswith(b"HTTP/1.1 200")
        body = b'{"id": -1, "name": "begun"}'
        begun.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert begun.recv(2**16).startswith(b"HTTP/1.1 100")
        assert writers.goes_on()
        server.signal(signal.SIGTERM)
        wait_until(lambda: writers.failures)  # nobody listens any more
        begun.sendall(body)
        assert answers(receive(begun)) == [(200, {"name": "begun"})]
        assert server.wait() == 0
        assert receive(idle) == b""
    dropped_nothing(writers)
    assert not Path(f"{database}-wal").exists()  # the connections were closed, not just dropped
    rows = {number: name for number, name, _ in stored()}
    assert rows == writers.acknowledged | {-1: "begun", 7: "Monstera"}


def test_a_worker_serves_on_for_a_while_after_sigterm(serve):
    """Where all processes get it, the master may be the last that listens."""
    server = serve("--worker-class=tests.support.workers.Patient", WEB_CONCURRENCY="1")
    (worker,) = server.workers(1)
    assert server.post(MONSTERA)[0] == 200
    server.signal(signal.SIGSTOP)  # it would start another worker
    os.kill(worker, signal.SIGTERM)
    time.sleep(1.5)  # a worker looks once a second whether it has to end
    assert server.post(MONSTERA)[0] == 200


def test_a_client_that_has_just_got_an_answer_is_waited_for_at_the_end(monkeypatch):
    """Its next request may be on its way."""
    worker = object.__new__(Worker)
    worker.alive, worker.exit_delay = False, PATIENCE
    monkeypatch.setattr(GeventWorker, "notify", lambda _: None)
    here, there = gevent.socket.socketpair()
    with here, there:
        connection = Connection(here, PATIENCE, PATIENCE)
        worker.connections = {connection}
        for seconds, is_waited_for in ((0, True), (PATIENCE, False)):
            connection.waiting_since = time.monotonic() - seconds
            worker.notify()
            assert connection.has_ended != is_waited_for


def test_a_worker_that_is_starting_ends_at_once(serve):
    """It has no handlers of its own yet; in those of the master a signal would be lost."""
    for number in (signal.SIGTERM, signal.SIGINT):
        server = serve("--worker-class=tests.support.workers.Starting", "--graceful-timeout=600")
        assert server.workers()
        server.signal(number)
        assert server.wait() == 0


def test_ctrl_c_ends_a_worker_once(serve):
    """It comes from the terminal, and then from the master, here both at the same time."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    (worker,) = server.workers(1)
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGQUIT, signal.SIGCONT):
        os.kill(worker, number)
    wait_until(lambda: f"Worker exiting (pid: {worker})" in server.err)
    assert server.workers(1, besides=[worker])
    server.signal(signal.SIGTERM)
    assert server.wait() == 0  # and there was no traceback


def test_workers_do_not_outlive_their_master(serve):
    server = serve()
    assert server.post(MONSTERA)[0] == 200
    server.signal(signal.SIGKILL)

    def is_refused() -> bool:
        try:
            server.connect().close()
        except ConnectionError as error:  # reset: the listener was closed just then
            return isinstance(error, ConnectionRefusedError)
        return False

    wait_until(is_refused)


def dropped_nothing(writers: Writers) -> None:
    """Assert that every request was answered with 200 until connections were refused.

    The system resets one that is made between the last accept() and the close() of the listener.
    """
    assert set(writers.answers) == {200}
    assert set(writers.failures) <= {ConnectionRefusedError, ConnectionResetError}
    assert writers.failures[ConnectionResetError] <= 1


# bodies over raw sockets


@pytest.mark.parametrize("token", [TOKEN, "another-token-0123456789"])
@pytest.mark.parametrize("way", ["Content-Length", "chunked"])
def test_a_client_that_is_still_sending_gets_to_read_the_answer(server, way, token):
    """413 and 401 reach a client that sends all of a large body before it reads."""
    large = b" " * (256 * BODY_LIMIT)
    head = HEAD.replace(TOKEN.encode(), token.encode())
    if way == "chunked":
        data = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(large, b"")
    else:
        data = head + b"Content-Length: %d\r\n\r\n" % len(large) + large
    refused(server.send(data), 413 if token == TOKEN else 401)


@pytest.mark.parametrize(
    ("way", "body"),
    [(b"Content-Length: 9", b"{" * 9), (b"Transfer-Encoding: chunked", b"0\r\n\r\n")],
)
def test_what_needs_no_body_to_be_refused_is_refused_before_one_comes(server, way, body):
    """Not when its time is up. The connection can still be used if the body's length is known."""
    heads = {
        404: HEAD.replace(b"/plants", b"/nothing"),
        405: HEAD.replace(b"POST", b"PUT"),
        401: HEAD.replace(b"Bearer", b"Basic"),
        415: HEAD.replace(b"/json", b"/http"),
    }
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(server.connect())
        for status, head in heads.items():
            connection.sendall(head + way + b"\r\n\r\n")
            answer = receive_answer(connection)
            refused(answer, status)
            connection.sendall(body)
            if b"\r\nConnection: close\r\n" in answer:
                assert b"chunked" in way
                connection = stack.enter_context(server.connect())


def test_a_bad_token_is_refused_however_it_comes(server):
    good = f"Authorization: Bearer {TOKEN}".encode()
    nobody = HEAD.replace(good + b"\r\n", b"")
    cases = {
        b"Authorization_: Bearer " + TOKEN.encode(): 401,
        b"HTTP_AUTHORIZATION: Bearer " + TOKEN.encode(): 401,
        b"Http-Authorization: Bearer " + TOKEN.encode(): 401,
        good + b"\r\n" + good: 401,
        good + b"\r\n" + good[:-1]: 401,
        good[:-1] + b"\r\n" + good: 401,
        good.replace(b": ", b" : "): 400,
        good.replace(b": ", b":\r\n "): 400,
        good.replace(b"Bearer ", b"Bearer \x00"): 400,
        good + b"x" * HEAD_LIMIT: 431,
    }
    for line, status in cases.items():
        data = server.send(
            post({"id": 102, "name": "Ivy"}, b"Connection: close", line, head=nobody)
        )
        refused(data, status)
        assert (b"\r\nWww-Authenticate: Bearer realm=" in data) == (status == 401)
    assert server.stored(102) is None


@pytest.mark.parametrize("pause", [0, 0.05])
@pytest.mark.parametrize("split", [None, 7, -9])
def test_a_request_may_come_in_pieces(server, pause, split):
    request = post(MONSTERA)
    with server.connect() as connection:
        for _ in range(3):
            for piece in [request[:split], request[split:]] if split else [request]:
                time.sleep(pause)
                connection.sendall(piece)
            assert [status for status, _ in answers(receive_answer(connection))] == [200]


def test_each_further_piece_of_a_request_comes_after_a_pause(monkeypatch):
    pauses = []
    monkeypatch.setattr("gevent.sleep", pauses.append)
    here, there = gevent.socket.socketpair()
    with here, there:
        connection = Connection(here, PATIENCE, PATIENCE)
        there.sendall(b"x" * (PIECES + 2))
        assert all(connection.recv(1) for _ in range(PIECES + 2))
    assert pauses == [PAUSE] * 2


def test_http_1_0_is_understood(server):
    """The connection ends with the answer unless the client asks otherwise; no Host is needed."""
    request = post(MONSTERA).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host: localhost\r\n", b"")
    stays = request.replace(b"\r\n", b"\r\nConnection: keep-alive\r\n", 1)
    assert [status for status, _ in answers(server.send(request * 2))] == [200]
    assert [status for status, _ in answers(server.send(stays + request))] == [200, 200]


@pytest.mark.parametrize(
    "lines",
    [
        b"Connection: keep-alive, close",
        b"Connection: TE ,\tClose",
        b"Connection: keep-alive\r\nConnection: close",
        b"Connection: close\r\nTE: trailers\r\nConnection: TE",
    ],
)
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_close_among_the_options_of_a_connection_closes_it(server, lines, version):
    """After the answer, which says so; what is behind it is not served (RFC 9112 section 9.6)."""
    first = post({"id": 104, "name": "first"}, lines).replace(b"HTTP/1.1", version)
    data = server.send(first + post({"id": 105, "name": "behind"}))
    assert answers(data) == [(200, {"name": "first"})]
    assert b"\r\nConnection: close\r\n" in data
    assert server.stored(105) is None


def test_an_option_like_close_closes_nothing(server):
    lines = b"Connection: closed, x-close", b'Connection: "close"', b"X-Connection: close"
    data = server.send(post(MONSTERA, *lines) + post(MONSTERA, b"Connection: close"))
    assert [status for status, _ in answers(data)] == [200, 200]


@pytest.mark.parametrize("version", [b"HTTP/1.2", b"HTTP/1.9"])
def test_a_higher_version_of_http_is_answered_as_1_1(server, version):
    """Also to what is asked of Host and of chunks (RFC 9110 section 2.5)."""
    head = HEAD.replace(b"HTTP/1.1", version) + b"Transfer-Encoding: chunked\r\n\r\n"
    body = chunked(json.dumps(MONSTERA).encode(), b"")
    data = server.send(head + body + post(MONSTERA, b"Connection: close"))
    assert [status for status, _ in answers(data)] == [200, 200]
    assert data.count(b"HTTP/1.1 200 OK\r\n") == 2
    data = server.send(b"GET /healthz %b\r\nConnection: close\r\n\r\n" % version)
    assert "Host must be" in refused(data, 400)
    assert data.startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_headers_of_a_proxy_change_nothing(server):
    """gunicorn believes such headers from loopback, unless it is told not to."""
    for headers in (
        [b"SCRIPT_NAME: /plants"], [b"SCRIPT_NAME: /x"], [b"PATH_INFO: /healthz"],
        [b"X-Forwarded-Proto: https", b"X-Forwarded-Ssl: off"],
    ):  # fmt: skip
        data = server.send(post(MONSTERA, *headers, b"Connection: close"))
        assert answers(data)[0][0] == 200


# what never comes to the application


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nExpect: a miracle\r\n\r\n", 417),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * HEAD_LIMIT + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 200 + b"\r\n", 431),
        (HEAD + b"Transfer-Encoding: rot13\r\n\r\n", 501),
    ],
    ids=range(6),
)
def test_what_the_parser_refuses_is_an_error_too(server, data, status):
    answer = server.send(data)
    refused(answer, status)
    assert re.search(rb"\r\nX-Request-ID: (?!0{8})[0-9a-f]{32}\r\n", answer)
    assert server.request("GET", "/healthz")[0] == 200


def test_a_head_or_a_body_with_too_many_parts_is_refused(server):
    """64 lines and 16 KiB of a head, and 16 KiB beside a body in chunks, but not one more."""
    get = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    assert b" 200 OK" in server.send(get + b"X: a\r\n" * 62 + b"\r\n")
    refused(server.send(get + b"X: a\r\n" * 63 + b"\r\n"), 431)
    for length, answer in ((HEAD_LIMIT, b" 200 OK"), (HEAD_LIMIT + 1, b" 431 ")):
        assert answer in server.send((get + b"X: ").ljust(length - 4, b"x") + b"\r\n\r\n")
    body = b'{"id": 103, "name": "Ivy"}'.ljust(512)
    head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = chunked(*(body[i : i + 1] for i in range(512)))
    assert answers(server.send(head + chunks + b"0\r\n\r\n")) == [(200, {"name": "Ivy"})]
    parts = (
        (b"1;x=" + b"x" * 1000 + b"\r\n \r\n") * 30,
        b"0\r\n" + (b"X: " + b"x" * 1000 + b"\r\n") * 30,
    )
    for part in parts:
        assert "more than 16384 bytes" in refused(server.send(head + chunks + part), 400)


def test_the_date_of_an_answer_is_when_it_was_made(server):
    with server.connect() as client:

        def date() -> float:
            before = int(time.time())
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
            (line,) = re.findall(rb"\r\nDate: (.*)\r\n", receive_answer(client))
            seconds = parsedate_to_datetime(line.decode()).timestamp()
            assert before <= seconds <= time.time()
            return seconds

        first = date()
        wait_until(lambda: date() > first)


# the access log


def test_the_access_log_has_one_line_a_request_that_no_request_can_forge(server):
    """Method, path without the query, status, bytes, time and request id."""
    path = "/a%0A127.0.0.1%20-%20forged%0D%1B%5B31m%22%E2%80%A8"
    start = len(server.out)
    answers = [
        server.request("GET", "/openapi.json", headers={"X-Request-ID": "my-id"}),
        server.request("GET", f"{path}?secret=canary"),
        server.request("GET", "/healthz"),  # is left out
        server.request("POST", "/plants"),
    ]
    server.send(b"canary\r\n\r\n")
    lines = wait_until(lambda: (new := server.out[start:].splitlines())[3:] and new)
    form = r'127\.0\.0\.1 - - \[\d\d/\w+/\d+:\d\d:\d\d:\d\d [+-]\d{4}\] "(.+)" (\d+) (\d+) '
    form += r"\d+\.\d{4}s (\S+)"
    assert [re.fullmatch(form, line)[1] for line in lines] == [
        "GET /openapi.json",
        f"GET {path}",
        "POST /plants",
        "InvalidRequestLine",
    ]
    for line, (status, headers, _) in zip(
        lines, [answers[0], answers[1], answers[3]], strict=False
    ):
        _, *found = re.fullmatch(form, line).groups()
        assert found == [f"{status}", headers["content-length"], headers["x-request-id"]]
    assert [answer[0] for answer in answers] == [200, 404, 200, 401]
    assert "canary" not in server.out + server.err


def test_the_access_log_can_go_elsewhere(serve, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog:
        syslog.bind(f"{tmp_path}/syslog")
        syslog.settimeout(PATIENCE)
        options = [f"--access-logfile={tmp_path}/access.log", "--log-syslog"]
        server = serve(*options, f"--log-syslog-to=unix://{tmp_path}/syslog#dgram")
        assert server.request("GET", "/nowhere")[0] == 404
        wait_until(lambda: b"GET /nowhere" in syslog.recv(2**16))
    wait_until(lambda: '"GET /nowhere" 404' in (tmp_path / "access.log").read_text())
    assert server.out == ""


# many clients


def test_a_wait_for_the_database_holds_up_no_other_request(server):
    """The lock is waited for in a real thread; gevent can't pause that."""
    with server.connect() as waiting:
        with lock_held(Path(server.url.removeprefix("sqlite:///"))):
            waiting.sendall(post({"id": 106, "name": "Ivy"}))
            for _ in range(9):  # by the second one the plant is on its way
                assert server.request("GET", "/openapi.json")[0] == 200
        assert answers(receive_answer(waiting)) == [(200, {"name": "Ivy"})]


def test_a_request_that_came_with_the_last_one_waits_for_others(monkeypatch):
    order = []
    monkeypatch.setattr(GeventWorker, "handle_request", lambda *_: order.append("this"))
    worker = object.__new__(Worker)
    worker.cfg = SimpleNamespace(keepalive=PATIENCE)
    body = SimpleNamespace(reader=SimpleNamespace(length=0))
    here, there = gevent.socket.socketpair()
    with here, there:
        gevent.spawn(order.append, "other")
        request = SimpleNamespace(version=(1, 1), headers=[], body=body)
        worker.handle_request(None, request, Connection(here, PATIENCE, PATIENCE), None)
    assert order == ["other", "this"]


def test_a_chunk_that_came_with_the_last_one_waits_for_others():
    """Its length may be followed by much that has no meaning, but takes time to read."""
    order = []
    gevent.spawn(order.append, "other")
    order += pass_chunks(iter([b"this"]), SimpleNamespace(), SimpleNamespace(room=0))
    assert order == ["other", b"this"]


def test_a_client_that_never_stops_sending_is_left_in_the_end():
    here, there = gevent.socket.socketpair()

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                there.send(b"x")

    with here, there:
        sending = gevent.spawn(send)
        gevent.spawn(Connection(here, PATIENCE, 0.05).close).get(timeout=PATIENCE)
        sending.kill()


def test_who_does_not_take_an_answer_makes_room_and_who_is_served_does_not(monkeypatch):
    """Before those that have waited longer, and once: its place is free at once."""
    monkeypatch.setattr(GeventWorker, "handle", lambda *_: None)
    worker = object.__new__(Worker)
    worker.worker_connections = 4
    with contextlib.ExitStack() as sockets:
        ends = [
            sockets.enter_context(each) for _ in range(2) for each in gevent.socket.socketpair()
        ]
        served, idle, unread = (Connection(end, PATIENCE, PATIENCE) for end in ends[:3])
        served.is_waiting = False
        unread.flush()
        worker.connections = {served, idle, unread}
        worker.handle(SimpleNamespace(), ends[3], None)
        assert [each.has_ended for each in (served, idle, unread)] == [False, False, True]


def test_the_more_are_served_the_more_are_accepted_at_a_time(monkeypatch):
    """A round of the event loop takes longer then; who connects must not wait for many of them."""
    monkeypatch.setattr(GeventWorker, "handle", lambda *_: None)
    worker, server = object.__new__(Worker), SimpleNamespace()
    worker.worker_connections = 1000
    client = SimpleNamespace(setblocking=None)
    for count, at_a_time in ((0, 1), (40, 11), (400, 101)):
        worker.connections = {Connection(client, PATIENCE, PATIENCE) for _ in range(count)}
        worker.handle(server, client, None)
        assert server.max_accept == at_a_time


def test_a_client_whose_next_request_is_always_there_waits_for_others():
    """One that has to send its request first is served as often: each waits in the event loop."""
    order = []

    def serve(name: str, here: gevent.socket.socket) -> None:
        connection = Connection(here, PATIENCE, PATIENCE)
        for _ in range(30):
            connection.recv(1)
            order.append(name)
            here.send(b"y")
            connection.set_deadline(PATIENCE, is_idle=True)
            gevent.sleep(0)

    def ask(there: gevent.socket.socket) -> None:
        for _ in range(30):
            there.send(b"x")
            there.recv(1)

    many, one = gevent.socket.socketpair(), gevent.socket.socketpair()
    many[1].send(b"x" * 30)
    clients = gevent.spawn(serve, "many", many[0]), gevent.spawn(serve, "one", one[0])
    gevent.joinall([*clients, gevent.spawn(ask, one[1])], PATIENCE)
    for each in (*many, *one):
        each.close()
    assert order[:30].count("one") > 8
