"""Refusals: calls of callers whose identity does not allow them. They are counted, and logged once a minute per caller.

An intruder with a certificate may try the RPCs of a process, its page of metrics and the sign-in of a dashboard. Each
refused attempt is counted here.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

from stateflow.clock import SYSTEM_CLOCK, Clock, Throttle
from stateflow.errors import StateflowError
from stateflow.security.roles import Identity

log = logging.getLogger(__name__)
#: seconds between two log lines about one caller
SAY_EVERY_S = 60.0
#: role of callers that did not show a valid identity
UNKNOWN = "unknown"


class Refusals:
    """Counts refused calls, and logs the first one of each caller in a minute. Thread-safe."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._total = 0
        self._lines = Throttle(clock, SAY_EVERY_S)

    def note(self, call: str, error: StateflowError, host: str = "") -> None:
        """Counts one refused call.

        Args:
            call: name of the call. It becomes a label of a metric, so there must be few different names.
            error: the refusal. Its ``who`` is the identity of the caller; without one, the host stands for the caller.
            host: the caller's host; empty: not known.
        """
        who = error.where.get("who")
        whose = str(who) if isinstance(who, Identity) else host
        with self._lock:
            self._counts[call, who.role.value if isinstance(who, Identity) else UNKNOWN] += 1
            self._total += 1
            count = self._total
            if not self._lines.passes(whose):
                return
        at = f" at {host}" if host and whose != host else ""
        log.warning("refused a call of %s%s: %s; calls refused so far: %d", whose, at, error, count)

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Returns the number of refused calls since the start, by call and role."""
        with self._lock:
            return dict(self._counts)


#: the refusals of this process, which its servers and pages share
REFUSALS = Refusals()
