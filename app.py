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
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bottle import Bottle, HTTPError, HTTPResponse, JSONPlugin, Router, request, response

from plant import SCHEMAS, InvalidPlant, parse_new_plant, read_schema
from storage import Conflict, Rejected, Storage, Unavailable

JSON = "application/json"
BODY_LIMIT = 2**14  # Bytes. While a worker parses a body, it serves nobody else.
REQUEST_ID = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)
MESSAGE_LIMIT = 1000  # Characters of an Error's message, since the path in a 404 may be long.
# Characters of three members of a log line. A line must fit into 4,096 bytes: in a pipe, longer
# lines of several workers mix. JSON needs up to 12 bytes for a character of a reason, up to 6 for
# one of a header, and one for each character of a percent-encoded request.
REQUEST_LIMIT, FORWARDED_LIMIT, REASON_LIMIT = 500, 100, 200
TOO_LONG = f"the body must not be longer than {BODY_LIMIT} bytes"
INCOMPLETE = "the body was incomplete or too slow; send it again"
# Clients get this text for every Unavailable. The reason is for the operator, in the log.
UNAVAILABLE = "the storage is not available now"
SAFE = "it is safe to send the same plant again"
# Bottle's error text begins like this if a route returned a value it can't make a body of. Nothing
# else tells this error from abort(500, text).
UNSUPPORTED = "Unsupported response type: "
COMMON_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    # A browser adds cookies to a request by itself, but never a bearer token. So pages of every
    # origin may use the interface (fetch.spec.whatwg.org, "CORS protocol").
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Expose-Headers", "X-Request-ID, Retry-After"),
]
COMMON_NAMES = {"x-request-id", *(name.lower() for name, _ in COMMON_HEADERS)}


def create_app(storage: Storage, tokens: Iterable[str]) -> "App":
    """Return the WSGI application of a storage, for clients that send one of the tokens."""
    app = App()
    app.__dict__["router"] = Routes()  # Bottle reports an assignment as a plugin conflict.
    app.config["storage"] = storage  # gunicorn.conf.py starts it and closes it.
    app.add_hook("before_request", begin_request)
    app.install(JSONPlugin(to_json))  # It replaces Bottle's own, which has the same name.
    # Every route needs a token, unless it says skip="token". Bottle applies no plugin to a mounted
    # or merged application. To guard it, write app.mount("/sub/", other.wsgi, skip=[]), or install
    # a BearerToken in the merged one.
    app.install(BearerToken(tokens))

    @app.post("/plants")
    def post_plant() -> dict[str, Any]:
        return create_plant(storage)

    @app.get("/healthz", skip="token")
    def get_health() -> dict[str, Any]:
        return check_health(storage)

    @app.get("/livez", skip="token")
    def get_liveness() -> dict[str, Any]:
        return {"status": "ok"}

    document = json.dumps(openapi(), indent=2) + "\n"

    @app.get("/openapi.json", skip="token")
    def get_description() -> str:
        response.content_type = JSON
        return document

    page = Path(__file__).parent.joinpath("static", "index.html").read_bytes()

    @app.get("/", skip="token")
    def get_page() -> bytes:
        response.content_type = "text/html; charset=utf-8"
        return page

    return app


def create_plant(storage: Storage) -> dict[str, Any]:
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
    return plant.to_dict()


def check_health(storage: Storage) -> dict[str, Any]:
    """GET /healthz: tell whether plants can be stored."""
    try:
        storage.check(1.5)  # seconds
    except (Rejected, Unavailable) as error:
        raise HTTPError(503, UNAVAILABLE, error, Retry_After="1") from None
    return {"status": "ok"}


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

    answers_refusals = True  # require_http() answers what worker.py has refused.

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request. Its id is the client's own if that is safe to log, or a new one."""
        began = time.monotonic()
        request_id = environ.get("HTTP_X_REQUEST_ID", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = os.urandom(16).hex()
        if not environ["PATH_INFO"].isascii():
            # Bottle drops bytes that are not UTF-8, and would take /plants%ff for /plants. Put
            # U+FFFD in their place. The bytes of a path are Latin-1 characters here (PEP 3333).
            path = environ["PATH_INFO"].encode("latin-1").decode(errors="replace")
            environ["PATH_INFO"] = path.encode().decode("latin-1")
        log = environ.setdefault("plants.log", {})  # the last members of the line: token, reason
        sent_status = ""

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            nonlocal sent_status
            sent_status = status
            common = [("X-Request-ID", request_id), *COMMON_HEADERS]
            own = {name.lower() for name, _ in headers}
            if not own.isdisjoint(COMMON_NAMES):  # A route's own header replaces ours.
                common = [header for header in common if header[0].lower() not in own]
            return start_response(status, headers + common, exc_info)

        body: Iterable[bytes] = super().wsgi(environ, start)
        status_code = int(sent_status[:3])
        if status_code >= 400:
            log.setdefault("reason", sent_status[:REASON_LIMIT])  # note_failure() sets better ones.
        write_log(environ, status_code, time.monotonic() - began, request_id)
        return body

    def _cast(self, out: Any) -> Any:
        """Return the body of what a route has returned or raised, as Bottle does.

        Notes the reason for the log here, since a route's own @app.error handler replaces
        default_error_handler(). If Bottle can't make a body (a bug in such a handler, or a text
        that UTF-8 can't encode), this returns the body of a 500, as after a bug in a route.
        """
        try:
            if isinstance(out, HTTPError):
                note_failure(out)
            return super()._cast(out)
        except Exception as exception:
            failure = HTTPError(500, None, exception, traceback.format_exc())
            note_failure(failure)
            failure.apply(response)
            return super()._cast(self.default_error_handler(failure))

    def default_error_handler(self, error: HTTPError) -> bytes:
        """Return the body of an error (schemas/error.json)."""
        message = find_message(error)[:MESSAGE_LIMIT]
        response.content_type = JSON
        return to_json({"error": error.status_code, "message": message})


class Routes(Router):
    """Bottle's router, with the service's own answers where no route has the path or the method."""

    def match(self, environ: dict[str, Any]) -> Any:
        """Return the route of a request. Raises HTTPError 404 or 405, or HTTPResponse 204.

        RFC 9110 section 9.3.7 defines OPTIONS, which gets the 204. A browser also sends it as a
        preflight, to ask whether a page of another origin may send a token. A route for OPTIONS is
        called instead, if there is one.
        """
        try:
            return super().match(environ)
        except HTTPError as error:
            if error.status_code == 404:
                path = environ["PATH_INFO"]  # request.path would collapse a double slash.
                message = f"there is nothing at {path}; plants are created with POST /plants"
                raise HTTPError(404, message) from None
            methods = {"OPTIONS", *error.headers["Allow"].split(",")}
        if "GET" in methods:  # Bottle answers HEAD by the route for GET.
            methods.add("HEAD")
        *others, last = sorted(methods)
        allowed = f"{', '.join(others)}, {last}"
        if environ["REQUEST_METHOD"] != "OPTIONS":
            message = f"method not allowed; use {', '.join(others)} or {last}"
            raise HTTPError(405, message, Allow=allowed)
        headers = {
            "Allow": allowed,
            "Access-Control-Allow-Methods": allowed,
            # The asterisk does not stand for Authorization (fetch.spec.whatwg.org).
            "Access-Control-Allow-Headers": "Authorization, *",
        }
        raise HTTPResponse(status=204, headers=headers)


class BearerToken:
    """A Bottle plugin: every route that does not skip it needs a bearer token (RFC 6750)."""

    name = "token"
    api = 2  # the version of Bottle's interface for plugins

    def __init__(self, tokens: Iterable[str]) -> None:
        # Compare digests, so that the time of a look-up reveals nothing about a token.
        self._digests = {hashlib.sha256(token.encode()).digest() for token in tokens}

    def apply(self, callback: Callable[..., Any], route: Any) -> Callable[..., Any]:
        """Return a function that checks the token and then does what `callback` does."""

        def guarded(**arguments: Any) -> Any:
            self.require_token(request.environ)
            return callback(**arguments)

        return guarded

    def require_token(self, environ: Mapping[str, Any]) -> None:
        """Raise HTTPError 401 unless the request has a good token. Note which one, for the log."""
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() != "bearer":
            message = "send a token in the header Authorization: Bearer TOKEN"
            raise HTTPError(401, message, WWW_Authenticate='Bearer realm="plants"')
        digest = hashlib.sha256(token.strip(" ").encode()).digest()
        if digest not in self._digests:
            challenge = 'Bearer realm="plants", error="invalid_token"'
            raise HTTPError(401, "the bearer token is not valid", WWW_Authenticate=challenge)
        environ["plants.log"]["token"] = digest.hex()[:8]


def begin_request() -> None:
    """Do what comes before the routes of all requests. Raises HTTPError."""
    environ = request.environ
    require_http(environ)
    # Without Body, a client that is too slow or sends too much would look like a bug in a route
    # that reads the body with request.json and the like.
    environ["wsgi.input"] = Body(environ["wsgi.input"])


def require_http(environ: Mapping[str, Any]) -> None:
    """Raise HTTPError if worker.py refused the request or it does not have exactly one Host."""
    if refusal := environ.get("plants.refusal"):  # A status and a message.
        raise HTTPError(*refusal)
    # Every version but HTTP/1.0 requires exactly one Host (RFC 9112 section 3.2). Servers join two
    # of them with a comma.
    host = environ.get("HTTP_HOST", "")
    if environ["SERVER_PROTOCOL"] != "HTTP/1.0" and (not host or "," in host):
        raise HTTPError(400, "send exactly one Host header")


class Body:
    """The body of a request, to read from. If a read fails, the client is told why."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def read(self, *size: int) -> Any:
        """Read as wsgi.input does. Raises HTTPError."""
        return self._call(self._stream.read, *size)

    def readline(self, *size: int) -> Any:
        """Read a line as wsgi.input does. Raises HTTPError."""
        return self._call(self._stream.readline, *size)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines. Raises HTTPError."""
        return iter(self.readline, b"")

    def readlines(self, *hint: int) -> list[bytes]:
        """Return all lines. Raises HTTPError."""
        return list(self)

    def _call(self, read: Callable[..., Any], *size: int) -> Any:
        try:
            return read(*size)
        except OSError:  # With a 408, the client may send the request again (RFC 9110, 15.5.9).
            raise HTTPError(408, INCOMPLETE) from None
        except Exception:
            # Each server has exceptions of its own for invalid chunks. worker.py raises one for a
            # request that is longer than its MAX_REQUEST_BYTES, too.
            message = "the request with its headers is too long, or its chunks are not valid"
            raise HTTPError(400, message) from None


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
    body: bytes = environ["wsgi.input"].read(BODY_LIMIT + 1 if has_end else length)
    if len(body) < length:
        raise HTTPError(408, INCOMPLETE)
    if len(body) > BODY_LIMIT:
        raise HTTPError(413, TOO_LONG)
    return body


def is_bug(error: HTTPError) -> bool:
    """Tell if a 500 comes from an exception, or from a value that Bottle can't make a body of.

    Otherwise, a route has called abort(500, text) on purpose.
    """
    is_unsupported = str(error.body).startswith(UNSUPPORTED)
    return error.status_code == 500 and (error.exception is not None or is_unsupported)


def find_message(error: HTTPError) -> str:
    """Return what an error says to the client."""
    if is_bug(error):
        return f"the service failed; {SAFE}"
    return str(error.body or error.status_line)


def note_failure(error: HTTPError) -> None:
    """Note for the log why a request fails: what the client is told, or what it must not know."""
    environ = request.environ
    # Bottle writes the traceback of a route, but not that of a generator.
    if error.traceback and "bottle.exc_info" not in environ:
        environ["wsgi.errors"].write(error.traceback)
        environ["wsgi.errors"].flush()
    if "plants.refusal" in environ:
        return  # worker.py has noted the reason.
    if error.exception is None:
        reason = str(error.body) if is_bug(error) else find_message(error)
    elif is_bug(error):
        reason = f"{type(error.exception).__name__}, a bug"
    else:
        reason = str(error.exception)
    environ["plants.log"]["reason"] = reason[:REASON_LIMIT]


def write_log(environ: Mapping[str, Any], status: int, seconds: float, request_id: str) -> None:
    """Write a line of JSON about a request to standard output, or nothing if that is closed.

    Platforms ask /healthz and /livez all the time, so these are logged only if they fail. The line
    ends with the members of environ["plants.log"]: `token` and, from 400 on, `reason`.
    """
    if sys.stdout is None or (status == 200 and environ["PATH_INFO"] in ("/healthz", "/livez")):
        return
    client = environ.get("REMOTE_ADDR")
    asked = f"{environ['REQUEST_METHOD']} {quote(environ['PATH_INFO'])}".rstrip()
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        # A socket for IPv6 shows an IPv4 address with this prefix (RFC 4291 section 2.5.5.2).
        "client": client and client.removeprefix("::ffff:"),
        "request": asked[:REQUEST_LIMIT],
        "status": status,
        "seconds": round(seconds, 4),
        "id": request_id,
    }
    # A proxy puts the address of its client here. A client can send this header as well, so nothing
    # depends on it.
    if forwarded := environ.get("HTTP_X_FORWARDED_FOR"):
        line["forwarded"] = forwarded[:FORWARDED_LIMIT]
    line.update(environ["plants.log"])
    with contextlib.suppress(OSError):  # A log that can't be written must not fail the request.
        os.write(1, f"{json.dumps(line)}\n".encode())


def to_json(value: Mapping[str, Any]) -> bytes:
    """Return `value` as JSON with a line break, so that a shell's prompt is on a new line."""
    return f"{json.dumps(value, ensure_ascii=False)}\n".encode()
