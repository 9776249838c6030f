"""Clusters on this machine. A program that uses such a cluster starts the processes, and they end with the program."""
