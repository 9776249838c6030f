"""Operators as users write them, and the instance that calls one on the rows of a partition."""
