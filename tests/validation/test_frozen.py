"""Predictions of some published runs, at least one a source and metric, are what they were."""

from __future__ import annotations

from accuracy import frozen


def test_no_frozen_prediction_moved() -> None:
    """A commit that moves a prediction freezes the cases anew: `python -m accuracy frozen --update` shows how far."""
    stored = frozen.stored()
    assert list(frozen.moved(stored, frozen.again(frozenset(stored)))) == []
