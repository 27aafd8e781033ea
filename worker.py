"""gunicorn's gevent worker with time limits for its clients, and the access log.

Knows nothing of plants. These classes are in a module of their own as gunicorn executes its
configuration file anew at SIGHUP, but goes on with the logger that it has.
"""

import contextlib
import json
import logging
import random
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from email.utils import formatdate
from http import HTTPStatus
from operator import attrgetter
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import gevent
from gunicorn import glogging
from gunicorn.http import errors
from gunicorn.workers.ggevent import GeventWorker

PARSE_STATUS = {
    errors.LimitRequestLine: 414,
    errors.ExpectationFailed: 417,
    errors.LimitRequestHeaders: 431,
    errors.UnsupportedTransferCoding: 501,
}
CROWDED = 0.9  # of worker_connections; where there are more, the one that has waited longest goes


class Connection:
    """A client's socket with a deadline, which sends each answer in one piece.

    Whatever is not here is the socket's own.
    """

    def __init__(self, sock: Any, request_limit: float, linger_limit: float) -> None:
        """The limits are in seconds: for a request to arrive, and for its answer to be read."""
        self._sock = sock
        self._limit, self._linger = request_limit, linger_limit
        self._unsent: list[bytes] = []
        self.is_cut = False
        self.wait(request_limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def wait(self, limit: float) -> None:
        """Wait for a request, whose first byte has to come within so many seconds."""
        self.is_idle = True
        self.since = time.monotonic()
        self.deadline = self.since + limit

    def begin(self) -> None:
        """Let the time run in which a request has to arrive."""
        if self.is_idle:
            self.wait(self._limit)
            self.is_idle = False

    def recv(self, size: int) -> bytes:
        """Receive a part of a request; b"" at its end, or when its time is up."""
        data: bytes = self._sock.recv(size)
        self.begin()
        return data

    def sendall(self, data: bytes) -> None:
        """Keep a part of an answer until flush()."""
        self._unsent.append(data)

    def flush(self) -> None:
        """Send what was kept."""
        data, self._unsent = b"".join(self._unsent), []
        self._sock.sendall(data)

    def cut(self, now: float) -> None:
        """Read no further, so that a client that is late can still be told; then send no further.

        What TLS would do at a shutdown needs an answer, so it is the socket below that is shut.
        """
        self.is_cut = True
        how = socket.SHUT_RD if now < self.deadline + self._linger else socket.SHUT_RDWR
        with contextlib.suppress(OSError):
            gevent.socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Close once the client has read its answer (RFC 9112 section 9.6), or took too long."""
        with contextlib.suppress(OSError):
            self.flush()
            self.deadline = time.monotonic() + self._linger
            gevent.socket.socket.shutdown(self._sock, socket.SHUT_WR)
            while self._sock.recv(2**16) and time.monotonic() < self.deadline:
                pass
        self._sock.close()


def limit_chunks(chunks: Iterator[bytes], limit: int) -> Iterator[bytes]:
    """Pass on the chunks of a body; raise ParseException if there are too many of them."""
    for count, chunk in enumerate(chunks, 1):
        if count > limit:
            raise errors.ParseException(f"it came in more than {limit} pieces")
        yield chunk


class Worker(GeventWorker):
    """gunicorn's gevent worker: a greenlet for each connection, which here can't last for ever."""

    request_limit = 20.0  # seconds for a request to arrive
    linger_limit = 3.0  # seconds for a client that is still sending to read its answer
    chunk_limit = 2**13  # of a body; each costs time
    exit_delay = 0.5  # seconds from SIGTERM to when a worker begins to end

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connections: set[Connection] = set()

    def timeout_ctx(self) -> contextlib.AbstractContextManager[None]:
        """Set no timer for each request: notify() looks at all deadlines."""
        return contextlib.nullcontext()

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve a connection; close another if there are too many."""
        connection = Connection(client, self.request_limit, self.linger_limit)
        self.make_room()
        self.connections.add(connection)
        try:
            super().handle(listener, connection, addr)
        finally:
            self.connections.discard(connection)

    def make_room(self) -> None:
        """Cut the connection that has waited longest; what it has sent as a whole is answered."""
        if len(self.connections) > CROWDED * self.worker_connections:
            waiting = [each for each in self.connections if not each.is_cut]
            if waiting:
                min(waiting, key=attrgetter("since")).cut(0)

    def handle_request(self, listener_name: Any, req: Any, sock: Connection, addr: Any) -> None:
        """Answer a request, then let other connections have their turn."""
        sock.begin()
        reader = req.body.reader
        if chunks := getattr(reader, "parser", None):
            reader.parser = limit_chunks(chunks, self.chunk_limit)
        super().handle_request(listener_name, req, sock, addr)
        sock.flush()
        sock.wait(self.cfg.keepalive)
        gevent.sleep(0)

    def notify(self) -> None:
        """Tell the master that all is well, every second, and cut connections that are late."""
        super().notify()
        now = time.monotonic()
        for connection in list(self.connections):
            if now > connection.deadline or (connection.is_idle and not self.alive):
                connection.cut(now)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End a moment later: where all get SIGTERM, the master has to stop listening first."""
        gevent.spawn_later(self.exit_delay, super().handle_exit, sig, frame)

    def handle_error(self, req: Any, client: Connection, addr: Any, exc: BaseException) -> None:
        """Answer what never came to the application as the application would: with an Error."""
        if isinstance(exc, gevent.GreenletExit):
            return
        status, message = PARSE_STATUS.get(type(exc), 400), str(exc)
        if not isinstance(exc, errors.ParseException):
            self.log.exception("a request failed in the server")
            status, message = 500, "the service failed"
        request_id = f"{random.getrandbits(128):032x}"
        body = json.dumps({"error": status, "message": message[:1000]}).encode() + b"\n"
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nServer: gunicorn\r\n"
            f"Date: {formatdate(usegmt=True)}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
            f"X-Request-ID: {request_id}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        # Not what the error says: a broken header can have a token in it.
        environ = {
            "REMOTE_ADDR": addr[0] if addr else "",
            "REQUEST_METHOD": type(exc).__name__,
            "RAW_URI": "",
            "PATH_INFO": "",
            "SERVER_PROTOCOL": "",
            "plants.request_id": request_id,
        }
        answer = SimpleNamespace(status=str(status), sent=len(body), headers=[])
        self.log.access(answer, SimpleNamespace(headers=[]), environ, timedelta())


class AccessLogger(glogging.Logger):
    """gunicorn's logger with an access log that no request can forge and that has no secrets."""

    def setup(self, cfg: Any) -> None:
        """Send the application's log the way of gunicorn's own."""
        super().setup(cfg)
        logging.getLogger("plants").handlers = self.error_log.handlers

    def debug(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Name an exception, no more: gunicorn's for a head cut short says all that came of it."""
        named = [type(arg).__name__ if isinstance(arg, Exception) else arg for arg in args]
        super().debug(msg, *named, **kwargs)

    def access(self, resp: Any, req: Any, environ: dict[str, Any], request_time: timedelta) -> None:
        """Write a line: Common Log Format, path without query, seconds taken and request id.

        Leaves out a /healthz that succeeds: platforms ask every few seconds.
        """
        path, status = environ["PATH_INFO"], str(resp.status)[:3]
        if not self.access_log_enabled or (path == "/healthz" and status == "200"):
            return
        request = f"{environ['REQUEST_METHOD']} {quote(path)}"[:2000].rstrip()
        line = (
            f'{quote(environ["REMOTE_ADDR"], ":") or "-"} - - {self.now()} "{request}" {status} '
            f"{resp.sent} {request_time.total_seconds():.4f}s "
            f"{environ.get('plants.request_id', '-')}"
        )
        for handler in self.access_log.handlers:
            # Written directly to gunicorn's own stream: logging takes ten times as long for it.
            if getattr(handler, "_gunicorn", False) and isinstance(handler, logging.StreamHandler):
                with handler.lock, contextlib.suppress(OSError, ValueError):
                    handler.stream.write(f"{line}\n")
                    handler.flush()
            else:
                self.access_log.info("%s", line)
