"""The accuracy of this release: what is wanted is reached, and no headline became worse than its stored one."""

from __future__ import annotations

import pytest

from accuracy import score, targets
from shardwise.measured import Validation

TOLERANCE = 0.005


def test_no_headline_of_the_shipped_measurements_became_worse(release: Validation) -> None:
    """The median error of each metric is at most half a point above the stored one."""
    now, before = score.medians(release), score.stored()["shipped"]
    worse = {m: (before[m]["median"], row["median"]) for m, row in now.items() if m in before}
    assert {m: pair for m, pair in worse.items() if pair[1] > pair[0] + TOLERANCE} == {}
    assert now.keys() == before.keys()


@pytest.mark.parametrize("quantity", ["step_seconds", "memory.peak_bytes", "request_seconds", "tpot_seconds"])
def test_bands_hold_for_sources_that_nobody_has_seen(quantity: str) -> None:
    """With its source or its device left out, 80 % of the runs lie inside in the mean; hardly a band holds fewer."""
    found = score.stored()["left_out"][quantity]
    assert 0.75 <= found["of_sources"] <= 0.95
    assert 0.78 <= found["of_devices"] <= 0.95
    assert found["source"] >= 0.8


def test_bands_hold_for_every_kind_of_run() -> None:
    """Of experts, narrow types and so on seven of ten runs lie inside without their source, where five sources ran."""
    kinds = [row for row in score.stored()["kinds"] if row["sources"] >= 5]
    assert {"experts", "fine-tuning", "narrow types", "nodes", "plain"} <= {row["kind"] for row in kinds}
    assert all(row["inside"] >= 0.7 for row in kinds), kinds


def test_every_source_that_is_far_off_has_a_cause() -> None:
    """A source whose median error is over twice what is wanted has a line that says why; no line is left over."""
    off = {(name, source) for name, source, _ in targets.off(score.stored()["targets"])}
    said = {(name, source) for name, rows in targets.causes().items() for source in rows}
    assert off == said


def test_every_target_was_measured() -> None:
    """The stored run holds rows for each thing that is wanted, none is passed over."""
    stored = score.stored()["targets"]
    assert [target["name"] for target in targets.targets()] == list(stored)
    assert all(one["coverage"] > 0 for one in stored.values())


def test_what_is_wanted_is_reached() -> None:
    """Every target holds on the development rows."""
    stored = score.stored()["targets"]
    assert [t["name"] for t in targets.targets() if not targets.is_met(t, stored[t["name"]])] == []


def test_verdicts_on_memory_are_seldom_wrong() -> None:
    """Of the runs that ran few are called too large, of those that ran out of memory few are called fitting."""
    said = score.stored()["verdicts"]
    for what, limit in targets.limits_of_verdicts().items():
        assert said[what]["rows"] > 0
        assert said[what]["wrong"] <= limit * said[what]["rows"], what


def test_every_shipped_row_is_predicted_and_cited(release: Validation) -> None:
    """The folder holds no row that it cannot predict, and none without a citation."""
    assert [row.reason for row in release.rows if row.status != "predicted"] == []
    assert all(row.citation for row in release.rows)
    assert len(release.rows) > 300
