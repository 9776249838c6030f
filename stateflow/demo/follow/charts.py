"""The charts of the page as plotly.js figures, in plain dictionaries; colours as in :mod:`stateflow.demo.charts`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from stateflow.demo.charts import LEGEND, Figure, axis_of, move_story, styled
from stateflow.demo.follow.fleet import SITES
from stateflow.demo.follow.result import CLOUD, Band, FollowResult, Phase, Whereabouts, by_phase, extent_ms, share_near

SITE_COLOURS: Final = dict(zip((*SITES, CLOUD), ("var(--a)", "var(--b)", "var(--d)", "var(--batch)"), strict=True))
PHASES: Final = {
    Phase.AWAY: ("state elsewhere", "var(--p99)"),
    Phase.MOVING: ("state moving", "var(--bad)"),
    Phase.NEAR: ("state at the gateway's site", "var(--good)"),
}
#: offsets in a lane at which its vehicles and its state are drawn
UPPER, LOWER = -0.19, 0.19


def figures(result: FollowResult) -> dict[str, Figure]:
    """Returns figures by the id of the element that shows them."""
    return {"timeline": timeline(result), "pauses": pauses(result)}


def timeline(result: FollowResult) -> Figure:
    """Waiting times of gateways (log), places of vehicles and their state, and the share that was served near."""
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
    """A bar for each move, against the budget."""
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
