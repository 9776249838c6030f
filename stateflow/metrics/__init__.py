"""Metrics of processes, for monitoring.

``figures``: the metrics of stateflow, by name. A process computes its metrics on request, from its existing state;
nothing is counted just for them. ``own``: metrics that operators declare, counted when their batches commit. ``page``:
serves all metrics in the formats that Prometheus reads.
"""
