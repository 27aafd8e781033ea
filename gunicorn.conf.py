"""Settings of gunicorn, which reads this by itself, and what happens once at the start."""

import os
import secrets
import shlex
import signal
import subprocess
import sys
from typing import Any

new_token = secrets.token_urlsafe(32)


def on_starting(server: Any) -> None:
    """Check the settings and open the database; exit if that fails."""
    # In a process of its own: gevent has to patch a worker before that imports the service.
    start = os.path.join(os.path.dirname(__file__), "start.py")
    if subprocess.run([sys.executable, start]).returncode:
        sys.exit(1)


def when_ready(server: Any) -> None:
    """Say how to store a plant, where the token is one that nobody else knows."""
    address = str(server.LISTENERS[0]).replace("//0.0.0.0:", "//127.0.0.1:")
    if os.environ["PLANTS_TOKENS"] == new_token:
        sys.stderr.write(
            "PLANTS_TOKENS is not set, so a token was made for this run. To store a plant:\n\n"
            f"curl {shlex.quote(address)}/plants -H 'Content-Type: application/json' \\\n"
            f"  -H 'Authorization: Bearer {new_token}' \\\n"
            """  -d '{"id": 7, "name": "Monstera", "tag": "indoor"}'\n\n"""
            f"A page to try it is at {address}/\n\n"
        )


def post_fork(server: Any, worker: Any) -> None:
    """Let signals end a worker that is still starting; the master's handlers keep it."""
    for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)


def worker_exit(server: Any, worker: Any) -> None:
    """Store what is queued and close the database, while threads can still be started."""
    if app := getattr(worker, "wsgi", None):  # else it has failed to start
        app.config["storage"].close()


os.environ.setdefault("PLANTS_TOKENS", new_token)  # one for all workers

wsgi_app = "start:get_app()"
worker_class = "worker.Worker"
workers = int(os.environ.get("WEB_CONCURRENCY", "2")) or sys.exit("WEB_CONCURRENCY must not be 0")
limit_request_fields = 64  # enough for clients
keepalive = 125  # seconds; longer than Caddy's 120, which would else meet a closed connection
graceful_timeout = 25  # seconds for requests in flight at SIGTERM; platforms kill after 30
control_socket_disable = True  # nothing needs one
forwarder_headers = ""  # a SCRIPT_NAME or PATH_INFO among the headers would change the path
secure_scheme_headers: dict[str, str] = {}  # two that disagree would be a 400
forwarded_allow_ips = "*"  # else each client's address is parsed
