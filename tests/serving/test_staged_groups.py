"""Groups of attention that share experts, in the stages of a pipeline: each batch is a step of all groups."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steady import Drawn, draw

from shardwise.plans import Plan
from shardwise.serving._sizes import sizes_of_columns
from shardwise.serving.load._batches import batches_of, groups_of, lanes_of
from shardwise.serving.load._prices import load_prices
from shardwise.serving.load._replica import Replica
from shardwise.serving.load._requests import Request, Trace
from shardwise.serving.load._steady import Replicas

ENGINES = {"vllm": 5, "sglang": 2, "tensorrt-llm": 1, "vllm-v0": 3}
"""A drawn deployment of each engine, whose scheduler and prices of steps are used."""


@cache
def drawn(engine: str) -> Drawn:
    """Return a deployment of groups in stages."""
    found = draw("staged", ENGINES[engine])
    assert f" {engine} " in found.what
    return found


def ran(engine: str, requests: list[Request], groups: int, stages: int, cache_tokens: float = 1e9) -> list[Trace]:
    """Return what batches do with requests that go to one group after another, to its batches in turn."""
    pool = drawn(engine).fleet.decode
    replica = Replica(pool.table, replace(pool.policy, balance_steps=0), cache_tokens, groups * stages)
    if stages > 1:
        replica.through_stages(pool.policy, groups)
    for index, request in enumerate(requests):
        turn, group = divmod(index, groups)
        entries = replica.entries
        # Of batches with waiting lists of their own the entries are those of one group after another.
        each = len(entries) // groups
        entries[group * each + turn % each].expect(request)
    return replica.finish()


def asked(count: int, gap: float, seed: int, alike: int = 1) -> list[Request]:
    """Return requests of unlike lengths, so many of which are alike and come together."""
    each = [(i // alike + seed) % 11 for i in range(count)]
    return [Request(gap * (i // alike), 200 + 37 * one, 30 + 3 * one) for i, one in enumerate(each)]


def test_a_replica_has_a_batch_a_stage_whether_or_not_its_groups_step_together() -> None:
    """Two stages of two groups: two batches, each of both groups; a server of llama.cpp has one."""
    plan = Plan(pp=2, dp=2, ep=2)
    assert (groups_of(plan, True), lanes_of(plan), lanes_of(plan, one_batch=True)) == (2, 2, 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("groups", "stages"), [(2, 2), (4, 2), (2, 4)])
def test_equal_groups_in_stages_are_as_fast_as_a_pipeline(engine: str, groups: int, stages: int) -> None:
    """Where every group does the same at the same time, nobody waits for another."""
    joined, alone = asked(60 * groups, 0.02, 1, groups), asked(60, 0.02, 1)
    ran(engine, joined, groups, stages)
    ran(engine, alone, 1, stages)
    for group in range(groups):
        assert [r.end for r in joined[group::groups]] == pytest.approx([r.end for r in alone], rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(
    engine=st.sampled_from(tuple(ENGINES)),
    groups=st.sampled_from((2, 3)),
    stages=st.sampled_from((2, 4)),
    gap=st.floats(0.001, 0.1),
    seed=st.integers(0, 9),
    room=st.sampled_from((1e9, 3000.0)),
)
def test_groups_in_stages_are_no_faster_than_pipelines(
    engine: str, groups: int, stages: int, gap: float, seed: int, room: float
) -> None:
    """Every request ends, within the cache and the places of its group; groups in lockstep wait for the slowest."""
    joined, alone = asked(60, gap / groups, seed), asked(60, gap / groups, seed)
    for group, traces in enumerate(zip(*[iter(ran(engine, joined, groups, stages, room))] * stages, strict=True)):
        mine = sorted(one.end for trace in traces for one in trace.finished)
        assert mine == sorted(one.end for one in joined[group::groups])
        assert traces[0].most_cache_tokens <= room * (1 if drawn(engine).fleet.decode.policy.shared_waiting else stages)
    for group in range(groups):
        ran(engine, alone[group::groups], 1, stages, room)
    assert all(one.end > one.first > one.arrival for one in joined)
    if room == 1e9:
        assert sum(r.e2e_seconds for r in joined) >= sum(r.e2e_seconds for r in alone) * 0.97


class ByCount:
    """Prices of steps that take longer the more sequences they have, with or without prompts."""

    made, verified, launching_seconds, burst = 1, 1, 0.0, None
    experts = (0.0,) * 10_000

    def decode(self, count: int, context: float) -> float:
        """Return a second and a hundredth for each sequence."""
        return 1 + count / 100

    def mixed(self, count: int, context: float, pieces: Any, spared: float = 0.0) -> float:
        """Return the same."""
        return 1 + (count + len(pieces)) / 100


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("groups", "stages"), [(2, 2), (4, 4)])
def test_stages_of_groups_serve_as_many_batches_as_there_are(engine: str, groups: int, stages: int) -> None:
    """A full queue in a batch a stage is served at as many times what one batch with as many places is."""
    policy = replace(drawn(engine).fleet.decode.policy, max_sequences=24, balance_steps=0)

    def served(many: int) -> float:
        requests = [Request(0.0, 100, 200 + i % 97) for i in range(400 * groups * many)]
        replica = Replica(ByCount(), policy, 1e9, groups * many)  # type: ignore[arg-type]
        if many > 1:
            replica.through_stages(replace(policy, max_sequences=24 * many), groups)
        replica.run(requests)
        ends = sorted(one.end for one in requests)
        return len(ends) / 2 / (ends[3 * len(ends) // 4] - ends[len(ends) // 4])

    assert served(stages) == pytest.approx(stages * served(1), rel=0.03)


@pytest.mark.parametrize(
    ("seed", "within"), [(201, 0.06), (205, 0.06), (210, 0.03), (1, 0.07), (5, 0.05), (3, 0.08), (4, 0.05)]
)
def test_groups_in_stages_in_closed_form_are_the_simulation(seed: int, within: float) -> None:
    """At half of what they carry: each mean of a short run, but for the wait of TensorRT-LLM's prompts for a turn.

    With one batch under way of both stages 201 carried half as much.
    """
    found = draw("staged", seed)
    rate = 0.5 * found.capacity
    requests, steady = found.at(rate, 1500, 0), found.fleet.at(rate)
    for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
        mean = sum(getattr(one, name) for one in requests) / len(requests)
        assert getattr(steady, name) == pytest.approx(mean, rel=within), name


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 9])
def test_prices_of_groups_in_stages_do_not_depend_on_other_layouts(seed: int) -> None:
    """A search prices many layouts at once: stages, groups, and both."""
    pool = draw("staged", seed).fleet.decode
    case, form, rate = pool.base.case, pool.form, 0.4 * float(pool.form.capacity[0])
    whole = case.plan.pp * case.plan.dp

    def of(plans: list[Plan]) -> Replicas:
        sizes = sizes_of_columns(case.model, plans, [1] * len(plans), case.domains, case.job)
        batches = batches_of(plans, case.model.has_experts)
        prices = load_prices(case, sizes, form.policy, form.moments, np.full(len(plans), 32.0), batches)
        return replace(form, prices=prices, cache_tokens=np.repeat(form.cache_tokens, len(plans)), batches=batches)

    plans = [case.plan, replace(case.plan, ep=1, etp=1), replace(case.plan, pp=1, dp=whole, ep=case.plan.tp * whole)]
    together = of(plans).at(rate)
    for index, plan in enumerate(plans):
        alone = of([plan]).at(rate).row(0)
        assert asdict(together.row(index)) == pytest.approx(asdict(alone), rel=1e-12)
