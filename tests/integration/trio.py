"""Three controllers of one ledger. Every process may have a clock of its own, which may jump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateflow import Operator
from stateflow.ledger import Ledger
from stateflow.testing import LocalCluster

CLOCKS = Path(__file__).parent / "clocks"
HOURS_APART_S = {"controller": 0, "controller-1": 3600, "controller-2": -3600, "cloud-0": -5400, "edge-0": 5400}


class Trio(LocalCluster):
    """A local cluster with three controllers.

    Args:
        off_s: offset of the clock of each process, by name, in seconds.
    """

    def __init__(self, *operators: type[Operator], off_s: Mapping[str, int], **said: Any) -> None:
        super().__init__(*operators, controllers=3, **said)
        self._off_s = off_s

    def _within(self, name: str) -> Sequence[str]:
        self.set_clock(name, self._off_s.get(name, 0))
        return ["env", f"STATEFLOW_TEST_CLOCK={self._clock_of(name)}"]

    def _clock_of(self, name: str) -> Path:
        return self.data_dir / f"{name}.clock"

    def set_clock(self, name: str, off_s: int) -> None:
        """Lets the clock of a process jump to an offset from the true time, in seconds."""
        made = self._clock_of(name).with_suffix(".new")
        made.write_text(str(off_s))
        made.replace(self._clock_of(name))  # a reader sees the old offset or the new one

    def leader(self) -> str:
        with Ledger(self.ledger) as ledger:
            address = ledger.hold().holder.address
        return next(name for name in self.controllers if self.processes[name].address == address)
