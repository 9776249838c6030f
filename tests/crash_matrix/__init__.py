"""Every step of a move, every participant, every fault, on real processes.

``steps``: derived from the protocol's instructions and RPCs. ``proxy``: watches the steps on the wire, and cuts
connections. ``matrix``: runs cells. ``python -m tests.crash_matrix`` runs all of them and writes docs/crash-matrix.md.
"""
