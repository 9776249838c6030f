"""FLEET: one command starts replicas through two agents while rows stream.

The experiment measures the time until the new replicas serve, until a drained replica is empty, and until a replica
that joins later is used. All are real processes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.ballast import OPERATOR, ROWS, rows
from benchmarks.load import Load, Source, correctness_of, summary
from benchmarks.operators import Ballast
from benchmarks.record import Correctness, Record, Target
from stateflow.client import Cluster
from stateflow.errors import StateflowError
from stateflow.local.process import Process
from stateflow.testing import LocalCluster

SITE = "edge"
AGENTS = ("gw-a", "gw-b")
FIRST = f"{SITE}-0"
INTERVAL_S = 0.1
TIMEOUT_S = 120.0
JOINS_WITHIN_S = 10.0
PAUSE_MS = 1000.0


class Sites(LocalCluster):
    """A cluster that starts with one replica. Agents can be added, and their replicas get partitions automatically."""

    def _process(self, name: str, arguments: list[str]) -> Process:
        if name == "controller":
            arguments = [*arguments, "--auto-rebalance"]
        return super()._process(name, arguments)

    def agent(self, name: str) -> None:
        where = ["--site", SITE, "--name", name, "--controller", self.address, "--data-dir", str(self.data_dir / name)]
        agent = self._process(name, ["agent", *where, "--cores", "64"])
        agent.start()
        agent.wait_ready()

    def owners(self) -> dict[str, int]:
        """Returns replica → number of partitions that it owns, for replicas with partitions."""
        (operator,) = (each for each in self.cluster.status().operators if each.name == OPERATOR)
        return {name: operator.owners.count(name) for name in set(operator.owners)}

    def moves(self) -> bool:
        return any(each.state == "RUNNING" for each in self.cluster.reconfigurations(5))


def run(experiment: str, *, quick: bool, seed: int) -> Record:
    replicas = 6 if quick else 20
    figures: dict[str, Any] = {"replicas": replicas, "agents": len(AGENTS)}
    parts: list[Correctness] = []
    failures: list[str] = []
    try:
        parts.append(_run(replicas, seed, figures))
    except (StateflowError, TimeoutError) as error:
        failures.append(str(error))
    return Record(
        experiment=experiment,
        figures=figures,
        targets=[Target("a replica that joins is used, s", figures.get("joined_s"), JOINS_WITHIN_S, "at_most")],
        correctness=Correctness.of_all(parts),
        settings={"quick": quick, "rows_per_batch": ROWS, "batch_interval_s": INTERVAL_S, "max_pause_ms": PAUSE_MS},
        seed=seed,
        failures=failures,
    )


def _run(count: int, seed: int, figures: dict[str, Any]) -> Correctness:
    """Runs the experiment, and adds its measurements to ``figures``. Raises StateflowError, TimeoutError."""
    with (
        tempfile.TemporaryDirectory(prefix="stateflow-bench-") as folder,
        Sites(sites={SITE: 1}, data_dir=folder, checkpoint_interval_s=0) as local,
    ):
        cluster = local.cluster
        cluster.deploy(Ballast, partitions=4 * count)
        for name in AGENTS:
            local.agent(name)
        _until(lambda: len(cluster.agents()) == len(AGENTS), "the agents registered")
        source = Source(cluster.stream(OPERATOR, "s"), rows, INTERVAL_S)
        with Load([source], seed) as load:
            load.wait(1.0)
            began = time.monotonic()
            names = set(cluster.spawn(SITE, count=count).wait())
            _note(figures, "spawned_s", began)
            # each gets its share without a further command
            _until(lambda: names <= local.owners().keys(), "every new replica serves", load)
            _note(figures, "all_serve_s", began)
            _until(lambda: not local.moves(), "their partitions have moved", load)
            _note(figures, "even_s", began)
            figures["most_and_least"] = [max(local.owners().values()), min(local.owners().values())]
            began = time.monotonic()
            for moves in cluster.drain(FIRST, max_pause_ms=PAUSE_MS):
                moves.wait()
            _until(lambda: not local.moves(), "no move runs", load)
            if FIRST in local.owners():
                raise TimeoutError("the drained replica owns partitions")
            _note(figures, "emptied_s", began)
            (joined,) = cluster.spawn(SITE).wait()
            began = time.monotonic()
            _until(lambda: joined in local.owners(), f"{joined} is used", load)
            _note(figures, "joined_s", began)
            load.wait(1.0)
        figures["batches_ms"] = summary([1e3 * took for took in source.latencies.took_s])
        return correctness_of(load, Cluster(local.address), OPERATOR)


def _note(figures: dict[str, Any], name: str, began: float) -> None:
    figures[name] = round(time.monotonic() - began, 3)
    print(f"  {name} {figures[name]:.2f}", file=sys.stderr, flush=True)


def _until(holds: Callable[[], bool], what: str, load: Load | None = None) -> None:
    """Waits until ``holds()`` is true. Raises TimeoutError, and the error of a sender that failed."""
    until = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {TIMEOUT_S:g} s: {what}")
        if load is None:
            time.sleep(0.02)
        else:
            load.wait(0.02)
