"""What a pipeline loses by unequal steps in closed form, against the longest paths through steps and stages."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from steady import STORED, draw

from shardwise.serving.load._pipeline import _longest_in_queue, _longest_in_turns


def pace(long: Any, batches: int) -> float:
    """Return the share of time at the pace of long steps, of steps that come round through as many stages."""
    free, done = [0.0] * batches, [0.0] * batches
    for step, one in enumerate(long):
        at = done[step % batches]
        for stage in range(batches):
            at = free[stage] = max(at, free[stage]) + float(one)
        done[step % batches] = at
    return max(done) / len(long)


@pytest.mark.parametrize(("batches", "within"), [(2, 0.01), (3, 0.045), (4, 0.06), (8, 0.07)])
@pytest.mark.parametrize("some", [0.05, 0.2, 0.5, 0.8])
def test_long_steps_of_a_queue_hold_back_as_many_short_ones_as_paths_cannot_leave_out(
    batches: int, within: float, some: float
) -> None:
    """Steps any of which is long, one after another through all stages; short ones take nothing.

    The formula does not look beyond the long ones that follow on each other, so that it is up to 7 % short.
    """
    random = Random(f"{batches} {some}")
    simulated = pace([random.random() < some for _ in range(60_000)], batches)
    assert _longest_in_queue(np.array([some]), batches)[0] == pytest.approx(simulated, rel=within, abs=0.004)


@pytest.mark.parametrize(
    ("batches", "mean", "most", "within"),
    [(2, 0.5, 1, 0.01), (2, 1.7, 2, 0.01), (2, 4.0, 3, 0.01), (4, 1.0, 1, 0.04), (4, 1.7, 1, 0.04), (4, 4.0, 2, 0.02)],
)
def test_the_longest_step_of_a_cycle_of_prompts_in_turns_is_its_pace(
    batches: int, mean: float, most: int, within: float
) -> None:
    """Prompts go to one batch after another, each of which takes all that came since its last step.

    Paths through steps, of which those with so many prompts or more are long.
    """
    random, arrived, waiting, steps = Random(7), 0, [0] * batches, []
    at, rate = random.expovariate(1.0), mean / batches
    for step in range(60_000):
        while at < (step + 1) * rate:
            waiting[arrived % batches] += 1
            arrived, at = arrived + 1, at + random.expovariate(1.0)
        steps.append(waiting[step % batches] >= most)
        waiting[step % batches] = 0
    found = _longest_in_turns(np.array([mean]), batches)[0, most - 1]
    assert found == pytest.approx(pace(steps, batches), abs=within)


@pytest.mark.parametrize(
    ("kind", "seed", "capacity", "tpot"),
    [
        ("shared", 103, 0.02, 0.02),
        ("shared", 600, 0.025, 0.1),
        ("stages", 500, 0.02, 0.08),
        ("stages", 506, 0.11, 0.015),
    ],
)
def test_prompts_that_take_most_of_the_time_of_a_pipeline_are_the_simulation(
    kind: str, seed: int, capacity: float, tpot: float
) -> None:
    """Four stages whose long steps follow on each other: carried 9 to 13 % more before, with tokens 12 to 22 % short.

    Two stages of TensorRT-LLM, which take as many prompts as have come: 3 to 11 % more than
    simulations carry, 64.7 to 69.0 a second over six orders of arrival, of which the lowest is stored. Shared prefixes
    on A100, whose sequences fill a tile for each head beside prompts: tokens are 10 % long.
    """
    rows = json.loads(STORED.read_text(encoding="ascii"))
    stored = next(row for row in rows if (row["kind"], row["seed"]) == (kind, seed))
    drawn = draw(kind, seed)
    assert drawn.capacity == pytest.approx(stored["served"], rel=capacity)
    at = drawn.fleet.at(0.85 * stored["served"])
    assert at.tpot_seconds == pytest.approx(stored["means"]["0.85"]["tpot"], rel=tpot)
