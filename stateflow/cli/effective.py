"""Settings as they are in effect, written as a file of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w
from pydantic import SecretStr

from stateflow.masking import MASK, masked
from stateflow.settings import Settings

HEADER = """\
# {what}: effective settings.
# In parentheses: the origin of each. Load the file with --config FILE.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A model, and those of its values that flags gave."""

    model: Settings
    given: Mapping[str, Any]


def effective(what: str, parts: Sequence[Part]) -> str:
    """Returns settings as TOML. Secrets are masked and commented out: a process that reads the file takes them from
    where they are now.

    Args:
        what: the program that has these settings.
    """
    sections: dict[str, list[Part]] = {}
    for part in parts:
        sections.setdefault(part.model.section, []).append(part)
    return HEADER.format(what=what) + "".join(_section(name, found) for name, found in sections.items())


def _section(name: str, parts: Sequence[Part]) -> str:
    lines, tables = [f"\n[{name}]\n"], []
    for part in parts:
        for key, info in type(part.model).model_fields.items():
            value = getattr(part.model, key)
            origin = type(part.model).origin(key, part.given)
            comment = f"# {info.description} ({origin})\n"
            if isinstance(value, dict):
                tables += ["\n", comment, tomli_w.dumps({name: {key: value}})]
            else:
                lines += [comment, _line(key, value)]
    return "".join(lines + tables)


def _line(key: str, value: Any) -> str:
    if isinstance(value, SecretStr):
        value, shown = value.get_secret_value(), MASK
    else:
        shown = masked(value) if isinstance(value, str) else value
    if value and shown != value:
        return f"# omitted, contains a secret: {key} = {tomli_w.dumps({'': shown})[5:]}"
    return tomli_w.dumps({key: value})
