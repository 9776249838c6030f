from stateflow.rpc import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogsRequest(_message.Message):
    __slots__ = ("replica", "lines", "follow", "command")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    replica: str
    lines: int
    follow: bool
    command: _common_pb2.Command
    def __init__(self, replica: _Optional[str] = ..., lines: _Optional[int] = ..., follow: _Optional[bool] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class LogsPage(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
