"""The base of all models of settings: where their values come from, and how wrong values are reported."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsError

from stateflow.errors import InvalidArgument
from stateflow.settings import file
from stateflow.settings.file import ConfigurationFile

NO_TOKEN = SecretStr("")
#: environment variable that names the file
CONFIG = "STATEFLOW_CONFIG"
#: models by their section of the file
SECTIONS: dict[str, list[type[Settings]]] = {}


@dataclass(frozen=True, slots=True)
class Flag:
    """The option of a command line that a field has, beside its variable and key."""

    name: str


class Settings(BaseSettings):
    """Base of all models. A program's argument or a flag comes before the environment, then the file, then the default.

    Raises InvalidArgument, which names the source of a value that is not valid.
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
        """Returns where a field's value comes from: a flag, a variable, ``FILE: section.key``, or ``default``.

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
        """Returns where a field's value comes from when the program gave none; for a default, the field's variable."""
        found = cls.origin(name, {})
        return cls.variable(name) if found == "default" else found

    def _wrong(self, name: str, given: Mapping[str, Any], value: Any, why: str) -> InvalidArgument:
        where = type(self).origin(name, given)
        if where == name:  # a program's own argument
            where = self.variable(name)
        place = "in the environment" if where == self.variable(name) else "there"
        info = type(self).model_fields.get(name, FieldInfo())
        return InvalidArgument(
            f"{where} cannot be {file.shown(info, value)}: {why}",
            remedy=f"correct it {place}, or leave it out for the default",
        )


class _Layers(PydanticBaseSettingsSource):
    """Sources one after the other, key by key: a table from one source is not mixed with a table from another."""

    def __init__(self, kind: type[BaseSettings], sources: Sequence[PydanticBaseSettingsSource]) -> None:
        super().__init__(kind)
        self._sources = sources

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # all at once, below

    def __call__(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for source in reversed(self._sources):
            found |= source()
        return found


class _FileSource(PydanticBaseSettingsSource):
    """The section of a model in the file that this process was given."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # all at once, below

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
    """Returns the file of settings of this process, as it was when it was first read. None: none is named. Raises
    InvalidArgument."""
    named = os.environ.get(CONFIG, "")
    return _read(Path(named).expanduser()) if named else None


@functools.lru_cache(maxsize=16)
def _read(path: Path) -> ConfigurationFile:
    return file.read(path, SECTIONS)


#: ids of processes that have looked for unread variables; a forked child looks again
_looked: set[int] = set()


def check_once() -> None:
    """Looks for variables that no process reads, once per process, with its first settings. Raises InvalidArgument."""
    if os.getpid() not in _looked:
        from stateflow.settings.variables import check_variables

        check_variables()
        leave_unchecked()


def leave_unchecked() -> None:
    """Keeps :func:`check_once` from looking in this process, which reports such variables itself, or not at all."""
    _looked.add(os.getpid())


def _variable_is_set(name: str) -> bool:
    return any(value and key.upper() == name for key, value in os.environ.items())
