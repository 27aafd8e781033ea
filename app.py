"""The HTTP interface on Bottle: POST /plants stores a plant.

It knows no SQL, and reads no environment variable.
"""

import contextlib
import hashlib
import json
import os
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

from plant import SCHEMAS, InvalidPlant, parse_new_plant, read_schema
from storage import Conflict, Rejected, Storage, Unavailable

BODY_LIMIT = 2**14  # Bytes. A worker that parses a body serves nobody else meanwhile.
REQUEST_ID = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)
MESSAGE_LIMIT = 1000  # Characters of an Error's message, since the path in a 404 may be long.
TOO_LONG = f"the body must not be longer than {BODY_LIMIT} bytes"
# Clients get this text for every Unavailable. The reason is for the operator, in the log.
UNAVAILABLE = "the storage is not available now"
SAFE = "it is safe to send the same plant again"
COMMON_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    # A browser adds cookies to a request by itself, but never a bearer token. So pages of every
    # origin may use the interface (fetch.spec.whatwg.org, "CORS protocol").
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Expose-Headers", "X-Request-ID, Retry-After"),
]
OK = b'{"status": "ok"}\n'

BaseResponse.default_content_type = "application/json"  # Of every response but the page.


def create_app(storage: Storage, tokens: Iterable[str]) -> "App":
    """Return the WSGI application of a storage, for clients that send one of the tokens."""
    app = App()
    app.config["storage"] = storage  # worker_exit() in gunicorn.conf.py closes it.
    app.add_hook("before_request", require_http)
    # Compare digests, so that the time of a look-up reveals nothing about a token.
    digests = {hashlib.sha256(token.encode()).digest() for token in tokens}
    # A plugin, for every route without `skip`.
    app.install(lambda callback: partial(require_token, digests, callback))
    app.post("/plants", callback=partial(create_plant, storage))
    public = {"method": ["GET", "HEAD"], "skip": True}
    app.route("/healthz", callback=partial(check_health, storage), **public)
    app.route("/livez", callback=lambda: OK, **public)
    document = json.dumps(openapi(), indent=2).encode() + b"\n"
    app.route("/openapi.json", callback=lambda: document, **public)
    page = Path(__file__).parent.joinpath("static", "index.html").read_bytes()
    show = partial(HTTPResponse, page, Content_Type="text/html; charset=utf-8")
    app.route("/", callback=show, **public)
    return app


def openapi() -> Any:
    """Return schemas/openapi.json with the other schemas among its components."""
    document = read_schema("openapi")
    schemas = {schema["title"]: schema for schema in map(read_schema, SCHEMAS)}
    document["components"]["schemas"] |= schemas
    for schema in schemas.values():
        del schema["$id"], schema["$schema"]
    schemas["NewPlant"]["allOf"][0]["$ref"] = "#/components/schemas/Plant"
    return document


class App(Bottle):
    """A Bottle application that gives each request an id, logs it, and answers errors in JSON."""

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request. Its id is the client's own if that is fit for a log, or a new one."""
        began, request_id = time.monotonic(), environ.get("HTTP_X_REQUEST_ID", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = os.urandom(16).hex()
        common = [("X-Request-ID", request_id), *COMMON_HEADERS]
        environ.setdefault("plants.log", {})

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            return start_response(status, headers + common, exc_info)

        body: Iterable[bytes] = super().wsgi(environ, start)
        write_log(environ, response.status_code, time.monotonic() - began, request_id)
        return body

    def default_error_handler(self, error: HTTPError) -> bytes:
        """Return the body of an error (schemas/error.json), and note the reason for the log."""
        message, reason = str(error.body), None
        if error.status_code == 404:
            path = request.environ["PATH_INFO"]  # request.path would make one slash of two.
            message = f"there is nothing at {path}; plants are created with POST /plants"
        elif error.status_code == 405:
            methods = sorted([*error.headers["Allow"].split(","), "OPTIONS"])
            error.headers["Allow"] = ", ".join(methods)
            message = f"method not allowed; use {', '.join(methods[:-1])} or {methods[-1]}"
            if request.method == "OPTIONS":
                # OPTIONS asks for the methods of a path (RFC 9110, 9.3.7). A browser also sends it
                # as a preflight, to ask if a page of another origin may send a token. No route has
                # this method, so Bottle raises a 405 that names the others. Make a 204 of it.
                response.status = 204
                response.headers["Access-Control-Allow-Methods"] = error.headers["Allow"]
                # The asterisk does not stand for Authorization (fetch.spec.whatwg.org).
                response.headers["Access-Control-Allow-Headers"] = "Authorization, *"
                return b""
        elif error.status_code == 500:
            message = f"the service failed; {SAFE}"
            reason = f"{type(error.exception).__name__}, a bug"
        elif error.exception:
            reason = str(error.exception)
        # If worker.py has refused the request, it has noted the reason already.
        request.environ["plants.log"].setdefault("reason", (reason or message)[:250])
        return to_json({"error": error.status_code, "message": message[:MESSAGE_LIMIT]})


def write_log(environ: Mapping[str, Any], status: int, seconds: float, request_id: str) -> None:
    """Write a line of JSON about a request to standard output, or nothing if that is closed.

    Platforms ask /healthz and /livez all the time, so these are logged only if they fail. The line
    ends with the members of environ["plants.log"]: `token` and, from 400 on, `reason`.
    """
    # A line must fit into 4,096 bytes, or lines of several workers mix in a pipe. So `request` has
    # at most 500 characters of one byte, and `reason` at most 250 of up to 12 bytes in JSON.
    if sys.stdout is None or (status == 200 and environ["PATH_INFO"] in ("/healthz", "/livez")):
        return
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "client": environ.get("REMOTE_ADDR"),
        "request": f"{environ['REQUEST_METHOD']} {quote(environ['PATH_INFO'])}".rstrip()[:500],
        "status": status,
        "seconds": round(seconds, 4),
        "id": request_id,
        **environ["plants.log"],
    }
    with contextlib.suppress(OSError):  # A log that can't be written must not fail the request.
        os.write(1, f"{json.dumps(line)}\n".encode())


def create_plant(storage: Storage) -> bytes:
    """POST /plants: store the plant in the body. Return it without its id."""
    try:
        plant = parse_new_plant(read_body(request.environ))
        storage.add(plant)
    except InvalidPlant as error:
        raise HTTPError(400, str(error)) from None
    except Rejected as error:  # The reason is only for the log.
        message = "the database rejects this plant; retrying will not help"
        raise HTTPError(400, message, error) from None
    except Conflict as error:
        raise HTTPError(409, str(error)) from None
    except Unavailable as error:
        raise HTTPError(503, f"{UNAVAILABLE}; {SAFE}", error, Retry_After="1") from None
    return to_json(plant.to_dict())


def check_health(storage: Storage) -> bytes:
    """GET /healthz: tell whether plants can be stored."""
    try:
        storage.check(1.5)  # seconds
    except (Rejected, Unavailable) as error:
        raise HTTPError(503, UNAVAILABLE, error, Retry_After="1") from None
    return OK


def require_http() -> None:
    """Raise HTTPError if worker.py refused the request, or unless HTTP/1.1 has exactly one Host."""
    environ = request.environ
    if refusal := environ.get("plants.refusal"):  # A status and a message.
        raise HTTPError(*refusal)
    # RFC 9112 section 3.2 requires exactly one Host. Servers join two of them with a comma.
    host = environ.get("HTTP_HOST", "")
    if environ["SERVER_PROTOCOL"] == "HTTP/1.1" and (not host or "," in host):
        raise HTTPError(400, "send exactly one Host header")
    # Bottle drops bytes that are not UTF-8, and would take /plants%ff for /plants. Replace them.
    environ["PATH_INFO"] = environ["bottle.raw_path"].encode("latin-1").decode(errors="replace")


def require_token(digests: set[bytes], callback: Callable[..., Any], **arguments: Any) -> Any:
    """Return what `callback` returns. Raises HTTPError 401 without a good token (RFC 6750)."""
    scheme, _, token = request.environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    if scheme.lower() != "bearer":
        message = "send a token in the header Authorization: Bearer TOKEN"
        raise HTTPError(401, message, WWW_Authenticate='Bearer realm="plants"')
    digest = hashlib.sha256(token.strip(" ").encode()).digest()
    if digest not in digests:
        challenge = 'Bearer realm="plants", error="invalid_token"'
        raise HTTPError(401, "the bearer token is not valid", WWW_Authenticate=challenge)
    request.environ["plants.log"]["token"] = digest.hex()[:8]  # Shows which token is in use.
    return callback(**arguments)


def read_body(environ: Mapping[str, Any]) -> bytes:
    """Return the whole body, and read no further (PEP 3333).

    Raises HTTPError: 415 unless the headers declare plain JSON (RFC 9110, 8.3 and 8.4), 413 if the
    body is too long, 408 if it is incomplete or too slow, and 400 if its chunks are not valid.
    """
    if environ.get("CONTENT_TYPE", "").lower().partition(";")[0].strip() != "application/json":
        raise HTTPError(415, "Content-Type must be application/json")
    if environ.get("HTTP_CONTENT_ENCODING", "").lower() not in ("", "identity"):
        raise HTTPError(415, "Content-Encoding must be identity or left out")
    # Bottle's request.body would decode the chunks once more, after the server has decoded them.
    has_end = environ.get("wsgi.input_terminated")
    declared = environ.get("CONTENT_LENGTH", "")
    length = int(declared) if declared.isdecimal() else 0
    if length > BODY_LIMIT:
        raise HTTPError(413, TOO_LONG)
    try:
        body: bytes = environ["wsgi.input"].read(BODY_LIMIT + 1 if has_end else length)
        if len(body) < length:
            raise ConnectionError("the client has ended the connection too early")
    except OSError:  # With a 408, the client may send the request again (RFC 9110, 15.5.9).
        raise HTTPError(408, "the body was incomplete or too slow; send it again") from None
    except Exception:
        # Each server has exceptions of its own for invalid chunks. worker.py raises one for a
        # request that is longer than its MAX_REQUEST_BYTES, too.
        message = "the chunked encoding is invalid, or the request exceeds 32 KiB"
        raise HTTPError(400, message) from None
    if len(body) > BODY_LIMIT:
        raise HTTPError(413, TOO_LONG)
    return body


def to_json(value: Mapping[str, Any]) -> bytes:
    """Return `value` as JSON with a line break, so that a shell's prompt is on a new line."""
    return f"{json.dumps(value, ensure_ascii=False)}\n".encode()
