"""Turns the measurements into medians, and the medians into Markdown and a chart."""

import itertools
import os
import platform
import sqlite3
import statistics

from run import Run

OURS = "this service"

Results = dict[tuple[str, str], list[Run]]  # by the name of a setting and the title of a server


def median(runs: list[Run]) -> Run:
    """Return the median of each figure."""
    return Run(*(statistics.median(figures) for figures in zip(*runs, strict=True)))


def report(results: Results, syncs: list[float], rounds: int, seconds: int) -> str:
    """Return the results as Markdown. A ratio is the median of the ratios of the rounds.

    `syncs` are the times of a sync on this machine in ms, measured while no server was running.
    """
    settings = list(dict.fromkeys(setting for setting, _ in results))
    rates, times = [["plants/s", *settings]], [["p50, p99 in ms", *settings, "MB", "start, s"]]
    for server in dict.fromkeys(server for _, server in results):
        runs = {setting: results[setting, server] for setting in settings}
        medians = [median(each) for each in runs.values()]
        rates.append([server, *(rate(each, results[name, OURS]) for name, each in runs.items())])
        whole = median([run for each in runs.values() for run in each])
        latencies = [f"{each.p50:.1f}, {each.p99:.1f}" for each in medians]
        times.append([server, *latencies, f"{whole.memory:.0f}", f"{whole.start:.2f}"])
    return (
        f"{rounds} rounds of {seconds} s, {os.cpu_count()} cores shared with the clients, "
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}. A sync of this disk "
        f"took {statistics.median(syncs):.2f} ms ({min(syncs):.2f} to {max(syncs):.2f}):\n\n"
        f"{table(rates)}\n{table(times)}"
    )


def rate(runs: list[Run], ours: list[Run]) -> str:
    """Return the median rate (lowest to highest), and the median of the ratios of ours to it."""
    rates = [run.rate for run in runs]
    ratio = statistics.median(our.rate / max(1, r) for our, r in zip(ours, rates, strict=True))
    return f"{median(runs).rate:,.0f} ({min(rates):,.0f} to {max(rates):,.0f}), {ratio:.2f}"


def table(rows: list[list[str]]) -> str:
    """Return rows as a Markdown table. The first row is the heading."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(results: Results, syncs: list[float]) -> str:
    """Draw two settings side by side on one scale, in colors for white and black backgrounds."""
    panels = {
        "1 connection": f"1 connection, sync {statistics.median(syncs):.2g} ms",
        "32, sync + 1 ms": "32 connections, sync + 1 ms",
    }
    rates = {each: median(runs).rate for each, runs in results.items() if each[0] in panels}
    # The ceiling stores nothing, so it is not drawn.
    servers = [name for name in dict.fromkeys(name for _, name in rates) if "ceiling" not in name]
    scale = 185 / max(rates[setting, server] for setting in panels for server in servers)
    rows, shapes = dict(zip(servers, itertools.count(60, 30), strict=False)), ""
    for server, y in rows.items():
        shapes += f'<text x="282" y="{y + 16}" text-anchor="end">{server}</text>\n'
    for x, (setting, title) in zip((290, 550), panels.items(), strict=True):
        shapes += f'<text x="{x}" y="46">{title}</text>\n'
        for server, y in rows.items():
            width = round(scale * (rate := rates[setting, server]))
            color = "#2da44e" if server == OURS else "#8c959f"
            shapes += f"""<rect x="{x}" y="{y}" width="{width}" height="22" fill="{color}"/>
<text x="{x + width + 6}" y="{y + 16}">{rate:,.0f}</text>
"""
    height = 60 + 30 * len(servers)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" width="800" \
font-family="sans-serif" font-size="14" fill="#6e7781">
<text x="290" y="20">plants stored a second, each synced to disk before the 200</text>
{shapes}</svg>
"""
