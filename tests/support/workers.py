"""Classes for gunicorn's --worker-class and --logger-class: with other limits, or with faults."""

import time
from typing import Any, NoReturn

from worker import AccessLogger, Worker


class Short(Worker):
    """Has limits that a test can wait for."""

    request_limit = 0.5
    linger_limit = 0.3
    exit_delay = 0.1


class Patient(Worker):
    """Has limits that no test waits for."""

    request_limit = 600.0
    linger_limit = 600.0
    exit_delay = 600.0


class Lenient(Worker):
    """Gives a request more time than a test has."""

    request_limit = 600.0


class Hasty(Worker):
    """Hardly waits for its last answer to be read."""

    linger_limit = 0.1


class Late(Worker):
    """Goes on for long after SIGTERM, as where the master is the last to get it."""

    exit_delay = 4.0


class Starting(Worker):
    def init_process(self) -> None:
        time.sleep(600)


def fail(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("a fault made by a test")


class FailingHandle(Worker):
    handle = fail


class FailingTimeout(Worker):
    timeout_ctx = fail


class FailingRequest(Worker):
    handle_request = fail


class FailingError(Worker):
    """Fails when it is to answer what is not HTTP."""

    handle_error = fail


class FailingLogger(AccessLogger):
    """Fails when it is to write a line of the access log."""

    def access(self, resp: Any, req: Any, environ: Any, request_time: Any) -> None:
        """Write nothing."""
        fail()
