"""Retention and garbage collection: pure functions decide what to keep, the shell only lists and deletes.

Collections mark and sweep. A blob is referenced if any readable manifest or savepoint names it; it is leased while an
upload, a restore or a reader relies on it. The order of steps makes a collection safe while those run: remove expired
leases, list blobs, condemn the unreferenced ones, read the leases, read the manifests again, delete the condemned blobs
that are still neither referenced nor leased. :mod:`stateflow.checkpoint.catalog` describes how leases are written.

Ages are measured by the store's clock, because this machine's may be wrong. Retention counts only checkpoints whose
blobs are all there. While a manifest that retention keeps cannot be read, nothing is swept, because its blobs are not
known.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stateflow.checkpoint.backend import TEMPORARY, is_full
from stateflow.checkpoint.catalog import (
    BLOBS,
    CONDEMNED,
    INTENTS,
    MARK_LIFE_S,
    Catalog,
    Found,
    Manifest,
    Mark,
    digest_of,
)
from stateflow.checkpoint.store import CheckpointStore
from stateflow.errors import CheckpointCorrupt, InvalidArgument, Unavailable
from stateflow.types import PartitionId


@dataclass(frozen=True, slots=True)
class Retention:
    """Rule for keeping checkpoints of a partition: the newest ``keep`` readable ones, and all younger than ``age_s``.

    Raises InvalidArgument for ``keep`` below 1 or a negative ``age_s``.
    """

    keep: int = 3
    age_s: float = 0.0

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise InvalidArgument("the newest checkpoint cannot be dropped", remedy="keep at least 1")
        if not self.age_s >= 0:
            raise InvalidArgument("an age cannot be negative", remedy="pass seconds, 0 or more")


def to_drop(checkpoints: Iterable[Found], whole: Collection[str], retention: Retention, now_us: int) -> list[Found]:
    """Returns the checkpoints of one partition that retention does not keep.

    Checkpoints that are not whole do not count towards ``keep``, and are dropped like whole ones of the same age.

    Args:
        whole: names of the checkpoints whose manifest could be read and whose blobs are all there.
    """
    dropped = []
    kept = 0
    for found in sorted(checkpoints, key=lambda each: (each.order, each.attempt), reverse=True):
        young = now_us - found.modified_us < retention.age_s * 1e6
        if kept >= retention.keep and not young:
            dropped.append(found)
        elif found.name in whole:
            kept += 1
    return dropped


def whose_turn(checkpoints: Iterable[Found]) -> PartitionId | None:
    """Returns the partition whose checkpoint was published last; its owner may drop checkpoints now. None: there are no
    checkpoints.

    So usually one replica at a time drops checkpoints, and each replica has its turn.
    """
    newest = max(checkpoints, key=lambda each: (each.modified_us, each.name), default=None)
    return None if newest is None else newest.partition


def to_sweep(blobs: Mapping[str, int], referenced: Collection[str], leases: Iterable[Mark]) -> dict[str, int] | None:
    """Returns the blobs that are neither referenced nor leased: name → bytes. None: a lease is torn, so nothing may be
    swept.

    Args:
        referenced: blobs that manifests name.
    """
    relied_on: set[str] = set()
    for mark in leases:
        if mark.names is None:
            return None
        relied_on |= mark.names
    return {name: size for name, size in blobs.items() if name not in referenced and digest_of(name) not in relied_on}


def is_dead(mark: Mark, now_us: int) -> bool:
    """Returns whether a mark is so old that its process must have ended."""
    return now_us - mark.written_us > MARK_LIFE_S * 1e6


@dataclass(slots=True)
class Collected:
    """Result of a collection; with ``dry_run``, the result that it would have.

    ``held_up``: why nothing was swept; empty: blobs were swept. ``incomplete``: manifests that name missing blobs.
    """

    dry_run: bool
    checkpoints_kept: int = 0
    checkpoints_dropped: int = 0
    blobs_kept: int = 0
    blobs_deleted: int = 0
    bytes_deleted: int = 0
    held_up: str = ""
    unreadable: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Collector:
    """One collection over a store.

    Raises Unavailable, and CheckpointNewer or WrongKey if the store has manifests of a newer format or with another
    key.
    """

    def __init__(self, store: CheckpointStore, retention: Retention) -> None:
        self._store = store
        self._objects = store.objects
        self._catalog: Catalog = store.catalog
        self._retention = retention
        self._read: dict[str, Manifest | CheckpointCorrupt] = {}

    def run(self, *, dry_run: bool = False, drop_corrupt: bool = False) -> Collected:
        """Collects once and returns a report.

        Args:
            drop_corrupt: delete manifests that cannot be read; otherwise they are kept, and no blob is deleted.
        """
        self._store.check()
        now_us = self._now_us()
        report = Collected(dry_run)
        if not dry_run:  # before manifests are read: a process wrongly considered dead sees that its lease is gone
            self._tidy(now_us)
        blobs = {stored.name[len(BLOBS) + 1 :]: stored.size for stored in self._store.blobs()}
        checkpoints = self._catalog.checkpoints()
        self._read_all(checkpoints)
        report.incomplete = [found.name for found in checkpoints if not self._has_blobs(found, blobs)]
        dropped = self._dropped(checkpoints, report.incomplete, now_us, drop_corrupt)
        gone = {found.name for found in dropped}
        for found in dropped:
            if not dry_run:
                self._objects.delete(found.name)
                self._read.pop(found.name, None)  # a manifest with this name is another one from now on
        report.incomplete = [name for name in report.incomplete if name not in gone]
        report.checkpoints_dropped = len(dropped)
        report.checkpoints_kept = len(checkpoints) - len(dropped)
        kept = [found for found in checkpoints if found.name not in gone] + self._catalog.savepoints()
        self._read_all(kept)
        self._sweep(blobs, kept, gone if dry_run else (), report)
        return report

    def _now_us(self) -> int:
        """Returns the time of the store's clock. A full store, which takes no probe, is collected as of its newest
        checkpoint: at an earlier time less has expired. The manifests that are dropped make room for the mark."""
        try:
            return self._objects.now_us()
        except Unavailable as error:
            if not is_full(error.__cause__):
                raise
            return max((found.modified_us for found in self._catalog.checkpoints()), default=0)

    def _condemn(self, mark: str, blobs: Iterable[str]) -> None:
        try:
            self._objects.create_own(mark, json.dumps(sorted(blobs)).encode())
        except Unavailable as error:
            if not is_full(error.__cause__):
                raise
            raise Unavailable(
                "the checkpoint store has no room for the list of the blobs that are to be deleted",
                remedy="free a little space there, delete a savepoint or keep fewer checkpoints, then collect again",
                url=self._store.url,
            ) from error

    def _has_blobs(self, found: Found, blobs: Mapping[str, int]) -> bool:
        """Returns whether all blobs of a checkpoint are there.

        Blobs of a checkpoint that was published after the listing are looked up one by one.
        """
        manifest = self._read.get(found.name)
        if not isinstance(manifest, Manifest):
            return True  # unreadable manifests are reported as such
        return all(file.blob in blobs or self._objects.stat(f"{BLOBS}/{file.blob}") for file in manifest.files)

    def _dropped(
        self, checkpoints: list[Found], incomplete: Collection[str], now_us: int, drop_corrupt: bool
    ) -> list[Found]:
        readable = {name for name, outcome in self._read.items() if isinstance(outcome, Manifest)}
        whole = readable - set(incomplete)
        by_partition: dict[Any, list[Found]] = {}
        for found in checkpoints:
            by_partition.setdefault(found.partition, []).append(found)
        dropped = []
        for group in by_partition.values():
            mine = to_drop(group, whole, self._retention, now_us)
            if drop_corrupt:
                mine += [found for found in group if found.name not in readable and found not in mine]
            dropped += mine
        return dropped

    def _sweep(self, blobs: dict[str, int], kept: list[Found], passed_over: Collection[str], report: Collected) -> None:
        """Condemns unreferenced blobs, then deletes those that are still neither referenced nor leased.

        Args:
            passed_over: names of manifests to ignore. In a dry run, these are the manifests that would be dropped.
                Otherwise it is empty: dropped manifests are deleted by then, so a manifest with such a name was
                published afterwards.
        """
        began = self._store.clock.monotonic()
        condemned = to_sweep(blobs, self._referenced(kept), self._catalog.marks(INTENTS))
        mark = f"{CONDEMNED}/{uuid.uuid4().hex}.json"
        if condemned and not report.dry_run:
            self._condemn(mark, condemned)
        deleting = False
        try:
            leases = self._catalog.marks(INTENTS)
            kept = [found for found in self._catalog.checkpoints() if found.name not in passed_over]
            kept += self._catalog.savepoints()
            self._read_all(kept)
            report.unreadable = sorted(f.name for f in kept if isinstance(self._read.get(f.name), CheckpointCorrupt))
            swept = None if condemned is None else to_sweep(condemned, self._referenced(kept), leases)
            if report.unreadable:
                report.held_up = (
                    "some manifests cannot be read, so their blobs are unknown: such manifests are dropped once newer "
                    "checkpoints replace them, or at once with --drop-corrupt"
                )
            elif swept is None:
                report.held_up = "the lease of an upload or restore is torn: it expires a day after it was written"
            else:
                self._store.check()  # the store was not replaced since it was listed
                for name, size in swept.items():
                    if not report.dry_run:
                        self._check_stands(mark, began)
                        deleting = True
                        self._objects.delete(f"{BLOBS}/{name}")
                        deleting = False
                    report.blobs_deleted += 1
                    report.bytes_deleted += size
            report.blobs_kept = len(blobs) - report.blobs_deleted
        finally:
            # a delete without an answer may be carried out later: its blob stays condemned until the mark is removed
            if condemned and not report.dry_run and not deleting:
                self._objects.delete(mark)

    def _check_stands(self, mark: str, began: float) -> None:
        """Checks that the collection's mark still exists, and that the collection has not run for half a day. Raises
        Unavailable.

        Without the mark, uploads would rely on blobs that the collection is about to delete. Another collection removes
        the mark if this process was suspended for a day, or if the store's clock jumped a day ahead.
        """
        if self._store.clock.monotonic() - began > MARK_LIFE_S / 2:
            raise Unavailable("the collection took too long", remedy="start it again", url=self._store.url)
        if self._objects.stat(mark) is None:
            raise Unavailable(
                "another garbage collection took this one for dead", remedy="start it again", url=self._store.url
            )

    def _referenced(self, found: Iterable[Found]) -> set[str]:
        manifests = (self._read.get(each.name) for each in found)
        return {file.blob for manifest in manifests if isinstance(manifest, Manifest) for file in manifest.files}

    def _read_all(self, found: Iterable[Found]) -> None:
        """Reads the manifests that were not read yet. An unreadable one is read again each time, because the store may
        have been at fault."""
        for each in found:
            if isinstance(self._read.get(each.name), Manifest):
                continue
            try:
                self._read[each.name] = self._catalog.read(each)
            except CheckpointCorrupt as error:
                self._read[each.name] = error
            except FileNotFoundError:
                self._read.pop(each.name, None)

    def _tidy(self, now_us: int) -> None:
        """Deletes marks and temporary files of processes that died midway."""
        for folder in (INTENTS, CONDEMNED):
            for mark in self._catalog.marks(folder):
                if is_dead(mark, now_us):
                    self._objects.delete(mark.name)
        for stored in self._objects.list(TEMPORARY):
            if now_us - stored.modified_us > MARK_LIFE_S * 1e6:
                self._objects.delete(stored.name)


def collect(
    store: CheckpointStore, retention: Retention, *, dry_run: bool = False, drop_corrupt: bool = False
) -> Collected:
    return Collector(store, retention).run(dry_run=dry_run, drop_corrupt=drop_corrupt)
