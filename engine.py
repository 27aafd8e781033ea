"""What the storage needs of a database, and in which ways it can fail.

Contains no SQL and imports no database: sqlite.py and postgresql.py are the engines.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from schemas import Plant


class Conflict(Exception):
    """Another plant has this id. It stays as it is."""


class Unavailable(Exception):
    """The plant is not known to be stored; storing it again is safe."""


class NeedsOperator(Unavailable):
    """Waiting does not help: an operator has to do what the message says."""


class Inserted(NamedTuple):
    """What became of a batch."""

    new: int = 0  # how many plants were stored that were not there before
    locked: Collection[int] = ()  # ids whose rows other transactions hold; not written
    existing: Mapping[int, Plant] | None = None  # what has the batch's ids now; None: all are new


class Engine(Protocol):
    """A database with a table of plants, used by one thread at a time, but for rows().

    insert() stores durably the plants whose id is new; without plants, it proves that it could. If
    it raises Unavailable, each may be stored or not; another exception means that plants are at
    fault. locked() keeps other processes from writing. rows() are all plants as of now, by id.
    """

    description: str  # what the database is and where, without a password
    identity: str  # what tells it from another one at the same place; "" before it was seen
    obstacle: str = ""  # what the engine is waiting for, if that is known

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def insert(self, plants: Sequence[Plant]) -> Inserted: ...
    def rows(self) -> Iterator[Plant]: ...
    def close(self) -> None: ...
