"""Draws pictures of the results for a README: one of all targets, and one of latency over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from benchmarks.results import series
from benchmarks.targets import aims_of, number

_INK, _SOFT, _GRID, _CARD = "#14181f", "#5b6472", "#e8ebf0", "#ffffff"
_GOOD, _BAD = "#1a7f37", "#c9252d"
_COLOURS = ("#2372d9", "#e06c00", "#1d8f7a", "#8a5cc2", "#b8860b", "#c2477f")


def write_targets(records: Mapping[str, dict[str, Any]], path: Path) -> bool:
    """Draws all targets that have a figure. Returns False if there are none."""
    told = [aim for record in records.values() for aim in aims_of(record) if aim.score is not None][::-1]
    if not told:
        return False
    height = 1.2 + 0.27 * len(told)
    figure = Figure(figsize=(10, height), dpi=140, facecolor=_CARD, layout="constrained")
    axes = figure.add_subplot()
    for row, aim in enumerate(told):
        colour = _GOOD if aim.met else _BAD
        least, most = aim.scored(aim.least), aim.scored(aim.most)
        if least is not None and most is not None:
            axes.plot([least, most], [row, row], color=colour, lw=4, alpha=0.3, solid_capstyle="round")
        axes.plot([aim.score], [row], "o", color=colour, ms=6)
        axes.annotate(
            f"{number(aim.value)} ({aim.bound})", (1.01, row), xycoords=("axes fraction", "data"),
            va="center", fontsize=8.5, color=colour,
        )  # fmt: skip
    axes.axvline(1, color=_INK, lw=1, ls=(0, (2, 2)))
    axes.set_xscale("log")
    axes.set_yticks(range(len(told)), [f"{aim.experiment}  {aim.name}" for aim in told], fontsize=8.5)
    axes.set_ylim(-0.7, len(told) - 0.3)
    axes.set_xlabel("times better than the bound (right of the line: met)", color=_SOFT, fontsize=9)
    _plain(axes)
    figure.savefig(path, facecolor=_CARD, metadata={"Software": None})
    return True


def write_latency(records: Mapping[str, dict[str, Any]], path: Path) -> bool:
    """Draws the latencies p50 and p99 of L1 over time. Returns False if L1 was not measured."""
    timelines = list(series(records["L1"]["figures"], "timeline")) if "L1" in records else []
    if not timelines:
        return False
    figure = Figure(figsize=(10, 3.6), dpi=140, facecolor=_CARD, layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, windows) in zip(_COLOURS, timelines, strict=False):
        at_s = [window["at_s"] for window in windows]
        label = name.rpartition(" · ")[2] + " of saturation"
        axes.plot(at_s, [window["p99"] for window in windows], color=colour, lw=1.8, label=f"{label}, p99")
        axes.plot(at_s, [window["p50"] for window in windows], color=colour, lw=1, ls=(0, (1, 1.5)))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_minor_formatter(LogFormatter())  # plain numbers too, on an axis of less than a power of ten
    axes.set_xlabel("seconds", color=_SOFT, fontsize=9)
    axes.set_ylabel("milliseconds (log); dotted: p50", color=_SOFT, fontsize=9)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9, labelcolor=_INK)
    _plain(axes)
    figure.savefig(path, facecolor=_CARD, metadata={"Software": None})
    return True


def _plain(axes: Any) -> None:
    axes.set_facecolor(_CARD)
    axes.set_axisbelow(True)
    axes.grid(True, color=_GRID, lw=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c5cbd5")
    axes.tick_params(colors=_SOFT, length=0, which="both")
