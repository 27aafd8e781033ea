"""The code blocks, commands and tables of README.md and the pages of docs/, for tests to run."""

import re

from tests.support.server import ROOT

PAGES = {page: page.read_text("utf-8") for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
SENTENCES = re.sub(r"\s+", " ", "\n".join(PAGES.values()))  # without ends of lines
# tests/ci/test_docs.py types these pages from top to bottom, but leaves out the blocks that match
# ELSEWHERE. Other tests type those.
TYPED = [ROOT / "README.md", ROOT / "docs/interface.md"]
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
