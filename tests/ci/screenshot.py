"""The pictures of the page that README.md shows: `.venv/bin/python -m tests.ci.screenshot`.

Starts the service, stores a plant through the page in Chromium, and writes docs/page-light.png and
docs/page-dark.png.
"""

import tempfile
from pathlib import Path

from tests.ci.test_page import Page, chromium
from tests.support.server import ROOT, Server


def main() -> None:
    """Store a plant through the page and write what is then on the screen, in each scheme."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder)) as server,
        chromium(Path(folder)) as browser,
    ):
        for scheme in ("light", "dark"):
            page = Page(browser, server.port)
            page.show(1180, 820, scheme)
            page.send("200", id="7", name="Monstera", tag="indoor")
            page.run("scrollTo(0, 0); document.activeElement.blur()")
            browser.save_screenshot(ROOT / f"docs/page-{scheme}.png")


if __name__ == "__main__":
    main()
