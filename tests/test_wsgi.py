"""worker.py serves any WSGI application (PEP 3333), as gunicorn's own gevent worker does."""

import contextlib
import http.client
import json
import math
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from tests.support import applications
from tests.support.applications import LARGE
from tests.support.server import PATIENCE, Server, wait_until
from worker import Connection

CLASSES = ["tests.support.workers.Patient", "gevent"]
# Headers that each server adds in its own way. All others are the application's.
OWN_HEADERS = {"connection", "content-length", "date", "server", "transfer-encoding"}


def serve_applications(folder: Any, worker_class: str, *options: str) -> Server:
    """Start gunicorn with the applications, and without the service's settings."""
    settings = folder / "settings.py"
    settings.touch()
    chosen = ["tests.support.applications:serve", f"--config={settings}", "--keep-alive=60"]
    return Server(folder, *chosen, f"--worker-class={worker_class}", *options)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """The same applications under worker.py and under gunicorn's own worker."""
    folders = [tmp_path_factory.mktemp("applications") for _ in CLASSES]
    both = [serve_applications(*each) for each in zip(folders, CLASSES, strict=True)]
    yield both
    for server in both:
        server.kill()


@pytest.fixture
def applications_server(servers: list[Server]) -> Server:
    """The server that runs worker.py."""
    return servers[0]


Outcome = tuple[int, list[tuple[str, str]], bytes]


def ask_twice(server: Server, method: str, path: str, body: bytes | None) -> list[Outcome]:
    """Send a request and another one behind it, on the same connection if that stays open.

    Return status, the application's headers, and the decoded body of both.
    """
    found = []
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    with contextlib.closing(client):
        for request in [(method, path, body), ("GET", "/one_block", None)]:
            client.request(*request)
            with client.getresponse() as response:
                headers = response.getheaders()
                own = [each for each in headers if each[0].lower() not in OWN_HEADERS]
                found.append((response.status, own, response.read()))
    return found


# A request's method, path and body, then the response's status and body.
CASES = [
    ("GET", "/one_block", None, 200, b"one block"),
    ("GET", "/no_block", None, 200, b""),
    ("GET", "/three_blocks", None, 200, b"one, two, three"),
    ("GET", "/generator", None, 203, b"".join(b"%d " % number for number in range(100))),
    ("GET", "/late_start", None, 200, b"late"),
    ("GET", "/empty_first", None, 200, b"full"),
    ("GET", "/replaced", None, 503, b"replaced"),
    ("GET", "/empty_only", None, 200, b""),
    ("GET", "/written", None, 200, b"written, returned"),
    ("GET", "/only_written", None, 200, b"written"),
    ("GET", "/declared", None, 200, b"four five "),
    ("GET", "/too_much", None, 200, b"fourfi"),
    ("GET", "/no_content", None, 204, b""),
    ("GET", "/not_modified", None, 304, b""),
    ("GET", "/cookies", None, 200, b"two cookies"),
    ("GET", "/own_connection", None, 200, b"whole"),
    ("GET", "/large_block", None, 200, LARGE),
    ("GET", "/large_file", None, 200, LARGE),
    ("HEAD", "/one_block", None, 200, b""),
    ("HEAD", "/generator", None, 203, b""),
    ("HEAD", "/written", None, 200, b""),
    ("HEAD", "/declared", None, 200, b""),
    ("HEAD", "/large_file", None, 200, b""),
    ("POST", "/one_block", b"unread", 200, b"one block"),
    ("POST", "/generator", b"u" * 30_000, 203, b"".join(b"%d " % each for each in range(100))),
    ("POST", "/replaced_input", b"body", 200, b"BODY"),
    ("POST", "/late_input", b"b" * 10_000, 200, b"echo: " + b"b" * 10_000),
    ("POST", "/valid", b"body", 200, b"valid: bod"),
    ("GET", "/valid", None, 200, b"valid: "),
    ("GET", "/bottle/stream", None, 200, b"one, two"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "sent"), CASES)
def test_an_application_behaves_as_under_gunicorns_own_worker(
    servers, method, path, body, status, sent
):
    """The status, the application's own headers and the body are the same.

    A second request behind it is served, and no part of a body is taken for one.
    """
    ours, theirs = (ask_twice(server, method, path, body) for server in servers)
    assert (ours[0][0], ours[0][2]) == (status, sent)
    assert ours == theirs


@pytest.mark.parametrize(
    ("path", "kind", "body", "sent"),
    [
        ("/bottle/form", "application/x-www-form-urlencoded", b"name=Ivy", b"form: Ivy"),
        ("/bottle/json", "application/json", b'{"name": "Ivy"}', b'{"name": "Ivy"}'),
    ],
)
def test_a_route_of_bottle_may_read_forms_and_json(applications_server, path, kind, body, sent):
    """Bottle puts a copy of the body into environ["wsgi.input"]."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    received = applications_server.send(request * 2, ends=True)
    assert received.count(b"HTTP/1.1 200 OK\r\n") == received.count(b"\r\n\r\n" + sent) == 2


def test_a_file_of_bottle_has_one_date(applications_server):
    """static_file() sets Date, which is the server's (PEP 3333, "Other HTTP Features")."""
    received = get(applications_server, "/bottle/file")
    head, _, body = received.partition(b"\r\n\r\n")
    assert body == Path(applications.__file__).read_bytes()
    assert head.lower().count(b"\r\ndate: ") == 1


def get(server: Server, path: str, version: str = "1.1", ends: bool = True) -> bytes:
    """Return all bytes of the response to a GET on a connection of its own."""
    return server.send(f"GET {path} HTTP/{version}\r\nHost: localhost\r\n\r\n".encode(), ends)


def test_a_body_without_length_is_chunked_for_http_1_1_and_ends_with_the_connection_for_1_0(
    applications_server,
):
    head, _, body = get(applications_server, "/three_blocks").partition(b"\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked\r\n" in head + b"\r\n"
    assert b"Content-Length" not in head
    assert body == b"5\r\none, \r\n5\r\ntwo, \r\n5\r\nthree\r\n0\r\n\r\n"
    received = applications_server.send(
        b"GET /three_blocks HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    )
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head and b"Content-Length" not in head
    assert b"\r\nConnection: close" in head
    assert body == b"one, two, three"


@pytest.mark.parametrize("path", ["/one_block", "/no_block", "/empty_only"])
def test_a_body_of_one_block_has_a_content_length(applications_server, path):
    head, _, body = get(applications_server, path).partition(b"\r\n\r\n")
    assert b"\r\nContent-Length: %d\r\n" % len(body) in head + b"\r\n"


def test_each_block_is_sent_before_the_next_one_is_asked_for(applications_server):
    """/steps makes its second block only when its client has received the first one."""
    with applications_server.connect() as client:
        client.sendall(b"GET /steps HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while b"first" not in received:
            received += client.recv(2**16)
        assert get(applications_server, "/step")
        while b"second" not in received:
            received += client.recv(2**16)


def test_a_head_may_be_replaced_until_the_first_block_that_has_a_byte(applications_server):
    """gunicorn's own worker would send both heads, the first one with the empty block."""
    received = get(applications_server, "/replaced_late")
    assert received.startswith(b"HTTP/1.1 503 Busy\r\n") and b"X-First" not in received
    assert received.endswith(b"\r\n\r\n8\r\nreplaced\r\n0\r\n\r\n")


# Applications that fail, and the errors that the log has to name.
FAILING = {
    "/fails_at_once": "FileNotFoundError",
    "/fails_early": "RuntimeError",
    "/no_start": "RuntimeError",
    "/no_bytes": "TypeError",
    "/injected": "ValueError",
    "/exits": "SystemExit",
}
FAILING_LATE = {
    "/fails_late": "FileNotFoundError",
    "/fails_too_late": "ValueError: what came between",
    "/too_little": "ValueError",
}


@pytest.mark.parametrize("path", FAILING)
def test_an_application_that_fails_before_its_first_block_causes_a_500(applications_server, path):
    """The response is an Error. The connection goes on, and the log has the traceback."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    before = applications_server.err.count("the application failed\nTraceback")
    received = applications_server.send(request + request, ends=True)
    found = re.findall(rb"HTTP/1.1 (\d+) .*?\r\n\r\n(.*?)\n", received, re.DOTALL)
    assert [(int(status), json.loads(body)) for status, body in found] == [
        (500, {"error": 500, "message": "the service failed"})
    ] * 2
    assert received.count(b"\r\nContent-Type: application/json\r\n") == 2
    assert b"Set-Cookie" not in received
    log = applications_server.err.split("the application failed\nTraceback")[before + 1 :]
    assert len(log) == 2 and all(f"\n{FAILING[path]}: " in each for each in log)


@pytest.mark.parametrize("path", FAILING_LATE)
def test_the_client_of_an_application_that_fails_later_sees_that_something_is_missing(
    applications_server, path
):
    """The connection ends, without the last chunk or the rest of the Content-Length."""
    before = applications_server.err.count("the application failed\nTraceback")
    received = get(applications_server, path, ends=False)
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.endswith((b"4\r\nhalf\r\n", b"\r\n\r\nhalf"))
    log = applications_server.err.split("the application failed\nTraceback")[before + 1 :]
    assert len(log) == 1 and f"\n{FAILING_LATE[path]}" in log[0]


def test_a_body_longer_than_its_content_length_is_cut_and_no_further_block_is_asked_for(
    applications_server,
):
    """/cut has no end."""
    received = get(applications_server, "/cut")
    assert received.endswith(b"\r\n\r\nfourfo")


@pytest.mark.parametrize("path", ["/generator", "/fails_late", "/cut", "/endless"])
def test_the_blocks_of_a_response_are_closed_however_it_ends(applications_server, path):
    """The body ends, fails or is cut, or the client leaves first."""

    def count() -> int:
        return get(applications_server, "/which_are_closed").decode().split().count(path)

    before = count()
    with applications_server.connect() as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert client.recv(100)
    wait_until(lambda: count() == before + 1)


def test_a_client_gets_more_time_whenever_it_has_taken_some_of_a_response():
    """The clock runs only while something is being sent."""
    near, far = gevent.socket.socketpair()
    with near, far:
        connection = Connection(near, limit=0)
        sender = gevent.spawn(connection.send, b"head", memoryview(bytes(2**22)))
        gevent.sleep(0.01)
        began, received = connection.waiting_since, 0
        assert connection.is_sending
        while received < 2**21:
            received += len(far.recv(2**16))
        gevent.sleep(0.01)
        assert began < connection.waiting_since < math.inf
        while received < 2**22 + 4:
            received += len(far.recv(2**16))
        sender.join()
        assert connection.waiting_since == math.inf


def test_a_response_of_one_block_leaves_with_its_head_in_one_system_call():
    """A second call would take a tenth longer. SOCK_SEQPACKET keeps calls apart."""
    near, far = gevent.socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        Connection(near, limit=0).send(b"head", b"block")
        assert far.recv(100) == b"headblock"
