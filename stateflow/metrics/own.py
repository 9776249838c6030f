"""Metrics that operators declare through ``ctx.metrics``, and their values in a process.

Counts made while a batch is processed are kept with the partition, and added to the process's values only when the
batch commits. If the batch is not applied, the counts are discarded. So a batch that fails and is sent again counts
once. A batch that is sent again because its answer was lost counts once, too, because it is recognised and skipped.

Names, labels and values of labels are limited in number, because a metric for each key would be as large as the state.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

from stateflow.errors import DeclarationError, InvalidArgument
from stateflow.metrics.figures import Histogram, Kind, Labels

log = logging.getLogger(__name__)
#: limits: metrics per operator, labels per metric, combinations of values, characters of a value, bounds of buckets
NAMES_MAX, LABELS_MAX, SERIES_MAX, VALUE_MAX, BUCKETS_MAX = 100, 5, 200, 200, 50
#: default bounds, in seconds, like those of the Prometheus client
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: prefix of the names of all metrics that operators declare
PREFIX = "stateflow_operator_"
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,99}")
#: suffixes that Prometheus adds to names
_SUFFIXES = ("_total", "_created", "_bucket", "_count", "_sum", "_info")
_RESERVED = frozenset({"operator", "le", "quantile"})
S = TypeVar("S", bound="_Series")


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration of a metric.

    Attributes:
        name: name without :data:`PREFIX`, and without the ``_total`` of a counter.
        what: description for users.
        buckets: upper bounds of a histogram's buckets, ascending.
    """

    kind: Kind
    name: str
    what: str = ""
    labels: Labels = ()
    buckets: tuple[float, ...] = ()

    def check(self, operator: str) -> None:
        """Checks the name, the labels and the buckets. Raises DeclarationError."""
        if not _NAME.fullmatch(self.name):
            raise _wrong(
                operator, self.name, "has an invalid name", "use at most 100 letters, digits and _, no digit first"
            )
        if self.name.endswith(_SUFFIXES):
            remedy = f"omit the ending: {', '.join(_SUFFIXES)} are appended where they belong"
            raise _wrong(operator, self.name, "has a reserved ending", remedy)
        if not _is_text(self.what):
            raise _wrong(operator, self.name, "has a description that is not Unicode text", "use characters of UTF-8")
        if len(self.labels) > LABELS_MAX:
            raise _wrong(operator, self.name, f"has {len(self.labels)} labels", f"use at most {LABELS_MAX}")
        for label in self.labels:
            if not _NAME.fullmatch(label) or label.startswith("__") or label in _RESERVED:
                remedy = f"use letters, digits and _, no leading __, and none of {', '.join(sorted(_RESERVED))}"
                raise _wrong(operator, self.name, f"cannot have the label {label!r}", remedy)
        if len(set(self.labels)) < len(self.labels):
            raise _wrong(operator, self.name, "has a label twice", "use each label once")
        if self.kind == "histogram":
            ascend = all(low < high for low, high in pairwise(self.buckets))
            if not (0 < len(self.buckets) <= BUCKETS_MAX and ascend and all(map(math.isfinite, self.buckets))):
                remedy = f"pass 1 to {BUCKETS_MAX} finite, ascending bounds; values above the last are counted anyway"
                raise _wrong(operator, self.name, "has invalid buckets", remedy)


class _Pending(NamedTuple):
    """The change of a series by one batch.

    Attributes:
        amount: amount to add, or a histogram of observed values.
        base: value to which the batch has set a gauge before adding ``amount``; None: the batch has set no value.
    """

    amount: float | Histogram
    base: float | None = None


@dataclass(slots=True)
class Family:
    """A metric of an operator in this process.

    Attributes:
        version: version of the operator that declared the metric last.
        series: values of labels → value of the metric; None for a gauge without a value.
        unsettled: series that no applied batch has used → number of running batches that use it.
        former: series that were made before ``version`` declared the metric, and that were not used since. They give
            way to others, so that a version which used too many labels does no harm to its successor.
    """

    declared: Declared
    version: object
    series: dict[Labels, float | Histogram | None] = field(default_factory=dict)
    unsettled: dict[Labels, int] = field(default_factory=dict)
    former: dict[Labels, None] = field(default_factory=dict)

    def nothing(self) -> float | Histogram | None:
        match self.declared.kind:
            case "counter":
                return 0.0
            case "gauge":
                return None
            case "histogram":
                return Histogram(self.declared.buckets)

    def pass_to(self, version: object) -> None:
        """Continues the metric in a version that declares it in the same way."""
        if version is not self.version:
            self.version, self.former = version, dict.fromkeys(self.series)

    def make(self, values: Labels) -> bool:
        """Makes a series, unless it exists. Returns False if there are too many series."""
        self.former.pop(values, None)
        if values in self.series:
            return True
        if len(self.series) >= SERIES_MAX:
            if not self.former:
                return False
            nothing = self.nothing()
            gone = min(self.former, key=lambda each: self.series[each] != nothing)  # first those without a value
            del self.former[gone], self.series[gone]
        self.series[values] = self.nothing()
        return True

    def remove(self, values: Labels) -> None:
        self.former.pop(values, None)
        self.series.pop(values, None)


class OwnFigures:
    """The metrics of all operators of a process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, dict[str, Family]] = {}

    def declare(self, operator: str, version: object, declared: Declared) -> Family:
        """Returns the operator's metric with this declaration, and makes it if there is none.

        If another version of the operator has declared the metric differently, the new metric begins without values. If
        it has declared the metric in the same way, the metric goes on, and series that only the other version used
        give way when there are too many.

        Raises DeclarationError if the declaration is invalid or this version has declared the metric differently
        before, and InvalidArgument if there are too many metrics.
        """
        declared.check(operator)
        with self._lock:
            families = self._families.setdefault(operator, {})
            known = families.get(declared.name)
            if known is not None and known.declared == declared:
                known.pass_to(version)
                return known
            if known is not None and known.version is version:
                remedy = "declare it once, with its labels and buckets, then get it by its name"
                raise _wrong(operator, declared.name, "is already declared differently", remedy)
            if known is None and len(families) >= NAMES_MAX:
                what = f"the operator already has {NAMES_MAX} metrics"
                raise InvalidArgument(
                    what, remedy="use labels instead of further names", operator=operator, name=declared.name
                )
            self._warn(operator, declared)
            family = families[declared.name] = Family(declared, version)
            if not declared.labels:
                family.series[()] = family.nothing()
            return family

    def _warn(self, operator: str, declared: Declared) -> None:
        for other, families in self._families.items():
            theirs = families.get(declared.name)
            if other != operator and theirs is not None and theirs.declared.kind != declared.kind:
                log.warning(
                    "metric %r is a %s of %s and a %s of %s: the metrics page shows only one of them, rename one",
                    declared.name,
                    declared.kind,
                    operator,
                    theirs.declared.kind,
                    other,
                )

    def admit(self, operator: str, family: Family, values: Labels) -> bool:
        """Makes a series for these values of the labels, unless it exists.

        Returns True if no applied batch has used the series. The caller then passes it to :meth:`add` when its batch
        was applied, or otherwise to :meth:`withdraw`.

        Raises InvalidArgument if there are too many series, or if the value of a label is too long or is not Unicode
        text, because the page of the whole process could then not be written.
        """
        for label, value in zip(family.declared.labels, values, strict=True):
            if len(value) > VALUE_MAX:
                raise InvalidArgument(
                    f"the value of the label {label} is too long, with {len(value)} characters",
                    remedy=f"use at most {VALUE_MAX}",
                    operator=operator,
                    name=family.declared.name,
                )
            if not _is_text(value):
                raise InvalidArgument(
                    f"the value {value!a} of the label {label} is not Unicode text",
                    remedy="decode its bytes with errors='replace'",
                    operator=operator,
                    name=family.declared.name,
                )
        with self._lock:
            is_new = values not in family.series
            if not family.make(values):
                raise InvalidArgument(
                    f"the labels already have {SERIES_MAX} combinations of values",
                    remedy="use labels with few values, never keys",
                    operator=operator,
                    name=family.declared.name,
                    labels=",".join(values),
                )
            if not is_new and values not in family.unsettled:
                return False
            family.unsettled[values] = family.unsettled.get(values, 0) + 1
            return True

    def withdraw(self, admitted: Sequence[tuple[Family, Labels]]) -> None:
        """Removes series that only a batch which was not applied has used."""
        with self._lock:
            for family, values in admitted:
                left = family.unsettled.get(values, 0) - 1
                if left > 0:
                    family.unsettled[values] = left
                elif left == 0:
                    del family.unsettled[values]
                    family.remove(values)

    def add(
        self, pending: Sequence[tuple[Family, Labels, _Pending]], admitted: Sequence[tuple[Family, Labels]] = ()
    ) -> None:
        """Adds the counts of a batch to the values of the process. Readers see all of these counts or none.

        Args:
            admitted: series that the batch was the first to use, perhaps without a count.
        """
        with self._lock:
            for family, values in admitted:
                family.unsettled.pop(values, None)
            for family, values, (amount, base) in pending:
                if not family.make(values):
                    continue  # it gave way: its partition still has a former version
                now = family.series[values]
                if isinstance(amount, Histogram):
                    assert isinstance(now, Histogram)
                    now.merge(amount)
                elif base is not None:
                    family.series[values] = base + amount
                else:
                    assert not isinstance(now, Histogram)
                    family.series[values] = (now or 0.0) + amount

    def read(self) -> list[tuple[str, Declared, dict[Labels, float | Histogram]]]:
        """Returns (operator, declaration, values of the labels → value of the metric) for each metric.

        The list is sorted by operator.
        """
        with self._lock:
            return [
                (operator, family.declared, {values: _copy(now) for values, now in series if now is not None})
                for operator, families in sorted(self._families.items())
                for family in families.values()
                for series in [sorted(family.series.items())]
            ]

    def value(self, operator: str, name: str, labels: Mapping[str, str]) -> float | Histogram:
        """Returns the value of one series, for tests. Raises InvalidArgument if there is none."""
        for of, declared, series in self.read():
            if of == operator and declared.name == name and labels.keys() == set(declared.labels):
                values = tuple(labels[label] for label in declared.labels)
                if values in series:
                    return series[values]
        known = ", ".join(
            f"{declared.name}{dict(zip(declared.labels, values, strict=True)) or ''}"
            for of, declared, series in self.read()
            if of == operator
            for values in series
        )
        raise InvalidArgument(
            f"there is no metric {name!r} with the labels {dict(labels)}",
            remedy=f"use one of {known}" if known else "send rows first: no metric of the operator has a value yet",
            operator=operator,
        )


def _is_text(value: str) -> bool:
    """Tells whether a text can be written as UTF-8. Halves of surrogate pairs, as of badly decoded bytes, cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(value: Any) -> float:
    """Converts an amount to a float. Other kinds of numbers would keep their own precision and size in sums."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(
            f"an amount of type {type(value).__name__} cannot be converted to a float", remedy="pass one number"
        ) from error


def _copy(value: float | Histogram) -> float | Histogram:
    return value.copy() if isinstance(value, Histogram) else value


def _wrong(operator: str, name: str, what: str, remedy: str) -> DeclarationError:
    return DeclarationError(f"the metric {name!r} {what}", remedy=remedy, operator=operator)


# -- What operators use -------------------------------------------------------------------------------------------


class _Series:
    """A series of a metric in one partition.

    Args:
        values: values of the metric's labels; None: the metric has labels, and :meth:`labels` must be called first.
    """

    kind: Kind

    def __init__(self, metrics: Metrics, family: Family, values: Labels | None) -> None:
        self._metrics, self._family, self._values = metrics, family, values
        self._by_values: dict[Labels, Any] = {}
        self._is_touched = False
        # False also if the batch that made the series was not applied
        self._is_admitted = values == ()

    def labels(self: S, **values: object) -> S:
        """Returns the series with these values, one for each label. Values are converted to text.

        Raises InvalidArgument for other labels, too many combinations of values, and values that are too long.
        """
        declared = self._family.declared
        if self._values is not None or values.keys() != set(declared.labels):
            raise InvalidArgument(
                f"labels() does not fit the metric {declared.name!r}, which has the labels "
                f"{', '.join(declared.labels) or '(none)'}",
                remedy="call it once, with a value for each of these labels and no other",
                operator=self._metrics.operator,
            )
        key = tuple(str(values[label]) for label in declared.labels)
        found: S | None = self._by_values.get(key)
        if found is None:
            found = type(self)(self._metrics, self._family, key)
            self._metrics.admit(self._family, key, found)
            self._by_values[key] = found
        return found

    def _touch(self) -> None:
        if self._values is None:
            declared = self._family.declared
            raise InvalidArgument(
                f"the metric {declared.name!r} is used without labels, but has the labels {', '.join(declared.labels)}",
                remedy=f"call .labels({declared.labels[0]}=…) first",
                operator=self._metrics.operator,
            )
        if not self._is_touched:
            if not self._is_admitted:
                self._metrics.admit(self._family, self._values, self)
            self._is_touched = True
            self._metrics.touched.append(self)

    def take(self) -> tuple[Family, Labels, _Pending]:
        """Returns the change since the last call, and resets it."""
        assert self._values is not None
        self._is_touched = False
        return self._family, self._values, self._taken()

    def _taken(self) -> _Pending:
        raise NotImplementedError


class Counter(_Series):
    """A counter, whose value only rises."""

    kind = "counter"
    _amount = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds to the counter. Raises InvalidArgument for an amount below 0, infinity, NaN and what is not a number."""
        amount = _number(amount)
        if not 0 <= amount < math.inf:
            raise InvalidArgument(
                f"a counter cannot increase by {amount}", remedy="use a gauge for values that decrease"
            )
        self._touch()
        self._amount += amount

    def _taken(self) -> _Pending:
        taken, self._amount = _Pending(self._amount), 0.0
        return taken


class Gauge(_Series):
    """A gauge, whose value rises and falls.

    The process has one value: the value that any of its partitions set last, plus all additions since then. Its methods
    raise InvalidArgument for what is not a number.
    """

    kind = "gauge"
    _amount = 0.0
    _base: float | None = None

    def set(self, value: float) -> None:
        value = _number(value)
        self._touch()
        self._base, self._amount = value, 0.0

    def inc(self, amount: float = 1.0) -> None:
        amount = _number(amount)
        self._touch()
        self._amount += amount

    def dec(self, amount: float = 1.0) -> None:
        self.inc(-_number(amount))

    def _taken(self) -> _Pending:
        taken = _Pending(self._amount, self._base)
        self._base, self._amount = None, 0.0
        return taken


class HistogramSeries(_Series):
    """A histogram, which counts observed values by bucket and sums them up."""

    kind = "histogram"
    _observed: Histogram | None = None

    def observe(self, value: float) -> None:
        """Observes a value. Raises InvalidArgument for NaN, which is in no bucket, and what is not a number."""
        value = _number(value)
        if math.isnan(value):
            raise InvalidArgument("NaN cannot be observed", remedy="observe only numbers")
        self._touch()
        if self._observed is None:
            self._observed = Histogram(self._family.declared.buckets)
        self._observed.observe(value)

    def _taken(self) -> _Pending:
        # None: the operator was interrupted before it had observed the value
        taken, self._observed = _Pending(self._observed or Histogram(self._family.declared.buckets)), None
        return taken


class Metrics:
    """An operator's own counters, gauges and histograms, used as ``ctx.metrics``.

    Each partition has such an object, but the values of a metric are for all partitions of a process together. Only the
    operator's methods may use metrics, not threads that the operator starts. Changes take effect when the running batch
    commits.
    """

    def __init__(self, figures: OwnFigures, operator: str, version: object) -> None:
        self.operator = operator
        self._figures, self._version = figures, version
        self._known: dict[str, _Series] = {}
        #: series that the running batch has changed
        self.touched: list[_Series] = []
        #: series that no batch had used before the running one
        self._admitted: list[tuple[Family, Labels, _Series]] = []

    def counter(self, name: str, what: str | None = None, labels: Sequence[str] | None = None) -> Counter:
        """Returns a counter, which the replica's ``/metrics`` shows as ``stateflow_operator_<name>_total``.

        Args:
            what: description for users.
            labels: names of the counter's labels; pass their values to ``.labels``.

        ``what`` and ``labels`` may be omitted when the counter was declared before.

        Raises DeclarationError, and InvalidArgument if the operator has too many metrics.
        """
        return self._series(Counter, name, what, labels, None)

    def gauge(self, name: str, what: str | None = None, labels: Sequence[str] | None = None) -> Gauge:
        """Returns a gauge, which ``/metrics`` shows as ``stateflow_operator_<name>``. See :meth:`counter`."""
        return self._series(Gauge, name, what, labels, None)

    def histogram(
        self,
        name: str,
        what: str | None = None,
        labels: Sequence[str] | None = None,
        buckets: Sequence[float] | None = None,
    ) -> HistogramSeries:
        """Returns a histogram. ``/metrics`` shows it as ``stateflow_operator_<name>_bucket``, ``_sum`` and ``_count``.

        See :meth:`counter` for the other arguments.

        Args:
            buckets: upper bounds of the buckets, ascending; None: bounds for seconds, from 5 ms to 10 s.
        """
        return self._series(HistogramSeries, name, what, labels, buckets)

    def _series(
        self,
        cls: type[S],
        name: str,
        what: str | None,
        labels: Sequence[str] | None,
        buckets: Sequence[float] | None,
    ) -> S:
        known = self._known.get(name)
        if known is None:
            bounds = tuple(map(float, buckets or BUCKETS)) if cls is HistogramSeries else ()
            declared = Declared(cls.kind, name, what or "", tuple(labels or ()), bounds)
            family = self._figures.declare(self.operator, self._version, declared)
            made = self._known[name] = cls(self, family, None if declared.labels else ())
            return made
        declared = known._family.declared
        if not isinstance(known, cls) or not (
            what in (None, declared.what)
            and (labels is None or tuple(labels) == declared.labels)
            and (buckets is None or tuple(map(float, buckets)) == declared.buckets)
        ):
            remedy = "declare it once, with its labels and buckets, then get it by its name"
            raise _wrong(self.operator, name, f"is a {declared.kind}, declared differently", remedy)
        return known

    def admit(self, family: Family, values: Labels, series: _Series) -> None:
        if self._figures.admit(self.operator, family, values):
            self._admitted.append((family, values, series))
        series._is_admitted = True

    def count(self) -> None:
        """Adds the counts of the running batch to the process's values, because the batch was applied."""
        if self.touched or self._admitted:
            admitted, self._admitted = self._admitted, []
            self._figures.add(self._taken(), [(family, values) for family, values, _ in admitted])

    def forget(self) -> None:
        """Discards the counts of the running batch, and the series that only this batch has used, because the batch was
        not applied."""
        self._taken()
        admitted, self._admitted = self._admitted, []
        for family, values, series in admitted:
            series._is_admitted = False
            # the operator may still use the series' object, which then makes the series again
            self._known[family.declared.name]._by_values.pop(values, None)
        if admitted:
            self._figures.withdraw([(family, values) for family, values, _ in admitted])

    def _taken(self) -> list[tuple[Family, Labels, _Pending]]:
        touched, self.touched = self.touched, []
        return [series.take() for series in touched]


def by_name(figures: OwnFigures) -> Iterator[tuple[Declared, list[tuple[str, Declared, Mapping[Labels, Any]]]]]:
    """Yields (first declaration, [(operator, declaration, values), …]) for each name of a metric.

    Prometheus allows only one kind for a name. If operators use one name for metrics of different kinds, only the
    metrics of the first operator's kind are yielded. A warning is logged when such metrics are declared.
    """
    found: dict[str, list[tuple[str, Declared, Mapping[Labels, Any]]]] = {}
    for each in figures.read():
        found.setdefault(each[1].name, []).append(each)
    for several in found.values():
        first = several[0][1]
        yield first, [each for each in several if each[1].kind == first.kind]
