"""What README.md and the pages of docs/ have for copying."""

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
    """The first code block in a language that begins so; those of README.md come first."""
    found = BLOCK.findall("\n".join(PAGES.values()))
    return next(text for name, text in found if name == language and text.startswith(beginning))


def command(beginning: str) -> str:
    """The first command within a sentence that begins so."""
    return re.search(f"`({re.escape(beginning)}[^`]*)`", SENTENCES)[1]


def table(heading: str) -> list[list[str]]:
    """The rows of the one table whose heading begins so, without the heading."""
    pattern = rf"(?m)^\| {heading}.*\n\|[-|]+\|\n((?:\|.*\n)+)"
    (rows,) = re.findall(pattern, "\n".join(PAGES.values()))
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]
