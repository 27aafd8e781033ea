"""Classes for gunicorn's --worker-class, with other limits."""

import math
import time

import worker
from worker import Worker


class Short(Worker):
    """Has limits that a test can wait for, and looks at its clients often."""

    check_interval = 0.05
    limits = 0.5, 0.3

    def run(self) -> None:
        worker.REQUEST_TIMEOUT, worker.LINGER_TIMEOUT = self.limits
        super().run()


class Patient(Short):
    """Has limits that no test waits for."""

    limits = math.inf, math.inf


class Lingering(Short):
    """Has one limit that a test can wait for: the one for reading the last response."""

    limits = math.inf, 0.3


class Starting(Worker):
    """Is never ready to serve."""

    def init_process(self) -> None:
        time.sleep(600)
