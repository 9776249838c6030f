"""Metrics that an operator declares: bounded, and counted only where that is wanted."""

from __future__ import annotations

import logging
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from stateflow.errors import DeclarationError, InvalidArgument
from stateflow.metrics.figures import Histogram
from stateflow.metrics.own import (
    BUCKETS,
    LABELS_MAX,
    NAMES_MAX,
    SERIES_MAX,
    VALUE_MAX,
    Declared,
    Metrics,
    OwnFigures,
    by_name,
)

V1, V2, V3 = object(), object(), object()


@pytest.fixture
def figures() -> OwnFigures:
    return OwnFigures()


@pytest.fixture
def metrics(figures: OwnFigures) -> Metrics:
    return Metrics(figures, "Op", V1)


def shown(figures: OwnFigures) -> dict[str, Any]:
    return {declared.name: series for _, declared, series in figures.read()}


def test_what_is_said_counts_when_it_is_to_and_once(figures: OwnFigures, metrics: Metrics) -> None:
    metrics.counter("alerts").inc()
    metrics.counter("alerts").inc(2)
    metrics.gauge("level").set(5)
    metrics.gauge("level").dec(2)
    metrics.histogram("took").observe(0.3)
    assert shown(figures) == {"alerts": {(): 0.0}, "level": {}, "took": {(): Histogram(BUCKETS)}}
    metrics.count()
    metrics.count()
    took = Histogram(BUCKETS)
    took.observe(0.3)
    assert shown(figures) == {"alerts": {(): 3.0}, "level": {(): 3.0}, "took": {(): took}}
    metrics.gauge("level").inc()
    metrics.count()
    assert figures.value("Op", "level", {}) == 4.0


def test_what_is_forgotten_never_counts(figures: OwnFigures, metrics: Metrics) -> None:
    metrics.counter("alerts").inc(7)
    metrics.gauge("level").set(7)
    metrics.histogram("took").observe(7)
    metrics.forget()
    metrics.count()
    metrics.counter("alerts").inc()
    metrics.gauge("level").inc()
    metrics.histogram("took").observe(1)
    metrics.count()
    assert figures.value("Op", "alerts", {}) == figures.value("Op", "level", {}) == 1.0
    took = figures.value("Op", "took", {})
    assert isinstance(took, Histogram)
    assert (took.count, took.total) == (1, 1.0)


def test_partitions_of_an_operator_have_one_value(figures: OwnFigures) -> None:
    several = [Metrics(figures, "Op", V1) for _ in range(3)]
    for number, metrics in enumerate(several):
        metrics.counter("n", labels=["kind"]).labels(kind="a").inc(number)
        metrics.count()
    assert figures.value("Op", "n", {"kind": "a"}) == 3.0


def test_labels_are_those_that_were_declared(figures: OwnFigures, metrics: Metrics) -> None:
    counter = metrics.counter("alerts", "that were raised", ["kind", "site"])
    with pytest.raises(InvalidArgument, match=r"call \.labels"):
        counter.inc()
    for wrong in ({"kind": "a"}, {"kind": "a", "site": "b", "other": "c"}, {}):
        with pytest.raises(InvalidArgument, match="has the labels kind, site"):
            counter.labels(**wrong)
    counter.labels(site="b", kind=3).inc()
    assert counter.labels(kind="3", site="b") is counter.labels(kind=3, site="b")
    with pytest.raises(InvalidArgument, match="has the labels"):
        counter.labels(kind="3", site="b").labels(kind="3", site="b")
    metrics.count()
    assert shown(figures) == {"alerts": {("3", "b"): 1.0}}
    with pytest.raises(InvalidArgument, match=r"alerts.*kind.*3"):
        figures.value("Op", "alerts", {"kind": "4", "site": "b"})


@pytest.mark.parametrize(
    "name", ["", "1st", "a-b", "a:b", "ä", "a b", "x" * 101, "n_total", "n_count", "n_sum", "n_bucket", "n_created"]
)
def test_names_are_prometheus(metrics: Metrics, name: str) -> None:
    with pytest.raises(DeclarationError):
        metrics.counter(name)


@pytest.mark.parametrize("label", ["le", "operator", "quantile", "__name__", "a-b", "1", "", "a:b"])
def test_labels_are_prometheus(metrics: Metrics, label: str) -> None:
    with pytest.raises(DeclarationError, match="cannot have the label"):
        metrics.counter("n", labels=[label])


def test_texts_can_be_written(figures: OwnFigures, metrics: Metrics) -> None:
    """Half of a surrogate pair in one label made every later request for the process's metrics fail."""
    counter = metrics.counter("n", labels=["kind"])
    with pytest.raises(InvalidArgument, match=r"the value 'caf\\udce9' of the label kind is not Unicode text"):
        counter.labels(kind=b"caf\xe9".decode(errors="surrogateescape"))
    with pytest.raises(DeclarationError, match="a description that is not Unicode text"):
        metrics.counter("m", "caf\udce9")
    assert shown(figures) == {"n": {}}


@pytest.mark.parametrize("buckets", [[2, 1], [1, 1], [float("inf")], [float("nan")], [1] * 51, range(51)])
def test_buckets_are_bounds(metrics: Metrics, buckets: Any) -> None:
    with pytest.raises(DeclarationError, match="buckets"):
        metrics.histogram("n", buckets=buckets)


def test_buckets_can_be_set(figures: OwnFigures, metrics: Metrics) -> None:
    for value in (1, 2, 3, 30):
        metrics.histogram("n", buckets=[1, 10]).observe(value)
    metrics.count()
    found = figures.value("Op", "n", {})
    assert isinstance(found, Histogram)
    assert (found.bounds, found.counts) == ((1.0, 10.0), [1, 2, 1])


def test_there_are_bounds(figures: OwnFigures, metrics: Metrics) -> None:
    with pytest.raises(DeclarationError, match=f"use at most {LABELS_MAX}"):
        metrics.counter("n", labels=[f"l{n}" for n in range(LABELS_MAX + 1)])
    with pytest.raises(DeclarationError, match="twice"):
        metrics.counter("n", labels=["a", "a"])
    counter = metrics.counter("n", labels=["a"])
    for number in range(SERIES_MAX):
        counter.labels(a=number)
    with pytest.raises(InvalidArgument, match=f"{SERIES_MAX} combinations"):
        counter.labels(a=SERIES_MAX)
    with pytest.raises(InvalidArgument, match=f"{SERIES_MAX} combinations"):
        Metrics(figures, "Op", V1).counter("n", labels=["a"]).labels(a="another partition's")
    with pytest.raises(InvalidArgument, match="characters"):
        counter.labels(a="x" * (VALUE_MAX + 1))
    for number in range(NAMES_MAX - 1):
        metrics.gauge(f"g{number}")
    with pytest.raises(InvalidArgument, match=f"{NAMES_MAX} metrics"):
        metrics.gauge("one_too_many")
    Metrics(figures, "Another", V1).gauge("one_too_many")


def test_series_of_a_batch_that_was_not_applied_are_removed(figures: OwnFigures, metrics: Metrics) -> None:
    """Otherwise a batch with too many values of a label made every later batch with a new value fail."""
    counter = metrics.counter("n", labels=["a"])
    kept = counter.labels(a="kept")
    metrics.count()
    with pytest.raises(InvalidArgument, match=f"{SERIES_MAX} combinations"):
        for number in range(SERIES_MAX):
            counter.labels(a=number).inc()
    held = counter.labels(a=0)
    metrics.forget()
    assert shown(figures) == {"n": {("kept",): 0.0}}
    held.inc()
    kept.inc()
    counter.labels(a=1).inc()
    assert counter.labels(a=1) is counter.labels(a=1)
    metrics.count()
    assert shown(figures) == {"n": {("0",): 1.0, ("1",): 1.0, ("kept",): 1.0}}
    held.inc()
    metrics.forget()
    metrics.forget()
    assert shown(figures) == {"n": {("0",): 1.0, ("1",): 1.0, ("kept",): 1.0}}, "an applied batch has used them"


@pytest.mark.parametrize("is_first_applied", [False, True])
def test_a_series_that_two_running_batches_use_stays_for_the_one_that_is_applied(
    figures: OwnFigures, metrics: Metrics, is_first_applied: bool
) -> None:
    other = Metrics(figures, "Op", V1)
    for each in (metrics, other):
        each.counter("n", labels=["a"]).labels(a="x").inc()
    applied, failed = (metrics, other) if is_first_applied else (other, metrics)
    failed.forget()
    assert shown(figures) == {"n": {("x",): 0.0}}
    applied.count()
    failed.forget()
    assert shown(figures) == {"n": {("x",): 1.0}}
    failed.counter("n").labels(a="x").inc()
    failed.count()
    assert shown(figures) == {"n": {("x",): 2.0}}


def test_series_that_only_a_former_version_used_give_way(figures: OwnFigures, metrics: Metrics) -> None:
    """An operator whose label had too many values went on failing with its corrected version."""
    former = metrics.counter("n", labels=["a"])
    for number in range(SERIES_MAX):
        former.labels(a=number)
    for number in range(1, SERIES_MAX):
        former.labels(a=number).inc()
    metrics.count()
    newer = Metrics(figures, "Op", V2)
    newer.counter("n", labels=["a"]).labels(a=SERIES_MAX - 1).inc()
    newer.count()
    assert shown(figures)["n"].keys() == {(str(number),) for number in range(SERIES_MAX)}, "there is no need"
    newer.counter("n").labels(a="new")
    assert shown(figures)["n"].keys() == {(str(number),) for number in range(1, SERIES_MAX)} | {("new",)}
    for number in range(SERIES_MAX - 2):
        newer.counter("n").labels(a=f"new {number}")
    newer.count()
    assert shown(figures)["n"].pop((str(SERIES_MAX - 1),)) == 2.0, "counters of both do not go back"
    former.labels(a=1).inc()
    metrics.count()
    assert ("1",) not in shown(figures)["n"], "a partition that has the former version still"
    with pytest.raises(InvalidArgument, match=f"{SERIES_MAX} combinations"):
        newer.counter("n").labels(a="too many")


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf"), -0.001])
def test_a_counter_only_rises(metrics: Metrics, amount: float) -> None:
    with pytest.raises(InvalidArgument, match="use a gauge"):
        metrics.counter("n").inc(amount)
    with pytest.raises(InvalidArgument, match="NaN"):
        metrics.histogram("h").observe(float("nan"))


def test_amounts_of_other_kinds_of_numbers_are_added_as_floats(figures: OwnFigures, metrics: Metrics) -> None:
    """A counter of numpy.float32 stopped at 2**24, one of numpy.float16 became infinite."""
    counter, gauge, histogram = metrics.counter("n"), metrics.gauge("level"), metrics.histogram("h", buckets=[1])
    counter.inc(np.float32(2**24))
    for _ in range(3):
        counter.inc(np.float32(1))
        metrics.count()
    gauge.inc(np.float16(60000))
    gauge.inc(np.float16(60000))
    gauge.dec(np.uint8(1))  # -numpy.uint8(1) is 255
    for value in (np.float16(60000), np.float16(60000), Decimal("0.5")):
        histogram.observe(value)  # type: ignore[arg-type]
    metrics.count()
    assert figures.value("Op", "n", {}) == 2**24 + 3
    assert figures.value("Op", "level", {}) == 2 * float(np.float16(60000)) - 1
    found = figures.value("Op", "h", {})
    assert isinstance(found, Histogram)
    assert found.counts == [1, 2]


@pytest.mark.parametrize("amount", [np.array([1.0, 2.0]), "three", None, [1], pytest.param(10**400, id="large")])
def test_what_is_not_one_number_is_refused(figures: OwnFigures, metrics: Metrics, amount: Any) -> None:
    """The page of the whole process could not be written, and later batches failed behind their commit."""
    metrics.gauge("level").set(1)
    for use in (
        *(metrics.counter("n").inc, metrics.histogram("h").observe),
        *(metrics.gauge("level").set, metrics.gauge("level").inc, metrics.gauge("level").dec),
    ):
        with pytest.raises(InvalidArgument, match=f"type {type(amount).__name__} cannot be converted to a float"):
            use(amount)
    metrics.count()
    assert figures.value("Op", "level", {}) == 1.0


def test_a_name_is_declared_once_in_a_version(figures: OwnFigures, metrics: Metrics) -> None:
    metrics.counter("n", "of something", ["kind"])
    assert metrics.counter("n") is metrics.counter("n", "of something", ("kind",))
    for again in (
        lambda: metrics.gauge("n"),
        lambda: metrics.counter("n", "of something else"),
        lambda: metrics.counter("n", labels=["other"]),
    ):
        with pytest.raises(DeclarationError, match="declared"):
            again()
    with pytest.raises(DeclarationError, match="already declared"):
        Metrics(figures, "Op", V1).counter("n")
    metrics.counter("n").labels(kind="a").inc()
    metrics.count()
    Metrics(figures, "Op", V2).counter("n", "of something", ["kind"])
    assert figures.value("Op", "n", {"kind": "a"}) == 1.0, "another version that declares it alike goes on with it"
    with pytest.raises(DeclarationError, match="already declared"):
        Metrics(figures, "Op", V2).gauge("n")
    newer = Metrics(figures, "Op", V3).gauge("n")
    assert shown(figures) == {"n": {}}
    metrics.counter("n").labels(kind="a").inc()
    metrics.count()
    assert shown(figures) == {"n": {}}, "a partition that has the former version still"
    assert newer.kind == "gauge"


def test_operators_that_have_a_name_for_two_kinds(figures: OwnFigures, caplog: pytest.LogCaptureFixture) -> None:
    Metrics(figures, "B", V1).gauge("n").set(1)
    with caplog.at_level(logging.WARNING):
        Metrics(figures, "C", V1).counter("n", "other words")
        Metrics(figures, "A", V2).counter("n", "words")
        Metrics(figures, "A", V2).counter("n", "words")
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "metric 'n' is a counter of C and a gauge of B",
        "metric 'n' is a counter of A and a gauge of B",
    ]
    ((first, operators),) = by_name(figures)
    assert first == Declared("counter", "n", "words")
    assert [name for name, _, _ in operators] == ["A", "C"]
