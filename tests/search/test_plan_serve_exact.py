"""What the search for a deployment under load compares, against the closed form of each deployment asked alone."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import numpy as np
import pytest

from shardwise.errors import InputError
from shardwise.hardware import Cluster, part_of
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Limit, Plan, Workload
from shardwise.records import replace
from shardwise.search import IntRanges, LoadSpace, ServingSpace, plan_serve
from shardwise.search._load_bounds import least
from shardwise.search._load_front import front_of
from shardwise.search._load_groups import LoadSearch
from shardwise.search._load_pools import candidates
from shardwise.serving import ServingOptions, infer
from shardwise.serving.load import FULLEST, LoadOptions
from shardwise.serving.load._fleet import Fleet
from shardwise.serving.load._serve import _pool, policy_for

STEPS, SEQUENCES, MOST = (0, 2048), (0, 32), 4
Layout = tuple[int, ...]


def searched(model: str, on: str, asked: Workload, options: LoadOptions) -> LoadSearch:
    """Return the search for the fewest devices, of replicas of up to four."""
    layouts = ServingSpace(devices=IntRanges(ranges=((1, MOST),)), engine=(options.serving.engine,))
    space = LoadSpace(layouts=layouts, step_tokens=STEPS, max_sequences=SEQUENCES)
    return plan_serve(load_model(model), Cluster.parse(on), asked, None, options, (space, "devices", 1)).search


def degrees(devices: int, has_experts: bool) -> list[Plan]:
    """Return every replica of up to so many devices, whose groups of attention share its experts."""
    every = range(1, min(devices, MOST) + 1)
    found = []
    for tp, pp, dp in ((tp, pp, dp) for tp in every for pp in every for dp in every if tp * pp * dp <= every[-1]):
        for ep, etp in ((ep, etp) for ep in every for etp in every) if has_experts else ((1, 1),):
            ranks = ep * etp
            if dp == max(ranks // tp, 1) and (not has_experts or (tp % etp == tp * dp % ranks == 0 and ranks >= tp)):
                found.append(Plan(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp))
    return found


def alone(search: LoadSearch, plan: Plan, limits: tuple[int, int]) -> tuple[int, float] | None:
    """Return the fewest replicas of a layout that keep the limits, each asked alone, and end-to-end seconds there."""
    asked, options = search.workload, search.options
    job = replace(search.grid.job, max_batched_tokens=limits[0], max_sequences=limits[1])
    for replicas in range(1, search.cluster.num_devices // plan.num_devices + 1):
        whole = replace(plan, dp=plan.dp * replicas)
        cluster = part_of(search.cluster, whole.num_devices)
        base = infer(search.grid.model, cluster, whole, job, options.serving)
        policy = policy_for(base.case, job, asked, options)
        limited = replace(job, max_batched_tokens=policy.pass_tokens, max_sequences=policy.max_sequences)
        base = infer(search.grid.model, cluster, whole, limited, options.serving)
        if not base.fits or base.case.engine.layouts.refused("", search.grid.model, base.plan, "", "").items:
            return None
        fleet = Fleet(decode=_pool(base, policy, asked, "both"), router=options.router)
        steady, empty = fleet.at(asked.arrivals.rate), fleet.at(0.0)
        kept = asked.arrivals.rate <= FULLEST * whole.dp * steady.capacity
        if kept and all(float(least(steady, empty, one)) <= one.seconds for one in options.limits):
            return replicas, float(steady.e2e_seconds)
    return None


@pytest.mark.parametrize(
    ("model", "on", "engine", "lengths", "rate", "limits"),
    [
        # Pipelines: a batch that has the sequences of all was dearer or cheaper by which other layouts there were.
        ("deepseek-v2-lite", "4xa100-sxm-80gb", "vllm", (3000, 400), 2.0, ()),
        ("qwen3-30b-a3b", "6xh100-sxm-80gb", "sglang", (3000, 100), 0.5, ()),
        ("qwen3-30b-a3b", "8xl40s", "vllm", (1000, 100), 12.0, (Limit(metric="ttft", quantile="p99", seconds=1.0),)),
        (
            "llama-3.1-8b",
            "6xl40s",
            "tensorrt-llm",
            (200, 400),
            8.0,
            (Limit(metric="tpot", quantile="p90", seconds=0.03),),
        ),
    ],
)
def test_every_layout_has_the_replicas_that_it_needs_alone(
    model: str, on: str, engine: str, lengths: tuple[int, int], rate: float, limits: tuple[Limit, ...]
) -> None:
    """Layouts x batch limits x replicas one by one; experts over groups of attention had not been tried at all."""
    prompt, made = (Length(kind="lognormal", mean=mean, cv=0.8) for mean in lengths)
    asked = Workload(input_tokens=prompt, output_tokens=made, arrivals=Arrivals(rate=rate), count=1500)
    search = searched(model, on, asked, LoadOptions(limits=limits, serving=ServingOptions(engine=engine)))
    found: dict[Layout, tuple[int, float]] = {}
    for one in candidates(search):
        plan, job = one.plan, one.job
        key = (plan.tp, plan.pp, plan.dp, plan.ep, plan.etp, job.max_batched_tokens, job.max_sequences)
        found[key] = one.replicas, one.steady.e2e_seconds
    expected: dict[Layout, tuple[int, float]] = {}
    for plan in degrees(search.cluster.num_devices, search.grid.model.has_experts):
        for group in search.groups:
            limit = group.job.max_batched_tokens, group.job.max_sequences
            try:
                kept = alone(search, plan, limit)
            except InputError:
                continue
            if kept:
                expected[plan.tp, plan.pp, plan.dp, plan.ep, plan.etp, *limit] = kept
    assert found.keys() == expected.keys()
    for key, (replicas, seconds) in expected.items():
        assert found[key][0] == replicas, key
        assert found[key][1] == pytest.approx(seconds, rel=1e-9), key


def test_attention_groups_that_share_experts_take_fewer_devices() -> None:
    """A latent cache is whole on every rank of tp, so that groups hold more of it: 24 devices, where 28 were named."""
    asked = Workload(
        input_tokens=Length(mean=8000), output_tokens=Length(mean=1000), arrivals=Arrivals(rate=4.0), count=600
    )
    space = LoadSpace(step_tokens=(0,), max_sequences=(0,))
    on = Cluster.parse("32xh200-sxm-141gb")
    best = plan_serve(load_model("deepseek-v3"), on, asked, None, None, (space, "devices", 1)).best[0]
    assert best.meets
    assert (best.devices, best.groups, best.base.plan.ep) == (24, 2, 8)


FRONTS = (
    ("llama-3.1-70b", "8xh100-sxm-80gb", "vllm", (2000, 0.0), (300, 0.0)),
    ("llama-3.1-70b", "8xa100-sxm-80gb", "tensorrt-llm", (2000, 0.8), (2, 0.0)),
    ("deepseek-v2-lite", "8xl40s", "vllm", (500, 0.8), (100, 0.8)),
    ("qwen3-30b-a3b", "8xh100-sxm-80gb", "sglang", (1000, 0.0), (50, 0.8)),
    ("mixtral-8x7b", "8xh200-sxm-141gb", "vllm-v0", (4000, 0.8), (400, 0.8)),
    # Prompts in steps of their own: at half of the load each interrupts its own, and tokens wait longest.
    ("gpt-oss-120b", "4xh200-sxm-141gb", "sglang", (128, 0.0), (32, 0.8)),
    ("gpt-oss-20b", "4xl40s", "sglang", (128, 0.0), (100, 0.0)),
)


@pytest.mark.parametrize(("model", "on", "engine", "prompt", "made"), FRONTS)
def test_the_front_is_that_of_all_layouts(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    on: str,
    engine: str,
    prompt: tuple[int, float],
    made: tuple[int, float],
) -> None:
    """Layouts that others beat at a lower share of what they carry are not asked at a higher one."""
    lengths = [Length(kind="lognormal" if cv else "fixed", mean=mean, cv=cv) for mean, cv in (prompt, made)]
    asked = Workload(input_tokens=lengths[0], output_tokens=lengths[1], arrivals=Arrivals(rate=1.0), count=600)
    search = searched(model, on, asked, LoadOptions(serving=ServingOptions(engine=engine)))
    some = front_of(search)
    monkeypatch.setattr("shardwise.search._load_front._Beaten.fastest", lambda self, each: 0.0)
    assert some == front_of(search)
    assert len(some) > 5


@pytest.mark.parametrize(("model", "on", "engine", "prompt", "made"), FRONTS)
def test_some_layouts_are_what_they_are_among_all(
    model: str, on: str, engine: str, prompt: tuple[int, float], made: tuple[int, float]
) -> None:
    """To the last digit: 5.1879 ran among others and 5.1882 alone, since one of those had prompts that are cut."""
    lengths = [Length(kind="lognormal" if cv else "fixed", mean=mean, cv=cv) for mean, cv in (prompt, made)]
    asked = Workload(input_tokens=lengths[0], output_tokens=lengths[1], arrivals=Arrivals(rate=1.0), count=600)
    search, random = searched(model, on, asked, LoadOptions(serving=ServingOptions(engine=engine))), Random(model)
    for group in search.groups:
        assert group.form is not None
        rates = 0.7 * group.form.capacity
        every, many = group.form.at(rates, 2.0), len(group.plans)
        for count in {1, many // 2, many}:
            rows = np.array(sorted(random.sample(range(many), max(count, 1))))
            part = group.some(rows)
            assert part.form is not None
            assert part.plans == tuple(group.plans[row] for row in rows)
            for field in fields(every):
                got = getattr(part.form.at(rates[rows], 2.0), field.name)
                np.testing.assert_array_equal(got, getattr(every, field.name)[rows], err_msg=field.name)
