"""The page at /, in a real browser: what a person does, and what then is on the screen."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from schemas import openapi
from tests.ci.node import node_modules
from tests.support.server import ROOT, TOKEN, Server, wait_until

CHROMIUM = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture
def server(serve) -> Server:
    return serve()


@contextlib.contextmanager
def chromium(folder: Path, *arguments: str, **preferences: Any) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in [*CHROMIUM, *arguments, f"--user-data-dir={folder}/chromium"]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    options.add_experimental_option("prefs", preferences)
    browser = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield browser
    finally:
        browser.quit()


@pytest.fixture
def browser(server, tmp_path) -> Iterator[webdriver.Chrome]:
    """Chromium on the page. Fails afterwards if anything was amiss in the console."""
    with chromium(tmp_path) as browser:
        here = open_page(browser, server)
        yield browser
        # That a request was refused is in the console as well, from the source "network".
        console = [line for line in browser.get_log("browser") if line["source"] != "network"]
        assert console == []
        assert all(url.startswith(here) for url in requested_by(here, browser))


def open_page(browser: webdriver.Chrome, server: Server) -> str:
    """Load the page, wait for its form and return its URL."""
    here = f"http://127.0.0.1:{server.port}/"
    browser.get(here)
    wait_until(lambda: browser.find_elements(By.ID, "field-name"))
    return here


def requested_by(page: str, browser: webdriver.Chrome) -> list[str]:
    """The URLs of all requests that the page has made, the one for itself among them."""
    events = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    requests = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    urls = [request["request"]["url"] for request in requests if request["documentURL"] == page]
    assert page in urls
    return urls


def fill(browser: webdriver.Chrome, **values: str) -> None:
    for name, value in {"token": TOKEN, **values}.items():
        place = browser.find_element(By.ID, name if name == "token" else f"field-{name}")
        place.clear()
        place.send_keys(value)


def press_send(browser: webdriver.Chrome) -> None:
    browser.find_element(By.ID, "send").click()


def send(browser: webdriver.Chrome, expected: str) -> str:
    """Press Send, wait for a status and return the answer that is shown."""
    browser.execute_script("document.getElementById('answer').replaceChildren()")
    press_send(browser)
    wait_until(lambda: text(browser, "#answer .status").startswith(expected))
    return text(browser, "#answer")


def text(browser: webdriver.Chrome, selector: str) -> str:
    read = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText).join(' ')"
    return browser.execute_script(read, selector).strip()


def code(browser: webdriver.Chrome, name: str) -> str:
    """What Copy would copy, with the token in it."""
    shown = browser.find_element(By.ID, name).get_attribute("textContent")
    assert "Bearer TOKEN" in shown
    return shown.replace("TOKEN", TOKEN)


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """A service that takes connections, but answers nothing until the end."""
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def blocked(browser: webdriver.Chrome) -> Iterator[None]:
    """The page as it is while its description can't be loaded."""
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/openapi.json"]})
    browser.refresh()
    wait_until(lambda: text(browser, "#reason"))
    yield
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})


def problem(browser: webdriver.Chrome, name: str) -> str:
    place = browser.find_element(By.ID, name)
    shown = text(browser, f"#{name}-problem")
    assert place.get_attribute("aria-invalid") == ("true" if shown else "false")
    assert f"{name}-problem" in place.get_attribute("aria-describedby")
    return shown


def test_a_plant_is_sent(browser, stored):
    """Status, headers that matter, pretty JSON; the list below remembers."""
    fill(browser, id="7", name="Monstera", tag="indoor")
    answer = send(browser, "200")
    assert answer.startswith("200 OK\n\nX-Request-ID\n")
    shown = browser.find_element(By.CSS_SELECTOR, "#answer pre").get_attribute("textContent")
    assert shown == '{\n  "name": "Monstera",\n  "tag": "indoor"\n}'
    assert browser.find_element(By.ID, "answer").aria_role == "status"
    assert text(browser, "#sent") == '200{"id": 7, "name": "Monstera", "tag": "indoor"}'
    assert stored() == [(7, "Monstera", "indoor")]


def test_it_shows_the_interface(browser):
    """Method and path, the kind of each field, and each answer with the first sentence on it."""
    operation = openapi()["paths"]["/plants"]["post"]
    assert text(browser, ".request") == "POST /plants"
    assert text(browser, "#operation") == operation["description"]
    assert text(browser, "#fields .kind").split(" ") == [
        "integer,", "required", "string,", "required", "string,", "optional"
    ]  # fmt: skip
    statuses = browser.find_elements(By.CSS_SELECTOR, "#answers dt")
    described = [*operation["responses"], "other"]
    described.remove("default")
    assert [each.text for each in statuses] == described
    lines = browser.find_elements(By.CSS_SELECTOR, "#answers dd")
    assert lines[0].text == "The plant is saved."
    assert all(re.fullmatch(r"[^.]+\.", line.text) for line in lines)


def test_a_violation_is_shown_beside_its_field(browser, stored):
    """In plain words, and the first such field has the focus."""
    fill(browser, id="7")
    for name in ("name", "tag"):
        half = "document.getElementById(arguments[0]).value = '\\ud800'"
        browser.execute_script(half, f"field-{name}")
    assert '"error": 400' in send(browser, "400")
    for name in ("name", "tag"):
        assert problem(browser, f"field-{name}") == "must not contain half of a surrogate pair"
    assert problem(browser, "field-id") == problem(browser, "token") == ""
    assert browser.switch_to.active_element.get_attribute("id") == "field-name"
    fill(browser, tag="indoor")
    assert problem(browser, "field-tag") == "" != problem(browser, "field-name")
    fill(browser, name="Monstera")
    send(browser, "200")
    assert problem(browser, "field-tag") == problem(browser, "field-name") == ""
    assert browser.switch_to.active_element.text == "Send"
    assert stored() == [(7, "Monstera", "indoor")]


def test_what_is_no_integer_is_said_before_it_is_sent(browser, server):
    """It would be no JSON at all; a 64-bit integer is sent, also with spaces around it."""
    for value in ("007", "seven", "+7", "1e3", "-"):
        fill(browser, id=value, name="Monstera")
        press_send(browser)
        assert problem(browser, "field-id").startswith("must be an integer: only digits")
        assert browser.switch_to.active_element.get_attribute("id") == "field-id"
    for value in (2**63, -(2**63) - 1):
        fill(browser, id=str(value))
        press_send(browser)
        assert problem(browser, "field-id") == "must be an integer of 64 bits"
    fill(browser, id=" 0 ")
    send(browser, "200")
    wait_until(lambda: server.out.count('"POST /plants"') == 1)
    assert text(browser, "#sent") == '200{"id": 0, "name": "Monstera"}'


def test_new_id_fills_in_a_free_one(browser, stored):
    """A random one of at most 2**53, so that a second plant does not collide."""
    fill(browser, id="x", name="Monstera")
    press_send(browser)
    assert problem(browser, "field-id")
    for _ in range(2):
        browser.find_element(By.CSS_SELECTOR, "#fields button").click()
        assert problem(browser, "field-id") == ""
        filled_in = browser.find_element(By.ID, "field-id").get_attribute("value")
        assert f'"id": {filled_in},' in code(browser, "curl")
        send(browser, "200")
    ids = [row[0] for row in stored()]
    assert len(ids) == 2 and all(0 < each <= 2**53 for each in ids)


def test_a_token_may_be_pasted_as_it_stands_in_a_header(browser):
    """With spaces around it, or with the word Bearer before it."""
    for number, pasted in enumerate((f"  {TOKEN} ", f"Bearer {TOKEN}", f" bearer  {TOKEN}")):
        fill(browser, token=pasted, id=str(number), name="Monstera")
        if not browser.find_element(By.ID, "reveal").is_selected():
            browser.find_element(By.ID, "reveal").click()
        assert f"'Authorization: Bearer {TOKEN}'" in text(browser, "#curl")
        send(browser, "200")


def test_the_form_follows_the_schema(serve, tmp_path):
    """An enum and a boolean are choices, a number is sent as one, and only the id has a button."""
    shutil.copytree(ROOT / "schemas", tmp_path / "schemas")
    file = tmp_path / "schemas/plant.json"
    schema = json.loads(file.read_text())
    schema["properties"] |= {
        "tag": {"type": "string", "enum": ["indoor", "outdoor"]},
        "height": {"type": "integer"},
        "weight": {"type": "number"},
        "potted": {"type": "boolean"},
    }
    for member in schema["properties"].values():
        member |= {"description": "Text", "examples": member.get("enum", ["x"])}
    file.write_text(json.dumps(schema))
    with chromium(tmp_path) as browser:
        open_page(browser, serve("--pythonpath", str(tmp_path)))
        assert text(browser, "#fields button") == "New id"
        fill(browser, id="7", name="Monstera", height="1.5", weight="1,5")
        press_send(browser)
        assert problem(browser, "field-height").startswith("must be an integer")
        assert problem(browser, "field-weight").startswith("must be a number")
        fill(browser, height="70", weight=" 1.5 ")
        for name, choice in (("tag", "outdoor"), ("potted", "true")):
            browser.find_element(By.CSS_SELECTOR, f"select#field-{name}").send_keys(choice)
        assert code(browser, "curl").splitlines()[-1].strip() == (
            '-d \'{"id": 7, "name": "Monstera", "tag": "outdoor", "height": 70, "weight": 1.5, '
            '"potted": true}\''
        )


def test_without_a_token_nothing_is_sent(browser, server):
    """The page asks for one, and for all else that is missing; a header takes ASCII only.

    An old answer is not shown beside a plant that was not sent.
    """
    press_send(browser)
    assert problem(browser, "token") == "enter a token" and problem(browser, "field-tag") == ""
    assert problem(browser, "field-id") == problem(browser, "field-name") == "required but missing"
    fill(browser, id="7", name="Monstera")
    send(browser, "200")
    for token in ("", "  ", "Bearer", "tok\u20acn"):
        fill(browser, token=token, id="7", name="Monstera")
        press_send(browser)
        expected = "has a character that no token has" if "tok" in token else "enter a token"
        assert problem(browser, "token") == expected
        assert browser.switch_to.active_element.get_attribute("id") == "token"
        assert text(browser, "#answer") == "Not sent"
    assert text(browser, "#sent").count("\n") == 0
    fill(browser)
    send(browser, "200")
    wait_until(lambda: server.out.count('"POST /plants"') == 2)


def test_an_old_answer_is_not_shown_while_a_request_is_under_way(browser, server):
    """The page says that it is sending, and sends no second request meanwhile."""
    fill(browser, id="7", name="Monstera")
    send(browser, "200")
    with stopped(server):
        press_send(browser)
        assert text(browser, "#answer") == "Sending…"
        browser.find_element(By.ID, "field-name").send_keys(Keys.ENTER)
        assert not browser.find_element(By.ID, "send").is_enabled()
        assert text(browser, "#answer") == "Sending…"
    wait_until(lambda: text(browser, "#answer .status") == "200 OK")
    wait_until(lambda: server.out.count('"POST /plants"') == 2)


def test_an_answer_of_something_in_between_is_shown_as_it_is(browser):
    """A proxy's own page is no JSON; the newline at its end is no line to show."""
    page = "new Response('<h1>Bad Gateway</h1>\\n', {status: 502, statusText: 'Bad Gateway'})"
    browser.execute_script(f"window.fetch = async () => {page}")
    fill(browser, id="7", name="Monstera")
    send(browser, "502 Bad Gateway")
    shown = browser.find_element(By.CSS_SELECTOR, "#answer pre").get_attribute("textContent")
    assert shown == "<h1>Bad Gateway</h1>"
    assert text(browser, "#sent").startswith("502")


def test_a_conflict_and_a_wrong_token_are_shown_where_they_belong(browser, server):
    """Beside the id and the token; the latter with the header that says what is wanted."""
    server.post({"id": 7, "name": "Sequoia"})
    fill(browser, id="7", name="Monstera")
    send(browser, "409")
    assert problem(browser, "field-id").startswith("7 is taken by another plant")
    fill(browser, token="not-a-good-token")
    assert 'WWW-Authenticate\nBearer realm="plants"' in send(browser, "401")
    assert problem(browser, "token") == "the bearer token is not valid"


def test_the_service_being_down_is_said(browser, server):
    """And that it is safe to send again."""
    fill(browser, id="7", name="Monstera")
    server.signal(signal.SIGKILL)
    server.kill()
    assert "safe to send the same plant again" in send(browser, "No answer")
    assert text(browser, "#sent").startswith("no answer")
    assert browser.find_element(By.ID, "send").is_enabled()


def test_without_its_description_nothing_can_be_sent(browser, server):
    """The page says what is missing, and a button tries again until it is there."""
    with blocked(browser):
        retry = browser.find_element(By.ID, "retry")
        for _ in range(2):
            wait_until(lambda: "openapi.json, can't be loaded" in text(browser, "#reason"))
            assert not browser.find_element(By.ID, "form").is_displayed()
            assert text(browser, "#curl") == ""
            retry.click()
    retry.click()
    wait_until(lambda: not retry.is_displayed())
    assert browser.switch_to.active_element.get_attribute("id") == "token"
    fill(browser, id="7", name="Monstera")
    send(browser, "200")


def test_without_javascript_it_says_what_is_needed(browser):
    """And links the description instead of a form that would do nothing."""
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.refresh()
    said = browser.find_element(By.TAG_NAME, "main")
    wait_until(lambda: said.text.startswith("This page needs JavaScript."))
    link = said.find_element(By.TAG_NAME, "a")
    assert link.get_attribute("href") == f"{browser.current_url}openapi.json"
    assert not browser.find_element(By.ID, "form").is_displayed()


def test_without_session_storage_it_works_all_the_same(server, tmp_path):
    """Where the browser lets no page store anything, the token is forgotten at a reload."""
    no_storage = {"profile.default_content_setting_values.cookies": 2}
    with chromium(tmp_path, **no_storage) as browser:
        open_page(browser, server)
        with pytest.raises(WebDriverException, match="Access is denied"):
            browser.execute_script("sessionStorage")
        fill(browser, id="7", name="Monstera")
        send(browser, "200")
        open_page(browser, server)
        assert browser.find_element(By.ID, "token").get_attribute("value") == ""


def test_a_plant_arrives_as_it_was_typed(browser, stored):
    """An id beyond 2**53 keeps every digit; quotes, markup, backslashes are shown as text."""
    name = 'it\'s "<b>bold</b>" \\ é; id: x'
    fill(browser, id="9223372036854775807", name=name)
    assert "<b>bold</b>" in send(browser, "200")
    assert stored() == [(2**63 - 1, name, None)]


def test_the_keyboard_is_enough(browser, stored):
    """Tab goes from the token through the fields to Send; Enter sends from any of them."""

    def focused() -> WebElement:
        return browser.switch_to.active_element

    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    keys = []
    for value in (TOKEN, "7", "", "Monstera", "indoor"):
        keys.append(focused().get_attribute("id") or focused().text)
        focused().send_keys(value + Keys.TAB)
    assert keys == ["token", "field-id", "New id", "field-name", "field-tag"]
    assert focused().text == "Send"
    focused().send_keys(Keys.SHIFT + Keys.TAB + Keys.NULL + Keys.ENTER)
    wait_until(lambda: text(browser, "#answer .status") == "200 OK")
    assert stored() == [(7, "Monstera", "indoor")]


def test_the_token_stays_in_the_tab_and_out_of_sight(browser):
    """Not in the URL, not in the code unless asked for; there again after a reload."""
    fill(browser, id="7", name="Monstera")
    send(browser, "200")
    assert TOKEN not in browser.current_url
    assert TOKEN not in text(browser, "main")
    assert "Authorization: Bearer TOKEN" in text(browser, "#curl")
    assert "'Bearer TOKEN'" in text(browser, "#fetch")
    browser.find_element(By.ID, "reveal").click()
    assert f"Authorization: Bearer {TOKEN}" in text(browser, "#curl")
    assert f"'Bearer {TOKEN}'" in text(browser, "#fetch")
    browser.refresh()
    wait_until(lambda: browser.find_elements(By.ID, "field-name"))
    assert browser.find_element(By.ID, "token").get_attribute("value") == TOKEN
    assert browser.execute_script("return localStorage.length + document.cookie.length") == 0


@pytest.mark.parametrize("name", ["curl", "fetch"])
def test_the_code_is_always_a_request_that_succeeds(browser, stored, name):
    """Examples stand for what is missing or wrong; what has to be quoted is."""

    def run() -> None:
        if name == "curl":
            command = ["bash", "-c", code(browser, "curl").replace("curl ", "curl -sS --fail ", 1)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        else:
            call = (
                f"const done = arguments[0]; {code(browser, 'fetch')}.then((a) => done(a.status))"
            )
            assert browser.execute_async_script(call.replace("await ", "", 1)) == 200

    odd = 'Mother-in-law\'s "tongue" \\ é'
    run()
    fill(browser, id="8")
    run()
    fill(browser, id="9", name=odd)
    run()
    fill(browser, id="007", name="Monstera", tag="indoor")
    run()
    rows = [(7, "Monstera", "indoor"), (8, "Monstera", None), (9, odd, None)]
    assert stored() == rows


def test_copy_copies(browser):
    """Or selects, where the browser does not let a page write to the clipboard."""
    button = browser.find_element(By.CSS_SELECTOR, "[data-copies=curl]")
    button.click()
    wait_until(lambda: button.text in ("Copied", "Selected"))
    wait_until(lambda: button.text == "Copy")


def show(browser: webdriver.Chrome, width: int, height: int, scheme: str = "light") -> None:
    """Make the screen so many CSS pixels large; the scheme is that of day or night."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def amiss(browser: webdriver.Chrome) -> list[Any]:
    """What axe-core finds or cannot decide, and how far the page can be scrolled sideways."""
    browser.execute_script((node_modules() / "axe-core" / "axe.min.js").read_text("utf-8"))
    found = browser.execute_async_script("""
        const done = arguments[0], nodes = ({ html, any }) => [html, any.map((e) => e.message)];
        const rules = { 'color-contrast-enhanced': { enabled: true } };
        axe.run({ rules }).then(({ violations, incomplete }) => done(
          [...violations, ...incomplete].map((found) => [found.id, found.nodes.map(nodes)])));
        """)
    sideways = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    return found + ([f"{sideways} px to scroll sideways"] if sideways > 0 else [])


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it_in_each_state(browser, server, width, scheme):
    """axe-core has nothing to say, contrast (AAA) included; nothing needs scrolling sideways."""
    show(browser, width, 800, scheme)
    with blocked(browser):
        assert amiss(browser) == []
    browser.refresh()
    wait_until(lambda: browser.find_elements(By.ID, "field-name"))
    assert amiss(browser) == []
    fill(browser, token="", id="seven", name="x" * 200)
    press_send(browser)
    assert problem(browser, "token") and problem(browser, "field-id") and amiss(browser) == []
    fill(browser, id="7")
    for _ in range(2):
        send(browser, "200")
        assert amiss(browser) == []
    with stopped(server):
        press_send(browser)
        assert amiss(browser) == []
    wait_until(lambda: text(browser, "#answer .status") == "200 OK")
    fill(browser, id="", name="")
    send(browser, "Not sent")
    assert amiss(browser) == []
    fill(browser, id="7", name="Sequoia")
    send(browser, "409")
    assert amiss(browser) == []
    fill(browser, token="not-a-good-token")
    send(browser, "401")
    assert amiss(browser) == []
    server.kill()
    send(browser, "No answer")
    assert amiss(browser) == []


def test_a_wide_screen_is_used(browser):
    """A line of code is a line on it, also with a long id, and both columns are filled."""
    show(browser, 1280, 800)
    fill(browser, name="Monstera", tag="indoor")
    browser.find_element(By.CSS_SELECTOR, "#fields button").click()
    for name, count in (("curl", 4), ("fetch", 8)):
        lines = """
            const node = document.getElementById(arguments[0]), style = getComputedStyle(node);
            const padding = parseFloat(style.paddingTop) + parseFloat(style.paddingBottom);
            return (node.scrollHeight - padding) / parseFloat(style.lineHeight);
            """
        assert round(browser.execute_script(lines, name)) == count
    columns = "return [...document.querySelectorAll('.column')].map((node) => node.offsetHeight)"
    for _ in range(2):
        left, right = browser.execute_script(columns)
        assert 0.6 < left / right < 1 / 0.6
        send(browser, "200")


FOCUSED = """
const { top, right, bottom, left } = arguments[0].getBoundingClientRect();
const style = getComputedStyle(arguments[0]);
const ring = parseFloat(style.outlineOffset) + parseFloat(style.outlineWidth);
const covered = [...document.querySelectorAll("label, p, h2, h3")].filter((text) => {
  const box = text.getBoundingClientRect();
  return box.height && !text.contains(arguments[0]) && box.bottom > top - ring
    && box.top < bottom + ring && box.right > left - ring && box.left < right + ring;
});
return [Math.min(top, innerHeight - bottom), ring, covered.map((text) => text.innerText)];
"""


def test_what_has_the_focus_is_in_sight(browser):
    """It is never at the very edge of a small browser, and its ring covers no text."""
    show(browser, 360, 480)
    fill(browser, token="not-a-good-token", id="7", name="Monstera")
    send(browser, "401")
    for first, key in (("#token", Keys.TAB), ("footer a", Keys.SHIFT + Keys.TAB)):
        browser.execute_script("document.querySelector(arguments[0]).focus()", first)
        seen = set()
        for _ in range(13):
            focused = browser.switch_to.active_element
            distance, ring, covered = browser.execute_script(FOCUSED, focused)
            assert distance >= 16 and ring >= 3 and covered == []
            seen.add(focused)
            focused.send_keys(key)
        assert len(seen) == 13
