"""Options of moves, for Python callers, the command line and the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from stateflow.errors import InvalidArgument


class StrategyName(StrEnum):
    STOP_AND_RESTART = "stop-and-restart"
    PAUSE_AND_COPY = "pause-and-copy"
    FLUID = "fluid"
    BATCHED = "batched"
    ON_DEMAND = "on-demand"
    WARM_UP = "warm-up"


#: the strategy is chosen from measurements
AUTO = "auto"
STRATEGIES = (AUTO, *StrategyName)
Order = Literal["hot-first", "hot-last", "number"]
ORDERS: tuple[Order, ...] = get_args(Order)
_UNITS = {"max_pause_ms": "milliseconds", "max_bandwidth": "bytes per second", "patience_s": "seconds"}


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """The options of a move of partitions.

    Args:
        max_pause_ms: a partition is cut over only when its predicted pause is within this budget; None: no budget.
        max_bandwidth: limit in bytes a second of all base copies together, of every operator that is moved; None: no
            limit. Changes written meanwhile are not limited, because the copy might never catch up; copies for standbys
            are not limited either.
        patience_s: a budget out of reach for this long is refused with BudgetUnreachable; None: the controller's
            setting.
        strategy: one of ``STRATEGIES``, see docs/moving-state.md; ``auto`` chooses from measurements.
        order: ``number``, ``hot-first`` or ``hot-last``, by batches a second.
        limit, per_node, per_link: maximum number of concurrent moves: altogether, with one node as source or target,
            between the same two sites; None: only the controller's limit.

    Raises InvalidArgument.

    >>> MoveOptions(max_pause_ms=50.0, limit=4).strategy
    'auto'
    """

    max_pause_ms: float | None = None
    max_bandwidth: float | None = None
    patience_s: float | None = None
    strategy: str = AUTO
    order: Order = "number"
    limit: int | None = None
    per_node: int | None = None
    per_link: int | None = None

    def __post_init__(self) -> None:
        for name, unit in _UNITS.items():
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise InvalidArgument(
                    f"{name} cannot be {value!r}",
                    remedy=f"pass a positive number of {unit}, or omit it for no limit",
                )
        for name in ("limit", "per_node", "per_link"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and 0 < value < 1 << 31):
                raise InvalidArgument(f"{name} cannot be {value!r}", remedy="pass an integer of 1 or more, or omit it")
        if self.strategy not in STRATEGIES:
            raise InvalidArgument(f"there is no strategy {self.strategy!r}", remedy=f"use {', '.join(STRATEGIES)}")
        if self.order not in ORDERS:
            raise InvalidArgument(f"there is no order {self.order!r}", remedy=f"use {', '.join(ORDERS)}")


#: no limits, and defaults otherwise
DEFAULT = MoveOptions()


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
