"""Metrics of the rows that this program sent to its operators, for a Prometheus registry that the program serves or
pushes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.registry import Collector

from stateflow.metrics.page import families
from stateflow.router.router import SENT


class ClientFigures(Collector):
    """Collector for a Prometheus registry: ``prometheus_client.REGISTRY.register(ClientFigures())``.

    It yields the metrics ``stateflow_client_…`` of every client of this process, and of the operators' tasks if the
    process is one of Spark's Python workers.
    """

    def collect(self) -> Iterator[Any]:
        yield from families(SENT.figures())

    def describe(self) -> list[Any]:
        """Returns no descriptions; without this method, registering would collect all metrics once."""
        return []
