"""The interface, through WSGI: what is answered, in which order things are checked, what is stored.

Whatever is refused is also shown to have stored nothing.
"""

import hmac
import json
import re
from functools import partial

import pytest
from bottle import Bottle
from webtest import TestApp, TestRequest, TestResponse

from app import BODY_LIMIT, create_app, require_token
from engine import NeedsOperator, Rejected
from schemas import VALIDATORS, Plant
from start import ORIGIN as ORIGIN_FORM
from start import TOKEN as TOKEN_FORM
from start import read_list
from tests.support.server import TOKEN
from tests.support.wire import MONSTERA

FORMS = {"PLANTS_TOKENS": TOKEN_FORM, "PLANTS_CORS_ORIGINS": ORIGIN_FORM}
TEXT = "🌵 \x01\n\t\"'\\ é e\u0301 \u202e \uffff \U0010ffff"


def refused(answer, status, *words):
    """Assert that `answer` is an Error of this status that says so, and return its message."""
    assert answer.status_int == status
    assert answer.content_type == "application/json"
    assert answer.body.endswith(b"}\n")
    assert answer.json["error"] == status
    VALIDATORS["error"].validate(answer.json)
    for word in words:
        assert word in answer.json["message"]
    return answer.json["message"]


def post(client, body, **headers):
    """Post `body` as it is, whatever the answer."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(
        "/plants", body, {"Content-Type": "application/json", **names}, expect_errors=True
    )


def test_a_new_plant_is_answered_without_its_id_and_stored_once(client, stored):
    """The same plant again is a 200 too."""
    answer = client.post_json("/plants", MONSTERA)
    assert answer.status_int == 200
    assert answer.headers.getall("Content-Type") == ["application/json"]
    assert answer.json == {"name": "Monstera", "tag": "indoor"}
    assert answer.body.endswith(b"}\n")  # a shell's prompt would follow on the same line
    VALIDATORS["plant"].validate(answer.json)
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
        (f'{{"id": 1.{"0" * 4298}, "name": "n"}}', (1, "n", None)),
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
    assert post(client, body).json == {"name": row[1], **tag}
    assert stored() == [row]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"tag": "indoor"}, {"tag": "outdoor"}),
        ({"tag": "indoor"}, {}),
        ({}, {"tag": ""}),
        ({}, {"name": "Monstera"}),
        ({}, {"name": "monstera "}),
    ],
)
def test_another_plant_with_the_id_is_a_409(client, stored, first, other):
    """What is stored stays as it is. No tag is not an empty one."""
    plant = {"id": 7, "name": "monstera"}
    client.post_json("/plants", {**plant, **first})
    refused(post(client, json.dumps({**plant, **other})), 409, "id: 7")
    assert stored() == [(7, "monstera", first.get("tag"))]


def test_a_400_names_all_that_is_wrong(client, stored):
    """In plain words. Letters of all scripts are readable; what can't be printed is escaped."""
    answer = post(client, '{"tag": "a\\u0000", "id": "dreißig 🌵 \\u0007"}'.encode())
    assert refused(answer, 400) == (
        'id: must be an integer, not "dreißig 🌵 \\u0007"; name: required but missing; '
        "tag: must not contain NUL"
    )
    assert "dreißig 🌵".encode() in answer.body
    half = '{"id": 7, "name": "n", "\\ud800": 1}'  # in a member's name, which no answer can have
    assert refused(post(client, half), 400) == "?: must not contain half of a surrogate pair"
    assert stored() == []


def test_a_message_is_never_longer_than_a_thousand_characters(client, stored):
    many = "{" + ", ".join(f'"{"x" * 50}{n}": "\\ud800"' for n in range(99)) + "}"
    for body in (f'{{"id": "{"7" * 5000}"}}', many.replace("{", '{"id": 1, "name": "n", ', 1)):
        assert len(refused(post(client, body), 400)) <= 1000
    assert len(refused(client.get("/" + "x" * 3000, expect_errors=True), 404)) == 1000
    refused(ask_health(client, "#" * 3000), 400, "Host")
    assert stored() == []


def ask_health(client, host, protocol="HTTP/1.1", method="GET"):
    """Send a request with this Host, or without one if it is None."""
    request = TestRequest.blank("/healthz", method=method)
    request.environ |= {"SERVER_PROTOCOL": protocol, "HTTP_HOST": host}
    if host is None:
        del request.environ["HTTP_HOST"]
    return client.do_request(request, expect_errors=True)


@pytest.mark.parametrize(
    "host",
    ["localhost", "plants.example:8000", "PLANTS.Example", "127.0.0.1:80", "[::1]:80", "[::1]",
     "my_host", "xn--pflnzchen-02a.example.", "localhost:"],
)  # fmt: skip
def test_a_host_is_a_name_or_an_address_and_maybe_a_port(client, host):
    """RFC 9110 section 7.2; which of them it is makes no difference."""
    assert ask_health(client, host).status_int == 200


@pytest.mark.parametrize(
    "host",
    [None, "", "one.example,two.example", "bad host", "###", "a:b:c", "::1", "[::1", "a@b", "a/b",
     "a:80x", "pl\xe4nt.example"],
)  # fmt: skip
def test_without_one_valid_host_every_request_is_a_400(client, host):
    """RFC 9112 section 3.2, before anything else; HTTP/1.0 may do without. Two come as a list."""
    answer = ask_health(client, host)
    refused(answer, 400, "Host must be a host and port")
    assert answer.headers["X-Request-ID"]
    assert ask_health(client, host, method="HEAD").status_int == 400
    assert ask_health(client, host, method="HEAD").body == b""
    assert ask_health(client, host, "HTTP/1.0").status_int == 200


NO_CREDENTIALS = {
    "none": None,
    "empty": "",
    "no scheme": TOKEN,
    "another scheme": f"Basic {TOKEN}",
    "no space": f"Bearer{TOKEN}",
    "a tab": f"Bearer\t{TOKEN}",
}
INVALID = {
    "a space and a tab": f"Bearer \t{TOKEN}",
    "no token": "Bearer",
    "the start of the token": f"Bearer {TOKEN[:-1]}",
    "more than the token": f"Bearer {TOKEN}x",
    "twice": f"Bearer {TOKEN},Bearer {TOKEN}",
    "not ASCII": "Bearer t\xf6ken",
    "long": "Bearer " + "x" * 8000,
}


@pytest.mark.parametrize("name", [*NO_CREDENTIALS, *INVALID])
def test_no_or_a_bad_token_is_a_401(client, stored, name):
    """error="invalid_token" only where credentials of the scheme were sent (RFC 6750, 3)."""
    client.authorization = None
    credentials = {**NO_CREDENTIALS, **INVALID}[name]
    headers = {} if credentials is None else {"Authorization": credentials}
    answer = post(client, json.dumps(MONSTERA), **headers)
    refused(answer, 401)
    error = ', error="invalid_token"' if name in INVALID else ""
    assert answer.headers["WWW-Authenticate"] == f'Bearer realm="plants"{error}'
    assert stored() == []


def test_a_token_elsewhere_is_no_token(client, stored):
    """Queries end in logs and histories; cookies are sent by pages that know no token."""
    client.authorization = None
    body = json.dumps({**MONSTERA, "access_token": TOKEN})
    for name in ("Cookie", "X-Authorization", "Proxy-Authorization", "Www-Authenticate"):
        refused(post(client, body, **{name: f"access_token={TOKEN}"}), 401)
        refused(post(client, body, **{name: f"Bearer {TOKEN}"}), 401)
    refused(client.post_json(f"/plants?access_token={TOKEN}", MONSTERA, expect_errors=True), 401)
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    refused(client.post("/plants", f"access_token={TOKEN}", form, expect_errors=True), 401)
    assert stored() == []


@pytest.mark.parametrize("scheme", ["BEARER", "bearer  "])
def test_the_scheme_is_taken_in_any_case(client, stored, scheme):
    """RFC 9110 section 11.1; one or more spaces follow it (RFC 6750 section 2.1)."""
    client.authorization = None
    assert post(client, json.dumps(MONSTERA), Authorization=f"{scheme} {TOKEN}").status_int == 200
    assert len(stored()) == 1


def test_each_token_is_compared_whichever_is_sent(storage, monkeypatch):
    """How long it takes does not tell which one is good; digests are compared, in constant time."""
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *two: compared.append(two) or compare(*two))
    tokens = [f"token-{number}-of-five-0123" for number in range(5)]
    client = TestApp(create_app(storage, tokens))
    for token in [*tokens, "none-of-the-five-0123", ""]:
        compared.clear()
        answer = post(client, json.dumps(MONSTERA), Authorization=f"Bearer {token}")
        assert answer.status_int == (200 if token in tokens else 401)
        assert len(compared) == len(tokens)
        assert {len(digest) for two in compared for digest in two} == {32}


@pytest.mark.parametrize(
    "content_type",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonx", "json",
     "application/json/x", "text/html; application/json"],
)  # fmt: skip
def test_another_content_type_or_none_is_a_415(client, stored, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    body = json.dumps(MONSTERA).encode()
    answer = client.request(
        "/plants", method="POST", body=body, headers=headers, expect_errors=True
    )
    refused(answer, 415, "Content-Type must be application/json", content_type or "left out")
    assert answer.headers["Accept"] == "application/json"  # RFC 9110 section 15.5.16
    assert stored() == []


@pytest.mark.parametrize(
    "content_type", ["Application/JSON", "application/json; charset=utf-8", "application/json ;x"]
)
def test_json_by_any_spelling_is_taken(client, content_type):
    """Media types are case-insensitive and may have parameters (RFC 9110 section 8.3.1)."""
    assert post(client, json.dumps(MONSTERA), Content_Type=content_type).status_int == 200


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        ("Content-Encoding", "gzip"),
        ("Content-Encoding", "identity, gzip"),
        ("Transfer-Encoding", "gzip, chunked"),  # a server may leave that to the application
    ],
)
def test_a_coding_other_than_identity_and_chunked_is_a_415(client, stored, header, coding):
    answer = post(client, json.dumps(MONSTERA), **{header: coding})
    refused(answer, 415, header, coding)
    assert answer.headers.get("Accept-Encoding") == {"Content-Encoding": "identity"}.get(header)
    assert stored() == []
    assert post(client, json.dumps(MONSTERA), Content_Encoding="Identity").status_int == 200


def test_a_body_beyond_the_limit_is_a_413(client, stored):
    assert BODY_LIMIT == 64 * 1024
    plant = json.dumps(MONSTERA).encode()
    refused(post(client, plant.ljust(BODY_LIMIT + 1)), 413, str(BODY_LIMIT))
    refused(post(client, b"", Content_Length=str(10**30)), 413)
    assert stored() == []
    assert post(client, plant.ljust(BODY_LIMIT)).status_int == 200


@pytest.mark.parametrize(
    "path", ["/nothing", "/plants/", "/plants/7", "/Plants", "/healthz/", "/%00", "/%C3%A9"]
)
def test_an_unknown_path_is_a_404_with_and_without_a_token(client, stored, path):
    for authorization in (("Bearer", TOKEN), None):
        client.authorization = authorization
        refused(client.post_json(path, MONSTERA, expect_errors=True), 404, "POST /plants")
    assert stored() == []


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/plants", "POST"),
        ("OPTIONS", "/plants", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_a_405_with_allow(client, stored, method, path, allow):
    client.authorization = None
    answer = client.request(path, method=method, expect_errors=True)
    assert refused(answer, 405) == f"{method} is not possible here, only {allow}"
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
    """404, 405, 401, 415, 413, 400, then 409: mended one by one, each shows the next."""
    client.post_json("/plants", MONSTERA)
    client.authorization = None
    request = {"url_or_req": "/plant", "method": "PUT", "body": b"{" * (BODY_LIMIT + 1)}
    headers = {"Content-Type": "text/plain"}
    steps = [
        (404, lambda: request.update(url_or_req="/plants")),
        (405, lambda: request.update(method="POST")),
        (401, lambda: headers.update(Authorization=f"Bearer {TOKEN}")),
        (415, lambda: headers.update({"Content-Type": "application/json"})),
        (413, lambda: request.update(body=b"{")),
        (400, lambda: request.update(body=b'{"id": 7, "name": "other"}')),
        (409, lambda: request.update(body=json.dumps(MONSTERA).encode())),
    ]
    for status, mend in steps:
        refused(client.request(**request, headers=headers, expect_errors=True), status)
        mend()
    assert client.request(**request, headers=headers).status_int == 200
    assert stored() == [(7, "Monstera", "indoor")]


def test_storage_that_cannot_answer_is_a_503_and_health_says_so(client, taken_away, stored):
    client.post_json("/plants", MONSTERA)
    with taken_away():
        for answer in (
            post(client, '{"id": 8, "name": "n"}'),
            post(client, json.dumps(MONSTERA)),
            client.get("/healthz", expect_errors=True),
        ):
            message = refused(answer, 503, "safe to send the same plant again")
            assert answer.headers["Retry-After"].isdigit()
            assert "plants.db" not in message and "SQL" not in message
    assert stored()[0] == (7, "Monstera", "indoor")


class Failing:
    """A storage that raises an exception."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    def add(self, plant: Plant) -> None:
        raise self.failure


def post_to_failing(failure: Exception) -> TestResponse:
    client = TestApp(create_app(Failing(failure), [TOKEN]))
    client.authorization = ("Bearer", TOKEN)
    return client.post_json("/plants", MONSTERA, expect_errors=True)


def test_a_bug_is_a_500_with_nothing_from_inside(caplog):
    answer = post_to_failing(ZeroDivisionError("from inside"))
    refused(answer, 500)
    assert "inside" not in answer.text and "Zero" not in answer.text
    assert "ZeroDivisionError: from inside" in answer.errors
    assert answer.headers["X-Request-ID"] in caplog.text


def test_a_plant_that_the_storage_never_takes_is_a_400_whose_reason_is_in_the_log(caplog):
    answer = post_to_failing(Rejected("violates the constraint from inside"))
    assert "inside" not in refused(answer, 400, "to send it again does not help")
    assert f"{answer.headers['X-Request-ID']} got a 400: violates the constraint" in caplog.text


def test_a_token_that_has_a_name_tells_who_it_was(storage):
    """As the access log's user; a token without a name, or a bad one, is nobody's."""
    users = []
    app = create_app(storage, ["web:web-token-0123456", "nobodys-token-01234"])

    def observed(environ, start_response):
        answer = app(environ, start_response)
        users.append(environ.get("REMOTE_USER"))
        return answer

    for token in ("web-token-0123456", "nobodys-token-01234", "web:web-token-0123456", "web"):
        client = TestApp(observed)
        client.authorization = ("Bearer", token)
        client.post_json("/plants", MONSTERA, expect_errors=True)
    assert users == ["web", None, None, None]


def test_a_route_that_says_nothing_asks_for_a_token():
    app = Bottle()
    app.install(partial(require_token, [TOKEN]))
    app.get("/<part>", callback=lambda part: part)
    client = TestApp(app)
    assert client.get("/in", expect_errors=True).status_int == 401
    client.authorization = ("Bearer", TOKEN)
    assert client.get("/in").text == "in"


def ids_of_answers(client, headers):
    requests = [("GET", "/healthz"), ("GET", "/nowhere"), ("GET", "/plants"), ("POST", "/plants")]
    for method, path in requests:
        answer = client.request(path, method=method, headers=headers, expect_errors=True)
        (request_id,) = answer.headers.getall("X-Request-ID")
        yield request_id


@pytest.mark.parametrize("sent", ["abc-123", "4bf92f35-77b3-4da6/a.b:c_d+e=f@g", "x" * 128])
def test_every_answer_has_the_request_id_of_the_client(client, sent):
    assert set(ids_of_answers(client, {"X-Request-ID": sent})) == {sent}


@pytest.mark.parametrize("sent", [None, "", "two words", "x" * 129, '"quoted"', "t\xf6", "one,two"])
def test_every_answer_has_a_new_request_id_where_the_client_sent_no_sane_one(client, sent):
    found = list(ids_of_answers(client, {} if sent is None else {"X-Request-ID": sent}))
    assert len(set(found)) == len(found)
    assert all(re.fullmatch("(?!0{8})[0-9a-f]{32}", request_id) for request_id in found)


@pytest.mark.parametrize(
    ("variable", "setting", "parts"),
    [
        ("PLANTS_TOKENS", "0123456789abcdef", ["0123456789abcdef"]),
        ("PLANTS_TOKENS", " first-token-0123 ,second-token-0123\n",
         ["first-token-0123", "second-token-0123"]),
        ("PLANTS_TOKENS", "a/b+c.d_e~f-0123456789==", ["a/b+c.d_e~f-0123456789=="]),
        ("PLANTS_TOKENS", "web:first-token-0123", ["web:first-token-0123"]),
        ("PLANTS_CORS_ORIGINS", "*", ["*"]),
        ("PLANTS_CORS_ORIGINS", "https://a.example, http://localhost:3000",
         ["https://a.example", "http://localhost:3000"]),
    ],
)  # fmt: skip
def test_settings_are_lists_with_commas_or_spaces(monkeypatch, variable, setting, parts):
    monkeypatch.setenv(variable, setting)
    assert read_list(variable, FORMS[variable]) == parts


BLANK = ["", " ", ","]
NO_TOKENS = ["short", "0123456789abcde", "good-token-01234567 short", "web:0123456789abcde",
             "a:b:token-0123456789", "ü:token-0123456789", "=0123456789abcdef",
             "töken-0123456789abcdef"]  # fmt: skip
NO_ORIGINS = ["garden.example", "https://garden.example/", "https://*", "ftp://a.example",
              "https://Garden.example", "https://garden.example:443", "http://a.example:80",
              "http://:"]  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "setting"),
    [("PLANTS_TOKENS", each) for each in BLANK + NO_TOKENS]
    + [("PLANTS_CORS_ORIGINS", each) for each in BLANK + NO_ORIGINS],
)
def test_blank_short_or_malformed_settings_are_refused(monkeypatch, variable, setting):
    """An origin has a scheme and no path: a browser would never send another one."""
    monkeypatch.setenv(variable, setting)
    with pytest.raises(NeedsOperator, match=f"{variable} must be") as refusal:
        read_list(variable, FORMS[variable])
    assert setting in BLANK or setting not in str(refusal.value)
    assert ("token_urlsafe" in str(refusal.value)) == (variable == "PLANTS_TOKENS")
