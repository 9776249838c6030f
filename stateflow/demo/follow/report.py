"""Writes the report of a drive: an HTML page, the library that draws its charts, and a picture.

The charts are plotly.js figures, in plain dictionaries. Their colours are written as :mod:`stateflow.demo.charts`
says. The picture shows the waiting times of gateways, the sites of vehicles and state, the share of readings that were
answered at their own site, and the pauses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from plotly.offline import get_plotlyjs

from stateflow.demo.charts import LEGEND, NARROWED, STYLE, Figure, axis_of, move_story, moves_of, page, styled
from stateflow.demo.follow.fleet import SITES
from stateflow.demo.follow.result import CLOUD, Band, FollowResult, Phase, Whereabouts, by_phase, extent_ms, share_near
from stateflow.demo.report import (
    BAD,
    CARD,
    GOOD,
    INK,
    MOVE,
    P99,
    PLOTLY_NAME,
    SOFT,
    card,
    differences,
    embedded,
    facts,
    move_row,
    plain,
)

SITE_COLOURS: Final = dict(zip((*SITES, CLOUD), ("var(--a)", "var(--b)", "var(--d)", "var(--batch)"), strict=True))
PHASES: Final = {
    Phase.AWAY: ("state elsewhere", "var(--p99)"),
    Phase.MOVING: ("state moving", "var(--bad)"),
    Phase.NEAR: ("state at the gateway's site", "var(--good)"),
}
#: offsets within a convoy's lane at which the vehicles and the state are drawn
UPPER, LOWER = -0.19, 0.19


def figures(result: FollowResult) -> dict[str, Figure]:
    """Returns id of an HTML element → the chart that it shows."""
    return {"timeline": timeline(result), "pauses": pauses(result)}


def timeline(result: FollowResult) -> Figure:
    """Returns a chart of three parts over one time axis.

    The parts are the waiting times of gateways (on a log axis), the sites of vehicles and of their state, and the share
    of readings that were answered at their own site.
    """
    where = Whereabouts(result.moves)
    traces = [
        *_latencies(result, where),
        _pause_marks(result),
        *_lanes(result.vehicle_bands(), UPPER),
        *_lanes(result.state_bands(), LOWER),
    ]
    shares = share_near(result.samples, where)
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "x": [at_s for at_s, _ in shares],
            "y": [share for _, share in shares],
            "yaxis": "y3",
            "fill": "tozeroy",
            "line": {"color": "var(--good)", "width": 1.5},
            "showlegend": False,
            "hovertemplate": "%{y:.0%} of the readings<extra></extra>",
        }
    )
    ticks = list(range(result.convoys))
    layout = styled(
        height=860,
        xaxis={**axis_of("seconds since the convoys set off"), "anchor": "y3", "range": [0, result.seconds * 1.01]},
        legend={**LEGEND, "y": 1.02, "yanchor": "bottom", "itemsizing": "constant"},
        legend2={**LEGEND, "y": 0.49, "yanchor": "bottom"},
        yaxis={
            **axis_of("milliseconds"),
            "type": "log",
            "domain": [0.57, 1.0],
            "dtick": 1,
            "tickformat": ",~g",
            "range": [math.log10(end) for end in extent_ms(result.samples, result.moves)],
        },
        yaxis2={
            **axis_of("convoy"),
            "domain": [0.17, 0.48],
            "showgrid": False,
            "tickvals": ticks,
            "range": [result.convoys - 0.5, -0.5],
            "fixedrange": True,
        },
        yaxis3={**axis_of("served locally"), "domain": [0.0, 0.12], "tickformat": ".0%", "range": [0, 1.05]},
    )
    return {"data": traces, "layout": layout}


def _latencies(result: FollowResult, where: Whereabouts) -> Iterator[dict[str, Any]]:
    for phase, samples in by_phase(result.samples, where).items():
        name, colour = PHASES[phase]
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [sample.at_s for sample in samples],
            "y": [sample.took_ms for sample in samples],
            "text": [f"convoy {sample.convoy}, gateway {sample.site}" for sample in samples],
            "marker": {"color": colour, "size": 5 if phase is Phase.MOVING else 4, "opacity": 0.75},
            "hovertemplate": "%{text}: %{y:.1f} ms<extra></extra>",
        }


def _pause_marks(result: FollowResult) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "pause of a move",
        "x": [move.pause_at_s for move in result.completed],
        "y": [max(move.pause_ms, 0.1) for move in result.completed],
        "text": [move_story(move) for move in result.completed],
        "marker": {
            "color": "var(--move)",
            "size": 11,
            "symbol": "diamond",
            "line": {"color": "var(--card)", "width": 1.2},
        },
        "hovertemplate": "%{text}<extra></extra>",
    }


def _lanes(bands: Sequence[Band], offset: float) -> Iterator[dict[str, Any]]:
    what = "vehicles" if offset == UPPER else "state"
    for site, colour in SITE_COLOURS.items():
        at_s: list[float | None] = []
        lanes: list[float | None] = []
        for band in bands:
            if band.site == site:
                at_s += [band.start_s, band.end_s, None]
                lanes += [band.convoy + offset] * 2 + [None]
        if at_s:
            yield {
                "type": "scatter",
                "mode": "lines",
                "name": site,
                "legend": "legend2",
                "legendgroup": site,
                "showlegend": what == "state",
                "x": at_s,
                "y": lanes,
                "yaxis": "y2",
                "line": {"color": colour, "width": 9},
                "hovertemplate": f"{what} at {site}<extra></extra>",
            }


def pauses(result: FollowResult) -> Figure:
    """Returns a chart with a bar for the pause of each move, and a line for the budget."""
    moves = sorted(result.completed, key=lambda move: move.pause_at_s)
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": "pause",
            "x": list(range(1, len(moves) + 1)),
            "y": [move.pause_ms for move in moves],
            "marker": {"color": "var(--move)"},
            "text": [move_story(move) for move in moves],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "budget",
            "x": [0.4, len(moves) + 0.6],
            "y": [result.budget_ms] * 2,
            "line": {"color": "var(--ink)", "width": 1.5, "dash": "dot"},
            "hovertemplate": "budget %{y:.0f} ms<extra></extra>",
        },
    ]
    axis = {**axis_of("moves, in order of their pauses"), "showgrid": False, "tickformat": "d"}
    layout = styled(height=320, xaxis=axis, yaxis={**axis_of("milliseconds"), "rangemode": "tozero"}, bargap=0.35)
    return {"data": traces, "layout": layout}


_SITE_COLOURS: Final = dict(zip((*SITES, CLOUD), ("#4e84c4", "#58a89a", "#c9a24a", "#a3abb8"), strict=True))
_PHASE_COLOURS: Final = {Phase.AWAY: P99, Phase.MOVING: BAD, Phase.NEAR: GOOD}
_LEGEND: Final[dict[str, Any]] = {
    "frameon": False,
    "fontsize": 9.5,
    "labelcolor": INK,
    "handlelength": 1.2,
    "columnspacing": 1.4,
    "borderaxespad": 0.1,
}


def write_picture(result: FollowResult, path: str | os.PathLike[str]) -> None:
    """Draws ``result`` as a PNG file that is 1,400 pixels wide."""
    figure = Canvas(figsize=(10, 9.2), dpi=140, facecolor=CARD)
    grid = figure.add_gridspec(
        4, 1, height_ratios=(3.2, 2.7, 1.0, 1.5), hspace=0.42, left=0.085, right=0.985, top=0.865, bottom=0.055
    )
    where = Whereabouts(result.moves)
    latency = figure.add_subplot(grid[0])
    lanes, share = (figure.add_subplot(grid[row], sharex=latency) for row in (1, 2))
    _headline(figure, result)
    _draw_latency(latency, result, where)
    _draw_lanes(lanes, result)
    _draw_share(share, result, where)
    _draw_pauses(figure.add_subplot(grid[3]), result)
    figure.savefig(path, facecolor=CARD, metadata={"Software": None})


def _headline(figure: Any, result: FollowResult) -> None:
    summary = result.summary()
    figure.text(0.017, 0.972, "State that follows its vehicles", fontsize=16, fontweight="bold", color=INK, va="center")
    verdict = "0 lost, 0 duplicated, all equal to the reference" if result.equal else "DIFFERENT FROM THE REFERENCE"
    tone = GOOD if result.equal else BAD
    figure.text(0.985, 0.972, verdict, fontsize=11.5, fontweight="bold", color=tone, va="center", ha="right")
    facts = [f"{len(result.completed)} moves", f"links of {result.rtt_ms:g} ms round trip"]
    away, near = summary["away_ms_median"], summary["near_ms_median"]
    if away is not None and near is not None:
        facts.append(
            f"median gateway wait {away:.0f} ms while the state is elsewhere, {near:.1f} ms once it has followed"
        )
    figure.text(0.017, 0.941, "  ·  ".join(facts), fontsize=10.5, color=SOFT, va="center")


def _draw_latency(axes: Any, result: FollowResult, where: Whereabouts) -> None:
    for phase, samples in by_phase(result.samples, where).items():
        at_s, took_ms = [sample.at_s for sample in samples], [sample.took_ms for sample in samples]
        axes.scatter(
            at_s, took_ms, s=9 if phase is Phase.MOVING else 6, color=_PHASE_COLOURS[phase], label=PHASES[phase][0],
            alpha=0.75, linewidths=0, zorder=3 if phase is Phase.MOVING else 2,
        )  # fmt: skip
    axes.scatter(
        [move.pause_at_s for move in result.completed], [max(move.pause_ms, 0.1) for move in result.completed],
        color=MOVE, s=38, marker="D", label="pause of a move", zorder=4, edgecolors=CARD, linewidths=0.9,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_xlim(0, result.seconds * 1.01)
    axes.set_ylim(extent_ms(result.samples, result.moves))
    axes.set_ylabel("gateway wait, ms", color=SOFT, fontsize=9.5)
    plain(axes)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.008, 1.0), ncols=4, markerscale=1.6, **_LEGEND)


def _draw_lanes(axes: Any, result: FollowResult) -> None:
    for bands, offset in ((result.vehicle_bands(), UPPER), (result.state_bands(), LOWER)):
        for band in bands:
            width = band.end_s - band.start_s
            colour = _SITE_COLOURS[band.site]
            axes.barh(band.convoy + offset, width, left=band.start_s, height=0.34, color=colour, lw=0)
    for move in result.completed:
        axes.plot([move.pause_at_s] * 2, [move.partition + 0.02, move.partition + 0.4], color=MOVE, lw=2)
    axes.set_ylim(result.convoys - 0.5, -0.5)
    axes.set_yticks(range(result.convoys))
    axes.set_ylabel("convoy: vehicles above,\nstate below", color=SOFT, fontsize=9.5)
    plain(axes)
    axes.grid(False)
    keys: list[Any] = [Patch(color=colour, label=f"at {site}") for site, colour in _SITE_COLOURS.items()]
    keys.append(Line2D([], [], color=MOVE, lw=2, label="a move"))
    axes.legend(handles=keys, loc="lower left", bbox_to_anchor=(-0.008, 1.0), ncols=5, **_LEGEND)


def _draw_share(axes: Any, result: FollowResult, where: Whereabouts) -> None:
    shares = share_near(result.samples, where)
    at_s, share = [at_s for at_s, _ in shares], [share for _, share in shares]
    axes.fill_between(at_s, share, color=GOOD, alpha=0.18, lw=0)
    axes.plot(at_s, share, color=GOOD, lw=1.5)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("readings\nserved locally", color=SOFT, fontsize=9.5)
    axes.set_xlabel("seconds since the convoys set off", color=SOFT, fontsize=9.5, labelpad=1)
    plain(axes)


def _draw_pauses(axes: Any, result: FollowResult) -> None:
    pauses = [move.pause_ms for move in sorted(result.completed, key=lambda move: move.pause_at_s)]
    axes.bar(range(1, len(pauses) + 1), pauses, color=MOVE, width=0.62, label="pause")
    axes.axhline(result.budget_ms, color=INK, lw=1.3, ls=(0, (2, 2)), label="budget")
    axes.set_xlim(0.3, max(len(pauses), 1) + 0.7)
    axes.set_ylim(0, max([*pauses, result.budget_ms]) * 1.1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=25, min_n_ticks=1))
    axes.set_ylabel("pause, ms", color=SOFT, fontsize=9.5)
    axes.set_xlabel("moves, in order of their pauses", color=SOFT, fontsize=9.5, labelpad=2)
    plain(axes)
    axes.grid(False, axis="x")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=2, **_LEGEND)


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
    """Writes the page and the picture into ``directory``, which is created if needed. Returns (page, picture)."""
    directory.mkdir(parents=True, exist_ok=True)
    html, png = directory / HTML_NAME, directory / PNG_NAME
    (directory / PLOTLY_NAME).write_text(get_plotlyjs(), encoding="utf-8")
    html.write_text(render(result), encoding="utf-8")
    write_picture(result, png)
    return html, png


def render(result: FollowResult) -> str:
    """Returns the text of the page, which loads only the file with plotly in the same directory."""
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
    """Returns a sentence about the drive: its moves, and whether the result is equal to the reference."""
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
