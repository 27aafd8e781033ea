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
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import gevent
from gunicorn import util
from gunicorn.http import errors
from gunicorn.http.wsgi import Response
from gunicorn.instrument.statsd import Statsd
from gunicorn.workers.ggevent import GeventWorker

STATUS = {"LimitRequestLine": 414, "ExpectationFailed": 417, "LimitRequestHeaders": 431}
STATUS["UnsupportedTransferCoding"] = 501  # what else gunicorn's parser refuses is a 400
UNWANTED = 2**16  # bytes to read and throw away at a time
FULL = 0.9  # of worker_connections; from there on a new one takes the place of another

# Until a worker has handlers of its own it has the master's, in which these would be lost.
END_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
os.register_at_fork(after_in_child=lambda: [signal.signal(n, signal.SIG_DFL) for n in END_SIGNALS])


class Connection:
    """A client's socket with a deadline, which sends an answer in one piece."""

    def __init__(self, sock: Any, request_limit: float, linger_limit: float) -> None:
        """Limit the seconds for a request to arrive, and then those for its answer to be read."""
        self._sock, self._unsent = sock, b""
        # With a gettimeout() too, gunicorn would call it for each request.
        self.setblocking, self.send = sock.setblocking, sock.send
        self._request_limit, self._linger_limit = request_limit, linger_limit
        self.is_expired = False
        self.set_deadline(request_limit)

    def set_deadline(self, limit: float, is_idle: bool = True) -> None:
        """Expire in so many seconds."""
        self.is_idle, self.waiting_since = is_idle, time.monotonic()
        self.deadline = self.waiting_since + limit

    def recv(self, size: int) -> Any:
        """Receive a part of a request; b"" where there is no more, or its time is up."""
        if self.is_idle:  # recv() would not wait for what is there, nor let others come first
            gevent.socket.wait(self._sock._read_event)
            self.set_deadline(self._request_limit, is_idle=False)
        return self._sock.recv(size)

    def sendall(self, data: bytes) -> None:
        """Keep a part of an answer until flush()."""
        self._unsent += data

    def flush(self) -> None:
        """Send what was kept."""
        data, self._unsent = self._unsent, b""
        while data:  # most often once; gevent's sendall() asks for the buffer's size first
            data = data[self._sock.send(data) :]

    def shutdown(self, how: int) -> None:
        """Shut down; not by gevent's method, which would fail a greenlet that waits for data."""
        self.is_expired = True
        with contextlib.suppress(OSError):
            self._sock._sock.shutdown(how)

    def close(self) -> None:
        """Close once the client has read its answer (RFC 9112 section 9.6), or its time is up."""
        with contextlib.suppress(OSError):
            self.flush()
            self.set_deadline(self._linger_limit, is_idle=False)
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv(UNWANTED) and time.monotonic() < self.deadline:
                gevent.sleep(0)
        self._sock.close()


class Worker(GeventWorker):
    """gunicorn's gevent worker, a greenlet for each connection, with limits for what they do."""

    request_limit = 20.0  # seconds for a request to arrive
    linger_limit = 3.0  # seconds for a client that is still sending to read its answer
    chunk_limit = 2**9  # chunks of a body: each costs time
    exit_delay = 0.5  # seconds from SIGTERM to when a worker begins to end
    timeout_ctx = contextlib.nullcontext  # no timer for each request: notify() has all deadlines

    def run(self) -> None:
        """Serve until told to end, then also what is left in the backlog."""
        self.connections: set[Connection] = set()
        self.listeners = [listener.dup() for listener in self.sockets]
        # Each request asks for some twenty settings, which are looked up faster as attributes.
        self.cfg.__dict__.update({name: each.get() for name, each in self.cfg.settings.items()})
        # All answers of a second have the same Date, which takes some time to make.
        date = functools.lru_cache(1)(util.http_date)
        util.http_date = lambda: date(int(time.time()))
        gc.freeze()  # what is loaded stays: the garbage collector need not look through it again
        super().run()
        while self.listeners or self.connections:  # the master ends it after graceful_timeout
            self.notify()
            gevent.sleep(0.1)

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve a connection; if there are too many, cut the one that has waited longest."""
        if self.connections and len(self.connections) + 1 >= FULL * self.worker_connections:
            oldest = min(self.connections, key=lambda each: (each.is_expired, each.waiting_since))
            oldest.shutdown(socket.SHUT_RD)  # so that an error can still be sent
        connection = Connection(client, self.request_limit, self.linger_limit)
        self.connections.add(connection)
        try:
            super().handle(client, connection, addr)  # the listener may be closed by now
        finally:
            self.connections.discard(connection)

    def handle_request(self, listener_name: Any, req: Any, sock: Connection, addr: Any) -> None:
        """Answer a request."""
        if sock.is_idle:  # it came with the last one: nothing was received, and others wait
            sock.set_deadline(self.request_limit, is_idle=False)
            gevent.sleep(0)
        req.version = min(req.version, (1, 1))  # the answer's, too (RFC 9110 section 2.5)
        for name, value in req.headers:  # gunicorn sees a "close" only alone
            if name == "CONNECTION" and "close" in map(str.strip, value.lower().split(",")):
                req.force_close()
        if chunks := getattr(req.body.reader, "parser", None):
            req.body.reader.parser = limit_chunks(chunks, self.chunk_limit)
        super().handle_request(listener_name, req, sock, addr)
        sock.flush()
        try:
            # Most often all has been read, which a body in chunks does not tell.
            is_read = getattr(req.body.reader, "length", None) == 0
            if not is_read and len(req.body.read(UNWANTED)) == UNWANTED:
                raise StopIteration
        except errors.ParseException:  # which would be a second answer
            raise StopIteration from None
        sock.set_deadline(self.cfg.keepalive)

    def notify(self) -> None:
        """Tell the master, every second, that all is well; look after the connections."""
        super().notify()
        if not self.alive:
            self.accept_backlog()
        self.end_late_connections()

    def accept_backlog(self) -> None:
        """Serve the connections that were made before the listeners were closed."""
        while self.listeners:
            with self.listeners.pop() as listener, contextlib.suppress(OSError):
                listener.setblocking(False)
                while True:  # until there is none left, or no descriptor for it
                    gevent.spawn(self.handle, listener, *listener.accept())

    def end_late_connections(self) -> None:
        """Stop reading from clients that are late; shut out those that don't read either."""
        now = time.monotonic()
        for each in list(self.connections):
            # At the end idle clients are not waited for, but a request may be on its way.
            is_over = each.is_idle and now > each.waiting_since + self.exit_delay
            if each.is_expired and now > each.deadline + self.linger_limit:
                each.shutdown(socket.SHUT_RDWR)
            elif now > each.deadline or (is_over and not self.alive):
                each.shutdown(socket.SHUT_RD)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End later: where all processes get SIGTERM, the master has to stop listening first."""
        gevent.spawn_later(self.exit_delay, super().handle_exit, sig, frame)

    def handle_quit(self, sig: int, frame: Any) -> None:
        """End at once, and once: Ctrl+C comes from the terminal and then from the master."""
        for number in END_SIGNALS:
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


def limit_chunks(chunks: Iterator[bytes], limit: int) -> Iterator[bytes]:
    """Pass the chunks of a body on; raise ParseException if there are more than `limit`."""
    for count, chunk in enumerate(chunks, 1):
        if count > limit:
            raise errors.ParseException(f"it came in more than {limit} pieces")
        gevent.sleep(0)  # what stands beside a chunk's length may be long
        yield chunk


class AccessLogger(Statsd):
    """gunicorn's logger with an access log that no request can forge and that has no secrets."""

    def debug(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Log the types of exceptions only: NoMoreData has the raw head, with the token."""
        if self.loglevel <= logging.DEBUG:
            named = [type(arg).__name__ if isinstance(arg, Exception) else arg for arg in args]
            super().debug(msg, *named, **kwargs)

    def error(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Log an error; where another program listens, with what to do."""
        if msg.startswith("Connection in use"):
            msg += "; ss -ltnp shows by whom; to listen elsewhere: --bind 127.0.0.1:8001"
        super().error(msg, *args, **kwargs)

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
        line = (
            f'{environ["REMOTE_ADDR"] or "-"} - - {self.now()} "{request}" {status} '
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
