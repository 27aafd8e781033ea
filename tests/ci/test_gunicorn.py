"""gunicorn's settings that need root or another program to be tested."""

import json
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.support.server import HEADERS, HERE, STORED, fails_with
from tests.support.wire import MONSTERA


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a new database, in a folder that only the user nobody and root can write."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        shutil.chown(folder, "nobody", "nogroup")
        yield f"sqlite:///{folder}/plants.db"


def test_the_service_runs_as_another_user_from_its_start_on(serve, url):
    """The check at the start makes the database. It runs as the user that the workers become."""
    server = serve("--user=nobody", "--group=nogroup")
    assert server.post(MONSTERA)[0] == STORED
    files = list(Path(url.removeprefix("sqlite:///")).parent.iterdir())
    assert len(files) == 4
    assert {(file.owner(), file.group()) for file in files} == {("nobody", "nogroup")}


def test_a_user_that_can_not_be_set_ends_the_start_in_one_line(serve):
    """The test starts gunicorn as nobody, who can't become another user."""
    as_nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    server = serve("--user=daemon", command=[*as_nobody, *HERE])
    fails_with(server, "--user, --group: start as root, and name a user who can run")


def test_the_gevent_worker_of_gunicorn_serves_tls(serve, tmp_path):
    """--worker-class gevent is the way out for settings that the service's own worker refuses."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make.split(), *names, "-keyout", key, "-out", certificate], check=True)
    options = [f"--certfile={certificate}", f"--keyfile={key}", "--worker-class=gevent"]
    server = serve(*options)
    request = Request(
        f"https://127.0.0.1:{server.port}/plants", json.dumps(MONSTERA).encode(), HEADERS
    )
    context = ssl.create_default_context(cafile=certificate)
    with urlopen(request, context=context) as response:
        assert response.status == STORED
