"""The interface, through WSGI: what is answered and stored, in which order things are checked."""

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
from storage import Rejected, Unavailable
from tests.support.server import STORED, TOKEN
from tests.support.wire import MONSTERA

JSON = "application/json"
TEXT = "🌵 \x01\n\t\"'\\ é e\u0301 \u202e \uffff \U0010ffff"


def refused(answer, status, words=""):
    """Assert that `answer` is an Error of this status that says so, and return its message."""
    assert answer.status_int == status
    assert answer.content_type == JSON
    assert answer.body.endswith(b"}\n")
    assert answer.json == {"error": status, "message": answer.json["message"]}
    assert words in answer.json["message"]
    return answer.json["message"]


def post(client, body, path="/plants", method="POST", **headers):
    """Post a plant, or bytes as they are, whatever the answer; without headers of None."""
    headers = {"Content_Type": JSON, **headers}
    given = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.request(path, method=method, body=body, headers=given, expect_errors=True)


def test_a_new_plant_is_a_200_without_its_id_and_stored_once(client, stored):
    """The same plant again gets a 200, too. Most other tests accept any status of success."""
    for _ in range(2):
        answer = post(client, MONSTERA)
        assert answer.status_int == 200
        assert answer.headers.getall("Content-Type") == [JSON]
        assert answer.json == {"name": "Monstera", "tag": "indoor"}
        assert answer.body.endswith(b"}\n")  # a shell's prompt would follow on the same line
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
def test_a_plant_is_stored_and_answered_exactly(client, stored, body):
    """int64, any Unicode but NUL, a tag only where there was one, and nothing that is unknown."""
    row = ROWS[body]
    tag = {} if row[2] is None else {"tag": row[2]}
    assert post(client, body.encode()).json == {"name": row[1], **tag}
    assert stored() == [row]


def test_another_plant_with_the_id_is_a_409(client, stored):
    """What is stored stays as it is. No tag is not an empty one."""
    plants = [{"name": "n"}, {"name": "n", "tag": ""}, {"name": "n", "tag": "in"}, {"name": "n "}]
    for number, (first, other) in enumerate(itertools.permutations(plants, 2)):
        post(client, {"id": number, **first})
        refused(post(client, {"id": number, **other}), 409, "id: already used by a different plant")
        assert stored()[number] == (number, first["name"], first.get("tag"))


@pytest.mark.parametrize("host", [{}, {"HTTP_HOST": ""}, {"HTTP_HOST": "one.example,two.example"}])
def test_without_one_host_every_request_is_a_400(client, host):
    """RFC 9112 section 3.2, before anything else; HTTP/1.0 may do without. Two come as a list."""
    request = TestRequest.blank("/", {"PATH_INFO": "//nothing"})
    del request.environ["HTTP_HOST"]
    expected = {"HTTP/1.0": (404, "nothing at //nothing;"), "HTTP/1.1": (400, "exactly one Host")}
    for version, (status, words) in expected.items():
        request.environ |= {"SERVER_PROTOCOL": version, **host}
        refused(client.do_request(request, expect_errors=True), status, words)


def test_no_or_a_bad_token_is_a_401(client, stored):
    """The error is named only where credentials of the scheme were sent (RFC 6750 section 3)."""
    client.authorization = None
    none = [None, "", TOKEN, f"Basic {TOKEN}", f"Bearer{TOKEN}", f"Bearer\t{TOKEN}"]
    bad = ["", f"\t{TOKEN}", TOKEN[:-1], f"{TOKEN}x", "\xf6", f"{TOKEN},Bearer {TOKEN}", "x" * 8000]
    for credentials in [*none, "Bearer", *(f"Bearer {token}" for token in bad)]:
        answer = post(client, MONSTERA, Authorization=credentials)
        refused(answer, 401, "token")
        error = "" if credentials in none else ', error="invalid_token"'
        assert answer.headers["WWW-Authenticate"] == f'Bearer realm="plants"{error}'
    assert stored() == []


def test_each_token_is_good_for_every_route_that_does_not_do_without(storage):
    """The scheme may have any case, and more than one space behind it."""
    app = create_app(storage, [TOKEN, "another-token-0123456"])
    app.get("/new", callback=lambda: b"new")
    client = TestApp(app)
    refused(client.get("/new", expect_errors=True), 401)
    for credentials in f"BEARER {TOKEN}", "bearer   another-token-0123456":
        assert client.get("/new", headers={"Authorization": credentials}).body == b"new"


def test_what_is_not_declared_as_plain_json_is_a_415(client, stored):
    """A type has any case and parameters (RFC 9110 section 8.3.1). The answer says what to send."""
    for value in "text/plain", f"{JSON}x", f"{JSON}/x", f"text/html; {JSON}", "json", "", None:
        answer = post(client, MONSTERA, Content_Type=value)
        refused(answer, 415, "Content-Type must be application/json")
    for value in "gzip", "x, gzip":
        answer = post(client, MONSTERA, Content_Encoding=value)
        refused(answer, 415, "Content-Encoding must be identity")
    assert stored() == []
    for value in "", "identity":
        assert post(client, MONSTERA, Content_Encoding=value).status_int == STORED
    for value in "Application/JSON", f"{JSON}; charset=utf-8", f"{JSON} ;x":
        answer = post(client, MONSTERA, Content_Type=value, Content_Encoding="Identity")
        assert answer.status_int == STORED


def test_the_order_of_checks(client, stored):
    """404, 405, 401, 415, 413, 408, 400, then 409: mended one by one, each shows the next."""
    plant = json.dumps(MONSTERA).encode()
    assert post(client, plant.ljust(2**14)).status_int == STORED  # and not a byte more
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
    for status, mended in steps:
        refused(post(client, **request), status)
        request |= mended
    assert post(client, **request).status_int == STORED
    assert stored() == [(7, "Monstera", "indoor")]


def failing(failure):
    """Return a client of an application whose storage raises an exception."""
    fail = Mock(side_effect=failure)
    client = TestApp(create_app(Mock(add=fail, check=fail), [TOKEN]))
    client.authorization = ("Bearer", TOKEN)
    return client


def test_nothing_from_inside_is_told(capfd):
    """Of a bug, the server gets the traceback, and the log says which error it was."""
    rejecting = failing(Rejected("SQLITE_CONSTRAINT"))
    message = "the database rejects this plant; retrying will not help"
    assert refused(post(rejecting, MONSTERA), 400) == message
    assert rejecting.get("/healthz", status=503).headers["Retry-After"] == "1"  # seconds
    answer = post(failing(ZeroDivisionError("from inside")), MONSTERA)
    assert "from inside" not in refused(answer, 500)
    assert "ZeroDivisionError: from inside" in answer.errors
    reasons = [json.loads(line)["reason"] for line in capfd.readouterr().out.splitlines()]
    assert reasons == ["SQLITE_CONSTRAINT", "SQLITE_CONSTRAINT", "ZeroDivisionError, a bug"]


def test_an_answer_has_the_clients_request_id_if_that_is_sane_and_else_a_new_one(client):
    for sane in "abc-123", "4bf92f35-77b3-4da6/a.b:c_d+e=f@g", "x" * 128:
        assert post(client, MONSTERA, X_Request_ID=sane).headers["X-Request-ID"] == sane
    others = ["a b", "x" * 129, '"q"', "\xf6", "1,2", "", None, None]
    new = {post(client, MONSTERA, X_Request_ID=each).headers["X-Request-ID"] for each in others}
    assert len(new) == len(others)
    assert all(re.fullmatch("(?!0{8})[0-9a-f]{32}", each) for each in new), new


def test_the_log_has_a_line_of_json_for_each_request_that_no_request_can_forge(client, capfd):
    """But none for a /healthz that succeeds; without the query."""
    client.get("/healthz")
    path = "/a%0A%1B%5B31m%22%E2%80%A8"
    client.get(f"{path}?query", headers={"X-Request-ID": "mine"}, status=404)
    post(client, MONSTERA)
    missing, plant = map(json.loads, capfd.readouterr().out.splitlines())
    assert (missing["request"], missing["status"], missing["id"]) == (f"GET {path}", 404, "mine")
    assert list(plant) == ["time", "client", "request", "status", "seconds", "id", "token"]
    assert (plant["request"], plant["status"]) == ("POST /plants", STORED)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(plant["time"])) < timedelta(minutes=1)


def test_the_log_names_the_token_of_a_request_by_the_beginning_of_its_digest(client, capfd):
    """A request without a valid token has none. The page shows how to get this beginning."""
    post(client, MONSTERA)
    post(client, MONSTERA, Authorization="Bearer another")
    with_token, without = map(json.loads, capfd.readouterr().out.splitlines())
    assert with_token["token"] == hashlib.sha256(TOKEN.encode()).hexdigest()[:8]
    assert "token" not in without


def test_liveness_does_not_look_at_the_storage_and_is_not_logged(capfd):
    """A failed health check is logged."""
    broken = failing(Unavailable("away"))
    assert broken.get("/livez").json == {"status": "ok"}
    broken.get("/healthz", status=503)
    (line,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert (line["request"], line["reason"]) == ("GET /healthz", "away")


@pytest.mark.parametrize("path", ["/plants%ff", "/%ffplants", "/plants%c0%af", "/openapi.json%80"])
def test_a_path_that_is_not_utf_8_is_a_404(client, stored, path):
    """Bottle would drop the bytes that are not UTF-8."""
    refused(post(client, MONSTERA, path), 404, "there is nothing at /")
    refused(post(client, b"", path, "OPTIONS"), 404)
    assert stored() == []


def test_a_line_of_the_log_is_one_write_that_fits_a_pipe(client, monkeypatch):
    """A pipe takes 4,096 bytes in one piece; a log that can't be written fails no request."""
    read, write = socket.socketpair(type=socket.SOCK_DGRAM)  # what is written at once comes alone
    with read, write, contextlib.ExitStack() as end:
        end.callback(os.close, before := os.dup(1))
        os.dup2(write.fileno(), 1)
        end.callback(os.dup2, before, 1)
        with monkeypatch.context() as closed:
            closed.setattr(sys, "stdout", None)  # as Python does; 1 may be a client's socket then
            client.get("/nothing-is-logged", status=404)
        headers = {"X-Request-ID": "x" * 128}
        answer = client.get("/" + "%F0%9F%8C%B5" * 999, headers=headers, status=404)
        assert len(answer.json["message"]) == SCHEMAS["error"]["properties"]["message"]["maxLength"]
        assert len(line := read.recv(2**16)) < 4096
        assert json.loads(line)["id"] == "x" * 128 and line.endswith(b"}\n")
        read.close()
        client.get("/nobody-reads-this", status=404)


def test_tokens_are_a_list_with_commas_or_spaces(monkeypatch):
    """Blank, short or malformed ones are refused; the message says how to make one."""
    good = " a/b+c.d_e~f-0123==,token-0123456789\tother-token-01234567890\n"
    monkeypatch.setenv("PLANTS_TOKENS", good)
    assert read_tokens() == good.replace(",", " ").split()
    bad = ["short", "0123456789abcde", "good-token-01234567 short", "=0123456789abcdef"]
    for setting in [*bad, "a:token-0123456789", "token-0123456789ö", "", " ", ","]:
        monkeypatch.setenv("PLANTS_TOKENS", setting)
        with pytest.raises(ValueError, match=r"PLANTS_TOKENS must be .*token_urlsafe") as refusal:
            read_tokens()
        assert len(setting) < 2 or setting not in str(refusal.value)
