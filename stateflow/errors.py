"""Every error a user can meet, in one tree rooted in :class:`StateflowError`.

An error names a stable ``code``, what happened, where and what to do next. The command line prints ``str(error)``::

    code: what happened (operator=Delay partition=3): what to do next

Errors are sent to other processes as :meth:`StateflowError.to_wire` dictionaries, and restored as the same class.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

T = TypeVar("T", bound=type)
#: remedies for errors that no user, machine or network can cause
REPORT_LINE = "a bug in stateflow, please report it with this line"
REPORT_LOG = "a bug in stateflow, please report it with the log"
#: environment variable; if it is on, tracebacks include causes and frames of stateflow and Spark
TRACEBACKS = "STATEFLOW_TRACEBACKS"


class StateflowError(Exception):
    """The root class of all errors.

    Args:
        what: what happened, one sentence without a final full stop.
        remedy: what the reader should do next.
        where: facts that locate the error, printed as ``key=value``. A ``traceback`` among them is not printed in
            that line; it becomes a note of the exception, which Python shows below its own traceback.

    >>> print(InvalidArgument("3-1 is no range", remedy="write 1-3", partition=3))
    invalid_argument: 3-1 is no range (partition=3): write 1-3
    """

    code: ClassVar[str] = "error"
    #: whether the same request may succeed later without any intervention
    retryable: ClassVar[bool] = False
    registry: ClassVar[dict[str, type[StateflowError]]] = {}

    def __init__(self, what: str, *, remedy: str = "", **where: Any) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.where = {key: value for key, value in where.items() if value is not None}
        self._note_traceback()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = StateflowError.registry.setdefault(cls.code, cls)
        if known is not cls:
            raise TypeError(f"error code {cls.code!r} is taken by {known.__name__}")

    def __str__(self) -> str:
        place = " ".join(f"{key}={value}" for key, value in self.where.items() if key != "traceback")
        at = f" ({place})" if place else ""
        then = f": {self.remedy}" if self.remedy else ""
        return one_line(f"{self.code}: {self.what}{at}{then}")

    def _note_traceback(self) -> None:
        """Adds the traceback as a note that ends with the error's line, so that readers see this line last."""
        if "traceback" in self.where:
            self.__notes__ = [f"{self.where['traceback']}\n{self}"]

    def located(self, **where: Any) -> None:
        """Adds facts that locate the error. Facts that the error already has are kept."""
        for key, value in where.items():
            if value is not None:
                self.where.setdefault(key, value)
        self._note_traceback()

    def __reduce__(self) -> tuple[Any, ...]:
        return from_wire, (self.to_wire(),)

    def to_wire(self) -> dict[str, Any]:
        """Returns a JSON-able form: ``{"code", "what", "remedy", "where"}`` with all values strings."""
        where = {key: str(value) for key, value in self.where.items()}
        return {"code": self.code, "what": self.what, "remedy": self.remedy, "where": where}


def from_wire(wire: dict[str, Any]) -> StateflowError:
    """Restores an error from :meth:`StateflowError.to_wire`. An unknown code restores the root class."""
    cls = StateflowError.registry.get(wire["code"], StateflowError)
    error = cls.__new__(cls)
    where = {key: value for key, value in wire["where"].items() if key not in ("self", "what", "remedy")}
    StateflowError.__init__(error, wire["what"], remedy=wire["remedy"], **where)
    return error


def is_on(switch: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Tells whether an environment variable is set, to anything but what pydantic reads as false."""
    return environment.get(switch, "").lower() not in ("", "0", "f", "false", "n", "no", "off")


def brief(cls: T) -> T:
    """Decorates a class: a StateflowError's traceback ends at the call of a public method, unless TRACEBACKS is set."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, _brief(method))
    return cls


def _brief(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except StateflowError as error:
            if is_on(TRACEBACKS):
                raise
            raise error.with_traceback(None) from None

    return call


def one_line(text: str) -> str:
    """Returns the text as one line, and escapes characters that would move the cursor, set colours or reorder text."""
    line = " ".join(text.splitlines())
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


class LocalMisuse(StateflowError):
    """The caller's code or configuration is wrong."""

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
    """Metrics were requested for a query that has no operator, or that this driver does not know."""

    code = "no_metrics"


class UnsupportedKeyType(LocalMisuse):
    code = "unsupported_key_type"


class OperatorFailed(LocalMisuse):
    """The user's ``process`` raised; ``what`` holds the original error, ``traceback`` its trace."""

    code = "operator_failed"


class OperatorStuck(OperatorFailed):
    """The user's code did not return within the time that a batch may take; ``traceback`` says where it was running."""

    code = "operator_stuck"


class OperatorCrashed(OperatorFailed):
    """The process of a replica has ended several times in a row while it ran one batch of the operator."""

    code = "operator_crashed"


class OperatorNotImportable(LocalMisuse):
    code = "operator_not_importable"


class BundleMissing(OperatorNotImportable):
    """An operator's code is not yet on the machine that should run it."""

    code = "bundle_missing"


class BundleDamaged(OperatorNotImportable):
    """The bytes of a bundle differ from those that were deployed."""

    code = "bundle_damaged"


class BundleRefused(LocalMisuse):
    """An operator's code cannot be packed."""

    code = "bundle_refused"


class VersionUnknown(LocalMisuse):
    """An operator never had this version."""

    code = "version_unknown"


class CodeRefused(LocalMisuse):
    """A client that lacks the controller's code key sent the controller an operator's code."""

    code = "code_refused"


class OperatorOutdated(LocalMisuse):
    """A replica's code for the operator is not the deployed code."""

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


class InsecureRefused(LocalMisuse):
    """A connection would carry plain text over a network."""

    code = "insecure"


class BadCertificate(LocalMisuse):
    """TLS files cannot be used, or a certificate cannot be made."""

    code = "bad_certificate"


class DataDirLocked(LocalMisuse):
    code = "data_dir_locked"


class InvalidTransition(StateflowError):
    """A state machine met an event its table does not allow; nothing was changed."""

    code = "invalid_transition"


class InvariantBroken(StateflowError):
    """An invariant does not hold: a bug in stateflow. ``validate()`` raises it, see :mod:`stateflow.transitions`."""

    code = "invariant_broken"


class RemoteCondition(StateflowError):
    code = "remote"


class Unavailable(RemoteCondition):
    code = "unavailable"
    retryable = True


class Busy(Unavailable):
    """The called process accepts no more work for now, from this caller or from any caller."""

    code = "busy"


class NotLeading(Unavailable):
    """The controller does not lead now; ``where`` holds the leader's address, if that is known."""

    code = "not_leading"


class WriteUncertain(Unavailable):
    """The database went away during a commit, which may or may not have been written."""

    code = "write_uncertain"


class NotAllowed(RemoteCondition):
    """The caller's certificate does not allow the call."""

    code = "not_allowed"


class ReleaseMismatch(RemoteCondition):
    """The other process's release is incompatible with this one, or does not know the requested call."""

    code = "release_mismatch"


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
    """A batch would skip a position, because the partition's state lacks earlier batches of the source."""

    code = "position_gap"


class SourceTaken(RemoteCondition):
    """A newer client sends under this source's name, so the older client is refused."""

    code = "source_taken"


class SourceRetired(RemoteCondition):
    """The request needs records that were deleted when their source was retired."""

    code = "source_retired"


class BatchIncomplete(RemoteCondition):
    """A batch was sent while the previous one had reached only some partitions; nothing of the new one is applied."""

    code = "batch_incomplete"


class SourceGap(RemoteCondition):
    """A source no longer holds messages that are due, so that a batch would lack rows."""

    code = "source_gap"


class SourceMissing(RemoteCondition):
    """The source's stream does not exist."""

    code = "source_missing"


class PipelineFailed(StateflowError):
    """Spark ended a declared pipeline, for a reason without an error class of its own."""

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
    """Spark ended a task's input early; the rows that the task received are not the whole batch."""

    code = "input_incomplete"


class StaleBatch(RemoteCondition):
    """A batch was sent that is older than the newest applied one, and whose stored output is gone."""

    code = "stale_batch"


class OutboxFull(RemoteCondition):
    """The outbox, in which a client stores batches until partitions can be reached, has no room for more."""

    code = "outbox_full"


class OutboxForeign(LocalMisuse):
    """An outbox was made for another operator, source or number of partitions."""

    code = "outbox_foreign"


class OutboxDamaged(LocalMisuse):
    """The file of an outbox cannot be read."""

    code = "outbox_damaged"


class OutboxOvertaken(RemoteCondition):
    """Another client of the source sent batches to a partition, and this outbox cannot tell them from its own."""

    code = "outbox_overtaken"


class StateMissing(RemoteCondition):
    """The assignment gives a partition to a replica that does not have it in its data directory."""

    code = "state_missing"


class StaleTerm(RemoteCondition):
    """A command or an answer was sent by a controller that no longer leads."""

    code = "stale_term"


class ForeignLedger(RemoteCondition):
    """A controller decides by another ledger than the one that this replica belongs to."""

    code = "foreign_ledger"


class NameTaken(RemoteCondition):
    """A replica's name belongs to another data directory, or a copy of its directory serves under the name."""

    code = "name_taken"


class NoRoom(RemoteCondition):
    """An agent lacks cores, memory or disk for the requested replicas, or a replica lacks disk for the partitions that
    would move to it."""

    code = "no_room"


class PartitionsClaimed(RemoteCondition):
    """Replicas have partitions of an operator that the ledger does not know; the operator must not be created empty."""

    code = "partitions_claimed"


class PartitionsLive(RemoteCondition):
    """The request would remove live partitions for good."""

    code = "partitions_live"


class AdoptionRefused(RemoteCondition):
    """The partitions that replicas hold cannot be adopted into the ledger as they are."""

    code = "adoption_refused"


class LeaseLost(RemoteCondition):
    """The replica may have lost its partitions, and serves none until the controller has answered it."""

    code = "lease_lost"
    retryable = True


class StandbyMissing(RemoteCondition):
    """A batch was committed but no standby has it, and the replica acknowledges only what a standby has."""

    code = "standby_missing"
    retryable = True


class DiskFull(RemoteCondition):
    """A disk has no room for the data to be written."""

    code = "disk_full"


class DiskRefused(RemoteCondition):
    """A file system does not let this process read or write."""

    code = "disk_refused"


class TooFewFiles(RemoteCondition):
    """A process is not allowed to open as many files as its partitions need."""

    code = "too_few_files"


class StateDamaged(RemoteCondition):
    """Files of a partition are missing or differ from what was written. The partition gets another owner."""

    code = "state_damaged"
    retryable = True


class CommitLogDamaged(StateflowError):
    """A replica's commit log differs from what was written, or has a gap."""

    code = "commit_log_damaged"


class OutOfMemory(RemoteCondition):
    """The machine refused this process more memory."""

    code = "out_of_memory"


class CheckpointCorrupt(RemoteCondition):
    code = "checkpoint_corrupt"


class CheckpointNewer(LocalMisuse):
    """A checkpoint has a format that only later versions of stateflow can read."""

    code = "checkpoint_newer"


class CheckpointMissing(RemoteCondition):
    """The requested checkpoint or savepoint does not exist, or no existing one can be used."""

    code = "checkpoint_missing"


class CheckpointStoreMissing(Unavailable):
    """The expected checkpoint store is not at its URL: its marker file is missing, or is that of another store."""

    code = "checkpoint_store_missing"
    retryable = False


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
    """Every named partition is already at its target."""

    code = "already_there"


class MoveConflict(RemoteCondition):
    """A second move was requested for a partition that is already moving."""

    code = "move_conflict"


class MoveAborted(RemoteCondition):
    code = "move_aborted"


class MoveCancelled(MoveAborted):
    """The move was cancelled by command, before the source was fenced."""

    code = "move_cancelled"


class LossPossible(RemoteCondition):
    """The request would lose data that a replica has committed, and does not accept that loss."""

    code = "loss_possible"


class InMaintenance(RemoteCondition):
    """A node is in maintenance, and the request would move partitions to it, or put two nodes of a set into
    maintenance."""

    code = "in_maintenance"


class MoveUnknown(RemoteCondition):
    code = "move_unknown"


class Locked(RemoteCondition):
    """Another process holds the ledger's item, or wrote to it first.

    ``blocking_record`` is the blocking record of the ledger. It is None if no record blocks, or if the error comes from
    another process; then ``where["blocking_record"]`` names the record.
    """

    code = "locked"
    blocking_record: Any = None


class IllegalRecord(LocalMisuse):
    """A record breaks the ledger's transition table; nothing was written."""

    code = "illegal_record"


class InvalidPayload(LocalMisuse):
    """A record's payload is not JSON, or not what its schema requires; nothing was written."""

    code = "invalid_payload"


class LedgerReadOnly(LocalMisuse):
    """The ledger's database can be read but not written."""

    code = "ledger_read_only"


class LedgerReplaced(RemoteCondition):
    """The opened ledger has been deleted, moved or replaced since; nothing was written."""

    code = "ledger_replaced"


class HoldLost(RemoteCondition):
    """A controller lacks the ledger's leader lease, which it lost or never took; nothing was written."""

    code = "hold_lost"


class LedgerTooNew(LocalMisuse):
    """A newer version of the program has changed the ledger's schema."""

    code = "ledger_too_new"


class LedgerTooOld(LocalMisuse):
    """The ledger has an earlier version's schema, and the process that opened it may not upgrade it."""

    code = "ledger_too_old"


class LedgerCorrupt(RemoteCondition):
    """Records were changed by hand or damaged; ``verify`` lists every fault."""

    code = "ledger_corrupt"


class ApplicationError(StateflowError):
    """Work on a ledger's item raised an error. FAILED is recorded; the item is blocked until a person resolves it."""

    code = "application_failed"
