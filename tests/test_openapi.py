"""What the service publishes: /openapi.json, the page at /, and the headers that browsers need."""

import json
import re

import pytest
from jsonschema import Draft202012Validator
from webtest import TestApp

from app import openapi
from storage import Unavailable
from tests.support.server import ROOT
from tests.test_app import JSON, failing, post

DOCUMENT = openapi()
POST = DOCUMENT["paths"]["/plants"]["post"]
PROVOKED = {  # A path and a status, and how to get such a response for a plant.
    "/plants 200": lambda client, plant: post(client, plant),
    "/plants 400": lambda client, _: post(client, {"id": "7"}),
    "/plants 401": lambda client, plant: post(client, plant, Authorization="Bearer another"),
    "/plants 405": lambda client, _: client.get("/plants", expect_errors=True),
    "/plants 408": lambda client, plant: post(client, plant, Content_Length="99"),
    "/plants 409": lambda client, plant: post(client, plant) and post(client, {**plant, "tag": ""}),
    "/plants 413": lambda client, _: post(client, b" " * (2**14 + 1)),
    "/plants 415": lambda client, plant: post(client, plant, Content_Type="text/plain"),
    "/plants 500": lambda _, plant: post(failing(ZeroDivisionError()), plant),
    "/plants 503": lambda _, plant: post(failing(Unavailable("away")), plant),
    "/healthz 200": lambda client, _: client.get("/healthz"),
    "/healthz 500": lambda *_: failing(ZeroDivisionError()).get("/healthz", expect_errors=True),
    "/livez 200": lambda client, _: client.get("/livez"),
    "/healthz 503": lambda *_: failing(Unavailable("away")).get("/healthz", expect_errors=True),
}


# The page at / and the description itself are for people and tools, not a part of the interface.
UNDESCRIBED = {("GET", "/"), ("GET", "/openapi.json")}


def resolve(part):
    """Return `part` of the document, or the part that its `$ref` refers to."""
    while "$ref" in part:
        place, part = part["$ref"], DOCUMENT
        for step in place.removeprefix("#/").split("/"):
            part = part[step]
    return part


METHODS = {"get", "head", "post", "put", "patch", "delete", "options"}
RESPONSES = {  # All described responses in JSON. An exercise has one in plain text.
    f"{path} {status}": resolve(response)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
    if method in METHODS  # A path may also have parameters, which all its methods share.
    for status, response in operation["responses"].items()
    if JSON in resolve(response).get("content", {})
}


def check(value, schema):
    """Assert that `value` is valid by a schema of the document."""
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(value)


def test_the_description_needs_no_token_and_no_other_document(client):
    """It is OpenAPI 3.1, has the version of the interface, and its server has a relative URL."""
    response = TestApp(client.app).get("/openapi.json")
    assert response.json == DOCUMENT
    assert DOCUMENT["openapi"].startswith("3.1.")
    assert DOCUMENT["info"]["version"] == "1.0.0"
    assert [server["url"] for server in DOCUMENT["servers"]] == ["."]
    references = re.findall(r'"\$ref": "(.+?)"', response.text)
    assert references and all(resolve({"$ref": each}) for each in references)
    # A generator of code would turn an escaped NUL in a pattern into a raw one.
    assert not re.search(r"\$id|\$schema|\\u0000", response.text)


def test_every_route_is_described_and_every_path_described_exists(client):
    """A new route is described in schemas/openapi.json."""
    routes = {
        (route.method, re.sub(r"<(\w+).*?>", r"{\1}", route.rule)) for route in client.app.routes
    }
    described = {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
        if method in METHODS
    }
    assert routes == described | UNDESCRIBED


@pytest.mark.parametrize("key", RESPONSES)
def test_the_service_answers_as_the_description_says(client, key):
    """Status, body and headers of each response are those of the description and its examples."""
    content, sent = RESPONSES[key]["content"][JSON], POST["requestBody"]["content"][JSON]
    if key not in PROVOKED:
        # These are errors that only the worker sends (test_secrets.py and others provoke them), or
        # successes of a new route, which has tests of its own.
        is_error = content == {"schema": {"$ref": "#/components/schemas/Error"}}
        assert is_error or key.split()[1] < "400", f"{key}: describe it by the schema Error alone"
        return
    examples = content.get("examples") or {"tagged": {"value": content["example"]}}
    for name, example in examples.items():
        plant = sent["examples"][name]["value"]
        check(plant, sent["schema"])
        response = PROVOKED[key](client, plant)
        assert (str(response.status_int), response.json) == (key.split()[1], example["value"])
        check(response.json, content["schema"])
        for header, about in RESPONSES[key]["headers"].items():
            schema, value = resolve(about)["schema"], response.headers[header]
            check(int(value) if schema["type"] == "integer" else value, schema)


def test_the_errors_in_interface_md_are_the_examples_of_the_description(client):
    """docs/interface.md shows one more: the 404 for a path that the description does not have."""
    page = (ROOT / "docs/interface.md").read_text("utf-8")
    shown = re.findall(r'`(\{"error".*?\})`', page)
    contents = [RESPONSES[key]["content"][JSON] for key in RESPONSES if key.startswith("/plants ")]
    examples = [each["example"] for each in contents if "example" in each]
    examples.append(client.post("/plant", status=404).json)
    assert sorted(shown) == sorted(map(json.dumps, examples))


def test_the_page_is_public_and_loads_nothing_from_elsewhere(client):
    """It is one file that sends no referrer. Its policy allows requests to this service only."""
    response = TestApp(client.app).get("/")
    assert response.body == (ROOT / "static/index.html").read_bytes()
    assert (response.content_type, response.charset) == ("text/html", "utf-8")
    assert '<meta name="referrer" content="no-referrer">' in response.text
    (policy,) = re.findall('Content-Security-Policy" content="([^"]+)"', response.text)
    assert policy.startswith("default-src 'none'") and not re.search(r"http|\*|eval", policy)


@pytest.mark.parametrize(
    "path", ["/plants", "/openapi.json", "/healthz", "/livez", "/", "/nowhere"]
)
def test_a_page_of_any_origin_may_use_the_interface(client, path):
    """A browser never adds a bearer token by itself, so a page without a token gets a 401.

    Browsers guess no content type and store no response.
    """
    client.authorization = None
    common = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    common |= {"Access-Control-Allow-Origin": "*"}
    common |= {"Access-Control-Expose-Headers": "X-Request-ID, Retry-After"}
    sent = {"Origin": "https://garden.example", "Access-Control-Request-Method": "POST"}
    preflight = client.options(path, sent, expect_errors=True)
    for response in preflight, client.get(path, headers=sent, expect_errors=True):
        assert common.items() <= dict(response.headers).items()
    if path == "/nowhere":
        assert preflight.status_int == 404
        return
    allowed = "OPTIONS, POST" if path == "/plants" else "GET, HEAD, OPTIONS"
    assert (preflight.status_int, preflight.body) == (204, b"")
    assert preflight.headers["Allow"] == allowed
    assert preflight.headers["Access-Control-Allow-Methods"] == allowed
    assert preflight.headers["Access-Control-Allow-Headers"] == "Authorization, *"
