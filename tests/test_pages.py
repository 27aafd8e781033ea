"""The pages agree with the service and with each other. tests/ci runs their commands."""

import re
import runpy
from itertools import chain
from unittest.mock import Mock

import pytest
from gunicorn.config import Config

import app
import storage
import worker
from plant import InvalidPlant, parse_new_plant
from storage import Rejected
from tests.support.pages import BLOCK, ELSEWHERE, PAGES, SENTENCES, TYPED, block, table
from tests.support.server import ROOT, TOKEN
from tests.support.wire import MONSTERA, receive_response
from tests.test_app import failing, post


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_files_that_are_named_exist(page):
    """Links lead to files and to headings. A file may be named by the end of its path."""
    for target in re.findall(r'\]\(([^)\s]+)\)|src(?:set)?="([^"]+)"', PAGES[page]):
        target = "".join(target)
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            headings = re.findall("(?m)^#+ (.*)$", file.read_text("utf-8")) if heading else []
            slugs = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
            assert not heading or heading in slugs, target
    named = set(re.findall(r"`(\w[\w./-]*\.(?:py|service|socket|conf|toml|html))`", PAGES[page]))
    named -= {"transfer.py", "deploy/rescue.py"}  # Older versions had these files.
    files = [f"/{file}" for pattern in ("*.*", "[!.]*/**/*.*") for file in ROOT.glob(pattern)]
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()


def test_the_table_of_variables_has_all_that_are_read():
    """The table has no others."""
    code = "".join(file.read_text() for file in (ROOT / "start.py", ROOT / "gunicorn.conf.py"))
    read = set(re.findall(r'"(PLANTS_[A-Z]+|DATABASE_URL|PORT|WEB_CONCURRENCY)"', code))
    rows = {row[0].strip("`"): row[1].strip("`") for row in table("variable")}
    assert set(rows) == read
    assert f'"{rows["DATABASE_URL"]}"' in code


def test_the_limits_are_those_that_are_stated(monkeypatch):
    """Each row names the constant or the setting of gunicorn that sets it."""
    monkeypatch.setenv("PLANTS_TOKENS", TOKEN)  # Otherwise gunicorn.conf.py makes one.
    defaults = {name: setting.get() for name, setting in Config().settings.items()}
    limits = defaults | runpy.run_path(str(ROOT / "gunicorn.conf.py"))
    limits |= vars(worker) | vars(storage) | vars(app)
    limits["EVICT_ABOVE"] *= limits["worker_connections"]
    for what, limit, _, name in table(r"what \| limit"):
        number, unit = limit.split()
        factor = 1024 if unit == "KiB" else 1
        assert int(number.replace(",", "")) * factor == limits[name.strip("`")], what
    for_a_stop = f"that has arrived, for at most {limits['graceful_timeout']} seconds"
    assert for_a_stop in SENTENCES


def test_a_health_check_is_quick_enough_for_platforms():
    """README.md states two seconds."""
    app.check_health(checked := Mock())
    assert checked.check.call_args.args[0] < 2


def test_messages_that_the_page_quotes_are_those_of_the_service():
    with pytest.raises(InvalidPlant) as refusal:
        parse_new_plant(b'{"id": 1e16, "name": ""}')
    rejection = post(failing(Rejected("a constraint")), MONSTERA).json["message"]
    for message in str(refusal.value), rejection:
        assert f"`{message}`" in SENTENCES


def test_the_exchange_on_the_page_is_what_a_client_sends_and_receives(server, send):
    """Except for the time, the request id, which is new each time, and the order of the headers."""
    data = block("http", "POST /plants").removesuffix("\n").replace("TOKEN", TOKEN)
    response = receive_response(send(server, data.replace("\n", "\r\n").encode()))
    varying = r"(?m)^(Date|X-Request-ID): .*$"
    lines = re.sub(varying, "", response.decode().replace("\r\n", "\n")).splitlines()
    shown = re.sub(varying, "", block("http", "HTTP/1.1 200")).splitlines()
    assert lines[0] == shown[0] and sorted(lines) == sorted(shown)


FOREIGN = {  # Words of SQLite, PostgreSQL, gunicorn, systemd and the system, and a path of ours.
    "/healthz", "Address already in use", "Connection in use", "Input/output error",
    "Is a directory", "No space left", "Operation not permitted", "Permission denied", "Read-only",
    "connection failed", "is not permitted to log in", "quota exceeded",
    "too many connections for role", "rejects connection", "does not support SSL",
    "unsupported file format",
    "does not exist", "failed to resolve host", "malformed", "no such table", "not a database",
    "password authentication failed", "permission denied", "read-only transaction", "readonly",
    "is full", "is locked", "disk I/O error", "timeout",
    'relation "plants" does not exist', "start-limit-hit", "unable to open",
}  # fmt: skip


def test_the_words_that_an_operator_looks_up_are_those_of_the_messages():
    """Those of other programs are FOREIGN. The pages that messages name exist."""
    folders = [(ROOT / each).glob("*.py") for each in ("", "engines", "deploy")]
    code = re.sub(r'"\s+f?"', "", "".join(file.read_text("utf-8") for file in chain(*folders)))
    section = PAGES[ROOT / "docs/emergencies.md"].split("## Look up what the log says")[1]
    rows = re.findall(r"(?m)^\| (.*?) \|", section.partition("\n## ")[0])
    cells = {word for row in rows for word in re.findall("`(.+?)`", row)}
    words = {part for word in cells for part in word.split(" ... ")}
    assert words >= FOREIGN
    assert {word for word in words - FOREIGN if word not in code} == set()
    for page in re.findall(r"docs/[\w-]+\.md", code):
        assert (ROOT / page).exists(), page


def test_each_command_is_run_by_a_test():
    """Tests type some pages as a whole. Elsewhere, a test names each block that it runs."""
    whole = [*TYPED, ROOT / "docs/forty-lines.md"]
    tests = "".join(file.read_text("utf-8") for file in ROOT.glob("tests/ci/test_*.py"))
    named = tuple(re.findall(r"""block\("sh", ["']([^"'\\]+)""", tests))
    for page in PAGES:
        for language, text in BLOCK.findall(PAGES[page]):
            is_typed = page in whole and not re.search(ELSEWHERE, text)
            assert language != "sh" or is_typed or text.startswith(named), text
