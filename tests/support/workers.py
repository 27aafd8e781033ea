"""Classes for gunicorn's --worker-class: the service's worker with other time limits."""

import math
import time

import worker
from worker import Worker


class Short(Worker):
    """Has time limits that are short enough to wait for, and checks them 20 times a second."""

    check_interval = 0.05
    limits = 0.5, 0.3  # Seconds, in place of REQUEST_TIMEOUT and LINGER_TIMEOUT.

    def run(self) -> None:
        worker.REQUEST_TIMEOUT, worker.LINGER_TIMEOUT = self.limits
        super().run()


class Patient(Short):
    """Never disconnects a client for being slow, however busy the machine is."""

    limits = math.inf, math.inf


class Restless(Patient):
    """Checks its clocks, and whether it has to end, in every round of the event loop.

    If there are too many connections, it closes one, even if its client has just connected.
    """

    check_interval = 0.0

    def run(self) -> None:
        worker.EVICT_AFTER = 0.0
        super().run()


class Sparing(Patient):
    """Closes no connection to make room for another while a slot is free."""

    def run(self) -> None:
        worker.EVICT_AFTER = math.inf
        super().run()


class Lingering(Short):
    """Has no limit for a request to arrive, and a short one for the last response to be read."""

    limits = math.inf, 0.3


class Starting(Worker):
    """Stays in its start for ten minutes, longer than any test takes."""

    def init_process(self) -> None:
        self.log.info("this worker is starting")
        time.sleep(600)


class Failing(Worker):
    """Has an application that breaks the rules of PEP 3333: it raises an exception."""

    def run(self) -> None:
        self.wsgi = lambda *_: 1 / 0
        super().run()
