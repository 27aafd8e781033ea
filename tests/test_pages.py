"""The pages agree with the service and with each other. That their commands work is in tests/ci."""

import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest
from gunicorn.config import Config

import app
import storage
import worker
from plant import InvalidPlant, parse_new_plant
from storage import Rejected
from tests.support.pages import BLOCK, ELSEWHERE, PAGES, SENTENCES, TYPED, block, table
from tests.support.server import PATIENCE, ROOT, STORED, TOKEN
from tests.support.storage import read_names
from tests.support.wire import MONSTERA, receive_response
from tests.test_app import failing, post


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_files_that_are_named_exist(page):
    """Links lead to files and to headings. A file may be named by the end of its path."""
    for target in re.findall(r'\]\(([^)\s]+)\)|src(?:set)?="([^"]+)"', PAGES[page]):
        target = "".join(target)
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            headings = re.findall("(?m)^#+ (.*)$", file.read_text("utf-8")) if heading else []
            slugs = {re.sub(r"\W+", "-", each.lower()).strip("-") for each in headings}
            assert not heading or heading in slugs, target
    named = set(re.findall(r"`(\w[\w./-]*\.(?:py|service|socket|conf|toml|html))`", PAGES[page]))
    named -= {"transfer.py"}  # Older versions had this file.
    files = [f"/{file}" for pattern in ("*.*", "[!.]*/**/*.*") for file in ROOT.glob(pattern)]
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()


def test_the_table_of_variables_has_all_that_are_read():
    """The table has no others."""
    code = "".join(file.read_text() for file in (ROOT / "start.py", ROOT / "gunicorn.conf.py"))
    read = set(re.findall(r'"(PLANTS_[A-Z]+|DATABASE_URL|PORT|WEB_CONCURRENCY)"', code))
    rows = {row[0].strip("`"): row[1].strip("`") for row in table("variable")}
    assert set(rows) == read
    assert f'"{rows["DATABASE_URL"]}"' in code


def test_the_limits_are_those_that_are_stated(monkeypatch):
    """Each row names the constant or the setting of gunicorn that sets it."""
    monkeypatch.setenv("PLANTS_TOKENS", TOKEN)  # Otherwise gunicorn.conf.py makes one.
    defaults = {name: setting.get() for name, setting in Config().settings.items()}
    limits = defaults | runpy.run_path(str(ROOT / "gunicorn.conf.py"))
    limits |= vars(worker) | vars(storage) | vars(app)
    limits["EVICT_ABOVE"] *= limits["worker_connections"]
    for what, limit, _, name in table(r"what \| limit"):
        number, unit = limit.split()
        factor = 1024 if unit == "KiB" else 1
        assert int(number.replace(",", "")) * factor == limits[name.strip("`")], what
    for_a_stop = f"have begun, for at most {limits['graceful_timeout']} seconds"
    assert for_a_stop in PAGES[ROOT / "docs/deploy.md"]


def test_a_health_check_is_quick_enough_for_platforms():
    """README.md states two seconds."""
    app.check_health(checked := Mock())
    assert checked.check.call_args.args[0] < 2


def test_messages_that_the_page_quotes_are_those_of_the_service():
    with pytest.raises(InvalidPlant) as refusal:
        parse_new_plant(b'{"id": 1e16, "name": ""}')
    rejection = post(failing(Rejected("a constraint")), MONSTERA).json["message"]
    for message in str(refusal.value), rejection:
        assert f"`{message}`" in SENTENCES


def test_the_exchange_on_the_page_is_what_a_client_sends_and_receives(server, send):
    """Except for the time, and for the request id, which is new each time."""
    data = block("http", "POST /plants").removesuffix("\n").replace("TOKEN", TOKEN)
    response = receive_response(send(server, data.replace("\n", "\r\n").encode()))
    varying = r"(?m)^(Date|X-Request-ID): .*$"
    lines = response.decode().replace("\r\n", "\n")
    assert re.sub(varying, "", lines) == re.sub(varying, "", block("http", "HTTP/1.1 200"))


@pytest.fixture
def proxy(server) -> Iterator[tuple[int, list[int]]]:
    """The port of a proxy that fails three times, and the statuses of the service behind it.

    It answers twice itself, not in JSON. Then it loses a response of the service.
    """
    failures, statuses = [408, 503, None], []

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            failure = failures.pop(0) if failures else 0
            if failure:
                self.answer(failure, b"<html></html>")
                return
            status, answer = server.request("POST", "/plants", body, self.headers)
            statuses.append(status)
            if failure == 0:
                self.answer(status, json.dumps(answer).encode())

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, args=[0.01]).start()
        yield proxy.server_port, statuses
        proxy.shutdown()


def test_the_client_that_retries_saves_a_plant_and_ends_if_a_retry_will_not_help(server, proxy):
    """The service has stored the plant already when the client sends it for the last time."""
    port, statuses = proxy
    program = block("python", "import http.client").replace(":8000", f":{port}")

    def run(plant: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program.replace('"name": "Moss"', plant)]
        environment = {**os.environ, "TOKEN": TOKEN}
        return subprocess.run(
            command, env=environment, timeout=PATIENCE, capture_output=True, text=True
        )

    assert run('"name": "Moss"').stdout.splitlines()[-1] == "saved: Moss"
    assert statuses == [STORED] * 2 and read_names(server.url)[71] == "Moss"
    for plant, status in {'"name": "Ivy"': 409, '"name": 7': 400}.items():
        assert f"HTTPError: HTTP Error {status}: " in run(plant).stderr
    assert statuses[2:] == [409, 400]


def test_each_command_is_run_by_a_test():
    """Tests type some pages as a whole. Elsewhere, a test names each block that it runs."""
    whole = [*TYPED, ROOT / "docs/forty-lines.md"]
    tests = "".join(file.read_text("utf-8") for file in ROOT.glob("tests/ci/test_*.py"))
    named = tuple(re.findall(r"""block\("sh", ["']([^"'\\]+)""", tests))
    for page in PAGES:
        for language, text in BLOCK.findall(PAGES[page]):
            is_typed = page in whole and not re.search(ELSEWHERE, text)
            assert language != "sh" or is_typed or text.startswith(named), text
