"""Deterministic simulation of a whole cluster: real shells and machines, on computers and a network made from a seed.

``loop``: virtual time, processes, threads. ``net``: gRPC, and what networks do to it. ``disk``: files that lose what
was not synced. ``world``: a cluster, its workload, its faults and the oracle. ``run``: one seed.
"""
