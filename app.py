"""The HTTP interface: POST /plants stores a plant. No SQL, no environment."""

import contextlib
import hashlib
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bottle import BaseResponse, Bottle, HTTPError, HTTPResponse, request, response

from plant import InvalidPlant, openapi, parse_new_plant
from storage import Conflict, Rejected, Storage, Unavailable

BODY_LIMIT = 2**14  # bytes; a worker that parses a body serves nobody else meanwhile
CHECK_LIMIT = 1.5  # seconds that a health check waits
MESSAGE_LIMIT = 1000  # characters of an Error's message, where a path may be long
# Characters, of 1 byte and, once escaped, 12: a pipe takes 4,096 bytes in one piece.
REQUEST_LIMIT, REASON_LIMIT = 500, 250
JSON_TYPE = re.compile(r"\s*application/json\s*(;|$)", re.IGNORECASE)
REQUEST_ID = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)
TOO_LONG = f"the body must not be longer than {BODY_LIMIT} bytes"
NOT_WHOLE = "the body did not come in whole; send it again"
# What clients read where the reason is for the operator only.
REJECTED = "the storage does not accept this plant; to send it again does not help"
UNAVAILABLE = "the storage is not available now"
SAFE = "it is safe to send the same plant again"
COMMON_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    # A token is no cookie: a page of any origin needs one (fetch.spec.whatwg.org).
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Expose-Headers", "X-Request-ID, Retry-After"),
]
PREFLIGHT_HEADERS = {  # browsers ask before they send a token
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Request-ID",
}
PAGE = Path(__file__).parent / "static" / "index.html"

BaseResponse.default_content_type = "application/json"  # of all but the page


def create_app(storage: Storage, tokens: Iterable[str]) -> "App":
    """Return the WSGI application of a storage, for clients with one of the tokens."""
    app = App()
    app.config["storage"] = storage  # for who closes it
    app.uninstall(True)  # Bottle's own plugins: every route returns bytes
    app.default_error_handler = answer_error
    app.add_hook("before_request", require_http)
    # By digest: how long a look-up takes tells nothing of a token.
    digests = {hashlib.sha256(token.encode()).digest() for token in tokens}
    app.install(partial(require_token, digests))  # a Bottle plugin, for each route without `skip`
    app.post("/plants", callback=partial(create_plant, storage))
    public = {"method": ["GET", "HEAD"], "skip": True}
    app.route("/healthz", callback=partial(check_health, storage), **public)
    document = json.dumps(openapi(), indent=2).encode() + b"\n"
    app.route("/openapi.json", callback=lambda: document, **public)
    page = partial(HTTPResponse, PAGE.read_bytes(), Content_Type="text/html; charset=utf-8")
    app.route("/", callback=page, **public)
    preflight = partial(HTTPResponse, status=204, **PREFLIGHT_HEADERS)
    app.route(["/plants", "/openapi.json"], "OPTIONS", preflight, skip=True)
    return app


class App(Bottle):
    """A Bottle application whose answers all have a request id, and a line in the log."""

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request; its id is the client's own if that is fit for a log."""
        begin, request_id = time.monotonic(), environ.get("HTTP_X_REQUEST_ID", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = f"{random.getrandbits(128):032x}"
        common = [("X-Request-ID", request_id), *COMMON_HEADERS]

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            return start_response(status, headers + common, exc_info)

        answer: Iterable[bytes] = super().wsgi(environ, start)
        write_log(environ, response.status_code, time.monotonic() - begin, request_id)
        return answer


def write_log(environ: Mapping[str, Any], status: int, seconds: float, request_id: str) -> None:
    """Write a line of JSON, but not for a /healthz that succeeds: platforms ask all the time."""
    if sys.stdout is None or (status == 200 and environ["PATH_INFO"] == "/healthz"):
        return
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "client": environ.get("REMOTE_ADDR"),
        "request": f"{environ['REQUEST_METHOD']} {quote(environ['PATH_INFO'])}"[:REQUEST_LIMIT],
        "status": status,
        "seconds": round(seconds, 4),
        "id": request_id,
    }
    if reason := environ.get("plants.reason"):
        line["reason"] = reason[:REASON_LIMIT]
    with contextlib.suppress(OSError):  # it must not fail a request
        os.write(1, f"{json.dumps(line)}\n".encode())


def create_plant(storage: Storage) -> bytes:
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
    return to_json(plant.to_dict())


def check_health(storage: Storage) -> bytes:
    """GET /healthz: tell whether the storage takes a write."""
    try:
        storage.check(CHECK_LIMIT)
    except (Rejected, Unavailable) as error:
        raise HTTPError(503, UNAVAILABLE, error, Retry_After="1") from None
    return to_json({"status": "ok"})


def require_http() -> None:
    """Raise HTTPError for what the server refuses, or without one Host (RFC 9112 section 3.2)."""
    if refusal := request.environ.get("plants.refusal"):  # by worker.py: a status and a message
        raise HTTPError(*refusal)
    host = request.environ.get("HTTP_HOST", "")  # two are joined by a comma
    if request.environ["SERVER_PROTOCOL"] == "HTTP/1.1" and (not host or "," in host):
        raise HTTPError(400, "Host must be a host and port, and be given once")


def require_token(digests: set[bytes], callback: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a callback, so that only requests with a token (RFC 6750) come to it."""

    def authorized(**arguments: Any) -> Any:
        scheme, _, token = request.environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() != "bearer":
            message = "send a token in the header Authorization: Bearer TOKEN"
            raise HTTPError(401, message, WWW_Authenticate='Bearer realm="plants"')
        if hashlib.sha256(token.strip(" ").encode()).digest() not in digests:
            challenge = 'Bearer realm="plants", error="invalid_token"'
            raise HTTPError(401, "the bearer token is not valid", WWW_Authenticate=challenge)
        return callback(**arguments)

    return authorized


def require_json(environ: Mapping[str, Any]) -> None:
    """Raise HTTPError 415 unless the body is declared to be plain JSON (RFC 9110, 8.3 and 8.4)."""
    if not JSON_TYPE.match(environ.get("CONTENT_TYPE", "")):
        raise HTTPError(415, "Content-Type must be application/json")
    if environ.get("HTTP_CONTENT_ENCODING", "identity").lower() != "identity":
        raise HTTPError(415, "Content-Encoding must be identity or left out")


def read_body(environ: Mapping[str, Any]) -> bytes:
    """Return the whole body, but read no further (PEP 3333). Raises HTTPError 413, 408 or 400."""
    # Not Bottle's request.body, which would decode chunks again.
    has_end = environ.get("wsgi.input_terminated")
    declared = environ.get("CONTENT_LENGTH") or "0"
    length = int(declared) if declared.isdecimal() else 0
    if length > BODY_LIMIT:
        raise HTTPError(413, TOO_LONG)
    try:
        body: bytes = environ["wsgi.input"].read(BODY_LIMIT + 1 if has_end else length)
    except OSError:  # RFC 9110 section 15.5.9: the client may repeat it
        raise HTTPError(408, NOT_WHOLE) from None
    except Exception:  # the types differ from server to server
        raise HTTPError(400, "the body is badly chunked, or too long") from None
    if len(body) > BODY_LIMIT:
        raise HTTPError(413, TOO_LONG)
    if len(body) < length:
        raise HTTPError(408, NOT_WHOLE)
    return body


def answer_error(error: HTTPError) -> bytes:
    """Return the body of every answer of 400 and above, and note the reason for the log."""
    message, reason = str(error.body), None
    if error.status_code == 404:
        path = request.environ["PATH_INFO"]  # request.path would hide that one begins with //
        message = f"there is nothing at {path}; plants are created with POST /plants"
    elif error.status_code == 405:
        error.headers["Allow"] = error.headers["Allow"].replace(",", ", ")
        message = f"this method is not possible here, only {error.headers['Allow']}"
    elif error.status_code == 500:
        message, reason = f"the service failed; {SAFE}", f"{type(error.exception).__name__}, a bug"
    elif error.exception:
        reason = str(error.exception)
    request.environ.setdefault("plants.reason", reason or message)  # worker.py may have
    return to_json({"error": error.status_code, "message": message[:MESSAGE_LIMIT]})


def to_json(answer: Mapping[str, Any]) -> bytes:
    """Return `answer` as JSON; the line end is for shells, whose prompt would follow."""
    return f"{json.dumps(answer, ensure_ascii=False)}\n".encode()
