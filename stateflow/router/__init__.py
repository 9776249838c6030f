"""Client-side routing: sends each partition's rows to its owner, and follows partitions that move."""

from stateflow.router.asking import Asked
from stateflow.router.reached import Reached, check_whole, newest_event_us
from stateflow.router.router import Router, backoff
from stateflow.router.session import BatchSession, Delivery, Route, RoutingTable

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
