"""Metrics of processes, for monitoring.

- ``figures`` contains the metrics of stateflow by name. A process computes them on request from its existing state.
- ``limits`` counts how often a process reached its limits. Nothing else is counted only for metrics.
- ``own`` contains the metrics that operators declare, which are counted when batches commit.
- ``page`` serves all metrics in the formats that Prometheus reads.
"""
