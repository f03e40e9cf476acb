"""The accuracy of this release: stored results belong to it, and no headline became worse."""

from __future__ import annotations

import accuracy
import frozen
import pytest

from shardwise.validation import shipped, validate

TOLERANCE = 0.005


def test_stored_results_belong_to_the_present_constants() -> None:
    """Constants that change ask for `python benchmarks/accuracy.py --update` with the files of measurements."""
    assert accuracy.stored()["constants"] == accuracy.constants_hash()


def test_no_headline_of_the_shipped_measurements_became_worse() -> None:
    """The median error of each metric is at most half a point above the stored one."""
    now, before = accuracy.medians(validate(shipped())), accuracy.stored()["shipped"]
    worse = {m: (before[m]["median"], row["median"]) for m, row in now.items() if m in before}
    assert {m: pair for m, pair in worse.items() if pair[1] > pair[0] + TOLERANCE} == {}
    assert now.keys() == before.keys()


def test_no_frozen_prediction_moved() -> None:
    """A commit that moves a prediction freezes the cases anew: `python benchmarks/frozen.py --update` shows how far."""
    assert list(frozen.moved(frozen.stored(), frozen.cases())) == []


@pytest.mark.parametrize("quantity", ["step_seconds", "request_seconds", "tpot_seconds"])
def test_intervals_hold_what_they_promise(quantity: str) -> None:
    """With its source or its device left out, 80 % of the runs lie inside, within 7 points."""
    found = accuracy.stored()["left_out"][quantity]
    assert found["source"] == pytest.approx(0.8, abs=0.07)
    assert found["device"] == pytest.approx(0.8, abs=0.07)
