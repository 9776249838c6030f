"""A cluster's state whose steps are written and folded at once, as tests have no event loop of a controller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Concatenate, ParamSpec

from reconfig.controller import steps
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import Writer
from reconfig.controller.steps import Step
from stateflow.ledger import Ledger, Record
from stateflow.types import OperatorSpec

P = ParamSpec("P")


class Written(ClusterState):
    """A cluster's state with the ledger that it is folded from."""

    def __init__(self, ledger: Ledger, validated: bool = False) -> None:
        super().__init__(ledger.clock.now_us, validated=validated)
        self.ledger = ledger

    @classmethod
    def read(cls, ledger: Ledger, validated: bool = False) -> Written:
        cluster = cls(ledger, validated)
        for record in ledger.records(archived=True):
            cluster.fold(record)
        return cluster


def write(
    cluster: Written,
    decide: Callable[Concatenate[ClusterState, P], Step],
    *arguments: P.args,
    **named: P.kwargs,
) -> list[Record]:
    """Takes a step, e.g. ``write(cluster, steps.grant, move)``, and returns its records."""
    records = Writer(cluster.ledger, cluster).append(decide(cluster, *arguments, **named))
    for record in records:
        cluster.fold(record)
    return records


def deploy(cluster: Written, spec: OperatorSpec, owners: Mapping[int, str], sites: Collection[str] = ()) -> None:
    """Deploys an operator, whose partitions count as created."""
    *_, planned = write(cluster, steps.plan_deployment, spec, owners, sites)
    write(cluster, steps.finish_deployment, planned)
