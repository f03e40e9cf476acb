"""Functions of single numbers under numpy's names, and what they give where Python's own raise an error."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any


def _larger(a: Any, b: Any) -> Any:
    return a if a >= b or a != a else b


def _smaller(a: Any, b: Any) -> Any:
    return a if a <= b or a != a else b


def _sqrt(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan


def _ceil(x: float) -> float:
    return float(math.ceil(x))


def _floor(x: float) -> float:
    return float(math.floor(x))


DEFINED: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "true_divide": operator.truediv,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "power": math.pow, "maximum": _larger,
    "minimum": _smaller, "negative": operator.neg, "absolute": abs, "exp": math.exp, "expm1": math.expm1,
    "log": math.log, "log1p": math.log1p, "log2": math.log2, "sqrt": _sqrt, "ceil": _ceil, "floor": _floor,
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "logical_not": operator.not_, "less": operator.lt,
    "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge, "equal": operator.eq,
    "not_equal": operator.ne, "rint": lambda x: float(round(x)),
}  # fmt: skip
"""The functions, each for the numbers that it is defined for."""


def _divided(a: float, b: float) -> float:
    if b:
        return a / b
    return math.copysign(math.inf, a) * math.copysign(1.0, b) if a and a == a else math.nan


def _raised(a: float, b: float) -> float:
    try:
        power = a**b
    except ZeroDivisionError:
        return math.inf
    except OverflowError:
        return math.inf
    return power if isinstance(power, (int, float)) else math.nan


def _logarithm(of: Callable[[float], float], least: float) -> Callable[[float], float]:
    return lambda x: of(x) if x > least or x != x else -math.inf if x == least else math.nan


def _grown(of: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: of(x) if x < 709.7 or x != x else math.inf


EVERYWHERE: dict[str, Callable[..., Any]] = {
    "true_divide": _divided,
    "floor_divide": lambda a, b: float(math.floor(a / b)) if b and math.isfinite(a / b) else _divided(a, b),
    "remainder": lambda a, b: a % b if b else math.nan,
    "power": _raised,
    "log": _logarithm(math.log, 0.0),
    "log1p": _logarithm(math.log1p, -1.0),
    "log2": _logarithm(math.log2, 0.0),
    "exp": _grown(math.exp),
    "expm1": _grown(math.expm1),
    "ceil": lambda x: float(math.ceil(x)) if math.isfinite(x) else x,
    "floor": lambda x: float(math.floor(x)) if math.isfinite(x) else x,
    "rint": lambda x: float(round(x)) if math.isfinite(x) else x,
}
"""Those that have limits, and no number, elsewhere."""
