"""What a caller may ask of a reconfiguration."""

from __future__ import annotations

from reconfig import plan, policies
from reconfig.work import MoveOptions
from stateflow.errors import InvalidArgument
from stateflow.rpc import controller_pb2 as cpb


def options_of(message: cpb.MoveOptions) -> MoveOptions:
    """Raises InvalidArgument."""
    for name, unit in (
        ("max_pause_ms", "milliseconds"),
        ("max_bandwidth", "bytes a second"),
        ("patience_s", "seconds"),
    ):
        if message.HasField(name) and not getattr(message, name) > 0:
            value = getattr(message, name)
            raise InvalidArgument(
                f"{name} cannot be {'negative' if value < 0 else f'{value:g}'}",
                remedy=f"give a positive number of {unit}, or leave it out for no limit",
            )
    order = message.order or "number"
    if order not in plan.ORDERS:
        raise InvalidArgument(f"there is no order {order!r}", remedy=f"use {', '.join(plan.ORDERS)}")
    policies.strategy_named(message.strategy)
    return MoveOptions(
        message.max_pause_ms, message.max_bandwidth, message.patience_s, message.strategy or "auto", order
    )
