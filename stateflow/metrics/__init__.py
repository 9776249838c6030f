"""Metrics of processes, for monitoring.

- ``figures`` declares the metrics of stateflow. A process computes their values on request from its existing state.
- ``limits`` counts how often a process reached its limits. Nothing else is counted only for metrics.
- ``own`` contains the metrics that operators declare, which are counted when batches commit.
- ``page`` serves all metrics in the formats that Prometheus reads.
"""
