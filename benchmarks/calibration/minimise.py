"""A simplex search (Nelder and Mead 1965) over positive constants, by their logarithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# Errors far above this share of the measurement count little more than it: outliers are kernels that changed.
_SCALE = 0.06


def loss(predicted: Any, measured: Any) -> float:
    """Return the mean of log(1 + (error / 6 %)^2) over rows, error the logarithm of predicted over measured."""
    ratio = np.log(np.maximum(predicted, 1e-12) / measured)
    return float(np.mean(np.log1p((ratio / _SCALE) ** 2)))


def _simplex(f: Callable[[Any], float], start: Any, step: float, rounds: int) -> tuple[Any, float]:
    points = [start, *(start + step * unit for unit in np.eye(len(start)))]
    values = [f(p) for p in points]
    for _ in range(rounds):
        order = np.argsort(values)
        points, values = [points[i] for i in order], [values[i] for i in order]
        if values[-1] - values[0] < 1e-6:
            break
        centre, worst = np.mean(points[:-1], axis=0), points[-1]
        tried = centre + (centre - worst)
        found = f(tried)
        if found < values[0]:
            further = centre + 2 * (centre - worst)
            reached = f(further)
            points[-1], values[-1] = (further, reached) if reached < found else (tried, found)
        elif found < values[-2]:
            points[-1], values[-1] = tried, found
        else:
            tried = centre + 0.5 * (worst - centre)
            found = f(tried)
            if found < values[-1]:
                points[-1], values[-1] = tried, found
            else:
                points = [points[0], *(points[0] + 0.5 * (p - points[0]) for p in points[1:])]
                values = [values[0], *(f(p) for p in points[1:])]
    best = int(np.argmin(values))
    return points[best], values[best]


def fit(
    f: Callable[[dict[str, float]], float], start: Mapping[str, float], limits: Mapping[str, float], rounds: int = 500
) -> dict[str, float]:
    """Return the constants at the least value of `f`, each positive and at most its limit."""
    names = list(start)
    base = np.log([start[name] for name in names])
    top = np.log([limits.get(name, np.inf) for name in names])

    def constants(z: Any) -> dict[str, float]:
        return dict(zip(names, np.exp(np.clip(z, base - 30, top)).tolist(), strict=True))

    def cost(z: Any) -> float:
        return f(constants(z)) + float(np.sum(np.maximum(z - top, 0)))

    z = base
    for step in (0.3, 0.3, 0.15):
        z, _ = _simplex(cost, z, step, rounds)
    return constants(z)
