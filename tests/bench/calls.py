"""How long a call of the application takes without a server: servers/call_time.py measures it."""

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

from environments import HERE


class Calls(NamedTuple):
    """Microseconds of CPU time a call: of the service's application, and of one on Bottle that
    answers a constant."""

    application: float
    constant: float


def measure_calls(tools: Path, source: Path) -> Calls:
    """Measure the application in the folder `source`, with the Python in the folder `tools`."""
    program = [str(tools / "python"), str(HERE / "servers" / "call_time.py")]
    done = subprocess.run(program, cwd=source, check=True, stdout=subprocess.PIPE, text=True)
    calls = Calls(**json.loads(done.stdout))
    print(f"{calls.application:.1f} us a call, {calls.constant:.1f} of a constant", flush=True)
    return calls
