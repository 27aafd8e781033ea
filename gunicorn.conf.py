"""How gunicorn runs the service. gunicorn reads this file by itself from where it is started.

Contains nothing of what a request means; app.py does. The settings are at the end, after the
classes that they name, which SIGHUP reads anew with them. https://gunicorn.org/reference/settings/
"""

import contextlib
import json
import logging
import math
import multiprocessing
import os
import platform
import random
import re
import resource
import secrets
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from operator import attrgetter
from typing import Any, TextIO
from urllib.parse import quote

from gunicorn import __version__, glogging
from gunicorn.arbiter import Arbiter
from gunicorn.http import errors
from gunicorn.http.body import ChunkedReader
from gunicorn.workers.gthread import TConn, ThreadWorker

PARSE_STATUS = {
    errors.LimitRequestLine: 414,
    errors.ExpectationFailed: 417,
    errors.LimitRequestHeaders: 431,
    errors.UnsupportedTransferCoding: 501,
}
REQUEST_LIMIT = 20.0  # seconds from a connection, or a later request's first byte, to its last
WHOLE_LIMIT = 2**13  # bytes of a request that is handled at once: as many as gunicorn's recv takes
GATHER_LIMIT = 0.01  # seconds that an answer waits for others to be stored with it
LINES_LIMIT = 1000  # of the log that wait for room in it; beyond that a thread waits with each
LINES_PAUSE = 0.05  # seconds until the log is looked at again if it has no room for them
MOMENT = 0.002  # seconds that the main loop waits for the storage, before it goes on without it
HOLD_LIMIT = 1.0  # seconds, or one more, that an answer is held back; then a thread waits instead
LINGER_LIMIT = 3.0  # seconds for a client that is still sending to read its answer
END_DELAY = 0.5  # seconds from SIGTERM to when a worker begins to end
SPARE_THREADS = 32  # that are kept though they have nothing to do
CHUNK_LIMIT = 2**13  # pieces that a chunked body may come in
CROWD = 0.9  # of worker_connections; where there are more, those that wait make room

KEPT: "Future[bool]" = Future()  # the result of a request after which its connection is kept
KEPT.set_result(True)
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*(?:\r\n|$)", re.IGNORECASE)
SPECIAL = re.compile(rb"\r\n(?:transfer-encoding|expect|upgrade)[ \t]*:", re.IGNORECASE)


def number_from(variable: str, default: int, limit: int) -> int:
    """The number in an environment variable; ends the start if it is none."""
    value = os.environ.get(variable, str(default))
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= limit):
        sys.exit(f"{variable} must be a number from 1 to {limit}, not {value!r}")
    return int(value)


def allow_descriptors(wanted: int) -> int:
    """Let this process have so many, if the system does; return how many of them it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    have = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (have, hard))
    return have


def check_in_child(found: "multiprocessing.SimpleQueue[tuple[str, str]]") -> None:
    """Import the application, put what it says of its storage; end the start if it can't work."""
    import app
    from storage import StartRefused

    try:
        found.put(app.check_start())
    except StartRefused as error:
        sys.exit(str(error))


def on_starting(server: Arbiter) -> None:
    """Check before there are workers: those that can't start would be started for ever.

    In a process of its own, as what this one has imported SIGHUP could not replace.
    """
    if server.cfg.preload_app:
        sys.exit("--preload is not possible, leave it out: the application's threads end at a fork")
    os.environ.pop("PLANTS_STORAGE", None)  # of a master before this one
    processes = multiprocessing.get_context("fork")
    found = processes.SimpleQueue()
    check = processes.Process(target=check_in_child, args=(found,))
    check.start()
    check.join()
    if check.exitcode:
        sys.exit(1)
    os.environ["PLANTS_STORAGE"], server.storage = found.get()


def when_ready(server: Arbiter) -> None:
    """Say what runs where, and how to store a plant if only this process knows the token."""
    software = f"Python {platform.python_version()}, gunicorn {__version__}, {server.storage}"
    size = f"{server.cfg.workers} workers of up to {server.cfg.worker_connections} connections"
    addresses = ", ".join(map(str, server.LISTENERS))
    server.log.info("plants: %s; %s at %s", software, size, addresses)
    if token_is_new:
        where = re.sub("^unix:(.*)", r"--unix-socket \1 http://localhost", str(server.LISTENERS[0]))
        print(
            "PLANTS_TOKENS is not set, so a token was made for this run. To store a plant:\n\n"
            f"curl {where}/plants -H 'Content-Type: application/json' \\\n"
            f"  -H 'Authorization: Bearer {os.environ['PLANTS_TOKENS']}' \\\n"
            """  -d '{"id": 7, "name": "Monstera", "tag": "indoor"}'\n""",
            file=sys.stderr,
        )


def pre_exec(server: Arbiter) -> None:
    """Keep the token through SIGUSR2, which starts anew with the environment from the start."""
    server.cfg.env_orig["PLANTS_TOKENS"] = os.environ["PLANTS_TOKENS"]


def pre_request(worker: ThreadWorker, request: Any) -> None:
    """Refuse a chunked body in more than CHUNK_LIMIT pieces: each costs time, read or not."""
    reader = request.body.reader
    if isinstance(reader, ChunkedReader):
        reader.parser = limited(reader.parser)


def limited(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Pass `chunks` on; raise ParseException, which ends the connection, if there are too many."""
    for count, chunk in enumerate(chunks, 1):
        if count > CHUNK_LIMIT:
            raise errors.ParseException(f"it came in more than {CHUNK_LIMIT} pieces")
        yield chunk


def take_request(conn: TConn) -> bytes:
    """Take what has come on a connection; return it if it is one POST, nothing less, nothing more.

    In either case gunicorn's parser has it, to read it first. What has Transfer-Encoding, Expect
    or Upgrade is never whole; what gunicorn refuses may be.
    """
    if conn.cfg.is_ssl or conn.cfg.http2_cleartext != "off":  # gunicorn has to see what comes first
        return b""
    if conn.initialized and conn.parser.unreader.buf.getvalue():  # a part has come before
        return b""
    try:
        request = bytes(conn.sock.recv(WHOLE_LIMIT, socket.MSG_DONTWAIT))
    except OSError:  # nothing has come
        return b""
    if not request:  # and nothing will
        return b""
    if not conn.initialized:
        conn.init()
        conn.sock.setblocking(False)
    conn.parser.unreader.unread(request)
    head, end, body = request.partition(b"\r\n\r\n")
    length = LENGTH.search(head)
    if not (head.startswith(b"POST ") and end and length) or SPECIAL.search(head):
        return b""
    return request if len(body) == int(length[1]) else b""


def forget_request(conn: TConn) -> None:
    """Let the parser begin anew after a request that came alone: what it has left is of that."""
    conn.parser.unreader.take_buffered()
    conn.parser.mesg = None


class Answer:
    """Stands in for a connection's socket, and keeps what is to be sent on it and logged.

    The application may ask for that to wait (hold_back), so that it has not to wait itself.
    """

    def __init__(self, conn: TConn, request: bytes) -> None:
        self.conn, self.request = conn, request
        self.begun = time.monotonic()
        self.keep = False  # the connection, after this
        self.entry: Any = None  # in the storage's batch, if this is held back
        self.log_line: Callable[[], str] = str  # once this is sent; until it is set: none
        self.parts: list[bytes] = []
        self.sendall = self.parts.append

    def hold_back(self, entry: Any) -> None:
        """Send this when `entry` is stored; if it can't be, handle the request once more."""
        self.entry = entry

    def setblocking(self, flag: bool) -> None:
        """Do nothing: this never blocks."""

    def shutdown(self, how: int) -> None:
        """Raise OSError: it is `keep` that ends the connection."""
        raise OSError("this is not the socket")

    def close(self) -> None:
        """Do nothing, for the same reason."""


class ThreadPool(Executor):
    """Makes a thread where none is idle, and ends those beyond SPARE_THREADS that are.

    ThreadPoolExecutor keeps as many as it ever needed, and waits for them at the process's end.
    gunicorn calls shutdown() too, which here does nothing.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: deque[tuple[Future[Any], Callable[..., Any], Any]] = deque()
        self._changed = threading.Condition()  # guards this and what follows
        self._threads = self._idle = 0

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        """Return at once what `call` will have come to."""
        future: Future[Any] = Future()
        with self._changed:
            self._calls.append((future, call, arguments))
            if len(self._calls) > self._idle and self._threads < self._limit:
                with contextlib.suppress(RuntimeError):  # as many as the platform allows
                    threading.Thread(target=self._run, daemon=True).start()
                    self._threads += 1
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._calls and self._idle >= SPARE_THREADS:
                    self._threads -= 1
                    return
                self._idle += 1
                self._changed.wait_for(lambda: self._calls)
                self._idle -= 1
                future, call, arguments = self._calls.popleft()
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del future, call, arguments  # what is idle holds no connection


class Worker(ThreadWorker):
    """gunicorn's thread worker, made fast, to bear slow clients, and to answer in our terms.

    The main loop itself handles a request that is there as a whole. It holds the answer back until
    the storage has written the plant, with all that came at the same time, and goes on meanwhile.
    Any other request, and one whose plant could not be stored, is a thread's, which may wait.

    gunicorn itself wants a buffering proxy for slow clients (gunicorn.org/deploy): its threads wait
    for one without limit (github.com/benoitc/gunicorn/issues/2652), and as many as it has threads
    keep out all others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.end_at = math.inf  # monotonic time
        self.busy: set[TConn] = set()  # those with a request under way
        self.held: list[Answer] = []  # back, to be stored together
        self.storing: list[list[Answer]] = []  # those for which that was begun
        self.log_lines: deque[str] = deque()  # for what was sent

    def get_thread_pool(self) -> Executor:
        """A pool with, if need be, a thread a connection: no slow client keeps one from others."""
        return ThreadPool(self.cfg.worker_connections)

    def handle_exit(self, *_: Any) -> None:
        """End a moment later: where all get SIGTERM, the master has to stop listening first."""
        if self.end_at == math.inf:
            self.end_at = time.monotonic() + END_DELAY
            self.method_queue.defer(int)  # which does nothing, but wakes the main loop

    def handle_usr1(self, *_: Any) -> None:
        """Open the log's files anew, but not in the midst of writing to them."""
        self.method_queue.defer(self.log.reopen_files)

    def run(self) -> None:
        """Work until told to end; unless that is to be at once, wait for who reads the log."""
        try:
            super().run()
            deadline = time.monotonic() + self.cfg.graceful_timeout
            while self.log_lines and not is_past(deadline):
                self.write_log()
                time.sleep(LINES_PAUSE)
        finally:
            self.write_log()

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """Do what has come; if there was nothing more to store, store. When it is time, end."""
        self.write_log()
        if self.log_lines:
            timeout = min(timeout, LINES_PAUSE)
        if self.sockets:
            timeout = min(timeout, max(self.end_at - time.monotonic(), 0))
        before = len(self.held)
        super().wait_for_and_dispatch_events(0 if self.held else timeout)
        if before and (len(self.held) == before or is_past(self.held[0].begun + GATHER_LIMIT)):
            self.store_held()
        if self.sockets and time.monotonic() >= self.end_at:
            self.end()

    def end(self) -> None:
        """Stop listening, then let connections end: their clients would come back at once.

        Takes those that the system has accepted already, as nobody else may.
        """
        self.set_accept_enabled(False)
        while self.sockets:
            listener = self.sockets.pop()
            count = -1
            while count < self.nr_conns:
                count = self.nr_conns
                self.accept(listener)
            listener.close()
        for conn in self.pending_conns:  # they have sent nothing yet
            conn.timeout = 0
        self.alive = False

    def accept(self, listener: socket.socket) -> None:
        """Accept a connection, later where the system can't now; if there are many, make room."""
        count = self.nr_conns
        try:
            super().accept(listener)
        except OSError as error:
            self.log.error("a connection has to wait: %s; ulimit -n may help", error.strerror)
            time.sleep(0.1)  # it is still there, and would be tried at once
        if self.nr_conns > max(count, self.worker_connections * CROWD):
            self.make_room()

    def make_room(self) -> None:
        """Let go of who waits longest: of those that send nothing, else of the idle, else of all.

        One with a request under way is only read no further: it gets the answer to what has come.
        """
        now = time.monotonic()
        for idle in (self.pending_conns, self.keepalived_conns):
            if idle:
                idle[0].timeout = now
                return
        busy = [conn for conn in self.busy.copy() if conn.deadline > now]
        if len(busy) > 1:  # not the one that has just come
            min(busy, key=attrgetter("deadline")).deadline = now

    def enqueue_req(self, conn: TConn) -> None:
        """Handle a request: at once if it is there as a whole, else in a thread, which may wait.

        Most are, and to hand one to a thread and back takes longer than to handle it.
        """
        self.begin(conn)
        self.busy.add(conn)
        request = take_request(conn)
        if not request:
            self.hand_over(conn, super().handle, conn)
            return
        answer = Answer(conn, request)
        sock, conn.sock = conn.sock, answer
        try:
            answer.keep = super().handle(conn)
        finally:
            conn.sock = sock
        if answer.entry is None:
            self.send(answer)
        else:
            self.held.append(answer)

    def hand_over(self, conn: TConn, call: Callable[..., Any], *arguments: Any) -> None:
        """Let a thread make a call that ends the handling of a request.

        `call` returns what gunicorn's handle() does: False to close, True to wait for another
        request, or a mark of its own if nothing has come yet.
        """

        def finish() -> Any:
            try:
                keep = call(*arguments)
                if keep is False:
                    self.linger(conn.sock)
                return keep
            finally:
                self.busy.discard(conn)

        self.tpool.submit(finish).add_done_callback(
            lambda future: self.method_queue.defer(self.finish_request, conn, future)
        )

    def store_held(self) -> None:
        """Have the plants stored whose answers are held back, and wait a moment for that.

        Not to go on meanwhile takes less time, as both threads would want Python's global lock,
        but a slow disk must not keep all others waiting.
        """
        answers, self.held = self.held, []
        self.storing.append(answers)
        written = answers[-1].entry.start_batch()  # all others before it, or with it
        try:
            written.exception(MOMENT if len(self.storing) == 1 else 0)
        except FutureTimeoutError:
            written.add_done_callback(lambda _: self.method_queue.defer(self.release, answers))
        else:
            self.release(answers)

    def release(self, answers: list[Answer]) -> None:
        """Send those whose plants are stored by now; have the other requests handled once more.

        Does nothing if notify() has let them go already.
        """
        if answers not in self.storing:
            return
        self.storing.remove(answers)
        for answer in answers:
            if answer.entry.is_stored:
                self.send(answer)
            else:
                self.retry(answer)

    def retry(self, answer: Answer) -> None:
        """Let a thread handle the request once more, which finds out what to answer.

        Its time in the log is that of the thread alone.
        """
        answer.entry.withdraw()
        forget_request(answer.conn)
        answer.conn.parser.unreader.unread(answer.request)
        self.hand_over(answer.conn, super().handle, answer.conn)

    def send(self, answer: Answer) -> None:
        """Send an answer and log it; what has to wait for that, or for the end, is a thread's."""
        conn, data = answer.conn, b"".join(answer.parts)
        with contextlib.suppress(OSError):  # there is no room for it, or the client has gone
            data = data[conn.sock.send(data) :]
        if answer.keep and not data and len(self.log_lines) < LINES_LIMIT:
            self.log_lines.append(answer.log_line())
            self.busy.discard(conn)
            self.finish_request(conn, KEPT)
        else:
            self.hand_over(conn, self.finish_sending, answer, data)

    def finish_sending(self, answer: Answer, data: bytes) -> bool:
        """Send the rest, log it, and return whether the connection can be kept."""
        try:
            answer.conn.sock.setblocking(True)
            answer.conn.sock.sendall(data)
        except OSError:
            answer.keep = False
        self.log.write(answer.log_line())
        return answer.keep

    def write_log(self) -> None:
        """Write the lines of what was sent, many at once as that is faster, while there is room.

        There is for PIPE_BUF bytes then, and no other worker's line gets in between them.
        """
        lines = self.log_lines
        while lines and self.log.has_room():
            text = lines.popleft()
            while lines and len(text) + len(lines[0]) <= select.PIPE_BUF:
                text += lines.popleft()
            self.log.write(text)

    def begin(self, conn: TConn) -> None:
        """Let the time for a request begin, and for its answer to be read."""
        conn.deadline = time.monotonic() + REQUEST_LIMIT
        conn.end = conn.deadline + LINGER_LIMIT

    def notify(self) -> None:
        """Tell the master, at least every second, that all is well; let go of what takes long."""
        super().notify()
        self.cut_off_late()
        while self.storing and is_past(self.storing[0][0].begun + HOLD_LIMIT):
            self.release(self.storing[0])

    def cut_off_late(self) -> None:
        """Cut off who takes too long: first what it sends, so that it can still be told."""
        now = time.monotonic()
        for conn in self.busy.copy():
            if now > conn.deadline:
                with contextlib.suppress(OSError):
                    conn.sock.shutdown(socket.SHUT_RD if now < conn.end else socket.SHUT_RDWR)

    def linger(self, sock: socket.socket) -> None:
        """Read on until the client has read its answer (RFC 9112 section 9.6).

        gunicorn would do so in the thread that all connections depend on, were it not done here.
        """
        deadline = time.monotonic() + LINGER_LIMIT
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                sock.settimeout(left)
                if not sock.recv(2**16):
                    break
        with contextlib.suppress(OSError):  # so that gunicorn has nothing left to wait for
            sock.shutdown(socket.SHUT_RDWR)

    def _keepalive_after(self, conn: TConn, keepalive: bool) -> bool:
        """Whether another request can follow: not after a body that can't be told from it."""
        if isinstance(conn.sock, Answer):
            forget_request(conn)
            return keepalive
        try:
            return bool(super()._keepalive_after(conn, keepalive))
        except errors.ParseException:
            return False

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: Exception) -> None:
        """Answer what never came to the application as the application would: with an Error."""
        status, message = PARSE_STATUS.get(type(exc), 400), str(exc)
        if not isinstance(exc, errors.ParseException):
            self.log.exception("a request failed in the server")
            status, message = 500, "the service failed"
        request_id = f"{random.getrandbits(128):032x}"
        body = json.dumps({"error": status, "message": message[:1000]}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
            f"X-Request-ID: {request_id}\r\n\r\n"
        )
        with contextlib.suppress(OSError):
            client.sendall(head.encode() + body)
        # Not what it says: a broken header can have a token in it.
        host, what = addr[0] if isinstance(addr, tuple) else "", type(exc).__name__
        now = time.monotonic()
        self.log.when_sent(client, host, what, str(status), len(body), now, request_id)


def is_past(moment: float) -> bool:
    """Whether it is later, in monotonic time."""
    return time.monotonic() > moment


def can_write(stream: TextIO) -> bool:
    """Whether the next write will not block."""
    poll = select.poll()
    with contextlib.suppress(ValueError):  # it is closed
        poll.register(stream, select.POLLOUT)
        return bool(poll.poll(0))
    return True


def is_plain(handler: Any) -> bool:
    """Whether a log's handler is gunicorn's own for a stream, which can be written to directly.

    That takes a tenth of the time that logging does for a line.
    """
    own = getattr(handler, "_gunicorn", False)
    return own and isinstance(handler, logging.StreamHandler) and handler.stream is not None


class Logger(glogging.Logger):
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
        """Log a request that the application has answered, its path without the query.

        Leaves out a /healthz that succeeds: platforms ask every few seconds.
        """
        if environ["PATH_INFO"] == "/healthz" and str(resp.status).startswith("200"):
            return
        request = f"{environ['REQUEST_METHOD']} {quote(environ['PATH_INFO'])}"
        request_id = environ.get("plants.request_id", "-")
        host, status = environ["REMOTE_ADDR"], str(resp.status)[:3]
        begun = time.monotonic() - request_time.total_seconds()
        self.when_sent(resp.sock, host, request, status, resp.sent, begun, request_id)

    def when_sent(self, sock: Any, *parts: Any) -> None:
        """Write a line: now or, if `sock` is an Answer, when that is sent."""
        if not self.access_log_enabled:
            return
        if isinstance(sock, Answer):
            sock.log_line = partial(self.line, *parts)
        else:
            self.write(self.line(*parts))

    def has_room(self) -> bool:
        """Whether a line can be written at once: what reads the log may have stopped."""
        handlers: list[Any] = self.access_log.handlers
        return all(can_write(handler.stream) for handler in handlers if is_plain(handler))

    def line(
        self, host: str, request: str, status: str, sent: int, begun: float, request_id: str
    ) -> str:
        """A line of the Common Log Format, then the time taken and the id of the request."""
        return (
            f'{quote(host, ":") or "-"} - - {self.now()} "{request[:2000]}" '
            f"{status} {sent} {time.monotonic() - begun:.4f}s {request_id}\n"
        )

    def write(self, lines: str) -> None:
        """Write lines to the access log."""
        handlers: list[Any] = self.access_log.handlers
        if not all(map(is_plain, handlers)):
            for line in lines.splitlines():
                self.access_log.info("%s", line)
            return
        for handler in handlers:
            with handler.lock, contextlib.suppress(OSError, ValueError):
                handler.stream.write(lines)
                handler.flush()


# What the platform says. Without PORT, gunicorn binds to 127.0.0.1:8000.
workers = number_from("WEB_CONCURRENCY", 2, 1000)
number_from("PORT", 8000, 65535)  # gunicorn reads it by itself, with a traceback if it is none

# One token for all workers, made once: it stays in the environment when SIGHUP reads this again.
token_is_new = "PLANTS_TOKENS" not in os.environ
if token_is_new:
    os.environ["PLANTS_TOKENS"] = secrets.token_urlsafe(32)

# Two descriptors a connection, and some for the rest: usual limits are 1024 or less.
worker_connections = max(1, min(1000, (allow_descriptors(2048) - 48) // 2))

wsgi_app = "app:get_app()"
worker_class = Worker  # requests that wait at the same time are committed together
logger_class = Logger
accesslog = "-"  # standard output, one line a request
keepalive = 125  # seconds; longer than Caddy's 120, which would else meet a closed connection
graceful_timeout = 25  # seconds for requests in flight at SIGTERM; a platform kills after 30
control_socket_disable = True  # nothing here is controlled through one
http_parser = "python"  # not another one because a package of that name is there
# What a proxy, or a client, says of the request is not listened to, whoever it is: a SCRIPT_NAME or
# PATH_INFO would change its path. To look up who it is would only cost time.
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}
forwarded_allow_ips = "*"
