"""The interface, through WSGI: what is answered, in which order things are checked, what is stored.

Whatever is refused is also shown to have stored nothing.
"""

import hmac
import json
import re
from base64 import b64encode
from functools import partial

import pytest
from bottle import Bottle
from webtest import TestApp, TestRequest

from app import BODY_LIMIT, create_app, read_list, require_token
from app import TOKEN as TOKEN_FORM
from engine import NeedsOperator
from schemas import VALIDATORS, Plant
from tests.support.server import TOKEN

MONSTERA = {"id": 7, "name": "Monstera", "tag": "indoor"}


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


# 200


def test_a_new_plant_is_stored_and_answered_without_its_id(client, stored):
    """200 has the shape Plant and nothing more: name and tag, no id."""
    answer = client.post_json("/plants", MONSTERA)
    assert answer.status_int == 200
    assert answer.content_type == "application/json"
    assert answer.json == {"name": "Monstera", "tag": "indoor"}
    assert answer.body.endswith(b"}\n")  # a shell's prompt would follow on the same line
    VALIDATORS["plant"].validate(answer.json)
    assert stored() == [(7, "Monstera", "indoor")]


def test_a_plant_without_a_tag_is_answered_without_one(client, stored):
    """tag is in the answer only where the request had it."""
    assert client.post_json("/plants", {"id": 7, "name": "Sequoia"}).json == {"name": "Sequoia"}
    assert client.post_json("/plants", {"id": 8, "name": "", "tag": ""}).json == {
        "name": "",
        "tag": "",
    }
    assert stored() == [(7, "Sequoia", None), (8, "", "")]


def test_unknown_members_are_ignored(client, stored):
    """The shape is open: what it does not name is neither refused nor stored nor answered."""
    answer = client.post_json("/plants", {**MONSTERA, "height": 3, "x": [None]})
    assert answer.json == {"name": "Monstera", "tag": "indoor"}
    assert stored() == [(7, "Monstera", "indoor")]


def test_the_same_plant_again_is_a_200_and_stored_once(client, stored):
    """The id makes a retry safe."""
    first = client.post_json("/plants", MONSTERA)
    assert client.post_json("/plants", MONSTERA).body == first.body
    assert stored() == [(7, "Monstera", "indoor")]


@pytest.mark.parametrize("number", [-(2**63), -1, 0, 2**53 + 1, 2**63 - 1])
def test_an_id_of_64_bits_is_stored_exactly(client, stored, number):
    """int64, exactly."""
    client.post_json("/plants", {"id": number, "name": "n"})
    assert stored() == [(number, "n", None)]


def test_a_whole_number_with_a_fraction_or_exponent_is_an_integer(client, stored):
    """JSON Schema takes 1.0 and 1e3 for integers, so they are taken as 1 and 1000."""
    assert post(client, b'{"id": 1.0, "name": "n"}').status_int == 200
    assert post(client, b'{"id": 1e3, "name": "n"}').status_int == 200
    assert stored() == [(1, "n", None), (1000, "n", None)]


def test_text_is_stored_and_answered_exactly(client, stored):
    """Any Unicode but NUL: astral characters, controls, quotes, combining marks."""
    name = "🌵 \x01\n\t\"'\\ é e\u0301 \u202e \uffff \U0010ffff"
    assert client.post_json("/plants", {"id": 7, "name": name}).json == {"name": name}
    assert stored() == [(7, name, None)]


# 409


@pytest.mark.parametrize(
    "other", [{"name": "Sequoia"}, {"tag": "outdoor"}, {"tag": ""}, {"name": "monstera"}]
)
def test_another_plant_with_the_id_is_a_409(client, stored, other):
    """What is stored stays as it is."""
    client.post_json("/plants", MONSTERA)
    refused(post(client, json.dumps({**MONSTERA, **other})), 409, "id: 7")
    assert stored() == [(7, "Monstera", "indoor")]


def test_a_missing_tag_differs_from_an_empty_one(client, stored):
    """No tag and the tag "" are different plants."""
    client.post_json("/plants", {"id": 7, "name": "n"})
    refused(post(client, '{"id": 7, "name": "n", "tag": ""}'), 409)
    assert stored() == [(7, "n", None)]


# 400


def test_a_400_names_all_that_is_wrong(client, stored):
    """One message, each place in the field's own name, in plain words."""
    message = refused(post(client, '{"id": "7", "tag": 3}'), 400)
    assert message == (
        'id: must be an integer, not "7"; name: required but missing; tag: must be a string, not 3'
    )
    assert stored() == []


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        '{"id": 7}',
        '{"id": 7, "id": 7, "name": "n"}',
        '{"id": 9223372036854775808, "name": "n"}',
        '{"id": NaN, "name": "n"}',
        '{"id": 7, "name": "a\\u0000"}',
        '{"id": 7, "name": "\\ud800"}',
        '{"id": 7, "name": "n"} {"id": 8, "name": "n"}',
        "[" * 50_000,
        '{"id": ' + "7" * 10_000 + ', "name": "n"}',
        b'{"id": 7, "name": "\xff"}',
    ],
    ids=range(13),
)
def test_what_is_no_plant_is_a_400(client, stored, body):
    """Malformed JSON and violations of the schema; tests/test_schemas.py has every kind."""
    refused(post(client, body), 400)
    assert stored() == []


def test_a_message_shows_text_as_it_was_sent(client):
    """Letters of all scripts are readable; only what can't be printed is escaped."""
    answer = post(client, '{"id": "dreißig 🌵 \\u0007", "name": "a\\u0000"}'.encode())
    message = 'id: must be an integer, not "dreißig 🌵 \\u0007"; name: must not contain NUL'
    assert refused(answer, 400) == message
    assert "dreißig 🌵".encode() in answer.body


def test_a_message_is_never_longer_than_a_thousand_characters(client, stored):
    """Long values are cut, and so is a message that has many."""
    many = "{" + ", ".join(f'"{"x" * 50}{n}": "\\ud800"' for n in range(99)) + "}"
    for body in (f'{{"id": "{"7" * 5000}"}}', many.replace("{", '{"id": 1, "name": "n", ', 1)):
        assert len(refused(post(client, body), 400)) <= 1000
    assert len(refused(client.get("/" + "x" * 3000, expect_errors=True), 404)) == 1000
    refused(ask_health(client, "#" * 3000), 400, "Host")
    assert stored() == []


def test_a_body_shorter_than_declared_is_a_400(client, stored):
    """A body that was cut short reads without an error: the lengths are compared."""
    body = json.dumps(MONSTERA)
    answer = post(client, body, Content_Length=str(len(body) + 1))
    refused(answer, 400, f"ended after {len(body)} of {len(body) + 1} bytes")
    assert stored() == []


@pytest.mark.parametrize("length", ["seven", "-1"])
def test_a_content_length_that_is_no_number_is_a_400(client, stored, length):
    """Servers refuse it before; with one that does not, it is neither a 500 nor read for ever."""
    client.lint = False
    refused(post(client, json.dumps(MONSTERA), Content_Length=length), 400)
    assert stored() == []


# Host


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


# 401


@pytest.mark.parametrize(
    ("credentials", "challenge"),
    [
        (None, 'Bearer realm="plants"'),
        ("", 'Bearer realm="plants"'),
        (TOKEN, 'Bearer realm="plants"'),
        (f"Basic {TOKEN}", 'Bearer realm="plants"'),
        (f"Basic {b64encode(f'user:{TOKEN}'.encode()).decode()}", 'Bearer realm="plants"'),
        (f"Bearer{TOKEN}", 'Bearer realm="plants"'),
        (f"Bearer\t{TOKEN}", 'Bearer realm="plants"'),
        (f"Bearer \t{TOKEN}", 'Bearer realm="plants", error="invalid_token"'),
        (f'Bearer "{TOKEN}"', 'Bearer realm="plants", error="invalid_token"'),
        (f"Bearer Bearer {TOKEN}", 'Bearer realm="plants", error="invalid_token"'),
        (f"Bearer {TOKEN}, realm=x", 'Bearer realm="plants", error="invalid_token"'),
        ("Bearer", 'Bearer realm="plants", error="invalid_token"'),
        (f"Bearer {TOKEN[:-1]}", 'Bearer realm="plants", error="invalid_token"'),
        (f"Bearer {TOKEN[1:]}", 'Bearer realm="plants", error="invalid_token"'),
        (f"Bearer {TOKEN}x", 'Bearer realm="plants", error="invalid_token"'),
        (f"Bearer {TOKEN.upper()}", 'Bearer realm="plants", error="invalid_token"'),
        (f"Bearer {TOKEN},Bearer {TOKEN}", 'Bearer realm="plants", error="invalid_token"'),
        ("Bearer t\xf6ken", 'Bearer realm="plants", error="invalid_token"'),
        ("Bearer " + "x" * 8000, 'Bearer realm="plants", error="invalid_token"'),
    ],
    ids=["none", "empty", "no scheme", "another scheme", "as a password", "no space", "a tab",
         "a space and a tab", "in quotes", "two schemes", "a parameter", "no token",
         "the start of the token", "the end of the token", "more than the token", "other case",
         "twice", "not ASCII", "long"],
)  # fmt: skip
def test_no_or_a_bad_token_is_a_401(client, stored, credentials, challenge):
    """error="invalid_token" only where credentials of the scheme were sent (RFC 6750, 3)."""
    client.authorization = None
    headers = {} if credentials is None else {"Authorization": credentials}
    answer = post(client, json.dumps(MONSTERA), **headers)
    refused(answer, 401)
    assert answer.headers["WWW-Authenticate"] == challenge
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


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_the_scheme_is_taken_in_any_case(client, stored, scheme):
    """RFC 9110 section 11.1; one or more spaces follow it (RFC 6750 section 2.1)."""
    client.authorization = None
    assert post(client, json.dumps(MONSTERA), Authorization=f"{scheme} {TOKEN}").status_int == 200
    assert len(stored()) == 1


def test_each_of_several_tokens_is_good(storage, stored):
    """Two tokens at a time let clients change over without a pause."""
    client = TestApp(create_app(storage, ["first-token-of-two", "second-token-of-two"]))
    for number, token in enumerate(["first-token-of-two", "second-token-of-two"]):
        client.authorization = ("Bearer", token)
        client.post_json("/plants", {"id": number, "name": "n"})
    assert len(stored()) == 2


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


# 415 and 413


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx", "json",
     "application/json/x", "text/html; application/json"],
)  # fmt: skip
def test_another_content_type_is_a_415(client, stored, content_type):
    """The message says what to send and what was sent."""
    answer = post(client, json.dumps(MONSTERA), Content_Type=content_type)
    refused(answer, 415, "Content-Type must be application/json", content_type)
    assert answer.headers["Accept"] == "application/json"  # RFC 9110 section 15.5.16
    assert stored() == []


def test_no_content_type_is_a_415(client, stored):
    """Bottle's request.json would be None here, without an error."""
    refused(
        client.request(
            "/plants", method="POST", body=b'{"id": 7, "name": "n"}', expect_errors=True
        ),
        415,
        "application/json",
    )
    assert stored() == []


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json ;x",
    ],
)
def test_json_by_any_spelling_is_taken(client, content_type):
    """Media types are case-insensitive and may have parameters (RFC 9110 section 8.3.1)."""
    assert post(client, json.dumps(MONSTERA), Content_Type=content_type).status_int == 200


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip"])
def test_a_content_encoding_is_a_415(client, stored, coding):
    """A compressed body is not unpacked."""
    answer = post(client, json.dumps(MONSTERA), Content_Encoding=coding)
    refused(answer, 415, coding, "identity")
    assert answer.headers["Accept-Encoding"] == "identity"
    assert stored() == []
    assert post(client, json.dumps(MONSTERA), Content_Encoding="Identity").status_int == 200


def test_a_compressed_transfer_is_a_415(client, stored):
    """A server may leave the undoing of other codings than chunked to the application."""
    headers = {"Transfer_Encoding": "gzip, chunked"}
    refused(
        post(client, json.dumps(MONSTERA), **headers), 415, "Transfer-Encoding", "gzip, chunked"
    )
    assert stored() == []


def test_a_body_beyond_the_limit_is_a_413(client, stored):
    """64 KiB is the limit, and a body of just that is taken."""
    assert BODY_LIMIT == 64 * 1024
    plant = json.dumps(MONSTERA).encode()
    refused(post(client, plant.ljust(BODY_LIMIT + 1)), 413, str(BODY_LIMIT))
    refused(post(client, b"", Content_Length=str(10**30)), 413)
    assert stored() == []
    assert post(client, plant.ljust(BODY_LIMIT)).status_int == 200


# 404, 405 and the order of checks


@pytest.mark.parametrize(
    "path", ["/nothing", "/plants/", "/plants/7", "/Plants", "/healthz/", "/%00", "/%C3%A9"]
)
def test_an_unknown_path_is_a_404_with_and_without_a_token(client, stored, path):
    """404 comes first."""
    for authorization in (("Bearer", TOKEN), None):
        client.authorization = authorization
        refused(client.post_json(path, MONSTERA, expect_errors=True), 404, "POST /plants")
    assert stored() == []


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/plants", "POST"),
        ("PUT", "/plants", "POST"),
        ("DELETE", "/plants", "POST"),
        ("OPTIONS", "/plants", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_a_405_with_allow(client, stored, method, path, allow):
    """405 comes before the token is asked for."""
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
    request = {"path": "/plant", "method": "PUT", "body": b"{" * (BODY_LIMIT + 1)}
    headers = {"Content-Type": "text/plain"}
    steps = [
        (404, lambda: request.update(path="/plants")),
        (405, lambda: request.update(method="POST")),
        (401, lambda: headers.update(Authorization=f"Bearer {TOKEN}")),
        (415, lambda: headers.update({"Content-Type": "application/json"})),
        (413, lambda: request.update(body=b"{")),
        (400, lambda: request.update(body=b'{"id": 7, "name": "other"}')),
        (409, lambda: request.update(body=json.dumps(MONSTERA).encode())),
    ]
    for status, mend in steps:
        path, method, body = request["path"], request["method"], request["body"]
        refused(
            client.request(path, method=method, body=body, headers=headers, expect_errors=True),
            status,
        )
        mend()
    assert (
        client.request("/plants", method="POST", body=request["body"], headers=headers).status_int
        == 200
    )
    assert stored() == [(7, "Monstera", "indoor")]


# 503, 500 and health


def test_storage_that_cannot_answer_is_a_503_and_health_says_so(client, taken_away, stored):
    """503 with Retry-After, safe to send again; what is wrong is for the log only."""
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


def test_a_bug_is_a_500_with_nothing_from_inside(caplog):
    """The traceback goes to the log, with the id of the request."""

    class Broken:
        def add(self, plant: Plant) -> None:
            raise ZeroDivisionError("from inside")

    client = TestApp(create_app(Broken(), [TOKEN]))
    client.authorization = ("Bearer", TOKEN)
    answer = client.post_json("/plants", MONSTERA, expect_errors=True)
    refused(answer, 500)
    assert "inside" not in answer.text and "Zero" not in answer.text
    assert "ZeroDivisionError: from inside" in answer.errors
    assert answer.headers["X-Request-ID"] in caplog.text


def test_health_needs_no_token_and_writes_nothing(client, stored):
    """GET and HEAD /healthz: 200 after a real look at the storage."""
    client.authorization = None
    assert client.get("/healthz").json == {"status": "ok"}
    assert client.head("/healthz").status_int == 200
    assert stored() == []


# what every answer has


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("abc-123", True),
        ("4bf92f35-77b3-4da6/a.b:c_d+e=f@g", True),
        (None, False),
        ("", False),
        ("two words", False),
        ("x" * 129, False),
        ('"quoted"', False),
        ("t\xf6", False),
        ("one,two", False),
    ],
)
def test_every_answer_has_a_request_id(client, sent, kept):
    """The client's if it is sane, else a new one; the same header on 200 and on every error."""
    headers = {} if sent is None else {"X-Request-ID": sent}
    seen = []
    for method, path in [
        ("GET", "/healthz"),
        ("GET", "/nowhere"),
        ("GET", "/plants"),
        ("POST", "/plants"),
    ]:
        answer = client.request(path, method=method, headers=headers, expect_errors=True)
        (request_id,) = answer.headers.getall("X-Request-ID")
        seen.append(request_id)
    if kept:
        assert set(seen) == {sent}
    else:
        assert len(set(seen)) == 4
        assert all(re.fullmatch("(?!0{8})[0-9a-f]{32}", request_id) for request_id in seen)


# the bearer plugin and the tokens


def test_a_route_that_says_nothing_asks_for_a_token():
    """Forgetting fails closed; a route for everybody skips the plugin."""
    app = Bottle()
    app.install(partial(require_token, [TOKEN]))
    app.get("/closed/<part>", callback=lambda part: part)
    app.get("/open", callback=lambda: "in", skip=True)
    client = TestApp(app)
    assert client.get("/closed/in", expect_errors=True).status_int == 401
    assert client.get("/open").text == "in"
    client.authorization = ("Bearer", TOKEN)
    assert client.get("/closed/in").text == "in"


@pytest.mark.parametrize(
    ("setting", "tokens"),
    [
        ("0123456789abcdef", ["0123456789abcdef"]),
        (" first-token-0123 ,second-token-0123\n", ["first-token-0123", "second-token-0123"]),
        ("a/b+c.d_e~f-0123456789==", ["a/b+c.d_e~f-0123456789=="]),
    ],
)
def test_tokens_are_separated_by_commas_or_white_space(monkeypatch, setting, tokens):
    """One or several b64tokens (RFC 6750 section 2.1)."""
    monkeypatch.setenv("PLANTS_TOKENS", setting)
    assert read_list("PLANTS_TOKENS", TOKEN_FORM) == tokens


@pytest.mark.parametrize(
    "setting",
    ["", " ", ",", "short", "0123456789abcde", "good-token-01234567 short", "a:colon-0123456789",
     "=0123456789abcdef", "töken-0123456789abcdef"],
)  # fmt: skip
def test_blank_short_or_malformed_tokens_are_refused(monkeypatch, setting):
    """The refusal says how to make one, and does not repeat what was set."""
    monkeypatch.setenv("PLANTS_TOKENS", setting)
    with pytest.raises(NeedsOperator, match=r"PLANTS_TOKENS .*token_urlsafe") as refusal:
        read_list("PLANTS_TOKENS", TOKEN_FORM)
    assert not setting.strip(" ,") or setting not in str(refusal.value)
