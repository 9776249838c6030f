"""Computes due times of jobs, estimates of remaining work, and random pauses that keep processes out of step. The
functions do no I/O.

Times are microseconds since 1970-01-01 UTC.

A job that was due several times while no controller could begin it, or while it still ran, runs once, for the last of
these times, because one run does all the due work. The library cronsim interprets cron lines. It follows Debian's cron,
also on days with 23 or 25 hours.

The pace of work whose parts end one after another gives an estimate of the time that the remaining parts need.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random  # noqa: TID251 - the type; which one is handed in
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from stateflow.errors import InvalidArgument
from stateflow.types import shown

Z = 1.959964  # quantile of a normal variable, two-sided 95 %
#: smallest number of finished parts for which the remaining work is estimated
FINISHED_MIN = 2
#: shortest interval of a job, in seconds; controllers look for due jobs every half second
EVERY_MIN_S = 0.1
#: seconds: a hundred years
EVERY_MAX_S = 3_155_760_000
#: largest random change of a pause before a retry, or of the interval of heartbeats, as a fraction
JITTER = 0.25
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_REMEDY = "write once 2030-01-01T18:00:00Z, every 20s (15m, 2h, 7d), or cron 0 18 * * 1-5 Europe/Berlin"


# -- Pauses ----------------------------------------------------------------------------------------------------------


def jittered(seconds: float, random: Random) -> float:
    """Returns a random duration around ``seconds``, shorter or longer by at most the fraction ``JITTER``.

    So processes that failed at the same moment, such as all clients of one replica, do not try again at the same
    moment.
    """
    return seconds * random.uniform(1 - JITTER, 1 + JITTER)


# -- Remaining work --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remaining:
    """Seconds of work until all parts have ended: ``s`` is expected, ``low_s`` to ``high_s`` has 95 % confidence."""

    s: float
    low_s: float
    high_s: float


def pace_per_s(finished: int, worked_s: float) -> float | None:
    """Returns finished parts per second of work; None before the first part has ended."""
    return finished / worked_s if finished and worked_s > 0 else None


def remaining(total: int, finished: int, worked_s: float) -> Remaining | None:
    """Estimates the time of the remaining work; None before two parts have ended.

    The estimate assumes that parts end at random, at a constant rate.
    The time in which k parts end is gamma distributed. So the quotient of the time for the remaining parts and the time
    for the finished parts has an F distribution with 2 (total - finished) and 2 finished degrees of freedom (Casella
    and Berger, Statistical Inference, 5.3).
    """
    pace, left = pace_per_s(finished, worked_s), total - finished
    if pace is None or finished < FINISHED_MIN:
        return None
    if left <= 0:
        return Remaining(0.0, 0.0, 0.0)
    expected = left / pace
    return Remaining(expected, *(expected * _f_quantile(z, 2 * left, 2 * finished) for z in (-Z, Z)))


def _f_quantile(z: float, first: int, second: int) -> float:
    """Returns the quantile of the F distribution at the probability at which a normal variable has the quantile ``z``.

    ``first`` and ``second`` are the degrees of freedom. The approximation is that of Paulson, "An approximate
    normalization of the analysis of variance distribution", 1942.
    """
    a, b = 2 / (9 * first), 2 / (9 * second)
    below = (1 - b) ** 2 - z * z * b
    spread = z * math.sqrt(max(0.0, a * (1 - b) ** 2 + b * (1 - a) ** 2 - z * z * a * b))
    return max(0.0, ((1 - a) * (1 - b) + spread) / below) ** 3


# -- Due times of jobs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of a job.

    Its text is ``once <ISO time with zone>``, ``every <length>``, which counts from the end of the previous run, or
    ``cron <five fields> [zone]``, in UTC if no zone is named. Of ``once_us``, ``every_us`` and ``cron`` exactly one is
    not None.
    """

    text: str
    once_us: int | None = None
    every_us: int | None = None
    cron: str | None = None
    zone: str = "UTC"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parses a schedule. Raises InvalidArgument."""
        words = [_in_seconds(word) for word in text.split()]
        try:
            match words:
                case ["once", at] if (moment := datetime.fromisoformat(at)).tzinfo is not None:
                    return cls(text, once_us=_us(moment))
                case ["every", seconds] if EVERY_MIN_S <= float(seconds) <= EVERY_MAX_S:
                    return cls(text, every_us=round(float(seconds) * 1e6))
                case ["cron", *fields] if len(fields) in (5, 6):
                    zone = fields[5] if len(fields) == 6 else "UTC"
                    cron = " ".join(fields[:5])
                    next(CronSim(cron, datetime.now(ZoneInfo(zone))))  # StopIteration: no such day within 50 years
                    return cls(text, cron=cron, zone=zone)
        except (ValueError, OSError, KeyError, CronSimError, StopIteration):  # some are raised by ZoneInfo
            pass
        raise InvalidArgument(f"{shown(text)} is not a schedule", remedy=_REMEDY)

    @property
    def in_seconds(self) -> str:
        """The schedule's text with an interval as a plain number of seconds: ``every 900`` for ``every 15m``."""
        return " ".join(map(_in_seconds, self.text.split()))

    def due(
        self,
        now_us: int,
        since_us: int,
        fired_us: int | None,
        ended_us: int | None,
        seen_us: int | None = None,
    ) -> int | None:
        """Returns the due time for which the job must run now; None: it is not due yet, or never again.

        Args:
            since_us: when the job was created or resumed. Earlier due times are skipped, except that of ``once``.
            fired_us: newest due time for which the job ran; None: it never ran.
            ended_us: when that run ended; None: it is under way, or the job never ran.
            seen_us: the earliest time that the clock has shown since then. It is earlier than ``ended_us``,
                ``fired_us`` or ``since_us`` if these are from a clock that ran ahead and was put back; an interval
                counts from it then, and times of a cron line are due from it on, because the job would otherwise wait
                until that time comes again. The caller leaves out times for which the job ran. None: not known.
        """
        if self.once_us is not None:
            return self.once_us if self.once_us <= now_us and not self._is_over(fired_us) else None
        if self.every_us is not None:
            began_us = max(since_us, ended_us or 0)
            at = (began_us if seen_us is None else min(began_us, seen_us)) + self.every_us
            return at if at <= now_us else None
        after = max(since_us, fired_us or 0)
        if seen_us is not None:
            after = min(after, seen_us)
        return None if (last := self._before(now_us)) is None or last <= after else last

    def next_us(self, now_us: int, since_us: int, fired_us: int | None, ended_us: int | None) -> int | None:
        """Returns the next due time of a job that is not due now; None: never."""
        if self.once_us is not None:
            return None if self._is_over(fired_us) else self.once_us
        if self.every_us is not None:
            return min(max(since_us, ended_us or 0), now_us) + self.every_us  # a time to come is of a clock put back
        after = max(now_us, fired_us or 0)
        # cronsim names a fixed time of an hour that is repeated in the first of the two hours, also in the second one
        return next((at for at in map(_us, CronSim(self._line, self._local(after))) if at > after), None)

    def _is_over(self, fired_us: int | None) -> bool:
        return fired_us is not None and self.once_us is not None and fired_us >= self.once_us

    @property
    def _line(self) -> str:
        if self.cron is None:
            raise InvalidArgument(f"{shown(self.text)} is not a schedule", remedy=_REMEDY)
        return self.cron

    def _before(self, now_us: int) -> int | None:
        """Returns the newest due time of a cron schedule up to now; None: there is none."""
        just_behind = self._local(now_us + 1_000_000)  # not added in the zone, where a sum is in the first of two hours
        return next((_us(at) for at in CronSim(self._line, just_behind, reverse=True)), None)

    def _local(self, us: int) -> datetime:
        return datetime.fromtimestamp(us // 1_000_000, UTC).astimezone(ZoneInfo(self.zone))


def _in_seconds(word: str) -> str:
    """Converts a duration with its unit, such as ``90s``, ``15m``, ``2h`` or ``7d``, to seconds; returns any other word
    unchanged."""
    unit = _UNITS.get(word[-1:])
    return f"{float(word[:-1]) * unit:.15g}" if unit is not None and _NUMBER.fullmatch(word[:-1]) else word


def _us(moment: datetime) -> int:
    return round(moment.timestamp() * 1e6)
