"""A commit for each request: the service, but with one plant in each batch."""

from app import create_app, read_environment
from storage import Batch, Entry, GroupCommit, Plant


class CommitEach(GroupCommit):
    """Closes a batch as soon as there is something in it."""

    def submit(self, item: Plant | None) -> Entry:
        """Begin to write `item` on its own."""
        entry = super().submit(item)
        entry.start_batch()
        self._open = Batch()
        return entry


storage, tokens, origins = read_environment()
storage._group.__class__ = CommitEach
app = create_app(storage, tokens, origins)
