"""The pages agree with the service and with each other. That their commands work is in tests/ci."""

import re
import runpy
from unittest.mock import Mock

import pytest

from app import check_health
from storage import ADD_LIMIT
from tests.ci.test_docs import ELSEWHERE, TYPED
from tests.support.pages import BLOCK, PAGES, table
from tests.support.server import ROOT, TOKEN
from worker import EVICT_ABOVE, LINGER_TIMEOUT, REQUEST_TIMEOUT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_files_that_are_named_exist(page):
    """Links to files and to headings; names of files by their ends."""
    for target in re.findall(r'\]\(([^)\s]+)\)|src(?:set)?="([^"]+)"', PAGES[page]):
        target = "".join(target)
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            headings = re.findall("(?m)^#+ (.*)$", file.read_text("utf-8")) if heading else []
            slugs = {re.sub(r"\W+", "-", each.lower()).strip("-") for each in headings}
            assert not heading or heading in slugs, target
    named = set(re.findall(r"`(\w[\w./-]*\.(?:py|service|socket|conf|toml|html))`", PAGES[page]))
    named -= {"transfer.py"}  # which versions before this one had
    files = [f"/{file}" for pattern in ("*.*", "[!.]*/**/*.*") for file in ROOT.glob(pattern)]
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()


def test_the_table_of_variables_has_all_that_are_read():
    """And no others."""
    code = "".join(file.read_text() for file in (ROOT / "start.py", ROOT / "gunicorn.conf.py"))
    read = set(re.findall(r'"(PLANTS_[A-Z]+|DATABASE_URL|PORT|WEB_CONCURRENCY)"', code))
    rows = {row[0].strip("`"): row[1].strip("`") for row in table("variable")}
    assert set(rows) == read
    assert f'"{rows["DATABASE_URL"]}"' in code


def test_the_limits_are_those_that_are_stated(monkeypatch):
    """Waiting for each of them would take long."""
    monkeypatch.setenv("PLANTS_TOKENS", TOKEN)  # else the settings of gunicorn make one
    settings = runpy.run_path(str(ROOT / "gunicorn.conf.py"))
    check_health(storage := Mock())
    assert storage.check.call_args.args[0] < 2  # what platforms wait for
    stated = str(table(r"what \| limit"))
    seconds = [float(limit) for limit in re.findall(r"'(\d+) seconds'", stated)]
    assert seconds == [
        settings["keepalive"],
        REQUEST_TIMEOUT,
        REQUEST_TIMEOUT,
        LINGER_TIMEOUT,
        ADD_LIMIT,
    ]
    assert f"from {EVICT_ABOVE * 1000:.0f} on" in stated
    for_a_stop = f"have begun, for at most {settings['graceful_timeout']} seconds"
    assert for_a_stop in PAGES[ROOT / "docs/deploy.md"]


def test_each_command_is_run_by_a_test():
    """Some pages are typed as a whole. Other blocks are named by the test that runs them."""
    whole = [*TYPED, ROOT / "docs/forty-lines.md"]
    tests = "".join(file.read_text("utf-8") for file in ROOT.glob("tests/ci/test_*.py"))
    named = tuple(re.findall(r"""block\("sh", ["']([^"'\\]+)""", tests))
    for page in PAGES:
        for language, text in BLOCK.findall(PAGES[page]):
            is_typed = page in whole and not re.search(ELSEWHERE, text)
            assert language != "sh" or is_typed or text.startswith(named), text
