"""The base classes of users' operators, and the instance that calls an operator with the rows of a partition."""
