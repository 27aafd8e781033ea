"""What was measured, as medians: Markdown and a chart."""

import os
import platform
import sqlite3
import statistics

from run import Run

OURS = "this service"

Results = dict[tuple[str, str], list[Run]]  # by the names of a setting and a server


def median(runs: list[Run]) -> Run:
    """Return the median of each figure."""
    return Run(*(statistics.median(figures) for figures in zip(*runs, strict=True)))


def report(results: Results, rounds: int, seconds: int) -> str:
    """Return the results as Markdown. A ratio is the median of the ratios of the rounds."""
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
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}:\n\n"
        f"{table(rates)}\n{table(times)}"
    )


def rate(runs: list[Run], ours: list[Run]) -> str:
    """Return the plants a second, from lowest to highest, and how many times as many ours are."""
    rates = [run.rate for run in runs]
    ratio = statistics.median(our.rate / max(1, r) for our, r in zip(ours, rates, strict=True))
    return f"{median(runs).rate:,.0f} ({min(rates):,.0f} to {max(rates):,.0f}), {ratio:.2f}"


def table(rows: list[list[str]]) -> str:
    """Return rows, of which the first is the heading, as Markdown."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(results: Results) -> str:
    """Draw plants a second, but the ceiling's, in colors that can be read on white and on black."""
    rates = {
        server: median(runs).rate
        for (setting, server), runs in results.items()
        if setting == "32 connections" and "ceiling" not in server
    }
    height, bars = 34 + 30 * len(rates), ""
    for y, (server, rate) in zip(range(34, height, 30), rates.items(), strict=True):
        width = round(430 * rate / max(rates.values()))
        color = "#2da44e" if server == OURS else "#8c959f"
        bars += f'''<text x="262" y="{y + 16}" text-anchor="end">{server}</text>
<rect x="270" y="{y}" width="{width}" height="22" fill="{color}"/>
<text x="{276 + width}" y="{y + 16}">{rate:,.0f}</text>
'''
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 {height}" width="780" \
font-family="sans-serif" font-size="14" fill="#6e7781">
<text x="270" y="20">plants stored a second, 32 connections, synced to disk</text>
{bars}</svg>
"""
