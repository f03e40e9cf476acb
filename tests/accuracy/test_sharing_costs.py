"""The calibration of attention kernels: costs that are the same are found once, and none is negative."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from accuracy.calibration.sharing import Rows, fitted, positive, tied, unseen
from accuracy.kernels.ticks import Ticks

# Kernels by parts: the first two are alike, the third differs in its start alone, and no kernel pays for the last part.
COSTS = np.array([[5e-6, 2.0, 0.7, 0.0], [5e-6, 2.0, 0.7, 0.0], [9e-6, 2.0, 0.7, 0.0]])


def measured(devices: tuple[float, ...] = (1.0,), noise: float = 0.02) -> Rows:
    """Return 300 rows of each kernel on devices that are slower by some factors."""
    random = np.random.default_rng(7)
    kernels = np.repeat(np.arange(3), 300)
    matrix = np.concatenate([np.ones((900, 1)), 10 ** random.uniform(-7, -3, (900, 3))], 1)
    device = np.arange(900) % len(devices)
    parts = matrix * COSTS[kernels]
    seconds = (parts[:, 0] + np.array(devices)[device] * parts[:, 1:].sum(1)) * np.exp(random.normal(0, noise, 900))
    names, rows_folds = np.array([f"d{i}" for i in device]), np.arange(900) % 4
    return Rows(matrix, seconds, seconds, seconds, kernels, names, rows_folds)


def test_costs_that_are_the_same_are_one_constant() -> None:
    """Nine costs of three kernels are four constants, two starts and two rates, and come out as they went in."""
    rows = measured()
    ties = tied(rows, 0.01)
    assert len(np.unique(ties[ties >= 0])) == 4
    assert (ties[:, 3] == -1).all()
    assert (ties[0] == ties[1]).all()
    assert (ties[2, 1:] == ties[0, 1:]).all()
    assert fitted(rows, ties).costs == pytest.approx(COSTS, rel=0.02, abs=1e-9)


def test_a_constant_that_gains_less_than_is_asked_goes() -> None:
    """The more a constant must gain, the fewer are left."""
    rows = measured()
    counts = [int(tied(rows, gain).max()) + 1 for gain in (1e-3, 0.01, 30.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]


def test_slower_devices_are_told_apart_and_starts_are_not_slower() -> None:
    """A device whose parts take a quarter longer gets a factor a quarter above the other's."""
    rows = measured((1.0, 1.25))
    fit = fitted(rows, tied(rows, 0.01))
    assert fit.scale["d1"] / fit.scale["d0"] == pytest.approx(1.25, rel=0.02)
    assert np.median(np.abs(fit.predicted(rows) / rows.seconds - 1)) < 0.02


def test_kernels_are_found_behind_the_ticks_that_their_table_states() -> None:
    """Starts of 5 and 9 us come out of times that are stated in whole ticks of 4 us, and rates as before."""
    rows, table = measured(noise=0.005), Ticks(4e-6, 1, 6, 6e-6)
    stated = table.stated(rows.seconds)
    low, high = table.kernel(stated)
    ticked = replace(rows, seconds=(low + high) / 2, low=low, high=high)
    fit = fitted(ticked, tied(ticked, 0.01))
    assert fit.costs[:, 0] == pytest.approx(COSTS[:, 0], abs=0.5e-6)
    assert fit.costs[:, 1:] == pytest.approx(COSTS[:, 1:], rel=0.03, abs=1e-9)
    assert np.median(np.abs(table.stated(fit.predicted(ticked)) / stated - 1)) < 0.01


def test_rows_are_predicted_without_their_fold() -> None:
    """A fold that took twice as long is missed by half."""
    rows = measured()
    rows.seconds[rows.folds == 0] *= 2
    found = unseen(rows, tied(measured(), 0.01))
    assert np.median(found[rows.folds == 0] / rows.seconds[rows.folds == 0]) == pytest.approx(0.5, rel=0.03)


def test_unknowns_are_the_best_that_are_not_negative() -> None:
    """Of eight unknowns, the same as the best of all 256 choices of which are zero."""
    random = np.random.default_rng(7)
    matrix, goal = random.normal(size=(40, 8)), random.normal(size=40)
    best = np.inf
    for kept in product((False, True), repeat=8):
        found = np.zeros(8)
        found[list(kept)] = np.linalg.lstsq(matrix[:, kept], goal, rcond=None)[0]
        best = best if (found < 0).any() else min(best, float(((matrix @ found - goal) ** 2).sum()))
    found = positive(matrix.T @ matrix, matrix.T @ goal)
    assert found.min() >= 0
    assert ((matrix @ found - goal) ** 2).sum() == pytest.approx(best, rel=1e-6)
