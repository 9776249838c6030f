"""Stages of Spark pipelines, recorded by themselves: of streaming queries by a listener, of batch pipelines by a shell.

``record_queries(spark, manager)`` records each micro-batch of each streaming query of a session as one stage. Its
``state_id`` is made of the query's id and the batch's, so that a batch that is replayed after a restart from its
checkpoint is the same stage again, not a second one.

``run_stage`` runs one batch pipeline, from a source to a sink: recorded before and after each step, not run again once
it was done, and after a crash run again from its last success.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from stateflow.errors import StateflowError
from stateflow.ledger import StateManager
from stateflow.ledger.stages import Action, Status, answer, is_done

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryListener

log = logging.getLogger(__name__)
TEXT_MAX = 255


@dataclass(frozen=True, slots=True)
class End:
    """A source or a sink."""

    name: str
    type: str | None = None
    entity: str | None = None
    filter: str | None = None


# -- streaming ------------------------------------------------------------------------------------------------


def record_queries(spark: SparkSession, manager: StateManager, *, job_id: str | None = None) -> StreamingQueryListener:
    """From now on each micro-batch with rows, and each failure, of the session's queries is a stage.

    Args:
        job_id: of every query; by default the query's name, else its id.

    Returns the listener, which ``spark.streams.removeListener`` takes. Two of them are as good as one: a stage that is
    there is left as it is. What cannot be recorded is logged: a ledger that is away never stops a query.
    """
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class Recorder(StreamingQueryListener):
        def __init__(self) -> None:
            self.names: dict[str, str] = {}  # by run id; a termination does not say its query's name

        def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
            self.names[str(event.runId)] = job_id or event.name or str(event.id)

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            if event.progress.numInputRows:
                _logged(lambda: _record_batch(manager, event.progress, job_id))

        def onQueryIdle(self, event: Any) -> None:  # noqa: N802
            pass

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            name = self.names.pop(str(event.runId), job_id or str(event.id))
            if event.exception:
                _logged(lambda: _record_failure(manager, event, name))

    listener = Recorder()
    spark.streams.addListener(listener)
    return listener


def _logged(record: Callable[[], None]) -> None:
    try:
        record()
    except StateflowError as error:
        log.error("a stage was not recorded: %s", error)


def batch_state_id(query_id: str, batch_id: int) -> str:
    return f"query/{query_id}/{batch_id}"


def _record_batch(manager: StateManager, progress: Any, job_id: str | None) -> None:
    state_id = batch_state_id(str(progress.id), progress.batchId)
    if manager.ledger.item(state_id) is not None:  # replayed
        return
    started = datetime.fromisoformat(progress.timestamp.replace("Z", "+00:00"))
    took = progress.durationMs
    pulled = started + timedelta(milliseconds=took.get("latestOffset", 0) + took.get("getBatch", 0))
    ended = started + timedelta(milliseconds=took.get("triggerExecution", 0))
    sources = list(progress.sources)
    before = batch_state_id(str(progress.id), progress.batchId - 1)
    manager.insert_state(
        state_id=state_id,
        run_id=str(progress.runId),
        job_id=(job_id or progress.name or str(progress.id))[:TEXT_MAX],
        correlation_id_in=before if manager.ledger.item(before) is not None else None,
        correlation_id_out=state_id,
        action=Action.POST_PUSH,
        status=Status.SUCCESS,
        source_name=", ".join(source.description for source in sources) or None,
        sink_name=progress.sink.description,
        first_record_pulled=_joined(source.startOffset for source in sources),
        last_record_pulled=_joined(source.endOffset for source in sources),
        sourcing_start_time=started,
        sourcing_end_time=pulled,
        sinking_start_time=pulled,
        sinking_end_time=ended,
        record_count=int(progress.numInputRows),
    )


def _joined(offsets: Any) -> str | None:
    return ", ".join(str(offset) for offset in offsets if offset is not None) or None


def _record_failure(manager: StateManager, event: Any, job: str) -> None:
    state_id = f"query/{event.id}/failure of {event.runId}"
    if manager.ledger.item(state_id) is not None:
        return
    manager.insert_state(
        state_id=state_id,
        run_id=str(event.runId),
        job_id=job[:TEXT_MAX],
        action=Action.PRE_PUSH,
        status=Status.FAILURE,
        manifest_name=str(event.exception).splitlines()[0][:2048] or None,
    )


# -- batch ----------------------------------------------------------------------------------------------------


def run_stage(
    manager: StateManager,
    job_id: str,
    *,
    source: End,
    sink: End,
    pull: Callable[[dict[str, Any] | None], DataFrame],
    push: Callable[[DataFrame], int | None],
) -> dict[str, Any]:
    """Pull from a source and push to a sink, once for this job, source and sink: done before, nothing is run.

    Args:
        pull: gets the last stage that pulled this entity and was pushed with success, or None; a DataFrame.
        push: writes it, so that writing it again does no harm (``mode("overwrite")``, a merge); may return the row
            count. A crash between the write and its record makes the next run push again.

    Returns the stage. What ``pull`` or ``push`` raises is recorded as a failure, and raised.
    """
    named = "\0".join(str(part) for part in (job_id, source, sink))
    state_id = f"run/{hashlib.sha256(named.encode()).hexdigest()}"
    known = manager.get_state(state_id)
    if known is not None and is_done(known):
        return answer(known)
    if known is not None:
        manager.update_state(state_id, action=Action.PRE_PULL, status=Status.IN_PROGRESS, sourcing_start_time=_now())
    else:
        manager.insert_state(
            state_id=state_id,
            job_id=job_id,
            source_name=source.name,
            source_type=source.type,
            source_entity=source.entity,
            source_filter=source.filter,
            sink_name=sink.name,
            sink_type=sink.type,
            sink_entity=sink.entity,
            sink_filter=sink.filter,
            sourcing_start_time=_now(),
        )
    try:
        frame = pull(manager.get_last_record(source.entity) if source.entity else None)
    except BaseException:
        manager.update_state(state_id, action=Action.POST_PULL, status=Status.FAILURE, sourcing_end_time=_now())
        raise
    manager.update_state(state_id, action=Action.POST_PULL, status=Status.SUCCESS, sourcing_end_time=_now())
    manager.update_state(state_id, action=Action.PRE_PUSH, status=Status.IN_PROGRESS, sinking_start_time=_now())
    try:
        count = push(frame)
    except BaseException:
        manager.update_state(state_id, action=Action.POST_PUSH, status=Status.FAILURE, sinking_end_time=_now())
        raise
    return manager.update_state(
        state_id, action=Action.POST_PUSH, status=Status.SUCCESS, sinking_end_time=_now(), record_count=count
    )


def _now() -> datetime:
    return datetime.now(UTC)
