"""Every error a user can meet, in one tree rooted in :class:`StateflowError`.

An error names a stable ``code``, what happened, where (operator, partition, replica, …) and what to do
next. ``str(error)`` is exactly the one line the command line prints::

    code: what happened (operator=Delay partition=3): what to do next

Errors cross processes as :meth:`StateflowError.to_wire` dictionaries and come back as the same class.
"""

from __future__ import annotations

from typing import Any, ClassVar


class StateflowError(Exception):
    """Root of the tree.

    Args:
        what: what happened, one sentence without a final full stop.
        remedy: what the reader should do next.
        where: facts that locate the error, printed as ``key=value``. A ``traceback`` among them is kept out of
            the one line; it is a note of the exception, so that Python shows it below its own traceback.
    """

    code: ClassVar[str] = "error"
    #: whether sending the same request again later can succeed without anybody mending anything
    retryable: ClassVar[bool] = False
    registry: ClassVar[dict[str, type[StateflowError]]] = {}

    def __init__(self, what: str, *, remedy: str = "", **where: Any) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.where = {key: value for key, value in where.items() if value is not None}
        if "traceback" in self.where:
            self.add_note(str(self.where["traceback"]))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = StateflowError.registry.setdefault(cls.code, cls)
        if known is not cls:
            raise TypeError(f"error code {cls.code!r} is taken by {known.__name__}")

    def __str__(self) -> str:
        place = " ".join(f"{key}={value}" for key, value in self.where.items() if key != "traceback")
        line = f"{self.code}: {self.what}"
        if place:
            line += f" ({place})"
        if self.remedy:
            line += f": {self.remedy}"
        return " ".join(line.splitlines())

    def located(self, **where: Any) -> None:
        """Adds facts that it lacks."""
        for key, value in where.items():
            if value is not None:
                self.where.setdefault(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return from_wire, (self.to_wire(),)

    def to_wire(self) -> dict[str, Any]:
        """A JSON-able form: ``{"code", "what", "remedy", "where"}`` with all values strings."""
        where = {key: str(value) for key, value in self.where.items()}
        return {"code": self.code, "what": self.what, "remedy": self.remedy, "where": where}


def from_wire(wire: dict[str, Any]) -> StateflowError:
    """Inverse of :meth:`StateflowError.to_wire`; an unknown code comes back as the root class."""
    cls = StateflowError.registry.get(wire["code"], StateflowError)
    error = cls.__new__(cls)
    StateflowError.__init__(error, wire["what"], remedy=wire["remedy"], **wire["where"])
    return error


# --- local misuse: the caller's code or configuration is wrong -----------------------------------------


class LocalMisuse(StateflowError):
    code = "misuse"


class DeclarationError(LocalMisuse):
    """An operator class is declared wrongly (no key, no output, a type without a coder, …)."""

    code = "bad_declaration"


class EncodeError(LocalMisuse):
    """A value does not fit the coder of the state it was put into."""

    code = "unencodable_value"


class DecodeError(LocalMisuse):
    """Stored bytes do not fit the coder, or were written by a newer version."""

    code = "undecodable_value"


class UnknownState(LocalMisuse):
    code = "unknown_state"


class SchemaMismatch(LocalMisuse):
    """Declared state and stored data, or input and stored key, do not agree."""

    code = "schema_mismatch"


class OutputMismatch(LocalMisuse):
    """``process`` produced a row that does not fit the declared output schema."""

    code = "output_mismatch"


class KeyColumnMissing(LocalMisuse):
    code = "key_column_missing"


class NullKey(LocalMisuse):
    code = "null_key"


class NoMetrics(LocalMisuse):
    """Metrics were asked for of a query that has no operator, or is not known here."""

    code = "no_metrics"


class UnsupportedKeyType(LocalMisuse):
    code = "unsupported_key_type"


class OperatorFailed(LocalMisuse):
    """The user's ``process`` raised; ``what`` holds the original error, ``traceback`` its trace."""

    code = "operator_failed"


class OperatorNotImportable(LocalMisuse):
    code = "operator_not_importable"


class OperatorOutdated(LocalMisuse):
    """A replica has other code for the operator than what is deployed."""

    code = "operator_outdated"


class OperatorNotDeployed(LocalMisuse):
    code = "operator_not_deployed"


class AlreadyDeployed(LocalMisuse):
    code = "already_deployed"


class UnknownSite(LocalMisuse):
    code = "unknown_site"


class UnknownPartition(LocalMisuse):
    code = "unknown_partition"


class InvalidArgument(LocalMisuse):
    code = "invalid_argument"


class JavaMissing(LocalMisuse):
    code = "java_missing"


class ExtraMissing(LocalMisuse):
    code = "extra_missing"


class PortInUse(LocalMisuse):
    code = "port_in_use"


class DataDirLocked(LocalMisuse):
    code = "data_dir_locked"


class InvalidTransition(StateflowError):
    """A state machine met an event its table does not allow; nothing was changed."""

    code = "invalid_transition"


# --- remote conditions ---------------------------------------------------------------------------------


class RemoteCondition(StateflowError):
    code = "remote"


class Unavailable(RemoteCondition):
    code = "unavailable"
    retryable = True


class StaleEpoch(RemoteCondition):
    code = "stale_epoch"


class NotOwner(RemoteCondition):
    code = "not_owner"
    retryable = True


class Moved(RemoteCondition):
    """The partition is owned elsewhere; ``where`` holds owner, address and epoch."""

    code = "moved"
    retryable = True


class PositionGap(RemoteCondition):
    """A batch would skip a position: the state is older than the source believes."""

    code = "position_gap"


class SourceGap(RemoteCondition):
    """A source no longer holds messages that are due, so that a batch would lack rows."""

    code = "source_gap"


class SourceMissing(RemoteCondition):
    """There is no such stream."""

    code = "source_missing"


class PipelineFailed(StateflowError):
    """Spark ended a declared pipeline, for a reason that is none of the others here."""

    code = "pipeline_failed"


class OperatorUsedTwice(LocalMisuse):
    """Two applications of one operator in one query claim the same batches."""

    code = "operator_used_twice"


class BatchChanged(LocalMisuse):
    """A batch that was applied is sent again with other rows."""

    code = "batch_changed"


class TasksMerged(LocalMisuse):
    """Spark runs several operator tasks as one, so that they cannot be told apart."""

    code = "tasks_merged"


class InputIncomplete(RemoteCondition):
    """Spark ended a task's input before its end; the rows it got are not the batch."""

    code = "input_incomplete"


class StaleBatch(RemoteCondition):
    """A batch older than the newest applied one was sent; its stored output is gone."""

    code = "stale_batch"


class StateMissing(RemoteCondition):
    """The assignment gives a partition to a replica whose data directory does not hold it."""

    code = "state_missing"


class LeaseLost(RemoteCondition):
    """The replica may have lost its partitions and does not serve before it has heard from the controller."""

    code = "lease_lost"
    retryable = True


class StandbyMissing(RemoteCondition):
    """A batch was committed but no standby has it, and the replica acknowledges only what a standby has."""

    code = "standby_missing"
    retryable = True


class DiskFull(RemoteCondition):
    """The target's disk has no room for what a move would bring."""

    code = "disk_full"


class CheckpointCorrupt(RemoteCondition):
    code = "checkpoint_corrupt"


class CheckpointNewer(LocalMisuse):
    """A checkpoint is in a format of a later program."""

    code = "checkpoint_newer"


class CheckpointMissing(RemoteCondition):
    """There is no such checkpoint or savepoint, or none that can be used."""

    code = "checkpoint_missing"


class WrongKey(LocalMisuse):
    """A checkpoint is encrypted with a key this process does not have."""

    code = "wrong_key"


class StaleCheckpoint(RemoteCondition):
    code = "stale_checkpoint"


class TransferCorrupt(RemoteCondition):
    """A change set or file arrived with a wrong checksum, or out of sequence."""

    code = "transfer_corrupt"


class DigestMismatch(RemoteCondition):
    code = "digest_mismatch"


class BudgetUnreachable(RemoteCondition):
    code = "budget_unreachable"


class AlreadyThere(RemoteCondition):
    """Every partition that was named is where it should go."""

    code = "already_there"


class MoveConflict(RemoteCondition):
    """A second move was asked for a partition that is already moving."""

    code = "move_conflict"


class MoveAborted(RemoteCondition):
    code = "move_aborted"


class MoveUnknown(RemoteCondition):
    code = "move_unknown"


class Locked(RemoteCondition):
    """Somebody else holds the item, or was first to write.

    ``blocking_record`` is the ledger's record that is in the way; None when none is, or in another process, where
    ``where["blocking_record"]`` names it.
    """

    code = "locked"
    blocking_record: Any = None


class IllegalRecord(LocalMisuse):
    """A record breaks the ledger's transition table; nothing was written."""

    code = "illegal_record"


class InvalidPayload(LocalMisuse):
    """A record's payload is no JSON, or not what its schema asks for; nothing was written."""

    code = "invalid_payload"


class LedgerReadOnly(LocalMisuse):
    """The ledger's database can be read but not written."""

    code = "ledger_read_only"


class LedgerTooNew(LocalMisuse):
    """A newer version of the program has changed the ledger's schema."""

    code = "ledger_too_new"


class LedgerCorrupt(RemoteCondition):
    """Records were changed by hand or damaged; ``verify`` lists every fault."""

    code = "ledger_corrupt"


class ApplicationError(StateflowError):
    """Work on an item raised; FAILED is recorded, and the item stays blocked until a person resolves it."""

    code = "application_failed"
