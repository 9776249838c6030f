"""gRPC: generated stubs, and the shells that speak them. Nothing else touches the stubs but the controller's server."""

import os

# Its handlers around fork() kill about one in fifty children of a process with calls under way, also those that only
# fork to start a program, as PySpark does for its JVM. Nothing here uses gRPC on both sides of a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
