"""The steps of a move that can be seen on the wire.

An instruction of the controller's machine is carried out by an RPC, or is a record written between two RPCs; the target
pulls data by RPCs of its own. A step is a moment of an RPC: its request, its first answer, the end of its stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from reconfig.decisions import migration as m
from stateflow.rpc import replica_pb2

SERVICE = replica_pb2.DESCRIPTOR.services_by_name["ReplicaService"]


class Participant(StrEnum):
    CONTROLLER = "controller"
    SOURCE = "source"
    TARGET = "target"
    LEDGER = "ledger"


class Moment(StrEnum):
    SENT = "sent"
    ANSWERED = "answered"
    ENDED = "ended"


class Fault(StrEnum):
    CRASH = "crash"
    PAUSE = "pause"
    PARTITION = "partition"
    OUTAGE = "outage"


#: which fault may happen to which participant
FAULTS = (
    *((p, f) for p in Participant if p is not Participant.LEDGER for f in Fault if f is not Fault.OUTAGE),
    (Participant.LEDGER, Fault.OUTAGE),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A moment of an RPC. ``server``: the participant that answers the RPC."""

    method: str
    server: Participant
    moment: Moment
    cancelled: bool = False  # of a move that its user cancels

    def __str__(self) -> str:
        return f"{self.method} {'of a cancelled move ' if self.cancelled else ''}to the {self.server}: {self.moment}"


@dataclass(frozen=True, slots=True)
class Cell:
    step: Step
    participant: Participant
    fault: Fault

    def __str__(self) -> str:
        return f"{self.step}, {self.participant} {self.fault}"


#: the RPC by which an instruction is seen, as (method, server); a retry is seen as the instruction that it retries
SEEN_AS: dict[type[m.Instruction], tuple[str, Participant]] = {
    m.Prepare: ("Prepare", Participant.TARGET),
    m.RecordGrant: ("Fence", Participant.SOURCE),  # recorded when the fence is sent
    m.Fence: ("Fence", Participant.SOURCE),
    m.CancelSource: ("Cancel", Participant.SOURCE),
    m.AbandonTarget: ("Cancel", Participant.TARGET),
    m.RecordOwned: ("Prepare", Participant.TARGET),  # at the end of the target's reports
    m.RecordAborted: ("Cancel", Participant.TARGET),  # when it has answered
    m.Release: ("Release", Participant.SOURCE),
    m.CancelTarget: ("Cancel", Participant.TARGET),  # of a move whose source's lease has lapsed
}
#: RPCs of the target to the source (and Inspect, which measures round trips and changes nothing)
PULLED = ("Snapshot", "Fetch", "Follow")


def steps() -> list[Step]:
    """Returns all steps, in the order of a move."""
    controlled = dict.fromkeys(SEEN_AS.values())
    pulled = [(method, Participant.SOURCE) for method in PULLED]
    found = []
    for method, server in [*controlled, *pulled]:
        streams = SERVICE.methods_by_name[method].server_streaming
        moments = (Moment.SENT, Moment.ANSWERED, Moment.ENDED) if streams else (Moment.SENT, Moment.ANSWERED)
        found += [Step(method, server, moment, method == "Cancel") for moment in moments]
    order = ["Prepare", *PULLED, "Fence", "Release", "Cancel"]
    return sorted(found, key=lambda step: (order.index(step.method), step.server))


def cells() -> list[Cell]:
    return [Cell(step, participant, fault) for step in steps() for participant, fault in FAULTS]


def sample() -> list[Cell]:
    """Returns a cell for each participant and fault, at steps of all kinds."""
    chosen, every = [], steps()
    for number, (participant, fault) in enumerate(FAULTS):
        chosen.append(Cell(every[(number * 5 + 2) % len(every)], participant, fault))
    return chosen
