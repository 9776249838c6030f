"""Declared schemas: Arrow's own, or Spark DDL such as ``"k string, n long, tags array<string>"``, parsed without a JVM.

The grammar is that of Spark SQL's ``StructType.fromDDL``, for types that Arrow has: the atomic types, decimal(p,s),
array<…>, map<…,…>, struct<name:type,…>, NOT NULL and COMMENT.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pyarrow as pa

from stateflow.errors import DeclarationError
from stateflow.operator.arrow import check_types
from stateflow.types import shown

_ATOMS: dict[str, pa.DataType] = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "bool": pa.bool_(),
    "byte": pa.int8(),
    "tinyint": pa.int8(),
    "short": pa.int16(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|'(?:[^'\\]|\\.)*'|[A-Za-z_0-9]+|[<>(),:])")


def schema_of(declared: str | pa.Schema) -> pa.Schema:
    """Returns the schema that a user has declared.

    Raises DeclarationError for a text that cannot be parsed and for a repeated name, which could not be read back;
    InvalidArgument for types that are not accepted.
    """
    schema = parse_ddl(declared) if isinstance(declared, str) else declared
    check_types(schema)
    if what := _twice(schema, "a column"):
        raise DeclarationError(f"the schema is ambiguous: {what}", remedy="give each its own name")
    return schema


def _twice(fields: Iterable[pa.Field], what: str) -> str:
    """Describes the first two fields, at any level, with the same name; empty where all names differ."""
    seen: set[str] = set()
    for field in fields:
        if field.name in seen:
            return f"{what} is named twice: {shown(field.name)}"
        seen.add(field.name)
        kind, name = field.type, field.name
        inside = [kind.field(number) for number in range(kind.num_fields)]
        groups = [inside] if pa.types.is_struct(kind) else [[each.with_name(name)] for each in inside]
        if found := next((found for group in groups if (found := _twice(group, f"a field of {shown(name)}"))), ""):
            return found
    return ""


def parse_ddl(text: str) -> pa.Schema:
    """Parses Spark DDL. Raises DeclarationError that shows the part that was not understood."""
    tokens = _tokens(text)
    fields = []
    while tokens:
        fields.append(_field(tokens, text))
        if tokens and tokens.pop(0) != ",":
            raise _bad(text, "a comma is missing between two columns")
        if not tokens and text.rstrip().endswith(","):
            raise _bad(text, "it ends with a comma")
    if not fields:
        raise _bad(text, "it names no column")
    if what := _twice(fields, "a column"):
        raise _bad(text, what)
    return pa.schema(fields)


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    stripped = text.rstrip()
    while at < len(stripped):
        match = _TOKEN.match(stripped, at)
        if match is None:
            raise _bad(text, f"unexpected {stripped[at:].strip()[:20]!r}")
        tokens.append(match.group(1))
        at = match.end()
    return tokens


def _field(tokens: list[str], text: str, colon: bool = False) -> pa.Field:
    name = _name(tokens, text)
    if tokens and tokens[0] == ":":
        tokens.pop(0)
    elif colon and not tokens:
        raise _bad(text, f"{shown(name)} has no type")
    type_ = _type(tokens, text)
    nullable = True
    if [token.lower() for token in tokens[:2]] == ["not", "null"]:
        del tokens[:2]
        nullable = False
    if tokens and tokens[0].lower() == "comment":
        tokens.pop(0)
        comment = _take(tokens, text)
        if not comment.startswith("'"):
            raise _bad(text, f"expected a comment in quotes, found {shown(comment)}")
    return pa.field(name, type_, nullable)


def _name(tokens: list[str], text: str) -> str:
    token = _take(tokens, text)
    if token.startswith("`"):
        return token[1:-1].replace("``", "`")
    if token in "<>(),:" or token.startswith("'"):  # noqa: S105 - of a schema
        raise _bad(text, f"expected a column name, found {shown(token)}")
    return token


def _type(tokens: list[str], text: str) -> pa.DataType:
    word = _take(tokens, text).lower()
    if word in _ATOMS:
        return _ATOMS[word]
    if word in ("decimal", "dec", "numeric"):
        precision, scale = 10, 0
        if tokens and tokens[0] == "(":
            tokens.pop(0)
            precision = _number(tokens, text)
            if tokens and tokens[0] == ",":
                tokens.pop(0)
                scale = _number(tokens, text)
            _expect(tokens, ")", text)
        if not (1 <= precision <= 38 and scale <= precision):
            raise _bad(text, f"decimal({precision},{scale}) is not valid, the limit is 38 digits")
        return pa.decimal128(precision, scale)
    if word == "array":
        _expect(tokens, "<", text)
        inner = _type(tokens, text)
        _expect(tokens, ">", text)
        return pa.list_(inner)
    if word == "map":
        _expect(tokens, "<", text)
        key = _type(tokens, text)
        _expect(tokens, ",", text)
        value = _type(tokens, text)
        _expect(tokens, ">", text)
        return pa.map_(key, value)
    if word == "struct":
        _expect(tokens, "<", text)
        fields = [_field(tokens, text, colon=True)]
        while tokens and tokens[0] == ",":
            tokens.pop(0)
            fields.append(_field(tokens, text, colon=True))
        _expect(tokens, ">", text)
        return pa.struct(fields)
    raise _bad(text, f"{shown(word)} is not a known type")


def _number(tokens: list[str], text: str) -> int:
    token = _take(tokens, text)
    if not token.isdecimal():
        raise _bad(text, f"expected a number, found {shown(token)}")
    return int(token)


def _take(tokens: list[str], text: str) -> str:
    if not tokens:
        raise _bad(text, "it ends too early")
    return tokens.pop(0)


def _expect(tokens: list[str], wanted: str, text: str) -> None:
    found = _take(tokens, text)
    if found != wanted:
        raise _bad(text, f"expected {wanted!r}, found {shown(found)}")


def _bad(text: str, why: str) -> DeclarationError:
    return DeclarationError(
        f"the schema {shown(text)} cannot be read: {why}",
        remedy="write it like 'name string, n long, tags array<string>'",
    )
