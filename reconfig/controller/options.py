"""What a caller may ask of a reconfiguration."""

from __future__ import annotations

from stateflow.moves import MoveOptions
from stateflow.rpc import controller_pb2 as cpb


def options_of(message: cpb.MoveOptions) -> MoveOptions:
    """What is not in the message was not said. Raises InvalidArgument."""
    return MoveOptions(**{field.name: value for field, value in message.ListFields()})
