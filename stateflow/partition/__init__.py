"""Partitions of operators on a replica: one's lifecycle, batches, copies and checkpoints, and the registry of all."""
