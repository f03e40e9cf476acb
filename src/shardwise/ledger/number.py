"""What a number is: a plain number, a column of float64, or a traced number; formulas are generic over the three.

`Number` has no ordering and no truth value, so the type checker refuses `if tp > 1` and `max(tp, 1)` on a column. The
functions below are the only ways to branch on a value. NumPy, or what stands in for it (`shardwise.arrays`), is looked
up, never imported: whoever passes a column has imported it already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from functools import cache, reduce
from typing import Any, Protocol, Self, TypeVar, cast


class Number(Protocol):
    """Arithmetic without ordering or truth."""

    def __add__(self, other: Self | float, /) -> Self: ...
    def __radd__(self, other: float, /) -> Self: ...
    def __sub__(self, other: Self | float, /) -> Self: ...
    def __rsub__(self, other: float, /) -> Self: ...
    def __mul__(self, other: Self | float, /) -> Self: ...
    def __rmul__(self, other: float, /) -> Self: ...
    def __truediv__(self, other: Self | float, /) -> Self: ...
    def __rtruediv__(self, other: float, /) -> Self: ...


X = TypeVar("X", bound=Number)


def array_library() -> Any:
    """Return what columns are made with: NumPy, or what stands in for it; None where nobody has imported either."""
    return sys.modules.get("numpy") or sys.modules.get("shardwise.arrays.plain")


def is_column(value: object) -> bool:
    """Return whether the value is an array, without importing NumPy.

    >>> is_column(3.0)
    False
    """
    library = array_library()
    return library is not None and isinstance(value, library.ndarray)


def is_plain(value: object, wanted: float) -> bool:
    """Return whether a number is plain, neither a column nor traced, and has the wanted value.

    >>> is_plain(1.0, 1), is_plain(2, 1)
    (True, False)
    """
    return isinstance(value, (int, float)) and value == wanted


def _divide(a: Any, b: Any) -> Any:
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _power(a: Any, exponent: float) -> Any:
    return a**exponent


def _choose(a: Any, b: Any, then: Any, other: Any) -> Any:
    return then if a > b else other


# One row per operation that is not plain arithmetic: how a plain number does it and which NumPy function a column uses.
_PLAIN: dict[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "ceil": lambda a: a if isinstance(a, int) else math.ceil(a),
    "log2": math.log2,
    "divide": _divide,
    "power": _power,
    "raised": lambda base, exponent: base**exponent,
    "above": _choose,
}


OPERATIONS = _PLAIN.keys()
"""Names of the operations that `evaluate` knows."""
_PLAIN_TYPES = frozenset((int, float))
# What an operation is computed at once of: plain numbers, and records of them.
_AT_ONCE: set[type] = {int, float}
# Which classes of numbers are columns, as far as they were seen: to look their library up takes longer.
_ARE_COLUMNS: dict[type, bool] = {}
# Untyped: `cast` is a call, which the commonest functions spare.
_MAX: Any = max
_MIN: Any = min
_COLUMN: dict[str, Callable[..., Any]] = {}
# What NumPy calls the operations of one function.
_NAMED = {
    "max": "maximum",
    "min": "minimum",
    "ceil": "ceil",
    "log2": "log2",
    "divide": "true_divide",
    "power": "power",
    "raised": "power",
}


RECORDS: dict[str, type] = {}
"""Records that are arguments of operations, by name: fields of numbers, and tuples of them."""


def register(name: str, plain: Callable[..., Any], column: Callable[..., Any], *records: type) -> None:
    """Add an operation that a traced number shows as one node: how a plain number and a column do it.

    Of numbers that are not below zero it gives none that is. `records` are those of its arguments that are no numbers.
    """
    _PLAIN[name], _COLUMN[name] = plain, column
    RECORDS.update({record.__name__: record for record in records})
    _AT_ONCE.update(records)


_POSITIVE = frozenset(
    ("add", "multiply", "true_divide", "min", "ceil", "divide", "sqrt", "power", "raised", "above"),
)


def positive_of_positive(name: str) -> bool:
    """Return whether an operation gives no number below zero of numbers that are not.

    >>> positive_of_positive("add"), positive_of_positive("log2")
    (True, False)
    """
    return name in _POSITIVE or name in _COLUMN


@cache
def _of_columns(library: Any) -> dict[str, Callable[..., Any]]:
    """Return how the library of columns does each operation that it has itself."""
    where, greater = library.where, library.greater

    def choose(a: Any, b: Any, then: Any, other: Any) -> Any:
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            return then if a > b else other
        return where(greater(a, b), then, other)

    return {name: getattr(library, own) for name, own in _NAMED.items()} | {"above": choose}


def evaluate(name: str, *args: Any) -> Any:
    """Return the named operation on plain numbers or columns; a traced number records it instead.

    >>> evaluate("max", 2, 3)
    3
    """
    columns = False
    for value in args:
        kind = type(value)
        if kind in _AT_ONCE:
            continue
        column = _ARE_COLUMNS.get(kind)
        if column is None:
            column = _ARE_COLUMNS[kind] = is_column(value)
        if column:
            columns = True
            continue
        record = getattr(value, "record", None)
        if record is not None:
            return record(name, *args)
    if columns:
        return (_COLUMN.get(name) or _of_columns(array_library())[name])(*args)
    return _PLAIN[name](*args)


def maximum(a: X, b: X | float) -> X:
    """Return the larger of two numbers, element by element on columns.

    >>> maximum(2.0, 3.0)
    3.0
    """
    if type(a) in _PLAIN_TYPES and type(b) in _PLAIN_TYPES:
        larger: X = _MAX(a, b)
        return larger
    value: X = evaluate("max", a, b)
    return value


def minimum(a: X, b: X | float) -> X:
    """Return the smaller of two numbers, element by element on columns.

    >>> minimum(2.0, 3.0)
    2.0
    """
    if type(a) in _PLAIN_TYPES and type(b) in _PLAIN_TYPES:
        smaller: X = _MIN(a, b)
        return smaller
    value: X = evaluate("min", a, b)
    return value


def ceil(a: X) -> X:
    """Return the smallest whole number that is not below `a`.

    >>> ceil(2.1)
    3
    """
    return cast(X, evaluate("ceil", a))


def log2(a: X) -> X:
    """Return the binary logarithm.

    >>> log2(8)
    3.0
    """
    return cast(X, evaluate("log2", a))


def power(a: X, exponent: float) -> X:
    """Return `a` raised to a plain exponent.

    >>> power(9.0, 0.5)
    3.0
    """
    return cast(X, evaluate("power", a, exponent))


def raised(base: float, exponent: X) -> X:
    """Return a plain base raised to any number.

    >>> raised(0.5, 2)
    0.25
    """
    return cast(X, evaluate("raised", base, exponent))


def divide(a: X | float, b: X | float) -> X:
    """Return a / b; two whole numbers that divide stay whole, so that counts beyond 2**53 stay exact.

    >>> divide(38_000_000_000_000_000_001, 1), divide(7, 2)
    (38000000000000000001, 3.5)
    """
    value: X = evaluate("divide", a, b)
    return value


def above(a: X, threshold: X | float, then: X | float, other: X | float) -> X:
    """Return `then` where a > threshold, else `other`.

    >>> above(2, 1, 10.0, 0.0)
    10.0
    """
    if type(a) in _PLAIN_TYPES and type(threshold) in _PLAIN_TYPES:
        chosen: X = _choose(a, threshold, then, other)
        return chosen
    value: X = evaluate("above", a, threshold, then, other)
    return value


def total(items: Iterable[X], zero: X | float = 0) -> X:
    """Return the sum of numbers, starting from `zero`.

    >>> total([1, 2, 3])
    6
    """
    value: Any = zero
    for item in items:
        value = value + item
    whole: X = value
    return whole


def largest(items: Iterable[X]) -> X:
    """Return the largest of one or more numbers.

    >>> largest([3, 7, 5])
    7
    """
    values = [*items]
    for value in values:
        # Symbols compare all of them at once.
        together = getattr(value, "largest_of", None)
        if together is not None:
            return cast(X, together(values))
    return reduce(maximum, values)


def quantile(values: Iterable[float], share: float) -> float:
    """Return a quantile of plain numbers, between two of them by their distance.

    >>> quantile([4.0, 1.0, 2.0], 0.75)
    3.0
    """
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)
