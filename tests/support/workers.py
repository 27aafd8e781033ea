"""Classes for gunicorn's --worker-class and --logger-class: with other limits, or with faults."""

from typing import Any, NoReturn

from access_log import AccessLogger
from worker import Worker


class Quick(Worker):
    """Looks at its connections often, and so ends soon; has the usual limits."""

    check_interval = 0.05
    exit_delay = 0.05


class Short(Quick):
    """Has limits that a test can wait for."""

    receive_limit = 0.5
    send_limit = 0.5
    linger_limit = 0.3


class Patient(Quick):
    """Has limits that no test waits for."""

    receive_limit = 600.0
    send_limit = 600.0
    linger_limit = 600.0
    exit_limits = (600.0, 600.0)


class Late(Quick):
    """Goes on for long after SIGTERM, as where the master is the last to get it."""

    exit_delay = 600.0


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
