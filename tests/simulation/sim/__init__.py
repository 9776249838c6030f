"""Deterministic simulation of a whole cluster: the product's real code runs on simulated computers and networks.

Everything that happens depends on one seed. ``loop`` simulates time, processes and threads. ``net`` simulates gRPC and
network faults. ``disk`` simulates files that lose data that is not synced. ``world`` holds a cluster and its oracle,
``workload`` has its clients, and ``run`` runs one seed.
"""
