"""Bytes of rows that cannot be applied yet: of slices that are not whole, or ahead of their partition. Sans-io."""

from __future__ import annotations

from stateflow.errors import InvalidArgument, Unavailable


class Waiting:
    """Limit on the bytes of rows that wait.

    Args:
        bytes_max: of all callers; one caller may have half of it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0

    def admit(self, more: int, has: int, source: str) -> None:
        """Lets ``more`` bytes wait, of a caller that ``has`` some waiting already.

        Raises InvalidArgument for more than one caller may have, Unavailable when all callers together have too many.
        """
        if has + more > self._bytes_max // 2:
            raise InvalidArgument(
                f"more than {self._bytes_max // 2} bytes of one batch's rows would be buffered here",
                remedy="send smaller batches, or raise STATEFLOW_REPLICA_WAITING_BYTES_MAX",
                source=source,
            )
        if self.bytes + more > self._bytes_max:
            raise Unavailable(
                f"{self.bytes} bytes of incomplete batches are buffered here already",
                remedy="check the senders, or raise STATEFLOW_REPLICA_WAITING_BYTES_MAX; the request is retried",
            )
        self.bytes += more

    def let_go(self, fewer: int) -> None:
        self.bytes -= fewer
