"""A replica's server: its gRPC handlers, and the threads that do their work."""

import stateflow.rpc  # noqa: F401 - before anything imports grpc, see there
