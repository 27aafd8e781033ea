"""What the service says of itself: /openapi.json, the page at /, and who may call from a browser.

tests/ci/ tries the same with a browser, a fuzzer and a generated client.
"""

import json
import re

import pytest
from jsonschema import Draft202012Validator
from webtest import TestApp

from app import BODY_LIMIT, PAGE, STATIC, create_app
from engine import Unavailable
from schemas import VALIDATORS, openapi
from tests.support.server import ROOT, TOKEN
from tests.test_app import Failing

ORIGIN = "https://garden.example"


def everywhere(part):
    if isinstance(part, dict):
        yield part
        part = list(part.values())
    if isinstance(part, list):
        for item in part:
            yield from everywhere(item)


def resolve(document, part):
    """What `part` is, or refers to within the document."""
    while "$ref" in part:
        place, part = part["$ref"], document
        assert place.startswith("#/")
        for step in place[2:].split("/"):
            part = part[step]
    return part


# openapi.json


def test_it_is_public_and_stands_alone(client):
    """OpenAPI 3.1 of the interface's version, with a relative server and local references only."""
    client.authorization = None
    answer = client.get("/openapi.json")
    assert answer.content_type == "application/json"
    document = answer.json
    assert document == openapi()
    assert document["openapi"].startswith("3.1")
    assert document["info"]["version"] == "1.0.0"
    assert [server["url"] for server in document["servers"]] == ["."]
    for part in everywhere(document):
        assert not {"$id", "$schema"} & set(part)
        assert resolve(document, part)
    used = {tag for part in everywhere(document["paths"]) for tag in part.get("tags", [])}
    assert used == {tag["name"] for tag in document["tags"] if tag["description"]}


def test_its_shapes_are_the_schemas(client):
    """components.schemas is what the service checks with, and nothing is written twice."""
    assert "jsonSchemaDialect" not in openapi()
    components = openapi()["components"]["schemas"]
    assert set(components) == {"Plant", "NewPlant", "Error"}
    for validator in VALIDATORS.values():
        shape = dict(validator.schema)
        component = dict(components[shape["title"]])
        Draft202012Validator.check_schema(component)  # OpenAPI's dialect; the files have 2019-09
        assert component.pop("allOf", None) or component == {
            key: value for key, value in shape.items() if not key.startswith("$")
        }
    new_plant = components["NewPlant"]  # generators of clients drop what stands beside allOf
    assert new_plant["allOf"][0] == {"$ref": "#/components/schemas/Plant"}
    assert list(new_plant["allOf"][1]["properties"]) == ["id"] and "properties" not in new_plant


def test_its_patterns_can_be_copied_into_source_code():
    """NUL is refused, but is not written as \\u0000, for which generators put a raw NUL."""
    parts = everywhere(openapi()["components"]["schemas"])
    patterns = [part["pattern"] for part in parts if "pattern" in part]
    assert patterns
    for pattern in patterns:
        assert "\\u0000" not in pattern and "\0" not in pattern
        assert re.search(pattern, "any text\n") and not re.search(pattern, "a\0b")


def test_it_says_who_needs_a_token():
    """All but /healthz."""
    document = openapi()
    assert document["security"] == [{"bearer": []}]
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert "security" not in document["paths"]["/plants"]["post"]
    assert document["paths"]["/healthz"]["get"]["security"] == []


PROVOKED = {
    "200": {},
    "400": {"body": b'{"id": "7"}'},
    "401": {"headers": {"Authorization": "Bearer another-token-0123456789"}},
    "405": {"method": "GET"},
    "409": {"before": {"id": 7, "name": "Sequoia"}},
    "413": {"body": b" " * (BODY_LIMIT + 1)},
    "415": {"headers": {"Content-Type": "text/plain"}},
    "500": {"error": ZeroDivisionError()},
    "503": {"error": Unavailable("away")},
}


@pytest.mark.parametrize("status", PROVOKED)
def test_each_answer_is_as_described(storage, status):
    """Every example fits its schema and is what the service really answers, headers included."""
    how = PROVOKED[status]
    document = openapi()
    operation = document["paths"]["/plants"]["post"]
    assert set(operation["responses"]) == {*PROVOKED, "default"}
    described = resolve(document, operation["responses"][status])
    content = described["content"]["application/json"]
    requests = operation["requestBody"]["content"]["application/json"]["examples"]

    client = TestApp(create_app(Failing(how["error"]) if "error" in how else storage, [TOKEN]))
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    if "before" in how:
        client.post_json("/plants", how["before"], headers=headers)
    answers = content.get("examples") or {"tagged": {"value": content["example"]}}
    for name, example in answers.items():
        answer = client.request(
            "/plants",
            method=how.get("method", "POST"),
            body=how.get("body", json.dumps(requests[name]["value"]).encode()),
            headers={**headers, **how.get("headers", {})},
            expect_errors=True,
        )
        assert str(answer.status_int) == status
        assert answer.json == example["value"]
        schema = {**content["schema"], "components": document["components"]}
        Draft202012Validator(schema).validate(answer.json)
        for header, about in described["headers"].items():
            value = answer.headers[header]
            about = resolve(document, about)
            assert about["required"]
            value = int(value) if about["schema"]["type"] == "integer" else value
            Draft202012Validator(about["schema"]).validate(value)
    for request in requests.values():
        VALIDATORS["new-plant"].validate(request["value"])


@pytest.mark.parametrize(("path", "method"), [("/plants", "post"), ("/healthz", "get")])
@pytest.mark.parametrize("status", ["400", "default"])
def test_what_is_not_http_is_described_too(path, method, status):
    """A Host that is none is a 400, everything else is among the other answers."""
    document = openapi()
    described = resolve(document, document["paths"][path][method]["responses"][status])
    shape = described["content"]["application/json"]["schema"]
    assert shape == {"$ref": "#/components/schemas/Error"}
    assert list(described["headers"]) == ["X-Request-ID"]


def test_the_docs_show_the_same_errors(client):
    """The samples are the examples of the description, and one that is not in it."""
    page = (ROOT / "docs/interface.md").read_text("utf-8")
    shown = [json.loads(found) for found in re.findall(r'`(\{"error".*?\})`', page)]
    document = openapi()
    described = document["paths"]["/plants"]["post"]["responses"].values()
    contents = [resolve(document, each)["content"]["application/json"] for each in described]
    examples = [content["example"] for content in contents if "example" in content]
    not_found = client.post("/plant", expect_errors=True).json
    by_status = {example["error"]: example for example in [*examples, not_found]}
    assert {each["error"]: each for each in shown} == by_status


# the page


def test_the_page_is_public_and_loads_nothing_from_elsewhere(client):
    """Its own files only, under a policy that allows no others, and no referrer."""
    client.authorization = None
    types = {"html": "text/html", "css": "text/css", "js": "javascript", "svg": "image/svg+xml"}
    for name in ("", *PAGE):
        answer = client.get(f"/{name}")
        name = name or "index.html"
        assert types[name.partition(".")[2]] in answer.headers["Content-Type"]
        assert answer.body == (STATIC / name).read_bytes()
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy and "http" not in policy and "*" not in policy
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        found = re.findall(rb"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", answer.body)
        assert found in ([], [b"http://www.w3.org/2000/svg"])
    linked = re.findall(r'(?:src|href)="([^"]+)"', client.get("/").text)
    assert {f"/{name}" for name in linked} <= {*(f"/{name}" for name in PAGE), "/openapi.json"}


def test_the_page_is_sent_again_only_when_it_has_changed(client):
    """A request with the ETag of what the browser has gets a 304 and no body (RFC 9110, 13.1.2)."""
    first = client.get("/script.js")
    etag = first.headers["ETag"]
    assert re.fullmatch('"[!#-~]+"', etag)
    for known in (etag, f"W/{etag}", f'"other", {etag}', f'"a, b",W/{etag} , W/"c"', "*"):
        again = client.get("/script.js", headers={"If-None-Match": known})
        assert (again.status_int, again.body, again.headers["ETag"]) == (304, b"", etag)
        assert again.headers["Cache-Control"] == "no-cache"
    other = client.get("/style.css").headers["ETag"]
    for known in (other, etag.strip('"'), etag[:-2] + '"', 'W/"*"'):
        assert client.get("/script.js", headers={"If-None-Match": known}).body == first.body


def test_the_page_is_small():
    lines = {name: len((STATIC / name).read_text().splitlines()) for name in ("index.html", *PAGE)}
    assert lines["script.js"] <= 230 and sum(lines.values()) <= 410


# headers for browsers


def test_no_answer_is_guessed_at_and_none_of_the_api_is_kept(client):
    """nosniff everywhere; no-store on what POST /plants and /healthz answer, errors included."""
    for path in ("/healthz", "/plants", "/nowhere", "/openapi.json"):
        answer = client.get(path, expect_errors=True)
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/", "/script.js"):
        assert client.get(path).headers["X-Content-Type-Options"] == "nosniff"
        assert client.get(path).headers["Cache-Control"] == "no-cache"


def cors(answer):
    return {n.lower(): v for n, v in answer.headers.items() if n.startswith("Access-Control")}


def ask(storage, origins, origin):
    """What a browser asks before a page's first request, that request, and one without a token."""
    client = TestApp(create_app(storage, [TOKEN], origins))
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    preflight = client.options("/plants", headers, expect_errors=True)
    refused = client.post_json("/plants", {}, headers={"Origin": origin}, expect_errors=True)
    client.authorization = ("Bearer", TOKEN)
    plant = {"id": 7, "name": "Monstera"}
    answer = client.post_json("/plants", plant, headers={"Origin": origin})
    assert (refused.status_int, answer.status_int) == (401, 200)
    return preflight, answer, refused


def test_without_the_setting_no_page_from_elsewhere_may_call(storage):
    preflight, *others = ask(storage, (), ORIGIN)
    assert preflight.status_int == 405
    assert [cors(each) for each in (preflight, *others)] == [{}, {}, {}]


@pytest.mark.parametrize("origins", [["*"], ["https://other.example", ORIGIN]])
def test_a_page_of_a_listed_origin_may_call(storage, origins):
    """The browser is answered without a token; the page gets to see id and retry time."""
    preflight, *others = ask(storage, origins, ORIGIN)
    assert (preflight.status_int, preflight.body) == (204, b"")
    assert cors(preflight)["access-control-allow-methods"] == "GET, POST"
    for name in ("Authorization", "Content-Type"):
        assert name in cors(preflight)["access-control-allow-headers"]
    for each in (preflight, *others):
        allowed = "*" if "*" in origins else ORIGIN
        assert cors(each)["access-control-allow-origin"] == allowed
        assert cors(each)["access-control-expose-headers"] == "X-Request-ID, Retry-After"
        assert each.headers["Vary"] == "Origin"


@pytest.mark.parametrize("origin", ["https://evil.example", "http://garden.example", "null"])
def test_a_page_of_another_origin_gets_nothing(storage, origin):
    """Scheme, host and port are the origin."""
    for each in ask(storage, [ORIGIN], origin):
        assert "access-control-allow-origin" not in cors(each)


def test_only_storing_and_its_description_are_shared(storage):
    """A tool in a browser may read /openapi.json; other paths are none of a page's business."""
    client = TestApp(create_app(storage, [TOKEN], [ORIGIN]))
    answer = client.get("/openapi.json", headers={"Origin": ORIGIN})
    assert cors(answer)["access-control-allow-origin"] == ORIGIN
    assert answer.headers["Vary"] == "Origin"
    for path in ("/", "/healthz"):
        assert cors(client.get(path, headers={"Origin": ORIGIN})) == {}
