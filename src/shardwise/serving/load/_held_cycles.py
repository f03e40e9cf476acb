"""Cycles of groups of attention that hold prompts until every group has one, or for so many steps.

github.com/NVIDIA/TensorRT-LLM tensorrt_llm/_torch/pyexecutor/py_executor.py balances attention data parallelism so.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shardwise.arrays import np
from shardwise.records import replace
from shardwise.serving.load._lockstep import CycleMix, Cycles

_ROUNDS = 12


def held_back(cycles: Cycles, at: CycleMix, rate: Any, steps: Any, in_turns: bool) -> CycleMix:
    """Return what cycles are where prompts wait until every batch has one, or for so many cycles.

    Where sequences end as they came, so do requests go to one batch after another.
    """
    cycle, with_prompts, all_have = at.cycle, cycles.look("mean", at.some), cycles.all_have or cycles
    steps_back: list[Any] = []
    for turn in range(_ROUNDS):
        first, more = rate * with_prompts, rate * cycles.decode
        if in_turns:
            wait, late, behind = _until_as_many(cycles.batches, first, more, steps)
        else:
            wait, late, behind = _until_all(cycles.batches, rate * cycle, steps)
        together = rate * cycle * wait
        with_prompts = late * cycles.look("mean", together) + (1 - late) * all_have.look("mean", together)
        before, cycle = cycle, ((wait - 1) * cycles.decode + with_prompts) / wait
        steps_back.append(before - cycle)
        if turn % 3 == 2:
            # Each is nearer by the same part (Aitken).
            less = np.clip(steps_back[-1] / np.where(steps_back[-2] == 0, 1.0, steps_back[-2]), 0.0, 0.95)
            cycle = np.maximum(cycle - steps_back[-1] * less / (1 - less), cycles.decode)
    # The rest of the step that runs, and decode steps until prompts are held no more.
    rest = (with_prompts**2 + (wait - 1) * cycles.decode**2) / (2 * wait * cycle) + behind * cycles.decode
    spot, short = cycles.spot(together), 1.0 - 1 / wait
    share = cycles.read("share", spot)
    own = late * cycles.read("after", spot) + (1 - late) * all_have.look("after", together)
    other = replace(
        at, none=together, some=together, short=short, keeps=0.0 * wait, two=0.0 * wait, cycle=cycle,
        square=2 * rest * cycle, own=own, left=cycles.read("left", spot), alone=(1 - short) * share,
        following=cycles.following(rate * own, cycle),
    )  # fmt: skip
    return CycleMix(
        **{f.name: np.where(wait <= 1, getattr(at, f.name), getattr(other, f.name)) for f in fields(CycleMix)}
    )


def _until_as_many(batches: Any, first: Any, more: Any, steps: Any) -> tuple[Any, Any, Any]:
    """Return the mean cycles until as many prompts have come as there are batches, or so many, and their chance.

    So many come in the first, in each of the others more. And cycles that a prompt is held: who comes last is not.
    """
    wait, late, waited = np.ones_like(first), np.ones_like(first), np.zeros_like(first)
    for step in range(int(np.max(steps)) - 1):
        mean = first + step * more
        chance, fewer, there = np.exp(-mean), np.exp(-mean), 0.0 * mean
        for k in range(1, int(np.max(batches))):
            chance = chance * mean / k
            some = np.where(k < batches, chance, 0.0)
            fewer, there = fewer + some, there + k * some
        wait, late = wait + np.where(step + 1 < steps, fewer, 0.0), np.where(step + 1 < steps, fewer, late)
        waited = waited + np.where(step + 1 < steps, there, 0.0)
    return wait, late, waited / (first + (wait - 1) * more)


def _until_all(batches: Any, ended: Any, steps: Any) -> tuple[Any, Any, Any]:
    """Return the mean cycles until every batch has a prompt, or so many, and the chance of these.

    A request goes where the fewest run, to a batch of which one has ended, so many in each cycle: the longest of as
    many geometric times. And cycles that a prompt is held, while any of the others has none.
    """
    wait, late, waited = np.ones_like(ended), np.ones_like(ended), np.zeros_like(ended)
    for step in range(1, int(np.max(steps))):
        some = -np.expm1(-ended * step / batches)
        fewer, others = 1 - some**batches, 1 - some ** np.maximum(batches - 1, 0)
        wait, late = wait + np.where(step < steps, fewer, 0.0), np.where(step < steps, fewer, late)
        waited = waited + np.where(step < steps, step * others, 0.0)
    return wait, late, waited / wait
