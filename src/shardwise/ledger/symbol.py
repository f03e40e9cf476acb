"""Numbers that stand for columns not yet given: a formula run on them once becomes a list of array operations.

Equal operations on equal arguments are one symbol, what is known is computed at once, and every symbol knows with what
it varies, so that a program made of it computes each sub-expression once and no wider than it must be. Of a largest or
a smallest, what is proven never to be it is left out; rounding keeps order, so that results stay the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.ledger.number import evaluate, positive_of_positive

NodeKey = tuple[Any, ...]
_COMMUTING = frozenset(("add", "multiply", "max", "min"))
# Steps of a proof that one symbol is never less than another: longer ones find little.
_DEEP = 3
_PROVEN = _DEEP + 1


class Graph:
    """The nodes of one recording, each once; with `proves`, extremes are left out by proofs of order."""

    __slots__ = ("extremes", "known", "nodes", "ordered", "proves")

    def __init__(self, proves: bool = True) -> None:
        self.proves = proves
        self.known: dict[NodeKey, Node] = {}
        self.nodes: list[Node] = []
        self.ordered: dict[tuple[Any, Any], int] = {}
        self.extremes: dict[NodeKey, Any] = {}

    def given(self, name: str, level: int, positive: bool = False, least: float = 0.0) -> Node:
        """Return the symbol of an input, if `positive` never below zero, and never below `least`.

        `level` has a bit for everything that it varies with.

        >>> never_less(Graph().given("pp", 1, positive=True, least=1.0), 1)
        True
        """
        node = self.enter(("given", name), level, positive)
        if least > 0:
            self.ordered[node, least] = _PROVEN
        return node

    def enter(self, key: NodeKey, level: int, positive: bool | None = None) -> Node:
        """Return the symbol of an operation and its arguments."""
        node = self.known.get(key)
        return self.new(key, level, _positive(key) if positive is None else positive) if node is None else node

    def new(self, key: NodeKey, level: int, positive: bool) -> Node:
        """Return the symbol of an operation that has none."""
        node = self.known[key] = Node(self, key, level, positive)
        self.nodes.append(node)
        return node


class Node:
    """A number that is an input or the result of an operation; `place` counts the nodes of the graph before it.

    What is `positive` is proven never to be below zero.
    """

    __slots__ = ("graph", "key", "level", "place", "positive", "reads", "rises")
    __array_ufunc__ = None

    def __init__(self, graph: Graph, key: NodeKey, level: int, positive: bool) -> None:
        self.graph, self.key, self.level, self.positive = graph, key, level, positive
        self.place = len(graph.nodes)
        self.reads = self.rises = -1

    @property
    def op(self) -> str:
        """The operation, "given" for an input."""
        return str(self.key[0])

    @property
    def args(self) -> NodeKey:
        """The arguments of the operation, nodes and plain numbers."""
        return self.key[1:]

    def record(self, op: str, *args: Any) -> Any:
        """Return the result of a named operation."""
        return _made(op, args)

    def largest_of(self, values: Sequence[Any]) -> Any:
        """Return the largest of numbers of which it is one."""
        return _extreme("max", values)

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
    # This is the inner loop of a recording: most results are known by now.
    if a.__class__ is not Node:
        graph, level, positive = b.graph, b.level, b.positive and a >= 0
        key = (op, b, a) if op in _COMMUTING else (op, a, b)
    elif b.__class__ is not Node:
        graph, level, positive, key = a.graph, a.level, a.positive and b >= 0, (op, a, b)
    else:
        graph, level, positive = a.graph, a.level | b.level, a.positive and b.positive
        key = (op, b, a) if op in _COMMUTING and a.place > b.place else (op, a, b)
    node: Node | None = graph.known.get(key)
    if node is None:
        node = graph.new(key, level, positive if positive_of_positive(op) else _positive(key))
    return node


def _above(args: tuple[Any, ...]) -> Any:
    a, threshold, then, other = args
    if then is other or (not isinstance(then, Node) and _is(other, then)):
        return then
    known = not isinstance(a, Node) and not isinstance(threshold, Node)
    if known:
        return then if a > threshold else other
    if never_less(threshold, a):
        return other
    whole = threshold.__class__ is not Node and threshold < 1
    return then if whole and never_less(a, 1.0) else None


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
        return _extreme(op, args)
    elif op == "power" and args[1] == 0.5:
        op, args = "sqrt", args[:1]
    level = 0
    for symbol in nodes:
        level |= symbol.level
    return nodes[0].graph.enter((op, *args), level)


def _extreme(op: str, values: Sequence[Any]) -> Any:
    """Return the largest or the smallest of some numbers, without what is proven never to be it."""
    # Formulas ask for most extremes more than once: of every sharding, and of pipelines with stages alike.
    known, key = next(v for v in values if v.__class__ is Node).graph.extremes, (op, *values)
    if key not in known:
        known[key] = _reduced(op, values)
    return known[key]


def _reduced(op: str, values: Sequence[Any]) -> Any:
    left = _operands(op, values[0])
    for value in values[1:]:
        for one in _operands(op, value):
            left = _with_operand(op, left, one)
    whole = left[0]
    for one in left[1:]:
        whole = _paired(op, whole, one)
    return whole


def _operands(op: str, value: Any) -> list[Any]:
    """Return the numbers of which a value is the largest, or the smallest."""
    operands, waiting = list[Any](), [value]
    while waiting:
        one = waiting.pop()
        if one.__class__ is Node and one.key[0] == op:
            waiting += reversed(one.key[1:])
        else:
            operands.append(one)
    return operands


def _with_operand(op: str, left: list[Any], one: Any) -> list[Any]:
    """Return the numbers of an extreme and one more, those left out that it settles; sums share what they have."""
    kept, rising = list[Any](), op == "max"
    for i, other in enumerate(left):
        if never_less(other, one) if rising else never_less(one, other):
            return [*kept, *left[i:]]
        if never_less(one, other) if rising else never_less(other, one):
            continue
        joined = _shared(op, other, one)
        if joined is not None:
            return _with_operand(op, [*kept, *left[i + 1 :]], joined)
        kept.append(other)
    return [*kept, one]


def _shared(op: str, a: Any, b: Any) -> Any:
    """Return the extreme of x + p and x + q as x + the extreme of p and q: rounding keeps order, it is the same."""
    if a.__class__ is Node and b.__class__ is Node and a.key[0] == b.key[0] == "add":
        for x, p in (a.key[1:], a.key[:0:-1]):
            for y, q in (b.key[1:], b.key[:0:-1]):
                if x is y:
                    return x + _made(op, (p, q))
    return None


def is_positive(value: Any) -> bool:
    """Return whether a number, plain or a symbol, is known never to be below zero."""
    return bool(value.positive if value.__class__ is Node else value >= 0)


def _positive(key: NodeKey) -> bool:
    """Return whether the result of an operation is proven never to be below zero."""
    op, *args = key
    if op == "subtract":
        return never_less(*args)
    if op == "max":
        return any(map(is_positive, args))
    if op == "above":
        args = args[2:]
    return positive_of_positive(op) and all(is_positive(a) for a in args if isinstance(a, (Node, int, float)))


def never_less(a: Any, b: Any, deep: int = _DEEP) -> bool:
    """Return whether one number is proven never to be less than another, whatever the inputs are.

    >>> graph = Graph()
    >>> x, y = graph.given("x", 1, positive=True), graph.given("y", 1)
    >>> never_less(2 * x + y, x + y), never_less(x + y, x), never_less(x, 0)
    (True, False, True)
    """
    if a is b:
        return True
    if b.__class__ is not Node:
        if a.__class__ is not Node:
            return bool(a >= b)
        if b <= 0 and a.positive:
            return True
    graph = (a if a.__class__ is Node else b).graph
    if not (deep and graph.proves):
        return False
    if b.__class__ is Node and _rises(b) & ~(_reads(a) if a.__class__ is Node else 0):
        return False
    known, key = graph.ordered, (a, b)
    # How many steps found no proof; what is proven is so at any number of them.
    tried = known.get(key, 0)
    if tried < deep:
        proven = _above_parts(a, b, deep - 1) or _below_parts(a, b, deep - 1) or _alike(a, b, deep - 1)
        tried = known[key] = _PROVEN if proven else deep
    return tried == _PROVEN


def _reads(node: Node) -> int:
    """Return a bit for each input that a symbol is made of."""
    if node.reads < 0:
        own = 1 << node.place if node.key[0] == "given" else 0
        for a in node.key[1:]:
            if a.__class__ is Node:
                own |= _reads(a)
        node.reads = own
    return node.reads


def _rises(node: Node) -> int:
    """Return a bit for each input that whatever is proven never to be less than a symbol is made of, too.

    Steps of proofs (`_below_parts`, `_alike`) leave out what is taken off, what divides, and all but one of a smallest.
    """
    if node.rises < 0:
        op, args = node.key[0], [a for a in node.key[1:] if a.__class__ is Node]
        if op == "given":
            own = _reads(node)
        elif op == "min":
            own = -1
            for a in node.key[1:]:
                own &= _rises(a) if a.__class__ is Node else 0
        else:
            if op in ("subtract", "true_divide"):
                args = [a for a in node.key[1:2] if a.__class__ is Node]
            elif op == "above":
                args = [a for a in node.key[3:] if a.__class__ is Node]
            own = 0
            for a in args:
                own |= _rises(a)
        node.rises = own
    return node.rises


def _above_parts(a: Any, b: Any, deep: int) -> bool:
    """Return whether what a number is made of is never less than another one."""
    if a.__class__ is not Node:
        return False
    op, *args = a.key
    if op == "max":
        return any(never_less(one, b, deep) for one in args)
    if op == "min":
        return all(never_less(one, b, deep) for one in args)
    if op == "above":
        return all(never_less(one, b, deep) for one in args[2:])
    if op == "add":
        p, q = args
        return (is_positive(q) and never_less(p, b, deep)) or (is_positive(p) and never_less(q, b, deep))
    if op in ("multiply", "true_divide") and args[1].__class__ is not Node and args[0].positive:
        grows = args[1] >= 1 if op == "multiply" else 0 < args[1] <= 1
        return grows and never_less(args[0], b, deep)
    return False


def _below_parts(a: Any, b: Any, deep: int) -> bool:
    """Return whether a number is never less than what another one is made of."""
    if b.__class__ is not Node:
        return False
    op, *args = b.key
    if op == "max":
        return all(never_less(a, one, deep) for one in args)
    if op == "min":
        return any(never_less(a, one, deep) for one in args)
    if op == "above":
        return all(never_less(a, one, deep) for one in args[2:])
    if op == "subtract":
        return is_positive(args[1]) and never_less(a, args[0], deep)
    if op in ("multiply", "true_divide") and args[1].__class__ is not Node and args[0].positive:
        falls = 0 <= args[1] <= 1 if op == "multiply" else args[1] >= 1
        return falls and never_less(a, args[0], deep)
    return False


def _alike(a: Any, b: Any, deep: int) -> bool:
    """Return whether two results of one operation are ordered as their arguments are."""
    if a.__class__ is not Node or b.__class__ is not Node or a.key[0] != b.key[0]:
        return False
    op, *own = a.key
    other = b.key[1:]
    if op == "subtract":
        return never_less(own[0], other[0], deep) and never_less(other[1], own[1], deep)
    if op == "true_divide":
        signs = is_positive(own[0]) and is_positive(other[0]) and is_positive(own[1]) and is_positive(other[1])
        return signs and never_less(own[0], other[0], deep) and never_less(other[1], own[1], deep)
    if op in ("add", "multiply"):
        if op == "multiply" and not all(map(is_positive, (*own, *other))):
            return False
        ways = (other, other[::-1])
        return any(never_less(own[0], p, deep) and never_less(own[1], q, deep) for p, q in ways)
    return op in ("ceil", "sqrt") and never_less(own[0], other[0], deep)


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
