"""Numbers that stand for columns not yet given: a formula run on them once becomes a list of array operations.

Equal operations on equal arguments are one symbol, what is known is computed at once, and every symbol knows with what
it varies, so that a program made of it computes each sub-expression once and no wider than it must be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwise.ledger.number import evaluate

Key = tuple[Any, ...]
_COMMUTING = frozenset(("add", "multiply", "max", "min"))


class Graph:
    """The nodes of one recording, each once."""

    __slots__ = ("known", "nodes")

    def __init__(self) -> None:
        self.known: dict[Key, Node] = {}
        self.nodes: list[Node] = []

    def given(self, name: str, level: int) -> Node:
        """Return the symbol of an input; `level` has a bit for everything that it varies with."""
        return self.enter(("given", name), level)

    def enter(self, key: Key, level: int) -> Node:
        """Return the symbol of an operation and its arguments."""
        node = self.known.get(key)
        if node is None:
            node = Node(self, key, level)
            self.known[key] = node
            self.nodes.append(node)
        return node


class Node:
    """A number that is an input or the result of an operation; `place` counts the nodes of the graph before it."""

    __slots__ = ("graph", "key", "level", "place")
    __array_ufunc__ = None

    def __init__(self, graph: Graph, key: Key, level: int) -> None:
        self.graph, self.key, self.level = graph, key, level
        self.place = len(graph.nodes)

    @property
    def op(self) -> str:
        """The operation, "given" for an input."""
        return str(self.key[0])

    @property
    def args(self) -> Key:
        """The arguments of the operation, nodes and plain numbers."""
        return self.key[1:]

    def record(self, op: str, *args: Any) -> Any:
        """Return the result of a named operation."""
        return _made(op, args)

    def __add__(self, other: Any) -> Any:
        if other.__class__ is Node:
            return _paired("add", self, other)
        return self if other == 0 else _paired("add", self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if other is self:
            return 0.0
        return self if other.__class__ is not Node and other == 0 else _paired("subtract", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _paired("subtract", other, self)

    def __mul__(self, other: Any) -> Any:
        if other.__class__ is not Node:
            if other == 0:
                return 0.0
            if other == 1:
                return self
        return _paired("multiply", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self if other.__class__ is not Node and other == 1 else _paired("true_divide", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return 0.0 if other == 0 else _paired("true_divide", other, self)

    def __repr__(self) -> str:
        return f"Node({self.place}: {self.op})"


def _is(value: Any, number: float) -> bool:
    return not isinstance(value, Node) and bool(value == number)


def _paired(op: str, a: Any, b: Any) -> Node:
    """Return the symbol of an operation on two numbers, one at least a symbol; both ways to write it are one."""
    if a.__class__ is not Node:
        graph, level = b.graph, b.level
        key = (op, b, a) if op in _COMMUTING else (op, a, b)
    elif b.__class__ is not Node:
        graph, level, key = a.graph, a.level, (op, a, b)
    else:
        graph, level = a.graph, a.level | b.level
        key = (op, b, a) if op in _COMMUTING and a.place > b.place else (op, a, b)
    known: Node | None = graph.known.get(key)
    return graph.enter(key, level) if known is None else known


def _above(args: tuple[Any, ...]) -> Any:
    a, threshold, then, other = args
    if then is other or (not isinstance(then, Node) and _is(other, then)):
        return then
    known = not isinstance(a, Node) and not isinstance(threshold, Node)
    return (then if a > threshold else other) if known else None


def _made(op: str, args: tuple[Any, ...]) -> Any:
    nodes = [a for a in args if a.__class__ is Node]
    if not nodes:
        return evaluate(op, *args)
    if op == "above":
        short = _above(args)
        if short is not None:
            return short
    elif op == "divide":
        return args[0] / args[1]
    elif op in ("max", "min"):
        return args[0] if args[0] is args[1] else _paired(op, args[0], args[1])
    elif op == "power" and args[1] == 0.5:
        op, args = "sqrt", args[:1]
    level = 0
    for symbol in nodes:
        level |= symbol.level
    return nodes[0].graph.enter((op, *args), level)


def needed(outputs: Iterable[Any]) -> list[Node]:
    """Return the nodes that some results are made of, in the order in which they can be computed.

    >>> graph = Graph()
    >>> x, y = graph.given("x", 1), graph.given("y", 1)
    >>> twice, other = 2 * x, x * y
    >>> [symbol.op for symbol in needed([twice + 0 * y])]
    ['given', 'multiply']
    """
    nodes: dict[int, Node] = {}
    waiting = [o for o in outputs if o.__class__ is Node]
    while waiting:
        symbol = waiting.pop()
        if symbol.place not in nodes:
            nodes[symbol.place] = symbol
            waiting += [a for a in symbol.key if a.__class__ is Node]
    return [nodes[place] for place in sorted(nodes)]
