"""/openapi.json as two linters see it, each with the rules that it recommends."""

import json
from pathlib import Path

import pytest

from schemas import openapi
from tests.ci.node import run

LEFT_OUT = {"info-license", "info-contact"}  # which are the operator's to say


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """The description, in a file."""
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(openapi(), indent=2))
    return path


def test_redocly_finds_nothing(document):
    """No error, and no warning but those about a licence and a contact."""
    done = run("redocly", "lint", document, "--extends=recommended", "--format=json")
    problems = json.loads(done.stdout)["problems"]
    assert [each for each in problems if each["ruleId"] not in LEFT_OUT] == [], done.stderr


def test_spectral_finds_nothing(document, tmp_path):
    """No error, and no warning but those about a licence and a contact."""
    rules = tmp_path / "ruleset.yaml"
    rules.write_text("extends: spectral:oas\n")
    done = run("spectral", "lint", document, f"--ruleset={rules}", "--format=json", "--quiet")
    assert [each for each in json.loads(done.stdout) if each["code"] not in LEFT_OUT] == []
