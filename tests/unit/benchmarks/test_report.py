"""Reports of benchmarks: every record is rendered, verdicts are the record's own, and noise is marked as noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, report, suite
from benchmarks.__main__ import REGISTRY
from benchmarks.record import UNKNOWN, Correctness, Record, Target, spread
from benchmarks.report_charts import charts
from benchmarks.results import keep, newest, read, series, spreads
from benchmarks.targets import aims_of, number

SOUND = Correctness(0, 0, 0, True)
TIMELINE = [{"at_s": n / 4, "count": 9, "p50": 1.0 + n, "p99": 2.0 + n, "max": 9.0} for n in range(5)]


def record(experiment: str = "T2", rates: tuple[float, ...] = (100.0, 110.0, 90.0), **changes: Any) -> Record:
    figures = {
        "rows_per_s": {"ours": spread(rates), "</script><b>theirs": spread([50.0, 40.0, 60.0])},
        "levels": {"25%": {"timeline": TIMELINE, "ccdf": [(1.0, 0.5), (3.0, 0.01)]}},
        "odd": [None, 1, {"x": []}],
    }
    targets = [Target("ours / theirs", 2.0, 1.5), Target("never", None, 1.0), Target("none", 3.0, 0, "at_most")]
    made: dict[str, Any] = {"figures": figures, "targets": targets, "correctness": SOUND} | changes
    return Record(experiment, settings={"quick": True}, seed=1, **made)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    file = tmp_path / "results.jsonl"
    for number_, name in enumerate(REGISTRY):
        for experiment in REGISTRY[name].experiments:
            keep(name, record(experiment, (1.0 + number_, 2.0, 3.0)), file)
    keep(
        "edge",
        record("X1", figures={}, targets=[], correctness=Correctness(None, None, None, None), skipped="no <b>"),
        file,
    )
    keep("spark", record("X2", failures=["a & b: broke"], correctness=Correctness(1, None, 0, False)), file)
    return file


def test_every_record_is_rendered_and_nothing_is_fetched(kept: Path, tmp_path: Path) -> None:
    records = newest(read(kept))
    written = report.write(records, tmp_path / "out")
    assert [path.name for path in written] == ["report.html", "targets.md", "targets.png", "latency.png"]
    page = report.render(records, "/* plotly */")
    for experiment in records:
        assert f'<section class="panel" id="{experiment}">' in page
    assert "no &lt;b&gt;" in page
    assert "a &amp; b: broke" in page
    assert "</script><b>" not in page
    assert page.count("<script") == 3
    for outside in ("http://", "https://", "src=", "@import"):
        assert outside not in page.replace("/* plotly */", "")
    for path in written[2:]:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_figures_are_strict_json_and_colours_names(kept: Path) -> None:
    page = report.render(newest(read(kept)), "")
    text = page.split('<script type="application/json" id="figures">')[1].split("</script>")[0]
    figures = json.loads(text, parse_constant=pytest.fail)
    assert {"overview", "T2-0", "T2-1", "T2-2"} <= figures.keys()
    assert all(f'id="{id_}"' in page for id_ in figures)


def test_the_table_has_every_target_with_its_verdict(kept: Path) -> None:
    lines = report.markdown(newest(read(kept))).splitlines()
    t2 = [line for line in lines if line.startswith("| T2 ")]
    assert [line.split(" | ")[6] for line in t2] == ["met", "not measured", "missed"]
    assert len({line.count(" | ") for line in lines if not line.startswith("|---")}) == 1
    assert any(line.startswith("| X1 |") and "skipped" in line for line in lines)
    assert any("quick=True" in line for line in t2)


def test_a_quick_experiment_that_took_too_long_is_marked(tmp_path: Path) -> None:
    keep("direct", record("T2", took_s=130.0, slowness=1.0), tmp_path / "r")
    keep("spark", record("T4", took_s=130.0, slowness=2.0), tmp_path / "r")
    keep("edge", record("M5"), tmp_path / "r")  # as older versions kept it
    records = newest(read(tmp_path / "r"))
    page = report.render(records, "")
    mark = "130 s, TOO LONG for a quick size (at most 120 s × 1)"
    assert page.count(f'<p class="wrong">Took {mark}</p>') == 1
    assert page.count("<p>Took 130 s</p>") == 1
    assert "; too long for a quick size: T2<" in page
    cells = [line.split(" | ") for line in report.markdown(records).splitlines()[2:]]
    assert {(each[0], each[8]) for each in cells} == {("| M5", ""), ("| T2", mark), ("| T4", "130 s")}


def test_nothing_at_all_is_a_page_too(tmp_path: Path) -> None:
    assert [path.suffix for path in report.write({}, tmp_path)] == [".html", ".md"]
    with pytest.raises(SystemExit, match="no_results"):
        read(tmp_path / "none.jsonl")


def test_targets_that_a_logarithmic_axis_cannot_show_are_counted() -> None:
    def page(*targets: Target) -> str:
        return " ".join(report.render({"T2": record(figures={}, targets=list(targets)).to_json()}, "").split())

    placed, lost = Target("ratio", 2.0, 1.5), Target("lost rows", 0, 0, "at_most")
    assert "only in the table" not in page(placed, Target("none", None, 1.0))
    assert "1 target is only in the table" in page(placed, lost)
    assert "2 targets are only in the table" in page(lost, Target("rate", 0.0, 1.0))
    assert "No target was measured" not in page(lost)
    assert "No target was measured" in page(Target("none", None, 1.0))


def test_the_range_of_a_ratio_is_its_widest() -> None:
    first, second, third = aims_of(record().to_json())
    assert (first.least, first.most) == (90 / 60, 110 / 40)
    assert first.score == pytest.approx(2.0 / 1.5)
    assert (second.verdict, second.range, second.score) == ("not measured", "", None)
    assert (third.verdict, third.score) == ("missed", None)


def test_the_newest_of_an_experiment_counts(tmp_path: Path) -> None:
    keep("direct", record(rates=(1.0,)), tmp_path / "r")
    keep("direct", record(rates=(2.0,)), tmp_path / "r")
    assert newest(read(tmp_path / "r"))["T2"]["figures"]["rows_per_s"]["ours"]["median"] == 2.0


def test_spreads_and_series_are_found_wherever_they_are() -> None:
    figures = record().figures
    assert [found.name for found in spreads(figures)] == ["rows_per_s · ours", "rows_per_s · </script><b>theirs"]
    assert list(series(figures, "timeline")) == [("levels · 25%", TIMELINE)]
    assert list(series({"a": [{"ccdf": [1]}]}, "ccdf")) == [("a · run 1", [1])]
    assert list(series({"a": [{"strategy": "fluid", "ccdf": [1]}]}, "ccdf")) == [("a · fluid, run 1", [1])]
    assert list(series({"fluid": [{"strategy": "fluid", "ccdf": [1]}]}, "ccdf")) == [("fluid · run 1", [1])]


def test_of_many_lines_some_of_each_kind_are_drawn() -> None:
    runs = {f"way {way}": [{"timeline": TIMELINE}, {"timeline": TIMELINE}] for way in range(6)}
    drawn = dict(charts({"figures": runs}))
    (title,) = [each for each in drawn if "over time" in each]
    assert title.endswith("(6 of 12)")
    named = [trace["name"] for trace in drawn[title]["data"]]
    assert all(any(f"way {way}" in name for name in named) for way in range(6))


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ((95.0, 105.0, 115.0), compare.NO_DIFFERENCE),
        ((110.0, 120.0, 130.0), compare.NO_DIFFERENCE),
        ((111.0, 120.0, 130.0), "higher"),
        ((80.0, 89.0, 70.0), "lower"),
        ((500.0,), compare.NOISE_UNKNOWN),
    ],
)
def test_compare_says_what_is_noise(
    rates: tuple[float, ...], verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    keep("direct", record(), a)
    keep("direct", record(rates=rates), b)
    assert compare.main([str(a), str(b), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["differences"]
    assert {each["figure"]: each["verdict"] for each in said}["rows_per_s · ours"] == verdict
    assert compare.main([str(a), str(b)]) == 0
    assert verdict in capsys.readouterr().out


def test_compare_warns_of_other_settings(tmp_path: Path) -> None:
    one = record().to_json()
    other = one | {"settings": one["settings"] | {"quick": False, "load_1min_at_end": 99}}
    assert compare._unlike({"T2": one}, {"T2": other}) == ["T2: settings quick"]


def test_compare_names_what_only_one_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    keep("direct", record(figures={"x": spread([1.0, 2.0]), "y": spread([3.0, 4.0])}), a)
    keep("direct", record(figures={"x": spread([1.0, 2.0]), "y": spread([])}), b)
    keep("plan", record("S1"), b)
    assert compare.main([str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["only_in_one"] == [
        {"experiment": "S1", "figure": "", "file": str(b)},
        {"experiment": "T2", "figure": "y", "file": str(a)},
    ]
    assert compare.main([str(a), str(b)]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said[-2:] == [f"S1 only in {b}", f"T2 y only in {a}"]


def test_compare_warns_of_what_failed_or_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    keep("direct", record(), a)
    keep("direct", record(correctness=Correctness(7, 0, 0, False), failures=["y: died"]), b)
    warnings = [f"T2 in {b}: y: died", f"T2 in {b}: lost 7, duplicated 0, late 0, STATE DIFFERENT"]
    assert compare.main([str(a), str(b), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["warnings"] == warnings
    assert compare.main([str(b), str(a)]) == 1
    assert [f"not sound: {line}" for line in warnings] == capsys.readouterr().out.splitlines()[:2]


def test_the_headline_counts_experiments_that_failed() -> None:
    crashed = record("T1", targets=[], figures={}, correctness=UNKNOWN, failures=["took over 600 s"]).to_json()
    good = record("S1", targets=[Target("fast", 2.0, 1.0)]).to_json()
    assert "1 of 1 targets met<" in report.render({"S1": good}, "")
    assert "1 of 1 targets met, 1 of 2 experiments failed or wrong<" in report.render({"S1": good, "T1": crashed}, "")


def test_what_is_inapplicable_is_no_fault() -> None:
    unreadable = Correctness(0, None, 0, None, inapplicable=("duplicated", "state_equal"))
    page = report.render({"T2": record(correctness=unreadable).to_json()}, "")
    assert "<p>lost 0, duplicated not applicable, late 0, state not compared</p>" in page


def test_skipped_is_complete_and_a_failure_is_not() -> None:
    nothing = Correctness(None, None, None, None)
    assert record(correctness=nothing, skipped="no namespaces").complete
    assert not record(correctness=nothing).complete
    assert not record(correctness=Correctness(1, 0, 0, True), skipped="the rest").complete
    assert "skipped" not in record().to_json()


def test_the_suite_goes_on_past_a_failing_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []

    def run(name: str, experiment: str, **_: Any) -> bool:
        ran.append(experiment)
        return experiment != "T1"

    monkeypatch.setattr(suite, "_run", run)
    monkeypatch.setattr(suite, "RESULTS", tmp_path / "none.jsonl")
    assert suite.main(["--quick"]) == 1
    assert {"T1", "T2", "L1", "M4", "S1"} <= set(ran)
    assert "G1-1e7" not in ran
    assert ran.index("T1") < len(ran) - 1
    assert suite.main(["--quick", "direct"]) == 0
    assert ("ledger", "G1-1e7") in list(suite.chosen(quick=False))


@pytest.mark.parametrize(
    ("value", "said"), [(None, "–"), (0.0, "0"), (0.01234, "0.0123"), (1234.5, "1,234"), (2.5, "2.5")]
)
def test_numbers_for_people(value: float | None, said: str) -> None:
    assert number(value) == said
