"""gRPC: generated stubs, and the shells that speak them. Nothing else touches the stubs but the controller's server."""
