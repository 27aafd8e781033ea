"""gunicorn's gevent worker with time limits for its clients; docs/code.md says what it uses."""

import contextlib
import enum
import functools
import gc
import itertools
import math
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import gevent
from gevent.server import StreamServer
from gunicorn import util
from gunicorn.http import errors
from gunicorn.http.wsgi import Response
from gunicorn.workers.ggevent import GeventWorker

FULL = 0.9  # of worker_connections; from there on a new one takes the place of another
HEAD_LIMIT = 2**14  # bytes of a head
WIRE_LIMIT = 5 * 2**14  # bytes of a body on the wire, with its chunks
FREE_PIECES, PAUSE = 8, 0.01  # of a request that are read at once; seconds, more for each further
SEND_LIMIT = 2**15  # bytes of answers that the system keeps for a client that reads none
# What the client gets to read: what the error says may have a token of a broken header in it.
REFUSALS = {
    "ExpectationFailed": (417, "Expect must be 100-continue, or left out"),
    "LimitRequestHeaders": (431, "the head of the request is too long"),
    "LimitRequestLine": (414, "the first line of the request is too long"),
    "UnsupportedTransferCoding": (501, "Transfer-Encoding must be chunked, or left out"),
}


class State(enum.IntEnum):
    """What a connection does; those that wait for their client make room, the first ones first."""

    SENDING = 0  # an answer that the client does not take
    ENDING = 1  # its last answer was sent, and the client may read it
    WAITING = 2  # for a request to begin
    RECEIVING = 3  # makes room with those that wait: who has just come needs time to send
    WORKING = 4  # it does not wait for the client


# Seconds; the setting keepalive is that for WAITING.
LIMITS = {State.SENDING: 20.0, State.ENDING: 3.0, State.RECEIVING: 20.0, State.WORKING: math.inf}
# When the worker ends, idle clients are not waited for, but a request may be on its way.
EXIT_LIMITS = {**LIMITS, State.SENDING: 3.0, State.WAITING: 0.5, State.RECEIVING: 3.0}


class Connection:
    """A client's socket and its state; it sends each answer in one piece."""

    def __init__(self, sock: Any) -> None:
        self._sock, self._unsent = sock, b""
        # With a gettimeout() too, gunicorn would call it for each request.
        self.setblocking = sock.setblocking
        self.is_last = False  # no other request is read
        self.enter(State.WAITING)

    def enter(self, state: State) -> None:
        """Begin with a state: its time limit, and that to make room, count from now."""
        self.state, self.since = state, time.monotonic()

    def recv(self, size: int) -> Any:
        """Receive a part of a request; b"" where there is no more, or its time is up."""
        if self._unsent:  # a client may wait for a 100 Continue
            self.flush()
        is_first = self.state is State.WAITING
        if is_first:
            # recv() would not wait for what is there, nor let others come first.
            gevent.socket.wait_read(self._sock.fileno())
            self.enter(State.RECEIVING)
            self.room, self.pieces = HEAD_LIMIT, 0
        self.state = State.RECEIVING  # since the request began, also in its body
        self.pieces += 1
        if self.pieces > FREE_PIECES:  # each is searched together with those before it
            gevent.sleep(PAUSE * self.pieces)
        if self.is_last and not is_first:  # a request that is there already is read once
            return b""
        if not self.room:
            raise errors.LimitRequestHeaders("")
        data = self._sock.recv(min(size, self.room))
        self.is_last |= not data  # the client has ended
        self.room -= len(data)
        self.state = State.WORKING
        return data

    def sendall(self, data: bytes) -> None:
        """Keep a part of an answer until flush()."""
        self._unsent += data

    send = sendall

    def flush(self) -> None:
        """Send what was kept."""
        self.enter(State.SENDING)
        data, self._unsent = self._unsent, b""
        while data:  # most often once; gevent's sendall() asks for the buffer's size first
            data = data[self._sock.send(data) :]

    def cut(self) -> None:
        """Read no more, and where the client does not take an answer, send no more."""
        self.is_last = True
        is_unread = self.state in (State.SENDING, State.ENDING)
        with contextlib.suppress(OSError):
            # Not by gevent's method, which would fail a greenlet that waits for data.
            self._sock._sock.shutdown(socket.SHUT_RDWR if is_unread else socket.SHUT_RD)
        self.state = State.WORKING  # no longer for the client: the next to make room is another

    def close(self) -> None:
        """Close once the client has read its last answer (RFC 9112 section 9.6), or is cut."""
        keep, close = b"\nConnection: keep-alive", b"\nConnection: close"
        with contextlib.suppress(OSError):
            if self._unsent:  # it is the last answer, and says so
                self._unsent = self._unsent.replace(keep, close, 1)
                self.flush()
                self.enter(State.ENDING)
                self._sock.shutdown(socket.SHUT_WR)
                while self._sock.recv(2**16):
                    gevent.sleep(0)
        self._sock.close()


class Worker(GeventWorker):
    """gunicorn's gevent worker, a greenlet for each connection, with limits for what they do."""

    check_interval = 1.0  # seconds between two looks at the connections
    exit_delay = 0.5  # seconds from SIGTERM to when a worker begins to end
    limits: Mapping[State, float] = LIMITS
    exit_limits: Mapping[State, float] = EXIT_LIMITS
    is_ending = False
    timeout_ctx = contextlib.nullcontext  # no timer for each request: notify() looks at all

    def run(self) -> None:
        """Serve until told to end, then also what is left in the backlog."""
        take_shortcuts(self.cfg)
        self.connections: set[Connection] = set()
        self.limits = {**self.limits, State.WAITING: self.cfg.keepalive}
        self.servers = []
        for sock in self.sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_LIMIT)  # of what it accepts
            self.servers.append(StreamServer(sock, self.serve, spawn=self.worker_connections))
            self.servers[-1].start()
        while self.alive:
            self.notify()
            gevent.sleep(self.check_interval)
        self.limits = self.exit_limits
        for server in self.servers:
            server.stop_accepting()
            with contextlib.suppress(OSError):  # there is no descriptor left
                # Those that wait; of a flood on a socket that stays open, there are always more.
                for accepted in itertools.islice(iter(server.do_read, None), self.cfg.backlog):
                    server.do_handle(*accepted)
            server.close()
        gevent.sleep(0)  # so that each has begun
        while self.connections:  # the master ends it after graceful_timeout
            self.notify()
            gevent.sleep(self.check_interval / 10)

    def notify(self) -> None:
        """Tell the master that all is well; cut connections that are late."""
        super().notify()
        now = time.monotonic()
        for connection in list(self.connections):
            if now > connection.since + self.limits[connection.state]:
                connection.cut()
        for server in self.servers:
            # In a round of the event loop, which takes longer the more there are.
            server.max_accept = 1 + len(self.connections) // 4

    def serve(self, client: Any, addr: Any) -> None:
        """Serve a connection; if there are too many, cut the one that has waited longest."""
        if len(self.connections) + 1 >= FULL * self.worker_connections:
            idle = [each for each in self.connections if each.state is not State.WORKING]
            if idle:
                min(idle, key=lambda each: (min(each.state, State.WAITING), each.since)).cut()
        connection = Connection(client)
        self.connections.add(connection)
        try:
            self.handle(client, connection, addr)  # the listener may be closed by now
        finally:
            self.connections.discard(connection)

    def handle_request(self, listener_name: Any, req: Any, sock: Connection, addr: Any) -> None:
        """Answer a request."""
        if sock.state is State.WAITING:  # it came with the last one: nothing was received
            sock.enter(State.RECEIVING)
            gevent.sleep(0)  # others wait
            if sock.is_last:
                raise StopIteration
        sock.state, sock.room = State.WORKING, WIRE_LIMIT
        req.version = min(req.version, (1, 1))  # the answer's, too (RFC 9110 section 2.5)
        for name, value in req.headers:  # gunicorn sees a "close" only alone
            if name == "CONNECTION" and "close" in map(str.strip, value.lower().split(",")):
                req.force_close()
        super().handle_request(listener_name, req, sock, addr)
        # gunicorn's reader of a body with a length, or in chunks, has come to its end like this.
        reader = getattr(req.body, "reader", req)
        is_read = getattr(reader, "length", None) == 0 or getattr(reader, "parser", reader) is None
        if sock.is_last or self.is_ending or not is_read:
            raise StopIteration
        sock.flush()
        sock.enter(State.WAITING)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End later: where all processes get SIGTERM, the master has to stop listening first."""
        self.is_ending = True
        gevent.spawn_later(self.exit_delay, super().handle_exit, sig, frame)

    handle_quit = handle_exit  # Ctrl+C comes from the terminal, and then from the master

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Let the application refuse, with an Error, what is no request that it can be given."""
        if isinstance(exc, gevent.GreenletExit):  # the worker ends
            return
        if not isinstance(exc, errors.ParseException):  # what was answered is sent all the same
            self.log.exception("a request failed in the server")
            return
        name = type(exc).__name__
        refusal = REFUSALS.get(name, (400, "the request is not valid HTTP"))
        environ: dict[str, Any] = {"plants.refusal": refusal, "plants.reason": name}
        environ |= {"REQUEST_METHOD": "-", "PATH_INFO": "", "SERVER_PROTOCOL": ""}
        environ["REMOTE_ADDR"] = addr[0] if addr else ""
        request = SimpleNamespace(method="", version=(1, 1), should_close=lambda: True)
        answer = Response(request, client, self.cfg)
        for part in self.wsgi(environ, answer.start_response):
            answer.write(part)
        self.log.access(answer, answer, environ, timedelta())


def take_shortcuts(cfg: Any) -> None:
    """Save 15 % of the time of each request."""
    # It asks for some twenty settings, which are looked up faster as attributes.
    cfg.__dict__.update({name: each.get() for name, each in cfg.settings.items()})
    # All answers of a second have the same Date, which takes some time to make.
    date = functools.lru_cache(1)(util.http_date)
    util.http_date = lambda: date(int(time.time()))
    gc.freeze()  # what is loaded stays: the garbage collector need not look through it again
