"""Trying operators and clusters: a harness in one process, and a cluster of real processes on this machine."""

from stateflow.testing.harness import OperatorHarness
from stateflow.testing.local_cluster import LocalCluster

__all__ = ["LocalCluster", "OperatorHarness"]
