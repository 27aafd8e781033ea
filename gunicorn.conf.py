"""How gunicorn runs the service. gunicorn reads this file by itself from where it is started.

Configures, no more: worker.py serves, app.py answers. https://gunicorn.org/reference/settings/
"""

import multiprocessing
import os
import platform
import re
import resource
import secrets
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from gunicorn import __version__


def end(number: int, frame: Any) -> None:
    """End by a signal, also where this is the first process of a container and needs a handler."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)


def check_storage() -> Any:
    """Return the storage's identity and description; end the start if it can't work."""
    master: Any = multiprocessing.parent_process()  # whatever is waited for, this ends with it
    threading.Thread(target=lambda: os._exit(master.join() or 1), daemon=True).start()
    from app import check_start
    from engine import NeedsOperator

    try:
        return check_start()
    except NeedsOperator as error:
        sys.exit(str(error))


def on_starting(server: Any) -> None:
    """Check before there are workers, in a child: SIGHUP could not reload what is imported here."""
    if server.cfg.preload_app:
        sys.exit("--preload is not possible, leave it out: gevent has to patch first")
    if server.cfg.is_ssl:
        sys.exit("--certfile and --keyfile are not possible, leave them out: a proxy encrypts")
    name = server.cfg.worker_class_str
    if re.search("asgi|pywsgi", name.lower()):
        sys.exit(f"--worker-class {name} is not possible, leave it out: worker.Worker is for this")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        os.environ["PLANTS_STORAGE"], server.database = child.submit(check_storage).result()


def when_ready(server: Any) -> None:
    """Say what runs where, and how to store a plant if only this process knows the token."""
    software = f"Python {platform.python_version()}, gunicorn {__version__}, {server.database}"
    size = f"{server.cfg.workers} workers of up to {server.cfg.worker_connections} connections"
    addresses = ", ".join(map(str, server.LISTENERS)).replace("//0.0.0.0:", "//127.0.0.1:")
    server.log.info("plants: %s; %s at %s", software, size, addresses)
    address = addresses.partition(",")[0]
    if token_is_new:
        # For SIGUSR2, which starts anew with the environment from the start.
        server.cfg.env_orig["PLANTS_TOKENS"] = os.environ["PLANTS_TOKENS"]
        where = re.sub("^unix:(.*)", r"--unix-socket \1 http://localhost", address)
        print(
            "PLANTS_TOKENS is not set, so a token was made for this run. To store a plant:\n\n"
            f"curl {where}/plants -H 'Content-Type: application/json' \\\n"
            f"  -H 'Authorization: Bearer {os.environ['PLANTS_TOKENS']}' \\\n"
            """  -d '{"id": 7, "name": "Monstera", "tag": "indoor"}'\n\n"""
            f"A page to try it is at {address}/\n",
            file=sys.stderr,
        )


# Until gunicorn has handlers of its own, which stay when SIGHUP reads this again.
for each in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(each) in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
        signal.signal(each, end)

# What the platform says. Without PORT, gunicorn binds to 127.0.0.1:8000.
# gunicorn reads PORT by itself, with a traceback if it is no number.
for variable, limit in (("PORT", 65535), ("WEB_CONCURRENCY", 1000)):
    value = os.environ.get(variable, "2")
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= limit):
        sys.exit(f"{variable} must be a number from 1 to {limit}, not {value!r}")
workers = int(os.environ.get("WEB_CONCURRENCY", "2"))

# One token for all workers, made once: it stays in the environment when SIGHUP reads this again.
token_is_new = "PLANTS_TOKENS" not in os.environ
if token_is_new:
    os.environ["PLANTS_TOKENS"] = secrets.token_urlsafe(32)

# A descriptor a connection, and some for the rest: usual limits are 1024 or less.
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
descriptors = 1064 if hard == resource.RLIM_INFINITY else min(1064, hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, descriptors), hard))
worker_connections = max(1, descriptors - 64)

wsgi_app = "app:get_app()"
worker_class = "worker.Worker"
logger_class = "worker.AccessLogger"
accesslog = "-"  # standard output, one line a request
limit_request_fields, limit_request_field_size = 50, 4096  # the time to parse grows with the square
keepalive = 125  # seconds; longer than Caddy's 120, which would else meet a closed connection
graceful_timeout = 25  # seconds for requests in flight at SIGTERM; a platform kills after 30
control_socket_disable = True  # nothing here is controlled through one
http_parser = "python"  # not another one because a package of that name is there
# No forwarded header is read: a SCRIPT_NAME or PATH_INFO would change the path. So it does not
# matter from whom, as long as HTTP/2 is off; "*" saves the look at the address of each client.
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}
forwarded_allow_ips = "*"
