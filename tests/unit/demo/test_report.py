from __future__ import annotations

import builtins
import dataclasses
import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from stateflow.demo.charts import figures, outages, timeline
from stateflow.demo.report import _draw_pauses, _side, headline, render, write_report
from stateflow.demo.result import DemoResult, Incident
from stateflow.errors import ExtraMissing


def page(result: DemoResult) -> str:
    return render(result)


def embedded_figures(html: str) -> Any:
    return json.loads(re.search(r'id="figures">(.*?)</script>', html, re.S)[1])


def trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in figure["data"] if entry.get("name") == name)


def test_one_page_and_one_picture_are_written(result: DemoResult, tmp_path: Path) -> None:
    html_path, png_path = write_report(result, tmp_path / "new" / "out")
    html = html_path.read_text(encoding="utf-8")
    assert '<script src="plotly.min.js">' in html
    assert len(html) < 200_000
    assert "plotly.js v" in html_path.with_name("plotly.min.js").read_text(encoding="utf-8")
    png = png_path.read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">I", png[16:20]) == (1400,)


def test_the_page_refers_to_nothing_but_the_file_beside_it(result: DemoResult) -> None:
    class Links(HTMLParser):
        found: list[tuple[str, str | None]] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [(name, value) for name, value in attrs if name in {"src", "href"}]

    parser = Links()
    parser.feed(page(result))
    assert parser.found == [("src", "plotly.min.js")]
    assert "@import" not in page(result)


def test_the_legend_of_the_timeline_is_short_and_waiting_moves_do_not_squeeze_it(result: DemoResult) -> None:
    late = dataclasses.replace(result.moves[-1], started_s=result.duration_s, duration_s=500.0)
    drawn = timeline(dataclasses.replace(result, moves=[*result.moves, late]))
    latency = [t["name"] for t in drawn["data"] if t.get("showlegend", True) and "legend" not in t]
    assert len(latency) <= 6, latency
    assert all(t["legend"] == "legend2" for t in drawn["data"] if t["type"] == "bar")
    assert drawn["layout"]["xaxis"]["range"][1] <= 1.1 * result.duration_s


def test_what_was_promised_is_told_beside_what_was_expected(result: DemoResult) -> None:
    moves = [dataclasses.replace(move, margin_ms=20.0) for move in result.moves]
    drawn = embedded_figures(page(dataclasses.replace(result, moves=moves)))["pauses"]
    pairs = zip(trace(drawn, "expected")["y"], trace(drawn, "promised")["y"], strict=True)
    assert all(promised == expected + 20.0 for expected, promised in pairs)
    assert "promised" in trace(drawn, "pause")["text"][0]


def test_on_a_telephone_the_table_keeps_what_matters(result: DemoResult) -> None:
    html = page(result)
    assert ".wide, th:first-child, td:first-child { display: none; }" in html
    for row in re.findall(r"<tr>.*?</tr>", html, re.S):
        assert len(re.findall(r'class="[^"]*\bwide\b', row)) == 6, row


def test_a_kill_stands_left_of_what_followed(result: DemoResult) -> None:
    for share in (0.3, 0.58, 0.83):
        kill, back = (Incident(share * 100 + after, kind, "r") for after, kind in ((0, "SIGKILL"), (1, "restart")))
        assert (_side(kill, 100.0), _side(back, 100.0)) == ("right", "left")
    assert (_side(Incident(5, "SIGKILL", "r"), 100.0), _side(Incident(95, "restart", "r"), 100.0)) == ("left", "right")


def test_a_run_with_moves_that_failed_has_not_held(result: DemoResult) -> None:
    assert result.moves_failed
    assert not result.held
    clean = dataclasses.replace(result, moves=[move for move in result.moves if move.completed])
    assert clean.held
    assert not dataclasses.replace(clean, output_equal=False).held


def test_the_verdicts_are_stated(result: DemoResult, unsound_result: DemoResult) -> None:
    assert headline(result).startswith("23 live moves under 336,776 rows, 1 not completed: state and output")
    clean = dataclasses.replace(result, moves=[move for move in result.moves if move.completed])
    assert headline(clean).endswith("rows: state and output equal to the reference")
    assert "differs from the reference" in headline(unsound_result)
    for field in ("state_equal", "output_equal"):
        assert "differs" in headline(dataclasses.replace(clean, **{field: False}))
    assert '<h1 class="good">' in page(clean)
    assert '<h1 class="bad">' in page(result)
    assert '<h1 class="bad">' in page(unsound_result)
    assert "Differences found" in page(unsound_result)
    assert "Differences found" not in page(result)


def test_text_from_outside_is_escaped(unsound_result: DemoResult) -> None:
    nasty = dataclasses.replace(unsound_result.moves[17], error="</script><b>x</b>")
    html = page(dataclasses.replace(unsound_result, moves=[nasty], settings={"<i>": "</dl>"}))
    assert "<b>carriers</b>" not in html
    assert "<b>x</b>" not in html
    assert "<i>" not in html
    assert html.count("</script>") == 3
    assert embedded_figures(html)["timeline"]["data"]


def test_every_colour_named_by_a_chart_is_defined_for_both_schemes(result: DemoResult) -> None:
    html = page(result)
    used = set(re.findall(r'"var\((--[a-z0-9]+)\)"', json.dumps(figures(result))))
    light, dark = (set(re.findall(r"(--[a-z0-9]+):", part)) for part in re.findall(r":root \{(.*?)\}", html, re.S))
    assert used
    assert used <= light
    assert light == dark


def test_every_move_is_in_the_timeline_the_bars_and_the_table(result: DemoResult) -> None:
    drawn = embedded_figures(page(result))
    stories = trace(drawn["timeline"], "pause of a move")["text"]
    assert len(stories) == 23
    assert "cloud-0 → edge-1-0" in stories[0]
    assert "pause" in stories[0]
    assert "warm" in stories[0]
    bars = trace(drawn["pauses"], "pause")["y"]
    assert sum(bar is not None for bar in bars) == 23
    assert len(trace(drawn["pauses"], "expected")["y"]) == 24
    assert len(trace(drawn["pauses"], "not completed")["x"]) == 1
    assert len(trace(drawn["timeline"], "failed move")["x"]) == 4
    assert page(result).count("<tr><td") == 24
    assert len(trace(drawn["bytes"], "warm copy")["y"]) == 24


def test_kill_and_restart_are_marked(result: DemoResult) -> None:
    layout = figures(result)["timeline"]["layout"]
    assert [note["text"] for note in layout["annotations"]] == ["SIGKILL edge-2-0", "restart edge-2-0"]
    assert [shape["type"] for shape in layout["shapes"]] == ["rect", "line", "line"]


def test_an_outage_pairs_a_kill_with_the_next_event_of_the_same_replica() -> None:
    kill, other, back = Incident(1, "SIGKILL", "a"), Incident(2, "restart", "b"), Incident(3, "restart", "a")
    assert list(outages([back, other, kill])) == [(kill, back)]
    assert list(outages([kill, other])) == []


def test_a_stall_breaks_the_line(result: DemoResult) -> None:
    requests = [sample for sample in result.requests if not 20 < sample.at_s < 23]
    line = trace(figures(dataclasses.replace(result, requests=requests))["timeline"], "request p99")
    assert line["y"].count(None) == 1


def test_an_empty_run_can_be_reported(result: DemoResult, tmp_path: Path) -> None:
    empty = dataclasses.replace(result, moves=[], batches=[], requests=[], incidents=[], duration_s=0.0)
    html_path, png_path = write_report(empty, tmp_path)
    assert "no move completed" in html_path.read_text(encoding="utf-8")
    assert png_path.stat().st_size > 0


def test_the_axis_of_few_moves_has_no_ticks_between_them(result: DemoResult) -> None:
    few = dataclasses.replace(result, moves=result.moves[:1])
    for name in ("pauses", "bytes"):
        assert figures(few)[name]["layout"]["xaxis"]["dtick"] == 1
        assert "dtick" not in figures(result)[name]["layout"]["xaxis"], "a tick for each of many is too much"
    axes = Figure().subplots()
    _draw_pauses(axes, few)
    assert [each for each in axes.get_xticks() if 0.3 <= each <= 1.7] == [1]


def test_a_missing_library_names_the_remedy(
    result: DemoResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("plotly"):
            raise ModuleNotFoundError("no", name=name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ExtraMissing, match=r"stateflow-streams\[demo\]"):
        write_report(result, tmp_path)
