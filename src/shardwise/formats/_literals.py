"""What calls of a Python script are told: arguments that are literals, or names of literals. Nothing is run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.records import dataclass

MOST_NODES = 50_000
"""Most nodes of a script's syntax tree that are looked at: what people write by hand has a tenth."""
# What asks a device whether it has bfloat16, which those of the catalogue that train have.
_ASKS_BFLOAT16 = ("is_bfloat16_supported", "is_bf16_supported")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """A value that is no literal: the expression as it is written."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a script: what is called, by its dotted name, and its arguments; those without a name by place."""

    name: str
    values: Mapping[str, Any]


def calls_of(text: str, source: str) -> list[Call]:
    r"""Return the calls of a script in its order, but for those under a condition that is never true.

    >>> calls_of("r = 16\nmodel = FastModel.get_peft_model(model, r=r, bias='none')", "train.py")[0].values
    {'0': Unread(text='model'), 'r': 16, 'bias': 'none'}
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python will not have for ever
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError([Problem("from", source, "is no Python script", "give one that Python compiles")]) from error
    nodes = list(_nodes(tree))
    if len(nodes) > MOST_NODES:
        raise InputError([Problem("from", source, f"has more than {MOST_NODES} parts", "give the training alone")])
    names = _constants(nodes)
    return [_call(node, names) for node in nodes if isinstance(node, ast.Call)]


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree in the order of the text, without what never runs."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Constant):
            children = list(node.body if node.test.value else node.orelse)
        left += reversed(children)


def _constants(nodes: list[ast.AST]) -> dict[str, Any]:
    """Return the names that are given one literal in a script, and no other value."""
    given: dict[str, list[Any]] = {}
    for node in nodes:
        stores = [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For, ast.NamedExpr)) else []
        stores += node.targets if isinstance(node, ast.Assign) else []
        value = getattr(node, "value", None) if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        for name in (part.id for store in stores for part in ast.walk(store) if isinstance(part, ast.Name)):
            given.setdefault(name, []).append(value if len(stores) == 1 and isinstance(stores[0], ast.Name) else None)
    single = {name: values[0] for name, values in given.items() if len(values) == 1 and values[0] is not None}
    literals = {name: _value(node, {}) for name, node in single.items()}
    return {name: value for name, value in literals.items() if not isinstance(value, Unread)}


def _call(node: ast.Call, names: Mapping[str, Any]) -> Call:
    values = {str(at): _value(one, names) for at, one in enumerate(node.args)}
    for one in node.keywords:
        values[one.arg or "**"] = _value(one.value, names)
    return Call(name=_dotted(node.func), values=values)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression: a literal, a name of one, a type of torch, or a question for bfloat16."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2] in _ASKS_BFLOAT16:
        return True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _value(node.operand, names)
        return inner if isinstance(inner, Unread) else not inner
    if _dotted(node).startswith("torch."):
        return _dotted(node).removeprefix("torch.")
    if isinstance(node, (ast.List, ast.Tuple)):
        parts = [_value(one, names) for one in node.elts]
        return parts if not any(isinstance(one, Unread) for one in parts) else Unread(text=_written(node))
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Unread(text=_written(node))
    return value if isinstance(value, (str, int, float, bool, dict, type(None))) else Unread(text=_written(node))


def _written(node: ast.AST) -> str:
    try:
        return ast.unparse(node)
    except (RecursionError, ValueError):
        return "..."
