"""The page at /, in a real browser: a person fills it in by keyboard and reads the screen."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.support.pages import block
from tests.support.server import HEADERS, TOKEN, Server, free_port, wait_until

# The proxy shows the service below /garden. Its other paths respond with 404.
CADDYFILE = """
{
    admin off
}
http://127.0.0.1:%d {
    handle_path /garden* {
        reverse_proxy 127.0.0.1:%d
    }
    respond 404
}
"""
CLEAR = (Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE)  # the keys that empty a field


class Page(webdriver.Chrome):
    """A page in a Chromium of its own, which keeps its files in `folder`."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for flag in "headless", "no-sandbox", "hide-scrollbars", f"user-data-dir={folder}/chromium":
            options.add_argument(f"--{flag}")
        super().__init__(options, webdriver.ChromeService("/usr/bin/chromedriver"))

    def show(self, width: int, height: int, **media: str) -> None:
        """Set the size of the screen in CSS pixels, and media features such as forced_colors."""
        features = [{"name": k.replace("_", "-"), "value": v} for k, v in media.items()]
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def element(self, name: str) -> WebElement:
        """The element with this id."""
        return self.find_element(By.ID, name)

    def text(self, name: str) -> str:
        """The text of the element with this id."""
        return self.element(name).text

    def color(self, name: str) -> str:
        """The colour of the text of the element with this id."""
        return self.element(name).value_of_css_property("color")

    def type(self, *keys: str) -> None:
        """Type the keys into the element that has the focus."""
        webdriver.ActionChains(self).send_keys(*keys).perform()

    def fill_in(self, id: str, name: str, tag: str = "", token: str = TOKEN) -> None:
        """Fill in the page that was loaded, from its top, and press the button."""
        self.type(Keys.TAB, *[Keys.TAB + value for value in (token, id, name, tag)])
        self.type(Keys.TAB, Keys.ENTER)

    def send(self, status: str, id: str, name: str, **values: str) -> str:
        """Load the page, fill it in and send it. Return the body once the status is shown."""
        self.get(self.url)
        self.fill_in(id, name, **values)
        wait_until(lambda: self.text("status").startswith(status))
        return self.text("body")


@pytest.fixture
def server(serve) -> Server:
    """A service for this test alone, because the test may stop it."""
    return serve()


@pytest.fixture
def proxy(tmp_path, server) -> Iterator[tuple[subprocess.Popen, str]]:
    """A Caddy in front of the service, and the page's address there, without a slash at the end."""
    configuration, log, port = tmp_path / "Caddyfile", tmp_path / "caddy.log", free_port()
    configuration.write_text(CADDYFILE % (port, server.port))
    command = ["caddy", "run", "--adapter=caddyfile", f"--config={configuration}"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    with log.open("w") as err, subprocess.Popen(command, stderr=err, env=environment) as caddy:
        try:
            running = "serving initial configuration"
            wait_until(lambda: running in log.read_text() or caddy.poll() is not None)
            assert caddy.poll() is None, log.read_text()
            yield caddy, f"http://127.0.0.1:{port}/garden"
        finally:
            caddy.kill()


@pytest.fixture
def page(tmp_path, proxy) -> Iterator[Page]:
    """The page behind the proxy; its console may report statuses of responses, and nothing else."""
    with Page(tmp_path, proxy[1]) as page:
        yield page
        assert all(line["source"] == "network" for line in page.get_log("browser"))


def test_a_plant_is_stored_as_it_was_typed(page, stored):
    """The id keeps all its digits, an empty tag is left out, and an error's message is shown."""
    first, last, name = -(2**63), 2**63 - 1, 'it\'s "<b>bold</b>" \\ é'
    assert json.loads(page.send("200 OK", str(last), name, tag="12")) == {"name": name, "tag": "12"}
    assert json.loads(page.send("200 OK", str(first), name)) == {"name": name}
    assert stored() == [(first, name, None), (last, name, "12")]
    assert "already used by a different plant" in page.send("409", str(last), name)


@pytest.mark.parametrize(
    "pasted", [f" {TOKEN} ", f"PLANTS_TOKENS={TOKEN}", f"PLANTS_TOKENS=OLD,{TOKEN}"]
)
def test_a_token_can_be_pasted_with_what_stands_around_it(page, pasted):
    """People copy a space with it, or the line of the file .env. The last token is the new one."""
    page.send("200", "7", "Monstera", token=pasted)
    page.element("reveal").click()
    assert f"Bearer {TOKEN}'" in page.text("curl")


def test_the_page_finds_the_service_below_the_path_of_a_proxy(page):
    """The path may end in a slash or not: the form, the curl command and the link stay below it."""
    below = page.url
    for page.url in (below, f"{below}/", f"{below}?from=mail#none"):
        page.send("200", "7", "Monstera")
        assert page.text("curl").startswith(f"curl '{below}/plants' ")
        assert page.element("description").get_property("href") == f"{below}/openapi.json"


def test_a_response_names_its_request(page, server):
    """It shows the plant's id, and the request id, by which an operator finds the log line."""
    for status, name in (("200", "Monstera"), ("409", "Ivy")):
        page.send(status, "8", name)
        found = re.fullmatch(r"Plant with id 8, X-Request-ID: (\w+)", page.text("request"))
        assert server.logged(found[1])["status"] == int(status)


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "007"}, {"id": "seven"}, {"id": "1 000"}, {"id": ""},
        {"id": str(2**63)}, {"id": str(-(2**63) - 1)}, {"name": ""},
        {"token": "é"}, {"token": "two tokens"},
    ],
)  # fmt: skip
def test_a_wrong_field_is_explained_and_nothing_is_sent(page, server, wrong):
    """The field gets the focus. Neither the previous response nor the previous command stays.

    The hint of the field stands out. An id is a 64-bit integer in digits. No header can carry a
    token with a space or an accent.
    """
    page.send("200", "7", "Monstera")
    ((name, value),) = wrong.items()
    hint, plain = page.element(f"{name}-hint"), page.color(f"{name}-hint")
    page.element(name).send_keys(*CLEAR, value, Keys.ENTER)
    assert page.switch_to.active_element.get_attribute("id") == name
    assert page.color(f"{name}-hint") != plain and hint.text
    assert page.text("status").startswith("Not sent")
    assert page.text("notice") == "Not sent. Fix the marked field."
    assert page.text("request") == page.text("body") == ""
    assert not page.element("copy").is_enabled()
    assert "Monstera" not in page.text("curl")
    right = {"id": "8", "name": "Monstera", "token": TOKEN}[name]
    page.element(name).send_keys(*CLEAR, right)
    assert page.element("copy").is_enabled()
    assert "Monstera" in page.text("curl")
    assert page.text("notice") == ""
    assert server.out.count("POST /plants") == 1


@pytest.mark.parametrize("size", [(1280, 800), (340, 600)])
@pytest.mark.parametrize(
    ("values", "field", "notice"),
    [
        (("", "", ""), "token", "Not sent. Fix the 3 marked fields."),
        ((TOKEN, "x", ""), "id", "Not sent. Fix the 2 marked fields."),
        ((TOKEN, "7", ""), "name", "Not sent. Fix the marked field."),
    ],
)
def test_what_to_fix_is_on_the_screen(page, size, values, field, notice):
    """It stands beside the first wrong field. No bubble of the browser covers the field's hint."""
    token, number, name = values
    page.show(*size)
    page.get(page.url)
    page.execute_script("events = []; addEventListener('invalid', (e) => events.push(e), true)")
    page.fill_in(number, name, token=token)
    assert page.text("notice") == notice
    assert page.switch_to.active_element.get_attribute("id") == field
    for shown in "notice", field, f"{field}-hint":
        script = "return arguments[0].getBoundingClientRect()"
        box = page.execute_script(script, page.element(shown))
        assert box["top"] >= 0 and box["bottom"] <= size[1]
    # The browser shows a bubble unless the event is cancelled (HTML, "form validation").
    assert page.execute_script("return events.length && events.every((e) => e.defaultPrevented)")


def test_an_empty_form_shows_an_example(page):
    """The example is gone with the first character, and can't be copied by mistake."""
    page.get(page.url)
    assert '{"id": 7, "name": "Monstera", "tag": "indoor"}' in page.text("curl")
    assert not page.element("copy").is_enabled()
    for name in ("token", "id", "name", "tag"):
        page.element(name).send_keys("8")
        assert "Monstera" not in page.text("curl")
        page.element(name).send_keys(Keys.BACKSPACE)
        assert "Monstera" in page.text("curl")


def test_a_missing_response_is_explained(page, server, proxy):
    """The page says what to do. While a request is under way, it sends no second one."""
    page.send("200", "7", "Monstera")
    os.killpg(server.process.pid, signal.SIGSTOP)
    page.type(Keys.ENTER, Keys.ENTER)
    assert page.text("status") == "Sending…"
    os.killpg(server.process.pid, signal.SIGCONT)
    wait_until(lambda: page.text("status").startswith("200"))
    server.stop()
    assert server.out.count("POST /plants") == 2
    page.type(Keys.ENTER)
    wait_until(lambda: page.text("status").startswith("502"))  # This response is the proxy's own.
    assert page.text("request") == "Plant with id 7, X-Request-ID: none"
    proxy[0].kill()
    page.type(Keys.ENTER)
    wait_until(lambda: "Check that the service is running" in page.text("status"))


@pytest.mark.parametrize(("permission", "label"), [("granted", "Copied"), ("denied", "Selected")])
def test_the_curl_command_can_be_pasted_into_a_shell(page, permission, label):
    """The command sends the same plant once more. It has the token only if the user asks for it."""
    for name in ("clipboard-write", "clipboard-read"):
        setting = {"permission": {"name": name}, "setting": permission}
        page.execute_cdp_cmd("Browser.setPermission", setting)
    body = page.send("200", "7", 'it\'s "$HOME" \\ `id` é', tag="indoor")
    assert "Bearer TOKEN" in page.text("curl")
    page.type(Keys.TAB, Keys.SPACE, Keys.TAB, Keys.ENTER)
    wait_until(lambda: page.text("copy") == label)
    read = "navigator.clipboard.readText()" if label == "Copied" else "`${getSelection()}`"
    command = page.execute_script(f"return {read}")
    assert subprocess.check_output(["sh", "-c", command], text=True) == body + "\n"


@pytest.mark.parametrize(
    ("width", "media"),
    [
        (1280, {"prefers_color_scheme": "light"}),
        (320, {"prefers_color_scheme": "dark"}),
        (360, {"forced_colors": "active"}),
    ],
)
def test_everybody_can_use_the_page(page, width, media):
    """The page follows the system's colours, fits the screen, and axe finds no fault with it."""
    page.show(width, 800, **media)
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    rules = "{ rules: { 'color-contrast-enhanced': { enabled: true } } }"
    for expected, number, name in [
        ("200", "7", "Monstera"), ("409", "7", "Ivy" * 100), ("Not sent", "9" * 100, "")
    ]:  # fmt: skip
        page.send(expected, number, name)
        found = page.execute_script(f"{axe}; return axe.run({rules})")
        assert [*found["violations"], *found["incomplete"]] == []
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == ("dark" not in media.values())
    assert page.execute_script("return document.documentElement.scrollWidth") == width


def test_a_page_of_another_origin_may_send_any_header(page, server, stored):
    """Tracing libraries add headers to each request; the browser asks whether it may send them."""
    page.get(f"http://localhost:{server.port}/openapi.json")
    names = ("X-Request-ID", "traceparent", "tracestate", "baggage", "sentry-trace")
    headers = {**HEADERS, **dict.fromkeys(names, "other-origin")}
    request = {"method": "POST", "headers": headers, "body": '{"id": 7, "name": "Monstera"}'}
    script = """
        const [url, request, done] = arguments;
        const requestId = (response) => response.headers.get("X-Request-ID");
        fetch(url, request).then(requestId).catch(String).then(done);
    """
    url = f"http://127.0.0.1:{server.port}/plants"
    assert page.execute_async_script(script, url, request) == "other-origin"
    assert stored() == [(7, "Monstera", None)]


def test_the_javascript_client_works_in_a_page_of_another_origin(page, server, stored):
    """Its functions are those that docs/clients.md has for Node."""
    page.get(f"http://localhost:{server.port}/openapi.json")
    client = block("js", "const address").partition("\ntry {")[0]
    for old, new in ((":8000", f":{server.port}"), ("process.env.TOKEN", f"'{TOKEN}'")):
        client = client.replace(old, new)
    call = "save({ id: 2n ** 60n + 1n, name: 'Clover', tag: undefined })"
    script = f"const [done] = arguments; {client}; {call}.then(JSON.stringify).then(done, done)"
    assert page.execute_async_script(script) == '{"name":"Clover"}'
    assert stored() == [(2**60 + 1, "Clover", None)]
