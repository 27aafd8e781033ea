"""/openapi.json against the running service: a linter and a fuzzer."""

import json
import subprocess
import sys
from pathlib import Path

from tests.ci.node import ENVIRONMENT, node_modules
from tests.support.server import TOKEN

TOOLS = Path(sys.executable).parent
LEFT_OUT = {"info-license", "info-contact"}  # which are the operator's to say


def test_redocly_finds_nothing(server, tmp_path):
    """No error, and no warning but those about a licence and a contact."""
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(server.request("GET", "/openapi.json")[2]))
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
            TOOLS / "schemathesis", "run", f"http://127.0.0.1:{server.port}/openapi.json",
            "--checks=all", "--max-examples=200", "--seed=7",
            f"--header=Authorization: Bearer {TOKEN}",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert "No issues found" in run.stdout
    assert "2 selected / 2 total" in run.stdout
    assert '" 500 ' not in server.out and "Traceback" not in server.err
