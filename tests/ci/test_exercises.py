"""The patches in docs/exercises/ solve the exercises of docs/exercises.md, and break nothing."""

import re
import shlex
import shutil
import subprocess
import sys

from tests.ci.test_bare_machine import IGNORED
from tests.support.pages import SENTENCES, command
from tests.support.server import ROOT

COMMANDS = re.findall("`.venv/bin/pytest (docs/exercises/[^`]+)`", SENTENCES)
PATCHES = ["route", "field", "read", "read-postgresql"]
# Of the tests that README's command runs, those that look at routes and plants.
NAMES = ["app", "openapi", "plant", "routes", "sqlite", "storage"]


def test_the_exercises_are_solved_by_their_patches_one_after_the_other(tmp_path):
    """Before its patch, no test of an exercise passes, and afterwards all of them do.

    With all patches, all tests of all exercises pass together, and so do those of the service.
    """
    shutil.copytree(ROOT, copy := tmp_path / "copy", ignore=IGNORED)

    def run(*arguments):
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(pytest, cwd=copy, stdout=subprocess.PIPE, text=True)

    for name, exercise in zip(PATCHES, COMMANDS, strict=True):
        arguments = shlex.split(exercise)
        before = run(*arguments)
        assert before.returncode == 1, before.stdout
        # The last exercise has the tests of the one before it, which pass already on SQLite.
        assert name == "read-postgresql" or " passed" not in before.stdout, before.stdout
        patch = command("patch -p1 < docs/exercises/").replace("route", name)
        subprocess.run(f"{patch} --fuzz=0", shell=True, cwd=copy, check=True)
        done = run(*arguments)
        assert done.returncode == 0, done.stdout
    done = run("docs/exercises", *(f"tests/test_{name}.py" for name in NAMES))
    assert done.returncode == 0, done.stdout
