"""gunicorn's gevent worker with a connection loop and time limits of its own.

It turns what a client sends into calls of a WSGI application (PEP 3333), and the application's
responses into bytes. It knows no route and no plant. docs/code.md lists what it uses of gunicorn.
"""

import contextlib
import math
import socket
import sys
import time
from typing import Any
from urllib.parse import unquote

import gevent.server
from gunicorn.http.body import ChunkedReader
from gunicorn.http.errors import LimitRequestHeaders, ParseException
from gunicorn.http.parser import RequestParser
from gunicorn.http.wsgi import base_environ
from gunicorn.util import http_date
from gunicorn.workers.ggevent import GeventWorker

EVICT_ABOVE = 0.9  # of worker_connections: from here on, a new connection closes another one
MAX_REQUEST_BYTES = 2**15  # of a whole request: its head, its body, and what chunks add
REQUEST_TIMEOUT = 20.0  # seconds for a request to arrive, and for a client to take the response
# Seconds for a client to read its last response, and for each wait for a client during a shutdown.
LINGER_TIMEOUT = 3.0
# Status and message for the errors of gunicorn's parser that get more than a plain 400, by name.
# The error's own text is neither sent nor logged: it may quote a malformed header that contains a
# token.
REFUSALS = {
    "ExpectationFailed": (417, "Expect must be 100-continue or left out"),
    "LimitRequestHeaders": (431, "the head of the request is too long, or has too many fields"),
    "LimitRequestLine": (414, "the first line of the request is too long"),
    "UnsupportedTransferCoding": (501, "Transfer-Encoding must be chunked or left out"),
}


class Worker(GeventWorker):
    """Serves each connection in a greenlet, and disconnects clients that keep it waiting."""

    check_interval = 1.0  # seconds between two looks at the clocks of all connections
    # gunicorn would end the process at Ctrl+C. Finish the requests that have begun, as at SIGTERM.
    handle_quit = GeventWorker.handle_exit

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connections: set[Connection] = set()
        self.servers: list[gevent.server.StreamServer] = []

    def run(self) -> None:
        """Serve until the worker is told to end, and then until no connection is left."""
        # gunicorn looks up a setting in a dictionary of objects at each use. Make the settings
        # plain attributes, which saves 7 % of the CPU of a request.
        self.cfg.__dict__.update({name: each.get() for name, each in self.cfg.settings.items()})
        # Greenlets call the application at the same time, as threads would. PEP 3333 requires the
        # name and the port of a server. Any will do: Host has those that the client asked for.
        own = {"wsgi.errors": sys.stderr, "wsgi.multithread": True}
        own |= {"SCRIPT_NAME": "", "SERVER_NAME": "localhost", "SERVER_PORT": "80"}
        self.base_environ = base_environ(self.cfg) | own
        for sock in self.sockets:
            # Limit the bytes of responses that the system keeps for a client that does not read
            # them. The sockets of clients inherit this. The default is some 2 MB for each client.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)
            # If worker_connections is less than ten, EVICT_ABOVE leaves no place free. So accept
            # one more, which then replaces another one.
            server = gevent.server.StreamServer(sock, self.serve, spawn=self.worker_connections + 1)
            server.start()
            self.servers.append(server)
        while self.alive:
            self.notify()
            gevent.sleep(self.check_interval)
        for server in self.servers:
            server.close()
        gevent.sleep(0)  # Let serve() begin with connections that were just accepted.
        while self.connections:  # gunicorn's master kills the worker after graceful_timeout.
            self.notify()
            gevent.sleep(self.check_interval / 10)

    def notify(self) -> None:
        """Tell the master that the worker is alive, and abort the connections that are late."""
        super().notify()
        self.date = http_date()  # of all responses until the next call, which saves CPU
        longest = math.inf if self.alive else LINGER_TIMEOUT
        for connection in list(self.connections):
            if time.monotonic() > connection.waiting_since + min(connection.limit, longest):
                connection.abort()
        # In each round of the event loop, accept few connections, so that other workers get some;
        # accept more when there are many clients, since a round takes longer then.
        for server in self.servers:
            server.max_accept = 1 + len(self.connections) // 4

    def serve(self, sock: Any, address: Any) -> None:
        """Answer the requests of a connection, one after the other, and close it.

        If there are too many connections, close the one that we have waited for longest.
        """
        if len(self.connections) >= EVICT_ABOVE * self.worker_connections:
            min(self.connections, key=lambda each: each.waiting_since).abort()
        # --keep-alive 0 means one request for each connection. The client still gets time for it.
        connection = Connection(sock, self.cfg.keepalive or REQUEST_TIMEOUT)
        self.connections.add(connection)
        try:
            try:
                for request in RequestParser(self.cfg, connection, address):
                    if not self.respond(request, connection, address):
                        break
                    connection.expect_request(self.cfg.keepalive)
            except ParseException as error:
                self.refuse(error, connection, address)
        except OSError:  # The client is gone, or was aborted.
            pass
        except Exception:
            self.log.exception("a connection failed, which is a bug")
        finally:
            connection.close()
            self.connections.discard(connection)

    def respond(self, request: Any, connection: "Connection", address: Any) -> bool:
        """Answer a request. Return whether another one may follow on the connection."""
        if not connection.has_begun:
            # This request arrived together with the one before it. Serve other connections first.
            connection.begin()
            gevent.sleep(0)
        self.nr += 1
        self.alive &= self.nr < self.max_requests
        environ = self.base_environ | make_environ(request, address)
        # The parser has refused every Expect but 100-continue, which HTTP/1.0 does not have.
        connection.expects_continue = "HTTP_EXPECT" in environ and request.version > (1, 0)
        # gunicorn overlooks a `close` among other options (RFC 9112 section 9.6). Closing the
        # connection for an option that only contains this word does no harm.
        is_last = request.should_close() or "close" in environ.get("HTTP_CONNECTION", "").lower()
        return self.call_application(environ, connection, is_last)

    def refuse(self, error: ParseException, connection: "Connection", address: Any) -> None:
        """Let the application answer what gunicorn's parser has refused. It is the last request."""
        name = type(error).__name__
        refusal = REFUSALS.get(name, (400, "the request is not valid HTTP"))
        environ = {"REQUEST_METHOD": "-", "PATH_INFO": "", "REMOTE_ADDR": address and address[0]}
        environ |= {"plants.refusal": refusal, "plants.log": {"reason": name}}
        self.call_application(self.base_environ | environ, connection, is_last=True)

    def call_application(self, environ: Any, connection: "Connection", is_last: bool) -> bool:
        """Call the application (PEP 3333), and send its response in one piece.

        `is_last` says that the connection ends after this request. Return whether it goes on.
        """
        started: list[Any] = []
        parts: list[bytes] = []

        def start_response(*arguments: Any) -> Any:
            # Nothing has been sent yet, so the response of an error can replace the one before.
            started[:] = arguments
            return parts.append

        result = self.wsgi(environ, start_response)
        with contextlib.closing(result) if hasattr(result, "close") else contextlib.nullcontext():
            parts.extend(result)
        status, headers, *_ = started
        is_last = is_last or connection.is_done or not self.alive or not self.cfg.keepalive
        # The next request begins where the body ends, so the body must have been read.
        goes_on = not is_last and not is_unread(environ["wsgi.input"].reader)
        ours = [("Date", self.date), ("Connection", "keep-alive" if goes_on else "close")]
        body = b"".join(parts)
        if environ["REQUEST_METHOD"] == "HEAD" or status[:3] in ("204", "304"):
            # These responses have no body, whatever Content-Length says (RFC 9110 section 6.4.1).
            body = b""
        elif all(name.lower() != "content-length" for name, _ in headers):
            ours.append(("Content-Length", str(len(body))))
        head = "".join(f"{name}: {value}\r\n" for name, value in [*ours, *headers])
        connection.send(f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + body)
        return goes_on


class Connection:
    """A client's socket, with one clock: since when, and for how long, we wait for the client.

    gunicorn's parser calls recv(), the worker calls everything else.
    """

    def __init__(self, sock: Any, limit: float) -> None:
        """Give the client `limit` seconds until its first request begins."""
        self._sock = sock
        self.is_done = False  # Nothing more is read: the client has ended, or was aborted.
        self.is_sending = False
        self.expects_continue = False  # The client waits for a 100 before it sends the body.
        self.expect_request(limit)

    def expect_request(self, limit: float) -> None:
        """Start the clock: give the client `limit` seconds until its next request begins."""
        self.has_begun, self._bytes_left = False, MAX_REQUEST_BYTES
        self.waiting_since, self.limit = time.monotonic(), limit

    def begin(self) -> None:
        """Note that a request begins. From here on it is our turn: nobody waits for the client."""
        self.has_begun, self._began, self.waiting_since = True, time.monotonic(), math.inf

    def recv(self, size: int) -> Any:
        """Receive at most `size` bytes of a request, or b"" if the client has ended.

        Raises LimitRequestHeaders if the request is too long, and OSError if the client is gone or
        the connection was aborted.
        """
        if self.expects_continue:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._bytes_left:
            raise LimitRequestHeaders("")
        if self.has_begun:  # All parts of a request share one limit, counted from its first byte.
            self.waiting_since, self.limit = self._began, REQUEST_TIMEOUT
        # Wait for a turn even if data has arrived, or a fast client would be served before all
        # others.
        gevent.socket.wait_read(self._sock.fileno())
        # Serve the first bytes of a request even if the connection was just aborted: they had
        # arrived before that. If it is aborted later in the request, give up.
        if not self.has_begun:
            self.begin()
        elif self.is_done:
            raise TimeoutError("the connection was aborted")
        self.waiting_since = math.inf
        data = self._sock.recv(min(size, self._bytes_left))
        self._bytes_left -= len(data)
        self.is_done = self.is_done or not data
        return data

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError if the client is gone or does not take it in time."""
        self.expects_continue = False
        self.waiting_since, self.limit = time.monotonic(), REQUEST_TIMEOUT
        self.is_sending = True
        # gevent's sendall() asks for the size of the socket's buffer each time, which takes 4 % of
        # the time of a request.
        while data:
            data = data[self._sock.send(data) :]
        self.is_sending = False

    def abort(self) -> None:
        """Stop reading. If the client does not take a response, stop sending, too.

        A request that has already arrived is still answered.
        """
        self.is_done, self.waiting_since = True, math.inf
        with contextlib.suppress(OSError):
            # Shut down the system's socket, which wakes a greenlet that waits for data: it receives
            # b"". The shutdown() of gevent's socket would raise an exception in that greenlet.
            self._sock._sock.shutdown(socket.SHUT_RDWR if self.is_sending else socket.SHUT_RD)

    def close(self) -> None:
        """Close the connection once the client has read its last response, or had time to.

        Closing while the client still sends would destroy the response (RFC 9112 section 9.6), so
        read and drop what it sends until it ends.
        """
        self.waiting_since, self.limit = time.monotonic(), LINGER_TIMEOUT
        with contextlib.suppress(OSError):
            if not self.is_sending:  # send() did not fail, so the client may still read a response.
                self._sock.shutdown(socket.SHUT_WR)
                # After abort(), waiting_since is infinite. Look at it, or a client that goes on
                # sending would never be disconnected.
                while self._sock.recv(2**16) and self.waiting_since < math.inf:
                    gevent.sleep(0)  # A fast client would otherwise be served before all others.
        self._sock.close()


def make_environ(request: Any, address: Any) -> dict[str, Any]:
    """Return what a request adds to the environ (PEP 3333)."""
    environ = {
        "REQUEST_METHOD": request.method,
        "PATH_INFO": unquote(request.path, "latin-1"),
        "QUERY_STRING": request.query,
        "SERVER_PROTOCOL": f"HTTP/{request.version[0]}.{request.version[1]}",
        "REMOTE_ADDR": address and address[0],  # The client of a Unix socket has no address.
        "wsgi.url_scheme": request.scheme,
        "wsgi.input": request.body,
    }
    for name, value in request.headers:  # The parser has made the names upper case.
        prefix = "" if name in ("CONTENT-TYPE", "CONTENT-LENGTH") else "HTTP_"
        key = prefix + name.replace("-", "_")
        # Repeated headers are one list with commas (RFC 9110 section 5.3).
        environ[key] = f"{environ[key]},{value}" if key in environ else value
    return environ


def is_unread(reader: Any) -> bool:
    """Tell if gunicorn's reader, which is one of two kinds, has more of a body to read."""
    return bool(reader.parser if isinstance(reader, ChunkedReader) else reader.length)
