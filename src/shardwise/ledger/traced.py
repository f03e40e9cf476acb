"""Numbers that explain themselves: arithmetic records itself, so an explanation is what was computed.

No formula is written a second time as text. A named node stops the printed formula of its parent and opens as a
child. Opening a node gives contributions that sum to it: sums split, products scale, a maximum opens to the branch
that binds and states the slack of the others, a ratio shows both terms.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from shardwise.ledger.number import evaluate

_TRACING: ContextVar[bool] = ContextVar("tracing", default=False)
_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_T = TypeVar("_T")


class Traced:
    """A number with the operation and the arguments that made it."""

    __slots__ = ("args", "name", "op", "source", "unit", "value")
    __array_ufunc__ = None

    def __init__(
        self, value: Any, op: str = "", args: tuple[Any, ...] = (), label: tuple[str, str, str] = ("", "", "")
    ) -> None:
        self.value, self.op, self.args = value, op, args
        self.name, self.source, self.unit = label

    def record(self, op: str, *args: Any) -> Traced:
        """Return the traced result of a named operation on plain or traced numbers."""
        return Traced(evaluate(op, *map(plain, args)), op, args)

    def __add__(self, other: Any) -> Traced:
        return _record("+", self, other)

    def __radd__(self, other: Any) -> Traced:
        return _record("+", other, self)

    def __sub__(self, other: Any) -> Traced:
        return _record("-", self, other)

    def __rsub__(self, other: Any) -> Traced:
        return _record("-", other, self)

    def __mul__(self, other: Any) -> Traced:
        return _record("*", self, other)

    def __rmul__(self, other: Any) -> Traced:
        return _record("*", other, self)

    def __truediv__(self, other: Any) -> Traced:
        return _record("/", self, other)

    def __rtruediv__(self, other: Any) -> Traced:
        return _record("/", other, self)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __repr__(self) -> str:
        return f"Traced({self.value!r}, name={self.name!r})"


def plain(x: Any) -> Any:
    """Return the value of a number, traced or not."""
    return x.value if isinstance(x, Traced) else x


def _record(op: str, a: Any, b: Any) -> Traced:
    return Traced(_PLAIN[op](plain(a), plain(b)), op, (a, b))


@contextmanager
def tracing() -> Iterator[None]:
    """Make every leaf that is built inside the block explain itself."""
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)


def leaf(name: str, value: _T, source: str = "", unit: str = "") -> _T:
    """Return a named input: a traced number while tracing, the value itself otherwise.

    >>> leaf("tp", 8)
    8
    """
    return cast(_T, Traced(value, label=(name, source, unit))) if _TRACING.get() else value


def named(x: _T, name: str, source: str = "", unit: str = "") -> _T:
    """Return the same number under a name, where it opens as one node; plain numbers and columns pass through.

    >>> named(3.0, "three")
    3.0
    """
    return cast(_T, Traced(x.value, x.op, x.args, (name, source, unit))) if isinstance(x, Traced) else x


@dataclass(frozen=True, slots=True)
class Rival:
    """A branch that a maximum or minimum did not take, in the unit of the number that is opened."""

    label: str
    amount: float
    slack: float


@dataclass(frozen=True, slots=True)
class Part:
    """One contribution to a number: `amount` in the parent's unit, `times` how often the node counts in it.

    `against` are the branches that lost to this contribution, nearest first; `choice` is then "max" or "min".
    """

    label: str
    amount: float
    times: float
    node: Traced | None
    against: tuple[Rival, ...] = ()
    choice: str = ""


def _opens(x: Any, top: bool) -> bool:
    return isinstance(x, Traced) and bool(x.op) and (top or not x.name)


def core(x: Any, top: bool = False) -> Any:
    """Return a number without the operations that change nothing here: + 0, * 1, branches that were not taken.

    >>> with tracing():
    ...     print(formula(named(0 * leaf("tp", 8) + 1 * leaf("width", 4) * leaf("depth", 2), "area")))
    width * depth
    """
    while _opens(x, top):
        step = _neutral(x)
        if step is x:
            return x
        x, top = step, False
    return x


def _inner(x: Any, top: bool) -> tuple[Any, bool]:
    """Return the core of a number, and whether it is still the number at the top."""
    inner = core(x, top)
    return inner, top and (inner is x or not getattr(inner, "name", ""))


def _neutral(x: Traced) -> Any:
    """Return the argument that an operation leaves as it is, 0 for a product with nothing, or the number itself."""
    if x.op == "above":
        return x.args[2] if plain(x.args[0]) > plain(x.args[1]) else x.args[3]
    if x.op not in ("+", "-", "*", "/", "divide"):
        return x
    a, b = core(x.args[0]), core(x.args[1])
    if not isinstance(a, Traced) and not isinstance(b, Traced):
        return x.value
    if x.op in ("+", "-"):
        return a if _is(b, 0) else b if _is(a, 0) and x.op == "+" else x
    if _is(a, 0) or (x.op == "*" and _is(b, 0)):
        return 0
    return a if _is(b, 1) else b if _is(a, 1) and x.op == "*" else x


def _is(x: Any, value: float) -> bool:
    return not isinstance(x, Traced) and bool(x == value)


def branches(x: Traced) -> list[Any]:
    """Return what a maximum of maxima, or a minimum of minima, chooses from."""
    found: list[Any] = []
    for arg in map(core, x.args):
        found += branches(arg) if _opens(arg, False) and arg.op == x.op else [arg]
    return found


def formula(x: Any, top: bool = True) -> str:
    """Return the arithmetic that made a number, down to named nodes, with the branches that were taken.

    >>> with tracing():
    ...     print(formula(2 * leaf("tokens", 8) * leaf("width", 4)))
    2 * tokens * width
    """
    x, top = _inner(x, top)
    if not isinstance(x, Traced):
        return f"{x:.6g}" if isinstance(x, float) else str(x) if isinstance(x, int) else type(x).__name__.lower()
    if not _opens(x, top):
        return x.name or f"{x.value:.6g}"
    if x.op in ("max", "min"):
        options = dict.fromkeys(formula(a, False) for a in branches(x))
        return f"{x.op}({', '.join(options)}{', ...' if len(options) == 1 else ''})"
    if x.op in ("power", "raised"):
        return " ** ".join(f"({formula(a, False)})" if _compound(a) else formula(a, False) for a in x.args)
    if x.op not in _SIGNS:
        return f"{x.op}({', '.join(formula(a, False) for a in x.args)})"
    return _infix(x, *map(core, x.args))


_SIGNS = {"+": "+", "-": "-", "*": "*", "/": "/", "divide": "/"}


def _infix(x: Traced, a: Any, b: Any) -> str:
    left, right, sign = formula(a, False), formula(b, False), _SIGNS[x.op]
    if sign in "*/":
        left = f"({left})" if _loose(a) else left
        right = f"({right})" if _loose(b) or (_compound(b) and (sign == "/" or b.op in ("/", "divide"))) else right
    elif sign == "-" and _loose(b):
        right = f"({right})"
    return f"{left} {sign} {right}"


def _loose(x: Any) -> bool:
    return _opens(x, False) and x.op in ("+", "-")


def _compound(x: Any) -> bool:
    x = core(x)
    return _opens(x, False) and x.op in _SIGNS


def named_below(x: Any, seen: dict[int, bool] | None = None) -> bool:
    """Return whether a number has named, computed nodes at or below it."""
    seen = {} if seen is None else seen
    if not isinstance(x, Traced) or not x.op:
        return False
    if id(x) not in seen:
        seen[id(x)] = bool(x.name) or any(named_below(a, seen) for a in x.args)
    return seen[id(x)]


def operands(x: Traced) -> list[Traced]:
    """Return the named numbers that stand in the formula of a number, each once, in order.

    >>> with tracing():
    ...     area = leaf("width", 4) * leaf("depth", 2)
    >>> [(o.name, o.value) for o in operands(area)]
    [('width', 4), ('depth', 2)]
    """
    found: dict[int, Traced] = {}
    _collect(*_inner(x, True), found)
    return list({(o.name, plain(o)): o for o in found.values()}.values())


def _collect(x: Any, top: bool, found: dict[int, Traced]) -> None:
    if not isinstance(x, Traced):
        return
    if not _opens(x, top):
        if x.name:
            found[id(x)] = x
        return
    for a in x.args:
        _collect(core(a), False, found)


def parts(x: Traced) -> list[Part]:
    """Return the contributions that sum to a number, largest first; empty where it is no sum but an input or a formula.

    >>> with tracing():
    ...     total = 3 * named(leaf("a", 2) * 2, "twice a") + named(leaf("b", 1) + 0, "b again")
    >>> [(p.label, p.amount, p.times) for p in parts(total)]
    [('twice a', 12.0, 3.0), ('b again', 1.0, 1.0)]
    """
    if not x.op:
        return []
    found: list[Part] = []
    inner = core(x, True)
    _open(x, 1.0, True, _FREE, found)
    merged: dict[tuple[str, int], Part] = {}
    for part in found:
        key = (part.label, id(part.node) if part.node is not None and part.node.name else 0)
        old = merged.get(key)
        merged[key] = (
            part if old is None else replace(old, amount=old.amount + part.amount, times=old.times + part.times)
        )
    kept = [p for p in merged.values() if p.amount or (p.against and not plain(x))]
    if len(kept) == 1 and kept[0].node is inner and not kept[0].against and (inner is x or not inner.name):
        return []
    return sorted(kept, key=lambda p: -abs(p.amount))


_Choice = tuple[str, tuple[Rival, ...]]
_FREE: _Choice = ("", ())


def _open(x: Any, times: float, top: bool, choice: _Choice, found: list[Part]) -> None:
    """Append the contributions of `times` * x."""
    x, top = _inner(x, top)
    value = float(plain(x))
    if not isinstance(x, Traced) or not _opens(x, top):
        found.append(
            Part(formula(x, False), times * value, times, x if isinstance(x, Traced) else None, choice[1], choice[0])
        )
        return
    a = x.args
    if x.op in ("+", "-"):
        _open(a[0], times, False, choice, found)
        _open(a[1], times if x.op == "+" else -times, False, choice, found)
    elif x.op in ("max", "min"):
        options = branches(x)
        binding = next(i for i, o in enumerate(options) if plain(o) == x.value)
        lost = _rivals(options[:binding] + options[binding + 1 :], times, value)
        _open(options[binding], times, False, (x.op, (*choice[1], *lost)), found)
    elif x.op in ("/", "divide") and named_below(a[0]) and not named_below(a[1]):
        _open(a[0], times / float(plain(a[1])), False, choice, found)
    elif x.op == "*" and named_below(a[0]) != named_below(a[1]):
        one, other = (a[0], a[1]) if named_below(a[0]) else (a[1], a[0])
        _open(one, times * float(plain(other)), False, choice, found)
    else:
        found.append(Part(formula(x, top), times * value, times, x, choice[1], choice[0]))


def _rivals(others: list[Any], times: float, value: float) -> tuple[Rival, ...]:
    """Return the branches that lost, nearest first, each once; ties and those that are nothing are left out."""
    found = {}
    for other in others:
        amount = times * float(plain(other))
        if amount and abs(times * value - amount) > 1e-9 * abs(amount):
            label = formula(other, False)
            found[label] = Rival(label if len(label) <= 100 else "another branch", amount, abs(times * value - amount))
    return tuple(sorted(found.values(), key=lambda r: r.slack)[:8])


def ratio(x: Traced) -> tuple[Any, Any] | None:
    """Return numerator and denominator of a number that is a ratio, None for any other."""
    x = core(x, True)
    return (x.args[0], x.args[1]) if isinstance(x, Traced) and x.op in ("/", "divide") else None
