"""Client-side routing: sends each partition's rows to its owner, and follows partitions that move."""

from stateflow.router.router import Asked, Router, backoff
from stateflow.router.session import BatchSession, Delivery, Reached, Route, RoutingTable, check_whole, newest_event_us

__all__ = [
    "Asked",
    "BatchSession",
    "Delivery",
    "Reached",
    "Route",
    "Router",
    "RoutingTable",
    "backoff",
    "check_whole",
    "newest_event_us",
]
