"""The HTTP interface: POST /plants stores a plant. Contains no SQL and reads no environment."""

import hashlib
import json
import mimetypes
import random
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bottle import BaseResponse, Bottle, HTTPError, HTTPResponse, request

from engines import Conflict, Rejected, Unavailable, log
from plant import InvalidPlant, openapi, parse_new_plant

BODY_LIMIT = 2**16  # bytes; a worker that parses a body serves nobody else meanwhile
CHECK_LIMIT = 1.5  # seconds that a health check waits
MESSAGE_LIMIT = 1000  # characters of an Error's message, where a path may be long
HOST = re.compile(r"([\w.~%!$&'()*+;=-]+|\[[\da-f:.]+\])(:\d*)?", re.ASCII | re.IGNORECASE)
JSON_TYPE = re.compile(r"\s*application/json\s*(;|$)", re.IGNORECASE)
REQUEST_ID = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)
# What clients get to read where the reason is for the operator only.
REJECTED = "the storage does not accept this plant; to send it again does not help"
UNAVAILABLE = "the storage is not available now"
SAFE = "it is safe to send the same plant again"
COMMON_HEADERS = [("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store")]
# A token is no cookie: a page of any origin needs one (fetch.spec.whatwg.org).
CORS_PATHS = ("/plants", "/openapi.json")
CORS_HEADERS = [
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Expose-Headers", "X-Request-ID, Retry-After"),
]
PREFLIGHT_HEADERS = {  # browsers ask before they send a token
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Request-ID",
    "Access-Control-Max-Age": "600",  # seconds
}
STATIC = Path(__file__).with_name("static")
PAGE = {"/": "index.html", **{f"/{name}": name for name in ("style.css", "script.js", "icon.svg")}}

BaseResponse.default_content_type = "application/json"  # of all but the page


class App(Bottle):
    """A Bottle application whose answers all have a request id."""

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request; its id is the client's own if that is fit for a log."""
        request_id = environ.get("HTTP_X_REQUEST_ID", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = f"{random.getrandbits(128):032x}"
        environ["plants.request_id"] = request_id
        common = [("X-Request-ID", request_id), *COMMON_HEADERS]
        if environ["PATH_INFO"] in CORS_PATHS:
            common += CORS_HEADERS

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            return start_response(status, headers + common, exc_info)

        answer: Iterable[bytes] = super().wsgi(environ, start)
        return answer


def create_app(storage: Any, tokens: Iterable[str]) -> App:
    """Return the WSGI application of a storage.Storage, for clients with TOKEN or NAME:TOKEN."""
    names = {}  # by digest: how long a look-up takes tells nothing of a token
    for each in tokens:
        name, _, token = each.rpartition(":")
        names[hashlib.sha256(token.encode()).digest()] = name
    app = App()
    app.config["storage"] = storage  # for whoever has to close it
    app.uninstall(True)  # Bottle's own plugins: every route returns bytes
    app.default_error_handler = answer_error
    app.add_hook("before_request", require_http)
    app.install(partial(require_token, names))  # for each route without `skip`
    app.post("/plants", callback=partial(create_plant, storage))
    public = {"method": ["GET", "HEAD"], "skip": True}
    app.route("/healthz", callback=partial(check_health, storage), **public)
    document = json.dumps(openapi(), indent=2).encode() + b"\n"
    app.route("/openapi.json", callback=lambda: document, **public)
    for path, name in PAGE.items():
        kind = f"{mimetypes.guess_type(name)[0]}; charset=utf-8"
        body = STATIC.joinpath(name).read_bytes()
        app.route(path, callback=partial(HTTPResponse, body, Content_Type=kind), **public)
    preflight = partial(HTTPResponse, status=204, **PREFLIGHT_HEADERS)
    app.route(CORS_PATHS, "OPTIONS", preflight, skip=True)
    return app


def create_plant(storage: Any) -> bytes:
    """POST /plants: store the plant in the body and answer it without its id."""
    require_json(request.environ)
    try:
        plant = parse_new_plant(read_body(request.environ))
        storage.add(plant)
    except InvalidPlant as error:
        raise HTTPError(400, str(error)) from None
    except Rejected as error:
        raise HTTPError(400, REJECTED, error) from None
    except Conflict as error:
        raise HTTPError(409, str(error)) from None
    except Unavailable as error:
        raise HTTPError(503, f"{UNAVAILABLE}; {SAFE}", error, Retry_After="1") from None
    answer = plant.to_dict()
    del answer["id"]
    return to_json(answer)


def check_health(storage: Any) -> bytes:
    """GET /healthz: tell whether the storage takes a write."""
    try:
        storage.check(CHECK_LIMIT)
    except Unavailable as error:
        raise HTTPError(503, UNAVAILABLE, error, Retry_After="1") from None
    return to_json({"status": "ok"})


def require_http() -> None:
    """Raise HTTPError for what the server refuses, or without one valid Host (RFC 9112, 3.2)."""
    if refusal := request.environ.get("plants.refusal"):  # a status and a message
        raise HTTPError(*refusal)
    host = request.environ.get("HTTP_HOST", "")
    if request.environ["SERVER_PROTOCOL"] == "HTTP/1.1" and not HOST.fullmatch(host):
        raise HTTPError(400, "Host must be a host and port, and be given once")


def require_token(names: Mapping[bytes, str], callback: Callable[..., Any]) -> Callable[..., Any]:
    """Let only requests with a token (RFC 6750) to a callback; its name becomes REMOTE_USER."""

    def authorized(**arguments: Any) -> Any:
        scheme, _, token = request.environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() != "bearer":
            message = "send a token in the header Authorization: Bearer TOKEN"
            raise HTTPError(401, message, WWW_Authenticate='Bearer realm="plants"')
        name = names.get(hashlib.sha256(token.strip(" ").encode()).digest())
        if name is None:
            challenge = 'Bearer realm="plants", error="invalid_token"'
            raise HTTPError(401, "the bearer token is not valid", WWW_Authenticate=challenge)
        request.environ["REMOTE_USER"] = name  # RFC 3875 section 4.1.11
        return callback(**arguments)

    return authorized


def require_json(environ: dict[str, Any]) -> None:
    """Raise HTTPError 415 unless the body is declared to be plain JSON (RFC 9110, 8.3 and 8.4)."""
    if not JSON_TYPE.match(environ.get("CONTENT_TYPE", "")):
        raise HTTPError(415, "Content-Type must be application/json", Accept="application/json")
    if environ.get("HTTP_CONTENT_ENCODING", "identity").lower() != "identity":
        message = "Content-Encoding must be identity or left out"
        raise HTTPError(415, message, Accept_Encoding="identity")


def read_body(environ: dict[str, Any]) -> bytes:
    """Return the whole body, but read no further (PEP 3333). Raises HTTPError 413, 408 or 400."""
    # Bottle's request.body would undo a chunked encoding that the server has undone already.
    has_end = "HTTP_TRANSFER_ENCODING" in environ and environ.get("wsgi.input_terminated")
    try:
        declared = max(int(environ.get("CONTENT_LENGTH") or 0), 0)
        size = BODY_LIMIT + 1 if has_end else declared
        body = bytes(environ["wsgi.input"].read(size)) if declared <= BODY_LIMIT else b""
    except OSError:  # RFC 9110 section 15.5.9: the client may repeat it
        raise HTTPError(408, "the body did not come in whole; send it again") from None
    except Exception:  # the types differ from server to server
        raise HTTPError(400, "the body is badly chunked, or its length is no number") from None
    if declared > BODY_LIMIT or len(body) > BODY_LIMIT:
        raise HTTPError(413, f"the body must not be longer than {BODY_LIMIT} bytes")
    if len(body) < declared:
        raise HTTPError(408, "the body did not come in whole; send it again")
    return body


def answer_error(error: HTTPError) -> bytes:
    """Return the body of every answer of 400 and above, and note the reason for the access log."""
    message, reason = str(error.body), None
    if error.status_code == 404:
        path = request.environ["PATH_INFO"]  # request.path would hide that one begins with //
        message = f"there is nothing at {path}; plants are created with POST /plants"
    elif error.status_code == 405:
        error.headers["Allow"] = error.headers["Allow"].replace(",", ", ")
        message = f"this method is not possible here, only {error.headers['Allow']}"
    elif error.status_code == 500:
        message, reason = f"the service failed; {SAFE}", type(error.exception).__name__
        log.error("request %s failed, see the traceback", request.environ["plants.request_id"])
    elif error.exception:
        reason = str(error.exception)
    request.environ.setdefault("plants.reason", reason or message)
    return to_json({"error": error.status_code, "message": message[:MESSAGE_LIMIT]})


def to_json(answer: Mapping[str, Any]) -> bytes:
    """Return `answer` as JSON; the line end is for shells, whose prompt would follow."""
    return f"{json.dumps(answer, ensure_ascii=False)}\n".encode(errors="replace")
