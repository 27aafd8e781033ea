"""What the service uses of memory, descriptors and threads stays what it was."""

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from schemas import Plant
from start import get_storage
from storage import Stored
from tests.support.server import PATIENCE, Server, Usage, usage, wait_until
from tests.support.wire import post

CONNECTIONS = 64  # at the same time
EACH = 150  # requests on a connection


def post_all(server: Server, bodies: Iterable[bytes]) -> Counter[bytes]:
    """Post the bodies over connections that send all their requests at once; count the answers."""
    requests = [post(body) for body in bodies]
    last = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    batches = [b"".join(requests[i : i + EACH]) + last for i in range(0, len(requests), EACH)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        answers = pool.map(server.send, batches)
        return sum((Counter(re.findall(rb"HTTP/1.1 (\d+)", data)) for data in answers), Counter())


def test_memory_does_not_grow_with_what_was_stored_or_refused(serve, record_property):
    """30,000 plants, then as many refusals; some of both before is what it starts from."""
    server = serve()

    def store(first: int, end: int) -> list[Usage]:
        plants = [b'{"id": %d, "name": "Monstera"}' % number for number in range(first, end)]
        assert post_all(server, plants)[b"200"] == end - first
        return [usage(pid) for pid in server.workers()]

    def refuse(count: int) -> list[Usage]:
        bodies = (b'{"id": %d, "name": 5}', b'{"id": %d, "name": "another"}', b"%d nonsense")
        answers = post_all(server, [body % number for body in bodies for number in range(count)])
        assert (answers[b"400"], answers[b"409"]) == (2 * count, count)
        return [usage(pid) for pid in server.workers()]

    store(0, 10_000)
    stages = [refuse(10_000), store(10_000, 40_000), refuse(10_000)]
    grown = 0.0  # MiB
    for pid, before, *later in zip(server.workers(), *stages, strict=True):
        grown = max(grown, *(now.memory - before.memory for now in later))
        wait_until(lambda pid=pid, old=before: usage(pid).descriptors <= old.descriptors)
    assert grown < 5
    record_property("30,000 plants, then 30,000 refusals", f"{grown:.1f} MiB more in a worker")


def test_memory_does_not_grow_with_the_size_of_plants(url, record_property):
    """Batches of large plants, of many sizes: nothing of them is kept once they are stored."""
    numbers, name = itertools.count(), "n" * 60_000

    def memory_after(size: int) -> float:
        plants = [Plant(next(numbers), name) for _ in range(size)]
        assert storage.add_all(plants) == [Stored.NEW] * size
        return usage(os.getpid()).memory

    with contextlib.closing(get_storage(url, wait_limit=PATIENCE)) as storage:
        before = max(memory_after(17) for _ in range(5))  # the largest batch that is possible
        grown = max(memory_after(size) for size in [*range(1, 18)] * 3) - before
    record_property("large plants, in batches of many sizes", f"{grown:.1f} MiB more")
    assert grown < 5
