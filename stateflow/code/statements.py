"""Finds the names that a program's statements bind and read, and the places where they change objects. No I/O.

An excerpt of the program without a change of an object that other statements made would contain another object than
the program.
"""

from __future__ import annotations

import ast
import dis
import enum
import functools
import inspect
import logging
import re
import symtable
import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType

FUTURE = "from __future__ import annotations"
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COMPREHENSION_NAMES = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
#: methods that run when an object of a class is made
CONSTRUCTORS = ("__new__", "__init__", "__post_init__")
#: instructions that read a name of the program
READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
#: flag to compile cells of a notebook, which may contain ``await``
AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

#: types whose values never change, or whose changes do not matter to an operator
_FIXED = (
    *(str, bytes, int, float, complex, tuple, frozenset, range, type(None), PurePath, re.Pattern, enum.Enum),
    *(logging.Logger, logging.LoggerAdapter, ModuleType, MethodType, BuiltinFunctionType, functools.partial),
)
_FIXED_IN = ("pyarrow", "typing", "datetime", "decimal", "zoneinfo", "uuid", "fractions")
#: names of methods that, in most libraries, change nothing
_LOOKS = re.compile(
    r"get|items|keys|values|copy|index|count|sections|options|cache_\w+|(get|has|is|as|to|find|show|print|count)_\w+"
    r"|describe|head|tail|join|format|split|match|search|fullmatch|debug|info|warning|error|exception|critical|log|setLevel|addHandler|addFilter"
)
#: names of methods that, in most libraries, change their object
_CHANGES = re.compile(
    r"append\w*|extend\w*|insert|\w*update|add\w*|setdefault|set\w*|pop\w*|clear|remove\w*|discard|sort|reverse|rotate"
    r"|subtract|read\w*|load\w*|register|fill|put\w*|push|fit|train"
)


@dataclass(eq=False, slots=True)
class Statement:
    """A statement that defines names."""

    order: tuple[int, ...]  # (number of the text, number of the line, column)
    code: str
    binds: frozenset[str]
    keeps: frozenset[str] = frozenset()  # those whose former value, or its submodules, the statement may keep
    at_once: set[str] = field(default_factory=set)  # names that the statement reads when it runs
    uses: set[str] = field(default_factory=set)  # the same, and names that its functions read later
    hints: set[str] = field(default_factory=set)  # names in annotations, which may or may not be read
    star: bool = False
    imports: bool = False
    defines: bool = False  # the statement is a def or a class
    empty: bool = False  # the statement makes an empty container
    repeats: bool = False  # run twice, the statement makes an equal value: an import, a def, a class, a literal


@dataclass(slots=True)
class Program:
    """The statements of a program, and what else an excerpt needs to know about it."""

    statements: list[Statement]
    elsewhere: dict[str, int] = field(default_factory=dict)  # name made by a statement that no excerpt contains → line
    touches: list[Touch] = field(default_factory=list)  # places where the program may change its objects
    magics: dict[str, str] = field(default_factory=dict)  # name made in a cell that is not Python → magic of the cell
    futures: bool = False  # annotations are text
    single: bool = False  # the program is one text with known line numbers

    def makers(self, name: str) -> list[Statement]:
        """Returns the statements that make the final value of a name, last first.

        The list begins with the last statement that binds the name. If this statement also reads the name, or may keep
        its former value, the previous statement that binds the name follows, and so on.
        """
        found: list[Statement] = []
        for statement in reversed(self.statements):
            if name in statement.binds:
                if statement.imports and all(each.imports for each in found):  # an import again does nothing
                    found = [each for each in found if each.code != statement.code]
                found.append(statement)
                if name not in statement.at_once | statement.keeps:
                    break
        return found


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keeps the compiler from warning about a program's text. Python has warned of it when the program began."""
    with warnings.catch_warnings(action="ignore"):
        yield


# -- What statements bind and read -----------------------------------------------------------------------------------


def first_line(node: ast.stmt) -> int:
    """Returns the number of a statement's first line, decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def names_bound(node: ast.stmt) -> set[str] | None:
    """Returns the names that a statement defines; None for a statement that may do anything else."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {(each.asname or each.name).partition(".")[0] for each in node.names}
        case ast.Assign():
            return {name for target in node.targets for name in _roots(target)}
        case ast.AnnAssign() | ast.AugAssign():
            return set(_roots(node.target)) if node.value is not None else set()
        case ast.If() if not any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test)):
            return _all_bind([*node.body, *node.orelse])
        case ast.Try():
            caught = [each for handler in node.handlers for each in handler.body]
            return _all_bind([*node.body, *caught, *node.orelse, *node.finalbody])
    if type(node).__name__ == "TypeAlias":  # from Python 3.12 on
        return {node.name.id}  # type: ignore[attr-defined]
    return None


def names_surely_bound(node: ast.stmt) -> set[str]:
    """Returns those names that a statement gives a new value whenever it succeeds.

    ``import a.b`` is not among the statements that do so: ``a`` keeps its other submodules.
    """
    match node:
        case ast.Import():
            return {each.asname for each in node.names if each.asname is not None}
        case ast.If():
            return _one_binds(node.body, node.orelse)
        case ast.Try():
            paths = [[*node.body, *node.orelse], *(handler.body for handler in node.handlers)]
            return _one_binds(*paths) | _one_binds(node.finalbody)
    return names_bound(node) or set()


def _one_binds(*paths: list[ast.stmt]) -> set[str]:
    """Returns the names that are surely bound whichever of these bodies is run, except those that raise."""
    bound = [{name for each in body for name in names_surely_bound(each)} for body in paths if not _raises(body)]
    return set.intersection(*bound) if bound else set()


def _raises(body: list[ast.stmt]) -> bool:
    return any(isinstance(each, ast.Raise) for each in body)


def _all_bind(body: Iterable[ast.stmt]) -> set[str] | None:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Pass | ast.Raise):
            continue
        found = names_bound(node)
        if found is None:
            return None
        names |= found
    return names


def _roots(target: ast.expr) -> Iterator[str]:
    """Yields the names that an assignment target binds or changes: ``a``, ``a, *b``, ``a.x``, ``a["x"]``."""
    match target:
        case ast.Name():
            yield target.id
        case ast.Tuple() | ast.List():
            for each in target.elts:
                yield from _roots(each)
        case ast.Starred() | ast.Attribute() | ast.Subscript():
            yield from _roots(target.value)


def names_stored(node: ast.stmt) -> set[str]:
    """Returns the names that a statement, or any statement within it, makes."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    made = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return names | {n.name for n in ast.walk(node) if isinstance(n, made)}


def find_names(statement: Statement, futures: bool) -> None:
    """Fills in the names that a statement reads. ``futures``: annotations are text."""
    code = f"{FUTURE}\n{statement.code}" if futures else statement.code
    top = symtable.symtable(code, "<excerpt>", "exec")
    tree = ast.parse(statement.code)
    flags = AWAIT | (annotations.compiler_flag if futures else 0)
    program = compile(tree, "<excerpt>", "exec", flags, dont_inherit=True)
    statement.at_once = read_at_once(program)
    statement.uses = {each.get_name() for each in top.get_symbols() if each.is_referenced()} | statement.at_once
    _add_globals(top, statement)
    statement.uses |= _globals_read(program)  # for a symbol table, "n += 1" reads nothing
    for node in ast.walk(tree):
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(hint, ast.expr):
                statement.hints |= named_in(hint)


def read_at_once(code: CodeType) -> set[str]:
    """Returns the names that a code object reads when it runs, also in comprehensions and class bodies. A class body's
    own names are among them if it reads them before it binds them."""
    read, bound = set[str](), set[str]()
    for each in dis.get_instructions(code):
        if each.opname in READS and each.argval not in bound:
            read.add(each.argval)
        elif each.opname == "STORE_NAME" and code.co_name != "<module>":
            bound.add(each.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and runs_at_once(inner):
            read |= read_at_once(inner)
    return read


def runs_at_once(code: CodeType) -> bool:
    """Tells whether a code object is that of a comprehension or a class body, which run where they stand."""
    return code.co_name in _COMPREHENSION_NAMES or not code.co_flags & inspect.CO_OPTIMIZED


def _globals_read(code: CodeType) -> set[str]:
    read = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return read.union(*(_globals_read(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _add_globals(table: symtable.SymbolTable, statement: Statement) -> None:
    for inner in table.get_children():
        is_class = inner.get_type() == "class"
        statement.uses |= {
            each.get_name()
            for each in inner.get_symbols()
            if each.is_referenced() and (each.is_global() or (is_class and each.is_local()))
        }
        _add_globals(inner, statement)


def named_in(hint: ast.expr) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(hint):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                names |= named_in(ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                continue
    return names


CONTAINERS = frozenset({"dict", "list", "set", "Counter", "OrderedDict", "defaultdict", "deque"})


def is_empty(made: ast.expr | None) -> bool:
    """Tells whether an expression makes an empty container: ``{}``, ``list()``."""
    match made:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=[]):
            return name in CONTAINERS and (not args or name == "defaultdict")
    return False


def is_literal(made: ast.expr) -> bool:
    try:
        ast.literal_eval(made)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def instructions(code: CodeType) -> list[tuple[str, object]]:
    """Returns the instructions of a code object, with equal results whether or not its text imports a name.

    Python compiles the call ``json.dumps(x)`` in another way if the same text imports ``json``. Cells of a notebook are
    compiled one by one, an excerpt as a whole.
    """
    kept = [each for each in dis.get_instructions(code) if each.opname not in ("PUSH_NULL", "EXTENDED_ARG")]
    offsets = [each.offset for each in kept]
    found = list[tuple[str, object]]()
    for each in kept:
        value = each.arg if each.opcode in dis.hasconst else each.argval
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            value = bisect_left(offsets, each.argval)
        found.append((each.opname.replace("LOAD_METHOD", "LOAD_ATTR"), value))
    return found


# -- What statements change ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Touch:
    """A place in a program where a name's value may be changed.

    Attributes:
        order: position of the statement, as in :class:`Statement`.
        path: attributes from the value to the called method; empty if the name itself is bound anew.
        stores: the place is an assignment or a deletion.
        discards: the place is a call whose result is not used.
        guarded: the place is in an ``if`` statement that tests ``__name__``.
        through: another name of the value, or of a part of it, which stands at this place; empty: the name itself does.
    """

    name: str
    order: tuple[int, ...]
    line: int
    path: tuple[str, ...]
    stores: bool = False
    discards: bool = False
    guarded: bool = False
    through: str = ""

    def may_change(self, value: object) -> bool:
        """Tells whether the statement at this place may change ``value``, the present value of the name."""
        if self.stores and not isinstance(value, ModuleType):
            return True
        if isinstance(value, type):
            if self.path == ("register",):  # of an abstract base class
                return True
            inner = inspect.getattr_static(value, self.path[0], None) if len(self.path) > 1 else None
            return isinstance(inner, list | dict | set | deque) and not only_looks(self.path)
        if isinstance(value, FunctionType):
            return self.path[-1:] == ("register",)
        return not is_fixed(value) and not only_looks(self.path)

    def may_change_any(self) -> bool:
        """Tells whether the statement at this place may change the name's value. Use it if the value is not known."""
        if self.guarded or (not self.stores and only_looks(self.path)):
            return False
        return self.stores or self.discards or self.has_name_of_change()

    def surely_changes(self) -> bool:
        """Tells whether the place looks like a change, and not only like a call of any other method."""
        return self.stores or self.has_name_of_change() or self.path[-1:] == ("change",)

    def has_name_of_change(self) -> bool:
        return bool(self.path) and _CHANGES.fullmatch(self.path[-1]) is not None


def only_looks(path: tuple[str, ...]) -> bool:
    """Tells whether the name of the called method suggests that the method only reads the object."""
    return bool(path) and _LOOKS.fullmatch(path[-1]) is not None


def is_fixed(value: object) -> bool:
    """Tells whether a value never changes, or changes in no way that matters to an operator."""
    return isinstance(value, _FIXED) or type(value).__module__.partition(".")[0] in _FIXED_IN or _is_frozen(value)


def _is_frozen(value: object) -> bool:
    return is_dataclass(value) and getattr(type(value), "__dataclass_params__").frozen  # noqa: B009 - for mypy


@dataclass(frozen=True, slots=True)
class Called:
    """A function of the program that a call, or the making of a class, runs.

    Attributes:
        of: names of classes of which the first parameter is one, or is a subclass.
        whole: name of the class that is the first parameter; empty: that is a subclass, or no class.
    """

    function: _Function
    of: frozenset[str] = frozenset()
    whole: str = ""


#: name → functions that run when ``f`` or ``A.method`` is called, an object of ``A`` is made, or ``class A`` runs
Functions = Mapping[str, list[Called]]


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of the program, with what it has from its bases in the program."""

    names: frozenset[str] = frozenset()  # of the class and its bases
    methods: Mapping[str, list[_Function]] = field(default_factory=dict)  # name → methods, those in ``super()`` too
    made_by: tuple[_Function, ...] = ()  # methods of its metaclass that run when the class or a subclass is made

    @classmethod
    def read(cls, node: ast.ClassDef, classes: Mapping[str, _Class]) -> tuple[_Class, list[Called]]:
        """Returns (the class, what its making runs). ``classes``: those that its statement may read."""
        named = [each.value if isinstance(each, ast.Subscript) else each for each in node.bases]
        bases = [classes[each.id] for each in named if isinstance(each, ast.Name) and each.id in classes]
        meta = [each.value for each in node.keywords if each.arg == "metaclass"]
        metas = [classes[each.id] for each in meta if isinstance(each, ast.Name) and each.id in classes]
        methods: dict[str, list[_Function]] = {}
        for base in bases:
            for name, functions in base.methods.items():
                methods[name] = [*dict.fromkeys((*methods.get(name, ()), *functions))]
        hooks = methods.get("__init_subclass__", [])
        for each in (each for each in node.body if isinstance(each, _Function)):
            goes_on = any(isinstance(n, ast.Attribute) and n.attr == each.name for n in ast.walk(each))
            methods[each.name] = [*(methods.get(each.name, ()) if goes_on else ()), each]
        made_by = [each for base in bases for each in base.made_by]
        made_by += [each for made in metas for name in ("__new__", "__init__") for each in made.methods.get(name, ())]
        names = frozenset[str]().union(*(base.names for base in bases))
        run = [Called(each, names - {node.name}) for each in dict.fromkeys((*hooks, *made_by))]
        return _Class(names | {node.name}, methods, tuple(dict.fromkeys(made_by))), run


def functions_of(bodies: Iterable[list[ast.stmt]]) -> Functions:
    """Returns the functions at the top level of a program, and those of its classes."""
    found: dict[str, list[Called]] = {}
    classes: dict[str, _Class] = {}
    for node in (each for body in bodies for each in body):
        if isinstance(node, _Function):
            found[node.name] = [Called(node)]
        for each in (each for each in ast.walk(node) if isinstance(each, ast.ClassDef)):
            made, run = _Class.read(each, classes)
            found.setdefault(f"class {each.name}", []).extend(run)
            if each is node or each.name not in classes:
                classes[each.name] = made
    for name, made in classes.items():
        found[name] = [Called(each) for method in CONSTRUCTORS for each in made.methods.get(method, ())]
        for method, functions in made.methods.items():
            of = made.names if any(map(_is_of_class, functions)) else frozenset[str]()
            found[f"{name}.{method}"] = [Called(each, of, name if of else "") for each in functions]
    return found


def _is_of_class(method: _Function) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "classmethod" for each in method.decorator_list)


def touches(node: ast.stmt, order: tuple[int, ...], binds: Iterable[str], functions: Functions) -> Iterator[Touch]:
    """Yields the places where a top-level statement may change objects that it does not bind itself.

    Args:
        binds: names that the statement binds.
    """
    own = frozenset(binds)
    guarded = isinstance(node, ast.If) and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node))
    called: set[str] = set()
    for name, at, path, stores, discards in _found(list(_run_by(node)), functions, called):
        if name not in own:
            yield Touch(name, order, at, path, stores, discards, guarded)
    while new := [name for name in called if name in functions]:
        seen = functions
        functions = {name: function for name, function in functions.items() if name not in new}
        called = set()
        for each in (each for name in new for each in seen[name]):
            local = _local(each.function)
            args = [arg.arg for arg in (*each.function.args.posonlyargs, *each.function.args.args)]
            for found, _, path, stores, discards in _found(list(ast.walk(each.function)), seen, called):
                if found not in local:
                    yield Touch(found, order, node.lineno, path, stores, discards, guarded)
                elif [found] == args[:1] and len(path) > 1:  # of what the class or its base has
                    for base in sorted(each.of):
                        yield Touch(base, order, node.lineno, (*path[:-1], path[-1] or "update"), discards=True)
                elif [found] == args[:1] and path and each.whole:
                    called.add(f"{each.whole}.{path[0]}")
                    if stores:
                        yield Touch(each.whole, order, node.lineno, path, stores=True)


#: an object, or a part of it: its name, and the path to the part
_Part = tuple[str, tuple[str, ...]]


class Aliases:
    """Other names of values, or of parts of them, as assignments at the top level give: ``d = c.table``."""

    def __init__(self) -> None:
        self._of: dict[str, list[_Part]] = {}  # name → what else it may be the name of

    def touches(
        self, node: ast.stmt, order: tuple[int, ...], binds: Iterable[str], functions: Functions
    ) -> Iterator[Touch]:
        """Yields what :func:`touches` yields, and the places where a value may be changed through another name. Call it
        with the statements in their order."""
        yield from touches(node, order, binds, functions)
        nodes = list(_run_by(node))
        bound = {each.id for each in nodes if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
        new: dict[str, list[_Part]] = {}
        for name, (of, path) in (found for each in nodes for found in _aliases(each)):
            parts = [(of, path), *((root, (*inner, *path)) for root, inner in self._of.get(of, ()))]
            new.setdefault(name, []).extend(part for part in parts if part[0] not in bound)
        for name, other in (pair for each in nodes for pair in _named_together(each)):
            new.setdefault(name, []).append((other, ()))
        kept = {name: [part for part in of if part[0] not in bound] for name, of in self._of.items()}
        self._of = {name: of for name, of in kept.items() if of and name not in bound} | new
        for touch in touches(node, order, (), functions) if self._of else ():
            for root, path in self._of.get(touch.name, ()) if touch.path else ():  # without a path, it is bound anew
                yield replace(touch, name=root, path=(*path, *touch.path), through=touch.name)


def _aliases(node: ast.AST) -> Iterator[tuple[str, _Part]]:
    """Yields (name, what it is another name of) for the names that a node binds to objects that have names."""
    pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
    match node:
        case ast.Assign():
            pairs = [(target, node.value) for target in node.targets]
        case ast.AnnAssign() | ast.NamedExpr():
            pairs = [(node.target, node.value)]
        case ast.For(iter=ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values)):
            pairs = [(node.target, each) for each in values]
        case ast.withitem(context_expr=ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[given])):
            pairs = [(node.optional_vars, given)] if called in ("nullcontext", "closing") else []
        case ast.withitem():
            pairs = [(node.optional_vars, node.context_expr)]
    while pairs:
        target, value = pairs.pop()
        match target, value:
            case ast.Tuple(elts=targets) | ast.List(elts=targets), ast.Tuple(elts=values) | ast.List(elts=values):
                pairs += zip(targets, values, strict=False)
            case _, ast.IfExp():
                pairs += [(target, value.body), (target, value.orelse)]
            case _, ast.BoolOp():
                pairs += [(target, each) for each in value.values]
            case _, ast.NamedExpr():
                pairs.append((target, value.value))
            case ast.Name(), ast.expr() if (at := _path(value)) is not None:
                yield target.id, at


def _named_together(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields pairs of names that one assignment, ``a = b = make()``, gives to one object."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    names = [each.id for each in targets if isinstance(each, ast.Name)]
    yield from ((one, other) for one in names for other in names if one != other)


_Found = tuple[str, int, tuple[str, ...], bool, bool]


def _found(nodes: list[ast.AST], functions: Functions, called: set[str]) -> Iterator[_Found]:
    """Yields (name, line, path, stores, discards) for each change or call in these nodes. Adds the names of called
    functions to ``called``."""
    discarded = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inner = {id(n) for node in nodes if isinstance(node, _COMPREHENSIONS) for n in ast.walk(node)}
    inner |= {id(n) for node in nodes if isinstance(node, ast.ClassDef) for each in node.body for n in ast.walk(each)}
    for node in nodes:
        match node:
            case ast.Call():
                yield from _of_call(node, functions, called, discards=id(node) in discarded)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Name):
                        called.add(decorator.id)
                    elif (at := _path(getattr(decorator, "func", decorator))) is not None and at[1]:
                        called.add(".".join((at[0], *at[1])))
                        yield at[0], decorator.lineno, at[1], False, True
                if isinstance(node, ast.ClassDef):
                    called.add(f"class {node.name}")
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                if (at := _path(node.value)) is not None:
                    yield at[0], node.lineno, (*at[1], ""), True, False
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if id(node) not in inner:
                yield name, node.lineno, (), True, False


def _of_call(call: ast.Call, functions: Functions, called: set[str], *, discards: bool) -> Iterator[_Found]:
    if isinstance(call.func, ast.Name):
        called.add(call.func.id)
        for function in (each.function for each in functions.get(call.func.id, ())):
            makes = function.name != call.func.id  # it is a constructor of the called class
            inside = _found(list(ast.walk(function)), {}, set())
            changed = {name for name, _, path, stores, _ in inside if path and (stores or _may_change(path, makes))}
            names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)][makes:]
            given = [*zip(names, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
            for name, value in given:
                if isinstance(value, ast.Name) and name in changed:
                    yield value.id, call.lineno, (name or "", "change"), False, True
        if call.func.id in ("setattr", "delattr") and call.args and (root := _root(call.args[0])) is not None:
            yield root, call.lineno, ("",), True, False
    elif (at := _path(call.func)) is not None and at[1]:
        called.add(".".join((at[0], *at[1])))
        yield at[0], call.lineno, at[1], False, discards


def _may_change(path: tuple[str, ...], surely: bool) -> bool:
    """Tells whether the method at the end of ``path`` may change its object, or, if ``surely``, has such a name."""
    return _CHANGES.fullmatch(path[-1]) is not None if surely else not only_looks(path)


def _run_by(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run when a statement runs. The bodies of functions are not among them."""
    yield node
    if isinstance(node, _INNER):
        left: list[ast.AST] = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
        left += getattr(node, "decorator_list", [])
    else:
        left = list(ast.iter_child_nodes(node))
    for each in left:
        yield from _run_by(each)


def _local(function: _Function) -> set[str]:
    declared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    args = function.args
    names = {each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    names |= {each.arg for each in (args.vararg, args.kwarg) if each is not None}
    names |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store | ast.Del)}
    return names - declared


def _path(node: ast.expr) -> tuple[str, tuple[str, ...]] | None:
    """Returns ``a.b.c`` as ("a", ("b", "c")); None for other expressions. Subscripts, as in ``a[0].b``, and ``vars``,
    as in ``vars(a)``, are left out."""
    path: list[str] = []
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(value=value, attr=attribute):
                path.insert(0, attribute)
            case ast.Subscript(value=value) | ast.Call(func=ast.Name(id="vars"), args=[value]):
                pass
            case _:
                return None
        node = value
    return node.id, tuple(path)


def _root(node: ast.expr) -> str | None:
    at = _path(node)
    return None if at is None else at[0]
