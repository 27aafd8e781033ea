"""All that was measured of the service and its peers, as medians and as Markdown."""

import math
import os
import platform
import sqlite3
import statistics
from collections import defaultdict

from competitors import Competitor
from load import SETTINGS, Run

# Ours to theirs: plants/s at 32 connections.
AT_LEAST = {"fastify": 1.1, "uvicorn": 12, "uvloop": 8, "flask": 8}
NONE = (math.nan,)  # where nothing was measured, or all of it was thrown out


class Results:
    """All that was measured, by the name of a competitor and of a setting."""

    def __init__(self, competitors: dict[str, Competitor]) -> None:
        self.competitors = competitors
        self.runs: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
        self.memory: defaultdict[str, list[float]] = defaultdict(list)
        self.starts: defaultdict[str, list[float]] = defaultdict(list)

    def median(self, name: str, setting: str) -> Run:
        """The median of each figure."""
        columns = zip(*(self.runs.get((name, setting)) or [Run(*NONE * 3)]), strict=True)
        return Run(*(statistics.median(column) for column in columns))

    def ratio(self, setting: str, other: str, figure: str = "rate") -> float:
        """Ours to another's plants a second, or another figure."""
        ours, theirs = (self.median(name, setting) for name in ("ours", other))
        return getattr(ours, figure) / getattr(theirs, figure)

    def targets(self) -> list[tuple[str, float, str]]:
        """The rows of the table of targets, without what was not measured."""
        beside = {name: f"this service / {each.title}" for name, each in self.competitors.items()}
        targets = []
        for name, wanted in AT_LEAST.items():
            if name in beside:
                rate = self.ratio("32", name)
                targets.append((f"{beside[name]}, plants/s", rate, f"at least {wanted}"))
        if other := beside.get("fastify"):
            p99, slow = self.ratio("32", "fastify", "p99"), self.ratio("slow", "fastify")
            targets.append((f"{other}, p99", p99, "at most 0.33"))
            targets.append((f"{other}, {SETTINGS['slow'].title}", slow, "at least 18"))
        if other := beside.get("other"):
            for key, setting in SETTINGS.items():
                for what, figure in (("plants/s", "rate"), ("p99", "p99")):
                    ratio = self.ratio(key, "other", figure)
                    targets.append((f"{other}, {setting.title}, {what}", ratio, ""))
        memory = statistics.median(self.memory.get("ours", NONE))
        start = statistics.median(self.starts.get("ours", NONE))
        targets.append(("memory of this service, MB (PSS)", memory, "at most 75"))
        targets.append(("seconds to the first 200", start, "at most 0.7"))
        return [target for target in targets if not math.isnan(target[1])]

    def shown(self, name: str, setting: str) -> str:
        """Plants a second, as median and spread, and the latencies."""
        rates = [run.rate for run in self.runs.get((name, setting), [])] or NONE
        run = self.median(name, setting)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        return f"{run.rate:,.0f} ({spread}) | {run.p50:.1f} | {run.p99:.1f}"

    def report(self, rounds: int, seconds: int) -> str:
        """The results as Markdown."""
        lines = [
            f"# {platform.python_implementation()} {platform.python_version()}, "
            f"{os.cpu_count()} cores shared with the load generator, "
            f"SQLite {sqlite3.sqlite_version}",
            "",
            f"Medians of {rounds} rounds of {seconds} s (lowest to highest), plants a second, and "
            "latencies in ms. `python tests/bench` writes this.",
        ]
        for key, setting in SETTINGS.items():
            if names := [name for name in self.competitors if (name, key) in self.runs]:
                lines += ["", f"## {setting.title}", ""]
                lines += ["| | plants/s | p50 | p99 |", "|---|---|---|---|"]
                for name in names:
                    lines.append(f"| {self.competitors[name].title} | {self.shown(name, key)} |")
        lines += ["", "## Targets", "", "| | measured | target |", "|---|---|---|"]
        for title, value, wanted in self.targets():
            lines.append(f"| {title} | {value:.2f} | {wanted} |")
        if self.starts:
            lines += ["", "## Memory and start", ""]
            lines += ["| | MB (PSS) | s to the first 200 |", "|---|---|---|"]
        for name in self.starts:
            memory = statistics.median(self.memory.get(name, NONE))
            start = statistics.median(self.starts[name])
            lines.append(f"| {self.competitors[name].title} | {memory:.0f} | {start:.2f} |")
        return "\n".join(lines) + "\n"
