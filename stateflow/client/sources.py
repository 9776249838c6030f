"""Sources of an operator: the data kept for each, and functions that reduce it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import TypeVar

from stateflow.errors import InvalidArgument, LeaseLost, NotOwner, Unavailable
from stateflow.partition.positions import SourceView
from stateflow.reports import Report
from stateflow.router import Router, backoff
from stateflow.rpc.clients import ReplicaClient

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourceReport(Report):
    """Data that an operator's partitions keep for a source.

    ``batch``: the newest batch that any partition contains, -1: none. ``at_us``: time of its last batch, µs.
    ``partitions``: number of partitions that contain a batch of it. ``retired``: no partition has more of it than a
    tombstone. ``watermark_us``: its least watermark over the partitions; None: none that counts. ``holds``: it holds
    back the watermark of some partition.

    Example: ``[each.source for each in cluster.sources("Count") if each.holds]``
    """

    source: str
    batch: int
    at_us: int
    partitions: int
    bytes: int
    watermark_us: int | None
    retired: bool
    holds: bool


@dataclass(frozen=True, slots=True)
class OutputDropReport(Report):
    """Stored output of one batch of a source that is dropped, or would be.

    ``sizes``: partition → bytes of its output; partitions that keep none are left out. ``applied``: False: only
    reported.

    Example: ``cluster.drop_output("Count", source, 12, apply=True).sizes``
    """

    operator: str
    source: str
    batch: int
    sizes: Mapping[int, int]
    applied: bool


def sources(router: Router) -> list[SourceReport]:
    """Returns the sources that have sent to the operator; the last senders come last. Raises Unavailable."""
    found: dict[str, list[SourceView]] = {}
    holders: set[str] = set()
    for views in _everywhere(router, lambda replica, partition: replica.sources(router.operator, partition)):
        if (holder := _holder(views)) is not None:
            holders.add(holder)
        for view in views:
            found.setdefault(view.source, []).append(view)
    reports = (_report(source, views, source in holders) for source, views in found.items())
    return sorted(reports, key=lambda each: each.at_us)


def _holder(views: Iterable[SourceView]) -> str | None:
    """Returns the only source that holds back the watermark of a partition; None: there are several, or none."""
    promised = sorted((view.watermark_us, view.source) for view in views if view.watermark_us is not None)
    return promised[0][1] if len(promised) > 1 and promised[0][0] < promised[1][0] else None


def _report(source: str, views: list[SourceView], holds: bool) -> SourceReport:
    watermarks = [view.watermark_us for view in views if view.watermark_us is not None]
    return SourceReport(
        source,
        batch=max(view.batch for view in views),
        at_us=max(view.at_us for view in views),
        partitions=sum(view.batch >= 0 for view in views),
        bytes=sum(view.bytes for view in views),
        watermark_us=min(watermarks, default=None),
        retired=all(view.retired for view in views),
        holds=holds,
    )


def retire(router: Router, source: str) -> int:
    """Makes all partitions keep only a tombstone of a source; returns the number of partitions that had more.

    Raises InvalidArgument for a source that is not known, Unavailable.
    """

    _known(router, source)
    return sum(_everywhere(router, lambda replica, p: replica.retire_source(router.operator, source, p)))


def drop_output(router: Router, source: str, batch: int, apply: bool) -> OutputDropReport:
    """Makes all partitions drop the output of a batch. Raises InvalidArgument if none keeps any, Unavailable."""
    known = _known(router, source)
    found = _everywhere(router, lambda replica, p: replica.drop_output(router.operator, source, batch, p, apply))
    sizes = {partition: size for partition, size in enumerate(found) if size}
    if not sizes:
        raise InvalidArgument(
            f"no partition keeps output of batch {batch} of the source",
            remedy=f"check the number: the newest batch is {known.batch}; one without output rows has nothing to drop",
            operator=router.operator,
            source=source,
        )
    return OutputDropReport(router.operator, source, batch, sizes, apply)


def _known(router: Router, source: str) -> SourceReport:
    found = [each for each in sources(router) if each.source == source]
    if not found:
        raise InvalidArgument(
            f"no partition knows a source {source!r}",
            remedy=f"list sources with `stateflow source list {router.operator}`",
            operator=router.operator,
        )
    return found[0]


def _everywhere(router: Router, ask: Callable[[ReplicaClient, int], T]) -> list[T]:
    """Asks the owner of each partition, also while the partition moves."""
    found: list[T] = []
    for partition in range(router.spec.partitions):
        for pause in backoff():
            try:
                found.append(ask(ReplicaClient(router.table.routes[partition].address), partition))
                break
            except (LeaseLost, NotOwner, Unavailable):
                if pause is None:
                    raise
                sleep(pause)
                with suppress(Unavailable):  # go on with the known owners
                    router.refresh()
    return found
