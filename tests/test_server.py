"""The service as it runs: real gunicorn processes, real sockets, signals and kills."""

import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from app import BODY_LIMIT
from storage import Storage
from tests.conftest import require_programs
from tests.support.locks import can_lock, locked
from tests.support.server import (
    GUNICORN,
    HERE,
    PATIENCE,
    ROOT,
    TOKEN,
    Server,
    Writers,
    change,
    copy_service,
    free_port,
    is_alive,
    receive,
    settings_with,
    usage,
    wait_until,
)
from tests.support.wire import HEAD, MONSTERA, answers, chunked, post, receive_answer, refused


@pytest.fixture
def url(database: Path) -> str:
    """SQLite alone: what is tested here is the server."""
    return f"sqlite:///{database}"


# the main job


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
    assert server.port == port
    run_printed_curl(server)
    server.kill()
    assert stored() == [(7, "Monstera", "indoor")]


def test_the_curl_line_for_a_socket_works_too(serve, tmp_path, stored):
    """A proxy on the same machine may be served through one."""
    server = serve(command=[GUNICORN, "--bind", f"unix:{tmp_path}/s"], PLANTS_TOKENS=None)
    run_printed_curl(server)
    assert stored() == [(7, "Monstera", "indoor")]


def run_printed_curl(server: Server) -> None:
    require_programs("curl")
    curl = wait_until(lambda: re.search(r"\ncurl .*\n.*\n.*}'\n", server.err))[0]
    answer = subprocess.run(["sh", "-c", curl], capture_output=True, timeout=PATIENCE)
    assert answer.stdout == b'{"name": "Monstera", "tag": "indoor"}'


def test_workers_share_the_tokens(serve, stored):
    """Each worker, while all the others are stopped, takes the same token."""
    server = serve(WEB_CONCURRENCY="3")
    workers = server.workers(3)
    for number, only in enumerate(workers):
        for pid in workers:
            os.kill(pid, signal.SIGCONT if pid == only else signal.SIGSTOP)
        assert server.post({"id": number, "name": "n"})[0] == 200
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    assert len(stored()) == 3


def test_workers_write_at_once(serve, stored):
    """Every plant is there, and nothing fails."""
    server = serve(WEB_CONCURRENCY="3")
    statuses = []

    def work(first: int) -> None:
        for number in range(first, first + 25):
            statuses.append(server.post({"id": number, "name": "n"})[0])

    assert server.port
    threads = [threading.Thread(target=work, args=(n * 25,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert statuses == [200] * 200
    assert [row[0] for row in stored()] == list(range(200))


# signals


def test_sigterm_lets_requests_in_flight_finish(serve, database, stored):
    """A request that was begun is answered and stored, then the server ends with status 0."""
    server = serve()
    body = json.dumps(MONSTERA).encode()
    with server.connect() as connection:
        connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert connection.recv(2**16).startswith(b"HTTP/1.1 100")
        server.signal(signal.SIGTERM)
        wait_until(lambda: "Handling signal: term" in server.err)
        connection.sendall(body)
        assert answers(receive(connection))[0][0] == 200
    assert server.wait() == 0
    assert not Path(f"{database}-wal").exists()  # the connections were closed, not just dropped
    assert stored() == [(7, "Monstera", "indoor")]


@pytest.mark.parametrize("everybody", [False, True])
def test_sigterm_under_load_drops_nothing(serve, stored, tmp_path, everybody):
    """Each connection that was made gets its answer, and then there are no more connections.

    To the master, or to all processes as some platforms do it; the master may be the last.
    """
    server = serve(settings_with(tmp_path, END_DELAY=4.0))
    workers = server.workers()
    with Writers(server.port) as writers:
        assert writers.goes_on()
        if everybody:
            for pid in workers:
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.1)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert set(writers.answers) == {200}
    assert set(writers.failures) <= {ConnectionRefusedError}
    assert dict(writers.acknowledged.items()) == {number: name for number, name, _ in stored()}


def test_sighup_under_load_drops_nothing(serve):
    """Nobody is refused while new workers take over."""
    server = serve()
    before = server.workers()
    with Writers(server.port) as writers:
        assert writers.goes_on()
        server.signal(signal.SIGHUP)
        assert server.workers(besides=before)
        wait_until(lambda: not any(map(is_alive, before)))
        assert writers.goes_on()
    assert (set(writers.answers), set(writers.failures)) == ({200}, set())


def test_a_worker_with_no_thread_left_ends_as_any_other(serve, tmp_path):
    """To end takes none; here it is the memory for their stacks that is limited."""
    settings = settings_with(tmp_path, REQUEST_LIMIT=3.0)
    limited = ["sh", "-c", 'ulimit -v 1500000; exec "$@"', "sh", *HERE, settings]
    server = serve(command=limited, WEB_CONCURRENCY="1")
    with contextlib.ExitStack() as hogs:
        halves = [hogs.enter_context(server.connect()) for _ in range(300)]
        for half in halves:
            half.sendall(HEAD + b"Content-Length: 9\r\n\r\n{")
        (worker,) = server.workers(1)
        wait_until(lambda: usage(worker).descriptors > len(halves))
        assert usage(worker).threads < len(halves)
        server.signal(signal.SIGTERM)
        assert refused(receive(halves[0]), 400)
    assert server.wait() == 0
    assert "Exception" not in server.err


@pytest.mark.parametrize(("number", "limit"), [(signal.SIGTERM, 0.5), (signal.SIGINT, 600)])
def test_the_end_does_not_wait_for_idle_clients(serve, tmp_path, number, limit):
    """SIGTERM gives requests that were begun their time, and no others; SIGINT gives none."""
    server = serve(settings_with(tmp_path, 0.1, REQUEST_LIMIT=limit, graceful_timeout=600))
    idle = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as hogs:
        for data in (b"", b"POST /pl", HEAD + b"Content-Length: 9\r\n\r\n{", idle) * 10:
            hogs.enter_context(server.connect()).sendall(data)
        time.sleep(1)  # longer than a thread waits for the first byte
        server.signal(number)
        assert server.wait() == 0


def test_sighup_takes_changed_code_and_keeps_the_token(serve, tmp_path):
    """New workers run the code as it is now; a token that was made at start stays good."""
    copy = tmp_path / "copy"
    options = copy_service(copy)
    server = serve(*options, PLANTS_TOKENS=None, PYTHONDONTWRITEBYTECODE="1")
    token = printed_token(server)
    assert server.request("GET", "/healthz")[2] == {"status": "ok"}
    assert server.post(MONSTERA, token)[0] == 200
    before = server.workers()
    change(copy / "app.py", '"status": "ok"', '"status": "changed"')
    server.signal(signal.SIGHUP)
    assert server.workers(besides=before)
    wait_until(lambda: not any(map(is_alive, before)))
    assert server.request("GET", "/healthz")[2] == {"status": "changed"}
    assert server.post(MONSTERA, token)[0] == 200
    assert server.err.count("Bearer ") == 1


def printed_token(server: Server) -> str:
    assert server.port
    return wait_until(lambda: re.search("Authorization: Bearer ([^']+)'", server.err))[1]


def test_sigusr2_keeps_the_token(serve):
    """A new master is started with the environment that gunicorn has saved, and the token."""
    server = serve(PLANTS_TOKENS=None)
    token = printed_token(server)
    assert server.post(MONSTERA, token)[0] == 200
    before = server.workers()
    server.signal(signal.SIGUSR2)
    assert server.workers(besides=before)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    wait_until(lambda: not any(map(is_alive, before)))
    assert server.post(MONSTERA, token)[0] == 200
    assert server.err.count("Bearer ") == 1


def test_a_token_is_made_once_for_all_workers_and_is_in_no_log_line(serve):
    """It is printed at start, and nowhere else."""
    server = serve(PLANTS_TOKENS=None)
    token = printed_token(server)
    assert len(token) >= 32
    assert server.workers()
    assert {server.post(MONSTERA, token)[0] for _ in range(20)} == {200}
    server.request("GET", f"/plants?access_token={token}")
    server.send(f"GET / HTTP/1.1\r\nAuthorization Bearer {token}\r\n\r\n".encode())
    wait_until(lambda: "InvalidHeader" in server.out)
    assert server.err.count(token) == 1
    assert token not in server.out


def test_the_access_log_can_go_elsewhere(serve, tmp_path):
    """To a file, and to syslog, as gunicorn's options say."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog:
        syslog.bind(f"{tmp_path}/syslog")
        syslog.settimeout(PATIENCE)
        options = [f"--access-logfile={tmp_path}/access.log", "--log-syslog"]
        server = serve(*options, f"--log-syslog-to=unix://{tmp_path}/syslog#dgram")
        assert server.request("GET", "/nowhere")[0] == 404
        wait_until(lambda: b"GET /nowhere" in syslog.recv(2**16))
    wait_until(lambda: '"GET /nowhere" 404' in (tmp_path / "access.log").read_text())
    assert server.out == ""


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


# bodies over raw sockets


@pytest.fixture
def server(serve):
    return serve()


def test_a_chunked_body_is_taken(server, stored):
    """gunicorn undoes the chunks but leaves the header; Bottle would undo them again."""
    body = json.dumps(MONSTERA).encode()
    head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    for chunks in ([body], [body[:1], body[1:9], body[9:]], [bytes([byte]) for byte in body]):
        ((status, answer),) = answers(server.send(head + chunked(*chunks, b"")))
        assert (status, answer) == (200, {"name": "Monstera", "tag": "indoor"})
    assert stored() == [(7, "Monstera", "indoor")]


def test_a_body_cut_short_is_a_400_and_stores_nothing(server, stored):
    """What came was a whole plant, but not all that was announced."""
    body = json.dumps(MONSTERA).encode()
    with server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (len(body) + 5) + body)
        connection.shutdown(socket.SHUT_WR)
        data = receive(connection)
    assert f"ended after {len(body)}" in refused(data, 400)
    assert stored() == []


@pytest.mark.parametrize("token", [TOKEN, "another-token-0123456789"])
@pytest.mark.parametrize("way", ["Content-Length", "chunked"])
def test_who_is_still_sending_gets_to_read_the_answer(server, stored, way, token):
    """413 and 401 reach a client that sends all of a large body before it reads."""
    large = b" " * (32 * BODY_LIMIT)
    head = HEAD.replace(TOKEN.encode(), token.encode())
    if way == "chunked":
        data = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(large, b"")
    else:
        data = head + b"Content-Length: %d\r\n\r\n" % len(large) + large
    refused(server.send(data), 413 if token == TOKEN else 401)
    assert stored() == []


@pytest.mark.parametrize(
    ("way", "body"),
    [(b"Content-Length: 9", b"{" * 9), (b"Transfer-Encoding: chunked", b"0\r\n\r\n")],
)
def test_what_needs_no_body_to_be_refused_is_refused_before_one_comes(server, way, body):
    """Not when its time is up: the connection can still be used."""
    heads = {
        404: HEAD.replace(b"/plants", b"/nothing"),
        405: HEAD.replace(b"POST", b"PUT"),
        401: HEAD.replace(b"Bearer", b"Basic"),
        415: HEAD.replace(b"/json", b"/http"),
    }
    with server.connect() as connection:
        for status, head in heads.items():
            connection.sendall(head + way + b"\r\n\r\n")
            refused(receive_answer(connection), status)
            connection.sendall(body)


def test_a_bad_token_is_refused_however_it_comes(server, stored):
    """Over a socket: header lines that a client library would not send."""
    good = f"Authorization: Bearer {TOKEN}".encode()
    nobody = HEAD.replace(good + b"\r\n", b"")
    body = json.dumps(MONSTERA).encode()
    cases = {
        b"": 401,
        b"Authorization: Bearer \xff\xfe": 401,
        b"Authorization: Bearer t\xc3\xb6ken-0123456789": 401,
        b"Authorization:": 401,
        b"Authorization_: Bearer " + TOKEN.encode(): 401,
        b"HTTP_AUTHORIZATION: Bearer " + TOKEN.encode(): 401,
        b"Http-Authorization: Bearer " + TOKEN.encode(): 401,
        good + b"\r\n" + good: 401,
        good + b"\r\n" + good[:-1]: 401,
        good[:-1] + b"\r\n" + good: 401,
        good.replace(b": ", b" : "): 400,
        good.replace(b": ", b":\r\n "): 400,
        good.replace(b"Bearer ", b"Bearer \x00"): 400,
        good + b"x" * 2**13: 431,
        good + b"x" * 2**20: 431,
    }
    for line, status in cases.items():
        head = nobody + line + b"\r\n" if line else nobody
        data = server.send(
            head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        refused(data, status)
        assert (b"\r\nWww-Authenticate: Bearer realm=" in data) == (status == 401)
    assert stored() == []


def test_requests_follow_each_other_on_a_connection(server, stored):
    """A refused request with a body leaves the connection usable."""
    no_token = post(MONSTERA, head=HEAD.replace(b"Bearer", b"Basic"))
    data = server.send(no_token + post(MONSTERA) + post(MONSTERA, b"Connection: close"))
    assert [status for status, _ in answers(data)] == [401, 200, 200]


@pytest.mark.parametrize("pause", [0, 0.05])
@pytest.mark.parametrize("split", [None, 7, -9])
def test_requests_of_a_connection_can_come_one_by_one(server, stored, pause, split):
    """At once or after longer than a thread waits for the next, whole or in two pieces."""
    post = json.dumps(MONSTERA).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(post) + post
    with server.connect() as connection:
        for _ in range(5):
            for piece in [request[:split], request[split:]] if split else [request]:
                time.sleep(pause)
                connection.sendall(piece)
            assert [status for status, _ in answers(receive_answer(connection))] == [200]
    assert stored() == [(7, "Monstera", "indoor")]


def test_each_request_of_a_connection_has_a_time_limit_of_its_own(serve, tmp_path):
    """A busy connection is not cut off, but one whose next request does not come to its end is."""
    server = serve(settings_with(tmp_path, REQUEST_LIMIT=1.0))
    request = post(MONSTERA)
    with server.connect() as connection:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            connection.sendall(request)
            assert [status for status, _ in answers(receive_answer(connection))] == [200]
        connection.sendall(request + request[:-1])
        assert [status for status, _ in answers(receive(connection))] == [200, 400]


# what never comes to the application


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"get / HTTP/1.1\r\n\r\n", 400),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nExpect: a miracle\r\n\r\n", 417),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 200 + b"\r\n", 431),
        (HEAD + b"Transfer-Encoding: rot13\r\n\r\n", 501),
    ],
    ids=range(8),
)
def test_what_the_parser_refuses_is_an_error_too(server, stored, data, status):
    """gunicorn itself would answer with HTML."""
    refused(server.send(data), status)
    assert server.request("GET", "/healthz")[0] == 200
    assert stored() == []


def test_a_failure_of_the_server_itself_is_an_error_too(serve, tmp_path):
    """What the application can't catch: nothing from inside is told, the log has it all."""
    (tmp_path / "broken.py").write_text("def app(environ, start_response):\n    raise MemoryError")
    server = serve(f"--pythonpath={tmp_path}", "broken:app")
    server.may_fail = True
    assert refused(server.send(b"GET / HTTP/1.1\r\n\r\n"), 500) == "the service failed"
    wait_until(lambda: "MemoryError" in server.err)


def test_a_large_body_of_many_names_is_refused_quickly(server):
    """The time to find a name that is given twice grows with the body, not with its square."""
    names = ", ".join(f'"{number}": 0' for number in range(82_000))
    body = f'{{{names}, "81999": 1}}'.encode()
    assert 0.9 * BODY_LIMIT < len(body) <= BODY_LIMIT
    message = refused(server.send(post(body, b"Connection: close")), 400)
    assert message == '"81999": given more than once'


def test_a_script_name_header_changes_nothing(server):
    """gunicorn believes such a header from loopback, unless it is told not to."""
    for header in (b"SCRIPT_NAME: /plants", b"SCRIPT_NAME: /x", b"PATH_INFO: /healthz"):
        data = server.send(post(MONSTERA, header, b"Connection: close"))
        assert answers(data)[0][0] == 200


def test_the_access_log_has_one_line_a_request_that_no_request_can_forge(server):
    """Method, path without the query, status, bytes, time and request id."""
    path = "/a%0A127.0.0.1%20-%20forged%0D%1B%5B31m%22%E2%80%A8"
    requests = [
        lambda: server.request("GET", "/openapi.json", headers={"X-Request-ID": "my-id"}),
        lambda: server.request("GET", f"{path}?secret=canary"),
        lambda: server.send(b"POST /plants HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    ]
    for count, request in enumerate(requests, 1):
        request()
        wait_until(lambda count=count: server.out.count("\n") == count)
    lines = server.out.splitlines()
    form = r'127\.0\.0\.1 - - \[\d\d/\w+/\d+:\d\d:\d\d:\d\d [+-]\d{4}\] "(.+)" (\d+) (\d+) '
    form += r"\d+\.\d{4}s (\S+)"
    first, second, third = (re.fullmatch(form, line).groups() for line in lines)
    _, headers, _ = server.request("HEAD", "/openapi.json")
    assert first == ("GET /openapi.json", "200", headers["content-length"], "my-id")
    assert second[0] == f"GET {path}"
    assert third[:2] == ("POST /plants", "401")
    assert "canary" not in server.out + server.err


# when the storage is away


def test_a_worker_that_starts_while_the_file_is_locked_does_not_stop_the_server(
    serve, database, stored
):
    """gunicorn stops everything when a worker fails to boot; a lock is no reason for that."""
    server = serve()
    assert server.post(MONSTERA)[0] == 200
    before = server.workers()
    with locked(database):
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert server.workers(besides=before)
        assert server.request("GET", "/nowhere")[0] == 404
        status, headers, answer = server.request("GET", "/healthz")
        assert (status, answer["error"], headers["retry-after"]) == (503, 503, "1")
    assert server.post({"id": 8, "name": "n"})[0] == 200
    assert is_alive(server.process.pid)
    assert [row[0] for row in stored()] == [7, 8]


def test_while_the_file_is_locked_answers_are_late_and_then_503(serve, database, stored):
    """By another program: what is free again in time is stored, the rest is safe to send again."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.post({"id": 1, "name": "before"})[0] == 200
    lock = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN IMMEDIATE")
    threading.Timer(3.0, lock.execute, ["ROLLBACK"]).start()
    assert server.post({"id": 2, "name": "late"})[0] == 200
    with locked(database):
        assert server.post({"id": 3, "name": "too late"})[0] == 503
    assert server.post({"id": 3, "name": "again"})[0] == 200
    lock.close()
    assert stored() == [(1, "before", None), (2, "late", None), (3, "again", None)]


def test_a_file_that_was_replaced_is_answered_with_503_until_a_restart(serve, database, stored):
    """A backup is put in place under the running service: nothing is stored into the void."""
    server = serve(WEB_CONCURRENCY="1")
    assert server.post(MONSTERA)[0] == 200
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{database}{suffix}", f"{database}.old{suffix}")
    assert server.post({"id": 8, "name": "n"})[0] == 503
    assert server.request("GET", "/healthz")[0] == 503
    assert "deleted or replaced" in server.err
    server.signal(signal.SIGTERM)
    server.wait()
    assert serve().post({"id": 9, "name": "n"})[0] == 200
    assert stored() == [(9, "n", None)]


@pytest.mark.parametrize("left", ["nothing", "another file"])
def test_a_worker_that_starts_later_takes_up_no_other_file(serve, database, left):
    """Plants in a new one would be lost when the old one is put back."""
    server = serve()
    assert server.post(MONSTERA)[0] == 200
    before = server.workers()
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{database}{suffix}", f"{database}.old{suffix}")
    if left == "another file":
        other = Storage.from_url(f"sqlite:///{database}")
        other.check_start()
        other.close()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert server.workers(besides=before)
    assert {server.post({"id": 8, "name": "n"})[0] for _ in range(8)} == {503}
    assert ("no such file" if left == "nothing" else "was replaced") in server.err
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{database}.old{suffix}", f"{database}{suffix}")
    assert server.post({"id": 8, "name": "n"})[0] == 200


def test_the_turn_is_not_held_between_requests(server, tmp_path):
    """An idle service leaves the turn to others."""
    assert server.post(MONSTERA)[0] == 200
    lock = os.open(tmp_path, os.O_RDONLY)
    wait_until(lambda: can_lock(lock))
    os.close(lock)
