"""Client-side routing: sends each partition's rows to its owner, and follows partitions that move."""

from stateflow.router.router import Router, backoff
from stateflow.router.session import BatchSession, Delivery, Route, RoutingTable

__all__ = ["BatchSession", "Delivery", "Route", "Router", "RoutingTable", "backoff"]
