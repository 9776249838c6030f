"""gRPC: generated stubs, what is the same on both ends of the wire, and clients."""

import os

# Its handlers around fork() kill about one in fifty children of a process with calls under way, also those that only
# fork to start a program, as PySpark does for its JVM. Nothing here uses gRPC on both sides of a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
