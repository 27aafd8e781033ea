"""Classes for gunicorn's --worker-class, with other limits."""

import math
import time
from collections.abc import Mapping

from worker import LIMITS, State, Worker


class Quick(Worker):
    """Looks at its connections often, and so ends soon; has the usual limits."""

    check_interval = 0.05
    exit_delay = 0.05


class Short(Quick):
    """Has limits that a test can wait for."""

    limits: Mapping[State, float] = {
        **LIMITS,
        State.SENDING: 0.5,
        State.ENDING: 0.3,
        State.RECEIVING: 0.5,
    }
    exit_limits: Mapping[State, float] = {**limits, State.WAITING: 0.1, State.RECEIVING: 0.3}


class Lenient(Quick):
    """Waits for as long as it takes, but at the end not for idle clients."""

    limits: Mapping[State, float] = dict.fromkeys(State, math.inf)
    exit_limits: Mapping[State, float] = {**limits, State.WAITING: 0.5}


class Patient(Lenient):
    """Has limits that no test waits for, and does not end at SIGTERM while one runs."""

    exit_delay = 600.0
    exit_limits = Lenient.limits


class Starting(Worker):
    """Is never ready to serve."""

    def init_process(self) -> None:
        """Take longer than any test waits."""
        time.sleep(600)
