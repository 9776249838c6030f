"""The tables of docs/settings.md, made from the models. ``.ci/generate-settings`` writes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from stateflow.settings.base import OTHERS, SECTIONS, Settings

#: line of a page after which everything is generated
BEGIN = "<!-- Made by .ci/generate-settings from stateflow/settings/models.py -->\n"
_HEAD = "| key | description | type | unit | default | variable | flag |\n|---|---|---|---|---|---|---|\n"
_UNITS = {"_bytes_per_s": "bytes/s", "_per_s": "1/s", "_bytes_max": "bytes", "_bytes": "bytes", "_ms": "ms", "_s": "s"}
_NAMES = {str: "string", int: "integer", float: "number", bool: "true, false", SecretStr: "secret"}


def page(before: str) -> str:
    """Returns the page with new tables.

    Args:
        before: the present page.

    Raises ValueError if the page has no place for the tables.
    """
    prose, found, _ = before.partition(BEGIN)
    if not found:
        raise ValueError("the page has no line that marks where the tables begin")
    return prose + BEGIN + "".join(_section(name, kinds) for name, kinds in SECTIONS.items()) + _others()


def _section(name: str, kinds: list[type[Settings]]) -> str:
    said = " ".join(" ".join(inspect.getdoc(kind).split()) for kind in kinds)  # type: ignore[union-attr]
    rows = "".join(row for kind in kinds for row in _rows(kind))
    return f"\n### `[{name}]`\n\n{said}\n\n{_HEAD}{rows}"


def _rows(kind: type[Settings]) -> Iterator[str]:
    for name, info in kind.model_fields.items():
        flag = kind.flag(name)
        cells = [
            f"`{name}`",
            info.description or "",
            kind_of(info),
            unit_of(name),
            _default(info, unit_of(name)),
            f"`{kind.variable(name)}`",
            f"`{flag}`" if flag else "",
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def kind_of(info: FieldInfo) -> str:
    """Returns the type of a value, with its valid range."""
    limits = {name: value for each in info.metadata for name, value in _limits(each)}
    if "pattern" in limits:
        return ", ".join(re.findall(r"\w+", limits["pattern"]))
    if getattr(info.annotation, "__args__", None):
        words: tuple[Any, ...] = info.annotation.__args__  # type: ignore[union-attr]
        return "table of strings; JSON in a variable" if info.annotation == dict[str, str] else ", ".join(words)
    said = {"ge": "≥", "gt": ">", "le": "≤"}
    ranges = ", ".join(f"{said[name]} {value}" for name, value in limits.items() if name in said)
    named = _NAMES[info.annotation]  # type: ignore[index]
    return f"{named} {ranges}".strip()


def _limits(each: Any) -> Iterator[tuple[str, Any]]:
    for name in ("ge", "gt", "le", "pattern"):
        value = getattr(each, name, None)
        if value is not None:
            yield name, value


def unit_of(name: str) -> str:
    return next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")


def _default(info: FieldInfo, unit: str) -> str:
    value = info.get_default(call_default_factory=True, validated_data={})
    if value in ("", {}, SecretStr("")):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    shown = f"`{value:g}`" if isinstance(value, float) and value < 1e6 else f"`{value}`"
    for size, called in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if "bytes" in unit and value and not value % size:
            return f"{shown} ({value // size} {called})"
    return shown


def _others() -> str:
    rows = "".join(f"| `{name}` | {said} |\n" for name, said in OTHERS.items())
    return f"\n### In the environment only\n\n| variable | description |\n|---|---|\n{rows}"
