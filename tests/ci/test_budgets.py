"""The service stays small: it is to be read in one sitting."""

import ast

import pytest

from tests.support.server import ROOT

FILES = [
    "app.py",
    "storage.py",
    "postgresql.py",
    "transfer.py",
    "worker.py",
    "gunicorn.conf.py",
    "schemas/__init__.py",
]
ALL_FILES, FILE, CLASS, FUNCTION = 1600, 430, 150, 30  # lines


def lines(file: str) -> int:
    """Count the lines of a file, with docstrings and blank ones."""
    return len((ROOT / file).read_text().splitlines())


def test_the_service_has_no_other_files() -> None:
    """Whoever adds one names it above."""
    found = {
        str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.py"), *ROOT.glob("schemas/*.py")]
    }
    assert found == set(FILES)


def test_all_files_together_are_small() -> None:
    """Docstrings and blank lines count."""
    assert sum(map(lines, FILES)) <= ALL_FILES


@pytest.mark.parametrize("file", FILES)
def test_each_file_class_and_function_is_small(file: str) -> None:
    """Each can be read with the whole of it in mind."""
    assert lines(file) <= FILE
    limits = {ast.ClassDef: CLASS, ast.FunctionDef: FUNCTION, ast.AsyncFunctionDef: FUNCTION}
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if limit := limits.get(type(node)):
            size = node.end_lineno - node.lineno + 1
            assert size <= limit, f"{node.name} has {size} lines"
