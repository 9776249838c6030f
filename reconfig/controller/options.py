"""What a caller may ask of a reconfiguration."""

from __future__ import annotations

from reconfig import plan, policies
from reconfig.work import MoveOptions
from stateflow.errors import InvalidArgument


def checked_options(
    max_pause_ms: float | None = None,
    max_bandwidth: float | None = None,
    patience_s: float | None = None,
    strategy: str = "",
    order: str = "",
) -> MoveOptions:
    """None, and no word: it was not said. Raises InvalidArgument."""
    for name, value, unit in (
        ("max_pause_ms", max_pause_ms, "milliseconds"),
        ("max_bandwidth", max_bandwidth, "bytes a second"),
        ("patience_s", patience_s, "seconds"),
    ):
        if value is not None and not value > 0:
            raise InvalidArgument(
                f"{name} cannot be {'negative' if value < 0 else f'{value:g}'}",
                remedy=f"give a positive number of {unit}, or leave it out for no limit",
            )
    policies.strategy_named(strategy)
    return MoveOptions(
        max_pause_ms or 0.0, max_bandwidth or 0.0, patience_s or 0.0, strategy or "auto", _order(order or "number")
    )


def _order(named: str) -> plan.Order:
    if named not in plan.ORDERS:
        raise InvalidArgument(f"there is no order {named!r}", remedy=f"use {', '.join(plan.ORDERS)}")
    return named
