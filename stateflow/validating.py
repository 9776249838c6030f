"""Looking at what always holds, where it may have changed: with the setting ``STATEFLOW_DEBUG_VALIDATE``.

What decides has a ``validate()`` that says what always holds of it: state machines, the partition registry, an
assignment, what the controller knows. Replicas and controllers call it by :func:`check` after each change.
"""

from __future__ import annotations

import logging
from typing import Protocol

from stateflow.errors import InvariantBroken

log = logging.getLogger(__name__)


class Validated(Protocol):
    def validate(self) -> None:
        """Raises InvariantBroken."""
        ...


def check(changed: Validated) -> None:
    """Raises InvariantBroken, and reports it: whoever asked for the change may keep that to himself."""
    try:
        changed.validate()
    except InvariantBroken as error:
        report(error)
        raise


def report(error: InvariantBroken) -> None:
    log.critical("%s", error)
