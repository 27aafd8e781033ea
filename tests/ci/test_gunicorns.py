"""The service under other releases of gunicorn, whose insides change from one to the next."""

import signal
import subprocess
import sys
import sysconfig

import pytest

from tests.support.wire import HEAD, answers, chunked, post, refused


@pytest.mark.parametrize("release", ["25.3.0", "26.0.0", "27.0.1"])
def test_the_service_runs_under_another_gunicorn(serve, tmp_path, stored, release):
    """It starts, stores, refuses, takes a body in chunks and a SIGHUP, and ends."""
    folder = tmp_path / "environment"  # with that gunicorn and the other packages of this one
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", f"--python={folder}/bin/python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--ignore-installed", f"gunicorn=={release}"], check=True)
    server = serve(command=[f"{folder}/bin/gunicorn", "--bind", "127.0.0.1:0"])
    assert server.post({"id": 1, "name": "n"})[0] == 200
    assert f"gunicorn {release}" in server.err
    refused(server.send(b"nonsense\r\n\r\n"), 400)
    body = chunked(b'{"id": 2, ', b'"name": "n"}', b"")
    chunks = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert answers(server.send(chunks + body)) == [(200, {"name": "n"})]
    server.reload()
    assert server.post({"id": 3, "name": "n"})[0] == 200
    with server.connect() as idle:
        idle.sendall(post({"id": 4, "name": "n"}))
        assert idle.recv(2**16).startswith(b"HTTP/1.1 200 ")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert [number for number, _, _ in stored()] == [1, 2, 3, 4]
