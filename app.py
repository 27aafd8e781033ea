"""The HTTP interface: POST /plants stores a plant, GET /healthz tells whether that is possible.

Contains no SQL and reads no environment: start.py calls create_app() with a storage.
"""

import hashlib
import hmac
import json
import mimetypes
import random
import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from bottle import BaseResponse, Bottle, HTTPError, HTTPResponse, abort, request

from engine import Conflict, Rejected, Unavailable, log
from schemas import InvalidPlant, Plant, openapi, parse_new_plant

Environ: TypeAlias = dict[str, Any]
WSGIApp: TypeAlias = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]

BODY_LIMIT = 2**16  # bytes; a worker that parses a body serves nobody else meanwhile
MESSAGE_LIMIT = 1000  # characters of an Error's message
HOST = re.compile(r"([\w.~%!$&'()*+;=-]+|\[[\da-f:.]+\])(:\d*)?", re.ASCII | re.IGNORECASE)
REJECTED = "the storage does not accept this plant; to send it again does not help"
FAILURES = {500: "the service failed", 503: "the storage is not available now"}
JSON_TYPE = re.compile(r"\s*application/json\s*(;|$)", re.IGNORECASE)
REQUEST_ID = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)
CORS_PATHS = ("/plants", "/openapi.json")
DEFAULT_TYPE = ("Content-Type", BaseResponse.default_content_type)  # where a route sets none
ENCODE = json.JSONEncoder(ensure_ascii=False).encode
STATIC = Path(__file__).with_name("static")
PAGE = ("style.css", "script.js", "icon.svg")
PAGE_HEADERS = {
    "Cache-Control": "no-cache",  # but ask whether it has changed
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src 'self'; "
    "script-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


class Storage(Protocol):
    """What the application needs of storage.py's Storage, where both methods are explained."""

    def add(self, plant: Plant) -> None: ...
    def check(self) -> None: ...


def create_app(storage: Storage, tokens: Iterable[str], origins: Collection[str] = ()) -> WSGIApp:
    """Return a WSGI application for clients with one of `tokens`, and pages of `origins` or "*".

    A token may have the name of its clients before it, with a colon, for the access log.
    """
    app = Bottle()
    app.uninstall(True)  # Bottle's own plugins: every route returns bytes
    app.default_error_handler = answer_error
    app.add_hook("before_request", require_host)
    app.install(partial(require_token, list(tokens)))  # for each route without `skip`
    app.post("/plants", callback=partial(create_plant, storage))
    public = {"method": ["GET", "HEAD"], "skip": True}
    app.route("/healthz", callback=partial(check_health, storage), **public)
    document = json.dumps(openapi(), indent=2).encode() + b"\n"
    app.route("/openapi.json", callback=lambda: document, **public)
    for path, name in [("/", "index.html"), *((f"/{name}", name) for name in PAGE)]:
        app.route(path, callback=partial(send_page, name), **public)
    for path in CORS_PATHS if origins else ():  # browsers ask before they send a token
        app.route(path, "OPTIONS", partial(HTTPResponse, status=204), skip=True)
    return partial(serve, app, origins)


def create_plant(storage: Storage) -> bytes:
    """POST /plants: store the plant in the body and answer it without its id."""
    environ = request.environ
    require_json(environ)
    try:
        plant = parse_new_plant(read_body(environ))
        storage.add(plant)
    except InvalidPlant as error:
        raise HTTPError(400, str(error)) from None
    except Rejected as error:  # why is for the operator only
        log.error("request %s got a 400: %s", environ["plants.request_id"], error)
        raise HTTPError(400, REJECTED) from None
    except Conflict as error:
        raise HTTPError(409, str(error)) from None
    except Unavailable as error:
        raise HTTPError(503, str(error), Retry_After="1") from None
    answer = plant.to_json()
    del answer["id"]
    return to_json(answer)


def check_health(storage: Storage) -> bytes:
    """GET /healthz: tell whether the storage takes a write."""
    try:
        storage.check()
    except Unavailable as error:
        raise HTTPError(503, str(error), Retry_After="1") from None
    return to_json({"status": "ok"})


def send_page(name: str) -> HTTPResponse:
    """GET / and its files: answer one, or 304 to a client that has it (RFC 9110 section 13.1.2)."""
    body = (STATIC / name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    media_type = f"{mimetypes.guess_type(name)[0]}; charset=utf-8"
    headers = {**PAGE_HEADERS, "Content-Type": media_type, "ETag": etag}
    known = request.environ.get("HTTP_IF_NONE_MATCH", "")
    return HTTPResponse(body, 304 if etag in known or known == "*" else 200, **headers)


def require_host() -> None:
    """Raise HTTPError 400 unless there is one valid Host (RFC 9112 section 3.2)."""
    environ = request.environ
    # Bottle drops what is not UTF-8, and would find /plants in /pl%ffants.
    environ["PATH_INFO"] = environ["bottle.raw_path"].encode("latin1").decode(errors="replace")
    host = environ.get("HTTP_HOST", "")
    if environ["SERVER_PROTOCOL"] == "HTTP/1.1" and not HOST.fullmatch(host):
        raise HTTPError(400, "Host must be a host and port, and be given once")


def require_token(tokens: Iterable[str], callback: Callable[..., Any]) -> Callable[..., Any]:
    """Let only requests with one of `tokens` through to a route's callback (RFC 6750).

    The token's name becomes REMOTE_USER, if it has one (RFC 3875 section 4.1.11).
    """
    names = {}  # by digest
    for each in tokens:
        name, _, token = each.rpartition(":")
        names[hashlib.sha256(token.encode()).digest()] = name

    def authorized(**arguments: Any) -> Any:
        scheme, _, token = request.environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() != "bearer":
            message = "send a token in the header Authorization: Bearer TOKEN"
            raise HTTPError(401, message, WWW_Authenticate='Bearer realm="plants"')
        digest = hashlib.sha256(token.strip(" ").encode()).digest()
        # A list, not a generator: all are compared, so that the time taken reveals nothing.
        if not any([hmac.compare_digest(digest, known) for known in names]):
            challenge = 'Bearer realm="plants", error="invalid_token"'
            raise HTTPError(401, "the bearer token is not valid", WWW_Authenticate=challenge)
        if name := names[digest]:
            request.environ["REMOTE_USER"] = name
        return callback(**arguments)

    return authorized


def require_json(environ: Environ) -> None:
    """Raise HTTPError 415 unless the body is declared to be plain JSON (RFC 9110, 8.3 and 8.4)."""
    content_type = environ.get("CONTENT_TYPE", "")
    if not JSON_TYPE.match(content_type):
        message = f"Content-Type must be application/json, not {content_type or 'left out'}"
        raise HTTPError(415, message, Accept="application/json")
    if (coding := environ.get("HTTP_CONTENT_ENCODING")) and coding.lower() != "identity":
        message = f"Content-Encoding must be identity or left out, not {coding}"
        raise HTTPError(415, message, Accept_Encoding="identity")
    if (coding := environ.get("HTTP_TRANSFER_ENCODING")) and coding.lower() != "chunked":
        raise HTTPError(415, f"Transfer-Encoding must be chunked or left out, not {coding}")


def read_body(environ: Environ) -> bytes:
    """Return the whole body, and read no further: not every server stops there (PEP 3333).

    Raises HTTPError 413 if it is too long, and 400 if it ends early or is badly chunked. Bottle's
    request.body would undo a chunked encoding that the server has undone already.
    """
    try:
        declared = int(environ.get("CONTENT_LENGTH") or 0)
        has_end = "HTTP_TRANSFER_ENCODING" in environ and environ.get("wsgi.input_terminated")
        size = BODY_LIMIT + 1 if has_end else declared
        body = bytes(environ["wsgi.input"].read(size)) if 0 <= size <= BODY_LIMIT + 1 else b""
    except Exception as error:  # the types differ from server to server
        raise HTTPError(400, f"the body could not be read: {error}") from None
    if declared > BODY_LIMIT or len(body) > BODY_LIMIT:
        raise HTTPError(413, f"the body must not be longer than {BODY_LIMIT} bytes")
    if len(body) < declared:
        raise HTTPError(400, f"the body ended after {len(body)} of {declared} bytes")
    return body


def answer_error(error: HTTPError) -> bytes:
    """The body of every answer of 400 and above: an Error object, whoever raised the error."""
    message = str(error.body)
    if error.status_code == 404:
        message = f"there is nothing at {request.path}; plants are created with POST /plants"
    elif error.status_code == 405:
        error.headers["Allow"] = error.headers["Allow"].replace(",", ", ")
        method = request.method.replace("HEAD", "GET")  # whose Content-Length it has to have
        message = f"{method} is not possible here, only {error.headers['Allow']}"
    elif error.status_code in FAILURES:  # why is for the operator only
        request_id = request.environ["plants.request_id"]
        log.error("request %s got a %d: %s", request_id, error.status_code, message)
        message = f"{FAILURES[error.status_code]}; it is safe to send the same plant again"
    if len(message) > MESSAGE_LIMIT:
        message = message[: MESSAGE_LIMIT - 1] + "…"
    return to_json({"error": error.status_code, "message": message})


def to_json(answer: dict[str, Any]) -> bytes:
    """Return `answer` as JSON; the line end is for shells, whose prompt would follow."""
    return f"{ENCODE(answer)}\n".encode(errors="replace")


def serve(
    app: WSGIApp, origins: Collection[str], environ: Environ, start_response: Callable[..., Any]
) -> Iterable[bytes]:
    """Call `app`; add an X-Request-ID, which is the client's own if that is fit for a log."""
    request_id = environ.get("HTTP_X_REQUEST_ID", "")
    if not REQUEST_ID.fullmatch(request_id):
        request_id = f"{random.getrandbits(128):032x}"
    environ["plants.request_id"] = request_id
    common = [("X-Request-ID", request_id), ("X-Content-Type-Options", "nosniff")]
    if origins and environ["PATH_INFO"] in CORS_PATHS:
        common += allow_origin(environ.get("HTTP_ORIGIN", ""), origins)

    def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        if DEFAULT_TYPE in headers:
            headers.remove(DEFAULT_TYPE)
            headers += [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
        return start_response(status, headers + common, exc_info)

    return app(environ, start)


def refuse(status: int, message: str, *call: Any) -> Iterable[bytes]:
    """Answer a `call` that the server can't make as the application would: with an Error."""
    app = Bottle()
    app.default_error_handler = answer_error
    app.add_hook("before_request", partial(abort, status, message))
    return serve(app, (), *call)


def allow_origin(origin: str, origins: Collection[str]) -> list[tuple[str, str]]:
    """Return the headers that let a page of `origins` read the answer (fetch.spec.whatwg.org)."""
    headers = [("Vary", "Origin")]
    if origin and ("*" in origins or origin in origins):
        headers += [
            ("Access-Control-Allow-Origin", "*" if "*" in origins else origin),
            ("Access-Control-Expose-Headers", "X-Request-ID, Retry-After"),
            ("Access-Control-Allow-Methods", "GET, POST"),
            ("Access-Control-Allow-Headers", "Authorization, Content-Type, X-Request-ID"),
            ("Access-Control-Max-Age", "600"),  # seconds
        ]
    return headers
