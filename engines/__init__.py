"""What the storage needs of a database, and in which ways it can fail. Contains no SQL."""

import abc
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from plant import Plant

log = logging.getLogger("plants")  # start.py makes it a part of the web server's log


class Conflict(Exception):
    """Another plant has this id. It stays as it is."""


class Rejected(Exception):
    """The database never takes this plant: a constraint, a trigger or an index is against it."""


class Unavailable(RuntimeError):
    """The plant is not known to be stored; storing it again is safe."""


class Blocked(Unavailable):
    """This plant can't be stored now: its row is locked, or a trigger has failed for now."""


class NeedsOperator(Unavailable):
    """Waiting does not help: an operator has to do what the message says."""


class Engine(abc.ABC):
    """A database with a table of plants, used by one thread at a time, but for rows().

    Whatever is called first opens the database, and makes it if there is none.
    """

    description: str  # what the database is and where, without a password
    max_batch: int  # plants that insert() takes at once

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Keep other processes from writing meanwhile. Raises Unavailable."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def check(self) -> None:
        """Prove durably that plants could be stored. Raises Unavailable, or Rejected."""

    @abc.abstractmethod
    def insert(self, plants: Sequence[Plant], is_part: bool) -> Mapping[int, Plant]:
        """Store durably the plants whose id is new; return what is stored under the ids of all.

        No id may be given twice. A part of a batch hardly waits for locked rows. Raises Rejected
        or Blocked if one of the plants may be at fault, else Unavailable.
        """

    @abc.abstractmethod
    def rows(self) -> Iterator[Plant]:
        """Yield all plants as of now, in the order of id. Raises Unavailable."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection, if there is one."""
