"""Commands on checkpoints. ``stateflow checkpoint`` takes, lists, verifies and restores checkpoints, and deletes old
ones. ``stateflow savepoint`` manages checkpoints with a name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from stateflow.checkpoint import CheckpointStore, Codec, Manifest, Retention, SiteCache
from stateflow.checkpoint import collect as collect_store
from stateflow.checkpoint.codec import configured_key
from stateflow.cli.cluster import NodeLimit, Site, follow_sweep
from stateflow.cli.group import Commands
from stateflow.cli.output import (
    LOCAL,
    Checkpoints,
    Controller,
    Json,
    console,
    emit,
    one_by_one,
    position,
    savepoint_of,
    seconds,
    shown_time,
    size,
    waiting,
)
from stateflow.client import CheckpointReport, Cluster, RestoredPartition
from stateflow.client.commands import partition_numbers
from stateflow.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    CheckpointNewer,
    StateflowError,
    Unavailable,
    WrongKey,
)
from stateflow.partition.checkpoints import Verified, without_checkpoint
from stateflow.partition.checkpoints import drop_damaged as drop_still_damaged
from stateflow.partition.checkpoints import verify as verify_manifest
from stateflow.partition.layout import BATCH_RUN, REAL_TIME
from stateflow.partition.positions import RESERVED
from stateflow.private import masked, url_of
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, check_name, ranges

app = Commands()


log = logging.getLogger(__name__)
checkpoint_commands = Commands("checkpoint", help="Take, list, verify, restore and collect checkpoints.")
app.add_typer(checkpoint_commands)
Operator = Annotated[str | None, typer.Argument(help="Only this operator.")]


def store_for_replica(url: str, settings: ReplicaSettings, cache: Path | None) -> CheckpointStore:
    """Opens a replica's checkpoint store.

    Raises InvalidArgument if the URL cannot be that of a store, and ExtraMissing if the package for the URL's protocol
    is not installed.

    Args:
        cache: directory of the site's checkpoint cache; None: no cache.
    """
    return CheckpointStore(
        url,
        codec=Codec(settings.checkpoint_compression, configured_key()),
        cache=SiteCache(cache, settings.checkpoint_cache_bytes) if cache is not None else None,
        timeout_s=settings.checkpoint_timeout_s,
    )


def try_out(store: CheckpointStore) -> None:
    """Checks whether a store can be written. Raises InvalidArgument if it never can.

    If the store cannot be reached now, the error is only logged, because the replica can serve without the store.
    """
    try:
        store.check_writable()
    except Unavailable as error:
        log.error("the checkpoint store cannot be written now; the replica serves without it: %s", error)


def opened(url: str) -> CheckpointStore:
    """Opens an existing store. Raises CheckpointStoreMissing."""
    store = CheckpointStore(url_of(url), create=False)
    store.check()
    return store


@checkpoint_commands.command()
def init(url: Checkpoints, as_json: Json = False) -> None:
    """Create a checkpoint store, or show the id of an existing one. A replica that has used no store before creates its
    store by itself."""
    id_ = CheckpointStore(url_of(url)).check(first_use=True)
    if as_json:
        emit({"id": id_, "url": masked(url)})
    else:
        console.print(Text.assemble("checkpoint store ", (id_, "bold"), f" in {masked(url)}"))


# -- taking ---------------------------------------------------------------------------------------------------


@checkpoint_commands.command()
def now(operator: Operator = None, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Take a checkpoint of every partition, and wait until all are complete."""
    with waiting("taking checkpoints", as_json=as_json):
        taken = Cluster(controller).checkpoint(operator or "")
    show_taken(taken, as_json)


@checkpoint_commands.command("all")
def all_(
    operator: Operator = None,
    site: Site = "",
    limit: NodeLimit = 1,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Take a checkpoint of every partition, node by node. Another controller continues if the leader fails."""
    follow_sweep(Cluster(controller).checkpoint_all(operator or "", site=site, limit=limit), as_json)


def show_taken(taken: CheckpointReport, as_json: bool, **more: str) -> None:
    if as_json:
        emit({**taken.to_dict(), **more})
    else:
        console.print(
            f"{taken.partitions} partitions in {taken.duration_s:.2f} s: {size(taken.bytes_new)} new of "
            f"{size(taken.bytes_total)}, in {taken.url}"
        )


# -- looking --------------------------------------------------------------------------------------------------


@checkpoint_commands.command("list")
def list_(
    url: Checkpoints,
    operator: Operator = None,
    every: Annotated[
        bool, typer.Option("--all", help="List all checkpoints, not only the newest of each partition.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a store."""
    store = opened(url)
    manifests, errors = _read(store, operator, every)
    if as_json:
        emit({"checkpoints": [_described(m) for m in manifests], "unreadable": [error.to_wire() for error in errors]})
    else:
        console.print(_table_of(manifests))
        for error in errors:
            console.print(Text(str(error), "red"))
    if errors:
        raise typer.Exit(1)


def _read(store: CheckpointStore, operator: str | None, every: bool) -> tuple[list[Manifest], list[StateflowError]]:
    """Returns (manifests of a store, errors). Each partition's manifests are newest first.

    There is an error for each manifest that cannot be read, and for each partition without a manifest.

    Args:
        every: True reads all manifests; False only the newest of each partition.
    """
    partitions = {each.partition for each in store.catalog.checkpoints() if operator in (None, each.partition.operator)}
    if not partitions:
        raise CheckpointMissing(
            f"there is no checkpoint of {operator!r}" if operator else "there is no checkpoint",
            remedy="take one with `stateflow checkpoint now`",
            url=store.url,
        )
    manifests: list[Manifest] = []
    errors: list[StateflowError] = []
    for partition in sorted(partitions):
        try:
            for manifest in store.newest(partition, errors):
                manifests.append(manifest)
                if not every:
                    break
        except (CheckpointNewer, WrongKey) as error:  # older checkpoints of this partition are not considered
            errors.append(error)
    counts = {manifest.operator: manifest.partitions for manifest in reversed(manifests)}
    every_one = {PartitionId(name, number) for name, count in counts.items() for number in range(count)}
    errors += [without_checkpoint(partition) for partition in sorted(every_one - partitions)]
    return manifests, errors


def _of_savepoint(
    store: CheckpointStore, savepoint: str, operator: str | None
) -> tuple[list[Manifest], list[StateflowError]]:
    try:
        return store.savepoint(savepoint, operator), []
    except (CheckpointCorrupt, WrongKey) as error:  # the other partitions are still verified
        manifests: list[Manifest] = []
        errors: list[StateflowError] = []
        for found in store.catalog.savepoints(savepoint):
            if operator in (None, found.partition.operator):
                try:
                    manifests.append(store.catalog.read(found))
                except (CheckpointCorrupt, CheckpointNewer, WrongKey) as damage:
                    errors.append(damage)
        return manifests, errors or [error]


def _described(m: Manifest) -> dict[str, Any]:
    return {
        "operator": m.operator,
        "partition": m.partition,
        "epoch": m.epoch,
        "sequence": m.sequence,
        "positions": m.positions,
        "watermark_us": m.watermark_us,
        "bytes": m.size,
        "files": len(m.files),
        "created_us": m.created_us,
        "replica": m.replica,
        "state_digest": m.state_digest,
    }


def columns(*names: str) -> Table:
    from rich import box

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        number = name in ("partition", "epoch", "sequence", "size", "entries", "savepoints", "partitions")
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
    return table


def _table_of(manifests: Iterable[Manifest]) -> Table:
    table = columns("operator", "partition", "epoch", "sequence", "positions", "watermark", "size", "taken", "by")
    for m in manifests:
        table.add_row(
            m.operator,
            str(m.partition),
            str(m.epoch),
            str(m.sequence),
            _positions(m.positions),
            shown_time(m.watermark_us),
            size(m.size),
            shown_time(m.created_us),
            m.replica,
        )
    return table


def _positions(positions: dict[str, int]) -> str:
    return " ".join(f"{source}={batch}" for source, batch in sorted(positions.items()))


@checkpoint_commands.command()
def verify(
    url: Checkpoints,
    operator: Operator = None,
    every: Annotated[
        bool, typer.Option("--all", help="Verify all checkpoints, not only the newest of each partition.")
    ] = False,
    savepoint: Annotated[str | None, typer.Option(help="Verify the checkpoints of this savepoint.")] = None,
    drop_damaged: Annotated[
        bool,
        typer.Option("--drop-damaged", help="Delete damaged blobs; the next checkpoint uploads them again."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Read every blob and check its hash; then open the state, recompute its digest, and check every cell. The
    operator's code is not needed."""
    name = savepoint_of(savepoint)
    store = opened(url)
    errors: list[StateflowError] = []
    if name:
        manifests, errors = _of_savepoint(store, name, operator)
    else:
        manifests, errors = _read(store, operator, every)
    found = [verify_manifest(store, manifest) for manifest in one_by_one("reading", manifests, as_json=as_json)]
    damaged = sorted({blob for each in found for blob in each.damaged})
    dropped = drop_still_damaged(store, manifests, damaged) if drop_damaged else []
    bad = [each for each in found if each.error]
    if as_json:
        emit(
            {
                "checkpoints": [each.to_dict() for each in found],
                "unreadable": [error.to_wire() for error in errors],
                "damaged_blobs": damaged,
                "dropped_blobs": dropped,
                "sound": not bad and not errors,
            }
        )
    else:
        console.print(_verified(found))
        for line in [*(each.error for each in bad), *map(str, errors)]:
            console.print(Text(line, "red"))
    if bad or errors:
        raise typer.Exit(1)


def _verified(found: Iterable[Verified]) -> Table:
    table = columns("operator", "partition", "epoch", "sequence", "size", "blobs", "state", "entries")
    for each in found:
        if each.error:
            state = Text("FAILED", "bold red")
        else:
            state = Text("digest verified" if each.proved else "opened, no digest to compare", "green")
        counts = {"damaged": len(each.damaged), "missing": len(each.missing)}
        wrong = [f"{count} {what}" for what, count in counts.items() if count]
        table.add_row(
            each.operator,
            str(each.partition),
            str(each.epoch),
            str(each.sequence),
            size(each.bytes),
            Text(", ".join(wrong), "bold red") if wrong else Text("verified", "green"),
            state,
            "not opened" if each.entries is None else str(each.entries),
        )
    return table


# -- restoring ------------------------------------------------------------------------------------------------


CLIENTS_GO_ON = (
    "running stream clients, including those that started after the checkpoint, resend the batches that they keep, "
    "which undoes the restore; restore with --stop-sources to refuse them"
)
CLIENTS_STOPPED = (
    "stream clients that have sent so far are refused (source_taken); a client started anew continues after the "
    "checkpoint"
)


@checkpoint_commands.command()
def restore(
    operator: Annotated[str, typer.Argument(help="Deployed operator, or all.")],
    partition: Annotated[list[str] | None, typer.Argument(help="Partitions, e.g. 3 5-9; default: all.")] = None,
    to: Annotated[str, typer.Option("--to", help="Target site or replica; default: where each partition is.")] = "",
    url: Annotated[str, typer.Option("--from", help="Checkpoint store to read from; default: the replicas' own.")] = "",
    savepoint: Annotated[str | None, typer.Option(help="Savepoint to restore; default: the newest checkpoint.")] = None,
    at: Annotated[
        str, typer.Option(help="SOURCE=BATCH: restore the newest checkpoint that ends with exactly this batch.")
    ] = "",
    stop_sources: Annotated[
        bool,
        typer.Option(
            "--stop-sources", help="Refuse clients that have sent so far; otherwise they resend lost batches."
        ),
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Restore partitions from a checkpoint. Batches that were applied after the checkpoint are lost, until their
    sources send them again."""
    kept = savepoint_of(savepoint)
    cluster = Cluster(controller)
    names = [each.name for each in cluster.status().operators] if operator == "all" else [operator]
    exact = position(at) if at else None
    reports: list[tuple[str, RestoredPartition]] = []
    refused: list[tuple[str, StateflowError]] = []
    for name in names:
        numbers = partition_numbers(" ".join(partition), cluster.operator(name).partitions) if partition else []
        try:
            with waiting(f"restoring {name}", as_json=as_json):
                done = cluster.restore(
                    name, numbers, to=to, url=url, savepoint=kept, at=exact, stop_sources=stop_sources
                )
        except StateflowError as error:
            if len(names) == 1:
                raise
            refused.append((name, error))  # the restored operators are still shown
            continue
        reports += [(name, each) for each in done]
    failed = [(name, each) for name, each in reports if each.error]
    rewinds = _rewinds(reports)
    if as_json:
        partitions = [
            {
                "operator": name,
                "partition": each.partition,
                "replica": each.replica,
                "epoch": each.epoch,
                "sequence": each.sequence,
                "positions": each.positions,
                "bytes": each.bytes,
                "passed_over": list(each.passed_over),
                "error": each.error,
            }
            for name, each in reports
        ]
        told = [{"operator": name, **why.to_wire()} for name, why in refused]
        emit({"partitions": partitions, "sources": rewinds, "refused": told})
    else:
        _show_restored(reports, rewinds)
        if any(not each.error for _, each in reports):
            console.print(CLIENTS_STOPPED if stop_sources else CLIENTS_GO_ON)
        for name, why in refused:
            console.print(Text(f"{name} was not restored: {why}", "red"))
    if failed or refused or not reports:
        raise typer.Exit(1)


def _rewinds(reports: Iterable[tuple[str, RestoredPartition]]) -> list[dict[str, Any]]:
    """Returns a dictionary for each operator and source. It says which batch the source must send next.

    ``agree`` is True if all restored partitions contain the source's batches up to the same number. ``then`` is the
    text of :func:`_then`.
    """
    batches: dict[tuple[str, str], list[int]] = {}
    for name, each in reports:
        for source, batch in each.positions.items():
            if source.startswith(RESERVED):
                continue
            batches.setdefault((name, source), []).append(batch)
    return [
        {
            "operator": name,
            "source": source,
            "next_batch": min(found) + 1,
            "agree": min(found) == max(found),
            "then": _then(source, min(found) + 1),
        }
        for (name, source), found in sorted(batches.items())
    ]


def _then(source: str, next_batch: int) -> str:
    """Returns a sentence that says what the user must do for a Spark source; empty for a stream client."""
    if source.startswith(BATCH_RUN):
        return "a run under way is refused; to apply its frame again, use another source="
    if source.startswith(("query:", REAL_TIME)):
        return f"refused (position_gap) until `stateflow spark rewind CHECKPOINT_LOCATION --to-batch {next_batch}`"
    return ""


def _show_restored(reports: list[tuple[str, RestoredPartition]], rewinds: list[dict[str, Any]]) -> None:
    table = columns("operator", "partition", "replica", "epoch", "sequence", "positions", "size", "outcome")
    for name, each in reports:
        outcome = Text("FAILED", "bold red") if each.error else Text("restored", "green")
        table.add_row(
            name,
            str(each.partition),
            each.replica,
            str(each.epoch),
            str(each.sequence),
            _positions(each.positions),
            size(each.bytes),
            outcome,
        )
    console.print(table)
    for name, each in reports:
        for line in each.passed_over:
            console.print(Text(f"{name}/{each.partition} skipped a newer checkpoint: {line}", "bold red"))
    for where, error in _failures(reports):
        console.print(Text(f"{where}: {error}", "red"))
    for rewind in rewinds:
        goes_on = f"source {rewind['source']} continues with batch {rewind['next_batch']}"
        console.print(goes_on, rewind["then"], sep=": " if rewind["then"] else "", highlight=False, markup=False)
        if not rewind["agree"] and rewind["then"]:  # a stream client sends each partition the batches that it lacks
            console.print(
                Text(
                    f"partitions of {rewind['operator']} contain different batches of this source: restore all of them "
                    f"with --at {rewind['source']}=BATCH, or to a savepoint taken while the source was idle",
                    "bold red",
                )
            )


def _failures(reports: Iterable[tuple[str, RestoredPartition]]) -> list[tuple[str, str]]:
    """Returns (operator/partitions, error) for each failure. Partitions of an operator that failed with the same error
    share one entry."""
    alike: dict[tuple[str, str, str], list[RestoredPartition]] = {}
    for name, each in reports:
        if each.fault is not None:
            alike.setdefault((name, each.fault.code, each.fault.what), []).append(each)
    found = []
    for (name, code, what), several in alike.items():
        fault, numbers = several[0].fault, ranges([each.partition for each in several])
        assert fault is not None
        error = str(fault) if len(several) == 1 else f"{code}: {what}: {fault.remedy}"
        found.append((f"{name}/{numbers}", error))
    return found


# -- collecting -----------------------------------------------------------------------------------------------


@checkpoint_commands.command()
def gc(
    url: Checkpoints,
    keep: Annotated[int, typer.Option(help="Number of newest checkpoints to keep of each partition.")] = 3,
    keep_for: Annotated[str, typer.Option(help="Keep all checkpoints younger than this, e.g. 12h or 7d.")] = "0s",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    drop_corrupt: Annotated[
        bool, typer.Option("--drop-corrupt", help="Delete unreadable manifests and their blobs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete old checkpoints, and blobs that no checkpoint needs. Replicas may upload at the same time."""
    retention = Retention(keep, seconds(keep_for))
    with waiting("reading every checkpoint", as_json=as_json):
        report = collect_store(opened(url), retention, dry_run=dry_run, drop_corrupt=drop_corrupt)
    if as_json:
        emit(report.to_dict())
        return
    would = "would be deleted" if dry_run else "deleted"
    console.print(
        f"{report.checkpoints_dropped} checkpoints {would}, {report.checkpoints_kept} kept; {report.blobs_deleted} "
        f"blobs {would} ({size(report.bytes_deleted)}), {report.blobs_kept} kept"
    )
    for name in report.incomplete:
        console.print(Text(f"{name} refers to missing blobs: see `stateflow checkpoint verify`", "bold red"))
    if report.held_up:
        console.print(Text(f"no blob was deleted: {report.held_up}", "bold red"))
    for name in report.unreadable:
        console.print(Text(f"unreadable: {name}", "red"))


savepoint_commands = Commands("savepoint", help="Named checkpoints, kept until they are deleted.")
app.add_typer(savepoint_commands)
Savepoint = Annotated[str, typer.Argument(help="Name of the savepoint.")]


@savepoint_commands.command()
def create(name: Savepoint, operator: Operator = None, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Take a checkpoint of every partition and keep it under a name."""
    with waiting(f"taking {name}", as_json=as_json):
        taken = Cluster(controller).savepoint(name, operator or "")
    show_taken(taken, as_json, savepoint=name)


@savepoint_commands.command("list")
def list_savepoints(url: Checkpoints, as_json: Json = False) -> None:
    """List the savepoints of a store."""
    found = opened(url).savepoints()
    if as_json:
        emit({"savepoints": {name: [str(each) for each in partitions] for name, partitions in found.items()}})
        return
    table = columns("savepoint", "operator", "partitions")
    for name, partitions in found.items():
        for operator in sorted({each.operator for each in partitions}):
            table.add_row(name, operator, str(sum(each.operator == operator for each in partitions)))
    console.print(table)


@savepoint_commands.command()
def export(
    name: Savepoint,
    url: Checkpoints,
    to: Annotated[str, typer.Option("--to", help="Directory or fsspec URL of the other store.")],
    as_json: Json = False,
) -> None:
    """Copy a complete savepoint into another store, for another cluster or for long-term storage."""
    check_name("savepoint", name)
    source, target = opened(url), CheckpointStore(to)
    target.check_writable()
    with waiting(f"copying {name}", as_json=as_json):
        copied = source.export(name, target)
    if as_json:
        emit({"savepoint": name, "bytes_copied": copied, "url": target.url})
    else:
        console.print(Text.assemble((name, "bold"), f": {size(copied)} copied to {target.url}"))


@savepoint_commands.command()
def delete(name: Savepoint, url: Checkpoints, as_json: Json = False) -> None:
    """Delete a savepoint; the next `stateflow checkpoint gc` deletes its blobs."""
    partitions = opened(url).delete_savepoint(name)
    if as_json:
        emit({"savepoint": name, "partitions": partitions})
    else:
        console.print(Text.assemble((name, "bold"), f" deleted ({partitions} partitions)"))
