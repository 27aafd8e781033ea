"""What the storage needs of a database, and in which ways it can fail.

Contains no SQL and imports no database: sqlite.py and postgresql.py are the engines.
"""

import abc
import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from schemas import Plant

log = logging.getLogger("plants")  # start.py makes it a part of the web server's log


class Conflict(Exception):
    """Another plant has this id. It stays as it is."""


class Rejected(Exception):
    """The database never takes this plant: a constraint, a trigger or an index is against it."""


class Unavailable(RuntimeError):
    """The plant is not known to be stored; storing it again is safe."""


class NeedsOperator(Unavailable):
    """Waiting does not help: an operator has to do what the message says."""


class Inserted(NamedTuple):
    """What became of a batch."""

    new: Collection[int] = ()  # ids that were not there before, as far as this try has seen
    locked: Collection[int] = ()  # ids whose rows other transactions hold; not written
    existing: Mapping[int, Plant] | None = None  # what has the batch's ids now; None: all are new


class Engine(abc.ABC):
    """A database with a table of plants, used by one thread at a time, but for rows()."""

    description: str  # what the database is and where, without a password
    identity: str | None  # what tells it from another one at the same place; None until it is seen
    obstacle: str = ""  # what the engine is waiting for, if that is known

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from writing meanwhile."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def insert(self, plants: Sequence[Plant]) -> Inserted:
        """Store durably the plants whose id is new; without plants, prove that it could.

        Creates the table if there is none and `identity` is None. Raises Unavailable, after which
        each plant may be stored or not, and Rejected if one or more of the plants may be at fault.
        """

    @abc.abstractmethod
    def rows(self) -> Iterator[Plant]:
        """Yield all plants as of now, in the order of id. Raises Unavailable."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection, if there is one."""
