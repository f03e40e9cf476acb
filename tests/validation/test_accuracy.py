"""The accuracy of this release: stored results belong to it, and no headline became worse."""

from __future__ import annotations

import accuracy
import accuracy_targets
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


@pytest.mark.parametrize("quantity", ["step_seconds", "request_seconds", "tpot_seconds"])
def test_intervals_hold_what_they_promise(quantity: str) -> None:
    """With its source or its device left out, 80 % of the runs lie inside, within 7 points."""
    found = accuracy.stored()["left_out"][quantity]
    assert found["source"] == pytest.approx(0.8, abs=0.07)
    assert found["device"] == pytest.approx(0.8, abs=0.07)


def test_every_source_that_is_far_off_has_a_cause() -> None:
    """A source whose median error is over twice what is wanted has a line that says why; no line is left over."""
    off = {(name, source) for name, source, _ in accuracy_targets.off(accuracy.stored()["targets"])}
    said = {(name, source) for name, rows in accuracy_targets.causes().items() for source in rows}
    assert off == said


def test_every_target_was_measured() -> None:
    """The stored run holds rows for each thing that is wanted, none is passed over."""
    stored = accuracy.stored()["targets"]
    assert [target["name"] for target in accuracy_targets.targets()] == list(stored)
    assert all(one["coverage"] > 0 for one in stored.values())


def test_what_is_wanted_is_reached() -> None:
    """Every target holds on the development rows."""
    stored = accuracy.stored()["targets"]
    assert [t["name"] for t in accuracy_targets.targets() if not accuracy_targets.is_met(t, stored[t["name"]])] == []


def test_verdicts_on_memory_are_seldom_wrong() -> None:
    """Of the runs that ran few are called too large, of those that ran out of memory few are called fitting."""
    said = accuracy.stored()["verdicts"]
    for what, limit in accuracy_targets.limits_of_verdicts().items():
        assert said[what]["rows"] > 0
        assert said[what]["wrong"] <= limit * said[what]["rows"], what
