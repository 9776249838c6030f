"""Texts of operator failures: bounded in length for any exception, even where the exception's own ``str`` fails."""

from __future__ import annotations

import reprlib
import threading
from typing import Any

from stateflow.errors import OperatorFailed, OperatorStuck
from stateflow.runtime.watchdog import Interrupted, frames_of

TEXT_MAX = 1_000
FRAMES_SHOWN = 6
MEND = "fix the operator or the row, or raise STATEFLOW_REPLICA_BATCH_TIMEOUT_S"
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 500


def is_ours(error: BaseException) -> bool:
    """Tells whether the operator raised the error. Ctrl-C, which arrives in the main thread only, does not count."""
    return not (isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread())


def failure(method: str, error: BaseException, remedy: str, **where: Any) -> OperatorFailed:
    """Makes the error to report for an exception from an operator's method; OperatorStuck for Interrupted.

    Args:
        method: name of the method as it is called, ``process()``.
        where: operator, partition and further places; objects are shown by their ``repr``.
    """
    place = {name: value if name in ("operator", "partition") else shown(value) for name, value in where.items()}
    if isinstance(error, Interrupted):
        return OperatorStuck(
            f"{method} did not return in time and was interrupted",
            remedy=f"{MEND}; the batch was not applied",
            traceback=trace_of(error),
            **place,
        )
    return OperatorFailed(
        f"{method} raised {type(error).__name__}: {text_of(error)}", remedy=remedy, traceback=trace_of(error), **place
    )


def text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Interrupted:
        raise
    except BaseException as worse:  # noqa: BLE001 - its own ``str`` fails
        return f"(its message cannot be read: {type(worse).__name__})"
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}… ({len(text)} characters)"


def shown(value: Any) -> str | None:
    """Returns a value's ``repr``, bounded in length, or a note that it fails. None stays None."""
    if value is None:
        return None
    try:
        return _REPR.repr(value)
    except Interrupted:
        raise
    except BaseException as worse:  # noqa: BLE001 - as above
        return f"(cannot be shown: {type(worse).__name__})"


def trace_of(error: BaseException) -> str:
    """Formats the operator's frames, innermost last, and the error."""
    return "\n" + frames_of(error, FRAMES_SHOWN)[: 4 * TEXT_MAX] + f"{type(error).__name__}: {text_of(error)}"
