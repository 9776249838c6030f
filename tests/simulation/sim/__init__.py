"""Deterministic simulation of a whole cluster: the real shells and machines, on computers and a network made of a seed.

``loop``: virtual time, processes, threads. ``net``: what gRPC does, and what networks do to it. ``disk``: files that
forget. ``world``: a cluster, its workload, its faults and the oracle. ``run``: one seed.
"""
