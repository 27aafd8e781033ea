"""Bodies that are no plant, no JSON or nothing at all: each is taken or refused as it should be."""

import re
from collections.abc import Callable

import pytest

from schemas import VALIDATORS
from tests.support.json_cases import OTHERS, REFUSED, TEXTS
from tests.support.server import HEADERS


@pytest.fixture
def post(client) -> Callable[[bytes], tuple[int, dict]]:
    def post_to_client(body: bytes) -> tuple[int, dict]:
        answer = client.post("/plants", body, HEADERS, expect_errors=True)
        return answer.status_int, answer.json

    return post_to_client


def test_what_is_json_is_taken_and_what_is_not_is_refused(post, stored):
    """As the whole body, beside a plant, as the name of one, and as a member that is ignored."""
    plants = []
    for number, case in enumerate([*TEXTS, *OTHERS, *REFUSED]):
        ids = 2 * number, 2 * number + 1
        refused(post, case)
        if case.strip():
            refused(post, case + b'{"id": 7, "name": "n"}')
            refused(post, b'{"id": 7, "name": "n"}' + case)
        for plant, body, is_taken in (
            ((ids[0], TEXTS.get(case)), b'{"id": %d, "name": %b}', case in TEXTS),
            ((ids[1], "n"), b'{"id": %d, "name": "n", "x": %b}', case not in REFUSED),
        ):
            if not is_taken:
                refused(post, body % (plant[0], case))
                continue
            assert post(body % (plant[0], case)) == (200, {"name": plant[1]}), case[:99]
            plants.append((*plant, None))
    assert stored() == plants


@pytest.mark.parametrize("depth", [100, 1_000, 10_000, 30_000])
def test_what_is_nested_is_taken_or_refused_however_deep_a_parser_goes(post, depth):
    """Python's goes to about 1,000 or 100,000, depending on its version."""
    for nested in (
        b"[" * depth + b"]" * depth,
        b'{"":' * (depth // 4) + b"[]" + b"}" * (depth // 4),
    ):
        refused(post, nested)
        refused(post, b'{"id": 7, "name": %b}' % nested)
        refused(post, b'{"id": 7, "name": "\\ud800", "x": %b}' % nested)
        status, answer = post(b'{"id": 7, "name": "\\u006e", "x": %b}' % nested)
        deep = {"error": 400, "message": "the plant is nested too deeply"}
        assert (status, answer) in [(200, {"name": "n"}), (400, deep)]


def refused(post: Callable[[bytes], tuple[int, dict]], body: bytes) -> None:
    """Assert that `body` is answered with an Error that names the place of what is wrong."""
    status, answer = post(body)
    assert status == 400, body[:99]
    VALIDATORS["error"].validate(answer)
    assert re.match('the plant|id: |name: |x: |"', answer["message"]), body[:99]
