"""Classes for gunicorn's --worker-class and --logger-class: with other limits, or with faults."""

import math
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from access_log import AccessLogger
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


def fail(*_: object, **__: object) -> NoReturn:
    """Fail, in the place of a method."""
    raise RuntimeError("a fault made by a test")


class FailingHandle(Worker):
    """Fails when it is to serve a connection."""

    handle = fail


class FailingRequest(Worker):
    """Fails when it is to answer a request."""

    handle_request = fail


class FailingError(Worker):
    """Fails when it is to answer what is not HTTP."""

    handle_error = fail


class FailingLogger(AccessLogger):
    """Fails when it is to write a line of the access log."""

    def access(self, resp: Any, req: Any, environ: Any, request_time: Any) -> None:
        """Write nothing."""
        fail()
