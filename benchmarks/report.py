"""Make a page, pictures and a table of the results that were kept.

Reads JSON lines (bench-out/results.jsonl), and uses the newest result of each experiment. Writes ``report.html``, which
loads no other file, ``targets.md``, ``targets.png`` and ``latency.png``. Every figure and verdict comes from the
results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.record import QUICK_S
from benchmarks.report_charts import Figure, charts, overview
from benchmarks.report_page import PAGE
from benchmarks.results import DIRECTORY, RESULTS, correctness_of, faults, newest, read
from benchmarks.targets import Aim, aims_of, number

Records = Mapping[str, dict[str, Any]]
_COLUMNS = ("experiment", "target", "bound", "figure", "figure / bound", "range", "verdict")
_COLUMNS += ("lost, duplicated, late, state", "took", "commit", "settings")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--to", type=Path, default=DIRECTORY, help="directory of the report")
    options = parser.parse_args(arguments)
    for path in write(newest(read(options.results)), options.to):
        print(path)
    return 0


def write(records: Records, directory: Path) -> list[Path]:
    from plotly.offline import get_plotlyjs

    from benchmarks.report_picture import write_latency, write_targets

    directory.mkdir(parents=True, exist_ok=True)
    page, table = directory / "report.html", directory / "targets.md"
    page.write_text(render(records, get_plotlyjs()), encoding="utf-8")
    table.write_text(markdown(records), encoding="utf-8")
    written = [page, table]
    if write_targets(records, directory / "targets.png"):
        written.append(directory / "targets.png")
    if write_latency(records, directory / "latency.png"):
        written.append(directory / "latency.png")
    return written


def render(records: Records, plotly_js: str) -> str:
    aims = [aim for record in records.values() for aim in aims_of(record)]
    figures: dict[str, Figure] = {}
    if any(aim.score is not None for aim in aims):
        figures["overview"] = overview(aims)
    sections = "".join(_section(record, figures) for record in records.values())
    met, missed = sum(aim.met for aim in aims), sum(aim.missed for aim in aims)
    unsound = [name for name, record in records.items() if faults(record)]
    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    return Template(PAGE).substitute(
        verdict="bad" if unsound else "good",
        headline=escape(_headline(met, len(aims), len(unsound), len(records))),
        subtitle=escape(_subtitle(records)),
        cards="".join(
            _card(*card)
            for card in (
                ("met", str(met), "targets", "good" if met else ""),
                ("missed", str(missed), "targets", "bad" if missed else ""),
                ("not measured", str(len(aims) - met - missed), "targets", ""),
                ("correct", f"{len(records) - len(unsound)}/{len(records)}", _unsound(unsound), "bad" * bool(unsound)),
            )
        ),
        overview=_overview(aims),
        table="".join(_aim_row(aim) for aim in aims),
        sections=sections,
        figures=data,
        plotly=f">{plotly_js}",
    )


def _headline(met: int, targets: int, unsound: int, experiments: int) -> str:
    """Returns the verdict of all records.

    An experiment that failed may have no targets, so experiments are counted, too.
    """
    said = f"{met} of {targets} targets met" if targets else "no targets"
    return said + (f", {unsound} of {experiments} experiments failed or wrong" if unsound else "")


def _overview(aims: Sequence[Aim]) -> str:
    """Returns the place of the chart of all targets, and how many measured targets the chart cannot show."""
    measured = [aim for aim in aims if aim.value is not None]
    if not measured:
        return "<p>No target was measured.</p>"
    lacking = sum(aim.score is None for aim in measured)
    parts = []
    if lacking < len(measured):
        parts.append('<div id="overview" role="img" aria-label="Targets and their distance from the bound"></div>')
    if lacking:
        those = f"{lacking} target{' is' if lacking == 1 else 's are'}"
        parts.append(f"<p>{those} only in the table: a bound or figure of 0 has no place on a logarithmic axis.</p>")
    return "".join(parts)


def markdown(records: Records) -> str:
    """Returns a Markdown table of all targets."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for record in records.values():
        for aim in aims_of(record) or [None]:
            settings = ", ".join(_settings(record))
            cells = [record["experiment"], *(_cells(aim) if aim else ["–", "", "", "", "", _state(record)])]
            cells += [correctness_of(record), _took(record), _commit(record), settings]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(aim: Aim) -> list[str]:
    return [aim.name, aim.bound, number(aim.value), number(aim.ratio), aim.range, aim.verdict]


# -- parts of the page --------------------------------------------------------------------------------------


def _section(record: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    experiment = record["experiment"]
    parts = [
        f'<section class="panel" id="{escape(experiment)}"><h2>{escape(experiment)}: {escape(_question(record))}</h2>'
    ]
    tone = ' class="wrong"' if faults(record) else ""
    parts.append(f"<p{tone}>{escape(correctness_of(record))}</p>")
    if took := _took(record):
        tone = ' class="wrong"' if record.get("overran") else ""
        parts.append(f"<p{tone}>Took {escape(took)}</p>")
    if "skipped" in record:
        parts.append(f"<p>Skipped: {escape(record['skipped'])}</p>")
    if record["failures"]:
        parts.append("<ul class=wrong>" + "".join(f"<li>{escape(line)}</li>" for line in record["failures"]) + "</ul>")
    for number_, (title, figure) in enumerate(charts(record)):
        id_ = f"{experiment}-{number_}"
        figures[id_] = figure
        parts.append(f'<h3>{escape(title)}</h3><div id="{escape(id_)}" role="img" aria-label="{escape(title)}"></div>')
    facts = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(_told(value))}</dd>"
        for name, value in (*record["settings"].items(), ("seed", record["seed"]), ("commit", record["commit"]))
    )
    versions = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in record["versions"].items())
    raw = escape(json.dumps(_brief(record["figures"]), indent=1))
    parts.append(
        f'<details><summary>Settings and versions</summary><div class="two"><dl>{facts}</dl><dl>{versions}</dl></div>'
        f"</details><details><summary>All figures</summary><pre>{raw}</pre></details></section>"
    )
    return "".join(parts)


def _question(record: Mapping[str, Any]) -> str:
    from benchmarks.__main__ import REGISTRY

    known = REGISTRY.get(record.get("benchmark", ""))
    return known.question_of(record["experiment"]) if known else str(record.get("benchmark", ""))


def _aim_row(aim: Aim) -> str:
    tone = "good" if aim.met else "bad" if aim.missed else ""
    cells = [aim.bound, number(aim.value), aim.range]
    numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
    link = f'<a href="#{escape(aim.experiment)}">{escape(aim.experiment)}</a>'
    verdict = f'<td class="{tone}">{aim.verdict}</td>'
    return f'<tr><td>{link}</td><td class="name">{escape(aim.name)}</td>{numbers}{verdict}</tr>'


def _card(title: str, value: str, note: str, tone: str) -> str:
    return (
        f'<div class="card {tone}"><h2>{escape(title)}</h2><p class="value">{escape(value)}</p>'
        f'<p class="note">{escape(note)}</p></div>'
    )


def _unsound(names: Sequence[str]) -> str:
    return "experiments" if not names else "not: " + ", ".join(names)


def _subtitle(records: Records) -> str:
    if not records:
        return "no results"
    first = next(iter(records.values()))["settings"]
    commits = {_commit(record) for record in records.values()}
    sizes = {bool(record["settings"].get("quick")) for record in records.values()}
    size = "quick and full sizes" if len(sizes) > 1 else "quick sizes" if sizes == {True} else "full sizes"
    busy = [
        e for e, r in records.items() if r["settings"].get("load_1min_at_end", 0) > 2 * r["settings"].get("cpus", 1)
    ]
    told = f"{size}, {first.get('cpus')} processors, {first.get('memory_gb')} GB, commit {', '.join(sorted(commits))}"
    if busy:
        told += f"; the machine was busy with other things during {', '.join(busy)}"
    slow = [experiment for experiment, record in records.items() if record.get("overran")]
    return told + (f"; too long for a quick size: {', '.join(slow)}" if slow else "")


def _commit(record: Mapping[str, Any]) -> str:
    """Returns the short hash of a record's commit, with a plus if the tree had changes."""
    revision, plus, _ = record["commit"].partition("+")
    return str(revision)[:9] + plus


def _settings(record: Mapping[str, Any]) -> Iterator[str]:
    for name, value in record["settings"].items():
        if isinstance(value, bool | int | float | str) and len(str(value)) < 30:
            yield f"{name}={value}"


def _state(record: Mapping[str, Any]) -> str:
    return "skipped" if "skipped" in record else "failed" if record["failures"] else "no target"


def _took(record: Mapping[str, Any]) -> str:
    """Returns text with the duration of an experiment, which also says if a quick experiment took too long.

    The text is empty for an older record without a duration.
    """
    if "took_s" not in record:
        return ""
    said = f"{record['took_s']:.0f} s"
    if not record.get("overran"):
        return said
    return f"{said}, TOO LONG for a quick size (at most {QUICK_S:.0f} s × {record['slowness']:g})"


def _told(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _brief(value: Any) -> Any:
    """Returns the value with all lists in it shortened to 12 entries."""
    if isinstance(value, Mapping):
        return {name: _brief(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_brief(each) for each in value[:12]] + [f"… {len(value) - 12} more"] * (len(value) > 12)
    return value
