"""/openapi.json against the running service: a linter, a fuzzer and a generated client."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ci.node import ENVIRONMENT, node_modules
from tests.support.server import PATIENCE, TOKEN

TOOLS = Path(sys.executable).parent


LEFT_OUT = {"info-license", "info-contact"}  # which are the operator's to say


@pytest.fixture
def server(serve):
    return serve()


@pytest.fixture
def document(server, tmp_path):
    """The description, in a file."""
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(server.request("GET", "/openapi.json")[2]))
    return path


def test_redocly_finds_nothing(document):
    """No error, and no warning but those about a licence and a contact."""
    settings = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}
    command = [node_modules() / ".bin/redocly", "lint", document]
    done = subprocess.run(
        [*command, "--extends=recommended", "--format=json"],
        env={**ENVIRONMENT, **settings}, capture_output=True, text=True,
    )  # fmt: skip
    problems = json.loads(done.stdout)["problems"]
    assert [each for each in problems if each["ruleId"] not in LEFT_OUT] == [], done.stderr


def test_the_service_does_what_the_document_says(server, tmp_path):
    """Schemathesis finds nothing, with every check that it has."""
    run = subprocess.run(
        [
            TOOLS / "schemathesis",
            "run",
            f"http://127.0.0.1:{server.port}/openapi.json",
            "--checks=all",
            "--max-examples=200",
            "--seed=7",
            f"--header=Authorization: Bearer {TOKEN}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout
    assert "No issues found" in run.stdout
    assert "2 selected / 2 total" in run.stdout
    assert '" 500 ' not in server.out and "Traceback" not in server.err


def test_a_generated_client_is_typed(server, document, tmp_path, monkeypatch):
    """openapi-python-client makes one that creates a plant and gets refusals as typed Errors."""
    command = [TOOLS / "openapi-python-client", "generate", "--meta=none", "--fail-on-warning"]
    subprocess.run(
        [*command, f"--path={document}", f"--output-path={tmp_path}/plant_client"],
        check=True,
        env={"PATH": f"{TOOLS}:/usr/bin:/bin"},
        capture_output=True,
        timeout=PATIENCE * 2,
    )
    monkeypatch.syspath_prepend(tmp_path)
    client = importlib.import_module("plant_client")
    models = importlib.import_module("plant_client.models")
    create_plant = importlib.import_module("plant_client.api.plants.create_plant").sync
    check_health = importlib.import_module("plant_client.api.operation.check_health").sync

    url = f"http://127.0.0.1:{server.port}"
    with client.AuthenticatedClient(base_url=url, token=TOKEN) as known:
        plant = create_plant(
            client=known, body=models.NewPlant(id=7, name="Monstera", tag="indoor")
        )
        assert plant == models.Plant(name="Monstera", tag="indoor")
        taken = create_plant(client=known, body=models.NewPlant(id=7, name="Sequoia"))
        wrong = create_plant(client=known, body=models.NewPlant(id=2**63, name="Sequoia"))
        assert check_health(client=known).status == "ok"
    with client.AuthenticatedClient(base_url=url, token="not-a-good-token") as unknown:
        unauthorized = create_plant(client=unknown, body=models.NewPlant(id=8, name="Sequoia"))
    for refusal, status in ((taken, 409), (wrong, 400), (unauthorized, 401)):
        assert isinstance(refusal, models.Error)
        assert refusal.error == status and refusal.message
