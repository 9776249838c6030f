"""The page and the picture of a drive."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stateflow.demo.follow.report import figures, headline, render, write_report
from stateflow.demo.follow.result import FollowResult, Phase
from stateflow.demo.result import Comparison

Driven = Callable[..., FollowResult]


def embedded(html: str) -> Any:
    return json.loads(re.search(r'id="figures">(.*?)</script>', html, re.S)[1])


def test_one_page_and_one_picture_are_written(driven: Driven, tmp_path: Path) -> None:
    html, png = write_report(driven(), tmp_path / "new" / "out")
    assert sorted(path.name for path in html.parent.iterdir()) == ["follow.html", "follow.png", "plotly.min.js"]
    assert struct.unpack(">I", png.read_bytes()[16:20]) == (1400,)
    page = html.read_text(encoding="utf-8")
    assert set(re.findall(r'src="([^"]+)"', page)) == {"plotly.min.js"}
    assert embedded(page) == json.loads(json.dumps(figures(driven())))
    assert "$" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)


def test_the_page_claims_what_was_found(driven: Driven) -> None:
    assert headline(driven()).endswith("6 moves: nothing lost, nothing duplicated, all equal to the reference")
    wrong = driven(state=Comparison(False, 9, 1, 0, 0, ["vehicle <b>: expected, absent"]))
    assert headline(wrong).endswith("the result differs from the reference")
    page = render(wrong)
    assert 'h1 class="bad"' in page
    assert "vehicle &lt;b&gt;: expected" in page
    assert headline(driven(moves=[])).startswith("No state moved")


def test_cards_say_what_was_measured(driven: Driven) -> None:
    page = render(driven(budget_ms=9.0))
    assert "budget of 9 ms not kept, 6 moves" in page
    assert "over_budget: no" in page, "a move that was not made"
    assert re.search(r"State elsewhere</h2><p class=\"value\">4\d\.\d ms", page)
    assert "–" in render(driven(moves=[])), "what was not measured has no figure"


def test_every_sample_is_drawn_once_and_state_below_its_vehicles(driven: Driven) -> None:
    result = driven()
    data = figures(result)["timeline"]["data"]
    drawn = [trace for trace in data if trace["mode"] == "markers" and trace["name"] != "pause of a move"]
    assert len(drawn) == len(Phase)
    assert sum(len(trace["x"]) for trace in drawn) == len(result.samples)
    lanes = [trace for trace in data if trace.get("yaxis") == "y2"]
    places = {round(place % 1, 2) for trace in lanes for place in trace["y"] if place is not None}
    assert places == {0.81, 0.19}
    assert len([trace for trace in lanes if trace["showlegend"]]) == 4, "each site once"
    bars, budget = figures(result)["pauses"]["data"]
    assert bars["y"] == [10.0] * 6
    assert budget["y"] == [50.0, 50.0]


def test_nothing_to_draw_is_drawn(driven: Driven, tmp_path: Path) -> None:
    write_report(driven(moves=[], samples=[]), tmp_path)
