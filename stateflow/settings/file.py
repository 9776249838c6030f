"""The file of settings: TOML, read whole and once. Every key is checked before any value is used."""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from stateflow.errors import InvalidArgument

#: a larger file is taken for another one, named by mistake
BYTES_MAX = 1 << 20
#: similarity from which a name is suggested for a misspelt one
ALIKE = 0.6
_TABLE = re.compile(r"""^\s*\[\s*["']?([\w-]+)["']?\s*(?:\.\s*["']?([\w-]+)["']?\s*)?\]""")
_KEY = re.compile(r"""^\s*["']?([\w-]+)["']?\s*(?:\.\s*["']?([\w-]+)["']?)?.*?=""")
Sections = Mapping[str, Sequence[type[BaseModel]]]


@dataclass(frozen=True, slots=True)
class ConfigurationFile:
    """A file of settings that was read. ``values``: by section and key."""

    path: Path
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read(path: Path, sections: Sections) -> ConfigurationFile:
    """Reads a file of settings. Raises InvalidArgument.

    Args:
        sections: sections that a file may have; the keys of one are the fields of its models.
    """
    text, readable_by_others = _text(path)
    file = ConfigurationFile(path, checked(_parsed(text, path), sections, text, path))
    secret = next((f"{section}.{key}" for section, key in _secrets(file, sections)), None)
    if secret is not None and readable_by_others:
        raise InvalidArgument(
            f"{secret} is a secret, and other users can read the file", remedy=f"chmod 600 {path}", file=path
        )
    return file


def _text(path: Path) -> tuple[str, bool]:
    """Returns the text, and whether others than the owner and the group can read it: Kubernetes hands files to a
    group."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise InvalidArgument("a directory is not a settings file", remedy="name a file in it", file=path)
        if not stat.S_ISREG(mode):
            raise InvalidArgument(
                "the settings file is not a regular file, so that processes started from here could not read it again",
                remedy="write the settings into a file",
                file=path,
            )
        with path.open("rb") as opened:
            data = opened.read(BYTES_MAX + 1)
    except OSError as error:
        raise InvalidArgument(
            f"the settings file cannot be read: {error.strerror}",
            remedy="correct --config or STATEFLOW_CONFIG",
            file=path,
        ) from None
    if len(data) > BYTES_MAX:
        raise InvalidArgument(
            f"a settings file may have at most {BYTES_MAX >> 20} MiB",
            remedy="check the path",
            file=path,
        )
    try:
        return data.decode(), os.name == "posix" and bool(mode & stat.S_IRWXO)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidArgument(
            "the settings file is not UTF-8", remedy="save it as UTF-8", file=path, line=line
        ) from None


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else "nested too deeply"
        raise InvalidArgument(
            f"the settings file is not TOML: {why}",
            remedy='write [section] lines, and key = "value" below them',
            file=path,
        ) from None


def checked(found: Mapping[str, Any], sections: Sections, text: str, path: Path) -> dict[str, dict[str, Any]]:
    """Checks that every section and key is known, and every value of the right type and in its range. Returns the
    values by section and key. Raises InvalidArgument, which names the line of ``text`` where it is found."""
    for section, values in found.items():
        where: dict[str, Any] = {"file": path, "line": line_of(text, section)}
        if section not in sections:
            raise InvalidArgument(f"there is no section [{section}]", remedy=_section_meant(section, sections), **where)
        if not isinstance(values, dict):
            raise InvalidArgument(
                f"{section} is a section, not a key",
                remedy=f"write [{section}], and its keys on the lines below",
                **where,
            )
        fields = fields_of(sections[section])
        for key, value in values.items():
            where = {"file": path, "line": line_of(text, section, key)}
            if key not in fields:
                raise InvalidArgument(
                    f"there is no key {section}.{key}", remedy=_key_meant(section, key, sections), **where
                )
            _check_value(f"{section}.{key}", fields[key], value, where)
    return {section: dict(values) for section, values in found.items()}


def _check_value(name: str, info: FieldInfo, value: Any, where: Mapping[str, Any]) -> None:
    """Checks a value strictly: TOML has types, so no string is converted."""
    try:
        # Annotated needs at least one of these
        kind: Any = Annotated[info.annotation, info.description, *info.metadata]
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise InvalidArgument(
            f"{name} cannot be {shown(info, value)}: {error.errors()[0]['msg']}",
            remedy="correct it in the file, or leave it out for the default",
            **where,
        ) from None


def fields_of(models: Sequence[type[BaseModel]]) -> dict[str, FieldInfo]:
    return {name: info for model in models for name, info in model.model_fields.items()}


def is_secret(info: FieldInfo) -> bool:
    return info.annotation is SecretStr


def shown(info: FieldInfo, value: Any) -> str:
    return "the given value" if is_secret(info) else repr(value)[:80]


def _section_meant(section: str, sections: Sections) -> str:
    close = difflib.get_close_matches(section, sections, 1, ALIKE)
    return f"did you mean [{close[0]}]?" if close else f"sections are {', '.join(sections)}"


def _key_meant(section: str, key: str, sections: Sections) -> str:
    own = fields_of(sections[section])
    others = {name: other for other, models in sections.items() for name in fields_of(models)}
    if key in others:
        return f"it belongs to [{others[key]}]"
    close = difflib.get_close_matches(key, own, 1, ALIKE)
    if close:
        return f"did you mean {close[0]}?"
    far = difflib.get_close_matches(key, others, 1, ALIKE)
    if far:
        return f"did you mean {far[0]} of [{others[far[0]]}]?"
    return f"keys of [{section}] are in docs/settings.md"


def line_of(text: str, section: str, key: str | None = None) -> int | None:
    """Returns the line of a section or key, as people usually write it. None: it is written in another way."""
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        table, pair = _TABLE.match(line), _KEY.match(line)
        if table is not None:
            current = table[1]
            if current == section and key in (None, table[2]):
                return number
        elif pair is not None and (
            (current == section and pair[1] == key) or (current == "" and pair[1] == section and key in (None, pair[2]))
        ):
            return number
    return None


def _secrets(file: ConfigurationFile, sections: Sections) -> list[tuple[str, str]]:
    """Returns section and key of each secret in the file, also of URLs that have a password."""
    return [
        (section, key)
        for section, values in file.values.items()
        for key, value in values.items()
        if value and (is_secret(fields_of(sections[section])[key]) or _has_password(value))
    ]


def _has_password(value: Any) -> bool:
    return isinstance(value, str) and re.search(r"://[^\s/?#@:]*:[^\s/?#]+@", value) is not None
