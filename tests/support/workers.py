"""Classes for gunicorn's --worker-class, with other limits."""

import math
import time

import worker
from worker import Worker


class Quick(Worker):
    """Looks at its clients often, and so ends soon; has the usual limits."""

    check_interval = 0.05


class Short(Quick):
    """Has limits that a test can wait for."""

    def run(self) -> None:
        worker.LIMIT, worker.LAST_LIMIT = 0.5, 0.3
        super().run()


class Patient(Quick):
    """Has limits that no test waits for."""

    def run(self) -> None:
        worker.LIMIT = worker.LAST_LIMIT = math.inf
        super().run()


class Starting(Worker):
    """Is never ready to serve."""

    def init_process(self) -> None:
        """Take longer than any test waits."""
        time.sleep(600)
