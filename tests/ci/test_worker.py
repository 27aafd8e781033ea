"""The worker over a longer time: what it keeps in memory."""

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from tests.support.server import STORED, Server, memory
from tests.support.wire import CLOSE, NOWHERE, post

CONNECTIONS, EACH = 64, 150  # at the same time; requests on a connection


def post_all(server: Server, bodies: Iterable[bytes]) -> list[int]:
    """Post bodies over connections that send all their requests at once; return the statuses."""
    requests = [post(body) for body in bodies]
    last = NOWHERE.replace(b"\r\n\r\n", CLOSE + b"\r\n")
    batches = [b"".join(requests[i : i + EACH]) + last for i in range(0, len(requests), EACH)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        answers = b"".join(pool.map(server.send, batches))
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answers)]


def test_memory_does_not_grow_with_what_was_stored_or_refused(serve):
    """15,000 plants, then as many refusals and 5,000 connections; it starts from some of each."""
    server = serve()

    def store(first: int, end: int) -> list[float]:
        plants = [b'{"id": %d, "name": "Monstera"}' % number for number in range(first, end)]
        assert post_all(server, plants).count(STORED) == end - first
        return list(map(memory, server.workers()))

    def refuse() -> list[float]:
        for _ in range(5_000):
            server.connect().close()
        bodies = (b'{"id": %d, "name": 5}', b'{"id": %d, "name": "another"}', b"%d nonsense")
        answers = post_all(server, [body % number for body in bodies for number in range(5_000)])
        assert (answers.count(400), answers.count(409)) == (10_000, 5_000)
        return list(map(memory, server.workers()))

    store(0, 5_000)
    before, *stages = refuse(), store(5_000, 20_000), refuse()
    grown = max(now - then for stage in stages for now, then in zip(stage, before, strict=True))
    assert grown < 5
