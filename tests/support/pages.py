"""What README.md and the pages of docs/ have for copying."""

import re

from tests.support.server import ROOT

README = (ROOT / "README.md").read_text("utf-8")
PAGES = {page: page.read_text("utf-8") for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}


def blocks(language: str) -> list[str]:
    """The code blocks in a language, those of README.md first."""
    found = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", "\n".join(PAGES.values()))
    return [text for name, text in found if name == language]


def block(language: str, beginning: str) -> str:
    """The first code block in a language that begins so."""
    return next(text for text in blocks(language) if text.startswith(beginning))


def table(heading: str) -> list[list[str]]:
    """The rows of the one table whose heading begins so, without the heading."""
    pattern = rf"(?m)^\| {heading}.*\n\|[-|]+\|\n((?:\|.*\n)+)"
    (rows,) = re.findall(pattern, "\n".join(PAGES.values()))
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]
