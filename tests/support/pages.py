"""The code blocks, commands and tables of README.md and the pages of docs/, for tests to run."""

import ast
import io
import re
import tokenize

from tests.support.server import ROOT

PAGES = {page: page.read_text("utf-8") for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
SENTENCES = re.sub(r"\s+", " ", "\n".join(PAGES.values()))  # without ends of lines
# tests/ci/test_docs.py types these pages from top to bottom, but leaves out the blocks that match
# ELSEWHERE. Other tests type those.
TYPED = [ROOT / "README.md", ROOT / "docs/interface.md", ROOT / "docs/clients.md"]
ELSEWHERE = r"/pytest$"
BLOCK = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")  # its language and its text


def block(language: str, beginning: str) -> str:
    """Return the first code block in this language that starts with `beginning`.

    README.md is searched first, then the pages of docs/.
    """
    found = BLOCK.findall("\n".join(PAGES.values()))
    return next(text for name, text in found if name == language and text.startswith(beginning))


def command(beginning: str) -> str:
    """Return the first command within a sentence, in backquotes, that starts with `beginning`."""
    return re.search(f"`({re.escape(beginning)}[^`]*)`", SENTENCES)[1]


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table whose first column's title starts with `heading`.

    Fails unless there is exactly one such table. The row of titles is left out.
    """
    pattern = rf"(?m)^\| {heading}.*\n\|[-|]+\|\n((?:\|.*\n)+)"
    (rows,) = re.findall(pattern, "\n".join(PAGES.values()))
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]


def count_code(text: str) -> int:
    """Count the lines of a Python file that are code: not blank, not a comment, not a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)
