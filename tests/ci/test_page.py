"""The page at /, in a real browser: what a person does by keyboard, and what the screen says."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.support.server import TOKEN, Server, wait_until


class Page(webdriver.Chrome):
    """A page of a service in a Chromium of its own, which keeps its files in `folder`."""

    def __init__(self, folder: Path, server: Server, path: str = "/") -> None:
        self.server, self.url = server, f"http://127.0.0.1:{server.port}{path}"
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for flag in "headless", "no-sandbox", "hide-scrollbars", f"user-data-dir={folder}/chromium":
            options.add_argument(f"--{flag}")
        super().__init__(options, webdriver.ChromeService("/usr/bin/chromedriver"))

    def show(self, width: int, height: int, scheme: str) -> None:
        """Make the screen so many CSS pixels large, in a scheme of colours."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def text(self, name: str) -> str:
        """The text of the element with this id."""
        return self.find_element(By.ID, name).text

    def type(self, *keys: str) -> None:
        """Type, wherever the focus is."""
        webdriver.ActionChains(self).send_keys(*keys).perform()

    def send(self, status: str, id: str, name: str, tag: str = "", token: str = TOKEN) -> str:
        """Load the page, fill it in and send it; return the body that comes with the status."""
        self.get(self.url)
        self.type(Keys.TAB, *[Keys.TAB + value for value in (token, id, name, tag)])
        self.type(Keys.TAB, Keys.ENTER)
        wait_until(lambda: self.text("status").startswith(status))
        return self.text("body")


@pytest.fixture
def page(tmp_path, serve) -> Iterator[Page]:
    """The page below a path; no error may be in its console but the statuses of answers."""
    with Page(tmp_path, serve(SCRIPT_NAME="/below"), "/below/") as page:
        yield page
        assert all(line["source"] == "network" for line in page.get_log("browser"))


def test_a_plant_is_stored_as_it_was_typed(page, stored):
    """With all digits of its id, and without a tag where there is none; refusals are shown."""
    number, name = 2**63 - 1, 'it\'s "<b>bold</b>" \\ é'
    assert json.loads(page.send("200 OK", str(number), name, "12")) == {"name": name, "tag": "12"}
    assert json.loads(page.send("200 OK", "-1", name)) == {"name": name}
    assert stored() == [(-1, name, None), (number, name, "12")]
    assert "id: must be at most" in page.send("400", str(number + 1), name)


@pytest.mark.parametrize("wrong", [{"id": "007"}, {"id": "seven"}, {"name": ""}, {"token": "é"}])
def test_what_can_not_be_sent_is_said_at_its_field(page, wrong):
    """An id is digits, and no header takes such a token: the field has the focus, nothing goes."""
    page.send("Nothing was sent", **{"id": "7", "name": "Monstera", **wrong})
    ((name, value),) = wrong.items()
    field = page.switch_to.active_element
    assert field.get_attribute("id") == name
    said = field.get_property("validationMessage")
    assert said == page.text(f"{name}-hint") if value else said


def test_no_answer_is_said(page):
    """With what to do then. While a request is under way, no second one is sent."""
    page.send("200", "7", "Monstera")
    os.killpg(page.server.process.pid, signal.SIGSTOP)
    page.type(Keys.ENTER, Keys.ENTER)
    assert page.text("status") == "Sending…"
    os.killpg(page.server.process.pid, signal.SIGCONT)
    wait_until(lambda: page.text("status").startswith("200"))
    page.server.stop()
    assert page.server.out.count("POST /plants") == 2
    page.type(Keys.ENTER)
    wait_until(lambda: "Check that the service runs" in page.text("status"))


@pytest.mark.parametrize(("permission", "said"), [("granted", "Copied"), ("denied", "Selected")])
def test_the_curl_command_can_be_pasted_into_a_shell(page, permission, said):
    """It sends the same plant again; the token is in it only where that is wanted."""
    for name in ("clipboard-write", "clipboard-read"):
        setting = {"permission": {"name": name}, "setting": permission}
        page.execute_cdp_cmd("Browser.setPermission", setting)
    answer = page.send("200", "7", 'it\'s "$HOME" \\ `id` é', "indoor")
    assert "Bearer TOKEN" in page.text("curl")
    page.type(Keys.TAB, Keys.SPACE, Keys.TAB, Keys.ENTER)
    wait_until(lambda: page.text("copy") == said)
    read = "navigator.clipboard.readText()" if said == "Copied" else "`${getSelection()}`"
    command = page.execute_script(f"return {read}")
    assert subprocess.check_output(["sh", "-c", command], text=True) == answer + "\n"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (320, "dark")])
def test_everybody_can_use_it(page, width, scheme):
    """It is dark where the system is, fits the screen, and axe finds nothing, contrast included."""
    page.show(width, 800, scheme)
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    rules = "{ rules: { 'color-contrast-enhanced': { enabled: true } } }"
    for expected, number in (("Nothing", "seven"), ("400", "9" * 100), ("200", "7")):
        page.send(expected, number, "Monstera")
        found = page.execute_script(f"{axe}; return axe.run({rules})")
        assert [*found["violations"], *found["incomplete"]] == []
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    assert page.execute_script("return document.documentElement.scrollWidth") == width
