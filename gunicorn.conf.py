"""Settings of gunicorn, which reads this by itself, and anew at SIGHUP: it defines no class."""

import os
import secrets
import shlex
import signal
import subprocess
import sys
from typing import Any

from gunicorn import util

SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
START = os.path.join(os.path.dirname(__file__), "start.py")
# gevent has to patch first, a proxy encrypts, and the access log is our own.
REFUSED = ("preload_app", "certfile", "keyfile", "statsd_host", "access_log_format")


def on_starting(server: Any) -> None:
    """Check the options, and the database as the workers' user; exit if something is wrong."""
    for each in SIGNALS:  # the first process of a container needs handlers
        signal.signal(each, lambda *_: sys.exit(1))
    cfg = server.cfg
    for option in (cfg.settings[name] for name in REFUSED):
        if option.get() != option.default:
            server.log.error("%s is not possible here, leave it out", option.cli[0])
            sys.exit(1)
    # A process of its own: SIGHUP could not load anew what is imported in this one.
    check = subprocess.run(
        [sys.executable, START],
        capture_output=True,
        text=True,
        preexec_fn=lambda: util.set_owner_process(cfg.uid, cfg.gid, cfg.initgroups),
    )
    server.database = check.stdout.strip()
    if check.returncode:
        server.log.error(check.stderr.strip() or f"{START} has ended with {check.returncode}")
        sys.exit(1)
    if check.stderr:
        server.log.warning(check.stderr.strip())


def when_ready(server: Any) -> None:
    """Say where plants are stored, and how to store one with a token that nobody else knows."""
    server.log.info("plants: %s", server.database)
    address = str(server.LISTENERS[0]).replace("//0.0.0.0:", "//127.0.0.1:")
    if "PORT" in os.environ and "DATABASE_URL" not in os.environ:
        server.log.warning("DATABASE_URL is not set: a deploy may delete %s", server.database)
    if os.environ["PLANTS_TOKENS"] == new_token:
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
    if app := getattr(worker, "wsgi", None):  # else it has failed to start
        app.config["storage"].close()


workers = int(os.environ.get("WEB_CONCURRENCY", "2")) or sys.exit("WEB_CONCURRENCY must not be 0")

# One token for all workers, made once: it stays in the environment when SIGHUP reads this again.
new_token = secrets.token_urlsafe(32)
os.environ.setdefault("PLANTS_TOKENS", new_token)

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
