"""How gunicorn runs the service. gunicorn reads this file by itself from where it is started.

Settings, and what happens once at the start; worker.py serves, app.py answers. https://gunicorn.org/reference/settings/
"""

import os
import resource
import secrets
import shlex
import signal
import sys
import threading
import time
from typing import Any
from urllib.parse import unquote

from gunicorn import __version__, util

SPARE = 64  # descriptors that a worker needs beside those of its connections
FEWEST = 10  # connections; a new one takes the place of another before all are in use


def find_mistakes(cfg: Any) -> None:
    """Exit if something can't work among the options."""
    number, limit = cfg.worker_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE
    mistakes = {
        "--preload is not possible, leave it out: gevent has to patch first": cfg.preload_app,
        "--certfile and --keyfile are not possible, leave them out: a proxy encrypts": cfg.is_ssl,
        "--http-parser is not possible, leave it out": cfg.http_parser != "python",
        "--workers and WEB_CONCURRENCY must be 1 or more": cfg.workers < 1,
        f"--worker-connections must be {FEWEST} or more, not {number}": number < FEWEST,
        f"ulimit -n must be {number + SPARE} or more for {number} connections": limit < number,
        "--daemon needs PLANTS_TOKENS": cfg.daemon and os.environ["PLANTS_TOKENS"] == new_token,
    }
    if made := [line for line, is_made in mistakes.items() if is_made]:
        sys.exit(made[0])


def on_starting(server: Any) -> None:
    """Make the database in a child, as SIGHUP could not reload what is imported here, or exit."""
    for each in (signal.SIGINT, signal.SIGTERM):  # the first process of a container needs handlers
        signal.signal(each, lambda number, _: os._exit(128 + number))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody can be waited for
    reader, writer = os.pipe()
    try:
        find_mistakes(server.cfg)
        if not (child := os.fork()):
            signal.signal(signal.SIGALRM, lambda *_: os.getppid() == server.pid or os._exit(1))
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)  # it ends with the master
            util.set_owner_process(server.cfg.uid, server.cfg.gid, server.cfg.initgroups)
            for _ in range(2 * server.cfg.workers):  # a worker is a process and a thread
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            import start

            os.write(writer, os.fsencode("\n".join(start.create_database())))
            os._exit(0)
        os.close(writer)
        with open(reader, errors="surrogateescape") as result:
            said = result.read()
        if number := os.WTERMSIG(os.waitpid(child, 0)[1]):  # SIGBUS, if a mapped file has no disk
            sys.exit(f"{signal.strsignal(number)}: opening the database needs more disk or memory")
    except BaseException as error:  # in either process
        hint = "; see ulimit -u" if isinstance(error, BlockingIOError) else ""
        is_bug = not isinstance(error, OSError | RuntimeError | SystemExit)
        server.log.error(f"{error}{hint}", exc_info=is_bug)
        os._exit(1)
    if not said:
        sys.exit(1)
    os.environ["PLANTS_STORAGE"], server.database = said.split("\n", 1)


def when_ready(server: Any) -> None:
    """Say what runs where; let SIGTERM and SIGCONT do more than gunicorn's own handlers do."""

    def stop(number: int, frame: Any) -> None:
        server.handle_hup = server.handle_term  # so that it is not behind SIGHUPs that wait
        for each in server.WORKERS.values():
            each.age = sys.maxsize  # SIGHUP waits only for those that are older than its own
        server.signal(number, frame)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGCONT, lambda *_: time.sleep(2))  # workers first say that they are well
    software = f"Python {sys.version.split()[0]}, gunicorn {__version__}, {server.database}"
    size = f"{server.cfg.workers} workers of up to {server.cfg.worker_connections} connections"
    listeners = server.LISTENERS or [f"http://{each}" for each in server.cfg.bind]  # --reuse-port
    server.log.info("plants: %s; %s at %s", software, size, ", ".join(map(str, listeners)))
    if "PORT" in os.environ and "DATABASE_URL" not in os.environ:
        server.log.warning("DATABASE_URL is not set: a deploy may delete %s", server.database)
    if os.environ["PLANTS_TOKENS"] == new_token:
        server.cfg.env_orig["PLANTS_TOKENS"] = new_token  # with which SIGUSR2 starts anew
        print_token(str(listeners[0]).replace("//0.0.0.0:", "//127.0.0.1:"))


def print_token(address: str) -> None:
    """Say how to store a plant with the token that only this process knows."""
    page, curl = f"\nA page to try it is at {address}/\n", shlex.quote(address)
    if address.startswith("unix:"):
        page, curl = "", f"--unix-socket {shlex.quote(address[5:])} http://localhost"
    sys.stderr.write(
        "PLANTS_TOKENS is not set, so a token was made for this run. To store a plant:\n\n"
        f"curl {curl}/plants -H 'Content-Type: application/json' \\\n"
        f"  -H 'Authorization: Bearer {new_token}' \\\n"
        f"""  -d '{{"id": 7, "name": "Monstera", "tag": "indoor"}}'\n{page}\n"""
    )


# Without PORT, gunicorn binds to 127.0.0.1:8000. With one that is no number, it has a traceback.
port = os.environ.get("PORT", "8000")
if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
    sys.exit(f"PORT must be a number from 1 to 65535, not {port!r}")
workers = int(os.environ.get("WEB_CONCURRENCY", "2"))

# One token for all workers, made once: it stays in the environment when SIGHUP reads this again.
new_token = "" if "PLANTS_TOKENS" in os.environ else secrets.token_urlsafe(32)
os.environ.setdefault("PLANTS_TOKENS", new_token)

# A descriptor a connection, and some for the rest: usual limits are 1024 or less.
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
descriptors = min(1064, hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, descriptors), hard))
worker_connections = max(FEWEST, descriptors - SPARE)

# The file by which a worker shows that it is alive may be beside the database on a read-only root.
folder = os.path.dirname(unquote(os.environ.get("DATABASE_URL", "")).removeprefix("sqlite:///"))
folders = ("/tmp", "/dev/shm", folder)  # noqa: S108
worker_tmp_dir = next((each for each in folders if os.access(each, os.W_OK)), None)

wsgi_app = "start:get_app()"
worker_class = "worker.Worker"
logger_class = "worker.AccessLogger"
accesslog = "-"  # standard output, one line a request
limit_request_fields, limit_request_field_size = 64, 2**14  # worker.py has the limit in all
keepalive = 125  # seconds; longer than Caddy's 120, which would else meet a closed connection
graceful_timeout = 25  # seconds for requests in flight at SIGTERM; a platform kills after 30
control_socket_disable = True  # nothing here is controlled through one
http_parser = "python"  # not another one because a package of that name is there
# No forwarded header is read: a SCRIPT_NAME or PATH_INFO would change the path. So it does not
# matter from whom, as long as HTTP/2 is off; "*" saves the look at the address of each client.
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}
forwarded_allow_ips = "*"
