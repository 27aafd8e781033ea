"""What README.md has for copying."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def block(language: str, beginning: str) -> str:
    """The one code block in a language that begins so."""
    blocks = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", README)
    (found,) = [block for block in blocks if block.startswith(beginning)]
    return found


def table(heading: str) -> list[list[str]]:
    """The rows of the one table whose heading begins so, without the heading."""
    (rows,) = re.findall(rf"(?m)^\| {heading}.*\n\|[-|]+\|\n((?:\|.*\n)+)", README)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]
