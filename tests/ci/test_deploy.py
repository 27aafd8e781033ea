"""The Procfile, and the unit and the Caddyfile of README.md, with the programs that read them."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, require_programs
from tests.support.readme import block
from tests.support.server import HEADERS, Server, free_port, wait_until
from tests.test_server import run_printed_curl

MONSTERA = {"id": 7, "name": "Monstera", "tag": "indoor"}


def test_a_procfile_runner_starts_and_ends_the_service(
    serve: Callable[..., Server], stored: Callable[[], list[tuple[int, str, str | None]]]
) -> None:
    """It finds gunicorn by its name, sets PORT, and passes SIGTERM on."""
    port = free_port()
    folder = Path(sys.executable).parent
    server = serve(command=[str(folder / "honcho"), "start", "-p", str(port)], PATH=f"{folder}")
    # honcho writes what both streams have to its standard output.
    wait_until(lambda: server.out.count("Booting worker") == 2)
    server.port = port
    assert server.post(MONSTERA)[0] == 200
    wait_until(lambda: '"POST /plants" 200' in server.out)  # it fails if it is told while it writes
    server.signal(signal.SIGTERM)
    server.wait()
    assert "Shutting down: Master" in server.out
    assert stored() == [(7, "Monstera", "indoor")]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Without a word about an option or a value."""
    unit = tmp_path / "plants.service"
    text = block("ini", "[Unit]")
    assert text.count("/srv/plants") == 2
    unit.write_text(text.replace("/srv/plants/.venv/bin/gunicorn", "/bin/true"))  # which exists
    require_programs("systemd-analyze")
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def caddy(serve: Callable[..., Server], tmp_path: Path) -> Iterator[tuple[Server, int]]:
    """The service, and the port of a Caddy in front of it."""
    server, port = serve(), free_port()
    text = block("", "plants.example.org {")
    for name, here in ("plants.example.org", f"http://127.0.0.1:{port}"), ("8000", server.port):
        assert text.count(name) == 1
        text = text.replace(name, str(here))
    (tmp_path / "Caddyfile").write_text("{\n\tadmin off\n}\n" + text)
    require_programs("caddy")
    command = ["caddy", "run", "--config", str(tmp_path / "Caddyfile")]
    with (tmp_path / "caddy.log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env={"HOME": str(tmp_path)})
    try:
        wait_until(lambda: is_open(port))
        yield server, port
    finally:
        process.terminate()
        process.wait()


def is_open(port: int) -> bool:
    """Whether somebody listens."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_caddy_passes_on_requests_and_logs_their_ids(
    caddy: tuple[Server, int], tmp_path: Path
) -> None:
    """The id leads from the service's log to the client's address in Caddy's."""
    server, port = caddy
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/plants", json.dumps(MONSTERA), HEADERS)
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read()) == {"name": "Monstera", "tag": "indoor"}
        request_id = answer.getheader("X-Request-ID") or "none"
    wait_until(lambda: request_id in server.out)

    def logged() -> list[str]:
        lines = (tmp_path / "caddy.log").read_text().splitlines()
        return [line for line in lines if request_id in line]

    (line,) = wait_until(logged)
    assert json.loads(line)["request"]["remote_ip"] == "127.0.0.1"


def test_the_first_command_of_the_readme_is_all_that_it_takes(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    """From a fresh copy, in a folder with a space and without settings, to a plant in its file."""
    copy = tmp_path / "plant store"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "*.db*"))
    kept = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
    path = f"PATH={sys.base_prefix}/bin:/usr/bin:/bin"
    clean = ["env", "-i", f"--chdir={copy}", *kept, f"HOME={tmp_path}", path, "sh", "-c"]
    command = block("sh", "python3 -m venv").strip()
    assert command.endswith("/gunicorn")
    subprocess.run([*clean, f"{command} --version"], check=True)  # this may take its time
    port = free_port()
    server = serve(command=[*clean, f"export PORT={port}; {command}"])
    run_printed_curl(server)
    with contextlib.closing(sqlite3.connect(copy / "plants.db")) as connection:
        assert connection.execute("SELECT * FROM plants").fetchall() == [(7, "Monstera", "indoor")]
