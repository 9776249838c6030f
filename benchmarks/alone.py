"""ALONE: a site that is cut off from the controller and from the other sites serves its rows under load, and rejoins.

The site's operator has manual failover. A second operator has automatic failover, so its standbys at another site take
over during the cut.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ballast import OPERATOR, ROWS, rows
from benchmarks.load import Load, Source, correctness_of, summary
from benchmarks.operators import Ballast
from benchmarks.record import Correctness, Record, Target
from stateflow.client import OperatorStatus
from stateflow.errors import StateflowError
from stateflow.settings import ControllerSettings
from stateflow.testing import LocalCluster
from tests.crash_matrix.proxy import Proxy

EDGE, OTHER = "edge-0", "Automatic"
PARTITIONS = 16
INTERVAL_S = 0.5  # no shorter: the proxies of the links inspect every piece of data
BESIDE_S = 5.0
TIMEOUT_S = 60.0


class Sites(LocalCluster):
    """A cluster of two sites, cloud and edge, between which the links can be cut.

    :meth:`cut` cuts the link from the edge to the controller, and the links from the controller and the cloud to the
    edge. The load is at the edge.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(sites={"cloud": 1, "edge": 1}, data_dir=folder, checkpoint_interval_s=0)
        self._to_controller = Proxy(lambda: self.processes["controller"].address)
        self._to_edge = Proxy(lambda: self.processes[EDGE].address)

    def _replica_arguments(self, name: str) -> list[str]:
        arguments = super()._replica_arguments(name)
        if name != EDGE:
            return arguments
        arguments[arguments.index(self.address)] = self._to_controller.address
        return [*arguments, "--advertise", self._to_edge.address]

    def stop(self) -> None:
        self.heal()
        super().stop()
        self._to_controller.close()
        self._to_edge.close()

    def cut(self) -> None:
        self._to_controller.hold()
        self._to_edge.hold(frozenset({self.processes["controller"].pid, self.processes["cloud-0"].pid}))

    def heal(self) -> None:
        self._to_controller.heal()
        self._to_edge.heal()

    def told(self, operator: str) -> OperatorStatus:
        return next(each for each in self.cluster.status().operators if each.name == operator)

    def until(self, load: Load, what: str, holds: Any) -> float:
        """Waits until ``holds()`` is true. Returns the duration of the wait in seconds.

        Raises TimeoutError, and the error of a sender that failed.

        Args:
            what: the expected event, for the error.
        """
        began = time.monotonic()
        while not holds():
            if time.monotonic() > began + TIMEOUT_S:
                raise TimeoutError(f"not within {TIMEOUT_S:g} s: {what}")
            load.wait(0.05)
        return round(time.monotonic() - began, 2)


def run(experiment: str, *, quick: bool, seed: int) -> Record:
    cut_s = 30.0 if quick else 600.0
    figures: dict[str, Any] = {"cut_off_s": cut_s}
    failures: list[str] = []
    parts: list[Correctness] = []
    try:
        parts.append(_run(cut_s, seed, figures))
    except (StateflowError, TimeoutError) as error:
        failures.append(str(error))
    return Record(
        experiment=experiment,
        figures=figures,
        targets=[
            Target("owners and epochs that changed", figures.get("changed"), 0, "at_most"),
            Target("batches while it was cut off", figures.get("batches"), cut_s / INTERVAL_S / 2, "at_least"),
        ],
        correctness=Correctness.of_all(parts),
        settings={"quick": quick, "rows_per_batch": ROWS, "batch_interval_s": INTERVAL_S, "partitions": PARTITIONS},
        seed=seed,
        failures=failures,
    )


def _run(cut_s: float, seed: int, figures: dict[str, Any]) -> Correctness:
    """Runs the experiment on one cluster, and adds its measurements to ``figures``. Raises StateflowError,
    TimeoutError."""
    with tempfile.TemporaryDirectory(prefix="stateflow-bench-") as folder, Sites(Path(folder)) as local:
        cluster = local.cluster
        cluster.deploy(Ballast, PARTITIONS, failover="manual")
        cluster.deploy(Ballast, PARTITIONS, name=OTHER)
        cluster.standby(OTHER, 1)
        source = Source(cluster.stream(OPERATOR, "s"), rows, INTERVAL_S)
        with Load([source], seed) as load:
            load.wait(BESIDE_S)
            before = local.told(OPERATOR)
            if EDGE not in before.owners:
                raise TimeoutError("the edge owns no partition")
            local.cut()
            at_s = time.monotonic()
            load.wait(cut_s)
            now = local.told(OPERATOR)
            figures["failed_over_beside"] = EDGE not in local.told(OTHER).owners
            took = source.latencies.between(at_s, time.monotonic())
            figures |= {"batches": len(took), "batch_ms": summary(took), "lease_s": ControllerSettings().lease_s}
            if not figures["failed_over_beside"]:
                raise TimeoutError(f"nothing took over beside the edge within {cut_s:g} s: the edge was not cut off")
            print(f"  {len(took)} batches within {cut_s:g} s without a controller", file=sys.stderr, flush=True)
            local.heal()
            figures["heard_again_s"] = local.until(
                load, "the edge is heard again", lambda: not local.told(OPERATOR).unserved
            )
            load.wait(BESIDE_S)
            after = local.told(OPERATOR)
            figures["changed"] = sum(
                was != is_
                for then in (now, after)
                for was, is_ in zip((*before.owners, *before.epochs), (*then.owners, *then.epochs), strict=True)
            )
        return correctness_of(load, cluster, OPERATOR)
