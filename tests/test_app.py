"""The HTTP interface, tested through WSGI: responses, stored rows, the log and the tokens."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import socket
import sys
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
from webtest import TestApp, TestRequest

from app import create_app
from plant import SCHEMAS
from start import read_tokens
from storage import Rejected, Storage, Unavailable
from tests.support.server import STORED, TOKEN
from tests.support.wire import MONSTERA

JSON = "application/json"
TEXT = "🌵 \x01\n\t\"'\\ é e\u0301 \u202e \uffff \U0010ffff"


def refused(response, status, words=""):
    """Assert that `response` is an Error of this status with `words` in it. Return its message."""
    assert response.status_int == status
    assert response.content_type == JSON
    assert response.body.endswith(b"}\n")
    assert response.json == {"error": status, "message": response.json["message"]}
    assert words in response.json["message"]
    return response.json["message"]


def post(client, body, path="/plants", method="POST", **headers):
    """Post a plant, and return the response, whatever its status. Bytes are sent as they are.

    A header whose value is None is left out.
    """
    headers = {"Content_Type": JSON, **headers}
    given = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.request(path, method=method, body=body, headers=given, expect_errors=True)


def test_a_new_plant_is_stored_once_and_returned_without_its_id_with_a_200(client, stored):
    """The same plant again gets a 200, too. Most other tests accept any status of success."""
    for _ in range(2):
        response = post(client, MONSTERA)
        assert response.status_int == 200
        assert response.headers.getall("Content-Type") == [JSON]
        assert response.json == {"name": "Monstera", "tag": "indoor"}
        # Without a line break, a shell's prompt would follow curl's output on the same line.
        assert response.body.endswith(b"}\n")
    assert stored() == [(7, "Monstera", "indoor")]


ROWS = {
    '{"id": 9223372036854775807, "name": "", "tag": ""}': (2**63 - 1, "", ""),
    '{"id": -9223372036854775808, "name": "n", "x": [-1e+9999]}': (-(2**63), "n", None),
    '{"id": 9007199254740993, "name": "n", "x": {"id": {}}}': (2**53 + 1, "n", None),
    '{"id": -9007199254740992e0, "name": "n"}': (-(2**53), "n", None),
    '{"id": 9007199254740992.0, "name": "\\n"}': (2**53, "\n", None),
    r' {"name": "\"\/\u12aB\\u0000\ud83c\uDF35", "id": 1.5E1}': (15, '"/\u12ab\\u0000🌵', None),
    json.dumps({"id": 0, "name": TEXT, "tag": TEXT}): (0, TEXT, TEXT),
}


@pytest.mark.parametrize("body", ROWS, ids=lambda body: f"{body:.40}")
def test_a_plant_is_stored_and_returned_exactly(client, stored, body):
    """The id may be any int64, and the text any Unicode but NUL. Unknown members are ignored.

    A plant without a tag is stored with NULL, and returned without a tag.
    """
    row = ROWS[body]
    tag = {} if row[2] is None else {"tag": row[2]}
    assert post(client, body.encode()).json == {"name": row[1], **tag}
    assert stored() == [row]


def test_a_different_plant_with_the_same_id_gets_a_409(client, stored):
    """The stored plant does not change. A missing tag and an empty one make different plants."""
    plants = [{"name": "n"}, {"name": "n", "tag": ""}, {"name": "n", "tag": "in"}, {"name": "n "}]
    for number, (first, other) in enumerate(itertools.permutations(plants, 2)):
        post(client, {"id": number, **first})
        refused(post(client, {"id": number, **other}), 409, "id: already used by a different plant")
        assert stored()[number] == (number, first["name"], first.get("tag"))


@pytest.mark.parametrize("host", [{}, {"HTTP_HOST": ""}, {"HTTP_HOST": "one.example,two.example"}])
def test_a_request_without_exactly_one_host_gets_a_400(client, host):
    """Only HTTP/1.0 needs no Host (RFC 9112 section 3.2). So HTTP/1.2 would need one, too.

    Host is checked before the path. worker.py joins two Host headers with a comma.
    """
    request = TestRequest.blank("/", {"PATH_INFO": "//nothing"})
    del request.environ["HTTP_HOST"]
    expected = {"HTTP/1.0": (404, "nothing at //nothing;"), "HTTP/1.1": (400, "exactly one Host")}
    expected["HTTP/1.2"] = expected["HTTP/1.1"]
    for version, (status, words) in expected.items():
        request.environ |= {"SERVER_PROTOCOL": version, **host}
        refused(client.do_request(request, expect_errors=True), status, words)


def test_a_request_without_a_valid_token_gets_a_401(client, stored):
    """The challenge names an error only if the client sent Bearer credentials (RFC 6750, 3)."""
    client.authorization = None
    none = [None, "", TOKEN, f"Basic {TOKEN}", f"Bearer{TOKEN}", f"Bearer\t{TOKEN}"]
    bad = ["", f"\t{TOKEN}", TOKEN[:-1], f"{TOKEN}x", "\xf6", f"{TOKEN},Bearer {TOKEN}", "x" * 8000]
    for credentials in [*none, "Bearer", *(f"Bearer {token}" for token in bad)]:
        response = post(client, MONSTERA, Authorization=credentials)
        refused(response, 401, "token")
        error = "" if credentials in none else ', error="invalid_token"'
        assert response.headers["WWW-Authenticate"] == f'Bearer realm="plants"{error}'
    assert stored() == []


def test_a_new_route_needs_a_token_and_each_of_the_tokens_opens_it(storage):
    """The scheme's name may have any case, and more than one space may follow it."""
    app = create_app(storage, [TOKEN, "another-token-0123456"])
    app.get("/new", callback=lambda: "new")
    client = TestApp(app)
    refused(client.get("/new", expect_errors=True), 401)
    for credentials in f"BEARER {TOKEN}", "bearer   another-token-0123456":
        assert client.get("/new", headers={"Authorization": credentials}).body == b"new"


def test_a_body_that_is_not_declared_as_plain_json_gets_a_415(client, stored):
    """The message says what to send. A media type may have parameters and any case (RFC 9110, 8.3).

    A Content-Encoding that is empty or `identity` changes nothing.
    """
    for value in "text/plain", f"{JSON}x", f"{JSON}/x", f"text/html; {JSON}", "json", "", None:
        response = post(client, MONSTERA, Content_Type=value)
        refused(response, 415, "Content-Type must be application/json")
    for value in "gzip", "x, gzip":
        response = post(client, MONSTERA, Content_Encoding=value)
        refused(response, 415, "Content-Encoding must be identity")
    assert stored() == []
    for value in "", "identity":
        assert post(client, MONSTERA, Content_Encoding=value).status_int == STORED
    for value in "Application/JSON", f"{JSON}; charset=utf-8", f"{JSON} ;x":
        response = post(client, MONSTERA, Content_Type=value, Content_Encoding="Identity")
        assert response.status_int == STORED


def test_a_request_with_several_mistakes_gets_the_status_of_the_first_check(client, stored):
    """The order is 404, 405, 401, 415, 413, 408, 400, 409.

    The test starts with a request that has all these mistakes. It fixes one after the other, and
    expects the status of the next one each time.
    """
    plant = json.dumps(MONSTERA).encode()
    assert post(client, plant.ljust(2**14)).status_int == STORED  # This body has the largest size.
    client.authorization = None
    request = {"path": "/plant", "method": "PUT", "body": b"{".ljust(2**14 + 1)}
    request["Content_Type"] = "text/plain"
    steps = [
        (404, {"path": "/plants"}),
        (405, {"method": "POST"}),
        (401, {"Authorization": f"Bearer {TOKEN}"}),
        (415, {"Content_Type": JSON, "Content_Length": str(10**30)}),
        (413, {"Content_Length": None}),
        (413, {"Content_Length": "9", "body": b"{"}),
        (408, {"Content_Length": "1"}),
        (400, {"Content_Length": None, "body": b'{"id": 7, "name": "Sequoia"}'}),
        (409, {"body": plant}),
    ]
    for status, fix in steps:
        refused(post(client, **request), status)
        request |= fix
    assert post(client, **request).status_int == STORED
    assert stored() == [(7, "Monstera", "indoor")]


def failing(failure):
    """Return a client of an application whose storage raises `failure` at every call."""
    methods = [name for name in vars(Storage) if not name.startswith("_")]
    storage = Mock(**{f"{name}.side_effect": failure for name in methods})
    client = TestApp(create_app(storage, [TOKEN]))
    client.authorization = ("Bearer", TOKEN)
    return client


def test_an_error_response_reveals_nothing_about_the_services_internals(capfd):
    """The log has the reason that the database gave, or the name of a bug's exception.

    A bug's traceback goes to the error stream of the server.
    """
    rejecting = failing(Rejected("SQLITE_CONSTRAINT"))
    message = "the database rejects this plant; retrying will not help"
    assert refused(post(rejecting, MONSTERA), 400) == message
    assert rejecting.get("/healthz", status=503).headers["Retry-After"] == "1"  # Seconds.
    response = post(failing(ZeroDivisionError("from inside")), MONSTERA)
    assert "from inside" not in refused(response, 500)
    assert "ZeroDivisionError: from inside" in response.errors
    reasons = [json.loads(line)["reason"] for line in capfd.readouterr().out.splitlines()]
    assert reasons == ["SQLITE_CONSTRAINT", "SQLITE_CONSTRAINT", "ZeroDivisionError, a bug"]


def test_a_response_has_the_clients_request_id_or_a_new_one_if_that_is_unfit_for_a_log(client):
    for sane in "abc-123", "4bf92f35-77b3-4da6/a.b:c_d+e=f@g", "x" * 128:
        assert post(client, MONSTERA, X_Request_ID=sane).headers["X-Request-ID"] == sane
    others = ["a b", "x" * 129, '"q"', "\xf6", "1,2", "", None, None]
    new = {post(client, MONSTERA, X_Request_ID=each).headers["X-Request-ID"] for each in others}
    assert len(new) == len(others)
    assert all(re.fullmatch("(?!0{8})[0-9a-f]{32}", each) for each in new), new


def test_the_log_has_one_line_of_json_for_each_request_and_no_request_can_forge_another(
    client, capfd
):
    """The line leaves out the query. A health check that succeeds has no line.

    For a valid token, the member `token` is what `printf %s TOKEN | sha256sum | cut -c 1-8` prints.
    """
    client.get("/healthz")
    path = "/a%0A%1B%5B31m%22%E2%80%A8"
    client.get(f"{path}?query", headers={"X-Request-ID": "mine"}, status=404)
    post(client, MONSTERA)
    post(client, MONSTERA, Authorization="Bearer another")
    missing, plant, bad = map(json.loads, capfd.readouterr().out.splitlines())
    assert (missing["request"], missing["status"], missing["id"]) == (f"GET {path}", 404, "mine")
    assert "token" not in bad
    assert list(plant) == ["time", "client", "request", "status", "seconds", "id", "token"]
    assert (plant["request"], plant["status"]) == ("POST /plants", STORED)
    assert plant["token"] == hashlib.sha256(TOKEN.encode()).hexdigest()[:8]
    assert abs(datetime.now(UTC) - datetime.fromisoformat(plant["time"])) < timedelta(minutes=1)


def test_a_liveness_check_does_not_ask_the_storage_and_is_not_logged(capfd):
    """A health check that fails is logged."""
    broken = failing(Unavailable("away"))
    assert broken.get("/livez").json == {"status": "ok"}
    broken.get("/healthz", status=503)
    (line,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert (line["request"], line["reason"]) == ("GET /healthz", "away")


def test_the_log_shows_what_a_proxy_says_about_its_client(client, capfd):
    """The member `forwarded` is what X-Forwarded-For says, and stands after `id`."""
    post(client, {}, X_Forwarded_For="203.0.113.7, 10.0.0.1")
    (line,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert line["forwarded"] == "203.0.113.7, 10.0.0.1"
    assert list(line)[5:] == ["id", "forwarded", "token", "reason"]


def test_the_log_shows_an_ipv4_address_as_such_even_on_a_socket_for_ipv6(client, capfd):
    """An IPv6 address is logged as it is."""
    addresses = {"::ffff:203.0.113.7": "203.0.113.7", "2001:db8::7": "2001:db8::7"}
    for address in addresses:
        client.get("/nowhere", extra_environ={"REMOTE_ADDR": address}, status=404)
    lines = map(json.loads, capfd.readouterr().out.splitlines())
    assert [line["client"] for line in lines] == [*addresses.values()]


@pytest.mark.parametrize("path", ["/plants%ff", "/%ffplants", "/plants%c0%af", "/openapi.json%80"])
def test_a_path_that_is_not_utf_8_gets_a_404(client, stored, path):
    """Bottle would drop the bytes that are not UTF-8, and find a route for the rest."""
    refused(post(client, MONSTERA, path), 404, "there is nothing at /")
    refused(post(client, b"", path, "OPTIONS"), 404)
    assert stored() == []


def test_a_log_line_is_written_at_once_and_fits_into_4096_bytes(client, monkeypatch):
    """A pipe takes 4,096 bytes in one piece, so lines of several workers do not mix in it.

    If the log is closed or nobody reads it, requests are answered all the same.
    """
    # A datagram socket keeps the bytes of each write apart, so recv() returns those of one write.
    read, write = socket.socketpair(type=socket.SOCK_DGRAM)
    with read, write, contextlib.ExitStack() as end:
        end.callback(os.close, before := os.dup(1))
        os.dup2(write.fileno(), 1)
        end.callback(os.dup2, before, 1)
        with monkeypatch.context() as closed:
            # Python sets this at the start if descriptor 1 is closed. A client's socket may have
            # that number then, so nothing must be written to it.
            closed.setattr(sys, "stdout", None)
            client.get("/nothing-is-logged", status=404)
        # The characters that take most in JSON: 12 bytes in a reason, 6 in a header, 1 in an id.
        path, forwarded = "/" + "%F0%9F%8C%B5" * 999, "\xff" * 999
        headers = {"X-Request-ID": "x" * 128, "X-Forwarded-For": forwarded}
        address = {"REMOTE_ADDR": "fe80::ffff:ffff:ffff:ffff%interface-15"}
        response = client.get(path, headers=headers, extra_environ=address, status=404)
        longest = SCHEMAS["error"]["properties"]["message"]["maxLength"]
        assert len(response.json["message"]) == longest
        assert 3500 < len(line := read.recv(2**16)) < 4000  # A token would take 21 bytes more.
        assert line.endswith(b"}\n")
        assert json.loads(line)["id"] == "x" * 128
        assert json.loads(line)["forwarded"] == forwarded[:100]
        read.close()
        client.get("/nobody-reads-this", status=404)


def test_plants_tokens_is_a_list_of_tokens_with_commas_or_white_space_between_them(monkeypatch):
    """A list without a token, or with a short or malformed one, is refused.

    The message says how to make a token, and does not repeat the setting.
    """
    good = " a/b+c.d_e~f-0123==,token-0123456789\tother-token-01234567890\n"
    monkeypatch.setenv("PLANTS_TOKENS", good)
    assert read_tokens() == good.replace(",", " ").split()
    bad = ["short", "0123456789abcde", "good-token-01234567 short", "=0123456789abcdef"]
    for setting in [*bad, "a:token-0123456789", "token-0123456789ö", "", " ", ","]:
        monkeypatch.setenv("PLANTS_TOKENS", setting)
        with pytest.raises(ValueError, match=r"PLANTS_TOKENS must be .*token_urlsafe") as refusal:
            read_tokens()
        assert len(setting) < 2 or setting not in str(refusal.value)
