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
        ('{"id": 7, "name": "n", "height": 3, "x": [null]}', (7, "n", None)),
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

    def ask(protocol, method):
        request = TestRequest.blank("/healthz", method=method)
        request.environ |= {"SERVER_PROTOCOL": protocol, "HTTP_HOST": host}
        if host is None:
            del request.environ["HTTP_HOST"]
        return client.do_request(request, expect_errors=True)

    if host in HOSTS:
        assert ask("HTTP/1.1", "GET").status_int == 200
    else:
        refused(ask("HTTP/1.1", "GET"), 400, "Host must be a host and port")
        assert (ask("HTTP/1.1", "HEAD").status_int, ask("HTTP/1.1", "HEAD").body) == (400, b"")
    assert ask("HTTP/1.0", "GET").status_int == 200


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


def test_a_token_elsewhere_is_no_token(client, stored):
    """Queries end in logs and histories; cookies are sent by pages that know no token."""
    client.authorization = None
    body = {**MONSTERA, "access_token": TOKEN}
    for name in ("Cookie", "X-Authorization", "Proxy-Authorization", "Www-Authenticate"):
        refused(post(client, body, **{name: f"access_token={TOKEN}"}), 401)
        refused(post(client, body, **{name: f"Bearer {TOKEN}"}), 401)
    refused(client.post_json(f"/plants?access_token={TOKEN}", MONSTERA, expect_errors=True), 401)
    form = "application/x-www-form-urlencoded"
    refused(post(client, f"access_token={TOKEN}".encode(), Content_Type=form), 401)
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


JSON_TYPES = ["Application/JSON", "application/json; charset=utf-8", "application/json ;x"]
NO_JSON = ["text/plain", "application/jsonx", "application/json/x", "text/html; application/json"]


@pytest.mark.parametrize("content_type", [*JSON_TYPES, *NO_JSON, "json", "", None])
def test_another_content_type_or_none_is_a_415(client, stored, content_type):
    """In any case and with any parameters (RFC 9110 section 8.3.1) it is JSON."""
    answer = post(client, MONSTERA, Content_Type=content_type)
    if content_type in JSON_TYPES:
        assert answer.status_int == 200
    else:
        refused(answer, 415, "Content-Type must be application/json")
        assert answer.headers["Accept"] == "application/json"  # RFC 9110 section 15.5.16
        assert stored() == []


@pytest.mark.parametrize("coding", ["gzip", "identity, gzip"])
def test_a_content_coding_other_than_identity_is_a_415(client, stored, coding):
    answer = post(client, MONSTERA, Content_Encoding=coding)
    refused(answer, 415, "Content-Encoding must be identity")
    assert answer.headers["Accept-Encoding"] == "identity"
    assert stored() == []
    assert post(client, MONSTERA, Content_Encoding="Identity").status_int == 200


def test_a_body_beyond_the_limit_is_a_413(client, stored):
    plant = json.dumps(MONSTERA).encode()
    refused(post(client, plant.ljust(65537)), 413, "65536")
    refused(post(client, b"", Content_Length=str(10**30)), 413)
    assert stored() == []
    assert post(client, plant.ljust(65536)).status_int == 200


PATHS = ["/nothing", "/plants/", "/plants/7", "/Plants", "/healthz/", "/%00%C3%A9%22%0a"]


@pytest.mark.parametrize("path", [*PATHS, pytest.param("/" + "x" * 3000, id="long")])
def test_an_unknown_path_is_a_404_with_and_without_a_token(client, stored, path):
    """Its message names the path, but never has more than a thousand characters."""
    for authorization in (("Bearer", TOKEN), None):
        client.authorization = authorization
        answer = client.post_json(path, MONSTERA, expect_errors=True)
        assert len(refused(answer, 404, f"nothing at {unquote(path)}"[:900])) <= 1000
    assert stored() == []


@pytest.mark.parametrize(
    ("method", "path", "allow"), [("GET", "/plants", "OPTIONS, POST"), ("POST", "/", "GET, HEAD")]
)
def test_a_wrong_method_is_a_405_with_allow(client, stored, method, path, allow):
    client.authorization = None
    answer = client.request(path, method=method, expect_errors=True)
    assert refused(answer, 405) == f"this method is not possible here, only {allow}"
    assert answer.headers["Allow"] == allow
    assert stored() == []


@pytest.mark.parametrize("path", ["/", "/script.js", "/healthz", "/openapi.json", "/plants", "/x"])
def test_head_is_answered_with_the_headers_of_get(client, path):
    """And with nothing else (RFC 9110 section 9.3.2)."""
    both = [client.request(path, method=method, expect_errors=True) for method in ("GET", "HEAD")]
    assert both[0].status == both[1].status and both[1].body == b""
    for answer in both:
        del answer.headers["X-Request-ID"]
    assert both[0].headers == both[1].headers


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


def test_storage_that_cannot_answer_is_a_503_and_health_says_so(client, taken_away, stored):
    """Nothing from inside is told, and of a plant only to whoever sent one."""
    client.post_json("/plants", MONSTERA)
    message = "the storage is not available now"
    with taken_away():
        healthy = client.get("/healthz", expect_errors=True)
        answers = [post(client, {**MONSTERA, "id": number}) for number in (7, 8)]
    assert refused(healthy, 503) == message
    for answer in answers:
        assert refused(answer, 503) == f"{message}; it is safe to send the same plant again"
    assert all(answer.headers["Retry-After"].isdigit() for answer in (healthy, *answers))
    assert stored()[0] == (7, "Monstera", "indoor")


def failing(failure):
    """Return a client of an application whose storage raises an exception."""

    def fail(_):
        raise failure

    client = TestApp(create_app(SimpleNamespace(add=fail, check=fail), [TOKEN]))
    client.authorization = ("Bearer", TOKEN)
    return client


def test_a_plant_that_the_storage_never_takes_is_a_400_with_nothing_from_inside():
    message = "the storage does not accept this plant; to send it again does not help"
    assert refused(post(failing(Rejected("from inside")), MONSTERA), 400) == message


def test_a_bug_is_a_500_with_nothing_from_inside(caplog):
    """The log has the traceback, and the request's id."""
    answer = post(failing(ZeroDivisionError("from inside")), MONSTERA)
    refused(answer, 500, "the service failed; it is safe to send the same plant again")
    assert "inside" not in answer.text and "Zero" not in answer.text
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
        assert len(set(found)) == len(found) == 4
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
    assert limits[0] < 2
