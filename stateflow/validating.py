"""Checks of invariants after each change, with the setting ``STATEFLOW_DEBUG_VALIDATE``.

Objects that decide have a ``validate()`` that checks what always holds of them: state machines, the partition registry,
an assignment, the controller's knowledge. Replicas and controllers call it by :func:`check` after each change.
"""

from __future__ import annotations

import logging
from typing import Protocol

from stateflow.errors import InvariantBroken

log = logging.getLogger(__name__)


class Validated(Protocol):
    def validate(self) -> None:
        """Checks the object's invariants. Raises InvariantBroken."""
        ...


def check(changed: Validated) -> None:
    """Checks a changed object. Raises InvariantBroken, and reports it, as the caller may keep the error to itself."""
    try:
        changed.validate()
    except InvariantBroken as error:
        report(error)
        raise


def report(error: InvariantBroken) -> None:
    log.critical("%s", error)
