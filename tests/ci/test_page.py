"""The page at /, in a real browser: what a person does, and what then is on the screen."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.support.server import TOKEN, wait_until


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[webdriver.Chrome]:
    """A browser that keeps its files in `folder`."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    flags = "headless no-sandbox disable-gpu no-first-run disable-background-networking"
    for flag in [*flags.split(), "hide-scrollbars", f"user-data-dir={folder}/chromium"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver")) as browser:
        yield browser


class Page:
    """The page in a browser, and what a person does with it."""

    def __init__(self, browser: webdriver.Chrome, port: int) -> None:
        self.browser, self.run = browser, browser.execute_script
        browser.get(f"http://127.0.0.1:{port}/")
        wait_until(lambda: self.text("#columns") or self.text("#unavailable"))

    def show(self, width: int, height: int, scheme: str) -> None:
        """Make the screen so many CSS pixels large, in a scheme of colours."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def fill(self, **values: str) -> None:
        """Type values into fields."""
        for name, value in values.items():
            field = self.browser.find_element(By.NAME, name)
            field.clear()
            field.send_keys(value)

    def send(self, expected: str, token: str = TOKEN, **values: str) -> str:
        """Fill in the form and press Send; return the answer, once it is the expected one."""
        self.fill(token=token, **values)
        self.run("document.getElementById('answer').replaceChildren()")
        self.browser.find_element(By.ID, "send").click()
        wait_until(lambda: self.text("#answer .status").startswith(expected))
        return self.text("#answer")

    def text(self, selector: str) -> str:
        """The text that is on the screen."""
        read = "const found = document.querySelector(arguments[0]);"
        return self.run(f"{read} return found?.checkVisibility() ? found.innerText : ''", selector)

    def mistakes(self) -> dict[str, str]:
        """What stands beside each field that is marked as wrong, by its name."""
        wrong = self.browser.find_elements(By.CSS_SELECTOR, "#form [aria-invalid=true]")
        names = [each.get_attribute("name") for each in wrong]
        places = [each.get_attribute("aria-describedby").split()[-1] for each in wrong]
        return dict(zip(names, [self.text(f"#{place}") for place in places], strict=True))

    def focused(self) -> str:
        """The id of what has the focus."""
        return self.browser.switch_to.active_element.get_attribute("id")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """Chromium, in whose console no error may be but the statuses of answers."""
    with chromium(tmp_path) as browser:
        yield browser
        assert all(line["source"] == "network" for line in browser.get_log("browser"))


@pytest.fixture
def page(browser, server) -> Page:
    """The page of the server that tests share: each stores plants of its own."""
    return Page(browser, server.port)


def test_a_plant_is_stored_as_it_was_typed(browser, serve, stored):
    """All digits of an id; text of digits; what turns text turns nothing around the value."""
    page, name = Page(browser, serve().port), 'it\'s "<b>bold</b>" \\ \u202e; id: x'
    answer = page.send("200 OK", id="9223372036854775807", name=name, tag="12")
    assert re.search(r"^X-Request-ID: \w+$", answer, re.MULTILINE)
    assert json.loads(answer[answer.index("{") :]) == {"name": name, "tag": "12"}
    assert stored() == [(2**63 - 1, name, "12")]
    isolated = page.run("return [...document.querySelectorAll('bdi')].map((e) => e.textContent)")
    assert isolated.count(" \\\\ \u202e; id: x") == 2


def test_each_mistake_is_shown_beside_its_field(page):
    """Until the field is changed; the first such field has the focus."""
    page.send("400", id="007")
    assert page.mistakes()["id"] == "must be an integer, not a string"
    assert page.focused() == "field-id"
    page.fill(id="1007")
    assert page.mistakes() == {"name": "required but missing"}
    page.send("200", name="Monstera")
    assert page.mistakes() == {} and page.focused() == "send"
    page.send("409", name="Sequoia")
    assert page.mistakes() == {"id": "is taken by another plant, which stays as it is"}


def test_a_wrong_token_is_shown_beside_it(page):
    """A token that no header can have is not even sent."""
    assert "WWW-Authenticate: Bearer" in page.send("401", token="not-a-good-token")
    assert page.mistakes() == {"token": "the bearer token is not valid"}
    for token in ("", "Bearer token", "tok€n"):
        assert page.send("Not sent", token=token) == "Not sent"
        assert page.mistakes().keys() == {"token"} and page.focused() == "token"


def test_no_answer_is_said(browser, serve):
    """Nor is an old answer shown, or a second request sent, while one is under way."""
    server = serve()
    page = Page(browser, server.port)
    page.send("200", id="7", name="Monstera")
    os.killpg(server.process.pid, signal.SIGSTOP)
    browser.find_element(By.ID, "send").click()
    browser.find_element(By.NAME, "name").send_keys(Keys.ENTER)
    assert page.text("#answer") == "Sending…"
    os.killpg(server.process.pid, signal.SIGCONT)
    wait_until(lambda: page.text("#answer .status") == "200 OK")
    page.send("200")
    wait_until(lambda: server.out.count('"POST /plants"') == 3)
    server.kill()
    assert "safe to send the same plant again" in page.send("No answer")


def test_without_what_it_needs_it_says_so(browser, page):
    """That is the description, of which it makes the form, and JavaScript."""
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*openapi.json"]})
    browser.refresh()
    wait_until(lambda: "openapi.json" in page.text("#unavailable"))
    assert not page.text("#form")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.refresh()
    wait_until(lambda: browser.find_element(By.TAG_NAME, "main").text.endswith("needs JavaScript."))


def test_the_curl_command_is_a_request_that_succeeds(browser, serve, stored):
    """The token is in it only where that is wanted; examples stand for what is missing."""
    page, odd = Page(browser, serve().port), 'Mother-in-law\'s "tongue" \\ é'
    page.fill(token=TOKEN)
    assert TOKEN not in page.text("body") and "Bearer TOKEN" in page.text("#curl")
    browser.find_element(By.ID, "reveal").click()
    for values in ({}, {"id": "8", "name": odd, "tag": "indoor"}):
        page.fill(**values)
        command = page.text("#curl").replace("curl ", "curl -sS --fail ", 1)
        subprocess.run(["bash", "-c", command], check=True)
    assert stored() == [(7, "Monstera", None), (8, odd, "indoor")]


@pytest.mark.parametrize(("permission", "said"), [("granted", "Copied"), ("denied", "Selected")])
def test_the_curl_command_is_copied(page, permission, said):
    """Or selected, where the browser lets no page write to the clipboard."""
    for name in ("clipboard-write", "clipboard-read"):
        setting = {"permission": {"name": name}, "setting": permission}
        page.browser.execute_cdp_cmd("Browser.setPermission", setting)
    page.browser.find_element(By.ID, "copy").click()
    wait_until(lambda: page.text("#copy") == said)
    read = "navigator.clipboard.readText()" if said == "Copied" else "`${getSelection()}`"
    assert page.run(f"return {read}") == page.text("#curl")


def test_the_keyboard_is_enough(page):
    """Tab goes through the form, the answer and the curl command; nothing is at the very edge."""
    page.show(360, 480, "light")

    def press(place: str, keys: str) -> None:
        assert page.focused() == place
        bounds = "const { top, bottom } = document.activeElement.getBoundingClientRect();"
        assert page.run(f"{bounds} return Math.min(top, innerHeight - bottom)") >= 16
        page.browser.switch_to.active_element.send_keys(keys)

    page.browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    values = {"token": TOKEN, "field-id": "3001", "field-name": "Monstera", "field-tag": "indoor"}
    for place, value in values.items():
        press(place, value + Keys.TAB)
    press("send", Keys.ENTER)
    wait_until(lambda: page.text("#answer .status") == "200 OK")
    for place, key in (("send", ""), ("", ""), ("reveal", Keys.SPACE), ("copy", ""), ("curl", "")):
        press(place, key + Keys.TAB)
    assert f"Bearer {TOKEN}" in page.text("#curl")


def amiss(page: Page) -> list[Any]:
    """What axe-core finds or can't decide, contrast (AAA) included."""
    page.run(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    found = page.run("return axe.run({ rules: { 'color-contrast-enhanced': { enabled: true } } })")
    return [*found["violations"], *found["incomplete"]]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_everybody_can_use_it(page, width, scheme):
    """It is dark where the system is; on a narrow screen nothing needs scrolling sideways."""
    page.show(width, 800, scheme)
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (min(map(int, re.findall(r"\d+", background))) < 128) == (scheme == "dark")
    assert amiss(page) == []
    page.send("400", id="seven", name="x" * 200)
    assert page.mistakes() and amiss(page) == []
    page.send("200", id=str(width))
    assert amiss(page) == []
    wide = "(e) => e.scrollWidth > e.clientWidth"
    assert page.run(f"return [...document.querySelectorAll('html, pre')].filter({wide})") == []
