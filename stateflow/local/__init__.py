"""Clusters whose processes run on this machine, started by the program that uses them, and ending with it."""
