"""Tools for trying operators and clusters: a harness in one process, and a cluster of real processes on this
machine."""

from stateflow.local.cluster import LocalCluster
from stateflow.testing.harness import OperatorHarness

__all__ = ["LocalCluster", "OperatorHarness"]
