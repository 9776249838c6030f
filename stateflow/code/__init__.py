"""Code of operators on its way from a program to the replicas that run it."""
