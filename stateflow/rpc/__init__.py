"""gRPC: generated stubs, code shared by both ends of the wire, and clients."""

import os

# gRPC's handlers around fork() kill about one in fifty children of a process with calls under way, including children
# that only start a program, as PySpark does for its JVM. Nothing here uses gRPC on both sides of a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
