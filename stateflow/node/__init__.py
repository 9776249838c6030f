"""A node: several replicas of one machine, run as one."""
