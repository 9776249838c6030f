"""Operators at work: what users write, the partition that hosts it, the replica that owns partitions."""
