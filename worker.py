"""gunicorn's gevent worker with time limits for its clients; docs/code.md says what it uses."""

import contextlib
import errno
import functools
import math
import socket
import time
from types import SimpleNamespace
from typing import Any

import gevent
from gevent.server import StreamServer
from gunicorn import util
from gunicorn.http import errors, wsgi
from gunicorn.http.body import ChunkedReader
from gunicorn.workers.ggevent import GeventWorker

FULL = 0.9  # of worker_connections; then a new one takes the place of another
ROOM = 2**15  # bytes of a request, with its head and its chunks
LIMIT = 20.0  # seconds for a request to arrive, and for a client to take the answer
LAST_LIMIT = 3.0  # seconds to read the last answer; for all that a client does as the worker ends
# For clients; what the error itself says may have a broken header's token in it.
REFUSALS = {
    "ExpectationFailed": (417, "Expect must be 100-continue, or left out"),
    "LimitRequestHeaders": (431, "the head of the request is too long"),
    "LimitRequestLine": (414, "the first line of the request is too long"),
    "UnsupportedTransferCoding": (501, "Transfer-Encoding must be chunked, or left out"),
}


class Worker(GeventWorker):
    """A greenlet for each client, with limits for what they do."""

    check_interval = 1.0  # seconds between two looks at the clients
    timeout_ctx = contextlib.nullcontext  # no timer for each request: notify() looks at all
    handle_quit = GeventWorker.handle_exit  # Ctrl+C finishes what has begun, too

    def run(self) -> None:
        """Serve until told to end, and then until no client is left."""
        take_shortcuts(self.cfg)
        self.log.debug = lambda *_, **__: None  # its lines have heads, with tokens
        self.clients: set[Client] = set()
        self.servers = []
        for listener in self.sockets:
            # Clients' sockets inherit it: bytes of answers kept for one that reads none.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)
            server = StreamServer(listener, self.serve, spawn=self.worker_connections)
            server.start()
            self.servers.append(server)
        while self.alive:
            self.notify()
            gevent.sleep(self.check_interval)
        for server in self.servers:
            server.close()
        gevent.sleep(0)  # who was just accepted becomes a client
        while self.clients:  # the master ends it after graceful_timeout
            self.notify()
            gevent.sleep(self.check_interval / 10)

    def notify(self) -> None:
        """Tell the master that all is well; cut clients that are late."""
        super().notify()
        now = time.monotonic()
        most = math.inf if self.alive else LAST_LIMIT
        for client in list(self.clients):
            if now > client.since + min(client.limit, most):
                client.cut()
        for server in self.servers:  # with more clients, a round of the loop takes longer
            server.max_accept = 1 + len(self.clients) // 4  # in each

    def serve(self, sock: Any, addr: Any) -> None:
        """Serve a client; if there are too many, cut the one that we have waited for longest."""
        if len(self.clients) >= FULL * self.worker_connections:
            min(self.clients, key=lambda client: client.since).cut()
        client = Client(sock, self.cfg.keepalive)
        self.clients.add(client)
        try:
            self.handle(sock, client, addr)  # of the listener, only the name is used
        finally:
            self.clients.discard(client)

    def handle_request(self, listener_name: Any, req: Any, client: "Client", addr: Any) -> None:
        """Answer a request. Raises StopIteration after the last one of a client."""
        if not client.has_begun:  # it came together with the one before: others come first
            client.begin()
            gevent.sleep(0)
        response, environ = wsgi.create(req, client, addr, listener_name, self.cfg)
        parts = self.wsgi(environ, response.start_response)
        if client.is_done or not self.alive or not is_read(req.body.reader):
            response.force_close()  # which the answer says
        for part in parts:
            response.write(part)
        response.close()
        if response.should_close():
            raise StopIteration
        client.flush()
        client.expect_request(self.cfg.keepalive)

    def handle_error(self, req: Any, client: "Client", addr: Any, exc: BaseException) -> None:
        """Let the application answer what gunicorn's parser refuses."""
        if not isinstance(exc, errors.ParseException):  # a bug
            self.log.exception("a request failed in the server")
            return
        refusal = REFUSALS.get(type(exc).__name__, (400, "the request is not valid HTTP"))
        environ = {"plants.refusal": refusal, "plants.reason": type(exc).__name__}
        environ |= {"REQUEST_METHOD": "-", "PATH_INFO": "", "REMOTE_ADDR": addr[0] if addr else ""}
        request = SimpleNamespace(method="", version=(1, 1), should_close=lambda: True)
        response = wsgi.Response(request, client, self.cfg)
        for part in self.wsgi(environ, response.start_response):
            response.write(part)


class Client:
    """A client's socket, and the clock that says for how long we wait for it."""

    def __init__(self, sock: Any, limit: float) -> None:
        self._sock, self._unsent = sock, b""
        # gunicorn needs no more of a socket; a gettimeout() would cost each request.
        self.setblocking = sock.setblocking
        self.is_sending = False
        self.is_done = False  # nothing more is read: it has ended, or was cut
        self.expect_request(limit)

    def expect_request(self, limit: float) -> None:
        """Wait so many seconds for a request to begin."""
        self.has_begun, self._room = False, ROOM
        self.since, self.limit = time.monotonic(), limit

    def begin(self) -> None:
        """Start with a request: it is our turn, and the client is not waited for."""
        self.has_begun, self._began, self.since = True, time.monotonic(), math.inf

    def recv(self, size: int) -> Any:
        """Receive a part of a request; b"" where the client has ended. Raises if it is too long."""
        self.flush()  # it may wait for a 100 Continue
        if not self._room:
            raise errors.LimitRequestHeaders("")
        if self.has_begun:  # what follows the first bytes does not prolong the time
            self.since, self.limit = self._began, LIMIT
        gevent.socket.wait_read(self._sock.fileno())  # also where data is there: others come first
        if not self.has_begun:  # if it was cut, what it sent before is answered
            self.begin()
        elif self.is_done:
            raise ConnectionResetError(errno.ECONNRESET, "cut")  # a 408; gunicorn logs nothing
        self.since = math.inf
        data = self._sock.recv(min(size, self._room))
        self._room -= len(data)
        self.is_done = self.is_done or not data
        return data

    def sendall(self, data: bytes) -> None:
        """Keep a part of an answer until flush(): one system call is faster."""
        self._unsent += data

    send = sendall  # for a 100 Continue

    def flush(self) -> None:
        """Send what was kept."""
        if self._unsent:
            data, self._unsent = self._unsent, b""
            self.since, self.limit, self.is_sending = time.monotonic(), LIMIT, True
            while data:  # sendall() takes longer
                data = data[self._sock.send(data) :]
            self.is_sending = False

    def cut(self) -> None:
        """Read no more; where the client takes no answer, send no more, either."""
        self.is_done, self.since = True, math.inf
        with contextlib.suppress(OSError):
            # Not by gevent's method, which would fail a greenlet that waits for data.
            self._sock._sock.shutdown(socket.SHUT_RDWR if self.is_sending else socket.SHUT_RD)

    def close(self) -> None:
        """Close once the client has read its last answer (RFC 9112 section 9.6), or is cut."""
        with contextlib.suppress(OSError):
            if self._unsent:
                self.flush()
                self.since, self.limit = time.monotonic(), LAST_LIMIT
                self._sock.shutdown(socket.SHUT_WR)
                while self._sock.recv(2**16):
                    gevent.sleep(0)
        self._sock.close()


def is_read(reader: Any) -> bool:
    """Tell if gunicorn's reader, one of two kinds, has read a body to its end."""
    if isinstance(reader, ChunkedReader):
        return reader.parser is None
    return bool(reader.length == 0)


def take_shortcuts(cfg: Any) -> None:
    """Save 7 % of the CPU of each request: settings are attributes, a second has one Date."""
    cfg.__dict__.update({name: each.get() for name, each in cfg.settings.items()})
    date = functools.lru_cache(1)(util.http_date)
    util.http_date = lambda: date(int(time.time()))
