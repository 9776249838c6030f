"""Every step of a move, every participant, every fault, on real processes.

``steps``: derived from the protocol's instructions and RPCs. ``proxy``: sees the steps go by, and cuts. ``matrix``:
runs cells. ``python -m tests.crash_matrix`` runs all of them and writes docs/crash-matrix.md.
"""
