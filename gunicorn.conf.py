"""gunicorn's settings with their reasons, and what happens once at the start.

gunicorn reads this file by itself in the folder where it is started.
"""

import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from typing import Any

from gunicorn.util import set_owner_process

# worker.Worker does not do what these settings say. With a certificate it would encrypt nothing,
# and tokens would cross the network in plain text.
UNSUPPORTED = ("certfile", "keyfile", "proxy_protocol")
ADVICE = "leave it out, or use --worker-class gevent; to encrypt, use a proxy or a platform"
START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py")
new_token = secrets.token_urlsafe(32)


def on_starting(server: Any) -> None:
    """Check the settings and open the database. Exit with one line if that fails."""
    # At Ctrl+C, end without a traceback. gunicorn sets its own handlers after this.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if words := server.cfg.parser().parse_args(server.cfg.get_cmd_args_from_env()).args:
        # gunicorn would ignore a word that is not a setting, such as one that has lost its dashes,
        # or a whole line in quotes. Show only what is before the =: the value could be a token.
        word = words[0].split("=")[0]
        sys.exit(f"GUNICORN_CMD_ARGS must be like --name=value, with no quotes of its own: {word}")
    if 0 in (server.cfg.workers, server.cfg.worker_connections):  # No client would get a response.
        sys.exit("--worker-connections, --workers and WEB_CONCURRENCY must not be 0")
    for name in UNSUPPORTED:
        is_set = getattr(server.cfg, name) != server.cfg.settings[name].default
        if is_set and server.cfg.worker_class_str == worker_class:
            sys.exit(f"--{name.replace('_', '-')} is not supported: {ADVICE}")
    # Even with --preload, our application is made in the worker. Any other one would be
    # loaded before gevent patches the worker, so its clients would share its thread-locals.
    is_ours = server.app.app_uri == wsgi_app
    if server.cfg.preload_app and server.cfg.worker_class_str == worker_class and not is_ours:
        sys.exit(f"--preload would mix up the clients of {server.app.app_uri}: leave it out")
    if not is_ours:  # Someone else's application opens no database of ours.
        return

    def become_user() -> None:
        # Run start.py as the workers' user, who must be able to write the files that it makes.
        set_owner_process(server.cfg.uid, server.cfg.gid, server.cfg.initgroups)

    try:
        # This is a process of its own, since the master must not import the service: see start.py.
        if subprocess.call([sys.executable, START], preexec_fn=become_user):
            sys.exit(1)
    except (OSError, subprocess.SubprocessError):
        sys.exit(f"--user, --group: start as root, and name a user who can run {sys.executable}")


def when_ready(server: Any) -> None:
    """Print how to store a plant, if the token was made for this run and nobody else knows it."""
    if os.environ["PLANTS_TOKENS"] != new_token or server.app.app_uri != wsgi_app:
        return
    # With --reuse-port, each worker has listeners of its own.
    listeners = server.LISTENERS or ["http://{}:{}".format(*server.cfg.address[0])]
    address = next((str(each) for each in listeners if "://" in str(each)), None)
    if not address:
        sys.stderr.write("PLANTS_TOKENS is not set, so no client can store a plant: set it\n")
        return
    # A client can't connect to "all addresses".
    address = re.sub(r"//(0\.0\.0\.0|\[::\]|::):", "//127.0.0.1:", address)
    sys.stderr.write(
        "PLANTS_TOKENS is not set, so a token was made for this run. To store a plant:\n\n"
        f"curl {shlex.quote(address)}/plants -H 'Content-Type: application/json' \\\n"
        f"  -H 'Authorization: Bearer {new_token}' \\\n"
        """  -d '{"id": 7, "name": "Monstera", "tag": "indoor"}'\n\n"""
        f"A page to try it is at {address}/\n\n"
    )


def post_fork(server: Any, worker: Any) -> None:
    """Let signals end a worker that is still starting. The master's handlers would ignore them."""
    for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)


def post_worker_init(worker: Any) -> None:
    """Make the application in the worker, where gevent has patched everything by now.

    Until then, worker.wsgi is get_app itself: wsgi_app names the function without calling it.
    """
    if worker.app.app_uri == wsgi_app:
        worker.wsgi = worker.wsgi()
        worker.storage = worker.wsgi.config["storage"]
        worker.storage.start()


def worker_exit(server: Any, worker: Any) -> None:
    """Store what is queued and close the database, while threads can still be started."""
    # A worker of someone else's application has no storage, nor has one that failed to start.
    if hasattr(worker, "storage"):
        worker.storage.close()


os.environ.setdefault("PLANTS_TOKENS", new_token)  # One token for all workers.

wsgi_app = "start:get_app"  # not called, see post_worker_init()
worker_class = "worker.Worker"
workers = int(os.environ.get("WEB_CONCURRENCY", "2"))
# Platforms set PORT. Some of them connect only by IPv6. This one socket accepts IPv4 as well, even
# where IPv6 is disabled.
if "PORT" in os.environ and socket.has_dualstack_ipv6():
    bind = f"[::]:{os.environ['PORT']}"
# Clients send far fewer headers. Each one costs time.
limit_request_fields = 64
# Seconds. Longer than Caddy's 120, or Caddy would sometimes use a connection that was just closed.
keepalive = 125
# Seconds for requests that have begun when SIGTERM arrives. Most platforms kill the service after
# 30; docs/platforms.md lists others.
graceful_timeout = 25
# gunicorn would take the parser of gunicorn_h1c if that is installed.
http_parser = "python"
# Workers use a file to show that they are alive. If the file were on a disk that hangs, the workers
# would hang, too, and /healthz could not say so. If the root file system is read-only, there may be
# no other place for the file.
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
# Nothing here needs gunicorn's control socket.
control_socket_disable = True
# Accept no header SCRIPT_NAME or PATH_INFO: in gunicorn's own workers, they would let a client
# change the path.
forwarder_headers = ""
# Ignore proxies' scheme headers: gunicorn answers 400 if two of them disagree.
secure_scheme_headers: dict[str, str] = {}
# "*" trusts nobody here: the two settings above leave no forwarded header to read. It only saves
# parsing each client's address.
forwarded_allow_ips = "*"
