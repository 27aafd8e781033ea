"""Tests for a solution of the first exercise of docs/exercises.md: a route that prints labels."""

import http.client
import json
from urllib.parse import urlencode

import pytest

from tests.support.server import HEADERS, PATIENCE, Server

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The service on a new SQLite file: the route stores nothing."""
    with Server(tmp_path_factory.mktemp("server"), WEB_CONCURRENCY="1") as server:
        yield server


@pytest.fixture
def print_labels(server):
    """A function that posts a form to /labels, and returns the response and its body."""

    def print_labels(headers=HEADERS, **form):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("POST", "/labels", urlencode(form), {**headers, **FORM})
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        return response, body

    return print_labels


def test_a_client_gets_as_many_labels_as_it_asks_for(print_labels):
    """The name may be any text, in UTF-8. A browser must not take it for HTML."""
    for name in "Monstera", "Königskerze 🌵", "<b>&":
        response, body = print_labels(name=name, copies=3)
        assert response.status == 200
        assert response.headers["Content-Type"].lower() == "text/plain; charset=utf-8"
        assert body == f"{name}, 1 of 3\n{name}, 2 of 3\n{name}, 3 of 3\n"


def test_the_labels_are_streamed(print_labels):
    """So the length of the response is not known when it begins."""
    response, body = print_labels(name="Monstera", copies=100)
    assert response.headers["Transfer-Encoding"] == "chunked"
    assert "Content-Length" not in response.headers
    assert body.splitlines()[99] == "Monstera, 100 of 100"


def test_a_client_without_a_token_gets_a_401(print_labels):
    response, body = print_labels(headers={}, name="Monstera", copies=3)
    assert (response.status, json.loads(body)["error"]) == (401, 401)


def test_a_wrong_form_gets_a_400_that_names_the_field(print_labels):
    """This is an Error in JSON, like every other one of the service."""
    wrong = [{"copies": copies} for copies in ("", "0", "101", "-1", "1.5", "two", "9" * 5000)]
    for fields in [*wrong, {"name": ""}]:
        response, body = print_labels(**{"name": "Monstera", "copies": "3", **fields})
        (field,) = fields
        assert (response.status, response.headers["Content-Type"]) == (400, "application/json")
        assert json.loads(body)["message"].startswith(f"{field}: ")


def test_the_route_is_described(server):
    """tests/test_openapi.py fails until it is."""
    _, description = server.request("GET", "/openapi.json")
    assert "post" in description["paths"]["/labels"]
