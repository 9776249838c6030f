"""Number of partitions of an operator that is deployed without giving one; answers that lack what was asked for; names
that no savepoint can have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.client import Cluster
from stateflow.errors import InvalidArgument, OperatorNotDeployed, Unavailable
from stateflow.operator.operator import DEFAULT_PARTITIONS
from stateflow.types import OperatorSpec
from tests.unit.operators import Count


@pytest.mark.parametrize(
    ("has", "given", "deployed"),
    [(None, None, DEFAULT_PARTITIONS), (40, None, 40), (40, 40, 40), (40, 8, 8), (None, 3, 3)],
)
def test_one_that_is_deployed_keeps_its_own(has: int | None, given: int | None, deployed: int) -> None:
    """An operator that is redeployed without a number keeps its own; it used to be refused.

    A given number is sent as it is, for the controller to judge.
    """
    asked: list[OperatorSpec] = []

    def deployment(name: str) -> Any:
        assert name == "Named"
        if has is None:
            raise OperatorNotDeployed("there is none", remedy="-")
        return SimpleNamespace(spec=SimpleNamespace(partitions=has))

    def deploy(spec: OperatorSpec, sites: Iterable[str] | None, failover: str | None) -> None:
        asked.append(spec)

    cluster = Cluster("127.0.0.1:1")
    cluster._client = SimpleNamespace(deployment=deployment, deploy=deploy)  # type: ignore[assignment]
    cluster.deploy(Count, given, name="Named")
    assert [spec.partitions for spec in asked] == [deployed]


@pytest.mark.parametrize(
    ("ask", "lacks"),
    [
        (lambda cluster: cluster.upgrade("Op", 1), "version"),
        (lambda cluster: cluster.job("j"), "job"),
        (lambda cluster: cluster.run_job("j"), "run"),
    ],
    ids=["upgrade", "job", "run_job"],
)
def test_an_empty_answer_that_no_controller_gives_is_one_line(ask: Callable[[Cluster], Any], lacks: str) -> None:
    cluster = Cluster("127.0.0.1:1")
    empty: Any = SimpleNamespace(
        upgrade=lambda *_: None,
        versions=lambda _: [],
        jobs=lambda _: [],
        change_job=lambda *_: SimpleNamespace(runs=()),
    )
    cluster._client = empty
    with pytest.raises(Unavailable, match=f"invalid answer from the controller: it names no {lacks}: check what runs"):
        ask(cluster)


@pytest.mark.parametrize("name", [".", "kept/Op"])
def test_what_is_not_the_name_of_a_savepoint_is_refused_before_the_cluster_is_asked(name: str) -> None:
    cluster = Cluster("ctl:7070")
    cluster._client = None  # type: ignore[assignment]
    for use in (cluster.savepoint, lambda it: cluster.restore("Op", savepoint=it)):
        with pytest.raises(InvalidArgument, match="is not a valid savepoint name"):
            use(name)
