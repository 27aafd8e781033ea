"""The service under other releases of gunicorn, whose insides change from one to the next."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import ROOT, is_alive, wait_until
from tests.support.wire import HEAD, answers, chunked, post, refused


def environment_with(folder: Path, gunicorn: str) -> Path:
    """A new environment with the service's packages but another gunicorn; returns its folder."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pinned = (ROOT / "requirements.txt").read_text()
    needed, _, _ = pinned.partition("# its tests")
    changed, count = re.subn(r"(?m)^gunicorn==\S+", f"gunicorn=={gunicorn}", needed)
    assert count == 1
    (folder / "requirements.txt").write_text(changed)
    pip = [folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", folder / "requirements.txt"], check=True)
    return folder


@pytest.mark.parametrize("release", ["25.3.0", "26.0.0", "27.0.1"])
def test_the_service_runs_under_another_gunicorn(serve, tmp_path, stored, release):
    """It starts, stores, refuses, takes a body in chunks and a SIGHUP, and ends."""
    program = environment_with(tmp_path / "environment", release) / "bin" / "gunicorn"
    server = serve(command=[f"{program}", "--bind", "127.0.0.1:0"])
    before = server.workers()
    assert f"gunicorn {release}" in server.err
    assert server.post({"id": 1, "name": "n"})[0] == 200
    refused(server.send(b"nonsense\r\n\r\n"), 400)
    body = chunked(b'{"id": 2, ', b'"name": "n"}', b"")
    chunks = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert answers(server.send(chunks + body)) == [(200, {"name": "n"})]
    server.signal(signal.SIGHUP)
    assert server.workers(besides=before)
    wait_until(lambda: not any(map(is_alive, before)))
    assert server.post({"id": 3, "name": "n"})[0] == 200
    with server.connect() as idle:
        idle.sendall(post({"id": 4, "name": "n"}))
        assert idle.recv(2**16).startswith(b"HTTP/1.1 200 ")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert [number for number, _, _ in stored()] == [1, 2, 3, 4]
