"""Reads YAML files written by people, with limits, so that no file exhausts the process's memory, time or stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from stateflow.errors import InvalidArgument

BYTES_MAX = 1 << 20
#: limit of nested sections
DEPTH_MAX = 50
#: limit of values in a document; a value counts once more for each alias that repeats it
VALUES_MAX = 100_000


#: path to a value within a document: names, and numbers of list entries
Place = tuple[str | int, ...]
_DOUBTFUL = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp")}


def read_document(path: Path, may_be_text: Callable[[Place], bool] | None = None) -> Any:
    """Reads a YAML file. Raises InvalidArgument if the file cannot be read, is not YAML, or exceeds the limits.

    Args:
        may_be_text: tells whether the value at a place may be meant as text. Such a value is refused if YAML reads it
            as another type and would write it differently, because its intended type is not known. Examples are ``no``
            and ``1.10``. None: no value is refused for that reason.
    """
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}", remedy="pass a YAML file") from error
    if len(data) > BYTES_MAX:
        raise InvalidArgument(f"{path} is larger than {BYTES_MAX >> 20} MiB", remedy="pass a smaller file")
    try:
        text = data.decode()
        if may_be_text is not None:
            _check_texts(text, may_be_text, path)
        return parse(text)
    except UnicodeDecodeError as error:
        what = f"it is not UTF-8 (byte {error.start})"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = (error.problem or error.context or "it cannot be read") + (f" (line {mark.line + 1})" if mark else "")
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        what = " ".join(str(error).split())[:200]
    raise InvalidArgument(f"{path} is not valid YAML: {what}", remedy="correct the file")


def parse(text: str) -> Any:
    """Parses YAML. Raises yaml.YAMLError, and ValueError for an invalid date or number."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _check_texts(text: str, may_be_text: Callable[[Place], bool], file: Path) -> None:
    """Refuses ambiguous values with InvalidArgument. Raises the errors of :func:`parse` for invalid YAML."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        for place, scalar in _scalars(node, ()):
            if scalar.style is not None or scalar.tag not in _DOUBTFUL or not may_be_text(place):
                continue
            value = loader.construct_object(scalar)
            written = str(value).lower() if isinstance(value, bool) else str(value)
            if isinstance(value, date) or written != (
                scalar.value.lower() if isinstance(value, bool) else scalar.value
            ):
                other = "" if isinstance(value, date) else f", or write {written} if that is meant"
                raise InvalidArgument(
                    f"{place_of(place)} is {scalar.value}, which YAML reads as {written}",
                    remedy=f'write "{scalar.value}", in quotes{other}',
                    file=file,
                    line=scalar.start_mark.line + 1,
                )
    finally:
        loader.dispose()


def _scalars(node: Node | None, place: Place) -> Iterator[tuple[Place, ScalarNode]]:
    if isinstance(node, ScalarNode):
        yield place, node
    elif isinstance(node, SequenceNode):
        for number, each in enumerate(node.value):
            yield from _scalars(each, (*place, number))
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                yield from _scalars(value, place if key.value == "<<" else (*place, key.value))


def place_of(place: Sequence[str | int]) -> str:
    """Returns a place in the usual notation: ``operators[0].source``."""
    said = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return said.lstrip(".")


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self.depth += 1
        try:
            if self.depth > DEPTH_MAX:
                raise yaml.MarkedYAMLError(
                    problem=f"sections are nested deeper than {DEPTH_MAX}", problem_mark=self.get_mark()
                )
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def get_single_node(self) -> Node | None:
        node = super().get_single_node()
        if node is not None:
            _measure(node, {}, 0)
        return node


def _measure(node: Node, known: dict[int, int], depth: int) -> int:
    """Counts the values of a node. An alias counts as many values as the node to which it refers.

    Raises MarkedYAMLError for too many values, too deep nesting, a node that contains itself, or a duplicate name.
    """
    size = known.get(id(node))
    if size == 0:
        raise yaml.MarkedYAMLError(problem="an anchor contains itself", problem_mark=node.start_mark)
    if size is not None:
        return size
    if depth > DEPTH_MAX:
        raise yaml.MarkedYAMLError(problem=f"sections are nested deeper than {DEPTH_MAX}", problem_mark=node.start_mark)
    known[id(node)] = 0  # being measured
    size = 1
    if isinstance(node, SequenceNode):
        size += sum(_measure(each, known, depth + 1) for each in node.value)
    elif isinstance(node, MappingNode):
        names: set[tuple[str, str]] = set()
        for key, value in node.value:
            if isinstance(key, ScalarNode) and key.value != "<<":
                if (key.tag, key.value) in names:
                    raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value[:80]!r}", problem_mark=key.start_mark)
                names.add((key.tag, key.value))
            size += _measure(key, known, depth + 1) + _measure(value, known, depth + 1)
    if size > VALUES_MAX:
        raise yaml.MarkedYAMLError(
            problem=f"its anchors expand to more than {VALUES_MAX:,} values", problem_mark=node.start_mark
        )
    known[id(node)] = size
    return size
