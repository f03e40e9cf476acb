"""Numbers that stand for columns not yet given: a formula run on them once becomes a list of array operations.

Equal operations on equal arguments are one symbol, what is known is computed at once, and every symbol knows with what
it varies, so that a program made of it computes each sub-expression once and no wider than it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shardwise.ledger.number import evaluate

Key = tuple[Any, ...]
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "true_divide": lambda a, b: a / b,
}
_COMMUTING = frozenset(("add", "multiply", "max", "min"))


class Book:
    """The symbols of one recording, each once."""

    __slots__ = ("known", "symbols")

    def __init__(self) -> None:
        self.known: dict[Key, Symbol] = {}
        self.symbols: list[Symbol] = []

    def given(self, name: str, level: int) -> Symbol:
        """Return the symbol of an input; `level` has a bit for everything that it varies with."""
        return self.enter(("given", name), level)

    def enter(self, key: Key, level: int) -> Symbol:
        """Return the symbol of an operation and its arguments."""
        found = self.known.get(key)
        if found is None:
            found = Symbol(self, key, level)
            self.known[key] = found
            self.symbols.append(found)
        return found


class Symbol:
    """A number that is an input or the result of an operation; `place` counts the symbols of the book before it."""

    __slots__ = ("book", "key", "level", "place")
    __array_ufunc__ = None

    def __init__(self, book: Book, key: Key, level: int) -> None:
        self.book, self.key, self.level = book, key, level
        self.place = len(book.symbols)

    @property
    def op(self) -> str:
        """The operation, "given" for an input."""
        return str(self.key[0])

    @property
    def args(self) -> Key:
        """The arguments of the operation, symbols and plain numbers."""
        return self.key[1:]

    def record(self, op: str, *args: Any) -> Any:
        """Return the result of a named operation."""
        return _made(op, args)

    def __add__(self, other: Any) -> Any:
        return _made("add", (self, other))

    def __radd__(self, other: Any) -> Any:
        return _made("add", (other, self))

    def __sub__(self, other: Any) -> Any:
        return _made("subtract", (self, other))

    def __rsub__(self, other: Any) -> Any:
        return _made("subtract", (other, self))

    def __mul__(self, other: Any) -> Any:
        return _made("multiply", (self, other))

    def __rmul__(self, other: Any) -> Any:
        return _made("multiply", (other, self))

    def __truediv__(self, other: Any) -> Any:
        return _made("true_divide", (self, other))

    def __rtruediv__(self, other: Any) -> Any:
        return _made("true_divide", (other, self))

    def __repr__(self) -> str:
        return f"Symbol({self.place}: {self.op})"


def _is(value: Any, number: float) -> bool:
    return not isinstance(value, Symbol) and bool(value == number)


def _short(op: str, args: tuple[Any, ...]) -> Any:
    """Return what an operation is known to give without being done; None where it is to be done."""
    a, b = args[0], args[1]
    if op == "add":
        return b if _is(a, 0) else a if _is(b, 0) else None
    if op == "multiply":
        if _is(a, 0) or _is(b, 0):
            return 0.0
        return b if _is(a, 1) else a if _is(b, 1) else None
    if op == "subtract":
        return 0.0 if a is b else a if _is(b, 0) else None
    if op == "true_divide":
        return 0.0 if _is(a, 0) else a if _is(b, 1) else None
    if op in ("max", "min"):
        return a if a is b else None
    return None


def _above(args: tuple[Any, ...]) -> Any:
    a, threshold, then, other = args
    if then is other or (not isinstance(then, Symbol) and _is(other, then)):
        return then
    known = not isinstance(a, Symbol) and not isinstance(threshold, Symbol)
    return (then if a > threshold else other) if known else None


def _made(op: str, args: tuple[Any, ...]) -> Any:
    symbols = [a for a in args if isinstance(a, Symbol)]
    if not symbols:
        return _ARITHMETIC[op](*args) if op in _ARITHMETIC else evaluate(op, *args)
    op = "true_divide" if op == "divide" else op
    short = _above(args) if op == "above" else _short(op, args) if len(args) == 2 else None
    if short is not None:
        return short
    if op == "power" and _is(args[1], 0.5):
        op, args = "sqrt", args[:1]
    if op in _COMMUTING and isinstance(args[1], Symbol):
        a, b = args
        # One order for both ways to write it.
        args = (b, a) if not isinstance(a, Symbol) or a.place > b.place else (a, b)
    level = 0
    for symbol in symbols:
        level |= symbol.level
    return symbols[0].book.enter((op, *args), level)


def needed(outputs: Iterable[Any]) -> list[Symbol]:
    """Return the symbols that some results are made of, in the order in which they can be computed.

    >>> book = Book()
    >>> x, y = book.given("x", 1), book.given("y", 1)
    >>> twice, other = 2 * x, x * y
    >>> [symbol.op for symbol in needed([twice + 0 * y])]
    ['given', 'multiply']
    """
    found: dict[int, Symbol] = {}
    waiting = [o for o in outputs if isinstance(o, Symbol)]
    while waiting:
        symbol = waiting.pop()
        if symbol.place not in found:
            found[symbol.place] = symbol
            waiting += [a for a in symbol.args if isinstance(a, Symbol)]
    return [found[place] for place in sorted(found)]
