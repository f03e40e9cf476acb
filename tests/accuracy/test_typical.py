"""How much longer typical runs take is found again in runs made with it, and is nothing where they are not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from accuracy.typical import beyond, slower_of, waiting_of

SHARES = (0.0, 0.02, 0.1, 0.3, 0.5)


@dataclass(frozen=True)
class Made:
    """A run that is made up."""

    source: str
    family: str
    log: float
    waits: float


def runs(waiting: float, slack: float) -> list[Made]:
    """Return runs of six sources on two families whose messages wait so much, with a slack on one of them."""
    return [
        Made(f"{name}{family}", family, math.log1p((slack if family == "ampere" else 0.0) + waiting * share), share)
        for name in "abc"
        for family in ("ampere", "hopper")
        for share in SHARES
    ]


@pytest.mark.parametrize("slack", [0.0, 0.04])
@pytest.mark.parametrize("waiting", [0.0, 0.15, 0.3, 1.0])
def test_what_runs_were_made_with_is_found(waiting: float, slack: float) -> None:
    """The share of exposed messages is found; the slack of a family is drawn to none as by one more source."""
    made = runs(waiting, slack)
    found = waiting_of(made)
    assert found == pytest.approx(waiting, abs=0.05)
    slower = slower_of(made, waiting)
    assert slower["ampere"] == pytest.approx(math.log1p(slack) * 3 / 4, abs=1e-9)
    assert slower["hopper"] == 0.0
    assert all(abs(beyond(one, slower, waiting)) < 0.011 for one in made)


def test_runs_without_messages_say_nothing_of_them() -> None:
    """One device alone, as a CPU is, has no share of messages."""
    assert waiting_of([Made("a", "cpu", 0.1, 0.0)] * 3) == 0.0
    assert waiting_of([]) == 0.0
