"""Clusters on this machine. The program that uses one starts its processes, and they end with the program."""
