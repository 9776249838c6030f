"""Makes the excerpt of a program: the part of its text that one class uses, directly or indirectly. No I/O.

An operator written in a script, a notebook or a REPL has no module that a replica could import: importing the script
would run it. So the class is sent as text, with the imports, functions, classes and assignments of its program that it
uses. The excerpt leaves out everything else that the program does (``with``, calls, loops, and assignments of names
that the class does not use).

A name that holds plain data has the same value in the excerpt as in the program, no matter how the program computed the
value (from ``sys.argv``, in a loop that filled a dict). For any other name, the excerpt contains the statements that
make its object. If a statement outside the excerpt changes such an object, the object in the excerpt would be
incomplete, so the class is refused. Nothing is pickled.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from stateflow.code.statements import (
    AWAIT,
    FUTURE,
    Aliases,
    Program,
    Statement,
    Touch,
    find_names,
    first_line,
    functions_of,
    instructions,
    is_empty,
    is_fixed,
    is_literal,
    names_bound,
    names_stored,
    names_surely_bound,
    without_warnings,
)
from stateflow.code.values import home_of, refilled, text_of
from stateflow.errors import OperatorNotImportable

# -- Programs and their excerpts -------------------------------------------------------------------------------------

#: names that every module defines for itself
_OWN = frozenset({"__name__", "__builtins__", "__spec__", "__loader__", "__doc__", "__annotations__"})
#: modules of sessions, data frames and clusters; a replica can neither receive nor make such objects
_NOT_MADE_AGAIN = (
    *("pyspark.sql.session", "pyspark.sql.dataframe", "pyspark.sql.classic", "pyspark.sql.streaming", "pyspark.core"),
    *("py4j", "stateflow.testing", "stateflow.local", "stateflow.client"),
)
#: position after all statements of the program
_LAST = (1 << 30, 0)
#: cell magics of IPython that run the rest of their cell as an ordinary cell
_RUN_AS_IT_IS = frozenset({"time", "capture", "prun"})
_MADE = re.compile(r"^(?:class|(?:async )?def)\s+(\w+)|^(\w+)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE)


def excerpt(program: Program, qualname: str, values: Mapping[str, Any] | None = None) -> str:
    """Returns the source of a module in which the class ``qualname`` is the same as in the program.

    Raises OperatorNotImportable, which names the object that cannot be sent.

    Args:
        values: current values of the program's names; None: the program is not running here.
    """
    taken = _Taking(program, values)
    name = qualname.partition(".")[0]
    taken.take(name, needed_by=qualname, hint=False)
    if not taken.statements:
        if name in program.magics:
            raise _in_magic(f"{name!r} is", program.magics[name])
        raise OperatorNotImportable(f"there is no {name!r} at the top level of the program", remedy="define it there")
    taken.put_back()
    taken.check_order()
    taken.check_aliases()
    text = taken.text()
    if values is not None:
        _check_same(text, taken.statements, values, qualname)
    return text


@without_warnings()
def written(texts: Sequence[str], package: str | None = None) -> Program:
    """Reads a program from its texts.

    Raises OperatorNotImportable for a script that is not valid Python.

    Args:
        texts: texts in the order in which they ran. A script is one text; a notebook has a text for each cell.
        package: package that relative imports start from.
    """
    program = Program([], single=len(texts) == 1)
    bodies: list[tuple[int, list[str], list[ast.stmt]]] = []
    for number, text in enumerate(map(partial(_cell, program), texts)):
        try:
            tree = ast.parse(text)
            compile(tree, "<program>", "exec", AWAIT, dont_inherit=True)  # finds more errors, such as a wrong break
        except SyntaxError as error:
            if program.single:
                raise OperatorNotImportable(
                    f"SyntaxError: {error}", remedy="correct the file", line=error.lineno
                ) from error
            continue  # a cell that never ran
        program.futures |= any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
        lines = re.split(r"\r\n?|\n", text)  # splitlines() would also split at form feeds, and within strings
        bodies.append((number, lines, tree.body))
    functions, aliases = functions_of(body for _, _, body in bodies), Aliases()
    for number, lines, body in bodies:
        _read(program, number, lines, body, package)
        for node in body:
            order = (number, first_line(node), node.col_offset)
            program.touches += aliases.touches(node, order, names_bound(node) or (), functions)
    for statement in program.statements:
        find_names(statement, program.futures)
    return program


def _cell(program: Program, text: str) -> str:
    """Returns the Python source of a text; empty for a notebook's cell that is not Python.

    IPython stores a cell that begins with ``%%name`` as a call, with the rest of the cell as text.
    """
    if not text.startswith("get_ipython().run_cell_magic("):
        return text
    match ast.parse(text).body:
        case [ast.Expr(ast.Call(args=[ast.Constant(str(magic)), _, ast.Constant(str(body))]))]:
            if magic in _RUN_AS_IT_IS:
                return f"\n{body}"  # keeps the line numbers
            made = {found[1] or found[2] for found in _MADE.finditer(body)}
            program.magics.update(dict.fromkeys(made, f"%%{magic}"))
    return ""


def _in_magic(what: str, magic: str) -> OperatorNotImportable:
    return OperatorNotImportable(
        f"{what} defined in a cell that begins with {magic}, and such cells are not sent",
        remedy="define it in a plain Python cell",
    )


def _read(program: Program, number: int, lines: list[str], body: list[ast.stmt], package: str | None) -> None:
    spans = [(first_line(node), node.end_lineno or node.lineno) for node in body]
    for index, node in enumerate(body):
        first, last = spans[index]
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        binds = names_bound(node)
        if binds is None:
            for name in names_stored(node):
                program.elsewhere.setdefault(name, first)
            continue
        alone = all(b < first or a > last for i, (a, b) in enumerate(spans) if i != index)
        relative = [n for n in ast.walk(node) if isinstance(n, ast.ImportFrom) and n.level]
        for each in relative:
            each.module = importlib.util.resolve_name("." * each.level + (each.module or ""), package)
            each.level = 0
        code = "\n".join(lines[first - 1 : last]) if alone and not relative else ast.unparse(node)
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        statement = Statement(
            (number, first, node.col_offset), code, frozenset(binds), star="*" in binds, imports=imports
        )
        statement.keeps = statement.binds - names_surely_bound(node)
        statement.defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        statement.empty = isinstance(node, ast.Assign | ast.AnnAssign) and is_empty(node.value)
        statement.repeats = imports or statement.defines or (isinstance(node, ast.Assign) and is_literal(node.value))
        program.statements.append(statement)


class _Taking:
    def __init__(self, program: Program, values: Mapping[str, Any] | None) -> None:
        self._program, self._values = program, values
        self._done: set[str] = set()
        self.statements: list[Statement] = []
        self._late: dict[str, list[Statement]] = {}
        self._as_now: set[str] = set()  # names whose values are written as they are now
        self._texts: dict[str, tuple[Statement, str]] = {}  # name → (statement that assigns or fills it, its text)

    def take(self, name: str, *, needed_by: str, hint: bool) -> None:
        todo, put_off = [(name, needed_by, hint)], set[str]()
        while todo:
            name, needed_by, hint = todo.pop()
            if name in self._done or name in _OWN:
                continue
            try:
                found = self._made(name, needed_by, hint)
            except OperatorNotImportable:
                put_off.add(name)  # the statement that changes its object may be one of those still to come
                if all(other in put_off for other, _, _ in todo):
                    raise
                todo.insert(0, (name, needed_by, hint))
                continue
            if not found and hint:
                continue
            self._done.add(name)
            for statement in found:
                if statement in self.statements:
                    continue
                self.statements.append(statement)
                what = next(iter(sorted(statement.binds)), name)
                todo += [(each, what, True) for each in sorted(statement.hints)]
                todo += [(each, what, False) for each in sorted(statement.uses)]

    def _made(self, name: str, needed_by: str, hint: bool) -> list[Statement]:
        makers = self._program.makers(name)
        if self._values is None:
            return self._as_written(name, needed_by, makers, hint)
        if name not in self._values:  # builtin or undefined, in the excerpt as in the program
            return []
        value = self._values[name]
        touch = self._touch(name, makers, value)
        if makers and makers[0].imports and touch is None:
            return makers
        text, uses = text_of(value, self._values)
        if text is not None:
            return self._as_it_is(name, text, uses, makers)
        kind = type(value).__module__
        if any(kind == root or kind.startswith(root + ".") for root in _NOT_MADE_AGAIN) and not hint:
            raise OperatorNotImportable(
                f"{needed_by} uses {name!r}, a {type(value).__name__}, which cannot be sent to a replica",
                remedy="provide what the operator needs in its rows, its state or open()",
            )
        # the statements of the program make the defaultdict with its factory (a lambda); its entries are written
        if isinstance(value, defaultdict) and makers:
            text, uses = text_of(dict(value), self._values)
            if text is not None and not uses:
                fill = Statement(makers[0].order, refilled(name, value, text), frozenset({name}))
                self._texts[name] = fill, text
                return [*makers, fill]
        if makers:
            emptied = makers[0].empty and isinstance(value, Collection) and len(value)
            if (touch is not None or emptied) and not hint:
                raise self._changed(name, needed_by, f", a {type(value).__name__},", touch)
            return self._with_stars(name, makers)
        imported = _import_of(name, value, self._values.get("__name__"))
        if imported is None and not hint:
            raise self._lacking(name, needed_by)
        return [] if imported is None else [imported]

    def _as_it_is(self, name: str, text: str, uses: set[str], makers: list[Statement]) -> list[Statement]:
        """Returns the statements that assign a value by its text.

        They take the place of the statement that made the value. If the value holds functions or classes of the
        program, they follow all other statements.
        """
        if not uses:
            self._as_now.add(name)
            at = makers[0].order if makers else (-1, 0)
            assigned = Statement(at, f"{name} = {text}", frozenset({name}))
            self._texts[name] = assigned, text
            return [assigned]
        # statements that fill the container, such as decorated functions, may be in the excerpt, too
        made = makers if makers and makers[0].empty else []
        late = Statement(_LAST, f"{name} = {text}", frozenset({name}), uses=uses)
        self._late[name] = [*made, late]
        return self._late[name]

    def put_back(self) -> None:
        """Writes a value once more behind the last statement of the excerpt that changes it, as this statement changes
        it at the replica, too.

        If no other statement has changed the value before, it begins as in the program. Otherwise it begins as it is
        now. Raises OperatorNotImportable if a definition then reads another value than in the program.
        """
        own = {id(each) for each in self._program.statements}
        run = {each.order: each for each in self.statements if id(each) in own}
        for name, (first, text) in self._texts.items():
            value, makers = (self._values or {}).get(name), self._program.makers(name)
            changes = [
                each
                for each in self._program.touches
                if each.name == name and each.order > first.order and each.may_change(value)
            ]
            within = [each for each in changes if each.order in run and each.surely_changes()]
            is_plain = name in self._as_now  # others are made by statements
            bound = [order for order, each in run.items() if is_plain and name in each.binds and order >= first.order]
            if not within and not bound:
                continue
            last = max([*bound, *(each.order for each in within)])
            is_other = any(each.order < last and each.order not in run for each in changes)
            is_same = not is_other and (not is_plain or self._is_literal(makers))
            if is_same:
                self.statements.remove(first)
                self.statements += [each for each in makers if each not in self.statements]
            for each in () if is_same else within:
                if self._may_differ(each, value, run[each.order]):
                    raise self._unknown(name, run[each.order])
            is_bound = bool(bound) or not all(each.path for each in within)
            code = f"{name} = {text}" if is_bound else refilled(name, value, text)
            self.statements.append(Statement((*last, 0), code, frozenset({name})))

    def _is_literal(self, makers: list[Statement]) -> bool:
        """Tells whether one statement makes a first value, and nothing else, and reads no name for that."""
        if len(makers) != 1 or len(makers[0].binds) != 1 or not (makers[0].repeats or makers[0].empty):
            return False
        return makers[0].uses.isdisjoint(self._values or {})

    def _may_differ(self, touch: Touch, value: object, reader: Statement) -> bool:
        """Tells whether a statement that changes a value may read another one than in the program."""
        if not touch.path:
            return touch.name in self._read_by(reader.at_once)
        is_same = isinstance(value, dict | set) and not touch.path[-1].startswith("pop")  # entries are set once more
        return touch.name in reader.at_once and touch.path != ("", "change") and not is_same

    def _unknown(self, name: str, reader: Statement) -> OperatorNotImportable:
        return OperatorNotImportable(
            f"the definition of {min(reader.binds)} changes {name!r}, whose value before that is not known",
            remedy=f"begin with a literal, such as {name} = 0 or {name} = [], or change it in another statement",
            line=reader.order[1] if self._program.single else None,
        )

    def check_order(self) -> None:
        """Checks that each statement reads the same values in the excerpt as it read in the program.

        A notebook's cell that was run again, unchanged, takes its former place: its names are needed there. Raises
        OperatorNotImportable if a statement reads a name that the excerpt assigns only later, or a value that the
        program changed later.
        """
        todo = list(self.statements)
        while todo:
            statement = todo.pop()
            for name in sorted(self._read_by(statement.at_once) - statement.binds - self._late.keys()):
                made = self._making(name)
                if made and all(each.order > statement.order for each in made):
                    moved = self._moved_up(name, made, statement)
                    todo += [*moved, statement] if moved else []
                    is_late = not moved and self._is_bound_before(name, statement)
                else:
                    is_late = self._is_changed_after(name, statement)
                if is_late and name in statement.at_once:
                    raise self._read_before(name, statement)
        for name, made in self._late.items():
            for statement in self.statements:
                if name in statement.at_once and statement not in made:
                    raise OperatorNotImportable(
                        f"the definition of {min(statement.binds)} reads {name!r}, which holds functions or classes",
                        remedy=f"read {name!r} in a method or function",
                        line=statement.order[1] if self._program.single else None,
                    )

    def _making(self, name: str) -> list[Statement]:
        return [each for each in self.statements if name in each.binds]

    def _read_by(self, at_once: set[str]) -> set[str]:
        """Returns these names, and those that the functions behind them may read when they are called."""
        found: set[str] = set()
        todo = list(at_once)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += [use for each in self._making(name) for use in each.uses]
        return found

    def _is_bound_before(self, name: str, reader: Statement) -> bool:
        """Tells whether the program has bound a name before ``reader``. Otherwise ``reader`` reads a builtin."""
        known = any(name in each.binds and each.order < reader.order for each in self._program.statements)
        return known or not hasattr(builtins, name)

    def _moved_up(self, name: str, made: list[Statement], reader: Statement) -> list[Statement]:
        """Moves the statement that makes a name to the place where the program ran the same statement before
        ``reader``. Returns the moved statement; an empty list if there is no such place."""
        last, former = self._program.makers(name)[:1], None
        for each in self._program.statements:
            if name in each.binds and each.order < reader.order:
                former = each
        if former is None or not last or len(made) > 1 or not last[0].repeats or former.code != last[0].code:
            return []
        if self._is_changed(name, former.order, last[0].order):
            return []
        moved = former if made[0] is last[0] else replace(made[0], order=former.order)
        self.statements[self.statements.index(made[0])] = moved
        return [moved]

    def _is_changed_after(self, name: str, reader: Statement) -> bool:
        """Tells whether the program may have changed a plain value after ``reader`` had read it. The excerpt has the
        value as it is now."""
        return name in self._as_now and self._is_changed(name, reader.order, _LAST)

    def _is_changed(self, name: str, after: tuple[int, ...], before: tuple[int, ...]) -> bool:
        """Tells whether a statement between two places may have changed the value of a name."""
        return any(
            each.may_change_any() if self._values is None else each.may_change(self._values[name])
            for each in self._program.touches
            if each.name == name and after < each.order < before
        )

    def _read_before(self, name: str, reader: Statement) -> OperatorNotImportable:
        return OperatorNotImportable(
            f"the definition of {min(reader.binds)} reads {name!r}, which a later statement changes",
            remedy="change it before the definition, or use another name; in a notebook, run the definition's cell "
            "again",
            line=reader.order[1] if self._program.single else None,
        )

    def check_aliases(self) -> None:
        """Checks that no statement outside the excerpt changes an object of the excerpt through another name. Raises
        OperatorNotImportable."""
        taken = {statement.order for statement in self.statements}
        for name in sorted({name for statement in self.statements for name in statement.binds} - self._as_now):
            value = None if self._values is None else self._values.get(name)
            if name in self._late or isinstance(value, defaultdict):  # written as it is now
                continue
            touch = self._touch(name, self._program.makers(name), value, taken)
            if touch is not None:
                user = next((min(each.binds) for each in self.statements if name in each.uses), name)
                raise self._changed(name, user, f" (also named {touch.through!r}),", touch)

    def _touch(
        self, name: str, makers: list[Statement], value: object, taken: Container[tuple[int, ...]] | None = None
    ) -> Touch | None:
        """Returns the first place where another statement may change the object that ``makers`` made; None: there is no
        such place.

        Args:
            taken: positions of the excerpt's statements, for the places where another name of the object stands; None:
                for the others.
        """
        if not makers:
            return None
        run = [each for each in self.statements if not each.binds <= self._as_now]  # others are written as they are now
        own = {statement.order for statement in (*makers, *run)}
        since = (-1, 0) if name in makers[-1].keeps else makers[-1].order
        for touch in self._program.touches:
            if bool(touch.through) != (taken is not None) or (taken is not None and touch.order in taken):
                continue
            if touch.name == name and touch.order > since and touch.order not in own:
                if self._values is not None:
                    part = self._values.get(touch.through, value)
                    found = touch.may_change(value) and (not touch.through or not is_fixed(part))
                elif makers[0].imports:
                    found = False
                elif makers[0].defines:
                    inner = touch.path[-1:] == ("register",) or (len(touch.path) > 1 and touch.has_name_of_change())
                    found = touch.may_change_any() and (touch.stores or inner)
                else:
                    found = touch.may_change_any()
                if found:
                    return touch
        return None

    def _changed(self, name: str, needed_by: str, kind: str, touch: Touch | None) -> OperatorNotImportable:
        return OperatorNotImportable(
            f"{needed_by} uses {name!r}{kind} which is changed by a statement that replicas do not run",
            remedy=f"build it in one statement, for example with a function: {name} = make()",
            line=touch.line if touch is not None and self._program.single else None,
        )

    def _as_written(self, name: str, needed_by: str, makers: list[Statement], hint: bool) -> list[Statement]:
        if not hint and (touch := self._touch(name, makers, None)) is not None:
            raise self._changed(name, needed_by, ",", touch)
        if makers or hasattr(builtins, name) or hint:
            return self._with_stars(name, makers)
        stars = [statement for statement in self._program.statements if statement.star]
        if not stars and name in self._program.elsewhere:
            raise self._lacking(name, needed_by)
        return stars

    def _with_stars(self, name: str, makers: list[Statement]) -> list[Statement]:
        """Returns the statements that make a name. The first one may need a former value, which may be imported by
        ``from module import *``."""
        if not makers or name not in makers[-1].keeps | makers[-1].at_once:
            return makers
        return [*makers, *(each for each in self._program.statements if each.star and each.order < makers[-1].order)]

    def _lacking(self, name: str, needed_by: str) -> OperatorNotImportable:
        if name in self._program.magics:
            what = f"{name!r} is" if name == needed_by else f"{needed_by} uses {name!r}, which is"
            return _in_magic(what, self._program.magics[name])
        return OperatorNotImportable(
            f"{needed_by} uses {name!r}, which is defined by a statement that replicas do not run",
            remedy="define it by an import, def, class or assignment at the top level",
            line=self._program.elsewhere.get(name) if self._program.single else None,
        )

    def text(self) -> str:
        """Returns the excerpt. The statements of a script keep their line numbers, so that tracebacks are correct."""
        lines = [FUTURE] if self._program.futures else []
        for statement in sorted(self.statements, key=lambda each: each.order):
            if self._program.single:
                lines += [""] * (statement.order[1] - 1 - len(lines))
            lines += statement.code.split("\n")
        return "\n".join(lines) + "\n"


# -- Imports that the program does not have ---------------------------------------------------------------------------


def _import_of(name: str, value: object, program: object) -> Statement | None:
    """Returns a statement that imports an object of another module; None: the object cannot be imported by name.

    Such an import is needed if no statement of the program binds the object's name.
    """
    if isinstance(value, ModuleType):
        return Statement((-1, 0), f"import {value.__name__} as {name}", frozenset({name}))
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(qualname, str) and module != program and qualname.isidentifier():
        home = home_of(value, module, qualname)
        return Statement((-1, 0), f"from {home} import {qualname} as {name}", frozenset({name}))
    return None


# -- Comparison with what runs ---------------------------------------------------------------------------------------


@without_warnings()
def _check_same(text: str, statements: Iterable[Statement], values: Mapping[str, Any], qualname: str) -> None:
    """Checks that the functions in the excerpt have the same code as those of the running program.

    They may differ, because a file may have changed since it was run, and a cell may have failed. Raises
    OperatorNotImportable.
    """
    written: dict[str, list[CodeType]] = {}  # functions of a property share a name, and so do lambdas
    for code in _codes(compile(text, "<excerpt>", "exec", dont_inherit=True)):
        written.setdefault(code.co_qualname, []).append(code)
    for name in sorted({name for statement in statements for name in statement.binds}):
        for function in _functions(values.get(name), values):
            own = function.__code__.co_qualname  # a wrapper has the __qualname__ of the function that it wraps
            codes = written.get(own, [function.__code__])
            if not any(_equal(code, function.__code__) for code in codes):
                raise OperatorNotImportable(
                    f"the source of {own} has changed since it was loaded",
                    remedy="restart the program; in a notebook, rerun its cells",
                    operator=qualname,
                )


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _functions(value: object, values: Mapping[str, Any]) -> Iterator[FunctionType]:
    """Yields the functions of the program that a value contains, including wrapped functions."""
    if isinstance(value, type):
        for each in vars(value).values():
            if not isinstance(each, type) or each.__qualname__.startswith(f"{value.__qualname__}."):
                yield from _functions(each, values)
        return
    if isinstance(value, FunctionType) and value.__globals__ is values:
        yield value
    match value:
        case staticmethod() | classmethod():
            inner: object = value.__func__
        case property():
            inner = value.fget
        case cached_property():
            inner = value.func
        case _:
            inner = inspect.getattr_static(value, "__wrapped__", None)
    if inner is not None:
        yield from _functions(inner, values)


def _equal(one: CodeType, other: CodeType) -> bool:
    if (one.co_names, len(one.co_consts)) != (other.co_names, len(other.co_consts)):
        return False
    if one.co_code != other.co_code and instructions(one) != instructions(other):
        return False
    return all(
        _equal(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else (type(a), a) == (type(b), b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )
