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
from dataclasses import dataclass
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
class Part:
    """One contribution to a number: `amount` in the parent's unit, `times` how often the node counts in it."""

    label: str
    amount: float
    times: float
    node: Traced | None
    note: str = ""


def formula(x: Any, top: bool = True) -> str:
    """Return the arithmetic that made a number, down to named nodes.

    >>> with tracing():
    ...     print(formula(2 * leaf("tokens", 8) * leaf("width", 4)))
    2 * tokens * width
    """
    if not isinstance(x, Traced):
        return f"{x:.6g}" if isinstance(x, float) else str(x)
    if not x.op or (x.name and not top):
        return x.name or f"{x.value:.6g}"
    if x.op not in _PLAIN:
        return f"{x.op}({', '.join(formula(a, False) for a in x.args)})"
    left, right = formula(x.args[0], False), formula(x.args[1], False)
    if x.op in "*/":
        left = f"({left})" if _loose(x.args[0]) else left
        right = f"({right})" if _loose(x.args[1]) or (x.op == "/" and _is_product(x.args[1])) else right
    elif x.op == "-" and _loose(x.args[1]):
        right = f"({right})"
    return f"{left} {x.op} {right}"


def _loose(x: Any) -> bool:
    return isinstance(x, Traced) and x.op in ("+", "-") and not x.name


def _is_product(x: Any) -> bool:
    return isinstance(x, Traced) and x.op in ("*", "/") and not x.name


def named_below(x: Any, seen: dict[int, bool] | None = None) -> bool:
    """Return whether a number has named, computed nodes at or below it."""
    seen = {} if seen is None else seen
    if not isinstance(x, Traced) or not x.op:
        return False
    if id(x) not in seen:
        seen[id(x)] = bool(x.name) or any(named_below(a, seen) for a in x.args)
    return seen[id(x)]


def parts(x: Traced) -> list[Part]:
    """Return the contributions that sum to a number, largest first; empty for a leaf.

    >>> with tracing():
    ...     total = 3 * named(leaf("a", 2) * 2, "twice a") + named(leaf("b", 1) + 0, "b again")
    >>> [(p.label, p.amount, p.times) for p in parts(total)]
    [('twice a', 12.0, 3.0), ('b again', 1.0, 1.0)]
    """
    if not x.op:
        return []
    found: list[Part] = []
    _open(x, 1.0, True, "", found)
    merged: dict[tuple[str, int], Part] = {}
    for part in found:
        key = (part.label, id(part.node))
        old = merged.get(key)
        merged[key] = (
            part
            if old is None
            else Part(part.label, old.amount + part.amount, old.times + part.times, part.node, old.note)
        )
    return sorted((p for p in merged.values() if p.amount or p.note), key=lambda p: -abs(p.amount))


def _open(x: Any, times: float, top: bool, note: str, found: list[Part]) -> None:
    """Append the contributions of `times` * x."""
    value = float(plain(x))
    if not isinstance(x, Traced) or not x.op or (x.name and not top):
        label = x.name if isinstance(x, Traced) and x.name else formula(x, False)
        found.append(Part(label, times * value, times, x if isinstance(x, Traced) else None, note))
        return
    a = x.args
    if x.op in ("+", "-"):
        _open(a[0], times, False, note, found)
        _open(a[1], times if x.op == "+" else -times, False, note, found)
    elif x.op in ("max", "min"):
        binding = 0 if plain(a[0]) == x.value else 1
        _open(a[binding], times, False, _slack(x.op, a[1 - binding], times, x.value), found)
    elif x.op == "above":
        _open(a[2] if plain(a[0]) > plain(a[1]) else a[3], times, False, note, found)
    elif x.op in ("/", "divide") and named_below(a[0]) and not named_below(a[1]):
        _open(a[0], times / float(plain(a[1])), False, note, found)
    elif x.op == "*" and named_below(a[0]) != named_below(a[1]):
        one, other = (a[0], a[1]) if named_below(a[0]) else (a[1], a[0])
        _open(one, times * float(plain(other)), False, note, found)
    else:
        found.append(Part(formula(x, False), times * value, times, None, note))


def _slack(op: str, other: Any, times: float, value: Any) -> str:
    label = formula(other, False)
    if len(label) > 60 and isinstance(other, Traced) and not other.name:
        label = "the other branch"
    amount = times * float(plain(other))
    word = "over" if op == "max" else "under"
    return f"{word} {label} = {amount:.4g} (slack {abs(times * float(value) - amount):.3g})"


def ratio(x: Traced) -> tuple[Any, Any] | None:
    """Return numerator and denominator of a number that is a ratio, None for any other."""
    return (x.args[0], x.args[1]) if x.op in ("/", "divide") else None
