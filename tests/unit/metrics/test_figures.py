"""Names follow the rules of Prometheus; the page, the alerts and the dashboard name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stateflow.metrics.figures import (
    AGENT,
    BATCH_BUCKETS,
    CALLS,
    CLIENT,
    COMMON,
    CONTROLLER,
    FIGURES,
    LIMITS,
    REPLICA,
    Histogram,
    monitoring,
)

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
#: of each process, from the Prometheus client
PROMETHEUS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
_NAME = re.compile(r"\b(?:stateflow|process)_[a-z_]+\b")


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_names_have_their_units(figure: Any) -> None:
    assert re.fullmatch(r"stateflow_[a-z_]+", figure.name)
    assert figure.name.endswith("_total") is (figure.kind == "counter")
    if figure.kind == "histogram":
        assert figure.name.endswith("_seconds")
    assert not figure.what.endswith(".")
    assert len(FIGURES) == len({*COMMON, *REPLICA, *CONTROLLER, *AGENT, *CLIENT, *CALLS, *LIMITS})


def test_the_page_has_all_of_them() -> None:
    text = PAGE.read_text()
    for figure in FIGURES.values():
        labels = ", ".join(f"`{label}`" for label in figure.labels)
        assert f"| `{figure.name}` | {figure.kind} | {labels} | {figure.what} |" in text
    assert set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE)) == set(FIGURES)


def named(text: str) -> set[str]:
    found = set(_NAME.findall(text)) - {"process_name"}
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def test_alerts_are_of_figures_that_there_are() -> None:
    (group,) = yaml.safe_load(monitoring()["alerts.yml"])["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 8
    for rule in group["rules"]:
        assert named(rule["expr"]) <= set(FIGURES), rule
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_dashboard_is_of_figures_that_there_are_and_its_panels_do_not_overlap() -> None:
    dashboard = json.loads(monitoring()["dashboard.json"])
    places = set()
    shown = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        squares = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not squares & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= squares
        for target in panel["targets"]:
            assert named(target["expr"]) <= set(FIGURES) | PROMETHEUS, target
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in target["expr"] or label in ("replica",), target
            shown |= named(target["expr"])
    left = set(FIGURES) - shown
    assert left <= {
        *("stateflow_leads", "stateflow_partitions", "stateflow_state_entries", "stateflow_replica_heartbeat_seconds"),
        *("stateflow_partitions_damaged", "stateflow_checkpoint_rounds_total", "stateflow_batches_per_second"),
        *("stateflow_agent_controller_seconds", "stateflow_agent_disk_free_bytes", "stateflow_agent_cores"),
        *("stateflow_client_replayed_total", "stateflow_client_batches_running", "stateflow_followers"),
    }


def test_a_histogram_counts_each_once() -> None:
    histogram = Histogram(BATCH_BUCKETS)
    for value in (0.0, 0.001, 0.0011, 59.0, 61.0):
        histogram.observe(value)
    assert histogram.counts[0] == 2, "a bound counts what is equal to it (le)"
    assert histogram.counts[1] == 1
    assert histogram.counts[-2:] == [1, 1]
    assert sum(histogram.counts) == 5
    assert histogram.total == pytest.approx(120.0021)
