"""The interface, through WSGI: what is answered, in which order things are checked, what is stored.

Whatever is refused is also shown to have stored nothing.
"""

import json
import re
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from webtest import TestApp, TestRequest

from app import create_app
from engines import NeedsOperator, Rejected
from start import read_tokens
from tests.support.server import TOKEN
from tests.support.wire import MONSTERA

OTHER = b'{"id": 7, "name": "Sequoia"}'
TEXT = "🌵 \x01\n\t\"'\\ é e\u0301 \u202e \uffff \U0010ffff"


def refused(answer, status, *words):
    """Assert that `answer` is an Error of this status that says so, and return its message."""
    assert answer.status_int == status
    assert answer.content_type == "application/json"
    assert answer.body.endswith(b"}\n")
    assert answer.json == {"error": status, "message": answer.json["message"]}
    for word in words:
        assert word in answer.json["message"]
    return answer.json["message"]


def post(client, body, **headers):
    """Post a plant, or bytes as they are, whatever the answer; without headers of None."""
    names = {"Content-Type": "application/json"}
    names |= {name.replace("_", "-"): value for name, value in headers.items()}
    given = {name: value for name, value in names.items() if value is not None}
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.request("/plants", method="POST", body=body, headers=given, expect_errors=True)


def test_a_new_plant_is_answered_without_its_id_and_stored_once(client, stored):
    """The same plant again is a 200 too."""
    answer = client.post_json("/plants", MONSTERA)
    assert answer.status_int == 200
    assert answer.headers.getall("Content-Type") == ["application/json"]
    assert answer.json == {"name": "Monstera", "tag": "indoor"}
    assert answer.body.endswith(b"}\n")  # a shell's prompt would follow on the same line
    assert client.post_json("/plants", MONSTERA).body == answer.body
    assert stored() == [(7, "Monstera", "indoor")]


@pytest.mark.parametrize(
    ("body", "row"),
    [
        ('{"id": 7, "name": "Sequoia"}', (7, "Sequoia", None)),
        ('{"id": 7, "name": "", "tag": ""}', (7, "", "")),
        ('{"id": 7, "name": "n", "height": 3, "x": [-1e+9999, {"id": {}}]}', (7, "n", None)),
        (
            r' {"tag": "\"\\\/\b\f\u12aB\\u0000\ud83c\uDF35", "id": 7, "name": "n"}'
            "\r\n",
            (7, "n", '"\\/\b\f\u12ab\\u0000🌵'),
        ),
        ('{"id": -0, "name": "n"}', (0, "n", None)),
        ('{"id": 1e3, "name": "n"}', (1000, "n", None)),
        ('{"id": -1.50E1, "name": "n"}', (-15, "n", None)),
        ('{"id": 0e999, "name": "n"}', (0, "n", None)),
        ('{"id": 9007199254740992.0, "name": "n"}', (2**53, "n", None)),
        ('{"id": -9007199254740992e0, "name": "n"}', (-(2**53), "n", None)),
        (f'{{"id": 1.{"0" * 9999}, "name": "n"}}', (1, "n", None)),
        ('{"id": -9223372036854775808, "name": "n"}', (-(2**63), "n", None)),
        ('{"id": 9007199254740993, "name": "n"}', (2**53 + 1, "n", None)),
        ('{"id": 9223372036854775807, "name": "n"}', (2**63 - 1, "n", None)),
        (json.dumps({"id": 0, "name": TEXT, "tag": TEXT}), (0, TEXT, TEXT)),
    ],
    ids=lambda value: f"{value:.40}" if isinstance(value, str) else "",
)
def test_a_plant_is_stored_and_answered_exactly(client, stored, body, row):
    """int64, any Unicode but NUL, a tag only where there was one, and nothing that is unknown."""
    tag = {} if row[2] is None else {"tag": row[2]}
    assert post(client, body.encode()).json == {"name": row[1], **tag}
    assert stored() == [row]


@pytest.mark.parametrize("other", [{"tag": "out"}, {"tag": ""}, {}, {"name": "N", "tag": "in"}])
@pytest.mark.parametrize("first", [{"tag": "in"}, {"name": "n "}])
def test_another_plant_with_the_id_is_a_409(client, stored, first, other):
    """What is stored stays as it is. No tag is not an empty one."""
    plant = {"id": 7, "name": "n"}
    client.post_json("/plants", {**plant, **first})
    refused(post(client, {**plant, **other}), 409, "id: is taken by another plant")
    assert stored() == [(7, first.get("name", "n"), first.get("tag"))]


HOSTS = ["localhost", "X.Example:8000", "127.0.0.1:80", "[::1]:80", "[::1]", "my_host", "x.y."]
NO_HOSTS = ["one.example,two.example", "bad host", "###", "a:b:c", "::1", "[::1", "a@b", "a/b"]


@pytest.mark.parametrize("host", [*HOSTS, *NO_HOSTS, "a:80x", "pl\xe4nt.example", "", None])
def test_without_one_valid_host_every_request_is_a_400(client, host):
    """RFC 9112 section 3.2, before anything else; HTTP/1.0 may do without. Two come as a list."""
    request = TestRequest.blank("/nothing")
    request.environ |= {"SERVER_PROTOCOL": "HTTP/1.1", "HTTP_HOST": host}
    if host is None:
        del request.environ["HTTP_HOST"]
    answer = client.do_request(request, expect_errors=True)
    if host in HOSTS:
        refused(answer, 404)
    else:
        refused(answer, 400, "Host must be a host and port")
    request.environ["SERVER_PROTOCOL"] = "HTTP/1.0"
    refused(client.do_request(request, expect_errors=True), 404)


NO_TOKENS = [None, "", TOKEN, f"Basic {TOKEN}", f"Bearer{TOKEN}", f"Bearer\t{TOKEN}"]
INVALID = [
    "",
    f" \t{TOKEN}",
    TOKEN[:-1],
    f"{TOKEN}x",
    f"{TOKEN},Bearer {TOKEN}",
    "\xf6",
    "x" * 8000,
]


@pytest.mark.parametrize(
    ("credentials", "error"),
    [(each, "") for each in NO_TOKENS]
    + [(f"Bearer {each}".strip(), ', error="invalid_token"') for each in INVALID],
    ids=lambda value: f"{value!r:.50}",
)
def test_no_or_a_bad_token_is_a_401(client, stored, credentials, error):
    """The error is named only where credentials of the scheme were sent (RFC 6750 section 3)."""
    client.authorization = None
    answer = post(client, MONSTERA, Authorization=credentials)
    refused(answer, 401, "token")
    assert answer.headers["WWW-Authenticate"] == f'Bearer realm="plants"{error}'
    assert stored() == []


def test_each_token_is_good_and_the_name_of_one_tells_who_it_was(storage):
    """As the user (RFC 3875, 4.1.11); a token without a name, or a bad one, is nobody's.

    The scheme may have any case, and more than one space behind it.
    """
    users = []
    app = create_app(storage, ["web:web-token-0123456", "nobodys-token-01234"])

    def observed(environ, start_response):
        answer = app(environ, start_response)
        users.append(environ.get("REMOTE_USER"))
        return answer

    credentials = ["Bearer web-token-0123456", "BEARER nobodys-token-01234"]
    credentials += ["bearer   web-token-0123456", "Bearer web:web-token-0123456", "Bearer web"]
    answers = [post(TestApp(observed), MONSTERA, Authorization=each) for each in credentials]
    assert [answer.status_int for answer in answers] == [200, 200, 200, 401, 401]
    assert users == ["web", "", "web", None, None]


def test_a_route_that_says_nothing_asks_for_a_token(storage):
    app = create_app(storage, [TOKEN])
    app.get("/new", callback=lambda: b"new")
    client = TestApp(app)
    refused(client.get("/new", expect_errors=True), 401)
    client.authorization = ("Bearer", TOKEN)
    assert client.get("/new").body == b"new"


JSON = "application/json"
JSON_TYPES = ["Application/JSON", f"{JSON}; charset=utf-8", f"{JSON} ;x"]
NO_JSON = ["text/plain", f"{JSON}x", f"{JSON}/x", f"text/html; {JSON}", "json", "", None]


@pytest.mark.parametrize(
    ("header", "value", "taken"),
    [("Content-Type", each, each in JSON_TYPES) for each in (*JSON_TYPES, *NO_JSON)]
    + [("Content-Encoding", each, each == "Identity") for each in ("Identity", "gzip", "x, gzip")],
)
def test_what_is_not_declared_as_plain_json_is_a_415(client, stored, header, value, taken):
    """A type has any case and parameters (RFC 9110 section 8.3.1). The answer says what to send."""
    answer = post(client, MONSTERA, **{header: value})
    if taken:
        assert answer.status_int == 200
    else:
        must = {"Content-Type": JSON, "Content-Encoding": "identity"}[header]
        refused(answer, 415, f"{header} must be {must}")
        assert answer.headers[header.replace("Content", "Accept").removesuffix("-Type")] == must
        assert stored() == []


def test_a_body_beyond_the_limit_is_a_413(client, stored):
    plant = json.dumps(MONSTERA).encode()
    refused(post(client, plant.ljust(65537)), 413, "65536")
    refused(post(client, b"", Content_Length=str(10**30)), 413)
    assert stored() == []
    assert post(client, plant.ljust(65536)).status_int == 200


PATHS = ["/plants/", "/plants/7", "/Plants", "/healthz/", "/%00%C3%A9%22%0a"]


@pytest.mark.parametrize("path", [*PATHS, pytest.param("/" + "x" * 3000, id="long")])
def test_an_unknown_path_is_a_404(client, stored, path):
    """Its message names the path, but never has more than a thousand characters."""
    answer = client.post_json(path, MONSTERA, expect_errors=True)
    assert len(refused(answer, 404, f"nothing at {unquote(path)}"[:900])) <= 1000
    assert stored() == []


def test_the_order_of_checks(client, stored):
    """404, 405, 401, 415, 413, 408, 400, then 409: mended one by one, each shows the next."""
    client.post_json("/plants", MONSTERA)
    client.authorization = None
    request = {"url_or_req": "/plant", "method": "PUT", "body": b"{" * 65537}
    headers = {"Content-Type": "text/plain"}
    steps = [
        (404, lambda: request.update(url_or_req="/plants")),
        (405, lambda: request.update(method="POST")),
        (401, lambda: headers.update({"Authorization": f"Bearer {TOKEN}"})),
        (415, lambda: headers.update({"Content-Type": "application/json"})),
        (413, lambda: headers.update({"Content-Length": "9"}) or request.update(body=b"{")),
        (408, lambda: headers.update({"Content-Length": "1"})),
        (400, lambda: headers.pop("Content-Length") and request.update(body=OTHER)),
        (409, lambda: request.update(body=json.dumps(MONSTERA).encode())),
    ]
    for status, mend in steps:
        refused(client.request(**request, headers=headers, expect_errors=True), status)
        mend()
    assert client.request(**request, headers=headers).status_int == 200
    assert stored() == [(7, "Monstera", "indoor")]


def failing(failure):
    """Return a client of an application whose storage raises an exception."""

    def fail(_):
        raise failure

    client = TestApp(create_app(SimpleNamespace(add=fail, check=fail), [TOKEN]))
    client.authorization = ("Bearer", TOKEN)
    return client


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (Rejected, 400, "the storage does not accept this plant; to send it again does not help"),
        (ZeroDivisionError, 500, "the service failed; it is safe to send the same plant again"),
    ],
)
def test_nothing_from_inside_is_told(caplog, failure, status, message):
    """Of a bug, the log has the traceback and the request's id."""
    answer = post(failing(failure("from inside")), MONSTERA)
    assert refused(answer, status) == message
    if status == 500:
        assert "ZeroDivisionError: from inside" in answer.errors
        assert answer.headers["X-Request-ID"] in caplog.text


SANE_IDS = ["abc-123", "4bf92f35-77b3-4da6/a.b:c_d+e=f@g", "x" * 128]


@pytest.mark.parametrize("sent", [*SANE_IDS, "a b", "x" * 129, '"q"', "\xf6", "1,2", "", None])
def test_every_answer_has_a_request_id_the_clients_own_if_that_is_sane(client, sent):
    found = []
    for method, path in ("GET", "/healthz"), ("GET", "/x"), ("GET", "/plants"), ("POST", "/plants"):
        headers = {} if sent is None else {"X-Request-ID": sent}
        answer = client.request(path, method=method, headers=headers, expect_errors=True)
        found += answer.headers.getall("X-Request-ID")
    if sent in SANE_IDS:
        assert found == [sent] * 4
    else:
        assert len(set(found)) == 4
        assert all(re.fullmatch("(?!0{8})[0-9a-f]{32}", each) for each in found)


GOOD = ["a/b+c.d_e~f-0123==", " token-0123456789 ,\tweb:token-01234567890\n"]


@pytest.mark.parametrize("setting", GOOD)
def test_tokens_are_a_list_with_commas_or_spaces(monkeypatch, setting):
    monkeypatch.setenv("PLANTS_TOKENS", setting)
    assert read_tokens() == setting.replace(",", " ").split()


SHORT = ["short", "0123456789abcde", "good-token-01234567 short", "web:0123456789abcde"]
MALFORMED = ["a:b:token-0123456789", "ü:token-0123456789", "=0123456789abcdef", "töken-0123456789"]


@pytest.mark.parametrize("setting", [*SHORT, *MALFORMED, "", " ", ","])
def test_blank_short_or_malformed_tokens_are_refused(monkeypatch, setting):
    """The message says how to make one, and repeats none."""
    monkeypatch.setenv("PLANTS_TOKENS", setting)
    with pytest.raises(NeedsOperator, match=r"PLANTS_TOKENS must be .*token_urlsafe") as refusal:
        read_tokens()
    assert len(setting) < 2 or setting not in str(refusal.value)


def test_a_health_check_waits_for_less_than_two_seconds():
    """As platforms do; the storage is told for how long."""
    limits: list[float] = []
    app = create_app(SimpleNamespace(add=None, check=limits.append), [TOKEN])
    assert TestApp(app).get("/healthz").json == {"status": "ok"}
    assert TestApp(app).head("/healthz").status_int == 200
    assert max(limits) < 2
