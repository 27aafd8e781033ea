"""The pictures of the page that README.md shows: `.venv/bin/python -m tests.ci.screenshot`.

Starts the service, stores a plant through the page in Chromium, and writes docs/page-light.png and
docs/page-dark.png.
"""

import tempfile
from pathlib import Path

from tests.ci.test_page import Page
from tests.support.server import ROOT, Server


def main() -> None:
    """Store a plant through the page and write what is then on the screen, in each scheme."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder)) as server,
        Page(Path(folder), server) as page,
    ):
        for scheme in ("light", "dark"):
            page.show(1180, 680, scheme)
            page.send("200", "7", "Monstera", "indoor")
            page.execute_script("document.activeElement.blur()")
            page.save_screenshot(ROOT / f"docs/page-{scheme}.png")


if __name__ == "__main__":
    main()
