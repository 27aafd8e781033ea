"""The pictures of the page that README.md shows: `.venv/bin/python -m tests.ci.screenshot`.

Starts the service, stores a plant through the page in Chromium, and writes docs/page-light.png and
docs/page-dark.png.
"""

import base64
import tempfile
from pathlib import Path

from selenium.webdriver.common.by import By

from tests.ci.test_page import chromium, fill, open_page, send, show
from tests.support.server import ROOT, running


def main() -> None:
    """Store a plant through the page and write what is then on the screen, in each scheme."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder)) as server,
        chromium(Path(folder), "--hide-scrollbars") as browser,
    ):
        for scheme in ("light", "dark"):
            show(browser, 1180, 860, scheme)
            open_page(browser, server)
            fill(browser, id="7", name="Monstera", tag="indoor")
            send(browser, "200")
            browser.find_element(By.TAG_NAME, "body").click()
            browser.execute_script("scrollTo(0, 0); document.activeElement.blur()")
            shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
            (ROOT / f"docs/page-{scheme}.png").write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
