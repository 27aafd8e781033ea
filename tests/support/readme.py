"""What README.md has for copying."""

import re

from tests.support.server import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def block(language: str, beginning: str) -> str:
    """The first code block in a language that begins so."""
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", README)
    return next(text for name, text in blocks if name == language and text.startswith(beginning))


def table(heading: str) -> list[list[str]]:
    """The rows of the one table whose heading begins so, without the heading."""
    (rows,) = re.findall(rf"(?m)^\| {heading}.*\n\|[-|]+\|\n((?:\|.*\n)+)", README)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]
