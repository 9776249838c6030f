"""Payloads: JSON, and where a schema is named, what that schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from stateflow.errors import InvalidArgument, InvalidPayload
from stateflow.ledger.records import Kind

#: the views' own: ``set`` holds the columns that a record changes
BUILTIN: Mapping[str, Mapping[str, Any]] = {
    kind.payload_schema: {
        "type": "object",
        "required": ["set"],
        "properties": {"set": {"type": "object"}},
    }
    for kind in Kind
    if kind is not Kind.ITEM
}


def encode(payload: Any, item_id: str) -> str | None:
    """Raises InvalidPayload for what is no JSON, NaN included."""
    if payload is None:
        return None
    try:
        return json.dumps(payload, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPayload(
            f"the payload is no JSON: {error}", remedy="use dicts, lists, text, numbers and None", item=item_id
        ) from error


def problem(payload: Any, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with it, or None."""
    found = best_match(Draft202012Validator(schema).iter_errors(payload))
    if found is None:
        return None
    where = "/".join(str(each) for each in found.absolute_path)
    return f"{found.message[:200]}{f' at {where}' if where else ''}"


def check(payload: Any, name: str, schema: Mapping[str, Any] | None, item_id: str) -> None:
    """Raises InvalidPayload."""
    if schema is None:
        raise InvalidPayload(
            f"there is no payload schema {name!r}", remedy="register it with ledger.register_schema", item=item_id
        )
    wrong = problem(payload, schema)
    if wrong is not None:
        raise InvalidPayload(
            f"the payload is not what its schema asks for: {wrong}", remedy="correct it", item=item_id, schema=name
        )


def check_schema(name: str, schema: Mapping[str, Any]) -> str:
    """The schema as canonical JSON. Raises InvalidArgument."""
    if name in BUILTIN or name.startswith("stateflow."):
        raise InvalidArgument(f"the schema name {name!r} is taken", remedy="choose one without 'stateflow.'")
    try:
        Draft202012Validator.check_schema(schema)
        return json.dumps(schema, sort_keys=True, allow_nan=False)
    except (SchemaError, TypeError, ValueError) as error:
        said = error.message if isinstance(error, SchemaError) else str(error)
        raise InvalidArgument(
            f"this is no JSON schema: {said[:200]}", remedy="see json-schema.org, 2020-12", schema=name
        ) from error
