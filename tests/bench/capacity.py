"""What a plant costs: `python tests/bench/capacity.py` writes the table in docs/data.md.

Needs wrk, PostgreSQL and the packages of the tests.
"""

import contextlib
import os
import platform
import re
import sqlite3
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from competitors import this_service
from environments import ROOT
from load import SETTINGS, post
from service import running

sys.path.append(str(ROOT))
from tests.support.postgresql import PostgreSQL, processes_in, running_postgresql

ROWS, SECONDS = 1_000_000, 20  # in the table, and of posting
IDS = {"in-order": "n", "at-random": "n * 2654435761 % 4294967296 * 1048576"}
FILL = f"""
    WITH RECURSIVE numbers (n) AS
        (SELECT CAST(1 AS bigint) UNION ALL SELECT n + 1 FROM numbers WHERE n < {ROWS})
    INSERT INTO plants SELECT %s, 'Monstera', 'indoor' FROM numbers"""
PAGE = ROOT / "docs" / "data.md"
PLACE = r"(?s)(<!-- tests/bench/capacity.py writes this -->\n).*?(\n<!-- to here -->)"
COLUMNS = ["ids", "bytes a plant", "plants/s", "CPU of the service, us a plant"]
COLUMNS += ["CPU of PostgreSQL", "written to the disk, bytes a plant", "WAL"]


def spent(pids: Iterable[int | str]) -> tuple[float, float]:
    """Seconds of CPU time of processes, and bytes that they wrote to the disk."""
    seconds = written = 0.0
    for process in (Path(f"/proc/{pid}") for pid in pids):
        with contextlib.suppress(OSError):  # it has ended
            times = (process / "stat").read_text().rpartition(")")[2].split()[11:15]
            seconds += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
            written += int(re.search(r"\nwrite_bytes: (\d+)", (process / "io").read_text())[1])
    return seconds, written


def fill(database: Path, server: PostgreSQL | None, order: str) -> float:
    """Fill a table; return how many bytes each plant takes, with the index."""
    if server:
        server.execute(FILL % IDS[order])
        server.execute("CHECKPOINT")  # it must not be a part of what is measured
        return server.execute("SELECT pg_total_relation_size('plants')")[0][0] / ROWS
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(FILL % IDS[order])
    return database.stat().st_size / ROWS


def measure(folder: Path, server: PostgreSQL | None, order: str) -> str:
    """A line of the table; of SQLite, if there is no server."""
    database = folder / "plants.db"
    url = server.url() if server else f"sqlite:///{database}"
    ours = this_service("this service", Path(sys.executable).parent, ROOT)
    with running(ours, folder, url):
        pass  # it has made the table
    size = fill(database, server, order)
    with running(ours, folder, url) as service:

        def look() -> tuple[float, ...]:
            master = service.process.pid
            workers = Path(f"/proc/{master}/task/{master}/children").read_text().split()
            there = processes_in(server.folder) if server else []
            wal = server.execute("SELECT pg_current_wal_lsn() - '0/0'")[0][0] if server else 0
            return *spent(workers), *spent(there), float(wal), service.count()

        before = look()
        run = post(service, SETTINGS["postgresql" if server else "32"], SECONDS, order)
        *all_spent, count = (now - then for now, then in zip(look(), before, strict=True))
        cpu, written, cpu_there, written_there, wal = (each / count for each in all_spent)
        log = f"{os.stat(f'{database}-wal').st_size / 2**20:.1f} MiB in all" if not server else ""
    return (
        f"| {'PostgreSQL' if server else 'SQLite'}, {order.replace('-', ' ')} | {size:.0f} "
        f"| {run.rate:,.0f} | {cpu * 1e6:.0f} | {cpu_there * 1e6:.0f} "
        f"| {written + written_there:,.0f} | {log or f'{wal:.0f} bytes a plant'} |"
    )


def main() -> None:
    """Measure both databases with both orders of ids, and write the table."""
    tempfile.tempdir = "/var/tmp"  # not in memory
    kernel = ".".join(platform.release().split(".")[:2])
    lines = [
        f"{os.cpu_count()} cores, which the clients and PostgreSQL share, Linux {kernel}, "
        f"{ROWS:,} plants in the table,\n32 connections for {SECONDS} s:\n",
        f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}",
    ]
    for use in (contextlib.nullcontext, running_postgresql):
        for order in IDS:
            with tempfile.TemporaryDirectory() as folder, use() as server:
                lines.append(measure(Path(folder), server, order))
    PAGE.write_text(re.sub(PLACE, "\n".join([r"\1", *lines, r"\2"]), PAGE.read_text()))


if __name__ == "__main__":
    main()
