"""What the service uses of memory, descriptors and threads stays what it was."""

import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from tests.support.server import Server, Usage, usage, wait_until
from tests.support.wire import post

CONNECTIONS = 64  # at the same time
EACH = 150  # requests on a connection


def post_all(server: Server, bodies: Iterable[bytes], each: int = EACH) -> Counter[bytes]:
    """Post the bodies over connections that send all their requests at once; count the answers."""
    requests = [post(body) for body in bodies]
    last = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    batches = [b"".join(requests[i : i + each]) + last for i in range(0, len(requests), each)]
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


def test_memory_does_not_grow_with_the_size_of_plants(serve, record_property):
    """Batches of plants of 60 kB, of many sizes: nothing of them is kept once they are stored."""
    server = serve()

    def store(first: int, end: int) -> list[float]:
        plants = (b'{"id": %d, "name": "%s"}' % (n, b"n" * 60_000) for n in range(first, end))
        assert post_all(server, plants, 50)[b"200"] == end - first
        return [usage(pid).memory for pid in server.workers()]

    before = store(0, 10)
    after = store(10, 3000)
    grown = max(new - old for new, old in zip(after, before, strict=True))
    record_property("180 MB of large plants", f"{grown:.1f} MiB more in a worker")
    assert grown < 12
