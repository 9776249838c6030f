"""An operator whose replicas send seals with a wrong digest while a file exists.

The fault is a source's; it is injected where the operator's code is loaded.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from stateflow.partition.change_feed import ChangeLog, Seal
from tests.integration.operators import Tally

LIES = "STATEFLOW_TEST_LIES"


class Lying(Tally):
    pass


_end = ChangeLog.end


def _lie(self: ChangeLog, seal: Seal) -> None:
    lies = Path(os.environ.get(LIES, "/nonexistent")).exists()
    _end(self, dataclasses.replace(seal, digest="0" * len(seal.digest)) if lies else seal)


ChangeLog.end = _lie  # type: ignore[method-assign]
