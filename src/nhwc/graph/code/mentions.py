"""Read from the source of a module what its code does with itself and with its parts.

Code may do more with its parts than call them: ask for their class, read their weights, hook them,
or hand itself to a function that does. Code that cannot be read is assumed to do all of that.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from torch import nn

from ...operators.kinds import MAYBE_COPIES, STRIDE_METHODS
from .accesses import CHANGING
from .reached import codes_in, functions_behind, functions_of, methods_of, names_in, takes_module

_LOOKING = {
    *("modules", "named_modules", "children", "named_children", "_modules", "get_submodule"),
    *("parameters", "named_parameters", "_parameters", "get_parameter", "buffers", "_buffers"),
    *("named_buffers", "get_buffer", "state_dict", "load_state_dict", "apply", "_apply"),
    *("__dict__", "functional_call"),
}
"""Names by which code reaches all parts or all tensors of a module."""

_PLAIN = {"dtype", "device", "is_cuda"}
"""Attributes of a module's parameters that folding does not change."""


@dataclass
class Mentions:
    """The names that a module's code uses; `unseen` says why they may not be all.

    `otherwise` holds attributes of the module that it does not just call, `read_off_others` those
    of other values, `written` the attributes and variables that it assigns to or changes.
    """

    otherwise: set[str] = field(default_factory=set)
    read_off_others: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    unseen: str = ""


def mentions_of(module: nn.Module, others: Iterable[str] = ()) -> Mentions:
    """Read the code that runs when `module` or one of its methods named in `others` is called."""
    said = Mentions()
    if "forward" in vars(module):
        said.unseen = "its forward was set from outside"
        return said
    for name in ("__getattr__", "__getattribute__"):
        if getattr(type(module), name) is not getattr(nn.Module, name):
            # Graphs have attributes that the part does not have, and copying them looks one up.
            said.unseen = f"it has a {name} of its own"
            return said
    methods = {
        function.__code__
        for function in methods_of(module, others)
        if takes_module(module, function)
    }
    for function in functions_of(module, others):
        tree = tree_of(function.__code__)
        if tree is None and function.__code__ not in methods:
            said.names.add("vars")  # The function may look into its arguments.
            continue
        if tree is None:
            said.unseen = f"the code of {function.__name__} cannot be read"
            return said
        own = _first_argument(tree) if function.__code__ in methods else ""
        _read(_Reading(module, function, own, methods), tree, said)
    return said


@dataclass(frozen=True)
class _Reading:
    """A function to read, its name for the module, and the code of the module's methods."""

    module: nn.Module
    function: types.FunctionType
    own: str
    methods: set[types.CodeType]


def reads_state(module: nn.Module) -> str:
    """Say what the code of `module` reads that hooks on its parts may write; '' for nothing."""
    said = mentions_of(module)
    if said.unseen:
        return said.unseen
    plain = (int, float, str, bytes, tuple, types.FunctionType, types.MethodType, type)
    for name in sorted(said.otherwise & {*vars(module)}):
        if not isinstance(vars(module)[name], plain):
            return f"it reads self.{name}"
    for function in functions_of(module):
        for name in names_in(function.__code__):
            if isinstance(function.__globals__.get(name), list | dict | set):
                return f"it reads {name}"
    return ""


def asks_strides(module: nn.Module) -> str:
    """What code of `module` or of a part does by how a tensor lies in memory; '' if nothing.

    It asks; or it writes in place into what is a copy or not as the tensor lies, or into what that
    was made of.

    >>> asks_strides(nn.ReLU())
    ''
    """
    for part in {type(part): part for part in module.modules()}.values():
        for function in chain(functions_of(part), functions_behind(part)):
            code = function.__code__
            # `self.stride` is a number of a layer's.
            tree = tree_of(code) if (STRIDE_METHODS | MAYBE_COPIES) & names_in(code) else None
            for where, what in _by_layout(function, tree) if tree is not None else ():
                return f"{what} ({_line(function, where)})"
    return ""


_WRITES = "writes in place into what is a view or a copy as it lies in memory"


def _by_layout(function: types.FunctionType, tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    nodes = [*ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in STRIDE_METHODS:
            yield call.func, "asks how a tensor lies in memory"
    copies = [call for call in calls if _may_copy(call)]
    targets = [target for node in nodes for target in _written_in_place(function, node)]
    written = {_base(function, target) for target in targets} - {""}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(made)], value=copy) if copy in copies:
                of = _base(function, copy)
                if of != made and {made, of} & written:
                    yield copy, _WRITES
    for one in targets:  # `x.contiguous().add_(1)`
        if any(part in copies for part in ast.walk(one)):
            yield one, _WRITES


def _may_copy(call: ast.Call) -> bool:
    """Whether it returns a copy only if the tensor does not lie as it should."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    formatted = any(one.arg == "memory_format" for one in call.keywords)
    return name in MAYBE_COPIES and (name != "to" or formatted)


def _written_in_place(function: types.FunctionType, node: ast.AST) -> list[ast.expr]:
    """What is said to be written into."""
    match node:
        case ast.AugAssign(target):
            return [target]
        case ast.Subscript(value, ctx=ast.Store()):
            return [value]
        case ast.Call(ast.Attribute(attr=name)) if name.endswith("_") and name[-2:] != "__":
            return _subject(function, node)
        case ast.Call(_, args, keywords):
            out = [one.value for one in keywords if one.arg == "out"]
            return out + args[:1] * any(one.arg == "inplace" for one in keywords)
    return []


def _base(function: types.FunctionType, value: ast.expr) -> str:
    """The name of what `value` is a part, a view or a copy of; '' if it is none."""
    found: list[ast.expr] = [value]
    while found and isinstance(value := found[0], ast.Subscript | ast.Attribute | ast.Call):
        found = _subject(function, value) if isinstance(value, ast.Call) else [value.value]
    return value.id if found and isinstance(value, ast.Name) else ""


def _subject(function: types.FunctionType, call: ast.Call) -> list[ast.expr]:
    """What a call is of: x of `x.reshape(n)` and of `torch.reshape(x, n)`."""
    match call.func:
        case ast.Attribute(ast.Name(name)) if isinstance(
            function.__globals__.get(name), types.ModuleType
        ):
            return call.args[:1]
        case ast.Attribute(value):
            return [value]
    return []


def may_read_later(modules: Iterable[nn.Module], name: str, kept: object) -> bool:
    """Whether code of one of these modules may read what a call has `kept` as the attribute `name`.

    To put it or an item of it there, and to read it in training alone, is no reading; nor is to ask
    whether a list or a dict is None, nor to read what the same function has put there before.
    """
    never_none = isinstance(kept, list | dict)
    for module in modules:
        for function in functions_of(module):
            if name not in _said_in(function.__code__):
                continue
            tree = tree_of(function.__code__)
            if tree is None or any(_reads(tree, name, never_none)):
                return True
    return False


def _said_in(code: types.CodeType) -> Iterator[object]:
    """The names that code uses, and its constants."""
    yield from names_in(code)
    for one in codes_in(code):
        for constant in one.co_consts:
            yield from constant if isinstance(constant, tuple | frozenset) else (constant,)


def _reads(tree: ast.FunctionDef | ast.Lambda, name: str, never_none: bool) -> Iterator[bool]:
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            yield node.value == name
        elif isinstance(node, ast.Attribute) and node.attr == name:
            asked = never_none and _is_compared(around[node])
            spared = asked or _is_put(node, around) or _in_training(node, around)
            yield not (spared or _is_put_before(node, around, tree))


def _is_put(node: ast.Attribute, around: dict[ast.AST, ast.AST]) -> bool:
    """Whether the attribute, or an item of it, is put there, and not first read as by `+=`."""
    outer = around[node]
    if isinstance(outer, ast.Attribute):
        return outer.attr == "append" and isinstance(around[outer], ast.Call)
    item = isinstance(outer, ast.Subscript) and outer.value is node
    place, holder = (outer, around[outer]) if item else (node, outer)
    put = isinstance(getattr(place, "ctx", None), ast.Store)
    return put and not isinstance(holder, ast.AugAssign)


def _is_put_before(
    node: ast.Attribute, around: dict[ast.AST, ast.AST], tree: ast.FunctionDef | ast.Lambda
) -> bool:
    """Whether an earlier statement of this function, which always runs, puts something there."""
    own = _first_argument(tree)
    names = [one for one in ast.walk(tree) if isinstance(one, ast.Name) and one.id == own]
    if isinstance(tree, ast.Lambda) or not _is(node.value, own) or any(map(_is_stored, names)):
        return False
    statement: ast.AST = node
    while statement not in tree.body:
        statement = around[statement]
        if isinstance(statement, _RUNS_LATER):
            return False
    before = tree.body[: tree.body.index(statement)]  # type: ignore[arg-type]
    assigned = [one for put in before if isinstance(put, ast.Assign) for one in put.targets]
    return any(
        isinstance(one, ast.Attribute)
        and one.attr == node.attr
        and _is(one.value, own)
        and _is_stored(one)
        for target in assigned
        for one in ast.walk(target)
    )


_RUNS_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)


def _is_stored(node: ast.Attribute | ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _is_compared(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot)


def _in_training(node: ast.AST, around: dict[ast.AST, ast.AST]) -> bool:
    """Whether it stands where `self.training`, and perhaps more, was asked before."""
    while node in around:
        inner, node = node, around[node]
        if not isinstance(node, ast.If | ast.IfExp):
            continue
        branch: list[ast.AST] = [*node.body] if isinstance(node, ast.If) else [node.body]
        if inner in branch and _asks_training(node.test):
            return True
    return False


def _asks_training(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(map(_asks_training, test.values))
    return isinstance(test, ast.Attribute) and test.attr == "training"


@functools.lru_cache(maxsize=256)
def tree_of(code: types.CodeType) -> ast.FunctionDef | ast.Lambda | None:
    """Parse a function's code; None if its source cannot be found or told from other code."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    name = code.co_name
    found = [
        node
        for node in ast.walk(body)
        if (isinstance(node, ast.Lambda) and name == "<lambda>")
        or (isinstance(node, ast.FunctionDef) and node.name == name)
    ]
    if isinstance(body.body[0], ast.FunctionDef) and name != "<lambda>":
        return found[0] if found else None
    return found[0] if len(found) == 1 else None


def _first_argument(tree: ast.FunctionDef | ast.Lambda) -> str:
    """Return the name of the first argument, which is the module; `args` if there is only *args."""
    named = [*tree.args.posonlyargs, *tree.args.args]
    first = named[0] if named else tree.args.vararg
    return first.arg if first else ""


def _read(reading: _Reading, tree: ast.AST, said: Mentions) -> None:
    own, function = reading.own, reading.function
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and _writes(node, around):
            said.written.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        if isinstance(node, ast.Attribute):
            if _is(node.value, own):
                if not _is_harmless(node, around):
                    said.otherwise.add(node.attr)
            else:
                said.read_off_others.add(node.attr)
            if _looks_around(node.attr) and not own:
                said.names.add("vars")  # A helper looks into its arguments.
            elif _looks_around(node.attr) and not _asks_type(node, around):
                said.unseen = said.unseen or f"it looks through its parts ({_line(function, node)})"
        elif isinstance(node, ast.Name):
            said.names.add(node.id)
            if _looks_around(node.id) and node.id not in ("children", "modules", "parameters"):
                said.unseen = said.unseen or f"it sets hooks ({_line(function, node)})"
            if _is(node, own) and _escapes(node, around, reading, said):
                where = _line(function, node)
                said.unseen = said.unseen or f"it hands itself to other code ({where})"


def _writes(node: ast.Attribute | ast.Name, around: dict[ast.AST, ast.AST]) -> bool:
    """Whether the code changes `node`: `node.append(x)`, `node[0] = x` or `self.node = x`."""
    user = around.get(node)
    if isinstance(user, ast.Subscript) and user.value is node:
        return not isinstance(user.ctx, ast.Load)
    if isinstance(user, ast.Attribute) and user.attr in CHANGING:
        return isinstance(around.get(user), ast.Call)
    return isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_harmless(node: ast.Attribute | ast.Call, around: dict[ast.AST, ast.AST]) -> bool:
    """Whether the code only calls the attribute, or compares it with None."""
    user = around[node]
    if isinstance(user, ast.Call):
        return user.func is node
    none = isinstance(user, ast.Compare) and user.left is node
    return none and all(_is_none(side) for side in user.comparators)  # type: ignore[attr-defined]


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _looks_around(name: str) -> bool:
    return name in _LOOKING or (name.startswith("register_") and "hook" in name)


def _asks_type(node: ast.Attribute, around: dict[ast.AST, ast.AST]) -> bool:
    """Whether `node` is the `x.parameters` in `next(x.parameters()).dtype`.

    Or in `next(p.dtype for p in x.parameters() if p.is_floating_point())`.
    """
    call = around[node]
    first = around.get(call)
    if isinstance(first, ast.comprehension):
        whole = ast.walk(around[first])
        uses = [around[one] for one in whole if ast.dump(one) == _loaded(first.target)]
        asked = {*_PLAIN, "is_floating_point"}
        return all(isinstance(use, ast.Attribute) and use.attr in asked for use in uses)
    named = isinstance(first, ast.Call) and _is(first.func, "next")
    read = around.get(first) if named and first is not None else None
    return isinstance(read, ast.Attribute) and read.attr in _PLAIN


def _loaded(target: ast.expr) -> str:
    """How a variable looks where it is read; nothing looks so if there are several."""
    return ast.dump(ast.Name(target.id, ast.Load())) if isinstance(target, ast.Name) else ""


def _escapes(
    node: ast.Name, around: dict[ast.AST, ast.AST], reading: _Reading, said: Mentions
) -> bool:
    """Whether the code passes the module itself to code that this file does not read."""
    user = around[node]
    if isinstance(user, ast.Attribute | ast.arg):
        return False
    if isinstance(user, ast.Starred):
        user = around[user]
    if not isinstance(user, ast.Call):
        return True
    if isinstance(user.func, ast.Attribute) and _is(user.func.value, reading.own):
        return not _goes_on(user, node, reading, said)
    if not isinstance(user.func, ast.Name):
        return True
    called, given = user.func.id, user.args
    if called in ("getattr", "hasattr") and len(given) > 1 and given[0] is node:
        names = _names_like(given[1], reading.module)
        if not _is_harmless(user, around):
            said.otherwise |= names
        # Code finds a method by its name alone: what it does is not read then.
        return not names or any(_is_unread(name, reading) for name in names)
    if called in ("super", "isinstance", "type"):
        return False
    # A decorator may pass the module to the method that it decorates.
    closed = inspect.getclosurevars(reading.function).nonlocals.get(called)
    return getattr(closed, "__code__", None) not in reading.methods


def _names_like(said: ast.expr, module: nn.Module) -> set[str]:
    """The attributes of `module` that `said` may name by how it begins; none if it may be any.

    That is `"conv"`, `f"conv{i}"`, `"conv" + str(i)`, `"conv%d" % i` or `"conv{}".format(i)`.
    """
    match said:
        case ast.Constant(value=str(name)):
            return {name}
        case (
            ast.JoinedStr(values=[ast.Constant(value=str(first)), *_])
            | ast.BinOp(left=ast.Constant(value=str(first)), op=ast.Add())
        ):
            begins = first
        case ast.BinOp(left=ast.Constant(value=str(form)), op=ast.Mod()):
            begins = form.partition("%")[0]
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(form)), attr="format")):
            begins = form.partition("{")[0]
        case _:
            begins = ""
    return {name for name in dir(module) if begins and name.startswith(begins)}


def _is_unread(name: str, reading: _Reading) -> bool:
    """Whether the module's class has a method or a property of this name that is not read here."""
    value = inspect.getattr_static(type(reading.module), name, None)
    if isinstance(value, types.FunctionType):
        return value.__code__ not in reading.methods
    return callable(value) or hasattr(value, "__get__")


def _goes_on(call: ast.Call, node: ast.Name, reading: _Reading, said: Mentions) -> bool:
    """Whether this is `self.run(self, x)`, a function stored on the module; then read its code."""
    function = vars(reading.module).get(call.func.attr)  # type: ignore[attr-defined]
    if not isinstance(function, types.FunctionType) or call.args[0] is not node:
        return False
    tree = tree_of(function.__code__)
    if tree is None or function is reading.function:
        return False
    own = _first_argument(tree)
    _read(_Reading(reading.module, function, own, reading.methods), tree, said)
    return True


def _line(function: types.FunctionType, node: ast.expr) -> str:
    code = function.__code__
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno + node.lineno - 1}"
