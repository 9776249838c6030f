"""Partitions of operators on a replica: the lifecycle, batches, copies and checkpoints of each, and the registry of
all."""
