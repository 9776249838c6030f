"""Writes the report of a demonstration run: an HTML page, the library that draws its charts, and a picture.

The picture shows the timeline with the moves, and the pauses that the moves caused. It is meant for a README.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from stateflow.demo.charts import PAGE, Figure, figures, outages
from stateflow.demo.result import (
    DemoResult,
    Incident,
    MoveRow,
    human_bytes,
    lanes,
    latency_windows,
    log_extent,
    percentile,
)
from stateflow.errors import ExtraMissing

HTML_NAME = "demo.html"
PNG_NAME = "demo.png"
#: file with the library plotly; with the library inside, the page would be fifty times as large
PLOTLY_NAME = "plotly.min.js"
#: colours of the picture
INK, SOFT, GRID, CARD = "#14181f", "#5b6472", "#e8ebf0", "#ffffff"
P50, P99, MAX, BATCH = "#8fbdf2", "#2372d9", "#123f7d", "#a3abb8"
MOVE, BAD, GOOD = "#e06c00", "#c9252d", "#1a7f37"


def write_report(result: DemoResult, directory: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Writes the page and the picture into ``directory``, which is created if needed. Returns (page, picture).

    Raises:
        ExtraMissing: plotly or matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401 - the picture needs it
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ExtraMissing(
            "the report needs plotly and matplotlib",
            remedy="pip install 'stateflow-streams[demo]'",
            package=error.name,
        ) from error
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    html_path, png_path = target / HTML_NAME, target / PNG_NAME
    (target / PLOTLY_NAME).write_text(get_plotlyjs(), encoding="utf-8")
    html_path.write_text(render(result), encoding="utf-8")
    write_picture(result, png_path)
    return html_path, png_path


def render(result: DemoResult) -> str:
    """Returns the text of the page, which loads only the file with plotly in the same directory."""
    return Template(PAGE).substitute(
        headline=escape(headline(result)),
        verdict="good" if _sound(result) and not result.moves_failed else "bad",
        subtitle=escape(_subtitle(result)),
        cards="".join(_cards(result)),
        differences=differences(result.differences),
        moves="".join(move_row(number, move) for number, move in enumerate(_in_order(result), start=1)),
        settings=facts(result.settings),
        versions=facts(result.versions),
        figures=embedded(figures(result)),
        plotly=f'src="{PLOTLY_NAME}">',
    )


def embedded(drawn: Mapping[str, Figure]) -> str:
    """Returns figures as JSON that can be the content of a script element."""
    # "</" could end the element early; "<\\/" is the same string to JSON.
    return json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")


def headline(result: DemoResult) -> str:
    """Returns a sentence about the run: its moves and rows, and whether the result is equal to the reference."""
    moves = f"{result.moves_completed} live moves under {result.rows:,} rows"
    if not _sound(result):
        return f"{moves}: the result differs from the reference"
    if result.moves_failed:
        return f"{moves}, {result.moves_failed} not completed: state and output still equal to the reference"
    return f"{moves}: state and output equal to the reference"


def _sound(result: DemoResult) -> bool:
    return result.state_equal and result.output_equal


def _in_order(result: DemoResult) -> list[MoveRow]:
    return sorted(result.moves, key=lambda move: move.pause_at_s)


def _subtitle(result: DemoResult) -> str:
    parts = [f"{result.keys:,} keys", f"{len(result.batches):,} micro-batches", f"{result.duration_s:.1f} s"]
    times = [request.total_ms for request in result.requests]
    if times:
        parts.append(
            f"{len(times):,} requests to replicas: p50 {percentile(times, 50):.1f} ms, "
            f"p99 {percentile(times, 99):.1f} ms, max {max(times):.1f} ms"
        )
    return " · ".join(parts)


def _cards(result: DemoResult) -> Iterator[str]:
    yield card("State", *_equality(result.state_equal), f"{result.state_keys:,} keys compared")
    yield card("Output", *_equality(result.output_equal), f"{result.output_rows:,} rows compared")
    failed = f"{result.moves_failed} failed" if result.moves_failed else "none failed"
    yield card("Moves completed", str(result.moves_completed), "bad" if result.moves_failed else "good", failed)
    worst, median = result.pause_ms_max, result.pause_ms_median
    if worst is None or median is None:
        yield card("Worst pause", "none", "", "no move completed")
    else:
        yield card("Worst pause", f"{worst:.1f} ms", "", f"median {median:.1f} ms")
    yield card("Throughput", f"{result.rows_per_s:,.0f}", "", "rows/s")


def _equality(equal: bool) -> tuple[str, str]:
    return ("equal", "good") if equal else ("different", "bad")


def card(title: str, value: str, tone: str, note: str) -> str:
    return (
        f'<div class="card {tone}"><h2>{escape(title)}</h2>'
        f'<p class="value">{escape(value)}</p><p class="note">{escape(note)}</p></div>'
    )


def differences(found: Sequence[str]) -> str:
    """Returns an HTML panel with the differences; empty if there are none."""
    if not found:
        return ""
    items = "".join(f"<li><code>{escape(line)}</code></li>" for line in found)
    return f'<section class="panel bad"><h2>Differences found</h2><ul>{items}</ul></section>'


def move_row(number: int, move: MoveRow) -> str:
    pause = f"{move.pause_ms:.1f}" if move.completed else "–"
    cells = [
        (str(number), "number"),
        (str(move.partition), "number"),
        (f"{move.source} → {move.target}", "route"),
        (f"{move.started_s:.1f}", "number wide"),
        (f"{move.duration_s:.2f}", "number wide"),
        (human_bytes(move.bytes_warm), "number wide"),
        (human_bytes(move.bytes_reused), "number wide"),
        (human_bytes(move.bytes_delta), "number wide"),
        (str(move.rounds), "number wide"),
        (f"{move.predicted_pause_ms:.1f}", "number"),
        (pause, "number strong"),
        (f"{move.state.lower()} {move.error}".strip(), "state" if move.completed else "state bad"),
    ]
    return "<tr>" + "".join(f'<td class="{kind}">{escape(text)}</td>' for text, kind in cells) + "</tr>"


def facts(facts: Mapping[str, Any]) -> str:
    return "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())


# -- The picture -----------------------------------------------------------------------------------------------------


def write_picture(result: DemoResult, path: str | os.PathLike[str]) -> None:
    """Draws ``result`` as a PNG file that is 1,400 pixels wide."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(10, 6.9), dpi=140, facecolor=CARD)
    grid = figure.add_gridspec(
        3, 1, height_ratios=(3.4, 0.5, 1.7), hspace=0.12, left=0.075, right=0.985, top=0.835, bottom=0.075
    )
    latency = figure.add_subplot(grid[0])
    rail = figure.add_subplot(grid[1], sharex=latency)
    below = grid[2].subgridspec(2, 1, height_ratios=(0.28, 1), hspace=0)
    pauses = figure.add_subplot(below[1])
    _draw_headline(figure, result)
    _draw_latency(latency, result)
    _draw_rail(rail, result)
    _draw_pauses(pauses, result)
    figure.savefig(path, facecolor=CARD, metadata={"Software": None})


def _draw_headline(figure: Any, result: DemoResult) -> None:
    sound = result.state_equal and result.output_equal
    title = f"{result.moves_completed} live moves under {result.rows:,} rows"
    verdict = "state and output equal to the reference" if sound else "DIFFERENT FROM THE REFERENCE"
    figure.text(0.017, 0.962, title, fontsize=16, fontweight="bold", color=INK, va="center")
    tone = GOOD if sound else BAD
    figure.text(0.985, 0.962, verdict, fontsize=12, fontweight="bold", color=tone, va="center", ha="right")
    facts = [f"{result.rows_per_s:,.0f} rows/s", f"{result.keys:,} keys"]
    if result.pause_ms_max is not None and result.pause_ms_median is not None:
        facts.insert(0, f"pause {result.pause_ms_median:.1f} ms median, {result.pause_ms_max:.1f} ms worst")
    if result.moves_failed:
        facts.insert(0, f"{result.moves_failed} not completed")
    figure.text(0.017, 0.921, "  ·  ".join(facts), fontsize=10.5, color=SOFT, va="center")


def _draw_latency(axes: Any, result: DemoResult) -> None:
    from matplotlib.ticker import FuncFormatter

    windows = latency_windows(result.requests)
    at_s = [window.at_s for window in windows]
    longest, p99 = [window.max_ms for window in windows], [window.p99_ms for window in windows]
    axes.fill_between(at_s, p99, longest, color=MAX, alpha=0.15, lw=0)
    axes.plot(at_s, longest, color=MAX, lw=0.9, ls=(0, (3, 1.5)), label="request max", zorder=3)
    axes.plot(at_s, p99, color=P99, lw=1.5, label="request p99")
    axes.plot(at_s, [window.p50_ms for window in windows], color=P50, lw=1.5, label="request p50")
    axes.scatter(
        [batch.at_s + batch.duration_ms / 1000 for batch in result.batches],
        [batch.duration_ms for batch in result.batches],
        color=BATCH, s=13, marker="s", label="micro-batch", zorder=2, linewidths=0,
    )  # fmt: skip
    completed = [move for move in result.moves if move.completed]
    axes.scatter(
        [move.pause_at_s for move in completed],
        [max(move.pause_ms, 0.1) for move in completed],
        color=MOVE, s=42, marker="D", label="pause of a move", zorder=4, edgecolors=CARD, linewidths=0.9,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_ylabel("milliseconds (log)", color=SOFT, fontsize=9.5)
    plain(axes)
    axes.tick_params(labelbottom=False)
    axes.set_xlim(0, max(result.duration_s, *at_s, 1.0) * 1.01)
    axes.set_ylim(
        log_extent(
            [time for window in windows for time in (window.p50_ms, window.max_ms)]
            + [batch.duration_ms for batch in result.batches]
            + [move.pause_ms for move in completed]
        )
    )
    _mark_incidents(axes, result)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.008, 1.0), ncols=5, frameon=False, fontsize=9.5,
        labelcolor=INK, handlelength=1.4, columnspacing=1.5, borderaxespad=0.2,
    )  # fmt: skip


def _mark_incidents(axes: Any, result: DemoResult) -> None:
    for start, end in outages(result.incidents):
        axes.axvspan(start.at_s, end.at_s, color=BAD, alpha=0.07, lw=0)
    for row, incident in enumerate(sorted(result.incidents, key=lambda entry: entry.at_s)):
        colour = BAD if incident.kind == "SIGKILL" else GOOD
        axes.axvline(incident.at_s, color=colour, lw=1.2, ls=(0, (2, 2)))
        axes.annotate(
            f" {incident.kind} {incident.replica} ", (incident.at_s, 0.985 - 0.075 * (row % 2)),
            xycoords=("data", "axes fraction"), color=colour, fontsize=9, va="top", fontweight="bold",
            ha=_side(incident, result.duration_s),
        )  # fmt: skip


def _side(incident: Incident, duration_s: float) -> str:
    """Returns the horizontal alignment of an incident's label: "right" puts the label left of the incident's line.

    The label of a SIGKILL is left of its line, and the label of a restart is right of its line, so that the two do not
    overlap. Near an edge of the plot, the label is on the other side.
    """
    share = incident.at_s / max(duration_s, 1e-9)
    if incident.kind == "SIGKILL":
        return "right" if share > 0.2 else "left"
    return "right" if share > 0.85 else "left"


def _draw_rail(axes: Any, result: DemoResult) -> None:
    lane_of = lanes(result.moves)
    for move, lane in zip(result.moves, lane_of, strict=True):
        colour = MOVE if move.completed else BAD
        axes.barh(
            lane,
            max(move.duration_s, result.duration_s / 1000),
            left=move.started_s,
            height=0.62,
            color=colour,
        )
    plain(axes)
    axes.grid(False)
    axes.set_yticks([])
    axes.set_ylim(max(lane_of, default=0) + 0.8, -0.8)
    axes.set_ylabel("moves", color=SOFT, fontsize=9.5, rotation=0, ha="right", va="center")
    axes.set_xlabel("seconds since the stream began", color=SOFT, fontsize=9.5, labelpad=1)


def _draw_pauses(axes: Any, result: DemoResult) -> None:
    from matplotlib.ticker import MaxNLocator

    moves = sorted(result.moves, key=lambda move: move.pause_at_s)
    numbers = list(range(1, len(moves) + 1))
    heights = [move.pause_ms if move.completed else 0.0 for move in moves]
    axes.bar(numbers, heights, color=MOVE, width=0.62, label="pause")
    finite = [(n, move) for n, move in zip(numbers, moves, strict=True) if math.isfinite(move.promised_ms)]
    at, predicted = [n for n, _ in finite], [move.predicted_pause_ms for _, move in finite]
    promised = [move.promised_ms for _, move in finite]
    axes.hlines(predicted, [n - 0.4 for n in at], [n + 0.4 for n in at], color=INK, lw=1.6, label="expected")
    axes.scatter(at, promised, s=9, marker="o", facecolors="none", edgecolors=SOFT, lw=0.9, label="promised at most")
    failed = [number for number, move in zip(numbers, moves, strict=True) if not move.completed]
    if failed:
        axes.scatter(
            failed,
            [0.0] * len(failed),
            color=BAD,
            marker="x",
            s=40,
            zorder=4,
            label="not completed",
            clip_on=False,
        )
    plain(axes)
    axes.set_ylim(0, max([*heights, *predicted, *promised, 1.0]) * 1.12)
    axes.set_xlim(0.3, max(len(moves), 1) + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=25, min_n_ticks=1))
    axes.grid(False, axis="x")
    axes.set_ylabel("pause, ms", color=SOFT, fontsize=9.5)
    axes.set_xlabel("moves, in order of their pauses", color=SOFT, fontsize=9.5, labelpad=2)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=4, frameon=False, fontsize=9.5,
        labelcolor=INK, handlelength=1.2, borderaxespad=0.1,
    )  # fmt: skip


def plain(axes: Any) -> None:
    """Gives axes the plain style of the picture: a light grid, and no frame but the bottom line."""
    axes.set_facecolor(CARD)
    axes.set_axisbelow(True)
    axes.grid(True, color=GRID, lw=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c5cbd5")
    axes.tick_params(colors=SOFT, labelsize=9, length=0, which="both")
