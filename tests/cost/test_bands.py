"""Bands around predictions: what is less known is wider, and ends are not held at the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cost import Conditions, band_of, memory_band, spreads, tie_factor

KNOWN = Conditions(stack="megatron", family="hopper", words=())


def width(quantity: str, known: Conditions) -> float:
    """Return the high end of a band over its low end."""
    band = band_of(quantity, known)
    return band.high / band.low


@pytest.mark.parametrize("quantity", sorted(spreads()))
def test_every_condition_widens(quantity: str) -> None:
    """Whatever is said of a run makes its band no narrower."""
    spread = spreads()[quantity]
    assert all(factor >= 1 for factor in spread.wider.values())
    assert spread.low < spread.typical < spread.high
    for word in spread.wider:
        assert width(quantity, replace(KNOWN, words=(word,))) >= width(quantity, KNOWN)


@pytest.mark.parametrize("quantity", sorted(spreads()))
def test_conditions_that_no_run_met_together_do_not_multiply(quantity: str) -> None:
    """A run of which everything is said is off by no more than the widest kind of those that were measured."""
    spread = spreads()[quantity]
    assert 1 <= spread.widest < 50
    everything = Conditions(stack="of my own", family="generic", words=tuple(spread.wider), device="of-my-own")
    assert spread.scale_of(everything) <= spread.scale * spread.widest


def test_a_stack_that_nobody_ran_is_less_known() -> None:
    """A stack without runs has a wider band than one with runs elsewhere, and that a wider one than where it ran."""
    unseen = replace(KNOWN, stack="of my own")
    assert "megatron" in spreads()["step_seconds"].seen and "ada" not in spreads()["step_seconds"].seen["megatron"]
    here, elsewhere = (width("step_seconds", replace(KNOWN, family=family)) for family in ("hopper", "ada"))
    if "ada" not in spreads()["step_seconds"].seen["megatron"]:
        assert here < elsewhere
    assert here < width("step_seconds", unseen)
    assert elsewhere <= width("step_seconds", replace(unseen, family="ada"))


@pytest.mark.parametrize("quantity", sorted(spreads()))
def test_a_pair_of_plans_is_known_better_than_two_jobs(quantity: str) -> None:
    """What two plans of one job are both off by falls out of their ratio: apart, it would spread by the root of two."""
    assert 1 <= tie_factor(quantity) <= width(quantity, KNOWN) ** 2**0.5


def test_bytes_are_told_by_the_stack_alone() -> None:
    """Scores of attention are kept as exactly as the rest, and the band of bytes holds more than the prediction."""
    assert memory_band("megatron-scores") == memory_band("megatron")
    assert memory_band("megatron").low < 1 < memory_band("megatron").high
