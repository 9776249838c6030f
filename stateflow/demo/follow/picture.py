"""The picture of a drive: waiting times of gateways, places of vehicles and state, the share served near, and the
pauses."""

from __future__ import annotations

import os
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from stateflow.demo.follow.charts import LOWER, PHASES, UPPER
from stateflow.demo.follow.fleet import SITES
from stateflow.demo.follow.result import CLOUD, FollowResult, Phase, Whereabouts, by_phase, extent_ms, share_near
from stateflow.demo.picture import BAD, CARD, GOOD, INK, MOVE, P99, SOFT, plain

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
    """Draws ``result`` as a PNG 1,400 pixels wide."""
    figure = Figure(figsize=(10, 9.2), dpi=140, facecolor=CARD)
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
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=25))
    axes.set_ylabel("pause, ms", color=SOFT, fontsize=9.5)
    axes.set_xlabel("moves, in order of their pauses", color=SOFT, fontsize=9.5, labelpad=2)
    plain(axes)
    axes.grid(False, axis="x")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=2, **_LEGEND)
