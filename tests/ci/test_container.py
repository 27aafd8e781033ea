"""deploy/Dockerfile: buildah builds it, and what its image does in a container.

The base is Debian with its own Python, under the name that FROM has. It takes root.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ci.test_bare_machine import VERSION, pinned
from tests.ci.test_docs import DOWNLOAD_PATIENCE
from tests.support.debian import make_system_with, unpack
from tests.support.readme import PAGES, block
from tests.support.server import ROOT, TOKEN, Server, free_port, is_alive

PYTHON = """
    apt-get install -qq -y --no-install-recommends python3-pip
    ln -s python3 /usr/bin/python
    rm /usr/lib/python3*/EXTERNALLY-MANAGED
"""
BASE = re.search("(?m)^FROM (.+)$", (ROOT / "deploy/Dockerfile").read_text())[1]
SERVICE = [*ROOT.glob("*.py"), *ROOT.glob("schemas/*.*"), *ROOT.glob("static/*")]


class Buildah:
    """buildah with a storage of its own: it needs no daemon, and no right that root may lack."""

    def __init__(self, folder: Path) -> None:
        """Keep all images in a folder."""
        places = [f"--root={folder}/storage", f"--runroot={folder}/run"]
        self.command = ["buildah", *places, "--storage-driver=vfs"]

    def __call__(self, *arguments: object) -> str:
        """Run one of its commands; return what that prints."""
        command = [*self.command, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def buildah(tmp_path_factory, request) -> Iterator[Buildah]:
    """It has the image `plants`, made by the command of docs/deploy.md, and its base."""
    folder = tmp_path_factory.mktemp("buildah")
    request.addfinalizer(lambda: shutil.rmtree(folder))
    unpack(make_system_with(PYTHON), folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        buildah = Buildah(folder)
        new = buildah("from", "scratch")
        buildah("add", "--quiet", new, folder / "base", "/")
        buildah("config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin", new)
        buildah("commit", "--quiet", "--rm", "--format=docker", new, f"docker.io/library/{BASE}")
        docker, *build = block("sh", "docker build").splitlines()[0].split()
        assert docker == "docker"
        options = ["--pull=never", "--format=docker", "--network=host"]
        buildah(*build[:1], *options, *build[1:-1], ROOT)
        yield buildah


@pytest.fixture
def container(buildah) -> Iterator[str]:
    name = buildah("from", "--pull-never", "localhost/plants")
    yield name
    buildah("rm", name)


@pytest.fixture
def start(buildah, container, serve, tmp_path) -> Iterator[Callable[[], Server]]:
    """Starts the service in the container, as its image says, with a volume at /data."""
    servers = []
    data = Path(buildah("mount", container)) / "data"
    volume = tmp_path / "volume"
    volume.mkdir()
    os.chown(volume, data.stat().st_uid, data.stat().st_gid)  # as a new volume is

    def run() -> Server:
        options = [f"--volume={volume}:/data", f"--env=PLANTS_TOKENS={TOKEN}"]
        options.append(f"--env=PORT={free_port()}")  # there is no network of its own
        command = [*buildah.command, "run", *options, container, *config(buildah)["Cmd"]]
        servers.append(serve(command=command))
        return servers[-1]

    yield run
    for server in servers:
        for pid in processes(server):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def config(buildah: Buildah) -> dict[str, Any]:
    found = json.loads(buildah("inspect", "--type=image", "plants"))["Docker"]["config"]
    assert isinstance(found, dict)
    return found


def processes(server: Server) -> list[int]:
    """The master and then its workers, by their log: there is no namespace of process ids."""
    return list(dict.fromkeys(map(int, re.findall(r"\] \[(\d+)\] \[", server.err))))


def test_the_image_has_only_what_the_service_needs(buildah, container):
    """Not the tests, nor their packages, nor the docs."""
    app = Path(buildah("mount", container)) / "app"
    found = {str(file.relative_to(app)) for file in app.rglob("*") if file.is_file()}
    assert found == {str(file.relative_to(ROOT)) for file in SERVICE} | {"requirements.txt"}
    *installed, python = buildah("run", container, "sh", "-c", f"pip freeze; {VERSION}").split()
    assert {line.lower() for line in installed} == pinned(ROOT / "requirements.txt", python)


def test_plants_outlive_the_container(buildah, container, start):
    """In it the service is not root, and its health check is true. SIGTERM ends it in time."""
    check, *health = config(buildah)["Healthcheck"]["Test"]
    assert check == "CMD"
    server = start()
    asked = [*buildah.command, "run", f"--env=PORT={server.port}", container, *health]
    server.workers()
    master, *workers = processes(server)
    assert len(workers) == 2 and 0 not in {os.stat(f"/proc/{pid}").st_uid for pid in workers}
    assert server.post({"id": 7, "name": "Monstera"})[0] == 200
    assert subprocess.run(asked).returncode == 0
    os.kill(master, signal.SIGTERM)
    assert server.wait() == 0
    assert subprocess.run(asked, stderr=subprocess.DEVNULL).returncode == 1
    buildah("rm", container)
    buildah("from", "--pull-never", "--name", container, "localhost/plants")
    server = start()
    assert server.post({"id": 7, "name": "another"})[0] == 409
    os.kill(processes(server)[0], signal.SIGTERM)
    assert server.wait() == 0


def test_the_page_says_how_much_the_image_adds(buildah, record_property):
    """To its base, in MB, give or take a few: packages differ a little between Pythons."""
    names = (f"docker.io/library/{BASE}", "localhost/plants")
    base, image = (json.loads(buildah("images", "--json", name))[0]["size"] for name in names)
    (stated,) = re.findall(r"(\d+)\s+MB more than its base", PAGES[ROOT / "docs/deploy.md"])
    added = int(image.removesuffix(" MB")) - int(base.removesuffix(" MB"))
    record_property("the image adds to its base", f"{added} MB")
    assert abs(added - int(stated)) <= 5
