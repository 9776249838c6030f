"""Clusters whose processes run on this machine, which the program that uses them starts, and which end with it."""
