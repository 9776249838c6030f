"""The report of a demonstration run: one HTML page, the library that draws its charts, and one picture."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from stateflow.demo.charts import PAGE, Figure, figures
from stateflow.demo.result import DemoResult, MoveRow, human_bytes, percentile
from stateflow.errors import ExtraMissing

HTML_NAME = "demo.html"
PNG_NAME = "demo.png"
#: a separate file: inside it, the page would be fifty times as large
PLOTLY_NAME = "plotly.min.js"


def write_report(result: DemoResult, directory: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Writes the page and the picture into ``directory``, which is created; returns their paths.

    Raises:
        ExtraMissing: plotly or matplotlib is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs

        from stateflow.demo.picture import write_picture
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
    """Returns the page. It refers to nothing but the file with plotly beside it."""
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
    """Returns figures as the content of a script element."""
    # "</" could end the element early; "<\\/" is the same string to JSON.
    return json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")


def headline(result: DemoResult) -> str:
    """The run in one sentence; it claims equality only where equality was found."""
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
    """Returns a panel of the differences; empty if there are none."""
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
