"""The patches in docs/exercises/ solve the exercises of docs/code.md, and break no other test."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.ci.test_bare_machine import IGNORED
from tests.support.pages import PAGES
from tests.support.server import ROOT

PATCHES = {  # by the command that docs/code.md has for the tests
    "docs/exercises/test_field.py": ["field"],
    "docs/exercises/test_read.py -k sqlite": ["read"],
    "docs/exercises/test_read.py": ["read", "read-postgresql"],
}
# Those of README's tests that know what is stored.
OTHERS = [f"tests/test_{name}.py" for name in ("app", "openapi", "plant", "sqlite", "storage")]


def test_the_page_has_these_commands():
    """And one for a patch."""
    page = re.sub(r"\s+", " ", PAGES[ROOT / "docs/code.md"])
    assert re.findall("`.venv/bin/pytest (docs/exercises/[^`]+)`", page) == list(PATCHES)
    assert "`patch -p1 < docs/exercises/field.patch`" in page


@pytest.mark.parametrize("exercise", PATCHES)
def test_an_exercise_is_solved_by_its_patches(tmp_path, exercise):
    """Its tests pass, as do README's; without a solution, none of its own does."""
    shutil.copytree(ROOT, copy := tmp_path / "copy", ignore=IGNORED)

    def run(*arguments):
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(pytest, cwd=copy, stdout=subprocess.PIPE, text=True)

    if "-k" not in exercise:
        assert " passed" not in run(*shlex.split(exercise)).stdout
    for name in PATCHES[exercise]:
        patch = f"patch -p1 --fuzz=0 < docs/exercises/{name}.patch"
        subprocess.run(patch, shell=True, cwd=copy, check=True)
    done = run(*shlex.split(exercise), *([] if "-k" in exercise else OTHERS))
    assert done.returncode == 0, done.stdout
