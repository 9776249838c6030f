"""Sends an error of a handler to its caller, which raises the same error.

The error travels as a ``Fault`` in the trailing metadata of the failed call (:func:`abort`, :func:`remote_error`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping

import grpc
import grpc.aio
from google.protobuf.message import DecodeError as NoMessage

from stateflow.errors import (
    REPORT_LOG,
    Moved,
    NotLeading,
    ReleaseMismatch,
    SourceTaken,
    StateflowError,
    Unavailable,
    from_wire,
)
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc.fields import INSTANT_MAX
from stateflow.storage.faults import meaning
from stateflow.types import ADDRESS, EPOCH_MAX, NAME, shown

log = logging.getLogger(__name__)
#: remedy for an answer that no member of the cluster gives
WHAT_RUNS = "check what runs there, and its version"
FAULT_KEY = "stateflow-fault-bin"
#: limits in characters, for a fault that is too long for HTTP/2's metadata
FAULT_TEXT_MAX, FAULT_FACT_MAX, FAULT_FACTS_MAX = 600, 100, 12


def fault_of(error: StateflowError) -> pb.Fault:
    wire = error.to_wire()
    where = {_sendable(key): _sendable(value) for key, value in wire["where"].items()}
    return pb.Fault(code=wire["code"], what=_sendable(wire["what"]), remedy=_sendable(wire["remedy"]), where=where)


def _sendable(text: str) -> str:
    """Escapes lone surrogates, which may occur in file names: UTF-8 cannot encode them, and sending an error must not
    fail."""
    return text.encode(errors="backslashreplace").decode()


#: facts that readers act on, by the error that holds them
_FACTS: dict[type[StateflowError], Mapping[str, Callable[[str], bool]]] = {
    Moved: {"owner": NAME.holds, "address": ADDRESS.holds, "epoch": lambda text: _is_number(text, EPOCH_MAX)},
    NotLeading: {"leader": lambda text: not text or ADDRESS.holds(text)},
    SourceTaken: {"generation_us": lambda text: _is_number(text, INSTANT_MAX)},
}


def error_of(fault: pb.Fault) -> StateflowError:
    """Returns the error of a fault from any sender, trusted or not.

    It is Unavailable if the fault lacks facts that a reader of its error would act on, such as the address to which a
    partition has moved.
    """
    where = dict(fault.where)
    error = from_wire({"code": fault.code, "what": fault.what, "remedy": fault.remedy, "where": where})
    for name, holds in _FACTS.get(type(error), {}).items():
        if not holds(where.get(name, "")):
            return Unavailable(f"invalid error: {error.code} with {name}={shown(where.get(name))}", remedy=WHAT_RUNS)
    return error


def _is_number(text: str, most: int) -> bool:
    return text.isdecimal() and len(text) <= len(str(most)) and int(text) <= most


def unexpected(error: BaseException) -> StateflowError:
    """Returns the StateflowError for an unexpected error: one that names a fault of the environment, such as a full
    disk, or else one that asks users to report it.
    """
    return meaning(error) or StateflowError(f"{type(error).__name__}: {error}", remedy=REPORT_LOG)


def remote_error(error: grpc.RpcError, address: str) -> StateflowError:
    """Returns the meaning of a failed call: the error that the server named, or Unavailable."""
    for key, value in error.trailing_metadata() or ():
        if key == FAULT_KEY:
            with contextlib.suppress(NoMessage):
                return error_of(pb.Fault.FromString(value))
    code = error.code()
    details = error.details() or ""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ReleaseMismatch(f"{address} does not know the call: its stateflow is older", remedy="upgrade it first")
    why = details.rpartition(": ")[2].strip(" []")  # the text before is gRPC's own
    what = f"no answer from {address}: {code.name.lower().replace('_', ' ')}" + (f", {why}" if why else "")
    return Unavailable(what, remedy=_mended(details))


def _mended(details: str) -> str:
    """Returns the remedy for a failed handshake, chosen by gRPC's message."""
    for word, remedy in _HANDSHAKES.items():
        if word in details:
            return remedy
    return "check that it runs and that the address is right"


_HANDSHAKES = {
    "Hostname Verification": "its certificate is not for this host: `stateflow certs issue --host`",
    "certificate has expired": "its certificate has expired: `stateflow certs renew`",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from the authority in STATEFLOW_TLS_CA, or not for servers: "
    "`stateflow certs issue`",
    "WRONG_VERSION_NUMBER": "it speaks plain text: set STATEFLOW_TLS_CA, _CERT and _KEY there, or none of them here",
    "Socket closed": "check that it runs and that the address is right; with TLS it closes connections in plain text, "
    "and those with a certificate that has expired or is from another authority",
}


async def abort(context: grpc.aio.ServicerContext, error: StateflowError) -> None:
    fault = fault_of(error)
    if fault.ByteSize() > 6000:  # HTTP/2 metadata is limited
        for key in ("traceback", "row"):
            fault.where.pop(key, None)
        fault.what, fault.remedy = fault.what[:FAULT_TEXT_MAX], fault.remedy[:FAULT_TEXT_MAX]
        for key in list(fault.where)[FAULT_FACTS_MAX:]:
            del fault.where[key]
        for key, value in fault.where.items():
            fault.where[key] = value[:FAULT_FACT_MAX]
    await context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        fault.code,
        trailing_metadata=((FAULT_KEY, fault.SerializeToString()),),
    )


def log_failure(what: str, error: Exception) -> None:
    """Logs an error: in one line if the environment caused it, otherwise with its stack trace."""
    meant = meaning(error)
    log.error("%s failed: %s", what, meant or error, exc_info=None if meant else error)
