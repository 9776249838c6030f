"""A replica's server: its gRPC handlers, and the workers they hand the work to."""

import stateflow.rpc  # noqa: F401 - before anything imports grpc, see there
