"""Spark pipelines of real processes, killed again and again: state and sink are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay import has_compiler
from stateflow.spark.session import REAL_TIME
from stateflow.testing import LocalCluster
from tests.integration.spark_drivers import second
from tests.integration.spark_operators import LAGS, Laggard
from tests.integration.support import check_owners, eventually, settled, wait_alive
from tests.kills.files import Expected, some_rows, write_file
from tests.kills.harness import PARTITIONS, PATIENCE_S, REPLICAS, SEED, SITES, Mover, Run, Way
from tests.kills.programs import Driver, spark_driver
from tests.kills.real_time import RealTime
from tests.kills.ways import Classic, Connect, Standalone
from tests.versions import needs

#: rounds of five or six kills; four rounds are twenty kills and more
ROUNDS = int(os.environ.get("STATEFLOW_TEST_KILL_ROUNDS", "0"))
pytestmark = [pytest.mark.spark, pytest.mark.processes]
long = pytest.mark.skipif(not ROUNDS, reason="minutes long: run by `make kills`")
no_compiler = pytest.mark.skipif(not has_compiler(), reason="the source of rows is Java, and there is no javac")
WAYS = [
    pytest.param(Classic, id="classic", marks=long),
    pytest.param(Connect, id="connect"),  # one round is short
    pytest.param(RealTime, id="real-time", marks=[long, no_compiler, needs(REAL_TIME)]),
    pytest.param(Standalone, id="standalone", marks=long),
]


@pytest.mark.timeout(700 + 400 * ROUNDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_whose_every_process_is_killed_while_partitions_move(way: type[Way], tmp_path: Path) -> None:
    rounds = max(ROUNDS, 1)
    kinds = [kind for kind, times in way.kills.items() for _ in range(rounds * times)]
    random.Random(SEED).shuffle(kinds)
    operator = way.operators[0].__name__
    with LocalCluster(*way.operators, sites=SITES, partitions=PARTITIONS) as local:
        query = way(local.address, tmp_path)
        run, mover = Run(local, query), Mover(local, operator)
        run.feed()
        try:
            query.start()
            kinds.remove("driver")
            run.strike_early()
            run.progress(2)
            mover.start()
            for kind in kinds:
                run.strike(kind)
            mover.stop()
            query.finish()
        finally:
            query.end()
        print(run.told(mover), flush=True)
        assert run.kills == {kind: rounds * times for kind, times in way.kills.items()}
        assert query.committed() >= 2 * len(kinds), "the query went on before and after every kill"
        moved = min(mover.completed[name] for name in REPLICAS)
        assert moved >= 2 * rounds, f"{mover.completed} moved, {mover.failed} did not"
        wait_alive(local, *REPLICAS)
        eventually(lambda: settled(local), "the last move ends")
        check_owners(local, operator)
        query.compare(local)


# -- speculation ----------------------------------------------------------------------------------------------


def told(events: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of Spark's own event log."""
    for file in events.rglob("events_*"):
        yield from map(json.loads, file.read_text().splitlines())


def attempts_of(events: Path) -> list[str]:
    """Lists what became of executors and attempts, to explain why there were too few."""
    lines = []
    for event in told(events):
        name = event["Event"].removeprefix("SparkListener")
        task = event.get("Task Info", {})
        which = f"stage {event.get('Stage ID')} task {task.get('Index')} attempt {task.get('Attempt')}"
        if name in ("ExecutorAdded", "ExecutorRemoved"):
            lines.append(f"{event['Timestamp']} {name} {event['Executor ID']} {event.get('Removed Reason', '')}")
        elif name == "TaskStart":
            lines.append(f"{task['Launch Time']} {which} on {task['Executor ID']}, speculative: {task['Speculative']}")
        elif name == "TaskEnd" and event["Task End Reason"]["Reason"] != "Success":
            lines.append(f"{task['Finish Time']} {which} ended: {str(event['Task End Reason'])[:300]}")
    return lines


@long
@pytest.mark.timeout(600)
def test_speculative_attempts_apply_once(tmp_path: Path) -> None:
    """Speculative attempts apply once.

    One attempt is slow within the operator, so that the second finds the first's batch under way at the replica;
    another has its outputs and is slow with them, so that the second finds the batch applied.
    """
    with LocalCluster(Laggard, sites=SITES, partitions=PARTITIONS) as local:
        speculate(local, tmp_path)


def speculate(local: LocalCluster, work: Path) -> None:
    (work / "input").mkdir()
    for number in range(4):
        rows = some_rows(number, 60)
        if number == 2:
            rows[30] |= {"v": LAGS, "pad": str(second(work, 1))}
        write_file(work / "input", number, rows)
    driver = Driver(spark_driver("speculate", local.address, work), work / "driver.log")
    driver.start()
    try:
        driver.check_ends(PATIENCE_S)
    finally:
        driver.end()
    alone = [number for number in range(2) if not second(work, number).exists()]
    assert not alone, "\n".join([f"lagging attempts were left alone: {alone}", *attempts_of(work / "events")])
    starts = [event["Task Info"] for event in told(work / "events") if event["Event"] == "SparkListenerTaskStart"]
    speculative = [start for start in starts if start["Speculative"]]
    assert len(speculative) >= 2, Counter(start["Speculative"] for start in starts)
    Expected(work / "input").check(local, "Laggard", work / "output")
