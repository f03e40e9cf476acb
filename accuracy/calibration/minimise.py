"""Searches over positive constants, by their logarithms: a simplex (Nelder and Mead 1965), and damped least squares.

Both minimise the mean of log(1 + (error / scale)^2) over rows; least squares (Marquardt 1963) weighs rows anew in every
round and takes many constants at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# Errors far above this share of the measurement count little more than it: outliers are kernels that changed.
_SCALE = 0.06
# By how much logarithms of constants change to find slopes.
STEP = 3e-3


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


class Squares:
    """Damped least squares: the errors of rows as a function of constants, and the weight of each row."""

    def __init__(self, f: Callable[[Any], Any], weights: Any, scale: float = 0.04, pull: float = 1e-4) -> None:
        """Take the logarithms of predicted over measured by the logarithms of constants, and the weights of rows.

        `pull` holds constants to where they began: those of a kernel with few shapes to those of its like.
        """
        self.f, self.weights, self.scale, self.pull = f, weights / np.sum(weights), scale, pull

    def cost(self, r: Any, z: Any, base: Any) -> float:
        """Return what is minimised; constants that no row tells stay where they began."""
        return float(np.sum(self.weights * np.log1p((r / self.scale) ** 2)) + self.pull * np.sum((z - base) ** 2))

    def normal(self, z: Any, r: Any, w: Any) -> tuple[Any, Any]:
        """Return matrix and right side of the linear problem around some constants, rows weighed by `w`."""
        slopes = np.array([(self.f(z + unit) - r) / STEP for unit in STEP * np.eye(len(z))])
        return (slopes * w) @ slopes.T, slopes @ (w * r)

    def step(self, z: Any, r: Any, base: Any, damping: float) -> list[Any]:
        """Return changes of constants that the linear problem asks for, ever more damped."""
        curve, change = self.normal(z, r, self.weights / (self.scale**2 + r**2))
        curve, change = curve + self.pull * np.eye(len(z)), change + self.pull * (z - base)
        return [np.linalg.solve(curve + x * np.diag(np.diag(curve)), -change) for x in damping * 6.0 ** np.arange(6)]

    def race(self, start: Any, top: Any, free: Any) -> Any:
        """Return the best of searches from several starts, `free` constants up to a factor of three away."""
        jitter = np.random.default_rng(0).uniform(-1.2, 1.2, (7, len(start))) * free
        found = [self.solve(start + shift, top, 8) for shift in (0 * start, *jitter)]
        best = min(found, key=lambda z: self.cost(self.f(z), z, start))
        return self.solve(best, top, 60)

    def solve(self, start: Any, top: Any, rounds: int, base: Any = None) -> Any:
        """Return the logarithms of constants, none above its top, held to `base` or else to where they start."""
        z, damping, base = np.minimum(start, top), 1e-2, start if base is None else base
        r = self.f(z)
        best = self.cost(r, z, base)
        for _ in range(rounds):
            before = best
            for i, change in enumerate(self.step(z, r, base, damping)):
                tried = np.clip(z + np.clip(change, -1, 1), base - 12, top)
                errors = self.f(tried)
                if (found := self.cost(errors, tried, base)) < best:
                    z, r, best, damping = tried, errors, found, max(damping * 6.0 ** (i - 1), 1e-6)
                    break
            if before - best < 1e-5:
                break
        return z
