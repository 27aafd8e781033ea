"""The pictures of the page that README.md shows: `.venv/bin/python -m tests.ci.screenshot`."""

import tempfile
from pathlib import Path

from tests.ci.test_page import Page
from tests.support.server import ROOT, Server

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
