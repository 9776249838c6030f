"""The page of the HTML report, and its charts as plotly.js figures, in plain dictionaries.

:func:`page` returns the text of a :class:`string.Template` for a complete page with a heading, cards and charts. The
page has a light and a dark scheme, and fits large and small screens. The code that renders the page fills
``$headline``, ``$verdict``, ``$subtitle``, ``$cards``, ``$figures``, ``$plotly`` and the names in the page's body.
``$plotly`` is the rest of the script element: ``src="…">``, or ``>`` and the program.

``PAGE`` is such a template; ``report.render`` fills its ``$names``. Colours of charts are written ``var(--name)``. The
page replaces them by the values of its style sheet for the light or dark scheme, and again when the scheme changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from string import Template
from typing import Any

from stateflow.demo.result import (
    LATENCY_WINDOW_S,
    DemoResult,
    Incident,
    LatencyWindow,
    MoveRow,
    Throughput,
    human_bytes,
    lanes,
    latency_windows,
    log_extent,
    throughput,
)

_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>@title: $headline</title>
<style>
:root {
  --page: #f4f5f8; --card: #ffffff; --ink: #14181f; --soft: #5b6472; --line: #d9dde4; --grid: #e8ebf0;
  --p50: #8fbdf2; --p99: #2372d9; --max: #123f7d; --batch: #a3abb8; --move: #e06c00;
  --good: #1a7f37; --bad: #c9252d;
  --a: #4e84c4; --b: #58a89a; --c: #a98bc9; --d: #c9a24a; --e: #c9798f; --f: #8c96a5;
}
@@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1116; --card: #171b22; --ink: #e8ebf0; --soft: #9aa4b2; --line: #333a45; --grid: #262c36;
    --p50: #2f6cb3; --p99: #5ea8ff; --max: #c4e0ff; --batch: #6b7583; --move: #ff9a3c;
    --good: #4cc26b; --bad: #ff6b6b;
    --a: #4a7db8; --b: #4a9486; --c: #8f74ad; --d: #ab8a3f; --e: #ad687b; --f: #6b7583;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: @width; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: clamp(1.4rem, 3.4vw, 2.1rem); line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.015em; }
h1::before { content: ""; display: inline-block; width: .5em; height: .5em; border-radius: 50%;
  margin-right: .4em; vertical-align: .1em; background: var(--good); }
h1.bad::before { background: var(--bad); }
.subtitle { color: var(--soft); margin: 0 0 22px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(@columns, 1fr); gap: 12px; }
.card, .panel { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 14px 16px 12px; }
.card h2 { font-size: .82rem; font-weight: 500; color: var(--soft); margin: 0; }
.card .value { font-size: 1.65rem; font-weight: 650; line-height: 1.25; margin: 2px 0 0;
  font-variant-numeric: tabular-nums; letter-spacing: -0.01em; }
.card .note { font-size: .86rem; color: var(--soft); margin: 0; overflow-wrap: anywhere; }
.card.good .value { color: var(--good); }
.card.bad .value { color: var(--bad); }
.panel { padding: 18px 18px 10px; margin-top: 16px; min-width: 0; }
.panel h2 { font-size: 1.08rem; margin: 0; }
.panel > p { color: var(--soft); font-size: .92rem; margin: 2px 0 8px; max-width: 105ch; }
.panel.bad { border-color: var(--bad); }
.panel.bad h2 { color: var(--bad); }
.panel ul { margin: 6px 0; padding-left: 20px; overflow-wrap: anywhere; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 0 16px; }
.scroll { overflow-x: auto; margin: 0 -18px; padding: 0 18px 8px; }
table { border-collapse: collapse; width: 100%; font-size: .89rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
th:first-child, td:first-child { padding-left: 0; color: var(--soft); }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; }
.strong { font-weight: 650; }
td.state { color: var(--soft); white-space: normal; min-width: 8em; }
td.bad { color: var(--bad); }
details { margin-top: 16px; }
summary { cursor: pointer; font-weight: 600; padding: 2px 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 10px 0; font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@@media (max-width: 900px) {
  .cards { grid-template-columns: repeat(2, 1fr); }
  .two { grid-template-columns: minmax(0, 1fr); }
}
@@media (max-width: 600px) {
  main { padding: 18px 10px 32px; }
  .card { padding: 10px 12px; }
  .card .value { font-size: 1.35rem; }
  .panel { padding: 14px 10px 6px; }
  .scroll { margin: 0 -10px; padding: 0 10px 8px; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 8px; }
}
@@media print { .panel, .card { break-inside: avoid; } }
@style</style>
</head>
<body>
<main>
<h1 class="$verdict">$headline</h1>
<p class="subtitle">$subtitle</p>
@body</main>
<script $plotly</script>
<script type="application/json" id="figures">$figures</script>
<script>
(function () {
  "use strict";
  var source = document.getElementById("figures").textContent;
  var scheme = window.matchMedia("(prefers-color-scheme: dark)");
  var narrow = window.matchMedia("(max-width: 600px)");
@narrowed  function draw() {
    var style = getComputedStyle(document.documentElement);
    var coloured = source.replace(/"var\\((--[a-z0-9]+)\\)"/g, function (_, name) {
      return JSON.stringify(style.getPropertyValue(name).trim());
    });
    var figures = JSON.parse(coloured);
    Object.keys(figures).forEach(function (id) {
      if (narrow.matches) { narrowed(figures[id]); }
      var options = { responsive: true, displaylogo: false, displayModeBar: false };
      Plotly.react(id, figures[id].data, figures[id].layout, options);
    });
  }
  draw();
  scheme.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
})();
</script>
</body>
</html>
"""


class _Document(Template):
    delimiter = "@"


def page(title: str, body: str, *, narrowed: str, width: str, columns: int, style: str = "") -> str:
    """Returns the text of the template for a page.

    Args:
        body: HTML below the heading.
        narrowed: JavaScript text of a function ``narrowed(figure)``, which changes a figure for a narrow screen.
        width: maximum width of the page, in CSS.
        columns: number of cards in a row.
        style: further CSS.
    """
    parts = {"title": title, "body": body, "narrowed": narrowed, "width": width, "columns": columns, "style": style}
    return _Document(_DOCUMENT).substitute(parts)


# -- The page --------------------------------------------------------------------------------------------------------


def moves_of(what: str) -> str:
    """Returns HTML for the table of moves, and below it settings and versions.

    Args:
        what: name of the things that move, such as ``partition``.
    """
    return f"""<section class="panel">
<h2>Moves</h2>
<div class="scroll"><table>
<thead><tr>
<th class="number">#</th><th class="number">{what}</th><th>from → to</th>
<th class="number wide">start, s</th><th class="number wide">took, s</th>
<th class="number wide">warm</th><th class="number wide">reused</th><th class="number wide">delta</th>
<th class="number wide">rounds</th>
<th class="number">predicted, ms</th><th class="number">pause, ms</th><th>state</th>
</tr></thead>
<tbody>$moves</tbody>
</table></div>
</section>
<details class="panel"><summary>Settings and versions</summary>
<div class="two"><dl>$settings</dl><dl>$versions</dl></div></details>
"""


_BODY = """<div class="cards">$cards</div>
$differences
<section class="panel">
<h2>Timeline</h2>
<p>Requests to replicas in windows of 250 ms, each micro-batch at its end, each move at the moment of its
pause. The bars in the middle show how long every move took; below are the rows each replica processed. Drag to
zoom, double-click to reset, hover over a mark for details.</p>
<noscript><p>The charts need JavaScript; the picture next to this file shows the timeline.</p></noscript>
<div id="timeline" role="img" aria-label="Latency, moves and throughput over time"></div>
</section>
<div class="two">
<section class="panel">
<h2>Pause of each move</h2>
<p>Bar: how long the partition's rows waited. Tick: the expected pause, the median of similar moves. Dot: the promised
pause, which is checked against the budget; a pause longer than the tick is normal, one longer than the dot is not.</p>
<div id="pauses" role="img" aria-label="Pause per move against its prediction"></div>
</section>
<section class="panel">
<h2>Bytes of each move</h2>
<p>The bulk is copied while the source keeps serving, or is already at the target from an earlier stay; only the
changes made since then follow.</p>
<div id="bytes" role="img" aria-label="Bytes copied warm and as changes per move"></div>
</section>
</div>
"""

NARROWED = """  function narrowed(figure) {
    var layout = figure.layout;
    layout.font.size = 11;
    layout.legend.font.size = 11;
    layout.margin.l = 44;
    layout.legend.entrywidth = 0.48;
    layout.legend.entrywidthmode = "fraction";
    layout.dragmode = false;
    figure.data.forEach(function (trace) {
      if (trace.mode === "lines+markers") { trace.mode = "lines"; }
      if (trace.marker && trace.marker.size) { trace.marker.size *= 0.65; }
    });
  }
"""

STYLE = """@media (max-width: 900px) { .card:last-child { grid-column: 1 / -1; } }
@media (max-width: 600px) { .wide, th:first-child, td:first-child { display: none; }
  th, td { padding: 6px 4px; } td.state { min-width: 0; } }
"""

PAGE = page("stateflow demo", _BODY + moves_of("partition"), narrowed=NARROWED, width="1240px", columns=5, style=STYLE)


# -- Charts ----------------------------------------------------------------------------------------------------------

Figure = dict[str, Any]

#: seconds without a measurement after which a line is interrupted, so that a stall is visible
_GAP_S = 4 * LATENCY_WINDOW_S
LEGEND = {"orientation": "h", "traceorder": "normal", "x": 0, "font": {"color": "var(--ink)"}}
_REPLICA_COLOURS = ("var(--a)", "var(--b)", "var(--c)", "var(--d)", "var(--e)", "var(--f)")
_INCIDENT_COLOURS = {"SIGKILL": "var(--bad)"}


def figures(result: DemoResult) -> dict[str, Figure]:
    """Returns id of an HTML element → the chart that it shows."""
    moves = sorted(result.moves, key=lambda move: move.pause_at_s)
    return {"timeline": timeline(result), "pauses": pauses(moves), "bytes": transferred(moves)}


def timeline(result: DemoResult) -> Figure:
    """Returns a chart of latency (on a log axis), moves (in lanes) and throughput over one time axis."""
    windows = latency_windows(result.requests)
    rates = throughput(result.requests, result.batches)
    traces = [
        *_latency_traces(windows),
        _batch_trace(result),
        *_pause_traces(result.moves),
        *_lane_traces(result.moves),
        *_throughput_traces(rates),
    ]
    shapes, notes = _incident_marks(result.incidents, result.duration_s)
    layout = styled(
        height=720,
        # the axis ends with the stream or its last request, because later marks would squeeze all others
        xaxis={
            **axis_of("seconds since the stream began"),
            "anchor": "y3",
            "range": [0, 1.02 * max([result.duration_s, *(each.at_s for each in result.requests), 1.0])],
        },
        legend2={**LEGEND, "y": 0.27, "yanchor": "bottom"},
        yaxis={
            **axis_of("milliseconds"),
            "type": "log",
            "domain": [0.47, 1.0],
            "dtick": 1,
            "tickformat": ",~g",
            "range": _log_range(traces),
        },
        yaxis2={**axis_of("moves"), "domain": [0.33, 0.43], "showticklabels": False, "showgrid": False},
        yaxis3={**axis_of("rows/s"), "domain": [0.0, 0.27], "rangemode": "tozero"},
        shapes=shapes,
        annotations=notes,
    )
    layout["yaxis2"] |= {"fixedrange": True, "range": [max(lanes(result.moves), default=0) + 0.7, -0.7]}
    return {"data": traces, "layout": layout}


def pauses(moves: Sequence[MoveRow]) -> Figure:
    """Returns a chart with a bar for each move's pause, a tick for the expected pause, and a dot for the promised
    one."""
    numbers = list(range(1, len(moves) + 1))
    failed = [(number, move) for number, move in zip(numbers, moves, strict=True) if not move.completed]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": "pause",
            "x": numbers,
            "y": [move.pause_ms if move.completed else None for move in moves],
            "marker": {"color": "var(--move)"},
            "text": [move_story(move) for move in moves],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "expected",
            "x": numbers,
            "y": _finite(move.predicted_pause_ms for move in moves),
            "marker": {"symbol": "line-ew", "size": 11, "line": {"width": 2.5, "color": "var(--ink)"}},
            "hovertemplate": "expected %{y:.1f} ms<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "promised",
            "x": numbers,
            "y": _finite(move.promised_ms for move in moves),
            "marker": {"symbol": "circle-open", "size": 6, "color": "var(--soft)"},
            "hovertemplate": "promised %{y:.1f} ms<extra></extra>",
        },
    ]
    if failed:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "not completed",
                "x": [number for number, _ in failed],
                "y": [0 for _ in failed],
                "marker": {"symbol": "x", "size": 9, "color": "var(--bad)"},
                "text": [move_story(move) for _, move in failed],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    layout = styled(
        height=340,
        xaxis=_move_axis(len(moves)),
        yaxis={**axis_of("milliseconds"), "rangemode": "tozero"},
        bargap=0.35,
    )
    return {"data": traces, "layout": layout}


def transferred(moves: Sequence[MoveRow]) -> Figure:
    """Returns a chart of each move's bytes, on a log axis.

    There are marks for bytes copied while the source served, bytes that the target already had, and bytes of changes.
    """
    numbers = list(range(1, len(moves) + 1))
    spans_x: list[float | None] = []
    spans_y: list[float | None] = []
    for number, move in zip(numbers, moves, strict=True):
        sizes = [size for size in (move.bytes_warm, move.bytes_reused, move.bytes_delta) if size > 0]
        if len(sizes) > 1:
            spans_x += [number, number, None]
            spans_y += [min(sizes), max(sizes), None]
    line = {"color": "var(--grid)", "width": 3}
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "x": spans_x, "y": spans_y, "line": line, "hoverinfo": "skip"}
    ]
    traces[0]["showlegend"] = False
    for name, colour, symbol, sizes in (
        ("warm copy", "var(--p99)", "circle", [move.bytes_warm for move in moves]),
        ("reused", "var(--p99)", "circle-open", [move.bytes_reused for move in moves]),
        ("changes (delta)", "var(--move)", "diamond", [move.bytes_delta for move in moves]),
    ):
        if any(sizes):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": numbers,
                    "y": [size if size > 0 else None for size in sizes],
                    "text": [human_bytes(size) for size in sizes],
                    "marker": {"color": colour, "symbol": symbol, "size": 10},
                    "hovertemplate": name + " %{text}<extra></extra>",
                }
            )
    powers = range(10)
    names = [f"{10 ** (power % 3)} {('B', 'kB', 'MB', 'GB')[power // 3]}" for power in powers]
    ticks = {"tickvals": [10**power for power in powers], "ticktext": names}
    axis = {**axis_of("bytes"), "type": "log", **ticks}
    return {
        "data": traces,
        "layout": styled(height=340, xaxis=_move_axis(len(moves)), yaxis=axis, hovermode="x unified"),
    }


def _finite(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def move_story(move: MoveRow) -> str:
    """Returns the text that is shown while the mouse points at a move."""
    lines = [f"<b>partition {move.partition}</b>  {escape(move.source)} → {escape(move.target)}"]
    if move.completed:
        expected = f"expected {move.predicted_pause_ms:.1f}, promised {move.promised_ms:.1f} ms"
        lines.append(f"pause {move.pause_ms:.1f} ms, {expected}")
    else:
        lines.append(f"<b>{escape(move.state)}</b> {escape(move.error)}")
    sizes = f"warm {human_bytes(move.bytes_warm)}, delta {human_bytes(move.bytes_delta)}"
    lines.append(sizes + (f", reused {human_bytes(move.bytes_reused)}" if move.bytes_reused else ""))
    lines.append(f"{move.rounds} rounds in {move.duration_s:.2f} s, from {move.started_s:.1f} s")
    return "<br>".join(lines)


def _latency_traces(windows: Sequence[LatencyWindow]) -> Iterator[dict[str, Any]]:
    hover = "%{customdata} requests in 250 ms"
    for name, colour, width, attribute in (
        ("request max", "var(--max)", 1, "max_ms"),
        ("request p99", "var(--p99)", 1.8, "p99_ms"),
        ("request p50", "var(--p50)", 1.8, "p50_ms"),
    ):
        at_s, values, counts = _with_gaps(windows, attribute)
        yield {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": at_s,
            "y": values,
            "customdata": counts,
            "line": {"color": colour, "width": width},
            "marker": {"color": colour, "size": 3.5 if len(windows) < 400 else 2},
            "hovertemplate": f"{name} %{{y:.1f}} ms<br>{hover}<extra></extra>",
        }


def _with_gaps(windows: Sequence[LatencyWindow], attribute: str) -> tuple[list[float], list[float | None], list[int]]:
    at_s: list[float] = []
    values: list[float | None] = []
    counts: list[int] = []
    for window in windows:
        if at_s and window.at_s - at_s[-1] > _GAP_S:
            at_s.append(at_s[-1])
            values.append(None)
            counts.append(0)
        at_s.append(window.at_s)
        values.append(getattr(window, attribute))
        counts.append(window.requests)
    return at_s, values, counts


def _batch_trace(result: DemoResult) -> dict[str, Any]:
    # A micro-batch is drawn at its end, because only then its duration was known.
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "micro-batch",
        "x": [batch.at_s + batch.duration_ms / 1000 for batch in result.batches],
        "y": [batch.duration_ms for batch in result.batches],
        "text": [f"micro-batch {batch.batch}<br>{batch.rows:,} rows" for batch in result.batches],
        "marker": {"color": "var(--batch)", "size": 6, "symbol": "square"},
        "hovertemplate": "%{text} in %{y:.0f} ms<extra></extra>",
    }


def _pause_traces(moves: Sequence[MoveRow]) -> Iterator[dict[str, Any]]:
    completed = [move for move in moves if move.completed]
    if completed:
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": "pause of a move",
            "x": [move.pause_at_s for move in completed],
            "y": [max(move.pause_ms, 0.1) for move in completed],
            "text": [move_story(move) for move in completed],
            "marker": {
                "color": "var(--move)",
                "size": 11,
                "symbol": "diamond",
                "line": {"color": "var(--card)", "width": 1.2},
            },
            "hovertemplate": "%{text}<extra></extra>",
        }


def _lane_traces(moves: Sequence[MoveRow]) -> Iterator[dict[str, Any]]:
    for name, colour, chosen in (
        ("move", "var(--move)", True),
        ("failed move", "var(--bad)", False),
    ):
        lane_of = lanes(moves)
        picked = [(move, lane_of[index]) for index, move in enumerate(moves) if move.completed is chosen]
        if not picked:
            continue
        at_s: list[float | None] = []
        rows: list[int | None] = []
        stories: list[str | None] = []
        for move, lane in picked:
            at_s += [
                move.started_s,
                move.started_s + move.duration_s / 2,
                move.started_s + move.duration_s,
                None,
            ]
            rows += [lane, lane, lane, None]
            stories += [move_story(move)] * 3 + [None]
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": at_s,
            "y": rows,
            "text": stories,
            "yaxis": "y2",
            "line": {"color": colour, "width": 6},
            "showlegend": not chosen,
            "hovertemplate": "%{text}<extra></extra>",
        }


def _throughput_traces(rates: Throughput) -> Iterator[dict[str, Any]]:
    for index, (replica, values) in enumerate(rates.rows_per_s.items()):
        yield {
            "type": "bar",
            "name": escape(replica) if replica != "query" else "rows",
            "legend": "legend2",
            "x": rates.at_s,
            "y": values,
            "width": rates.width_s * 0.9,
            "yaxis": "y3",
            "marker": {"color": _REPLICA_COLOURS[index % len(_REPLICA_COLOURS)]},
            "hovertemplate": f"{escape(replica)}: %{{y:,.0f}} rows/s<extra></extra>",
        }


def _incident_marks(
    incidents: Sequence[Incident], duration_s: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    for start, end in outages(incidents):
        box = {"type": "rect", "x0": start.at_s, "x1": end.at_s, "yref": "paper", "y0": 0, "y1": 1}
        shapes.append(box | {"fillcolor": "var(--bad)", "opacity": 0.08, "line": {"width": 0}, "layer": "below"})
    for row, incident in enumerate(sorted(incidents, key=lambda entry: entry.at_s)):
        colour = _INCIDENT_COLOURS.get(incident.kind, "var(--good)")
        line = {"type": "line", "x0": incident.at_s, "x1": incident.at_s, "yref": "paper", "y0": 0, "y1": 1}
        shapes.append(line | {"line": {"color": colour, "width": 1.5, "dash": "dot"}})
        notes.append(
            {
                "x": incident.at_s,
                "y": 0.995 - 0.04 * (row % 2),
                "yref": "paper",
                "text": f"{escape(incident.kind)} {escape(incident.replica)}",
                "font": {"color": colour, "size": 12},
                "showarrow": False,
                "xanchor": "right" if incident.at_s > 0.8 * duration_s else "left",
                "yanchor": "top",
                "bgcolor": "var(--card)",
                "borderpad": 2,
            }
        )
    return shapes, notes


def outages(incidents: Sequence[Incident]) -> Iterator[tuple[Incident, Incident]]:
    """Yields (SIGKILL, next incident of the same replica) for each killed replica."""
    ordered = sorted(incidents, key=lambda incident: incident.at_s)
    for index, start in enumerate(ordered):
        later = (other for other in ordered[index + 1 :] if other.replica == start.replica)
        if start.kind == "SIGKILL" and (end := next(later, None)) is not None:
            yield start, end


def styled(**chart: Any) -> dict[str, Any]:
    """Returns a plotly layout in the style of the reports. ``chart`` has further entries, which take precedence."""
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', sans-serif",
            "size": 13,
            "color": "var(--soft)",
        },
        "margin": {"l": 56, "r": 12, "t": 8, "b": 44},
        "legend": {**LEGEND, "y": 1.02, "yanchor": "bottom"},
        "hoverlabel": {
            "bgcolor": "var(--card)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)", "size": 13},
            "align": "left",
        },
        "hovermode": "closest",
        "barmode": "stack",
        "dragmode": "zoom",
        **chart,
    }


def _log_range(traces: Sequence[dict[str, Any]]) -> list[float]:
    """Returns the range of the log axis ``y``, in powers of ten."""
    shown = [value for trace in traces if "yaxis" not in trace for value in trace["y"] if value is not None]
    low, high = log_extent(shown)
    return [math.log10(low), math.log10(high)]


def axis_of(title: str) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "automargin": True,
        "minor": {"showgrid": False},
    }


def _move_axis(count: int) -> dict[str, Any]:
    whole = {"dtick": 1} if count < 10 else {}  # otherwise there are ticks between few moves
    return {
        **whole,
        **axis_of("moves, in order of their pauses"),
        "showgrid": False,
        "tickformat": "d",
        "range": [0.4, max(count, 1) + 0.6],
    }
