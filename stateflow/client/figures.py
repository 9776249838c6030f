"""What this program sent to its operators, for a registry of the Prometheus client that it serves or pushes itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.registry import Collector

from stateflow.metrics.page import families
from stateflow.router.figures import SENT


class ClientFigures(Collector):
    """``prometheus_client.REGISTRY.register(ClientFigures())``: the figures ``stateflow_client_…`` of every client of
    this process, and of the operators' tasks, where it is one of Spark's Python workers."""

    def collect(self) -> Iterator[Any]:
        yield from families(SENT.figures())

    def describe(self) -> list[Any]:
        """Nothing is asked for when it is registered."""
        return []
