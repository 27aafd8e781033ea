"""A commit for each request: the service, its group commit bypassed."""

import threading

from app import create_app, read_environment
from storage import Plant

storage, tokens, origins = read_environment()
lock = threading.Lock()


def add(plant: Plant) -> None:
    """Store a plant on its own."""
    with lock:
        (outcome,) = storage.add_all([plant])[1]
    if outcome is not None:
        raise outcome


storage.add = add  # type: ignore[method-assign]
app = create_app(storage, tokens, origins)
