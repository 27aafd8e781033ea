"""The pictures of the page that README.md shows: `.venv/bin/python -m tests.ci.screenshot`.

Starts the service, stores a plant through the page in Chromium, and writes docs/page-light.png and
docs/page-dark.png.
"""

import base64
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.ci.test_page import CHROMIUM, fill, open_page, send
from tests.support.server import ROOT, Server, running

WIDTH, HEIGHT = 1180, 860  # CSS pixels


def main() -> None:
    """Write a picture for each colour scheme."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as server:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for argument in [*CHROMIUM, "--hide-scrollbars", f"--user-data-dir={folder}/chromium"]:
            options.add_argument(argument)
        browser = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
        try:
            for scheme in ("light", "dark"):
                take(browser, server, scheme, ROOT / "docs" / f"page-{scheme}.png")
        finally:
            browser.quit()


def take(browser: webdriver.Chrome, server: Server, scheme: str, file: Path) -> None:
    """Store a plant through the page, and write what is then on the screen."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    open_page(browser, server)
    fill(browser, id="7", name="Monstera", tag="indoor")
    send(browser, "200")
    browser.find_element(By.TAG_NAME, "body").click()
    browser.execute_script("scrollTo(0, 0); document.activeElement.blur()")
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    file.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
