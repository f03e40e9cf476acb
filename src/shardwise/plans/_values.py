"""Values that would do: divisors, even splits, and how a remedy lists them."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(n: int, limit: int = 10**9) -> list[int]:
    """Return the divisors of n up to a limit, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return [d for d in (*small, *(n // i for i in reversed(small) if i * i != n)) if d <= limit]


def one_of(values: Iterable[object], shown: int = 12) -> str:
    """Return a remedy that lists legal values.

    >>> one_of([1, 2, 4])
    'use one of 1, 2, 4'
    """
    items = [str(v) for v in values]
    if not items:
        return "no value is legal here"
    more = ", ..." if len(items) > shown else ""
    return ("use " if len(items) == 1 else "use one of ") + ", ".join(items[:shown]) + more
