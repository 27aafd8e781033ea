"""How long a call of the application takes, without a server and without a storage, as JSON.

Run this in the folder of the service, in its environment. Prints the microseconds of CPU time that
a POST of a plant takes, and those of a constant on Bottle (ceiling.py) in the same process.
"""

import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

sys.path.insert(0, ".")  # the folder of the service

from ceiling import app as constant

from app import create_app

TOKEN = "benchmark-token-0123456789"
CALLS = 2000
LOOPS = 25
BODY = b'{"id": 1000000007, "name": "Monstera", "tag": "indoor"}'
REQUEST = {  # what gunicorn makes of a request of wrk
    "wsgi.errors": sys.stderr,
    "wsgi.version": (1, 0),
    "wsgi.multithread": True,
    "wsgi.multiprocess": True,
    "wsgi.run_once": False,
    "wsgi.file_wrapper": object,
    "wsgi.input_terminated": True,
    "wsgi.url_scheme": "http",
    "SERVER_SOFTWARE": "gunicorn/27.0.1",
    "gunicorn.socket": None,
    "REQUEST_METHOD": "POST",
    "QUERY_STRING": "",
    "RAW_URI": "/plants",
    "SERVER_PROTOCOL": "HTTP/1.1",
    "HTTP_HOST": "127.0.0.1:8000",
    "HTTP_AUTHORIZATION": f"Bearer {TOKEN}",
    "CONTENT_TYPE": "application/json",
    "CONTENT_LENGTH": str(len(BODY)),
    "REMOTE_ADDR": "127.0.0.1",
    "REMOTE_PORT": "50000",
    "SERVER_NAME": "127.0.0.1",
    "SERVER_PORT": "8000",
    "PATH_INFO": "/plants",
    "SCRIPT_NAME": "",
}
WSGIApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class InstantStorage:
    """A storage that answers at once and keeps nothing."""

    def add(self, plant: object) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""


def call(app: WSGIApp, environ: dict[str, Any], statuses: set[str]) -> None:
    """Call `app` as a server does, and add the status of the answer to `statuses`."""

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> None:
        statuses.add(status)

    answer = app(environ, start_response)
    for _ in answer:
        pass
    if hasattr(answer, "close"):
        answer.close()


def microseconds(app: WSGIApp) -> float:
    """The CPU time of a call, over one loop of them."""
    environs = [{**REQUEST, "wsgi.input": io.BytesIO(BODY)} for _ in range(CALLS)]
    statuses: set[str] = set()
    start = time.process_time()
    for environ in environs:
        call(app, environ, statuses)
    taken = time.process_time() - start
    if statuses != {"200 OK"}:
        sys.exit(f"the application has answered {statuses}")
    return taken / CALLS * 1e6


def main() -> None:
    """Measure both in turn, after a first loop that does not count."""
    apps = {"application": create_app(InstantStorage(), [TOKEN]), "constant": constant}
    times: dict[str, list[float]] = {name: [] for name in apps}
    for _ in range(1 + LOOPS):
        for name, app in apps.items():
            times[name].append(microseconds(app))
    print(json.dumps({name: statistics.median(found[1:]) for name, found in times.items()}))


main()
