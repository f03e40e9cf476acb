"""Which kernels of a group share a row of costs, and which parts cost anything: by shapes that are left out.

Costs are non-negative least squares on relative errors, rows far off counted less. Kernels (head sizes, with a window
or without) start with one row for all; a row is split where that lowers the loss of shapes in four folds, each
predicted from the other three; parts that hardly matter are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_SCALE, _ROUNDS = 0.06, 8
# Folds of shapes left out; a row of costs with fewer measured rows than this is fitted to all of them.
_FOLDS, _LEAST = 4, 15

Shared = dict[str, int]


def positive(matrix: Any, goal: Any) -> Any:
    """Return the non-negative costs of least squares (Lawson and Hanson 1974, chapter 23)."""
    norms = np.sqrt((matrix**2).sum(0)) + 1e-300
    matrix = matrix / norms
    square, right = matrix.T @ matrix, matrix.T @ goal
    found, used = np.zeros(len(right)), np.zeros(len(right), bool)
    for _ in range(4 * len(right)):
        slope = np.where(used, -1.0, right - square @ found)
        if slope.max() < 1e-9:
            break
        used[int(np.argmax(slope))] = True
        while used.any():
            tried = np.zeros(len(right))
            tried[used] = np.linalg.lstsq(square[np.ix_(used, used)], right[used], rcond=None)[0]
            bad = used & (tried <= 0)
            if not bad.any():
                found = tried
                break
            step = np.min(found[bad] / (found[bad] - tried[bad] + 1e-300))
            found = found + step * (tried - found)
            used &= found > 1e-12
            found[~used] = 0.0
    return found / norms


def robust(matrix: Any, seconds: Any) -> Any:
    """Return costs of least squares on relative errors, rows far off counted less, as the loss of the other fits."""
    weight = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        found = positive(matrix * (weight / seconds)[:, None], weight)
        weight = 1 / np.sqrt(1 + ((matrix @ found / seconds - 1) / _SCALE) ** 2)
    return found


def losses(predicted: Any, seconds: Any) -> Any:
    """Return the loss of every row, log(1 + (error / 6 %)^2)."""
    return np.log1p(((predicted / seconds - 1) / _SCALE) ** 2)


@dataclass(frozen=True)
class Rows:
    """Measured kernels: parts of each, seconds, the compiled kernel, the device, the fold of its shape."""

    matrix: Any
    seconds: Any
    kernels: Any
    devices: Any
    folds: Any

    def cut(self, mask: Any) -> Rows:
        """Return the rows of a mask."""
        return Rows(*(getattr(self, n)[mask] for n in ("matrix", "seconds", "kernels", "devices", "folds")))

    def scaled(self, scale: dict[str, float]) -> Rows:
        """Return the rows with all parts but the start longer by the factor of each device."""
        factor = np.array([scale.get(d, 1.0) for d in self.devices])
        return replace(self, matrix=np.concatenate([self.matrix[:, :1], self.matrix[:, 1:] * factor[:, None]], 1))


@dataclass(frozen=True)
class Fit:
    """Rows of costs, which of them each kernel takes, and how much slower each device is."""

    costs: dict[int, Any]
    shared: Shared
    scale: dict[str, float]

    def predicted(self, rows: Rows) -> Any:
        """Return seconds of rows."""
        rows, found = rows.scaled(self.scale), np.zeros(len(rows.seconds))
        for name in np.unique(rows.kernels):
            mask = rows.kernels == name
            found[mask] = rows.matrix[mask] @ self.costs[self.shared[name]]
        return found

    def named(self) -> tuple[dict[str, list[float]], dict[str, str]]:
        """Return rows of costs by the first kernel that takes each, and the kernels that share another's."""
        first = {k: next(n for n in self.shared if self.shared[n] == k) for k in self.costs}
        same = {n: first[k] for n, k in self.shared.items() if first[k] != n}
        return {first[k]: [float(x) for x in row] for k, row in self.costs.items()}, same


Parts = dict[int, Any]


def _costs(rows: Rows, shared: Shared, parts: Parts) -> dict[int, Any]:
    labels = np.array([shared[n] for n in rows.kernels])
    found = {}
    for k in dict.fromkeys(shared.values()):
        mask = labels == k
        mask = mask if mask.sum() >= _LEAST else mask | True
        kept = parts.get(k, slice(None))
        found[k] = np.zeros(rows.matrix.shape[1])
        found[k][kept] = robust(rows.matrix[mask][:, kept], rows.seconds[mask])
    return found


def fitted(rows: Rows, shared: Shared, parts: Parts) -> Fit:
    """Return the costs of kernels that share rows so, and how much slower each device is than the middle of them."""
    devices = [str(d) for d in np.unique(rows.devices)]
    scale = dict.fromkeys(devices, 1.0)
    for _ in range(3 if len(devices) > 1 else 1):
        fit = Fit(_costs(rows.scaled(scale), shared, parts), shared, scale)
        if len(devices) == 1:
            return replace(fit, scale={})
        for device in devices:
            own = rows.cut(rows.devices == device)
            start = own.matrix[:, 0] * np.array([fit.costs[shared[n]][0] for n in own.kernels])
            worked = np.maximum(replace(fit, scale={}).predicted(own) - start, 1e-9)
            long = worked > start
            scale = scale | {device: float(np.median(((own.seconds - start) / worked)[long])) if long.any() else 1.0}
    return fit


def unseen(rows: Rows, shared: Shared, parts: Parts) -> Any:
    """Return seconds of every row by the costs of the folds that it is not in."""
    found = np.zeros(len(rows.seconds))
    for fold in range(_FOLDS):
        mask = rows.folds == fold
        if mask.any():
            found[mask] = fitted(rows.cut(~mask), shared, parts).predicted(rows.cut(mask))
    return found


def _settled(rows: Rows, shared: Shared) -> tuple[float, Shared]:
    """Return the loss and the sharing after kernels have moved to the row of costs that suits each best."""
    best: tuple[float, Shared] = (np.inf, shared)
    for _ in range(4):
        costs = _costs(rows, shared, {})
        moved, loss = {}, 0.0
        for name in shared:
            mask = rows.kernels == name
            each = {k: float(losses(rows.matrix[mask] @ c, rows.seconds[mask]).sum()) for k, c in costs.items()}
            moved[name] = min(each, key=lambda k: each[k])
            loss += each[moved[name]]
        if loss >= best[0] - 1e-9:
            break
        best, shared = (loss, moved), moved
    return best


def _split(rows: Rows, shared: Shared) -> Shared:
    """Return the best sharing with one row of costs more, each kernel in turn the first to take it."""
    tried = [_settled(rows, shared | {name: max(shared.values()) + 1}) for name in shared]
    return min(tried, key=lambda one: one[0])[1]


def sharing(rows: Rows, gain: float, most: int) -> tuple[float, Shared]:
    """Return the loss of shapes left out and which kernels share costs: a row more, to so many, only where it gains."""
    shared = {str(n): 0 for n in np.unique(rows.kernels)}
    best = (float(losses(unseen(rows, shared, {}), rows.seconds).mean()), shared)
    even = rows.scaled(fitted(rows, shared, {}).scale)
    for _ in range(min(most, len(shared)) - 1):
        shared = _split(even, shared)
        loss = float(losses(unseen(rows, shared, {}), rows.seconds).mean())
        if loss < best[0] - gain:
            best = (loss, shared)
    return best


def kept_parts(rows: Rows, shared: Shared, gain: float) -> Parts:
    """Return the parts that each row of costs keeps: those that take this much off the loss of all rows."""
    even = rows.scaled(fitted(rows, shared, {}).scale)
    labels = np.array([shared[n] for n in rows.kernels])
    found: Parts = {}
    for k, costs in _costs(even, shared, {}).items():
        own = even.cut(labels == k)

        def loss(kept: list[int], own: Rows = own) -> float:
            matrix = own.matrix[:, kept]
            return float(losses(matrix @ robust(matrix, own.seconds), own.seconds).sum() / len(rows.seconds))

        kept = [0, *(j for j in range(1, len(costs)) if costs[j])]
        least = loss(kept)
        while len(kept) > 2:
            now, out = min((loss([j for j in kept if j != i]), i) for i in kept[1:])
            if now > least + gain:
                break
            kept.remove(out)
            least = now
        found[k] = kept
    return found
