"""The load: how the clients post plants, and what one run of them has measured."""

import itertools
import json
import subprocess
import time
from typing import NamedTuple

from environments import HERE
from service import TOKEN, Service

first_ids = itertools.count(10**9, 10**9)  # of the runs, so that no id comes twice


class Setting(NamedTuple):
    """What a run is like."""

    title: str
    connections: int = 32
    slow: bool = False
    database: str = "sqlite"


SETTINGS = {
    "1": Setting("1 connection", connections=1),
    "32": Setting("32 connections"),
    "128": Setting("128 connections", connections=128),
    "slow": Setting("32 connections, 5 ms more for each sync", slow=True),
    "postgresql": Setting("32 connections, PostgreSQL", database="postgresql"),
}


class Run(NamedTuple):
    """What one run has measured: plants a second, and milliseconds."""

    rate: float
    p50: float
    p99: float


def post(service: Service, setting: Setting, seconds: int, order: str = "in-order") -> Run | None:
    """Post for some seconds; None for a run in which not each 200 is a row.

    The clients end without waiting for the last answer on each connection, so there may be a few
    more rows: at most one for each connection, and one of the connection that wrk tries out first.
    """
    title, before = service.competitor.title, service.count()
    threads, connections = str(min(setting.connections, 2)), str(setting.connections)
    command = ["wrk", "-t", threads, "-c", connections, "-d", f"{seconds}s", "--latency"]
    command += ["--timeout", "30s", "-s", str(HERE / "post.lua"), service.url]
    command += ["--", TOKEN, str(next(first_ids)), order]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"thrown out: {title}: it is not there any more", flush=True)
        return None
    told = json.loads(done.stdout.splitlines()[-1])
    time.sleep(0.5)  # for what was under way when the client went
    extra = service.count() - before - told["answers"] if service.competitor.stores else 0
    if told["refused"] or told["broken"] or not 0 <= extra <= setting.connections + 1:
        print(f"thrown out: {title}: {told}, {extra} more rows", flush=True)
        return None
    run = Run(told["answers"] / told["seconds"], told["p50"], told["p99"])
    print(f"{title}, {setting.title}: {run.rate:.0f}/s, p99 {run.p99:.1f} ms", flush=True)
    return run
