"""Routes that a reader adds, as Bottle's documentation shows them, on a real server."""

import contextlib
import http.client
import json
import re
import textwrap

import pytest
from webtest import TestApp

from app import create_app
from tests.support.pages import block
from tests.support.server import HEADERS, PATIENCE, TOKEN, Server

JSON = "application/json"
HTML = "text/html; charset=UTF-8"
FAILED = "the service failed; it is safe to send the same plant again"
READER = """
from bottle import Bottle, HTTPError, HTTPResponse, abort, redirect, request, response, template
from start import get_app


def add_routes(app):
    @app.get("/gardens/<name>")
    def garden(name):
        abort(404, f"there is no garden {name}")

    @app.get("/nothing-said")
    def nothing_said():
        raise HTTPError(404)

    @app.hook("before_request")
    def gate():
        if request.query.gate:
            abort(int(request.query.gate), "the gate is closed")

    @app.get("/closed")
    def closed():
        abort(500, "the garden is closed")

    @app.get("/sunday")
    def sunday():
        abort(405, "not on Sundays")

    @app.get("/list")
    def some_list():
        return [{"a": 1}]

    @app.get("/tuple")
    def some_tuple():
        return {"a": 1}, 201

    @app.get("/generator")
    def generator():
        yield 1 / 0

    @app.get("/half-a-pair")
    def half_a_pair():
        return chr(0xD800)

    @app.error(402)
    def broken_handler(error):
        return 1 / 0

    @app.get("/broken-handler")
    def use_the_broken_handler():
        abort(402, "pay first")

    @app.error(418)
    def teapot(error):
        return f"<b>{error.body}</b>"

    @app.get("/teapot")
    def make_tea():
        abort(418, "no coffee here")

    @app.get("/forbidden")
    def forbidden():
        return HTTPResponse("<b>no</b>", 403)

    @app.get("/moved")
    def moved():
        redirect("/text")

    @app.get("/text")
    def text():
        return "<b>gr\\u00fcn</b>"

    @app.get("/template")
    def some_template():
        return template("<b>{{color}}</b>", color="gr\\u00fcn")

    @app.get("/stored")
    def stored():
        response.set_header("Cache-Control", "max-age=60")
        return {"name": "gr\\u00fcn"}

    @app.get("/public", skip="token")
    def public():
        return {"open": True}

    @app.post("/upload")
    def upload():
        return {"size": len(request.body.read())}

    @app.route("/own-options", method=["GET", "OPTIONS"])
    def own_options():
        return "own"

    # The route that docs/code.md shows.
    other = Bottle()
    other.get("/", callback=lambda: "other")
    app.mount("/open/", other)
    app.mount("/guarded/", other.wsgi, skip=[])
    return app


def make():
    return add_routes(get_app())
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A server with the routes of READER. A separate test checks the tracebacks."""
    folder = tmp_path_factory.mktemp("reader")
    shown = textwrap.indent(block("python", "@app.get"), "    ")
    program = READER.replace("    # The route that docs/code.md shows.\n", shown)
    (folder / "reader.py").write_text(program)
    options = ["--pythonpath", str(folder), "reader:make()"]
    with (
        contextlib.suppress(AssertionError),
        Server(folder, *options, WEB_CONCURRENCY="1") as server,
    ):
        yield server


@pytest.fixture
def ask(reader):
    """A function that sends a request. It returns status, headers, body and the line of the log."""

    def ask(path, method="GET", body=None, **headers):
        request_id = f"{method}{path}".replace("?", "/")
        connection = http.client.HTTPConnection("127.0.0.1", reader.port, timeout=PATIENCE)
        sent = {**HEADERS, **headers, "X-Request-ID": request_id}
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        return response.status, response.headers, body, reader.logged(re.escape(request_id))

    return ask


ERRORS = {  # A path, its status, the message of the Error, and the reason in the log.
    "/gardens/eden": (404, "there is no garden eden", "there is no garden eden"),
    "/nothing-said": (404, "404 Not Found", "404 Not Found"),
    "/closed": (500, "the garden is closed", "the garden is closed"),
    "/sunday": (405, "not on Sundays", "not on Sundays"),
    "/text?gate=404": (404, "the gate is closed", "the gate is closed"),
    "/text?gate=405": (405, "the gate is closed", "the gate is closed"),
    "/list": (500, FAILED, "Unsupported response type: <class 'dict'>"),
    "/tuple": (500, FAILED, "Unsupported response type: <class 'dict'>"),
    "/generator": (500, FAILED, "ZeroDivisionError, a bug"),
    "/half-a-pair": (500, FAILED, "UnicodeEncodeError, a bug"),
    "/broken-handler": (500, FAILED, "ZeroDivisionError, a bug"),
}


@pytest.mark.parametrize("path", ERRORS)
def test_whatever_a_route_does_wrong_gets_an_error_in_json_and_a_reason_in_the_log(ask, path):
    """The text of abort() is for the client. What only the operator may know is in the log."""
    expected, message, reason = ERRORS[path]
    status, headers, body, line = ask(path)
    assert (status, headers.get_all("Content-Type")) == (expected, [JSON])
    assert json.loads(body) == {"error": expected, "message": message}
    assert (line["status"], line["reason"]) == (expected, reason)


def test_a_bug_in_a_route_has_its_traceback_on_standard_error(ask, reader):
    """This includes a generator that fails before its first block, where Bottle writes none."""
    for path, function in {"/generator": "generator", "/broken-handler": "broken_handler"}.items():
        ask(path)
        traceback = rf"Traceback .*\n(?:  .*\n)+.*in {function}\n(?:  .*\n)+ZeroDivisionError"
        assert re.search(traceback, reader.err)


def test_the_route_that_the_page_shows_works(ask):
    status, headers, body, _ = ask("/greenhouses/tropical")
    assert (status, headers["Content-Type"]) == (200, JSON)
    assert json.loads(body) == {"name": "tropical", "degrees": 24}
    status, _, body, _ = ask("/greenhouses/cold")
    assert json.loads(body) == {"error": 404, "message": "there is no greenhouse cold"}
    assert ask("/greenhouses/tropical", Authorization="none")[0] == 401


@pytest.mark.parametrize("path", ["/text", "/template"])
def test_text_is_html_in_utf_8_as_bottle_documents(ask, path):
    status, headers, body, _ = ask(path)
    assert (status, headers["Content-Type"], body) == (200, HTML, "<b>grün</b>")


def test_a_body_that_is_too_long_is_the_clients_mistake_in_every_route(ask):
    """Not a bug in the route that reads it. worker.py reads no more than 32 KiB of a request."""
    status, _, body, line = ask("/upload", "POST", b"x" * 2**16)
    assert (status, json.loads(body)["error"]) == (400, 400)
    assert re.fullmatch("the request .* is too long, or its chunks are not valid", line["reason"])


def test_a_dict_is_json_and_the_routes_own_header_replaces_that_of_the_service(ask):
    _, headers, body, _ = ask("/stored")
    assert (headers["Content-Type"], body) == (JSON, '{"name": "grün"}\n')
    assert headers.get_all("Cache-Control") == ["max-age=60"]
    assert headers.get_all("X-Content-Type-Options") == ["nosniff"]


def test_a_handler_for_a_status_makes_the_body_and_the_reason_is_the_text_of_the_error(ask):
    """If a response is not a Bottle error, the reason is its status."""
    status, headers, body, line = ask("/teapot")
    assert (status, headers["Content-Type"], body) == (418, HTML, "<b>no coffee here</b>")
    assert (line["status"], line["reason"]) == (418, "no coffee here")
    status, _, body, line = ask("/forbidden")
    assert (status, body, line["reason"]) == (403, "<b>no</b>", "403 Forbidden")
    status, headers, _, line = ask("/moved")
    assert (status, headers["Location"].endswith("/text")) == (303, True)
    assert "reason" not in line


def test_a_public_route_skips_the_check_of_the_token_alone(ask):
    """Bottle's plugin for JSON still makes JSON of its dict."""
    status, headers, body, line = ask("/public", Authorization="none")
    assert (status, headers["Content-Type"], body) == (200, JSON, '{"open": true}\n')
    assert "token" not in line


def test_a_mounted_application_needs_a_token_only_if_it_is_mounted_with_an_empty_skip(ask):
    """Bottle applies no plugin of an application to another one that is mounted in it."""
    for path, status in {"/open/": 200, "/guarded/": 401}.items():
        assert ask(path, Authorization="none")[0] == status
        assert ask(path)[::2] == (200, "other")


def test_a_route_answers_head_and_options_as_well(ask):
    """OPTIONS needs no token, and names the methods of the path. A route may answer it itself."""
    assert ask("/text", "HEAD")[::2] == (200, "")
    status, headers, body, _ = ask("/text", "OPTIONS", Authorization="none")
    assert (status, headers["Allow"], body) == (204, "GET, HEAD, OPTIONS", "")
    assert ask("/own-options", "OPTIONS")[::2] == (200, "own")
    status, headers, body, _ = ask("/text", "PUT")
    assert (status, headers["Allow"]) == (405, "GET, HEAD, OPTIONS")
    assert json.loads(body)["message"] == "method not allowed; use GET, HEAD or OPTIONS"


def test_another_bottle_application_in_the_process_is_as_bottle_made_it(storage):
    """The service changes its own application, and not the library."""
    from bottle import Bottle

    create_app(storage, [TOKEN])
    other = Bottle()
    other.get("/", callback=lambda: "text")
    response = TestApp(other).get("/")
    assert response.headers["Content-Type"] == HTML
