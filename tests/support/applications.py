"""WSGI applications as their authors may write them, within PEP 3333 and beyond, one for each path.

gunicorn serves all of them as `tests.support.applications:serve`.
"""

import io
import sys
import tempfile
import wsgiref.validate
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import bottle
import gevent
import gevent.event

Environ = dict[str, Any]
Start = Callable[..., Callable[[bytes], object]]

TEXT = [("Content-Type", "text/plain"), ("X-Own", "yes")]
LARGE = bytes(range(256)) * 80_000  # 20 MB
closed: list[str] = []  # The paths of all responses whose close() has been called.
turn = gevent.event.Event()  # /steps waits for it, and /step sets it.


class Closing:
    """An iterable of blocks that notes the call of its close()."""

    def __init__(self, environ: Environ, blocks: Iterable[bytes]) -> None:
        self._path = environ["PATH_INFO"]
        self._blocks = blocks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    def close(self) -> None:
        closed.append(self._path)


# What works under every server.


def one_block(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", TEXT)
    return [b"one block"]


def no_block(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", TEXT)
    return ()


def three_blocks(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", TEXT)
    return [b"one, ", b"two, ", b"three"]


def generator(environ: Environ, start: Start) -> Iterable[bytes]:
    start("203 Own", TEXT)
    return (b"%d " % number for number in range(100))


def late_start(environ: Environ, start: Start) -> Iterable[bytes]:
    """It begins when its first block is asked for, as every generator does."""
    start("200 OK", TEXT)
    yield b"late"


def empty_first(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", TEXT)
    return iter([b"", b"full"])


def replaced(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", [])
    try:
        raise ValueError("this is no longer a success")
    except ValueError:
        start("503 Busy", TEXT, sys.exc_info())
    return [b"replaced"]


def empty_only(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", TEXT)
    return iter([b"", b""])


def written(environ: Environ, start: Start) -> Iterable[bytes]:
    write = start("200 OK", TEXT)
    write(b"written, ")
    write(b"")
    return [b"returned"]


def only_written(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", [*TEXT, ("Content-Length", "7")])(b"written")
    return []


def declared(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", [*TEXT, ("Content-Length", "10")])
    return iter([b"four ", b"", b"five "])


def too_much(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", [*TEXT, ("Content-Length", "6")])
    return [b"four", b"five", b"six"]


def no_content(environ: Environ, start: Start) -> Iterable[bytes]:
    start("204 No Content", TEXT)
    return [b"ignored"]


def not_modified(environ: Environ, start: Start) -> Iterable[bytes]:
    start("304 Not Modified", TEXT)
    return iter([b"ignored", b"too"])


def cookies(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Latin", "\xe9")])
    return [b"two cookies"]


def own_connection(environ: Environ, start: Start) -> Iterable[bytes]:
    """These headers are the server's. Sent twice, they would leave the end of the body unclear."""
    own = [("Connection", "close"), ("transfer-encoding", "chunked"), ("Date", "today")]
    start("200 OK", [*TEXT, *own])
    return [b"whole"]


def replaced_input(environ: Environ, start: Start) -> Iterable[bytes]:
    """Puts a copy of the body into the environ, as WebOb and Bottle do."""
    body = environ["wsgi.input"].read()
    environ["wsgi.input"] = io.BytesIO(body)
    start("200 OK", TEXT)
    return [body.upper()]


def late_input(environ: Environ, start: Start) -> Iterable[bytes]:
    """Reads the body when a part of the response has been sent."""
    start("200 OK", TEXT)
    yield b"echo: "
    yield environ["wsgi.input"].read()


def large_block(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", TEXT)
    return [LARGE]


def large_file(environ: Environ, start: Start) -> Iterable[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115, since the server closes it
    file.write(LARGE)
    file.seek(0)
    start("200 OK", TEXT)
    blocks: Iterable[bytes] = environ["wsgi.file_wrapper"](file)
    return blocks


@wsgiref.validate.validator
def valid(environ: Environ, start: Start) -> Iterable[bytes]:
    """wsgiref raises an exception if the server or this application breaks a rule of PEP 3333."""
    body = environ["wsgi.input"].read(3)
    environ["wsgi.errors"].flush()
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"valid: ", body]


# What is the application's mistake, or depends on the server.


def replaced_late(environ: Environ, start: Start) -> Iterable[bytes]:
    """The head is sent with the first block that is not empty. Until then, it may be replaced."""
    start("200 OK", [("X-First", "yes"), ("Content-Length", "5")])
    yield b""
    try:
        raise ValueError("this is no longer a success")
    except ValueError:
        start("503 Busy", TEXT, sys.exc_info())
    yield b"replaced"


def fails_at_once(environ: Environ, start: Start) -> Iterable[bytes]:
    raise FileNotFoundError("an application's OSError is not the client's")


def fails_early(environ: Environ, start: Start) -> Iterable[bytes]:
    """Its second start_response() has no exc_info."""
    start("200 OK", TEXT)
    start("200 OK", TEXT)
    return [b"never sent"]


def fails_late(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", TEXT)
    yield b"half"
    raise FileNotFoundError("an application's OSError is not the client's")


def fails_too_late(environ: Environ, start: Start) -> Iterable[bytes]:
    """Tries to replace a head that has been sent."""
    start("200 OK", TEXT)
    yield b"half"
    try:
        raise ValueError("what came between")
    except ValueError:
        start("500 Failed", TEXT, sys.exc_info())
    yield b"never sent"


def too_little(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", [*TEXT, ("Content-Length", "9")])
    return [b"half"]


def no_start(environ: Environ, start: Start) -> Iterable[bytes]:
    return [b"never sent"]


def no_bytes(environ: Environ, start: Start) -> Any:
    start("200 OK", TEXT)
    return ["a string"]


def injected(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", [("X-Own", "yes\r\nSet-Cookie: a=1")])
    return [b"never sent"]


def exits(environ: Environ, start: Start) -> Iterable[bytes]:
    sys.exit("which would end the worker")


def endless(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", TEXT)
    while True:
        yield b"x" * 1000
        gevent.sleep(0.001)


def cut(environ: Environ, start: Start) -> Iterable[bytes]:
    """It has no end, but a Content-Length."""
    start("200 OK", [*TEXT, ("Content-Length", "6")])
    return iter(lambda: b"four", b"")


def steps(environ: Environ, start: Start) -> Iterable[bytes]:
    """Sends its second block when somebody has asked for /step."""
    turn.clear()
    start("200 OK", TEXT)
    yield b"first"
    turn.wait()
    yield b"second"


def step(environ: Environ, start: Start) -> Iterable[bytes]:
    turn.set()
    start("200 OK", TEXT)
    return [b""]


def which_are_closed(environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", TEXT)
    return [" ".join(closed).encode()]


pages = bottle.Bottle()


@pages.post("/bottle/form")
def form() -> str:
    return f"form: {bottle.request.forms['name']}"


@pages.post("/bottle/json")
def json() -> Any:
    return bottle.request.json


@pages.get("/bottle/stream")
def stream() -> Iterator[str]:
    yield "one, "
    yield "two"


@pages.get("/bottle/file")
def static_file() -> bottle.HTTPResponse:
    here = Path(__file__)
    return bottle.static_file(here.name, root=str(here.parent))


def serve(environ: Environ, start: Start) -> Iterable[bytes]:
    """Call the application that has the name in the path, and note when its response is closed."""
    path = environ["PATH_INFO"]
    if path.startswith("/bottle/"):
        return pages(environ, start)
    blocks = globals()[path.removeprefix("/")](environ, start)
    # A list stays one, since the server may check how many blocks it has.
    return blocks if isinstance(blocks, (list, tuple)) else Closing(environ, blocks)
