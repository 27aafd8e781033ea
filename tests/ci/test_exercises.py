"""The patches in docs/exercises/ solve the exercises of docs/code.md and break no other test."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.ci.test_bare_machine import IGNORED
from tests.support.pages import SENTENCES, command
from tests.support.server import ROOT

COMMANDS = re.findall("`.venv/bin/pytest (docs/exercises/[^`]+)`", SENTENCES)
# The third exercise goes on from the second.
PATCHES = [["field"], ["read"], ["read", "read-postgresql"]]
# Of the tests that README's command runs, those that look at plants.
OTHERS = [f"tests/test_{name}.py" for name in ("app", "openapi", "plant", "sqlite", "storage")]


@pytest.mark.parametrize(("exercise", "patches"), list(zip(COMMANDS, PATCHES, strict=True)))
def test_an_exercise_is_solved_by_its_patches(tmp_path, exercise, patches):
    """With its patches, its own tests and the service's pass. Without, none of its own passes."""
    shutil.copytree(ROOT, copy := tmp_path / "copy", ignore=IGNORED)

    def run(*arguments):
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(pytest, cwd=copy, stdout=subprocess.PIPE, text=True)

    if "-k" not in exercise:
        assert " passed" not in run(*shlex.split(exercise)).stdout
    for name in patches:
        patch = command("patch -p1 < docs/exercises/").replace("field", name)
        subprocess.run(f"{patch} --fuzz=0", shell=True, cwd=copy, check=True)
    done = run(*shlex.split(exercise), *([] if "-k" in exercise else OTHERS))
    assert done.returncode == 0, done.stdout
