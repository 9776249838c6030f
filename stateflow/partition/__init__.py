"""Partitions of operators on a replica: their lifecycle, batches, copies and checkpoints, and their registry."""
