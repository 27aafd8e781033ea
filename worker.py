"""gunicorn's gevent worker with time limits for its clients, and the access log.

Not in gunicorn.conf.py, which SIGHUP executes anew while the logger stays that of the start.
"""

import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import gevent
from gevent.server import StreamServer
from gunicorn import util
from gunicorn.http import errors
from gunicorn.http.wsgi import Response
from gunicorn.instrument.statsd import Statsd
from gunicorn.workers.ggevent import GeventWorker

STATUS = {"LimitRequestLine": 414, "ExpectationFailed": 417, "LimitRequestHeaders": 431}
STATUS["UnsupportedTransferCoding"] = 501  # what else gunicorn's parser refuses is a 400
UNWANTED = 2**16  # bytes that are read and thrown away so that a connection can be kept
FULL = 0.9  # of worker_connections; from there on a new one takes the place of another
HEAD_LIMIT = 2**14  # bytes of a head; of a body in chunks, beside its data
PIECES, PAUSE = 16, 0.25  # of a request that are read at once, and seconds before each further one
SEND_LIMIT = 2**15  # bytes of answers that the system keeps for a client that reads none

# Until a worker has handlers of its own it has the master's, in which these would be lost.
SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCONT)
os.register_at_fork(after_in_child=lambda: [signal.signal(n, signal.SIG_DFL) for n in SIGNALS])


class Connection:
    """A client's socket with limits for what it does, which sends an answer in one piece."""

    def __init__(self, sock: Any, request_limit: float, linger_limit: float) -> None:
        """Limit the seconds for a request to arrive, and then those for its answer to be read."""
        self._sock, self._unsent = sock, b""
        # With a gettimeout() too, gunicorn would call it for each request.
        self.setblocking = sock.setblocking
        self._request_limit, self._linger_limit = request_limit, linger_limit
        self.is_waiting = True  # for the client: it may be late, or make room
        self.has_ended = False  # nothing more is read
        self.is_served, self.room = False, HEAD_LIMIT
        self.set_deadline(request_limit, is_idle=True)

    def set_deadline(self, limit: float, is_idle: bool = False) -> None:
        """Expire in so many seconds; note whether it waits for a request to begin."""
        self.is_idle, self.waiting_since = is_idle, time.monotonic()
        self.deadline = self.waiting_since + limit

    def recv(self, size: int) -> Any:
        """Receive a part of a request; b"" where there is no more, or its time is up.

        Raises LimitRequestHeaders where there is more than `room`.
        """
        self.is_waiting = True
        if self.is_idle and not self.has_ended:
            # recv() would not wait for what is there, nor let others come first.
            gevent.socket.wait(self._sock._read_event)
            self.set_deadline(self._request_limit)
            self.pieces = 0
        elif self.has_ended:
            return b""
        if not self.room:
            raise errors.LimitRequestHeaders(f"more than {HEAD_LIMIT} bytes that are no body")
        self.pieces += 1
        if self.pieces > PIECES:  # each is searched together with those before it
            gevent.sleep(PAUSE)
        data = self._sock.recv(min(size, self.room))
        self.is_waiting = False
        self.room -= len(data)
        return data

    def sendall(self, data: bytes) -> None:
        """Keep a part of an answer until flush()."""
        self._unsent += data

    def send(self, data: bytes) -> None:
        """Send a 100 Continue, which a client may not take either."""
        self.sendall(data)
        self.flush()
        self.set_deadline(self._request_limit)
        self.is_waiting = False

    def say_close(self) -> None:
        """Make the answer that is kept the last (RFC 9112 section 9.6)."""
        self._unsent = self._unsent.replace(b"\nConnection: keep-alive", b"\nConnection: close", 1)

    def flush(self) -> None:
        """Send what was kept; while it is not taken, this is the first to make room."""
        data, self._unsent = self._unsent, b""
        self.is_waiting, self.waiting_since = True, 0.0
        self.deadline = time.monotonic() + self._request_limit
        while data:  # most often once; gevent's sendall() asks for the buffer's size first
            data = data[self._sock.send(data) :]

    def shutdown(self, how: int) -> None:
        """Shut down; not by gevent's method, which would fail a greenlet that waits for data."""
        self.has_ended = True
        with contextlib.suppress(OSError):
            self._sock._sock.shutdown(how)

    def make_room(self) -> None:
        """Go at once, but for a request that has come and was not read yet."""
        self._linger_limit, self.is_waiting = 0.0, False
        self.shutdown(socket.SHUT_RDWR if self.is_served or self.has_ended else socket.SHUT_RD)

    def close(self) -> None:
        """Close once the client has read its answer (RFC 9112 section 9.6), or its time is up."""
        with contextlib.suppress(OSError):
            self.flush()
            self.set_deadline(self._linger_limit)
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv(UNWANTED) and time.monotonic() < self.deadline:
                gevent.sleep(0)
        self._sock.close()


class Worker(GeventWorker):
    """gunicorn's gevent worker, a greenlet for each connection, with limits for what they do."""

    request_limit = 20.0  # seconds for a request to arrive
    linger_limit = 3.0  # seconds for a client that is still sending to read its answer
    exit_delay = 0.5  # seconds from SIGTERM to when a worker begins to end
    timeout_ctx = contextlib.nullcontext  # no timer for each request: notify() has all deadlines

    def run(self) -> None:
        """Serve until told to end, then also what is left in the backlog."""
        self.connections: set[Connection] = set()
        # Each request asks for some twenty settings, which are looked up faster as attributes.
        self.cfg.__dict__.update({name: each.get() for name, each in self.cfg.settings.items()})
        # All answers of a second have the same Date, which takes some time to make.
        date = functools.lru_cache(1)(util.http_date)
        util.http_date = lambda: date(int(time.time()))
        gc.freeze()  # what is loaded stays: the garbage collector need not look through it again
        servers = {}
        for sock in self.sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_LIMIT)  # of what it accepts
            server = StreamServer(sock, self.handle, spawn=self.worker_connections)
            server.set_handle(functools.partial(self.handle, server))
            server.max_accept = 1  # so that other workers get some, too
            server.start()
            servers[sock.dup()] = server
        while self.alive:
            self.notify()
            gevent.sleep(1)
        for listener, server in servers.items():
            server.close()
            listener.setblocking(False)
            with listener, contextlib.suppress(OSError):
                while True:  # until there is none left, or no descriptor for it
                    gevent.spawn(self.handle, server, *listener.accept())
        gevent.sleep(0)  # so that each has begun
        while self.connections:  # the master ends it after graceful_timeout
            self.notify()
            gevent.sleep(0.1)

    def handle(self, server: Any, client: Any, addr: Any) -> None:
        """Serve a connection; if there are too many, cut the one that has waited longest."""
        is_full = len(self.connections) + 1 >= FULL * self.worker_connections
        if is_full and (waiting := [each for each in self.connections if each.is_waiting]):
            min(waiting, key=lambda each: each.waiting_since).make_room()
        # In a round of the event loop, which takes longer the more there are.
        server.max_accept = 1 + len(self.connections) // 4
        connection = Connection(client, self.request_limit, self.linger_limit)
        self.connections.add(connection)
        try:
            super().handle(client, connection, addr)  # the listener may be closed by now
        finally:
            self.connections.discard(connection)

    def handle_request(self, listener_name: Any, req: Any, sock: Connection, addr: Any) -> None:
        """Answer a request."""
        if sock.is_idle:  # it came with the last one: nothing was received, and others wait
            sock.set_deadline(self.request_limit)
            gevent.sleep(0)
            if sock.has_ended:
                raise StopIteration
        sock.is_waiting, sock.is_served, sock.room = False, True, sys.maxsize
        req.version = min(req.version, (1, 1))  # the answer's, too (RFC 9110 section 2.5)
        for name, value in req.headers:  # gunicorn sees a "close" only alone
            if name == "CONNECTION" and "close" in map(str.strip, value.lower().split(",")):
                req.force_close()
        reader = req.body.reader
        if chunks := getattr(reader, "parser", None):
            sock.room = HEAD_LIMIT
            reader.parser = pass_chunks(chunks, reader, sock)
        super().handle_request(listener_name, req, sock, addr)
        if chunks and not hasattr(reader, "length"):
            sock.setblocking(False)  # read no more than has come
            with contextlib.suppress(OSError, errors.ParseException):
                req.body.read(UNWANTED + 1)
            sock.setblocking(True)
        if sock.has_ended or getattr(reader, "length", sys.maxsize) > UNWANTED:
            sock.say_close()
            raise StopIteration
        sock.flush()
        if reader.length:  # the next request is behind the rest
            sock.set_deadline(self.request_limit)
            while req.body.read(UNWANTED // 8):  # in parts, so that little of it is kept
                pass
        sock.is_served, sock.room = False, HEAD_LIMIT
        sock.set_deadline(self.cfg.keepalive, is_idle=True)

    def notify(self) -> None:
        """Tell the master that all is well; stop reading from clients that are late.

        Shut out those that don't read either.
        """
        super().notify()
        now = time.monotonic()
        for each in list(self.connections):
            limit = each.deadline + (self.linger_limit if each.has_ended else 0)
            if not (self.alive or each.is_served):
                # Idle clients are not waited for, but a request may be on its way.
                limit = self.exit_delay if each.is_idle else self.linger_limit
                limit += each.waiting_since
            if each.is_waiting and now > limit:
                each.shutdown(socket.SHUT_RDWR if each.has_ended else socket.SHUT_RD)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End later: where all processes get SIGTERM, the master has to stop listening first."""
        gevent.spawn_later(self.exit_delay, super().handle_exit, sig, frame)

    def handle_quit(self, sig: int, frame: Any) -> None:
        """End at once, and once: Ctrl+C comes from the terminal and then from the master."""
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # where SIG_IGN is, Python reports a late one
        super().handle_quit(sig, frame)

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Answer what never came to the application as the application would: with an Error."""
        if isinstance(exc, gevent.GreenletExit):  # the worker ends
            return
        from app import refuse  # not in the master: SIGHUP could not reload it

        name, status, message = type(exc).__name__, 500, "a request failed in the server"
        if isinstance(exc, errors.ParseException):
            status, message = STATUS.get(name, 400), str(exc)
        else:
            self.log.exception(message)
        # Not what the error says: a broken header can have a token in it.
        environ = dict.fromkeys(("RAW_URI", "PATH_INFO", "SERVER_PROTOCOL"), "")
        environ |= {"REMOTE_ADDR": addr[0] if addr else "", "REQUEST_METHOD": name}
        request = SimpleNamespace(method="", version=(1, 1), should_close=lambda: True)
        answer = Response(request, client, self.cfg)
        for part in refuse(status, message, environ, answer.start_response):
            answer.write(part)
        self.log.access(answer, answer, environ, timedelta())


def pass_chunks(chunks: Iterator[bytes], reader: Any, sock: Any) -> Iterator[bytes]:
    """Pass the chunks of a body on; what stands beside their data is limited as a head is."""
    for chunk in chunks:
        sock.room += len(chunk)
        gevent.sleep(0)  # what stands beside a chunk's length may be long
        yield chunk
    reader.length = 0  # of what is left, as where a body has a length: it has come to its end


class LogStream:
    """Standard output or error for a log: a line that can't be written now is lost, and counted."""

    def __init__(self, stream: Any) -> None:
        """Write to where `stream` does, or nowhere if that was closed."""
        stream = stream or open(os.devnull, "w")  # noqa: SIM115
        self.flush, self._lost = stream.flush, 0
        descriptor: int = stream.fileno()
        with contextlib.suppress(OSError):  # macOS has no such path
            if os.isatty(descriptor):  # opened anew, as it is that of others, too
                flags = os.O_WRONLY | os.O_NOCTTY
                descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
            os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor that is written to."""
        return self._descriptor

    def write(self, text: str) -> None:
        """Write lines whole or not at all, as the system does up to PIPE_BUF."""
        for line in text.encode(errors="backslashreplace").splitlines(keepends=True):
            said = b"%d lines of this log were lost\n" % self._lost if self._lost else b""
            try:
                os.write(self._descriptor, said + line)
                self._lost = 0
            except OSError:
                self._lost += 1


class AccessLogger(Statsd):
    """gunicorn's logger with an access log that no request can forge and that has no secrets."""

    statsd_failures = 0

    def __init__(self, cfg: Any) -> None:
        """Have logs that can't stop the service."""
        for name in ("stdout", "stderr"):
            setattr(sys, name, LogStream(getattr(sys, name)))
        super().__init__(cfg)
        self.error_log.addFilter(self.filter_errors)

    def filter_errors(self, record: logging.LogRecord) -> bool:
        """Let statsd's failure through once, without a traceback; say what to do about a port."""
        if str(record.msg).startswith("Connection in use"):
            record.msg += "; ss -ltnp shows by whom; to listen elsewhere: --bind 127.0.0.1:8001"
        if record.msg != "Error sending message to statsd":
            return True
        self.statsd_failures, record.exc_info = self.statsd_failures + 1, None
        return self.statsd_failures == 1

    def debug(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Log no token: of exceptions their types, as NoMoreData has the raw head; not --env."""
        if self.loglevel <= logging.DEBUG and not msg.startswith("Current configuration"):
            named = [type(arg).__name__ if isinstance(arg, Exception) else arg for arg in args]
            super().debug(msg, *named, **kwargs)

    def access(self, resp: Any, req: Any, environ: dict[str, Any], request_time: timedelta) -> None:
        """Write a line, but not for a /healthz that succeeds: platforms ask every few seconds."""
        path, status = environ["PATH_INFO"], str(resp.status)[:3]
        if self.sock:  # there is a --statsd-host; its metrics are gunicorn's
            self.timer("gunicorn.request.duration", request_time / timedelta(milliseconds=1))
            for metric in ("gunicorn.requests", f"gunicorn.request.status.{status}"):
                self.increment(metric, 1)
        if not self.access_log_enabled or (path == "/healthz" and status == "200"):
            return
        request = f"{environ['REQUEST_METHOD']} {quote(path)}"[:2000].rstrip()
        user = environ.get("REMOTE_USER") or "-"
        line = (
            f'{environ["REMOTE_ADDR"] or "-"} - {user} {self.now()} "{request}" {status} '
            f"{resp.sent} {request_time.total_seconds():.4f}s {environ.get('plants.request_id')}"
        )
        handlers = self.access_log.handlers
        if len(handlers) != 1 or not hasattr(handlers[0], "_gunicorn"):
            self.access_log.info("%s", line)
            return
        # Directly to gunicorn's own stream: logging takes ten times as long,
        # and prints a traceback for each line that can't be written.
        with contextlib.suppress(OSError, ValueError):
            handlers[0].stream.write(f"{line}\n")
            handlers[0].stream.flush()
