"""What the pages give to those who write a client, and to a class that shares one server."""

import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.pages import block, table
from tests.support.server import PATIENCE, ROOT, STORED, TOKEN, Server, free_port, wait_until
from tests.support.storage import read_names

# The interpreter of each program, the name of its file, and its language and beginning on the page.
PYTHON = (sys.executable, "client.py", "python", "import http.client")
NODE = ("node", "client.mjs", "js", "const address")
# How an expression is printed in each language. A BigInt in a text has no n at its end.
PRINT = {"Python": [sys.executable, "-c", "import hashlib, secrets; key = 'Ficus é'; print(%s)"]}
PRINT["JavaScript"] = ["node", "-e", "key = 'Ficus é'; (async () => console.log(`${%s}`))()"]

BODIES = {  # By status; the rest are HTML. Only the 501 might be the service's.
    200: b'["name"]', 201: b'{"name": "portal"}', 302: b"{}",
    501: b'{"error": 501, "message": "no"}',
    404: b'{"status": "error", "code": 404, "message": "Application not found"}',
}  # fmt: skip


@pytest.fixture
def proxy(server) -> Iterator[tuple[int, list[int], list[int | None]]]:
    """The port of a proxy that fails at first, the service's statuses, and the proxy's failures.

    It answers nine times itself. Then it loses a response of the service.
    """
    statuses: list[int] = []
    failures = [200, 201, 202, 302, 307, 403, 404, 429, 503, None]

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            failure = failures.pop(0) if failures else 0
            if failure:
                self.answer(failure, BODIES.get(failure, b"<html></html>"))
                return
            status, answer = server.request("POST", "/plants", body, self.headers)
            statuses.append(status)
            if failure == 0:
                self.answer(status, json.dumps(answer).encode())

        def do_GET(self) -> None:
            self.answer(200, b'{"name": "portal"}')

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header(
                "Content-Type", "text/html" if body[:1] == b"<" else "application/json"
            )
            self.send_header("Location", "/login")
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, args=[0.01]).start()
        yield proxy.server_port, statuses, failures
        proxy.shutdown()


@pytest.mark.parametrize(
    ("program", "name", "number"), [(PYTHON, "Moss", 71), (NODE, "Clover", 2**53 + 1)]
)
def test_a_client_saves_a_plant_and_ends_if_a_retry_will_not_help(
    server, proxy, tmp_path: Path, program: tuple[str, ...], name: str, number: int
) -> None:
    """It survives a login page, a redirect to one, a proxy's errors and a lost response.

    Later it prints what the service or the proxy says.
    """
    (port, statuses, failures), (interpreter, file, *place) = proxy, program

    def run(plant_name: str) -> tuple[int, str]:
        text = block(*place).replace(":8000", f":{port}")
        (tmp_path / file).write_text(text.replace(f'"{name}"', plant_name))
        done = subprocess.run(
            [interpreter, file], cwd=tmp_path, env={**os.environ, "TOKEN": TOKEN}, text=True,
            timeout=PATIENCE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout

    status, printed = run(f'"{name}"')
    assert status == 0 and printed.endswith(f"\nsaved: {name}\n"), printed
    assert statuses == [STORED] * 2 and read_names(server.url)[number] == name
    for wrong, message in {
        '"Ivy"': "409 .*already used by a different",
        "7": "400 .*name: must",
    }.items():
        status, printed = run(wrong)
        assert status == 1 and re.search(f"not saved: {message}", printed), printed
    assert statuses[2:] == [409, 400]
    failures.append(501)
    assert run(f'"{name}"') == (1, "not saved: 501 no\n")


def test_the_expressions_on_the_page_make_ids_that_the_service_takes(server) -> None:
    """A random id has the bits that are stated. A text has the same id in each language."""
    of_texts = set()
    for language, kind, expression in table(r"language \| id"):
        if language not in PRINT:  # Kotlin and Swift.
            continue
        *interpreter, code = PRINT[language]
        made = [
            int(subprocess.check_output([*interpreter, code % expression.strip("`")])) for _ in "ab"
        ]
        if "random" in kind:
            bits = int(re.search(r"(\d+) bits", kind)[1])
            assert made[0] != made[1] and max(made) < 2**bits
            assert max(made) > 2 ** (bits - 20)  # Two good ids fail this once in 10**12 runs.
        else:
            of_texts.update(made)
        assert server.post({"id": made[0], "name": "Ficus"})[0] == STORED
    assert len(of_texts) == 1


def test_the_chances_of_a_409_are_computed_right() -> None:
    """The page rounds them to two digits. This is the birthday problem."""
    for plants, *chances in table(r"plants \|"):
        pairs = (n := int(plants.replace(",", ""))) * (n - 1) / 2
        for bits, chance in zip((53, 63), chances, strict=True):
            stated = float(chance.removeprefix("1 in ").replace(",", ""))
            assert f"{-1 / math.expm1(-pairs / 2**bits):.1e}" == f"{stated:.1e}"


def test_the_body_on_the_page_keeps_all_digits_of_a_bigint(server) -> None:
    """JSON.stringify throws for it. A tag that is undefined is left out."""
    line = block("js", "const body")
    code = f"const [id, name, tag] = [2n ** 63n - 1n, 'Ivy']; {line} console.log(body)"
    body = subprocess.check_output(["node", "-e", code], text=True)
    assert json.loads(body) == {"id": 2**63 - 1, "name": "Ivy"}


def test_a_class_shares_one_server_and_the_log_tells_the_students_apart(tmp_path: Path) -> None:
    """Typed once more, the first command of docs/teach.md keeps the tokens that it has made."""
    folder, port = tmp_path / "plant store", free_port()
    folder.mkdir()
    for source in ROOT.glob("[!.]*"):
        if source.name != "class":  # A teacher may have made it.
            (folder / source.name).symlink_to(source)
    (folder / ".venv").symlink_to(sys.prefix)
    make, tokens = block("sh", "mkdir -m 700 class"), folder / "class" / "tokens"
    subprocess.run(["bash", "-c", make], cwd=folder, check=True)
    students = [line.split() for line in tokens.read_text().splitlines()]
    assert subprocess.run(["bash", "-c", make], cwd=folder).returncode == 1
    assert [line.split() for line in tokens.read_text().splitlines()] == students
    start = block("sh", "PLANTS_TOKENS=$(cut").replace("PORT=8000", f"PORT={port}")
    with Server(tmp_path, command=["bash", "-c", f"cd '{folder}'\n{start}"]) as server:
        server.port = port
        wait_until(lambda: "Booting worker" in server.err)
        for (_, token), name in zip(students, ("Fern", "Ivy"), strict=False):
            server.post({"id": 7, "name": name}, token)
        count = block("sh", "while read -r name token")
        printed = subprocess.check_output(["bash", "-c", count], cwd=folder, text=True)
    first, second, *others = printed.splitlines()
    assert first == "student01: 1 got a 200, 0 refused"
    assert second == "student02: 0 got a 200, 1 refused"
    assert len(others) == 28 and all(": 0 got a 200, 0 refused" in line for line in others)
    assert read_names(f"sqlite:///{folder}/class/plants.db") == {7: "Fern"}
