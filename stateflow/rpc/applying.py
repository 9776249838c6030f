"""Serving Apply streams: rows in, committed outputs back; parts that come ahead of their partition are held."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc.aio

from stateflow.clock import Clock
from stateflow.errors import Moved, NotOwner, StandbyMissing, StateflowError
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import fault_of, pieces, unexpected
from stateflow.runtime.garbage import Garbage
from stateflow.runtime.host import Applied
from stateflow.runtime.layout import Attempt
from stateflow.runtime.positions import Batch
from stateflow.runtime.replica import ReplicaNode
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
SAMPLES_KEPT = 100_000
#: between portions of what a partition left in the cache, each about a millisecond
FREEING_REST_S = 0.02
_Outcome = Applied | ReplicaInfo | StateflowError | None


@dataclass(slots=True)
class _Part:
    partition: PartitionId
    epoch: int
    rows: bytes
    after: int | None = None


@dataclass(slots=True)
class _Call:
    """One Apply stream. ``buffers``: pieces of rows that are not complete yet."""

    batch: Batch
    schema: bytes
    buffers: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    rows: int = 0


class Applier:
    """Args:
    changed: an event that is set at the next change of a partition's lifecycle.
    ask: told of each partition that a batch waits for.
    garbage: collected between batches.
    """

    def __init__(
        self,
        node: ReplicaNode,
        clock: Clock,
        changed: Callable[[PartitionId], asyncio.Event],
        ask: Callable[[PartitionId], None],
        garbage: Garbage | None = None,
    ) -> None:
        self.node = node
        self.rows = 0
        self._clock = clock
        self._changed = changed
        self._ask = ask
        self._garbage = garbage
        self._batches = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._loop = asyncio.get_running_loop()
        self._samples: deque[rpb.RequestSample] = deque(maxlen=SAMPLES_KEPT)
        self._sample_number = 0

    async def run(self, requests: AsyncIterator[rpb.ApplyRequest], context: grpc.aio.ServicerContext) -> None:
        started = self._clock.monotonic()
        call: _Call | None = None
        operator = ""
        early: list[_Part] = []
        async for request in requests:
            if call is None:
                header = request.header
                operator = header.operator
                watermark_us = header.watermark_us if header.HasField("watermark_us") else None
                a = header.attempt
                attempt = Attempt(a.run, a.use, a.task, a.call)
                event_us = header.event_us if header.HasField("event_us") else None
                batch = Batch(
                    header.source, header.batch, header.sparse, watermark_us, attempt, event_us, header.rewind
                )
                call = _Call(batch, header.input_schema)
            parts = [
                _Part(PartitionId(operator, p.partition), p.epoch, r, p.after if p.HasField("after") else None)
                for p, r in _complete(call, request)
            ]
            early += await self._apply_all(call, parts, context)
        held_from = self._clock.monotonic()
        if call is not None and early:
            await self._apply_early(call, early, context)
        self._sample(operator, call, started, held_from if early else None)

    async def _apply_all(self, call: _Call, parts: list[_Part], context: grpc.aio.ServicerContext) -> list[_Part]:
        """Apply and answer; returns the parts whose partition is still on its way here."""
        if not parts:
            return []
        outcomes = await self._loop.run_in_executor(self._batches, self._apply_in_thread, call, parts)
        if self._garbage is not None and self._garbage.is_due():
            self._batches.submit(self._garbage.collect)
        early: list[_Part] = []
        results: list[rpb.PartitionResult] = []
        if self.node.settings.acknowledge == "standby":
            outcomes = await self._replicated(parts, outcomes)
        for part, outcome in zip(parts, outcomes, strict=True):
            if outcome is None:
                early.append(part)
            else:
                results += self._results(part, outcome)
                if isinstance(outcome, Applied):
                    call.rows += outcome.rows
        for response in _packed(results, self.node.settings.chunk_bytes):
            await context.write(response)
        return early

    async def _replicated(self, parts: list[_Part], outcomes: list[_Outcome]) -> list[_Outcome]:
        """When a standby has durably what was applied, or it is not said; a later attempt finds the batch applied."""
        deadline = self._clock.monotonic() + self.node.settings.hold_timeout_s
        said: list[_Outcome] = []
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, Applied):
                said.append(await self._replicated_one(part.partition, outcome, deadline))
            else:
                said.append(outcome)
        return said

    async def _replicated_one(
        self, partition: PartitionId, applied: Applied, deadline: float
    ) -> Applied | StateflowError:
        while True:
            event = self._changed(partition)
            if self.node.sender.confirmed(partition, applied.sequence):
                return applied
            try:
                await asyncio.wait_for(event.wait(), max(0.0, deadline - self._clock.monotonic()))
            except TimeoutError:
                return StandbyMissing(
                    f"no standby confirmed it within {self.node.settings.hold_timeout_s:g} s",
                    remedy="see that the operator has standbys and that they run; the batch is asked for again",
                    partition=partition,
                    sequence=applied.sequence,
                )

    def _apply_in_thread(self, call: _Call, parts: list[_Part]) -> list[_Outcome]:
        outcomes: list[_Outcome] = []
        for part in parts:
            try:
                outcomes.append(
                    self.node.apply(part.partition, part.epoch, call.batch, call.schema, part.rows, part.after)
                )
            except StateflowError as error:
                outcomes.append(error)
            except Exception as error:
                log.exception("batch %s failed on %s", call.batch, part.partition)
                outcomes.append(unexpected(error))
        return outcomes

    async def _apply_early(self, call: _Call, early: list[_Part], context: grpc.aio.ServicerContext) -> None:
        """Requests that came ahead of their partition: served as soon as it is here, else sent back."""
        deadline = self._clock.monotonic() + self.node.settings.hold_timeout_s
        for part in early:
            self._ask(part.partition)
        while early:
            events = [self._changed(part.partition) for part in early]
            early = await self._apply_all(call, early, context)
            left = deadline - self._clock.monotonic()
            if early and left <= 0:
                for part in early:
                    late = NotOwner("the partition did not arrive in time", remedy="refresh", partition=part.partition)
                    await context.write(rpb.ApplyResponse(results=self._results(part, late)))
                return
            if early:
                waits = [asyncio.ensure_future(event.wait()) for event in events]
                _, pending = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for wait in pending:
                    wait.cancel()

    def _results(self, part: _Part, outcome: Applied | ReplicaInfo | StateflowError) -> list[rpb.PartitionResult]:
        number = part.partition.partition
        if isinstance(outcome, Applied):
            results = [
                rpb.PartitionResult(partition=number, output=piece, last=last, replayed=outcome.replayed)
                for piece, last in pieces(outcome.output, self.node.settings.chunk_bytes)
            ]
            results[-1].operator_us, results[-1].commit_us = outcome.operator_us, outcome.commit_us
            return results
        if isinstance(outcome, ReplicaInfo):
            outcome = Moved(
                "the partition went to another replica",
                remedy="send it there",
                owner=outcome.name,
                site=outcome.site,
                address=outcome.address,
                epoch=self.node.lifecycle(part.partition).epoch,
            )
        return [rpb.PartitionResult(partition=number, last=True, fault=fault_of(outcome))]

    def _sample(self, operator: str, call: _Call | None, started: float, held_from: float | None) -> None:
        now = self._clock.monotonic()
        self._sample_number += 1
        rows = call.rows if call else 0
        self.rows += rows
        self._samples.append(
            rpb.RequestSample(
                number=self._sample_number,
                at_us=self._clock.now_us(),
                operator=operator,
                rows=rows,
                total_ms=(now - started) * 1e3,
                held_ms=0.0 if held_from is None else (now - held_from) * 1e3,
            )
        )

    async def free_caches(self) -> None:
        """Of partitions that went, portion by portion between batches, and not while their seal is on its way."""
        while self.node.cache.has_left:
            await asyncio.sleep(FREEING_REST_S)
            await self._loop.run_in_executor(self._batches, self.node.cache.free_some)

    def samples(self, after: int) -> list[rpb.RequestSample]:
        """What was served since sample number ``after``."""
        return [sample for sample in self._samples if sample.number > after]

    def close(self) -> None:
        self._batches.shutdown()


def _complete(call: _Call, request: rpb.ApplyRequest) -> Iterator[tuple[rpb.PartitionRows, bytes]]:
    for part in request.parts:
        if not part.last:
            call.buffers[part.partition].append(part.rows)
        elif part.partition in call.buffers:
            yield part, b"".join([*call.buffers.pop(part.partition), part.rows])
        else:
            yield part, part.rows


def _packed(results: list[rpb.PartitionResult], bytes_max: int) -> Iterator[rpb.ApplyResponse]:
    """Results in as few messages as the limit allows; order kept."""
    response, size = rpb.ApplyResponse(), 0
    for result in results:
        if size and size + len(result.output) > bytes_max:
            yield response
            response, size = rpb.ApplyResponse(), 0
        response.results.append(result)
        size += len(result.output) + 64
    if response.results:
        yield response
