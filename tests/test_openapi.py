"""What the service says of itself: /openapi.json, the page at /, and headers for browsers."""

import json
import re

import pytest
from jsonschema import Draft202012Validator

from engines import Unavailable
from plant import openapi
from tests.support.server import ROOT
from tests.test_app import failing, post

DOCUMENT = openapi()
POST = DOCUMENT["paths"]["/plants"]["post"]
JSON = "application/json"
PROVOKED = {
    "/plants 200": lambda client, plant: post(client, plant),
    "/plants 400": lambda client, _: post(client, {"id": "7"}),
    "/plants 401": lambda client, plant: post(client, plant, Authorization="Bearer another"),
    "/plants 405": lambda client, _: client.get("/plants", expect_errors=True),
    "/plants 408": lambda client, plant: post(client, plant, Content_Length="99"),
    "/plants 409": lambda client, plant: (
        post(client, plant) and post(client, {**plant, "name": ""})
    ),
    "/plants 413": lambda client, _: post(client, b" " * 65537),
    "/plants 415": lambda client, plant: post(client, plant, Content_Type="text/plain"),
    "/plants 500": lambda _, plant: post(failing(ZeroDivisionError()), plant),
    "/plants 503": lambda _, plant: post(failing(Unavailable("away")), plant),
    "/healthz 200": lambda client, _: client.get("/healthz"),
    "/healthz 500": lambda *_: failing(ZeroDivisionError()).get("/healthz", expect_errors=True),
    "/healthz 503": lambda *_: failing(Unavailable("away")).get("/healthz", expect_errors=True),
}


def resolve(part):
    """What `part` is, or refers to within the document."""
    while "$ref" in part:
        place, part = part["$ref"], DOCUMENT
        for step in place.removeprefix("#/").split("/"):
            part = part[step]
    return part


RESPONSES = {
    f"{path} {status}": resolve(response)
    for path, operations in DOCUMENT["paths"].items()
    for operation in operations.values()
    for status, response in operation["responses"].items()
}


def fits(value, schema):
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(value)
    return True


def test_it_is_public_and_stands_alone(client):
    """OpenAPI 3.1 of the interface's version, with a relative server and local references only."""
    client.authorization = None
    answer = client.get("/openapi.json")
    assert answer.json == DOCUMENT
    assert DOCUMENT["openapi"].startswith("3.1.")
    assert DOCUMENT["info"]["version"] == "1.0.0"
    assert [server["url"] for server in DOCUMENT["servers"]] == ["."]
    assert all(resolve({"$ref": each}) for each in re.findall(r'"\$ref": "(.+?)"', answer.text))
    assert not re.search(r"\$id|\$schema|\\u0000", answer.text)  # generators write a raw NUL


@pytest.mark.parametrize("key", RESPONSES)
def test_each_answer_is_as_described(client, key):
    """Every example is what the service really answers, headers included."""
    content, sent = RESPONSES[key]["content"][JSON], POST["requestBody"]["content"][JSON]
    if key not in PROVOKED:  # what is not HTTP, of which tests of the worker tell
        assert content == {"schema": {"$ref": "#/components/schemas/Error"}}
        return
    examples = content.get("examples") or {"tagged": {"value": content["example"]}}
    for name, example in examples.items():
        plant = sent["examples"][name]["value"]
        assert fits(plant, sent["schema"])
        answer = PROVOKED[key](client, plant)
        assert (str(answer.status_int), answer.json) == (key.split()[1], example["value"])
        assert fits(answer.json, content["schema"])
        for header, about in RESPONSES[key]["headers"].items():
            schema, value = resolve(about)["schema"], answer.headers[header]
            assert fits(int(value) if schema["type"] == "integer" else value, schema)


def test_the_docs_show_the_same_errors(client):
    """The samples are the examples of the description, and one that is not in it."""
    page = (ROOT / "docs/interface.md").read_text("utf-8")
    shown = re.findall(r'`(\{"error".*?\})`', page)
    contents = [each["content"][JSON] for key, each in RESPONSES.items() if "/plants" in key]
    examples = [each["example"] for each in contents if "example" in each]
    examples.append(client.post("/plant", status=404).json)
    assert sorted(shown) == sorted(map(json.dumps, examples))


def test_the_page_is_public_and_loads_nothing_from_elsewhere(client):
    """Its own files only, under a policy that allows no others, and no referrer."""
    client.authorization = None
    page = client.get("/").text
    for name in {"", *re.findall(r'(?:src|href)="([^"]+)"', page)} - {"openapi.json"}:
        file = ROOT / "static" / (name or "index.html")
        assert client.get(f"/{name}").body == file.read_bytes()
    assert '<meta name="referrer" content="no-referrer">' in page
    (policy,) = re.findall('Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"unsafe|http|\*", policy)


@pytest.mark.parametrize("path", ["/plants", "/openapi.json", "/healthz", "/"])
def test_a_page_of_any_origin_may_use_the_interface_and_nothing_else(client, path):
    """A token is no cookie: a page that has none gets a 401. No type is guessed, no answer kept."""
    client.authorization = None
    is_shared = path in ("/plants", "/openapi.json")
    asked = {"Origin": "https://garden.example", "Access-Control-Request-Method": "POST"}
    preflight = client.options(path, asked, expect_errors=True)
    for answer in preflight, client.get(path, headers=asked, expect_errors=True):
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers.get("Access-Control-Allow-Origin") == ("*" if is_shared else None)
    assert (preflight.status_int == 204) == is_shared
    if is_shared:
        headers = preflight.headers
        assert headers["Access-Control-Expose-Headers"] == "X-Request-ID, Retry-After"
        assert headers["Access-Control-Allow-Methods"] == "GET, POST"
        assert "Authorization, Content-Type" in headers["Access-Control-Allow-Headers"]
    else:
        assert preflight.headers["Allow"] == "GET, HEAD"
