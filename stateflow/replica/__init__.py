"""The server of a replica, with its gRPC handlers and the threads that do their work."""

import stateflow.rpc  # noqa: F401 - must run before grpc is imported, see stateflow.rpc
