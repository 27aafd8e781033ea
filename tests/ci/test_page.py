"""The page at /, in a real browser: what a person does, and what then is on the screen."""

import json
import signal
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.support.server import TOKEN, Server, wait_until

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


@pytest.fixture
def browser(server, tmp_path) -> Iterator[webdriver.Chrome]:
    """Chromium on the page. Fails afterwards if anything was amiss in the console."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in [*CHROMIUM, f"--user-data-dir={tmp_path}/chromium"]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService("/usr/bin/chromedriver")
    browser = webdriver.Chrome(options, service)
    try:
        here = f"http://127.0.0.1:{server.port}/"
        browser.get(here)
        wait_until(lambda: browser.find_elements(By.ID, "field-name"))
        yield browser
        # That a request was refused is in the console as well, from the source "network".
        console = [line for line in browser.get_log("browser") if line["source"] != "network"]
        assert console == []
        assert all(url.startswith(here) for url in requested_by(here, browser))
    finally:
        browser.quit()


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


def send(browser: webdriver.Chrome, expected: str) -> str:
    """Press Send, wait for a status and return the answer that is shown."""
    browser.execute_script("document.getElementById('answer').replaceChildren()")
    browser.find_element(By.CSS_SELECTOR, "[type=submit]").click()
    wait_until(lambda: text(browser, "#answer .status").startswith(expected))
    return text(browser, "#answer")


def text(browser: webdriver.Chrome, selector: str) -> str:
    read = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText).join(' ')"
    return browser.execute_script(read, selector).strip()


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
    assert '{\n  "name": "Monstera",\n  "tag": "indoor"\n}' in answer
    assert text(browser, "#sent") == '200{"id": 7, "name": "Monstera", "tag": "indoor"}'
    assert stored() == [(7, "Monstera", "indoor")]


def test_a_violation_is_shown_beside_its_field(browser, stored):
    """In plain words, and the first such field has the focus."""
    fill(browser, id="seven")
    answer = send(browser, "400")
    assert problem(browser, "field-id") == 'must be an integer, not "seven"'
    assert problem(browser, "field-name") == "required but missing"
    assert problem(browser, "field-tag") == problem(browser, "token") == ""
    assert browser.switch_to.active_element.get_attribute("id") == "field-id"
    assert '"error": 400' in answer
    fill(browser, id="7")
    assert problem(browser, "field-id") == ""
    assert problem(browser, "field-name") == "required but missing"
    fill(browser, name="Monstera")
    send(browser, "200")
    assert problem(browser, "field-id") == problem(browser, "field-name") == ""
    assert browser.switch_to.active_element.text == "Send"
    assert stored() == [(7, "Monstera", None)]


def test_a_conflict_is_shown_beside_the_id(browser, server):
    """It names the id, so it belongs there."""
    server.post({"id": 7, "name": "Sequoia"})
    fill(browser, id="7", name="Monstera")
    send(browser, "409")
    assert problem(browser, "field-id").startswith("7 is taken by another plant")


def test_what_stands_in_a_value_names_no_field(browser):
    """A message repeats what was sent, which may look like a part of a message."""
    fill(browser, id='x; tag: "hello"; name: no')
    send(browser, "400")
    assert problem(browser, "field-id").startswith("must be an integer, not")
    assert problem(browser, "field-tag") == ""
    assert problem(browser, "field-name") == "required but missing"


def test_a_token_that_cannot_be_sent_is_shown_beside_the_token(browser):
    """A header takes ASCII only."""
    fill(browser, token="tok\u20acn", id="7", name="Monstera")
    browser.find_element(By.CSS_SELECTOR, "[type=submit]").click()
    wait_until(lambda: problem(browser, "token") == "has a character that no token has")


def test_an_answer_of_something_in_between_is_shown_as_it_is(browser):
    """A proxy's own page is no JSON."""
    page = "new Response('<h1>Bad Gateway</h1>', {status: 502, statusText: 'Bad Gateway'})"
    browser.execute_script(f"window.fetch = async () => {page}")
    fill(browser, id="7", name="Monstera")
    assert send(browser, "502 Bad Gateway").endswith("<h1>Bad Gateway</h1>")
    assert text(browser, "#sent").startswith("502")


def test_a_wrong_token_is_shown_beside_the_token(browser, stored):
    """With the header that says what is wanted."""
    fill(browser, token="not-a-good-token", id="7", name="Monstera")
    assert 'WWW-Authenticate\nBearer realm="plants"' in send(browser, "401")
    assert problem(browser, "token") == "the bearer token is not valid"
    assert stored() == []


def test_the_service_being_down_is_said(browser, server):
    """And that it is safe to send again."""
    fill(browser, id="7", name="Monstera")
    server.signal(signal.SIGKILL)
    server.kill()
    assert "safe to send the same plant again" in send(browser, "No answer")
    assert browser.find_element(By.CSS_SELECTOR, "[type=submit]").is_enabled()


def test_an_id_beyond_2_to_the_53_keeps_every_digit(browser, stored):
    """JavaScript's numbers would not."""
    fill(browser, id="9223372036854775807", name="Monstera")
    send(browser, "200")
    assert stored() == [(2**63 - 1, "Monstera", None)]


def test_any_text_arrives_as_it_was_typed(browser, stored):
    """Quotes, markup, backslashes; the page shows them as text."""
    name = 'it\'s "<b>bold</b>" \\ é; id: x'
    fill(browser, id="7", name=name)
    assert "<b>bold</b>" in send(browser, "200")
    assert stored() == [(7, name, None)]


def test_the_keyboard_is_enough(browser, stored):
    """Tab goes from the token through the fields to Send; Enter sends from any of them."""

    def focused() -> WebElement:
        return browser.switch_to.active_element

    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    keys = []
    for value in (TOKEN, "7", "Monstera", "indoor"):
        keys.append(focused().get_attribute("id"))
        focused().send_keys(value + Keys.TAB)
    assert keys == ["token", "field-id", "field-name", "field-tag"]
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
    assert '"Bearer TOKEN"' in text(browser, "#fetch")
    browser.find_element(By.ID, "reveal").click()
    assert f"Authorization: Bearer {TOKEN}" in text(browser, "#curl")
    assert f'"Bearer {TOKEN}"' in text(browser, "#fetch")
    browser.refresh()
    wait_until(lambda: browser.find_elements(By.ID, "field-name"))
    assert browser.find_element(By.ID, "token").get_attribute("value") == TOKEN
    assert browser.execute_script("return localStorage.length + document.cookie.length") == 0


def test_the_code_that_is_shown_works(browser, stored):
    """The fetch line, run as it stands; what has to be quoted is."""
    fill(browser, id="7", name='Mother-in-law\'s "tongue"')
    browser.find_element(By.ID, "reveal").click()
    assert "'\\''s" in text(browser, "#curl")
    code = browser.execute_script("return document.getElementById('fetch').textContent")
    run = "const done = arguments[0]; (async () => {{ done((await ({})).status) }})()"
    assert browser.execute_async_script(run.format(code)) == 200
    assert stored() == [(7, 'Mother-in-law\'s "tongue"', None)]


def test_copy_copies(browser):
    """Or selects, where the browser does not let a page write to the clipboard."""
    button = browser.find_element(By.CSS_SELECTOR, "[data-copies=curl]")
    button.click()
    wait_until(lambda: button.text in ("Copied", "Selected"))
    wait_until(lambda: button.text == "Copy")


def test_everything_has_a_name_for_screen_readers(browser):
    """Each control has an accessible name; the answer is announced."""
    for control in browser.find_elements(By.CSS_SELECTOR, "input, button, pre, a"):
        assert control.accessible_name, control.get_attribute("outerHTML")
    assert browser.find_element(By.ID, "answer").aria_role == "status"
    assert browser.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"


CONTRAST = """
const luminance = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number)
  .map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const background = (node) => {
  const color = getComputedStyle(node).backgroundColor;
  return color.startsWith("rgba(0, 0, 0, 0)") ? background(node.parentElement) : color;
};
const shown = [...document.querySelectorAll("body *")].filter((node) => node.innerText?.trim());
return shown.map((node) => {
  const [a, b] = [luminance(getComputedStyle(node).color), luminance(background(node))];
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.outerHTML];
}).filter(([ratio]) => ratio < 4.5);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_is_readable_by_day_and_night_wide_and_narrow(browser, scheme, width):
    """Contrast of 4.5 to 1 or more (WCAG AA, 1.4.3), and nothing to scroll sideways for."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    fill(browser, id="seven", name="x" * 200)
    send(browser, "400")
    fill(browser, id="7", name="x" * 200)
    for _ in range(2):
        assert browser.execute_script(CONTRAST) == []
        overflow = "return document.documentElement.scrollWidth - innerWidth"
        assert browser.execute_script(overflow) <= 0
        send(browser, "200")
