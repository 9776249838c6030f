"""A batch's rows on their way to a replica, as one call of its stream, and the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TypeAlias

from stateflow.errors import StateflowError, Unavailable
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.rows import BatchRows
from stateflow.rpc.wire import answered, error_of, pieces, session_to_pb
from stateflow.runtime.layout import UNKNOWN_ATTEMPT
from stateflow.runtime.positions import Batch


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one partition; see :class:`~stateflow.runtime.host.Applied`."""

    output: bytes
    replayed: bool
    operator_us: int
    commit_us: int


#: answer of a partition that has no rows of the batch, and nothing due
PASSED = Answer(b"", False, 0, 0)
#: (partition, its answer or the error in its place)
Answers: TypeAlias = list[tuple[int, Answer | StateflowError]]


def requests_of(
    operator: str,
    batch: Batch,
    rows: BatchRows,
    parts: Iterable[tuple[int, int]],
    chunk_bytes: int,
    after: Mapping[int, int] | None = None,
) -> Iterator[rpb.ApplyRequest]:
    """Packs a batch into as few messages as the limit allows.

    Args:
        parts: (partition, epoch) of some of ``rows``.
        after: see :class:`~stateflow.client.delivery.Deliver`.
    """
    request = rpb.ApplyRequest(header=header_of(operator, batch, rows.schema))
    epochs = dict(parts)
    before: rpb.ApplyRequest | None = None
    for frame in rows.only(epochs).frames(chunk_bytes):
        request.partitions.extend(frame.partitions)
        request.epochs.extend([epochs[partition] for partition in frame.partitions])
        request.counts.extend(frame.counts)
        if after:
            request.afters.extend([after.get(partition, -1) for partition in frame.partitions])
        request.digests.extend(frame.digests)
        for piece, last in pieces(frame.message, chunk_bytes):
            if before is not None:
                yield before
            request.rows, request.more = piece, not last
            before, request = request, rpb.ApplyRequest()
    if before is None:
        before = request
    before.last = True
    yield before


def header_of(operator: str, batch: Batch, schema: bytes) -> rpb.ApplyHeader:
    return rpb.ApplyHeader(
        operator=operator,
        source=batch.source,
        batch=batch.number,
        input_schema=schema,
        sparse=batch.sparse,
        watermark_us=batch.watermark_us,
        attempt=None if batch.attempt == UNKNOWN_ATTEMPT else rpb.Attempt(**asdict(batch.attempt)),
        event_us=batch.event_us,
        rewind=batch.rewind,
        session=None if batch.session is None else session_to_pb(batch.session),
        known=batch.known,
        site=batch.site,
        site_column=batch.site_column,
        traceparent=batch.traceparent,
    )


class Replies:
    """Joins answers that come in pieces, and reports each partition of a call once.

    Args:
        tell: called as answers come, in the stream's thread.
    """

    def __init__(self, address: str, partitions: Iterable[int], tell: Callable[[Answers], None]) -> None:
        self._address, self._tell = address, tell
        self._begun: dict[int, list[bytes]] = {partition: [] for partition in partitions}

    def came(self, response: rpb.ApplyResponse) -> None:
        try:
            answered(response, self._address)
        except Unavailable as error:
            self.broke(error)
            return
        begun_of = self._begun
        found: Answers = [(number, PASSED) for number in response.passed if begun_of.pop(number, None) is not None]
        for result in response.results:
            begun = self._begun.get(result.partition)
            if begun is None:
                continue
            if result.HasField("fault"):
                found.append((result.partition, error_of(result.fault)))
            elif not result.last:
                begun.append(result.output)
                continue
            else:
                output = b"".join([*begun, result.output]) if begun else result.output
                answer = Answer(output, result.replayed, result.operator_us, result.commit_us)
                found.append((result.partition, answer))
            del self._begun[result.partition]
        if found:
            self._tell(found)
        if response.HasField("fault"):
            self.broke(error_of(response.fault))
        elif response.last:
            what = f"{self._address} ended the call without an answer"
            self.broke(Unavailable(what, remedy="see its log; the batch is sent again"))

    def broke(self, error: StateflowError) -> None:
        left, self._begun = list(self._begun), {}
        if left:
            self._tell([(partition, error) for partition in left])
