"""As few costs of the parts of kernels as measured rows can tell apart.

Every part of every kernel begins with a cost of its own, by non-negative least squares on relative errors, rows far
off counted less. Then whole kernels are joined, and after them the costs of one part in two kernels, or a part of a
kernel is left out: whichever raises the loss least, until every such step would raise it by more than a stated gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from accuracy.calibration.tables import INSIDE

_SCALE, _ROUNDS = 0.06, 8
# What a start costs at least, in seconds, where a table states whole ticks and cannot tell a short one from none: the
# shortest attention kernel of any table takes four times as long.
_START = 1e-6
_FOLDS = 4
_RIDGE = 1e-10


def positive(square: Any, right: Any) -> Any:
    """Return the non-negative unknowns of normal equations, by exchange of whole blocks (Portugal et al. 1994)."""
    norms = np.sqrt(np.diag(square)) + 1e-300
    square, right = square / norms[:, None] / norms, right / norms
    used, least, patience = np.ones(len(right), bool), len(right) + 1, 3
    for _ in range(10 * len(right)):
        found = np.zeros(len(right))
        inner = square[np.ix_(used, used)] + _RIDGE * np.eye(int(used.sum()))
        found[used] = np.linalg.solve(inner, right[used])
        wrong = np.flatnonzero(np.where(used, found < 0, right - square @ found > 1e-9))
        if not len(wrong):
            break
        patience = 3 if len(wrong) < least else patience - 1
        least = min(least, len(wrong))
        wrong = wrong if patience > 0 else wrong[-1:]
        used[wrong] = ~used[wrong]
    return np.maximum(found, 0.0) / norms


def losses(predicted: Any, seconds: Any) -> Any:
    """Return the loss of every row, log(1 + (error / 6 %)^2)."""
    return np.log1p(((predicted / seconds - 1) / _SCALE) ** 2)


@dataclass(frozen=True)
class Rows:
    """Measured kernels: parts of each, seconds, the number of its kernel, the device, the fold of its shape.

    `low` and `high` bound the seconds of kernels that a table states so.
    """

    matrix: Any
    seconds: Any
    low: Any
    high: Any
    kernels: Any
    devices: Any
    folds: Any

    def cut(self, mask: Any) -> Rows:
        """Return the rows of a mask."""
        return Rows(*(getattr(self, field.name)[mask] for field in fields(self)))

    @property
    def start(self) -> float:
        """Seconds that a start costs at least."""
        return _START if (self.high > self.low).any() else 0.0

    def near(self, predicted: Any) -> Rows:
        """Return the rows with the seconds nearest to predicted ones that a table states as it does."""
        near, middle = np.clip(predicted, self.low, self.high), (self.low + self.high) / 2
        return replace(self, seconds=near + INSIDE * (middle - near))

    def scaled(self, scale: dict[str, float]) -> Rows:
        """Return the rows with all parts but the start longer by the factor of each device."""
        factor = np.array([scale.get(d, 1.0) for d in self.devices])
        return replace(self, matrix=np.concatenate([self.matrix[:, :1], self.matrix[:, 1:] * factor[:, None]], 1))


def own(rows: Rows) -> Any:
    """Return the number of the constant of every kernel and part where each has its own."""
    shape = (int(rows.kernels.max()) + 1, rows.matrix.shape[1])
    return np.arange(shape[0] * shape[1]).reshape(shape)


@dataclass(frozen=True)
class Fit:
    """The cost of every kernel and part, how much slower each device is, and the weight of every row."""

    costs: Any
    scale: dict[str, float]
    weights: Any

    def predicted(self, rows: Rows) -> Any:
        """Return seconds of rows."""
        return np.einsum("ij,ij->i", rows.scaled(self.scale).matrix, self.costs[rows.kernels])


def _relative(rows: Rows, weights: Any) -> tuple[Any, Any]:
    """Return the weighed parts of rows over their seconds, and the weights less what the least of starts takes."""
    relative = rows.matrix * (weights / rows.seconds)[:, None]
    return relative, weights - rows.start * relative[:, 0]


def _equations(rows: Rows, ties: Any, weights: Any) -> tuple[Any, Any]:
    """Return the normal equations of the constants; `ties` has -1 where a kernel has no cost for a part."""
    count = int(ties.max()) + 2
    square, right = np.zeros((count, count)), np.zeros(count)
    relative, wanted = _relative(rows, weights)
    for kernel, places in enumerate(ties):
        mask = rows.kernels == kernel
        np.add.at(square, (places[:, None], places), relative[mask].T @ relative[mask])
        np.add.at(right, places, relative[mask].T @ wanted[mask])
    return square[:-1, :-1], right[:-1]


def _weighed(rows: Rows, ties: Any, weights: Any) -> Fit:
    """Return the fit with some weights, and with the weights that follow from it."""
    found = positive(*_equations(rows, ties, weights))
    costs = np.where(ties >= 0, found[ties], 0.0)
    costs[:, 0] += rows.start
    fit = Fit(costs, {}, weights)
    return replace(fit, weights=1 / np.sqrt(1 + ((fit.predicted(rows) / rows.seconds - 1) / _SCALE) ** 2))


def _robust(rows: Rows, ties: Any) -> Fit:
    fit = Fit(None, {}, np.ones(len(rows.seconds)))
    for _ in range(_ROUNDS):
        fit = _weighed(rows, ties, fit.weights)
        rows = rows.near(fit.predicted(rows))
    return fit


def fitted(rows: Rows, ties: Any) -> Fit:
    """Return the costs of kernels that share constants so, and how much slower each device is than the middle."""
    devices = [str(d) for d in np.unique(rows.devices)]
    if len(devices) == 1:
        return _robust(rows, ties)
    scale = dict.fromkeys(devices, 1.0)
    for last in (False, False, True):
        fit = replace(_robust(rows.scaled(scale), ties), scale=scale)
        if last:
            return fit
        rows = rows.near(fit.predicted(rows))
        start = rows.matrix[:, 0] * fit.costs[rows.kernels, 0]
        worked = np.maximum(replace(fit, scale={}).predicted(rows) - start, 1e-12)
        factor, long = (rows.seconds - start) / worked, worked > start
        scale = {d: float(np.median(factor[long & (rows.devices == d)])) for d in devices}
    return fit


def unseen(rows: Rows, ties: Any) -> Any:
    """Return seconds of every row by the costs of the folds that it is not in."""
    found = np.zeros(len(rows.seconds))
    for fold in range(_FOLDS):
        mask = rows.folds == fold
        if mask.any():
            found[mask] = fitted(rows.cut(~mask), ties).predicted(rows.cut(mask))
    return found


@dataclass(frozen=True)
class _Equations:
    """The normal equations of the costs of some kernels, and what the fit takes off the squares."""

    square: Any
    right: Any
    taken: float

    @staticmethod
    def of(square: Any, right: Any) -> _Equations:
        """Return equations with their solution."""
        return _Equations(square, right, float(right @ positive(square, right)))

    def __add__(self, other: _Equations) -> _Equations:
        return _Equations.of(self.square + other.square, self.right + other.right)


def _numbered(ties: Any) -> Any:
    """Return ties with constants numbered from zero."""
    found = np.unique(ties, return_inverse=True)[1].reshape(ties.shape)
    return found - 1 if (ties < 0).any() else found


def _steps(rows: Rows, ties: Any, fit: Fit) -> Iterator[tuple[float, int, int]]:
    """Yield what steps raise the loss by, least first: the constant that goes, and that which it joins or -1.

    By how much squares rise when an unknown x is held at zero, x^2 / V, or two at one value, (x - y)^2 / V(x - y), V
    from the inverse of the normal equations (Wald 1943).
    """
    square, right = _equations(rows, ties, fit.weights)
    norms = np.sqrt(np.diag(square))
    inverse = np.linalg.inv(square / norms[:, None] / norms + _RIDGE * np.eye(len(right)))
    found = inverse @ (right / norms) / norms
    inverse = inverse / norms[:, None] / norms
    spread = np.diag(inverse)
    part = np.zeros(len(right), int)
    for j in range(ties.shape[1]):
        part[ties[ties[:, j] >= 0, j]] = j
    gone = np.where(part == 0, np.inf, found**2 / spread)
    apart = (found[:, None] - found) ** 2 / (spread[:, None] + spread - 2 * inverse + 1e-300)
    apart[(part[:, None] != part) | np.tri(len(part), dtype=bool)] = np.inf
    rise = np.concatenate([gone[:, None], apart], 1)
    for place in np.argsort(rise, axis=None)[: 4 * len(part)]:
        one, other = divmod(int(place), len(part) + 1)
        yield float(rise[one, other]), one, other - 1


def _alike(rows: Rows, most: float) -> Any:
    """Return the number of the row of costs of every kernel: two share one where that raises the loss no more."""
    fit = _robust(rows, own(rows))
    rows, weights = rows.near(fit.predicted(rows)), fit.weights
    relative, wanted = _relative(rows, weights)
    numbers = np.arange(int(rows.kernels.max()) + 1)
    masks = [rows.kernels == kernel for kernel in numbers]
    groups = {k: _Equations.of(relative[mask].T @ relative[mask], relative[mask].T @ wanted[mask])
              for k, mask in enumerate(masks)}  # fmt: skip
    pairs = {(i, j): groups[i] + groups[j] for j in groups for i in groups if i < j}
    while pairs:
        rise, one, other = min((groups[i].taken + groups[j].taken - p.taken, i, j) for (i, j), p in pairs.items())
        if rise > most:
            break
        groups[one] = pairs[one, other]
        del groups[other]
        numbers[numbers == other] = one
        pairs = {k: v for k, v in pairs.items() if not {one, other} & set(k)}
        pairs |= {(min(one, k), max(one, k)): groups[one] + groups[k] for k in groups if k != one}
    return np.unique(numbers, return_inverse=True)[1]


def tied(rows: Rows, gain: float) -> Any:
    """Return which constant is the cost of every kernel and part, -1 where none is; each lowers the mean loss so much.

    A part that the fit gives no cost is left out, but the start.
    """
    most = gain * _SCALE**2 * len(rows.seconds)
    rows = rows.scaled(fitted(rows, own(rows)).scale)
    alike = _alike(rows, most)
    rows = replace(rows, kernels=alike[rows.kernels])
    ties = own(rows)
    fit = _robust(rows, ties)
    while True:
        ties = _numbered(np.where((fit.costs > 0) | (np.arange(ties.shape[1]) == 0), ties, -1))
        rows = rows.near(fit.predicted(rows))
        fit = _weighed(rows, ties, fit.weights)
        touched = np.zeros(len(ties), bool)
        for rise, one, other in _steps(rows, ties, fit):
            if rise > most:
                break
            uses = ((ties == one) | ((ties == other) & (other >= 0))).any(1)
            if not (touched & uses).any():
                ties = np.where(ties == one, other, ties)
                touched |= uses
        if not touched.any():
            return ties[alike]
        ties = _numbered(ties)
        fit = _weighed(rows, ties, fit.weights)
