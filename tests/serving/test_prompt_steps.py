"""Prompts that nobody decodes beside, in closed form, against a simulation of their queue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

import numpy as np
import pytest

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.records import replace
from shardwise.serving import ServingOptions
from shardwise.serving.load import LoadOptions, serve
from shardwise.serving.load._bulk import PromptSteps

AFFINE, FLAT, ALONE = (0.03, 0.05, 0.07, 0.09), (0.03, 0.03, 0.03, 0.03), (0.03,)
WIDE = tuple(0.02 + 0.005 * k for k in range(1, 9))


def simulated(seconds: Sequence[float], rate: float, turns: int, ahead: bool) -> float:
    """Return mean seconds from arrival to the end of steps of 1, 2, ... prompts, of a worker of so many in turns.

    A step takes all who had come as it began, or as the step before began where it was scheduled then; at least one.
    """
    random, count = Random(7), 60_000
    gaps = (sum(random.expovariate(rate * turns) for _ in range(turns)) for _ in range(count))
    arrivals = list(accumulate(gaps))
    at = before = total = 0.0
    first = 0
    while first < count:
        at = max(at, arrivals[first])
        last, known = first + 1, before if ahead else at
        while last < min(count, first + len(seconds)) and arrivals[last] <= known:
            last += 1
        before, at = at, at + seconds[last - first - 1]
        total += sum(at - one for one in arrivals[first:last])
        first = last
    return total / count


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("load", [0.3, 0.5, 0.7, 0.85])
@pytest.mark.parametrize("seconds", [AFFINE, FLAT, ALONE, WIDE])
def test_prompts_take_what_their_queue_does(seconds: Sequence[float], load: float, turns: int, ahead: bool) -> None:
    """Within 6 % of Poisson arrivals, 16 % of workers in turns: 23 and 32 % off before."""
    one, many = np.ones(1), len(seconds)
    rate = load * many / seconds[-1]
    more = [seconds[-1] * k / many for k in range(many + 1, 9)]
    steps = PromptSteps(
        added=np.array([*seconds, *more])[:, None], ahead=seconds[-1] * 8 / many * one, fit=many * one, cv2=0 * one,
        cut=False, ahead_of_time=ahead,
    )  # fmt: skip
    within = 0.06 if turns == 1 else 0.16
    assert float(steps.sojourn(rate * one, turns)[0]) == pytest.approx(
        simulated(seconds, rate, turns, ahead), rel=within
    )


@pytest.mark.parametrize(("load", "cv"), [(0.3, 0.0), (0.6, 0.0), (0.3, 0.3)])
@pytest.mark.parametrize(("model", "engine"), [("qwen3-30b-a3b", "vllm"), ("gpt-oss-120b", "sglang")])
def test_the_last_piece_of_a_prompt_takes_a_step_of_its_own(model: str, engine: str, load: float, cv: float) -> None:
    """952 tokens read as many experts as 2,048 do: of answers of one token the first came 12 to 22 % early."""
    length = Length(kind="lognormal" if cv else "fixed", mean=3000, cv=cv)
    asked = Workload(input_tokens=length, output_tokens=Length(mean=1), arrivals=Arrivals(rate=1.0), count=3000)
    deployment = load_model(model), Cluster.parse("1xh200-sxm-141gb"), Plan()
    options = LoadOptions(serving=ServingOptions(engine=engine))
    job = Serving(max_batched_tokens=2048)
    capacity = float(serve(*deployment, replace(asked, count=1), job, options).steady.capacity)
    found = serve(*deployment, replace(asked, arrivals=Arrivals(rate=load * capacity)), job, options)
    assert found.steady.ttft_seconds == pytest.approx(found.latencies["ttft"]["mean"], rel=0.08)
