"""Converts a number to another type of number: exactly, or not at all."""

from __future__ import annotations

import math
from decimal import Decimal
from numbers import Real
from typing import Any

from stateflow.errors import EncodeError
from stateflow.types import shown


def is_numpy_bool(value: object) -> bool:
    """Returns whether a value is numpy's bool, which is no bool of Python's, without importing numpy."""
    cls = value.__class__
    return cls.__module__ == "numpy" and cls.__name__ in ("bool", "bool_")


def is_timedelta(value: object) -> bool:
    """Returns whether a value is numpy's timedelta64, which numpy takes for an integer."""
    return value.__class__.__module__ == "numpy" and value.__class__.__name__ == "timedelta64"


def exact_float(value: Any) -> float:
    """Returns the float that equals a real number; NaN stays NaN.

    Raises TypeError for a value that is no real number (a bool is none), EncodeError for a number that no float holds.
    """
    if value.__class__ is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real) or is_timedelta(value):
        raise TypeError(f"a {type(value).__name__} is not a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.nan
    if found == value or value != value:  # noqa: PLR0124 - NaN
        return found
    raise EncodeError(
        f"no float equals {shown(value)}",
        remedy="declare int or decimal.Decimal, or round the number before storing it",
    )


def exact_decimal(value: Any) -> Decimal:
    """Returns a Decimal as it is and an int as a Decimal. Raises TypeError for anything else."""
    if isinstance(value, Decimal):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(int(value))
    raise TypeError(f"a {type(value).__name__} is neither int nor Decimal")
