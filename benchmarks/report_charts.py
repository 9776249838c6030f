"""Makes the charts of the report as plotly.js figures. The form of a record's figures determines the charts.

Figures that were measured several times become a chart of ranges, a ``timeline`` becomes a chart over time, and a
``ccdf`` becomes a chart of the tail. Colours are written ``var(--name)``; the page replaces them by those of its light
or dark scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks.results import Spread, series, spreads
from benchmarks.targets import Aim, number

T = TypeVar("T")
Figure = dict[str, Any]
LINES_MAX = 6
#: ratio of the largest to the smallest value from which on an axis is logarithmic
LOG_FROM = 12
_COLOURS = tuple(f"var(--{name})" for name in ("a", "b", "c", "d", "e", "f"))


def overview(aims: Sequence[Aim]) -> Figure:
    """Returns a chart of all targets on one axis, which shows how many times better than its bound each figure is."""
    told = [aim for aim in aims if aim.score is not None][::-1]
    traces = []
    for name, colour, chosen in (
        ("met", "var(--good)", [aim for aim in told if aim.met]),
        ("missed", "var(--bad)", [aim for aim in told if not aim.met]),
    ):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [aim.score for aim in chosen],
                "y": [_row(aim) for aim in chosen],
                "error_x": _errors(
                    [(aim.score, aim.scored(aim.least), aim.scored(aim.most)) for aim in chosen], colour
                ),
                "marker": {"size": 11, "color": colour},
                "text": [f"{aim.name}<br>{number(aim.value)} ({aim.bound})" for aim in chosen],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    axis = {**_axis("times better than the bound", log=True), "dtick": 1}
    layout = _layout(height=90 + 26 * len(told), xaxis=axis, yaxis=_names([_row(aim) for aim in told]))
    line = {"color": "var(--ink)", "width": 1.5, "dash": "dot"}
    layout["shapes"] = [{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": line}]
    return {"data": traces, "layout": layout}


def charts(record: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yields (title, figure) for each chart that can be made from a record."""
    groups: dict[str, list[Spread]] = {}
    for spread in spreads(record["figures"]):
        groups.setdefault(spread.path[0] if spread.path else "", []).append(spread)
    for title, each in groups.items():
        if len(each) > 1:
            yield title.replace("99_9", "99.9").replace("_", " "), ranges(each)
    timelines = list(series(record["figures"], "timeline"))
    if timelines:
        yield _title("latency over time, p50 and p99 per 250 ms, ms", timelines), over_time(_some(timelines))
    tails = list(series(record["figures"], "ccdf"))
    if tails:
        yield _title("share of requests that took longer", tails), tail(_some(tails))


def ranges(each: Sequence[Spread]) -> Figure:
    """Returns a chart with a row for each figure, which shows its median and its range."""
    rows = list(each)[::-1]
    names = [" · ".join(spread.path[1:]) or spread.name for spread in rows]
    values = [value for spread in rows for value in (spread.least, spread.most)]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [spread.median for spread in rows],
        "y": names,
        "error_x": _errors([(spread.median, spread.least, spread.most) for spread in rows], "var(--p99)"),
        "marker": {"size": 10, "color": "var(--p99)"},
        "text": [f"{number(s.median)} ({number(s.least)} – {number(s.most)}, {s.runs} runs)" for s in rows],
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "showlegend": False,
    }
    axis = _axis("", log=_wide(values))
    if not _wide(values):
        axis["rangemode"] = "tozero"
    return {"data": [trace], "layout": _layout(height=70 + 28 * len(rows), xaxis=axis, yaxis=_names(names))}


def over_time(timelines: Sequence[tuple[str, list[Any]]]) -> Figure:
    traces = []
    for colour, (name, windows) in zip(_COLOURS, timelines, strict=False):
        for column, line in (("p50", {"width": 1, "dash": "dot"}), ("p99", {"width": 2})):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": f"{name}, {column}",
                    "x": [window["at_s"] for window in windows],
                    "y": [window.get(column) for window in windows],
                    "line": {**line, "color": colour},
                    "hovertemplate": "%{x:.2f} s: %{y:.2f} ms<extra>" + f"{name}, {column}</extra>",
                }
            )
    layout = _layout(height=380, xaxis=_axis("seconds"), yaxis=_axis("milliseconds", log=True))
    return {"data": traces, "layout": layout}


def tail(tails: Sequence[tuple[str, list[Any]]]) -> Figure:
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [latency for latency, _ in points],
            "y": [share for _, share in points],
            "line": {"color": colour, "shape": "hv"},
            "hovertemplate": "%{y:.4g} took over %{x:.2f} ms<extra>" + f"{name}</extra>",
        }
        for colour, (name, points) in zip(_COLOURS, tails, strict=False)
    ]
    layout = _layout(height=360, xaxis=_axis("milliseconds", log=True), yaxis=_axis("share", log=True))
    layout["yaxis"] |= {"dtick": 1, "tickformat": ".4~%"}
    return {"data": traces, "layout": layout}


def _title(what: str, found: Sequence[Any]) -> str:
    shown = _some(found)
    return what if len(shown) == len(found) else f"{what} ({len(shown)} of {len(found)})"


def _some(found: Sequence[T]) -> Sequence[T]:
    """Returns at most ``LINES_MAX`` elements: all, or every second, third, … so that all kinds of runs are shown."""
    step = -(-len(found) // LINES_MAX)
    return found[step - 1 :: step] if found else found


def _row(aim: Aim) -> str:
    name = aim.name if len(aim.name) <= 46 else aim.name[:45] + "…"
    return f"{aim.experiment}  {name}"


def _errors(points: Sequence[tuple[float | None, float | None, float | None]], colour: str) -> Figure:
    """Returns plotly's error bars for points.

    Args:
        points: (value, one end of the bar, other end of the bar); a point with a None has no bar.
    """
    up, down = [], []
    for at, one, other in points:
        if at is None or one is None or other is None:
            up.append(0.0)
            down.append(0.0)
        else:
            up.append(max(0.0, max(one, other) - at))
            down.append(max(0.0, at - min(one, other)))
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": colour, "thickness": 2}


def _wide(values: Sequence[float]) -> bool:
    return min(values, default=0) > 0 and max(values) / min(values) >= LOG_FROM


def _axis(title: str, *, log: bool = False) -> Figure:
    axis = {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "automargin": True,
        "minor": {"showgrid": False},
    }
    return {**axis, "type": "log", "tickformat": ",~g", "dtick": "D2"} if log else axis


def _names(names: Sequence[str]) -> Figure:
    rows = {"categoryarray": list(names), "range": [-0.7, len(names) - 0.3]}
    return {**_axis(""), "type": "category", **rows, "showgrid": True, "fixedrange": True}


def _layout(**chart: Any) -> Figure:
    font = {"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 13, "color": "var(--soft)"}
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": font,
        "margin": {"l": 56, "r": 16, "t": 8, "b": 44},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"color": "var(--ink)"}},
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
        "hovermode": "closest",
        **chart,
    }
