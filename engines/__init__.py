"""The databases that a storage can have, each an Engine of storage.py, and how they wait."""

import gevent

# Seconds; an upper bound for gather(): under constant load the event loop is never idle.
GATHER_LIMIT = 0.001


def gather() -> None:
    """Let every request that has arrived queue its plant first, so that they share a batch."""
    with gevent.Timeout(GATHER_LIMIT, False):
        gevent.idle()
