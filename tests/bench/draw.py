"""Draws plants a second, from JSON on standard input, into the SVG file that is named."""

import json
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "plants", "font.size": 11})
from matplotlib import pyplot  # noqa: E402 - it looks at the settings

INK = "#6e7781"  # can be read on white and on black
OURS, OTHERS = "#2da44e", "#8c959f"

rates = json.load(sys.stdin)
titles = list(rates)[::-1]
figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rates) + 0.6))
colors = [OURS if title == "this service" else OTHERS for title in titles]
bars = axes.barh(titles, [rates[title] for title in titles], color=colors, height=0.62)
axes.bar_label(bars, fmt="{:,.0f}", padding=6, color=INK)
axes.set_title(
    "plants stored a second, 32 connections, 2 workers, synced to disk", color=INK, loc="left"
)
axes.tick_params(colors=INK, length=0)
axes.xaxis.set_visible(False)
axes.spines[:].set_visible(False)
axes.margins(x=0.12)
figure.savefig(sys.argv[1], bbox_inches="tight", transparent=True, metadata={"Date": None})
