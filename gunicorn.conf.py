"""How gunicorn runs the service. gunicorn reads this file by itself from where it is started.

Settings, and what happens once at the start; worker.py serves, app.py answers. https://gunicorn.org/reference/settings/
"""

import os
import resource
import secrets
import shlex
import signal
import subprocess
import sys
from typing import Any

from gunicorn import __version__, util

SPARE = 64  # descriptors that a worker needs beside those of its connections
FEWEST = 10  # connections; a new one takes the place of another before all are in use
SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def find_mistakes(cfg: Any) -> list[str]:
    """Return what can't work among the options."""
    number, limit = cfg.worker_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE
    has_format = cfg.access_log_format != cfg.settings["access_log_format"].default
    mistakes = {
        "--preload is not possible, leave it out: gevent has to patch first": cfg.preload_app,
        "--certfile and --keyfile are not possible, leave them out: a proxy encrypts": cfg.is_ssl,
        "--statsd-host has no effect, leave it out": cfg.statsd_host,
        "--access-logformat has no effect, leave it out": has_format,
        "--workers and WEB_CONCURRENCY must be 1 or more": cfg.workers < 1,
        f"--worker-connections must be {FEWEST} or more, not {number}": number < FEWEST,
        f"ulimit -n must be {number + SPARE} or more for {number} connections": limit < number,
        "--daemon needs PLANTS_TOKENS": cfg.daemon and os.environ["PLANTS_TOKENS"] == new_token,
    }
    return [line for line, is_made in mistakes.items() if is_made]


def on_starting(server: Any) -> None:
    """Check the options, and the database in a process of its own; exit if something is wrong.

    What is imported in the master could not be loaded anew by SIGHUP.
    """
    for each in SIGNALS:  # the first process of a container needs handlers
        signal.signal(each, lambda *_: sys.exit(1))
    if mistakes := find_mistakes(server.cfg):
        server.log.error(mistakes[0])
        sys.exit(1)
    check = subprocess.run(
        [sys.executable, os.path.join(os.path.dirname(__file__), "start.py")],
        preexec_fn=lambda: util.set_owner_process(
            server.cfg.uid, server.cfg.gid, server.cfg.initgroups
        ),
        capture_output=True,
        text=True,
    )
    if check.returncode:
        server.log.error(check.stderr.strip() or f"start.py ended with {check.returncode}")
        sys.exit(1)
    if check.stderr:
        server.log.warning(check.stderr.strip())
    server.database = check.stdout.strip()


def when_ready(server: Any) -> None:
    """Say what runs where."""
    software = f"Python {sys.version.split()[0]}, gunicorn {__version__}, {server.database}"
    size = f"{server.cfg.workers} workers of up to {server.cfg.worker_connections} connections"
    server.log.info("plants: %s; %s at %s", software, size, ", ".join(map(str, server.LISTENERS)))
    if "PORT" in os.environ and "DATABASE_URL" not in os.environ:
        server.log.warning("DATABASE_URL is not set: a deploy may delete %s", server.database)
    if os.environ["PLANTS_TOKENS"] == new_token:
        print_token(str(server.LISTENERS[0]).replace("//0.0.0.0:", "//127.0.0.1:"))


def print_token(address: str) -> None:
    """Say how to store a plant with the token that only this process knows."""
    sys.stderr.write(
        "PLANTS_TOKENS is not set, so a token was made for this run. To store a plant:\n\n"
        f"curl {shlex.quote(address)}/plants -H 'Content-Type: application/json' \\\n"
        f"  -H 'Authorization: Bearer {new_token}' \\\n"
        """  -d '{"id": 7, "name": "Monstera", "tag": "indoor"}'\n\n"""
        f"A page to try it is at {address}/\n\n"
    )


def post_fork(server: Any, worker: Any) -> None:
    """Let a worker that is still starting end at once at a signal."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)


def worker_exit(server: Any, worker: Any) -> None:
    """Store what is in the queue and close the database, while threads can still be started."""
    if worker.wsgi:
        worker.wsgi.config["storage"].close()


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

wsgi_app = "start:get_app()"
worker_class = "worker.Worker"
logger_class = "access_log.AccessLogger"
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
