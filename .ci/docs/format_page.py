"""Formats on disk and on the wire: what the modules that read and write them say of them."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator

#: module → what it is the format of
FORMATS = {
    "stateflow.changes": "Change set",
    "stateflow.storage.commit_log": "Commit log",
    "stateflow.state.cells": "Cells: state in a partition's database",
    "stateflow.partition.layout": "Other entries of a partition's database",
    "stateflow.operator.output": "Stored output",
    "stateflow.partition.data_directory": "Data directory: identity, checkpoint store, quarantine",
    "stateflow.checkpoint.catalog": "Checkpoint: store and manifest",
    "stateflow.checkpoint.codec": "Checkpoint: blobs",
    "stateflow.code.bundles": "Bundle: an operator's code",
    "stateflow.client.outbox": "Outbox of a forwarding client",
}
#: classes whose fields are the format
CLASSES = {"stateflow.checkpoint.catalog": "Manifest"}
_ROLE = re.compile(r":(?:meth|class|func|mod|attr):`~?([^`]+)`")
_TABLE = re.compile(r"=+(?: +=+)+")


def page() -> str:
    return "\n".join(line for name, title in FORMATS.items() for line in _section(name, title))


def _section(name: str, title: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"## {title}\n\nIn `{name}`.\n"
    told = _ROLE.sub(lambda found: f"`{found[1].rsplit('.', 1)[-1]}`", inspect.cleandoc(module.__doc__ or ""))
    for part in _joined(told.split("\n\n")):
        if _TABLE.match(part) or part.startswith("    "):
            yield f"```text\n{textwrap.dedent(part)}\n```\n"
        else:
            yield re.sub(r"::$", ":", part).replace("``", "`") + "\n"
    if name in CLASSES:
        described = inspect.cleandoc(getattr(module, CLASSES[name]).__doc__)
        yield described.replace("``", "`") + "\n"


def _joined(parts: list[str]) -> Iterator[str]:
    """Literal blocks whole, which may have empty lines."""
    block = ""
    for part in parts:
        if part.startswith("    "):
            block = f"{block}\n\n{part}" if block else part
            continue
        if block:
            yield block
            block = ""
        yield part
    if block:
        yield block
