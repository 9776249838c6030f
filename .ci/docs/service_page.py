"""The gRPC services and messages, with the comments of the protos."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as dpb
from grpc_tools import protoc
from links import ROOT

PROTOS = ROOT / "proto"
#: where messages, fields of a message, services and methods of a service are in a file's descriptor
MESSAGES, FIELDS, SERVICES, METHODS = 4, 2, 6, 2
TYPES = {number: name.removeprefix("TYPE_").lower() for name, number in dpb.FieldDescriptorProto.Type.items()}
Comments = dict[tuple[int, ...], str]


def page() -> str:
    return "\n".join(line for file in described() for line in _file(file))


def described() -> list[dpb.FileDescriptorProto]:
    """Raises RuntimeError where protoc does not take the protos."""
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        words = ["protoc", f"-I{PROTOS}", "--include_source_info", f"--descriptor_set_out={out}", *files]
        if protoc.main(words) != 0:
            raise RuntimeError("protoc does not take the protos")
        return list(dpb.FileDescriptorSet.FromString(out.read_bytes()).file)


def _file(file: dpb.FileDescriptorProto) -> Iterator[str]:
    comments = {
        tuple(place.path): " ".join(f"{place.leading_comments} {place.trailing_comments}".split())
        for place in file.source_code_info.location
    }
    yield f"## {Path(file.name).name}\n"
    for at, service in enumerate(file.service):
        yield f"### {service.name}\n\n{comments.get((SERVICES, at), '')}\n"
        yield "| call | takes | gives | |\n|---|---|---|---|"
        for number, method in enumerate(service.method):
            takes = _streamed(method.input_type, streams=method.client_streaming)
            gives = _streamed(method.output_type, streams=method.server_streaming)
            told = comments.get((SERVICES, at, METHODS, number), "")
            yield f"| `{method.name}` | {takes} | {gives} | {_cell(told)} |"
        yield ""
    for at, message in enumerate(file.message_type):
        yield from _message(message, (MESSAGES, at), comments)


def _message(message: dpb.DescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"### {message.name}\n\n{comments.get(path, '')}\n"
    if message.field:
        yield "| | field | type | |\n|---|---|---|---|"
    maps = {each.name: each for each in message.nested_type if each.options.map_entry}
    for at, field in enumerate(message.field):
        told = comments.get((*path, FIELDS, at), "")
        yield f"| {field.number} | `{field.name}` | {_type(field, maps)} | {_cell(told)} |"
    yield ""


def _type(field: dpb.FieldDescriptorProto, maps: dict[str, dpb.DescriptorProto]) -> str:
    name = field.type_name.rsplit(".", 1)[-1]
    if name in maps:
        key, value = maps[name].field
        return f"map: {_type(key, {})} → {_type(value, {})}"
    told = _link(field.type_name) if field.type == dpb.FieldDescriptorProto.TYPE_MESSAGE else TYPES[field.type]
    return f"{told}, repeated" if field.label == dpb.FieldDescriptorProto.LABEL_REPEATED else told


def _streamed(name: str, *, streams: bool) -> str:
    return f"stream of {_link(name)}" if streams else _link(name)


def _link(name: str) -> str:
    short = name.rsplit(".", 1)[-1]
    return f"[{short}](#{short.lower()})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
