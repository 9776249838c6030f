"""The JSON object that a benchmark prints, which also has facts about the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stateflow import __version__

REPOSITORY = Path(__file__).resolve().parent.parent
#: seconds that an experiment of quick size may take on two quiet cores
QUICK_S = 120.0
_PACKAGES = ("pyspark", "pyarrow", "pandas", "numpy", "grpcio", "rocksdict", "SQLAlchemy", "bytewax")


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a figure. ``value`` is the figure; None: it could not be measured, so the target is not met."""

    name: str
    value: float | None
    target: float
    bound: Literal["at_least", "at_most"] = "at_least"

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.target if self.bound == "at_least" else self.value <= self.target

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "target": self.target,
            "bound": self.bound,
            "met": self.met,
        }


@dataclass(frozen=True, slots=True)
class Correctness:
    """The correctness of a benchmark's results, over all its runs. A finding is None if it was not measured.

    Attributes:
        lost: number of the reference's output rows that are missing.
        duplicated: number of output rows beyond those of the reference.
        late: number of rows that were dropped because they were late.
        state_equal: every cell of the final state is equal to the reference.
        inapplicable: names of the findings that cannot be had, e.g. because a contestant's state cannot be read. They
            are None, and count neither for nor against the results.
    """

    lost: int | None
    duplicated: int | None
    late: int | None
    state_equal: bool | None
    inapplicable: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        return is_sound(self.to_json())

    @staticmethod
    def of_all(parts: Sequence[Correctness]) -> Correctness:
        """Returns the sum of several results, without their inapplicable findings.

        A total is None if it is None in any of them, and inapplicable if it is in all of them.
        """
        applicable: dict[str, list[Any]] = {
            name: [getattr(part, name) for part in parts if name not in part.inapplicable] for name in _RIGHT
        }

        def total(counts: Sequence[int | None]) -> int | None:
            known = [count for count in counts if count is not None]
            return sum(known) if counts and len(known) == len(counts) else None

        states = applicable["state_equal"]
        equal = False if False in states else (None if None in states or not states else True)
        return Correctness(
            lost=total(applicable["lost"]),
            duplicated=total(applicable["duplicated"]),
            late=total(applicable["late"]),
            state_equal=equal,
            inapplicable=tuple(name for name, found in applicable.items() if parts and not found),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _RIGHT},
            **({"inapplicable": list(self.inapplicable)} if self.inapplicable else {}),
        }


#: finding of a Correctness → its right value
_RIGHT = {"lost": 0, "duplicated": 0, "late": 0, "state_equal": True}
#: no finding was measured
UNKNOWN = Correctness(None, None, None, None)


def is_sound(correctness: Mapping[str, Any]) -> bool:
    """True if every finding of a Correctness, as JSON, was measured and is right, or is inapplicable."""
    inapplicable = correctness.get("inapplicable", ())
    return all(correctness[name] == right for name, right in _RIGHT.items() if name not in inapplicable)


@dataclass(frozen=True, slots=True)
class Record:
    """The result of one experiment.

    Attributes:
        failures: a line for each measurement that failed, with the reason.
        skipped: why this machine cannot run the experiment or a part of it, which is no failure; empty: nothing was
            skipped.
        took_s: duration of the experiment in seconds; None: not measured.
        slowness: factor by which the machine was slower than a quiet one, see :func:`tests.gate.slowness`; None: not
            measured.
    """

    experiment: str
    figures: Mapping[str, Any]
    targets: Sequence[Target]
    correctness: Correctness
    settings: Mapping[str, Any]
    seed: int
    failures: Sequence[str] = field(default_factory=list)
    skipped: str = ""
    took_s: float | None = None
    slowness: float | None = None

    @property
    def overran(self) -> bool:
        """True if this is a quick experiment that took longer than ``QUICK_S`` times the slowness."""
        if self.took_s is None or self.slowness is None:
            return False
        return bool(self.settings.get("quick")) and self.took_s > QUICK_S * self.slowness

    @property
    def complete(self) -> bool:
        nothing_ran = bool(self.skipped) and self.correctness == UNKNOWN
        return not self.failures and (nothing_ran or self.correctness.sound)

    def to_json(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "figures": dict(self.figures),
            "targets": [target.to_json() for target in self.targets],
            "correctness": self.correctness.to_json(),
            "failures": list(self.failures),
            **({"skipped": self.skipped} if self.skipped else {}),
            "settings": dict(self.settings) | machine(),
            "versions": versions(),
            "commit": commit(),
            "seed": self.seed,
            **self._timing(),
        }

    def _timing(self) -> dict[str, Any]:
        measured = {"took_s": self.took_s, "slowness": self.slowness}
        said = {name: round(value, 1) for name, value in measured.items() if value is not None}
        return {**said, "overran": self.overran} if len(said) == len(measured) else said


def failed(experiment: str, reason: str, *, quick: bool, seed: int) -> Record:
    """Returns the record of an experiment that ended without one."""
    return Record(experiment, {}, [], UNKNOWN, {"quick": quick}, seed, failures=[reason])


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Returns the median, minimum and maximum of values, and the values; without values, the three are None."""
    if not values:
        return {"median": None, "min": None, "max": None, "values": []}
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def machine() -> dict[str, Any]:
    """Returns facts about the machine on which figures depend: processors, memory, and load at the end of the run."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
        "load_1min_at_end": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform(), "stateflow": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """Returns the hash of the current commit, followed by ``+changes`` if files differ from it; "unknown" without
    git."""
    head = _git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    return head + ("+changes" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
