"""The base of all models of settings: where their values are read from, and how wrong values are reported.

A field's value is the program's argument or a flag, else the environment's, else the settings file's, else the field's
default (:class:`Settings`).

*The file* is TOML, read completely and once. Every key is checked before any value is used.

*Variables.* A process checks once whether variables ``STATEFLOW_…`` are set that no process reads. It warns of them, or
refuses them if ``STATEFLOW_STRICT`` is set.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsError

from stateflow.errors import InvalidArgument, is_on

log = logging.getLogger(__name__)

# -- The file of settings --------------------------------------------------------------------------------------------

#: maximum size of the file: a larger one is most likely not a settings file
BYTES_MAX = 1 << 20
#: greatest fraction or duration: 31 years, in seconds; neither a message nor a ledger can carry infinity
FRACTION_MAX = 1e9
#: least similarity of a name that is suggested for a misspelt one
ALIKE = 0.6
_TABLE = re.compile(r"""^\s*\[\s*["']?([\w-]+)["']?\s*(?:\.\s*["']?([\w-]+)["']?\s*)?\]""")
_KEY = re.compile(r"""^\s*["']?([\w-]+)["']?\s*(?:\.\s*["']?([\w-]+)["']?)?.*?=""")
Sections = Mapping[str, Sequence[type[BaseModel]]]


@dataclass(frozen=True, slots=True)
class ConfigurationFile:
    """A settings file that was read. ``values``: section → key → value."""

    path: Path
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read(path: Path, sections: Sections) -> ConfigurationFile:
    """Reads a settings file. Raises InvalidArgument if it is not valid, or if other users can read a secret in it.

    Args:
        sections: section that a file may have → its models, whose fields are the section's keys.
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
    """Returns the text, and whether users other than the owner and the group can read the file. The group may read it,
    because Kubernetes gives files to a group."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise InvalidArgument("a directory is not a settings file", remedy="name a file in it", file=path)
        if not stat.S_ISREG(mode):
            raise InvalidArgument(
                "the settings file is not a regular file, so processes that are started from here cannot read it again",
                remedy="write the settings into a regular file",
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
            f"the settings file is larger than {BYTES_MAX >> 20} MiB",
            remedy="check whether the path names another file",
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
    """Checks that every section and key is known, and that every value has the right type and is in its range. Returns
    the values by section and key. Raises InvalidArgument, which names the line of ``text`` if it is found."""
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
        # Annotated needs at least one argument after the type, hence the description
        kind: Any = Annotated[info.annotation, info.description, *info.metadata]
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise _wrong_in_file(name, info, value, error.errors()[0]["msg"], where) from None
    if _is_too_large(value):
        raise _wrong_in_file(name, info, value, _TOO_LARGE, where)


_TOO_LARGE = f"Input should be a number up to {FRACTION_MAX:.0f}"


def _is_too_large(value: object) -> bool:
    return isinstance(value, float) and not abs(value) <= FRACTION_MAX


def _wrong_in_file(name: str, info: FieldInfo, value: Any, why: str, where: Mapping[str, Any]) -> InvalidArgument:
    return InvalidArgument(
        f"{name} cannot be {shown(info, value)}: {why}",
        remedy="correct it in the file, or leave it out for the default",
        **where,
    )


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
    """Returns the line number of a section or key; None: it is written in an unusual notation."""
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
    """Returns section and key of each secret in the file, including URLs that contain a password."""
    return [
        (section, key)
        for section, values in file.values.items()
        for key, value in values.items()
        if value and (is_secret(fields_of(sections[section])[key]) or _has_password(value))
    ]


def _has_password(value: Any) -> bool:
    return isinstance(value, str) and re.search(r"://[^\s/?#@:]*:[^\s/?#]+@", value) is not None


# -- Models ----------------------------------------------------------------------------------------------------------

NO_TOKEN = SecretStr("")
#: environment variable that contains the path of the settings file
CONFIG = "STATEFLOW_CONFIG"
#: models by their section of the file
SECTIONS: dict[str, list[type[Settings]]] = {}


@dataclass(frozen=True, slots=True)
class Flag:
    """The command-line option of a field, in addition to its variable and key."""

    name: str


class Settings(BaseSettings):
    """Base of all models. A program's argument or a flag takes precedence over the environment, the environment over
    the settings file, and the file over the default.

    Raises InvalidArgument, which names the source of the value that is not valid.
    """

    #: section of the file; several models may share one
    section: ClassVar[str] = ""

    def __init__(self, **values: Any) -> None:
        check_once()
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            said = str(first["loc"][0])
            name = next((each for each in type(self).model_fields if said in (each, self.variable(each))), said)
            raise self._wrong(name, values, first["input"], first["msg"]) from error
        except SettingsError as error:  # a variable that is not JSON
            name = next((each for each in type(self).model_fields if f'"{each}"' in str(error)), "")
            raise self._wrong(name, values, os.environ.get(self.variable(name)), "write it as JSON") from error
        for name in type(self).model_fields:
            if _is_too_large(value := getattr(self, name)):
                raise self._wrong(name, values, value, _TOO_LARGE)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.section and cls not in SECTIONS.setdefault(cls.section, []):
            SECTIONS[cls.section].append(cls)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (_Layers(settings_cls, (init_settings, env_settings, _FileSource(settings_cls))),)

    @classmethod
    def variable(cls, name: str) -> str:
        """Returns the environment variable of a field."""
        info = cls.model_fields.get(name)
        alias = info.validation_alias if info is not None else None
        return alias if isinstance(alias, str) else f"{cls.model_config['env_prefix']}{name}".upper()

    @classmethod
    def flag(cls, name: str) -> str | None:
        return next((each.name for each in cls.model_fields[name].metadata if isinstance(each, Flag)), None)

    @classmethod
    def origin(cls, name: str, given: Mapping[str, Any]) -> str:
        """Returns the source of a field's value: a flag, a variable, ``FILE: section.key``, or ``default``.

        Args:
            given: values given by the program or by flags.
        """
        if name in given:
            return cls.flag(name) or name
        if _variable_is_set(cls.variable(name)):
            return cls.variable(name)
        said = configured_by()
        if said is not None and name in said.values.get(cls.section, {}):
            return f"{said.path}: {cls.section}.{name}"
        return "default"

    @classmethod
    def said_as(cls, name: str) -> str:
        """Returns the source of a field's value that is not an argument of the program; for a default, the field's
        variable.
        """
        found = cls.origin(name, {})
        return cls.variable(name) if found == "default" else found

    def _wrong(self, name: str, given: Mapping[str, Any], value: Any, why: str) -> InvalidArgument:
        where = type(self).origin(name, given)
        if where == name:  # a program's own argument
            where = self.variable(name)
        place = "in the environment" if where == self.variable(name) else "there"
        info = type(self).model_fields.get(name, FieldInfo())
        return InvalidArgument(
            f"{where} cannot be {shown(info, value)}: {why}",
            remedy=f"correct it {place}, or leave it out for the default",
        )


class _Layers(PydanticBaseSettingsSource):
    """Joins several sources in order of precedence. The value of a key comes from one source as a whole: tables from
    two sources are not merged.
    """

    def __init__(self, kind: type[BaseSettings], sources: Sequence[PydanticBaseSettingsSource]) -> None:
        super().__init__(kind)
        self._sources = sources

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # __call__ returns all fields at once

    def __call__(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for source in reversed(self._sources):
            found |= source()
        return found


class _FileSource(PydanticBaseSettingsSource):
    """The section of a model in the settings file of this process."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # __call__ returns all fields at once

    def __call__(self) -> dict[str, Any]:
        kind, said = self.settings_cls, configured_by()
        if said is None or not issubclass(kind, Settings):
            return {}
        values = said.values.get(kind.section, {})
        return {
            alias if isinstance(alias := info.validation_alias, str) else name: values[name]
            for name, info in kind.model_fields.items()
            if name in values
        }


def configured_by() -> ConfigurationFile | None:
    """Returns this process's settings file, as it was when first read; None: no file is named. Raises
    InvalidArgument."""
    named = os.environ.get(CONFIG, "")
    return _read(expanded(named)) if named else None


def expanded(path: str | Path) -> Path:
    """Returns a path with the home directory in place of a leading ``~`` or ``~user``. Raises InvalidArgument."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InvalidArgument(
            "there is no home directory for the ~ in the path", remedy="write the path in full", path=path
        ) from None


@functools.lru_cache(maxsize=16)
def _read(path: Path) -> ConfigurationFile:
    return read(path, SECTIONS)


#: ids of processes that have checked for unread variables; a forked child checks again
_looked: set[int] = set()


def check_once() -> None:
    """Checks for variables that no process reads, once per process, with its first settings. Raises
    InvalidArgument."""
    if os.getpid() not in _looked:
        check_variables()
        leave_unchecked()


def leave_unchecked() -> None:
    """Makes :func:`check_once` do nothing in this process, which reports unread variables itself or need not report
    them.
    """
    _looked.add(os.getpid())


def _variable_is_set(name: str) -> bool:
    return any(value and key.upper() == name for key, value in os.environ.items())


# -- Environment variables -------------------------------------------------------------------------------------------

PREFIX = "STATEFLOW_"
#: prefix of variables of the project's own tests
_TESTS = "STATEFLOW_TEST_"
#: variable that makes unread variables an error, in this process and those that it starts
STRICT = "STATEFLOW_STRICT"
#: variables that are not settings, with their purpose
OTHERS = {
    CONFIG: "path of the settings file, like `--config`",
    STRICT: "1: refuse variables `STATEFLOW_…` that nothing reads, like `--strict`; otherwise warn of them",
    "STATEFLOW_TRACEBACKS": "1: show errors with their full tracebacks",
    "STATEFLOW_INSIDE": "set by stateflow in processes that run operators; do not set it yourself",
}
#: variables that Kubernetes sets for a Service whose name begins with stateflow:
#: STATEFLOW_CONTROLLER_PORT_7070_TCP_ADDR
_OF_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
VARIABLES_ALIKE = 0.8


def known_variables() -> set[str]:
    """Returns the environment variables that some process reads."""
    return set(OTHERS) | {
        kind.variable(name) for kinds in SECTIONS.values() for kind in kinds for name in kind.model_fields
    }


def own_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the variables that are set and meant for stateflow, sorted."""
    return sorted(
        name
        for name in environment
        if (upper := name.upper()).startswith(PREFIX)  # settings are found in either case
        and not upper.startswith(_TESTS)
        and not _OF_KUBERNETES.search(upper)
    )


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the variables that are set and that no process reads, each with the name that may have been meant, or
    None."""
    known = known_variables()
    return {
        name: next(iter(difflib.get_close_matches(name.upper(), known, 1, VARIABLES_ALIKE)), None)
        for name in own_variables(environment)
        if name.upper() not in known
    }


def is_strict(environment: Mapping[str, str]) -> bool:
    return is_on(STRICT, environment)


def check_variables(say: Callable[[str], None] | None = None) -> None:
    """Reports the variables of stateflow that no process reads, each with the name that may have been meant. Raises
    InvalidArgument instead if STRICT is set. By default such a variable is no error, because it may be meant for
    another release in the fleet.

    Args:
        say: called with each line; None: the line is logged as a warning.
    """
    unknown = unknown_variables(os.environ)
    for name, meant in unknown.items():
        hint = f"did you mean {meant}?" if meant else ""
        if is_strict(os.environ):
            raise InvalidArgument(
                f"nothing reads {name}, which is set",
                remedy=hint or "remove it, or drop --strict and STATEFLOW_STRICT",
            )
        (say or log.warning)(f"nothing reads {name}, which is set{f': {hint}' if hint else ''}")
