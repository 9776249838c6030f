"""Runtime of operators: the classes that users write, the hosts of partitions, the replica that owns partitions."""
