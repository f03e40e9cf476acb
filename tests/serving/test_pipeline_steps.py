"""What a pipeline loses by unequal steps in closed form, against the longest paths through steps and stages."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from steady import METRICS, STORED, Drawn, draw

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving.load import serve
from shardwise.serving.load._gathered import _STATES, _excess, _next_prompts, _stationary
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


def test_prompts_of_cycles_are_a_chain() -> None:
    """Poisson numbers of those who come in the cycle before: mean seconds, how often none come, what follows."""
    seconds = 0.1 + 0.2 * np.minimum(np.array(_STATES), 6.0)
    means = np.concatenate([[0.0], np.geomspace(0.01, 200.0, 60)])
    rows = np.array([[np.interp(3.0 * one, means, column) for column in _next_prompts(0)[0].T] for one in seconds])
    stays = _stationary(rows[None, None])[0, 0]
    random, prompts, cycles, none, after = np.random.default_rng(5), 0, [], 0, []
    for _ in range(200_000):
        cycles.append(0.1 + 0.2 * min(prompts, 6))
        none += prompts == 0
        after.append(prompts)
        prompts = int(random.poisson(3.0 * cycles[-1]))
    mean = float((stays * seconds).sum())
    assert mean == pytest.approx(np.mean(cycles), rel=0.02)
    assert stays[0] == pytest.approx(none / len(cycles), rel=0.03)
    starts = [i for i, one in enumerate(after[:-60]) if one == 4]
    beyond = np.mean([sum(cycles[i : i + 60]) for i in starts]) - 60 * mean
    assert _excess(rows[None, None], stays[None, None], seconds - mean)[0, 0, 4] == pytest.approx(beyond, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "seed", "load", "within"),
    [
        # Four stages whose steps are mostly prompts: first tokens were 0.43 to 0.69 and tokens 0.57 to 0.88 of the run.
        ("stages", 110, "0.5", 0.05), ("stages", 715, "0.2", 0.04), ("stages", 715, "0.5", 0.05),
        ("stages", 108, "0.2", 0.035), ("stages", 108, "0.5", 0.1), ("shared", 103, "0.2", 0.04),
        ("shared", 103, "0.5", 0.075), ("stages", 1003, "0.2", 0.04), ("stages", 1003, "0.5", 0.08),
        ("shared", 600, "0.2", 0.06), ("stages", 711, "0.7", 0.035), ("stages", 1001, "0.7", 0.06),
        # Two stages, prompts that fill a step.
        ("stages", 107, "0.5", 0.055), ("stages", 107, "0.85", 0.085), ("stages", 109, "0.7", 0.06),
        # Who waits for a place waits for those of all batches: first tokens were 1.1 to 1.3 of the run.
        ("stages", 113, "0.85", 0.03), ("stages", 704, "0.85", 0.04), ("stages", 714, "0.85", 0.05),
        # Until all places are taken: first tokens were 0.75 and 0.92 of the run.
        ("stages", 109, "0.85", 0.03), ("stages", 112, "0.85", 0.025),
        # Pieces of a prompt follow one another: tokens were 1.15 to 1.38 of the run.
        ("shared", 104, "0.2", 0.04), ("shared", 104, "0.5", 0.05), ("shared", 104, "0.7", 0.09),
        ("shared", 714, "0.2", 0.07),
    ],
)  # fmt: skip
def test_prompts_that_come_in_a_long_step_run_in_one_behind_it(kind: str, seed: int, load: str, within: float) -> None:
    """All three means of stored runs of pipelines whose batches take from one waiting list."""
    rows = json.loads(STORED.read_text(encoding="ascii"))
    stored = next(row for row in rows if (row["kind"], row["seed"]) == (kind, seed))
    steady = draw(kind, seed).fleet.at(float(load) * stored["served"])
    for name, mean in stored["means"][load].items():
        assert getattr(steady, f"{name}_seconds") == pytest.approx(mean, rel=within), name


@pytest.mark.parametrize(("seed", "load"), [(101, 0.5), (503, 0.5), (506, 0.5), (1004, 0.5)])
def test_who_comes_to_a_pipeline_takes_part_in_the_batch_that_is_made_next(seed: int, load: float) -> None:
    """Two stages of vLLM and TensorRT-LLM, whose batches take from one waiting list: all three means within 9 %.

    Who waited for a batch of its own, and for one that was scheduled ahead of that, had a first token 1.3 to 1.6 times
    as late.
    """
    drawn = draw("stages", seed)
    requests, steady = drawn.at(load * drawn.capacity, 2500, 1), drawn.fleet.at(load * drawn.capacity)
    for name, within in (("ttft_seconds", 0.09), ("tpot_seconds", 0.06), ("e2e_seconds", 0.06)):
        mean = sum(getattr(one, name) or 0.0 for one in requests) / len(requests)
        assert getattr(steady, name) == pytest.approx(mean, rel=within), name


def drawn_of(plan: Plan, prompt: int, answer: int, cv: float) -> Drawn:
    """Return Llama-3.1-8B in vLLM on H100, in steps of 2,048 tokens and with as many sequences as the engine takes."""
    prompts, answers = (
        Length(kind="lognormal" if cv else "fixed", mean=mean, cv=cv) for mean in (prompt, answer)
    )  # fmt: skip
    asked = Workload(input_tokens=prompts, output_tokens=answers, arrivals=Arrivals(rate=1e-3), count=1, seed=1)
    cluster = Cluster.parse(f"{plan.num_devices}xh100-sxm-80gb")
    report = serve(load_model("llama-3.1-8b"), cluster, plan, asked, Serving(max_batched_tokens=2048))
    return Drawn(report.fleet, asked, "")


@pytest.mark.parametrize(
    ("plan", "prompt", "cv", "share"),
    [(Plan(pp=4), 1000, 0.0, 0.75), (Plan(pp=4), 1000, 0.5, 0.9), (Plan(tp=2, pp=16), 1000, 0.5, 0.8)],
)
def test_a_step_of_a_pipeline_cuts_the_prompt_that_it_has_no_more_room_for(
    plan: Plan, prompt: int, cv: float, share: float
) -> None:
    """Steps of 2,048 tokens beside those that decode, not of one prompt of 1,000: tokens were 0.67 to 0.87 of the run.

    First tokens were 0.27 to 0.77 of it, since requests were told to fit that wait for a place.
    """
    drawn = drawn_of(plan, prompt, 200, cv)
    requests, steady = drawn.at(share * drawn.capacity, 4000, 1), drawn.fleet.at(share * drawn.capacity)
    for name, within in zip(METRICS, (0.12, 0.1, 0.1), strict=True):
        mean = sum(getattr(one, f"{name}_seconds") or 0.0 for one in requests) / len(requests)
        assert getattr(steady, f"{name}_seconds") == pytest.approx(mean, rel=within), name


def test_more_prompts_than_a_cycle_has_room_for_run_in_cycles_that_decode_too() -> None:
    """Prompts that fill a step each near the capacity: tokens were 1.21 of the run, as if they ran in one cycle."""
    drawn = drawn_of(Plan(pp=4), 2000, 100, 0.0)
    requests, steady = drawn.at(0.9 * drawn.capacity, 4000, 1), drawn.fleet.at(0.9 * drawn.capacity)
    for name, within in zip(METRICS, (0.15, 0.03, 0.03), strict=True):
        mean = sum(getattr(one, f"{name}_seconds") or 0.0 for one in requests) / len(requests)
        assert getattr(steady, f"{name}_seconds") == pytest.approx(mean, rel=within), name
