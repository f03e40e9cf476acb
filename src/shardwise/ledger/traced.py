"""Numbers that explain themselves: arithmetic records itself, so an explanation is what was computed.

No formula is written a second time as text. A named node stops the printed formula of its parent and opens as a
child. Opening a node gives contributions that sum to it: sums split, products scale, a maximum opens to the branch
that binds and states the slack of the others, a ratio shows both terms.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from shardwise.ledger.number import evaluate
from shardwise.records import dataclass, replace

_TRACING: ContextVar[bool] = ContextVar("tracing", default=False)
is_tracing: Callable[[], bool] = _TRACING.get
_PLAIN: dict[str, Any] = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_T = TypeVar("_T")


def _recorded(op: str) -> tuple[Callable[[Traced, Any], Traced], Callable[[Traced, Any], Traced]]:
    """Return an operator as Python calls it with a traced number on its left, and on its right."""
    apply = _PLAIN[op]
    return (
        lambda left, right: Traced(apply(left.value, plain(right)), op, (left, right)),
        lambda right, left: Traced(apply(plain(left), right.value), op, (left, right)),
    )


class Traced:
    """A number with the operation and the arguments that made it."""

    __slots__ = ("args", "category", "memo", "name", "op", "source", "unit", "value")
    __array_ufunc__ = None

    def __init__(
        self, value: Any, op: str = "", args: tuple[Any, ...] = (), label: tuple[str, str, str] = ("", "", "")
    ) -> None:
        self.value, self.op, self.args = value, op, args
        self.name, self.source, self.unit = label
        self.category = ""
        # What was read of the number: many share it, and it is walked once.
        self.memo: dict[str, Any] | None = None

    def record(self, op: str, *args: Any) -> Traced:
        """Return the traced result of a named operation on plain or traced numbers."""
        return Traced(evaluate(op, *map(plain, args)), op, args)

    __add__, __radd__ = _recorded("+")
    __sub__, __rsub__ = _recorded("-")
    __mul__, __rmul__ = _recorded("*")
    __truediv__, __rtruediv__ = _recorded("/")

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __repr__(self) -> str:
        return f"Traced({self.value!r}, name={self.name!r})"

    def __str__(self) -> str:
        """Return the number and what sums to it, each with its share, or the formula where it is no sum."""
        if not (sums := self.contributions):
            return f"{self.name} = {_digits(self.value)} = {formula(self)}"
        rows = [f"{p.amount / (self.value or 1):7.1%} {_digits(p.amount):>20}  {p.label:.80}" for p in sums[:_PRINTED]]
        rest = [f"        and {len(sums) - _PRINTED} more"] if len(sums) > _PRINTED else []
        return "\n".join([f"{self.name} = {_digits(self.value)}", *rows, *rest])

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """What sums to the number, largest first, each as `Part`; empty where it is an input or a formula."""
        return tuple(parts(self))


def _digits(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1e4 else f"{x:.6g}"


def plain(x: Any) -> Any:
    """Return the value of a number, traced or not."""
    return x.value if isinstance(x, Traced) else x


@contextmanager
def tracing() -> Iterator[None]:
    """Make every leaf that is built inside the block explain itself."""
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)


def leaf(name: str, value: _T, source: str = "", unit: str = "") -> _T:
    """Return a named input: a traced number while tracing, the value itself otherwise."""
    return cast(_T, Traced(value, label=(name, source, unit))) if _TRACING.get() else value


def named(x: _T, name: str, source: str = "", unit: str = "") -> _T:
    """Return the same number under a name, where it opens as one node; plain numbers and columns pass through."""
    return cast(_T, Traced(x.value, x.op, x.args, (name, source, unit))) if isinstance(x, Traced) else x


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch that a maximum or minimum did not take, in the unit of the number that is opened."""

    label: str
    amount: float
    slack: float


@dataclass(frozen=True, slots=True)
class Contribution:
    """One contribution to a number: `amount` in the parent's unit, `times` how often the node counts in it.

    `against` are the branches that lost to this contribution, nearest first; `choice` is then "max" or "min".
    """

    label: str
    amount: float
    times: float
    node: Traced | None
    against: tuple[Branch, ...] = ()
    choice: str = ""


def _remember(x: Traced, key: str, make: Callable[[Traced], _T]) -> _T:
    """Return what was read of a number before, or read it now, from the numbers it is made of upwards.

    What `make` reads of those is there already when it is called, so chains of any length need no deep recursion.
    """
    waiting = [x]
    while waiting:
        node = waiting[-1]
        memo = node.memo if node.memo is not None else {}
        node.memo = memo
        below = [a for a in node.args if _opens(a, False) and key not in (a.memo or {})] if key not in memo else []
        if below:
            waiting += below
            continue
        if key not in memo:
            memo[key] = make(node)
        waiting.pop()
    return cast(_T, (x.memo or {})[key])


def _opens(x: Any, top: bool) -> bool:
    return isinstance(x, Traced) and bool(x.op) and (top or not x.name)


def core(x: Any, top: bool = False) -> Any:
    """Return a number without the operations that change nothing here: + 0, * 1, branches that were not taken.

    >>> with tracing():
    ...     print(formula(named(0 * leaf("tp", 8) + 1 * leaf("width", 4) * leaf("depth", 2), "area")))
    width * depth
    """
    return _remember(x, "core", _stripped) if _opens(x, top) else x


def _stripped(x: Traced) -> Any:
    return core(step) if (step := _neutral(x)) is not x else x


def _inner(x: Any, top: bool) -> tuple[Any, bool]:
    """Return the core of a number, and whether it is still the number at the top."""
    return (inner := core(x, top)), top and (inner is x or not getattr(inner, "name", ""))


def _neutral(x: Traced) -> Any:
    """Return the argument that an operation leaves as it is, 0 for a product with nothing, or the number itself."""
    if x.op == "above":
        return x.args[2] if plain(x.args[0]) > plain(x.args[1]) else x.args[3]
    if x.op not in _SIGNS:
        return x
    a, b = core(x.args[0]), core(x.args[1])
    if not isinstance(a, Traced) and not isinstance(b, Traced):
        return x.value
    if x.op in ("+", "-"):
        return a if b in (0,) else b if a in (0,) and x.op == "+" else x
    if a in (0,) or (x.op == "*" and b in (0,)):
        return 0
    return a if b in (1,) else b if a in (1,) and x.op == "*" else x


def branches(x: Traced) -> list[Any]:
    """Return what a maximum of maxima, or a minimum of minima, chooses from, each once."""
    values: dict[int, Any] = {}
    waiting, seen = list(map(core, reversed(x.args))), set[int]()
    while waiting:
        arg = waiting.pop()
        if id(arg) not in seen:
            seen.add(id(arg))
            if _opens(arg, False) and arg.op == x.op:
                waiting += map(core, reversed(arg.args))
            else:
                values[id(arg)] = arg
    return list(values.values())


_SIGNS = {"+": "+", "-": "-", "*": "*", "/": "/", "divide": "/"}
_LONGEST, _MOST, _PRINTED = 4000, 64, 12  # characters of a formula, branches written out, contributions printed


def formula(x: Any, top: bool = True) -> str:
    """Return the arithmetic that made a number, down to named nodes, with the branches that were taken.

    >>> with tracing():
    ...     print(formula(2 * leaf("tokens", 8) * leaf("width", 4)))
    2 * tokens * width
    """
    x, top = _inner(x, top)
    if not isinstance(x, Traced):
        return f"{x:.6g}" if isinstance(x, float) else str(x) if isinstance(x, int) else type(x).__name__.lower()
    return _remember(x, "formula", _written) if _opens(x, top) else x.name or f"{x.value:.6g}"


def _written(x: Traced) -> str:
    """Return one operation written out; what would fill a page is cut short."""
    if x.op in _SIGNS:
        text = _infix(x, *map(core, x.args))
    elif x.op in ("max", "min"):
        options = dict.fromkeys(formula(a, False) for a in branches(x)[:_MOST])
        text = f"{x.op}({', '.join(options)}{', ...' if len(options) == 1 else ''})"
    elif x.op in ("power", "raised"):
        text = " ** ".join(f"({formula(a, False)})" if _compound(a) else formula(a, False) for a in x.args)
    else:
        text = f"{x.op}({', '.join(formula(a, False) for a in x.args)})"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def _infix(x: Traced, a: Any, b: Any) -> str:
    left, right, sign = formula(a, False), formula(b, False), _SIGNS[x.op]
    if sign in "*/":
        left = f"({left})" if _compound(a, "+-") else left
        right = (
            f"({right})" if _compound(b, "+-") or (_compound(b) and (sign == "/" or b.op in ("/", "divide"))) else right
        )
    elif sign == "-" and _compound(b, "+-"):
        right = f"({right})"
    return f"{left} {sign} {right}"


def _compound(x: Any, signs: Container[str] = _SIGNS) -> bool:
    x = core(x)
    return _opens(x, False) and x.op in signs


def named_below(x: Any) -> bool:
    """Return whether a number has named, computed nodes at or below it."""
    named_here = isinstance(x, Traced) and x.op and x.name
    return bool(named_here) or (_opens(x, True) and _remember(x, "named", lambda one: any(map(named_below, one.args))))


def operands(x: Traced) -> list[Traced]:
    """Return the named numbers that stand in the formula of a number, each once, in order.

    >>> operands(Traced(8, "*", (Traced(4, label=("width", "", "")), 2)))
    [Traced(4, name='width')]
    """
    named: dict[tuple[str, Any], Traced] = {}
    waiting, seen = [_inner(x, True)], set[int]()
    while waiting:
        node, top = waiting.pop()
        if not isinstance(node, Traced) or id(node) in seen:
            continue
        seen.add(id(node))
        if _opens(node, top):
            waiting += [(core(a), False) for a in reversed(node.args)]
        elif node.name:
            named.setdefault((node.name, plain(node)), node)
    return list(named.values())


_Choice = tuple[str, tuple[Branch, ...]]
_FREE: _Choice = ("", ())


@dataclass(slots=True)
class _Share:
    """How often a number counts in the one that is opened, and against what it was chosen."""

    node: Any
    times: float = 0.0
    choice: _Choice = _FREE


def parts(x: Traced, named_apart: bool = True) -> list[Contribution]:
    """Return the contributions that sum to a number, largest first, and what lost against them where it is to be told.

    Empty where the number is no sum but an input or a formula.

    >>> with tracing():
    ...     total = 3 * named(leaf("a", 2) * 2, "twice a") + named(leaf("b", 1) + 0, "b again")
    >>> [(p.label, p.amount, p.times) for p in parts(total)]
    [('twice a', 12.0, 3.0), ('b again', 1.0, 1.0)]
    """
    if not x.op:
        return []
    inner, top = _inner(x, True)
    merged: dict[tuple[str, float], Contribution] = {}
    for share in _shares(inner, top, named_apart):
        node, times, (choice, against) = share.node, share.times, share.choice
        label, known = formula(node, node is inner and top), node if isinstance(node, Traced) else None
        part = Contribution(label, times * float(plain(node)), times, known, against, choice)
        # One formula has two values where names in it stand for different numbers.
        key = (label, id(node) if getattr(node, "name", "") else float(plain(node)))
        if (old := merged.get(key)) is not None:
            part = replace(old, amount=old.amount + part.amount, times=old.times + part.times)
        merged[key] = part
    kept = [p for p in merged.values() if p.amount or (p.against and not plain(x))]
    unopened = inner is x or not getattr(inner, "name", "")
    if unopened and len(kept) == 1 and kept[0].node is inner and not kept[0].against:
        return []
    return _numbered(sorted(kept, key=lambda p: -abs(p.amount)))


def _numbered(parts: list[Contribution]) -> list[Contribution]:
    """Number the contributions that have a name in common."""
    seen: Counter[str] = Counter()
    for i, part in enumerate(parts):
        seen[part.label] += 1
        if seen[part.label] > 1:
            parts[i] = replace(part, label=f"{part.label} ({seen[part.label]})")
    return parts


def _shares(root: Any, top: bool, named_apart: bool) -> list[_Share]:
    """Return what sums to a number, each with how often: shared numbers are opened once, with all their times."""
    edges: dict[int, list[tuple[Any, float, _Choice]]] = {}
    order: list[Any] = []
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
        elif id(node) not in edges:
            edges[id(node)] = _edges(node, named_apart) if _opens(node, top and node is root) else []
            waiting.append((node, True))
            waiting += [(child, False) for child, _, _ in edges[id(node)]]
    shares = {id(node): _Share(node) for node in order}
    shares[id(root)].times = 1.0
    for node in reversed(order):
        share = shares[id(node)]
        for child, factor, choice in edges[id(node)]:
            below = shares[id(child)]
            if not below.times:
                lost = tuple(Branch(r.label, share.times * r.amount, abs(share.times) * r.slack) for r in choice[1])
                below.choice = (choice[0] or share.choice[0], (*share.choice[1], *lost))
            below.times += share.times * factor
    return [shares[id(node)] for node in order if not edges[id(node)]]


def _edges(x: Traced, named_apart: bool) -> list[tuple[Any, float, _Choice]]:
    """Return what one operation adds up: (number, how often, against what); nothing where it is no sum."""
    a, b = (*map(core, x.args), 0, 0)[:2]
    if x.op in ("+", "-"):
        return [(a, 1.0, _FREE), (b, 1.0 if x.op == "+" else -1.0, _FREE)]
    if x.op in ("max", "min"):
        options = branches(x)
        won = next(o for o in options if plain(o) == x.value)
        lost = _rivals([o for o in options if o is not won], float(x.value)) if named_apart else ()
        return [(won, 1.0, (x.op, lost))]
    if x.op in ("/", "divide") and named_below(a) and not named_below(b):
        return [(a, 1 / float(plain(b)), _FREE)]
    if x.op == "*" and named_below(a) != named_below(b):
        one, other = (a, b) if named_below(a) else (b, a)
        return [(one, float(plain(other)), _FREE)]
    return []


def _rivals(others: list[Any], value: float) -> tuple[Branch, ...]:
    """Return the branches that lost, nearest first, each once; ties and those that are nothing are left out."""
    rivals = {}
    for other in others:
        amount = float(plain(other))
        if amount and abs(value - amount) > 1e-9 * abs(amount):
            label = formula(other, False)
            rivals[label] = Branch(label if len(label) <= 100 else _gist(other), amount, abs(value - amount))
    return tuple(sorted(rivals.values(), key=lambda r: r.slack)[:8])


def _gist(x: Any) -> str:
    """Return what a long branch is mostly made of: its largest named parts, whose own rivals nobody asked for."""
    opened = [p for p in parts(x, named_apart=False) if p.node is not None and p.node.name]
    return " + ".join(f"{p.times:.4g} x {p.label}" for p in opened[:2]) or formula(x, False)[:100] + " ..."


def ratio(x: Traced) -> tuple[Any, Any] | None:
    """Return numerator and denominator of a number that is a ratio, None for any other."""
    x = core(x, True)
    return (x.args[0], x.args[1]) if isinstance(x, Traced) and x.op in ("/", "divide") else None
