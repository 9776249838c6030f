"""``pipeline.yml``: the fields of a pipeline file, its parameters and its secrets. Nothing here touches Spark.

::

    name: tallies
    cluster: localhost:7070                # else it has one of its own, in stateflow-data/
    parameters: {day: "2024-01-01"}        # --set day=2024-01-02; one without a default must be set
    connections:
      warehouse: {url: "jdbc:postgresql://db/flights", user: "${env.DB_USER}", password: "${env.DB_PASSWORD}"}
    source: {format: parquet, path: "flights/${param.day}", schema: "k string, v long"}
    operators:
      - {operator: "myapp.ops:Tally", order_by: v}
    sink: {format: jdbc, connection: warehouse, options: {dbtable: tallies}, checkpoint: "checkpoints/tallies"}

``${env.NAME}``, ``${ENV:NAME}`` and ``${NAME}`` are environment variables. They count as secrets: the configuration and
errors show them as ``***``.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stateflow.documents import Place, parse, place_of, read_document
from stateflow.errors import InvalidArgument
from stateflow.ledger.manager import StateManager, ledger_url, state_manager_from_yaml
from stateflow.private import MASK, masked, names_a_secret

_REFERENCE = re.compile(r"\$\{(ENV:|env\.|param\.|)([A-Za-z_][A-Za-z0-9_]*)\}")
#: text that was probably meant as a reference
_LIKE_A_REFERENCE = re.compile(r"\$\{\s*(?:env|param)s?\s*[.:][^}]*\}", re.IGNORECASE)
Option = str | int | float | bool
#: sections with values of any type that Spark takes, and fields elsewhere that are not text
_FREE = frozenset({"options", "settings", "parameters", "connections"})
_TYPED = frozenset({"streaming", "each_batch", "tasks", "allowed_lateness", "unavailable_timeout"})


_INTERVAL = r"^\d+ (millisecond|second|minute|hour)s?$"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Reading(_Section):
    """A source, or rows of initial state: any format that Spark can read."""

    format: str
    path: str | None = None
    schema_: str | None = Field(default=None, alias="schema", description="columns, as Spark DDL")
    connection: str | None = Field(default=None, description="connection profile, overridden by options")
    options: dict[str, Option] = {}
    where: str | None = Field(default=None, description="SQL condition of the rows to keep")
    select: list[str] | None = Field(default=None, description="SQL expressions of the columns")


class Source(Reading):
    streaming: bool = True
    record: str | None = Field(default=None, description="column that orders records, for the stage of a batch run")


class Step(_Section):
    """One operator; its arguments are those of ``apply_operator``."""

    operator: str = Field(description="package.module:Class or file.py:Class")
    cluster: str | None = Field(default=None, description="host:port of the controller; default: the pipeline's")
    name: str | None = None
    source: str | None = None
    site: str | None = None
    order_by: str | None = None
    watermark: str | None = None
    allowed_lateness: float = Field(default=0.0, ge=0, description="seconds")
    tasks: int | None = Field(default=None, ge=1)
    unavailable_timeout: float = Field(default=60.0, ge=0, description="seconds")
    position: list[str] | None = Field(default=None, description="in real time: source partition and offset columns")
    initial_state: Reading | None = None
    where: str | None = None
    select: list[str] | None = None


class Sink(_Section):
    format: str
    path: str | None = None
    connection: str | None = None
    options: dict[str, Option] = {}
    mode: str = Field(default="append", pattern="^(append|overwrite|complete|update|ignore|errorifexists)$")
    checkpoint: str | None = Field(default=None, description="checkpoint directory; required for a streaming pipeline")
    each_batch: bool | None = Field(default=None, description="write each micro-batch as a batch; default for jdbc")


class Engine(_Section):
    master: str = "local[*]"
    settings: dict[str, Option] = {}


class PipelineConfig(_Section):
    name: str = Field(min_length=1)
    cluster: str | None = Field(default=None, description="host:port of the controller; default: a cluster of its own")
    directory: str | None = Field(default=None, description="directory of that cluster; default: stateflow-data")
    parameters: dict[str, Option | None] = {}
    connections: dict[str, dict[str, Any]] = {}
    spark: Engine = Engine()
    source: Source
    operators: list[Step] = []
    sink: Sink
    trigger: str = Field(default="0 seconds", pattern=_INTERVAL)
    real_time: str | None = Field(default=None, pattern=_INTERVAL, description="epoch length in Spark's real-time mode")
    state_manager: dict[str, Any] | None = None

    def options(self, end: Reading | Sink) -> dict[str, Option]:
        """Returns the options of the connection profile, overridden by the source's or sink's own."""
        return {**(self.connections[end.connection] if end.connection else {}), **end.options}


@dataclass(frozen=True)
class Secrets:
    values: tuple[str, ...]

    def masked(self, text: str) -> str:
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, MASK)
        return text


@dataclass(frozen=True)
class PipelineFile:
    """A loaded pipeline file.

    ``name``: file name. ``shown``: the effective configuration without secrets. ``state_manager``: opens the ledger,
    which must exist.
    """

    name: str
    config: PipelineConfig
    shown: dict[str, Any]
    secrets: Secrets
    state_manager: Callable[[], StateManager | None]


def load_pipeline(file: Path, settings: Mapping[str, str], environment: Mapping[str, str]) -> PipelineFile:
    """Loads a pipeline file. Raises InvalidArgument, naming the YAML path.

    Args:
        settings: values of parameters, as given by ``--set``.
        environment: environment variables for references.
    """
    document = _read(file)
    secrets: list[str] = []

    def secret(name: str, at: str) -> str:
        if name not in environment:
            raise InvalidArgument(f"{name} is not set in the environment", remedy="set it", at=at)
        secrets.append(environment[name])
        return environment[name]

    real = _filled(document, settings, secret)
    hidden = _filled(document, settings, lambda name, at: MASK)
    config = _validated(real)
    _check(config)
    shown = _without_secrets(_validated(hidden).model_dump(mode="json", by_alias=True, exclude_none=True))
    for_ledger = _filled(document, settings, lambda name, at: f"${{{name}}}")

    if config.state_manager is not None:
        ledger_url(for_ledger, environment)  # raises the ledger's errors now

    def state_manager() -> StateManager | None:
        if config.state_manager is None:
            return None
        return state_manager_from_yaml(for_ledger, environment, create=False)

    return PipelineFile(file.name, config, shown, Secrets(tuple(filter(None, secrets))), state_manager)


def _read(file: Path) -> dict[str, Any]:
    document = read_document(file, _may_be_text)
    if not isinstance(document, dict):
        raise InvalidArgument(f"{file} declares no pipeline", remedy="add name:, source:, operators: and sink:")
    return document


def _may_be_text(place: Place) -> bool:
    """Tells whether a value at this place is, or may be, text. Fields outside the free sections have known types."""
    return not _FREE.isdisjoint(place) or (bool(place) and place[-1] not in _TYPED)


# -- parameters and secrets -----------------------------------------------------------------------------------


def _filled(
    document: Mapping[str, Any], settings: Mapping[str, str], secret: Callable[[str, str], str]
) -> dict[str, Any]:
    """Returns the document with every reference replaced, and with the values of its parameters."""
    parameters = _parameters(document, settings, secret)
    rest = {key: value for key, value in document.items() if key != "parameters"}
    return {**_resolved(rest, parameters, secret), "parameters": parameters}


def _parameters(
    document: Mapping[str, Any], settings: Mapping[str, str], secret: Callable[[str, str], str]
) -> dict[str, Any]:
    """Returns the parameters. A value that is set is taken literally; a default may refer to the environment only."""
    declared = document.get("parameters") or {}
    if not isinstance(declared, Mapping):
        raise InvalidArgument("parameters must map names to defaults", remedy="write name: default", at="parameters")
    for name in settings:
        if name not in declared:
            raise InvalidArgument(f"there is no parameter {name!r}", remedy=_hint(name, list(declared), "declare it"))
    values = {
        str(name): _typed(str(name), settings[name], default)
        if name in settings
        else _resolved(default, {}, secret, f"parameters.{name}")
        for name, default in declared.items()
    }
    unset = [name for name, value in values.items() if value is None]
    if unset:
        raise InvalidArgument(f"the parameter {unset[0]!r} has no value", remedy=f"pass --set {unset[0]}=…")
    return values


def _typed(name: str, text: str, default: Any) -> Any:
    """Converts text to the type of the default; without a default it stays text."""
    if not isinstance(default, (bool, int, float)):
        return text
    try:
        value = parse(text)
    except (yaml.YAMLError, ValueError):
        value = None
    value = float(value) if isinstance(default, float) and type(value) is int else value
    if type(value) is not type(default):
        raise InvalidArgument(
            f"{text!r} is not a valid value of {name}", remedy=f"use a value of type {type(default).__name__}"
        )
    return value


def _resolved(value: Any, parameters: Mapping[str, Any], secret: Callable[[str, str], str], at: str = "") -> Any:
    """Returns ``value`` with every reference replaced; a text that consists of one parameter only keeps that
    parameter's type."""
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, str) and _REFERENCE.search(key):
                raise InvalidArgument(f"the key {key!r} cannot contain a reference", remedy="write it out", at=at)
        return {key: _resolved(each, parameters, secret, f"{at}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(each, parameters, secret, f"{at}[{number}]") for number, each in enumerate(value)]
    if not isinstance(value, str):
        return value
    for match in _LIKE_A_REFERENCE.finditer(value):
        if _REFERENCE.fullmatch(match[0]) is None:
            raise InvalidArgument(
                f"{match[0]} is not a valid reference",
                remedy="write ${env.NAME} or ${param.name}, with letters, digits and _",
                at=at,
            )

    def look_up(match: re.Match[str]) -> Any:
        kind, name = match.groups()
        if kind != "param.":
            return secret(name, at)
        if at.startswith("parameters."):
            raise InvalidArgument(
                f"a default cannot refer to the parameter {name!r}", remedy="write its value out", at=at
            )
        if name not in parameters:
            raise InvalidArgument(
                f"there is no parameter {name!r}",
                remedy=_hint(name, list(parameters), f"declare it: parameters: {{{name}: default}}"),
                at=at,
            )
        return parameters[name]

    whole = _REFERENCE.fullmatch(value)
    return look_up(whole) if whole else _REFERENCE.sub(lambda match: str(look_up(match)), value)


def _without_secrets(value: Any, key: str = "") -> Any:
    """Masks secrets, also those written in the file: values whose keys name a secret, and passwords in URLs."""
    if isinstance(value, dict):
        return {name: _without_secrets(each, str(name)) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each, key) for each in value]
    if names_a_secret(key):
        return MASK
    return masked(value) if isinstance(value, str) else value


# -- faults ------------------------------------------------------------------------------------


def _validated(document: Mapping[str, Any]) -> PipelineConfig:
    try:
        return PipelineConfig.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        at, last = place_of(first["loc"]), str(first["loc"][-1])
        fields = _fields(first["loc"][:-1])
        if first["type"] == "extra_forbidden":
            what, remedy = f"{at} is unknown", _hint(last, fields, "leave it out")
        elif first["type"] == "missing":
            what, remedy = f"{at} is missing", "add it"
        else:
            what, remedy = f"{at} is invalid: {first['msg']}", "correct it"
        raise InvalidArgument(what, remedy=remedy) from None


def _fields(loc: Sequence[int | str]) -> list[str]:
    """Returns the field names that are possible in the section at ``loc``."""
    section: type[BaseModel] = PipelineConfig
    for part in loc:
        if isinstance(part, str):
            inner = _section_in(section.model_fields[part].annotation) if part in section.model_fields else None
            if inner is None:
                return []
            section = inner
    return [field.alias or name for name, field in section.model_fields.items()]


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


def _hint(name: str, known: list[str], otherwise: str) -> str:
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"{otherwise}; known: {', '.join(known)}" if known else otherwise


def _check(config: PipelineConfig) -> None:
    ends: list[tuple[str, Reading | Sink]] = [("source", config.source), ("sink", config.sink)]
    for number, step in enumerate(config.operators):
        if step.initial_state is not None:
            ends.append((f"operators[{number}].initial_state", step.initial_state))
    for at, end in ends:
        if end.connection is not None and end.connection not in config.connections:
            known = list(config.connections)
            raise InvalidArgument(
                f"{at}.connection: there is no connection profile {end.connection!r}",
                remedy=_hint(end.connection, known, "add it under connections:"),
            )
    if config.source.streaming and not config.sink.checkpoint:
        raise InvalidArgument(
            "sink.checkpoint is missing: a streaming pipeline could not resume where it stopped",
            remedy="add checkpoint: with a persistent directory of its own, or source: {streaming: false}",
        )
    _check_real_time(config)
    if config.source.record is not None and (config.source.streaming or config.state_manager is None):
        raise InvalidArgument(
            "source.record applies only to the stage of a batch pipeline",
            remedy="leave it out, or add streaming: false and state_manager:",
        )


def _check_real_time(config: PipelineConfig) -> None:
    placed = [number for number, step in enumerate(config.operators) if step.position is not None]
    if config.real_time is None:
        if placed:
            raise InvalidArgument(
                f"operators[{placed[0]}].position applies to real-time mode only",
                remedy="add real_time:, or leave it out",
            )
        return
    for at, is_wrong, why in (
        ("source.streaming", not config.source.streaming, "a batch pipeline cannot run in real-time mode"),
        ("trigger", "trigger" in config.model_fields_set, "real_time sets the length of an epoch"),
        ("sink.each_batch", bool(config.sink.each_batch), "there are no micro-batches in real-time mode"),
        ("sink.format", config.sink.format == "jdbc", "jdbc is written in micro-batches"),
        ("sink.mode", config.sink.model_dump(exclude_unset=True).get("mode", "update") != "update", "use mode update"),
    ):
        if is_wrong:
            raise InvalidArgument(f"{at} conflicts with real_time: {why}", remedy="correct it, or leave real_time: out")
