"""The report of a drive: one HTML page, the library that draws its charts, and one picture.

``PAGE`` is a :class:`string.Template`; :func:`render` fills its ``$names``.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from stateflow.demo.charts import NARROWED, STYLE, moves_of
from stateflow.demo.document import page
from stateflow.demo.follow.charts import figures
from stateflow.demo.follow.picture import write_picture
from stateflow.demo.follow.result import FollowResult
from stateflow.demo.report import PLOTLY_NAME, card, differences, embedded, facts, move_row

_BODY = """<div class="cards">$cards</div>
$differences
<section class="panel">
<h2>The drive</h2>
<p>Top: how long a gateway waited for each batch of readings, from sending it to receiving its outputs, by where the
state was. Middle: for each convoy, the site nearest to its vehicles, and below it the site of its state. Bottom: the
share of readings answered at the site they come from. Everything is measured; links between sites are proxies that
delay every piece of data by half a round trip. They sit between gateways and replicas of other sites; replicas reach
each other, and Spark reaches them, without proxies.</p>
<noscript><p>The charts need JavaScript; the picture next to this file shows them.</p></noscript>
<div id="timeline" role="img" aria-label="Gateway wait times, sites of vehicles and state, share served locally"></div>
</section>
<section class="panel">
<h2>Pause of each move</h2>
<p>How long a partition's rows waited, against the autopilot's budget.</p>
<div id="pauses" role="img" aria-label="Pause per move against the budget"></div>
</section>
"""

PAGE = page(
    "stateflow demo --follow", _BODY + moves_of("convoy"), narrowed=NARROWED, width="1240px", columns=5, style=STYLE
)


HTML_NAME = "follow.html"
PNG_NAME = "follow.png"


def write_report(result: FollowResult, directory: Path) -> tuple[Path, Path]:
    """Writes the page and the picture; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    html, png = directory / HTML_NAME, directory / PNG_NAME
    (directory / PLOTLY_NAME).write_text(get_plotlyjs(), encoding="utf-8")
    html.write_text(render(result), encoding="utf-8")
    write_picture(result, png)
    return html, png


def render(result: FollowResult) -> str:
    """Returns the page. It refers to nothing but the file with plotly beside it."""
    moves = sorted(result.moves, key=lambda move: move.pause_at_s)
    return Template(PAGE).substitute(
        headline=escape(headline(result)),
        verdict="good" if result.held else "bad",
        subtitle=escape(_subtitle(result)),
        cards="".join(_cards(result)),
        differences=differences(result.differences),
        moves="".join(move_row(number, move) for number, move in enumerate(moves, start=1)),
        settings=facts(result.settings),
        versions=facts(result.versions),
        figures=embedded(figures(result)),
        plotly=f'src="{PLOTLY_NAME}">',
    )


def headline(result: FollowResult) -> str:
    """The drive in one sentence; it claims equality only where equality was found."""
    said = f"State followed its vehicles in {len(result.completed)} moves" if result.completed else "No state moved"
    return f"{said}: " + (
        "nothing lost, nothing duplicated, all equal to the reference"
        if result.equal
        else "the result differs from the reference"
    )


def _subtitle(result: FollowResult) -> str:
    return (
        f"{result.convoys} convoys of {result.vehicles} vehicles, {result.seconds:g} s between three edge sites · "
        f"{result.telemetry_rows:,} rows through Spark, {result.reading_rows:,} through gateways · "
        f"links with {result.rtt_ms:g} ms round trip"
    )


def _cards(result: FollowResult) -> Iterator[str]:
    summary = result.summary()
    away, moving, near = (summary[name] for name in ("away_ms_median", "moving_ms_max", "near_ms_median"))
    yield card("State elsewhere", milliseconds(away), "", "median gateway wait")
    yield card("During moves", milliseconds(moving), "", "longest gateway wait")
    yield card(
        "State has followed", milliseconds(near), "good", f"median; {summary['served_near']:.0%} of all readings"
    )
    kept, tone = {True: (" kept", "good"), False: (" not kept", "bad"), None: ("", "")}[result.budget_kept]
    pause = milliseconds(result.pause_ms_max)
    yield card("Longest pause", pause, tone, f"budget of {result.budget_ms:g} ms{kept}, {len(result.completed)} moves")
    compared = result.state.compared + result.output.compared + result.answers.compared
    equal, tone = ("equal", "good") if result.equal else ("different", "bad")
    yield card(
        "State and output", equal, tone, f"{result.lost} lost, {result.duplicated} duplicated, {compared:,} compared"
    )


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ms"
