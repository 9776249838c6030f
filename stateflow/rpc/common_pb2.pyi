from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Fault(_message.Message):
    __slots__ = ("code", "what", "remedy", "where")
    class WhereEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    code: str
    what: str
    remedy: str
    where: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[str] = ..., what: _Optional[str] = ..., remedy: _Optional[str] = ..., where: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OperatorSpec(_message.Message):
    __slots__ = ("name", "target", "partitions", "key", "output_schema", "state_schema", "side_schemas", "dropped", "source", "source_digest", "source_mac", "bundle", "recorded_us")
    class SideSchemasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    STATE_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    SIDE_SCHEMAS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_MAC_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    RECORDED_US_FIELD_NUMBER: _ClassVar[int]
    name: str
    target: str
    partitions: int
    key: _containers.RepeatedScalarFieldContainer[str]
    output_schema: bytes
    state_schema: str
    side_schemas: _containers.ScalarMap[str, bytes]
    dropped: _containers.ScalarMap[str, int]
    source: str
    source_digest: str
    source_mac: str
    bundle: str
    recorded_us: int
    def __init__(self, name: _Optional[str] = ..., target: _Optional[str] = ..., partitions: _Optional[int] = ..., key: _Optional[_Iterable[str]] = ..., output_schema: _Optional[bytes] = ..., state_schema: _Optional[str] = ..., side_schemas: _Optional[_Mapping[str, bytes]] = ..., dropped: _Optional[_Mapping[str, int]] = ..., source: _Optional[str] = ..., source_digest: _Optional[str] = ..., source_mac: _Optional[str] = ..., bundle: _Optional[str] = ..., recorded_us: _Optional[int] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("name", "site", "address", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    site: str
    address: str
    weight: int
    def __init__(self, name: _Optional[str] = ..., site: _Optional[str] = ..., address: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("ledger", "term", "session")
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ledger: str
    term: int
    session: str
    def __init__(self, ledger: _Optional[str] = ..., term: _Optional[int] = ..., session: _Optional[str] = ...) -> None: ...
