"""Reconfiguration: deciding and driving moves of partitions between replicas."""
