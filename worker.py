"""gunicorn's gevent worker with a connection loop and time limits of its own.

It turns what a client sends into calls of a WSGI application (PEP 3333), and the application's
responses into bytes. It knows no route and no plant. docs/libraries.md lists what it uses of
gunicorn.
"""

import contextlib
import io
import json
import math
import socket
import sys
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import gevent.server
from gunicorn.http.body import Body, ChunkedReader
from gunicorn.http.errors import LimitRequestHeaders, ParseException, UnsupportedTransferCoding
from gunicorn.http.parser import RequestParser
from gunicorn.http.wsgi import base_environ
from gunicorn.util import hop_headers, http_date
from gunicorn.workers.ggevent import GeventWorker

EVICT_ABOVE = 0.9  # of worker_connections: from here on, a new connection may close another one
EVICT_AFTER = 1.0  # seconds that a client may keep us waiting; 0 from EVICT_ANY_ABOVE on
EVICT_ANY_ABOVE = 0.95  # of worker_connections
MAX_REQUEST_BYTES = 2**15  # of a whole request: its head, its body, and what chunks add
SEND_BUFFER = 2**15  # bytes of responses that the system keeps for a client that does not read them
# Seconds for a request to arrive, and for a client to take some of a response that is being sent.
REQUEST_TIMEOUT = 20.0
# Seconds for a client to read its last response, and for each wait for a client during a shutdown.
LINGER_TIMEOUT = 3.0
# Status and message for the errors of gunicorn's parser that do not get the plain 400, by name.
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
        self.base_environ = {
            **base_environ(self.cfg),
            "wsgi.errors": sys.stderr,
            # Greenlets call the application at the same time, as threads would.
            "wsgi.multithread": True,
            "SCRIPT_NAME": "",
            # PEP 3333 requires the name and the port of a server. Any will do: Host has those that
            # the client asked for.
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "80",
        }
        for sock in self.sockets:
            # The sockets of clients inherit this. The default is some 2 MB for each client.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            # If worker_connections is less than ten, EVICT_ABOVE leaves no slot free. So accept
            # one more, which then replaces another one.
            server = gevent.server.StreamServer(sock, self.serve, spawn=self.worker_connections + 1)
            server.start()
            self.servers.append(server)
        while self.alive:
            self.notify()
            gevent.sleep(self.check_interval)
        self.stop()

    def stop(self) -> None:
        """Stop accepting, and wait until no connection is left, or graceful_timeout is almost over.

        gunicorn's master starts its clock up to a check_interval earlier, and kills workers when it
        runs out. Connections that are left are closed cleanly before that.
        """
        deadline = time.monotonic() + self.cfg.graceful_timeout - 2 * self.check_interval
        for server in self.servers:
            # Accept what is queued first. Closing the listener resets connections that nobody has
            # accepted yet, and their requests may have arrived.
            with contextlib.suppress(OSError):
                while not server.full() and (client := server.do_read()):
                    server.do_handle(*client)
            server.close()
        gevent.sleep(0)  # Let serve() begin with connections that were just accepted.
        # After SIGTERM, gunicorn's master kills a worker that takes too long. After max_requests
        # nobody does: a response without an end would keep the worker from being replaced.
        while self.connections and time.monotonic() < deadline:
            self.notify()
            gevent.sleep(self.check_interval / 10)
        for server in self.servers:
            server.stop(timeout=0)  # Ends the greenlets. Each closes its blocks and its connection.

    def notify(self) -> None:
        """Tell the master that the worker is alive, and abort the connections that are late."""
        super().notify()
        self.date = http_date()  # of all responses until the next call, to save CPU
        longest = math.inf if self.alive else LINGER_TIMEOUT
        for connection in list(self.connections):
            if time.monotonic() > connection.waiting_since + min(connection.limit, longest):
                connection.abort()
        # In each round of the event loop, accept few connections, so that other workers get some;
        # accept more when there are many clients, since a round takes longer then.
        for server in self.servers:
            server.max_accept = 1 + len(self.connections) // 4

    def serve(self, sock: Any, address: Any) -> None:
        """Answer the requests of a connection, one after the other, and close it."""
        self.make_room()
        # --keep-alive 0 means one request for each connection. The client still gets time for it.
        connection = Connection(sock, self.cfg.keepalive or REQUEST_TIMEOUT)
        self.connections.add(connection)
        parser = RequestParser(self.cfg, connection, address)
        refused = None
        try:
            try:
                for request in parser:
                    if not self.respond(request, connection, address):
                        break
                    # The parser may have received the next request, or a part of it, already.
                    early = parser.unreader.buf.getvalue()
                    connection.expect_request(self.cfg.keepalive, early)
                    if early:
                        gevent.sleep(0)  # Serve other connections first.
            except ParseException as error:
                refused = error
            # Not within `except`: the traceback of an application that fails would show the error,
            # which may quote a token.
            if refused:
                self.refuse(refused, connection, address)
        except OSError:  # The client is gone, or was aborted.
            pass
        except Exception:
            self.log.exception("a connection failed, which is a bug")
        finally:
            connection.close()
            self.connections.discard(connection)

    def make_room(self) -> None:
        """If there are too many connections, close the one that we have waited for longest.

        Until the worker is almost full, each client gets a second to send its request. Without that
        second, clients that have just connected would be closed while most requests wait for the
        storage.
        """
        if len(self.connections) < EVICT_ABOVE * self.worker_connections:
            return
        # An aborted connection takes some rounds of the event loop to end. So pick one that is not
        # aborted yet.
        oldest = min(self.connections, key=lambda each: (each.is_aborted, each.waiting_since))
        # Evict before the last slot is taken: an aborted connection keeps its slot until it ends.
        is_full = len(self.connections) >= EVICT_ANY_ABOVE * self.worker_connections
        if is_full or time.monotonic() > oldest.waiting_since + EVICT_AFTER:
            oldest.abort()

    def respond(self, request: Any, connection: "Connection", address: Any) -> bool:
        """Answer a request. Return whether another one may follow on the connection."""
        self.nr += 1
        if self.nr >= self.max_requests:
            self.alive = False
        environ = make_environ(self.base_environ, request, address)
        if environ.get("HTTP_TRANSFER_ENCODING", "chunked").lower() != "chunked":
            # gunicorn accepts `gzip, chunked` and the like, but does not decode the gzip.
            raise UnsupportedTransferCoding("")
        is_http_1_1 = request.version > (1, 0)
        # The parser has refused every Expect but 100-continue, which HTTP/1.0 does not have.
        connection.expects_continue = "HTTP_EXPECT" in environ and is_http_1_1
        # gunicorn overlooks a `close` among other options (RFC 9112 section 9.6). Closing the
        # connection for an option that only contains this word does no harm.
        is_last = request.should_close() or "close" in environ.get("HTTP_CONNECTION", "").lower()
        response = Response(
            self,
            connection,
            is_head=request.method == "HEAD",
            may_be_chunked=is_http_1_1,
            # Not environ["wsgi.input"], which the application may replace. Bottle and WebOb do.
            request_body=None if is_last else request.body,
        )
        return self.call_application(environ, response, connection)

    def refuse(self, error: ParseException, connection: "Connection", address: Any) -> None:
        """Answer what gunicorn's parser has refused. It is the last request of the connection.

        Our application does that itself, so that the response and the log are as for any other
        request. Any other application would take this environ for a request.
        """
        name = type(error).__name__
        status, message = REFUSALS.get(name, (400, "the request is not valid HTTP"))
        # The parser may have stopped before it knew the method.
        is_head = connection.first_bytes.lstrip(b"\r\n").startswith(b"HEAD ")
        response = Response(self, connection, is_head=is_head)
        if not getattr(self.wsgi, "answers_refusals", False):
            response.send_error(status, message)
            return
        environ = {
            **self.base_environ,
            "REQUEST_METHOD": "-",
            "PATH_INFO": "",
            "QUERY_STRING": "",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "REMOTE_ADDR": address and address[0],
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(),
            "plants.refusal": (status, message),
            "plants.log": {"reason": name},
        }
        self.call_application(environ, response, connection)

    def call_application(
        self, environ: Any, response: "Response", connection: "Connection"
    ) -> bool:
        """Call the application (PEP 3333). Return whether another request may follow.

        Raises OSError if the client is gone, or was aborted.
        """
        try:
            blocks = self.wsgi(environ, response.start)
            try:
                response.send(blocks)
            finally:
                if hasattr(blocks, "close"):
                    blocks.close()
        except (Exception, SystemExit, gevent.Timeout) as error:
            if isinstance(error, OSError) and (connection.is_sending or connection.is_aborted):
                raise
            self.log.exception("the application failed")
            response.fail()
        return response.goes_on


class Response:
    """The response to one request: the head and the blocks of a PEP 3333 application.

    The application calls start() and write(), the worker calls everything else.
    """

    def __init__(
        self,
        worker: Worker,
        connection: "Connection",
        is_head: bool,
        may_be_chunked: bool = False,
        request_body: Body | None = None,
    ) -> None:
        """Prepare the response. If `request_body` is None, the connection ends afterwards."""
        self._worker = worker
        self._connection = connection
        self._is_head = is_head
        self._may_be_chunked = may_be_chunked
        self._request_body = request_body
        self._status_line = b""  # This and _lines are the application's part of the head.
        self._lines = b""
        self._is_begun = False  # The head has been sent.
        self._is_chunked = False
        self._length: int | None = None  # of the whole body, if it is one block
        self._bytes_left: int | None = None  # of the body, if there is a Content-Length
        self.goes_on = False  # Another request may follow. Decided when the head is sent.

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        """Take status and headers from the application: this is PEP 3333's start_response().

        Returns write(). With `exc_info`, the response of an error replaces the previous one. If a
        part of that has been sent already, this raises the error again.
        """
        if exc_info and self._is_begun:
            raise exc_info[1].with_traceback(exc_info[2])
        if self._status_line and not exc_info:
            raise RuntimeError("start_response() was called a second time, without exc_info")
        values = {name.lower(): value for name, value in headers}
        if not hop_headers.isdisjoint(values):
            # Only the server sets headers about the connection (PEP 3333, "Other HTTP Features").
            headers = [each for each in headers if each[0].lower() not in hop_headers]
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        head = status + lines
        if head.count("\r") + head.count("\n") != 2 * len(headers):
            raise ValueError("the status or a header contains a line break")
        length = values.get("content-length")
        self._bytes_left = None if length is None else int(length)
        self._status_line = f"HTTP/1.1 {status}\r\n".encode("latin-1")
        self._lines = lines.encode("latin-1")
        return self.write

    def send(self, blocks: Iterable[bytes]) -> None:
        """Send the body: each block before the next one is asked for.

        Raises whatever the application raises, and ValueError if it sends too little.
        """
        if isinstance(blocks, (list, tuple)) and len(blocks) <= 1 and not self._is_begun:
            self._length = sum(map(len, blocks))
        for block in blocks:
            self.write(block)
            if self._is_begun and self._bytes_left == 0:
                break  # Nothing more can be sent.
        if not self._is_begun:
            self._length = 0
            self._connection.send(self._make_head())
        if self._bytes_left:
            raise ValueError(f"the body is {self._bytes_left} bytes shorter than Content-Length")
        if self._is_chunked:
            self._connection.send(b"0\r\n\r\n")

    def write(self, block: bytes) -> None:
        """Send a block of the body, and the head before the first one.

        What exceeds the Content-Length is dropped.
        """
        if not isinstance(block, bytes):
            raise TypeError(f"a block of a body must be bytes, not {type(block).__name__}")
        if not block:  # The head waits for the first byte. Until then, an error can be a 500.
            return
        pieces: list[bytes | memoryview] = []
        if not self._is_begun:
            pieces.append(self._make_head())
        else:
            # Sending to a fast client seldom has to wait, so let other connections have a turn.
            gevent.sleep(0)
            # A stream may last for ever, so a new client may replace it.
            if self._connection.is_aborted:
                raise TimeoutError("the connection was aborted")
        if self._is_chunked:
            pieces += [b"%x\r\n" % len(block), block, b"\r\n"]
        elif self._bytes_left is None:
            pieces.append(block)
        elif self._bytes_left >= len(block):
            self._bytes_left -= len(block)
            pieces.append(block)
        else:
            pieces.append(memoryview(block)[: self._bytes_left])
            self._bytes_left = 0
        self._connection.send(*pieces)

    def _make_head(self) -> bytes:
        """Return the head, and decide where the body and the connection end."""
        if not self._status_line:
            raise RuntimeError("the application has not called start_response()")
        self._is_begun = True
        framing = ""
        ends_with_connection = False
        if self._is_head or self._status_line[9:12] in (b"204", b"304"):
            # These responses have no body, whatever Content-Length says (RFC 9110, 6.4.1).
            self._bytes_left = 0
        elif self._bytes_left is not None:
            pass  # The application has sent Content-Length.
        elif self._length is not None:
            self._bytes_left = self._length
            framing = f"Content-Length: {self._length}\r\n"
        elif self._may_be_chunked:
            self._is_chunked = True
            framing = "Transfer-Encoding: chunked\r\n"
        else:
            # HTTP/1.0 has no chunks. Its client can't tell if such a body is complete.
            ends_with_connection = True
        # Decide only now: the application may have read the body of the request by now, and the
        # worker may have been told to stop.
        self.goes_on = not (
            ends_with_connection
            or self._connection.is_done
            or not self._worker.alive
            or not self._worker.cfg.keepalive
            # The next request begins where the body ends, so the body must have been read.
            or self._request_body is None
            or is_unread(self._request_body)
        )
        option = "keep-alive" if self.goes_on else "close"
        ours = f"Date: {self._worker.date}\r\nConnection: {option}\r\n{framing}"
        return b"%b%b%b\r\n" % (self._status_line, ours.encode(), self._lines)

    def fail(self) -> None:
        """Send an error, or, if a part of a response has been sent, let the connection end."""
        if self._is_begun:
            self.goes_on = False
        else:
            self.send_error(500, "the service failed")

    def send_error(self, status: int, message: str) -> None:
        """Send an error of the worker's own, in the form of schemas/error.json."""
        self._status_line = b""  # It replaces what the application has started.
        self.start(f"{status} {HTTPStatus(status).phrase}", [("Content-Type", "application/json")])
        self.send([json.dumps({"error": status, "message": message}).encode() + b"\n"])


class Connection:
    """A client's socket, with one clock: since when we wait for the client, and for how long.

    gunicorn's parser calls recv(), Response calls send(), the worker calls everything else.
    """

    def __init__(self, sock: Any, limit: float) -> None:
        """Give the client `limit` seconds until its first request begins."""
        self._sock = sock
        # gevent's wait_read() would make a new watcher each time, which takes longer.
        self._hub = gevent.get_hub()
        self._arrival = self._hub.loop.io(sock.fileno(), 1)  # 1: until there is something to read
        self.is_done = False  # Nothing more is read: the client closed its side, or was aborted.
        self.is_aborted = False
        self.is_sending = False  # It remains true if sending has failed.
        self.expects_continue = False  # The client waits for a 100 before it sends the body.
        self.expect_request(limit)

    def expect_request(self, limit: float, early: bytes = b"") -> None:
        """Give the client `limit` seconds until its next request begins.

        `early` is the part of it that arrived together with the previous request.
        """
        self.first_bytes = early
        self._bytes_left = MAX_REQUEST_BYTES - len(early)
        self._has_begun = False
        self._wait_for_client(limit)
        if early:
            self._begin()

    def recv(self, size: int) -> Any:
        """Receive at most `size` bytes of a request, or b"" if the client has closed its side.

        Raises LimitRequestHeaders if the request is too long, and OSError if the client is gone or
        the connection was aborted.
        """
        if self.expects_continue:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._bytes_left:
            raise LimitRequestHeaders("")
        if self._has_begun:  # All parts of a request share one limit, counted from its first byte.
            self._wait_for_client(REQUEST_TIMEOUT)
            self.waiting_since = self._began
        # Wait for a turn even if data has arrived, or a fast client would be served before all
        # others.
        self._hub.wait(self._arrival)
        # Serve the first bytes of a request even if the connection was just aborted: they had
        # arrived before that. If it is aborted later in the request, give up.
        if not self._has_begun:
            self._begin()
        elif self.is_done:
            raise TimeoutError("the connection was aborted")
        self.waiting_since = math.inf
        data = self._sock.recv(min(size, self._bytes_left))
        self._bytes_left -= len(data)
        if len(self.first_bytes) < 8:
            self.first_bytes += data
        if not data:
            self.is_done = True
        return data

    def send(self, *pieces: bytes | memoryview) -> None:
        """Send all pieces, in one system call if the system takes them.

        Raises OSError if the client is gone, or does not take some of them in time.
        """
        self.expects_continue = False
        self.is_sending = True
        self._wait_for_client(REQUEST_TIMEOUT)
        # gevent's sendall() asks for the size of the socket's buffer each time, which takes 4 % of
        # the time of a request.
        sent = self._sock.sendmsg(pieces)
        if sent < sum(map(len, pieces)):
            self._send_rest(pieces, sent)
        self.is_sending = False
        self.waiting_since = math.inf

    def _send_rest(self, pieces: Iterable[bytes | memoryview], sent: int) -> None:
        """Send the pieces without their first `sent` bytes."""
        for piece in pieces:
            rest = memoryview(piece)[sent:]
            sent = max(0, sent - len(piece))
            while rest:
                self._wait_for_client(REQUEST_TIMEOUT)  # It has taken some, so it gets more time.
                # Send no more at once than the system's buffer holds. On loopback, the system would
                # send a part of a packet and wait 40 ms for its acknowledgement: 12 s for 20 MB.
                rest = rest[self._sock.send(rest[:SEND_BUFFER]) :]

    def abort(self) -> None:
        """Stop reading. If the client does not take a response, stop sending, too.

        A request that has already arrived is still answered.
        """
        self.is_done = True
        self.is_aborted = True
        self.waiting_since = math.inf
        with contextlib.suppress(OSError):
            # Shut down the system's socket, which wakes a greenlet that waits for data: it receives
            # b"". The shutdown() of gevent's socket would raise an exception in that greenlet.
            self._sock._sock.shutdown(socket.SHUT_RDWR if self.is_sending else socket.SHUT_RD)

    def close(self) -> None:
        """Close the connection once the client has read its last response, or had time to.

        Closing while the client still sends would destroy the response (RFC 9112 section 9.6), so
        read and drop what it sends until it ends. If the connection was aborted, drop only what has
        arrived: its slot is needed.
        """
        with contextlib.suppress(OSError):
            if not self.is_sending:  # send() did not fail, so the client may still read a response.
                self._sock.shutdown(socket.SHUT_WR)
                if not self.is_aborted:
                    self._wait_for_client(LINGER_TIMEOUT)
                # After abort(), waiting_since is infinite. Look at it, or a client that goes on
                # sending would never be disconnected.
                while self._sock.recv(2**16) and self.waiting_since < math.inf:
                    gevent.sleep(0)  # A fast client would otherwise be served before all others.
        self._arrival.close()
        self._sock.close()

    def _begin(self) -> None:
        """Note that a request begins. From now on, the client waits for us."""
        self._has_begun = True
        self._began = time.monotonic()
        self.waiting_since = math.inf

    def _wait_for_client(self, limit: float) -> None:
        """Start the clock: from now on, we wait for the client, for `limit` seconds at most."""
        self.waiting_since = time.monotonic()
        self.limit = limit


def make_environ(base: dict[str, Any], request: Any, address: Any) -> dict[str, Any]:
    """Return the environ of a request (PEP 3333): `base`, and what the request adds to it."""
    environ = {
        **base,
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


def is_unread(body: Body) -> bool:
    """Tell if gunicorn's body, whose reader is one of two kinds, has more to read, or is broken."""
    reader = body.reader
    has_more = reader.parser if isinstance(reader, ChunkedReader) else reader.length
    return bool(body.failed or has_more)
