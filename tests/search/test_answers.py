"""What an answer says beside the best: what would help the plans that fell, what could overtake, how a job scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest

import brute_force as brute
from shardwise import plan_training
from shardwise.cost import Band, Efficiencies, tie_factor
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, Block, Model, MoE, load_model
from shardwise.plans import Plan, Serving, Training
from shardwise.records import replace
from shardwise.search import (
    IntRanges,
    SearchOptions,
    SearchSpace,
    ServingSpace,
    TrainingResult,
    doubling,
    plan_serving,
    runners_up,
    strong_scaling,
    upto,
)
from shardwise.search._moved import CONSTANTS, moved_replicas, moved_steps, with_constant
from shardwise.search._remedies import broken_law, neighbours, report_on
from shardwise.search._sensitivity import crossings
from shardwise.search._training import plan_degrees
from shardwise.serving import ServingOptions, infer
from shardwise.training import TrainingOptions, TrainReport, report_of, train

GROUPED = Attention(heads=16, kv_heads=4, head_dim=128)
DENSE = Block(mixers=(GROUPED,), feed_forward=MLP(ffn=8192))
SPARSE = replace(DENSE, feed_forward=MoE(experts=8, top_k=2, ffn=2048))
MODELS = {
    "dense": Model(name="dense", family="llama", hidden=2048, vocab=32000, layers=(DENSE,) * 8),
    "experts": Model(name="experts", family="llama", hidden=2048, vocab=32000, layers=(SPARSE,) * 8),
}
JOB = Training(seq_len=1024, global_batch=48, token_budget=1e11)
ON = Cluster.parse("16xa100-sxm-80gb", {"memory": "8GB", "price": 2.0})
SPACE = SearchSpace(
    layout=("1d",), cp=upto(2), sharding=("none", "zero1"), recompute=("none", "full"), micro_batch=upto(8)
)


def _found(kind: str = "dense", options: SearchOptions | None = None) -> TrainingResult:
    return plan_training(MODELS[kind], ON, JOB, SPACE, options)


@pytest.mark.parametrize("kind", list(MODELS))
def test_neighbours_are_plans_of_the_space(kind: str) -> None:
    """Every plan one field away is a plan of the space but for its place, judged as the search judges it."""
    found = _found(kind)
    grid = found.grid
    every = {replace(plan, order=Plan().order, fast=()): plan for plan in brute.plans(grid.case, grid.space)}
    laws = grid.laws
    seen = 0
    for field, plan in neighbours(grid, found.best[0].plan):
        bare = replace(plan, order=Plan().order, fast=())
        assert bare in every, (field, plan)
        assert (broken_law(laws, plan) is None) == brute.is_legal(grid.case, plan)
        seen += 1
    assert seen >= 15


@pytest.mark.parametrize("kind", list(MODELS))
def test_remedies_are_evaluated(kind: str) -> None:
    """Every law and limit has a remedy; where it names a change, the changed plan is the best or as far behind."""
    options = SearchOptions(min_free_bytes=1e9)
    found = _found(kind, options)
    rows = found.rejected
    assert found.counts.fitting + sum(row.count for row in rows) == found.num_plans
    assert all(row.remedy for row in rows)
    named = [remedy for row in rows if (remedy := found.remedy(row.name)) is not None and remedy.field]
    assert len(named) >= 2
    for remedy in named:
        assert remedy.best == (remedy.loss == 0)
        if remedy.best:
            assert getattr(found.best[0].plan, remedy.field) == remedy.value
    memory = found.remedy("memory")
    assert memory is not None
    assert "short of memory" in memory.why


def test_a_plan_that_is_short_is_short() -> None:
    """The plan that a remedy of memory starts from does not fit, by as much as it says."""
    found = _found()
    laws, limit, short = found.grid.laws, found.task.limit_bytes, []
    for field, plan in neighbours(found.grid, found.best[0].plan):
        if broken_law(laws, plan) is not None:
            continue
        required = report_on(found.grid, plan).verdict.required_bytes
        if required > limit:
            value = str(getattr(plan, field)).lower()
            short.append(f"{field.replace('_', ' ')} {value} is {required / limit - 1:.1%} short of memory")
    remedy = found.remedy("memory")
    assert remedy is not None
    assert any(remedy.why.startswith(text) for text in short)


@pytest.mark.parametrize("name", ["max_step_seconds", "max_run_seconds", "max_usd"])
def test_a_limit_that_none_keeps_shows_the_nearest(name: str) -> None:
    """Where no plan keeps a limit, the nearest is the best without it, and its miss is stated."""
    free = _found()
    measured = {"max_step_seconds": "step_seconds", "max_run_seconds": "training_seconds", "max_usd": "usd"}[name]
    least = getattr(free.best[0], measured)
    found = _found(options=SearchOptions(**{name: least / 2}))
    assert not found.best
    assert found.nearest is not None
    assert getattr(found.nearest, measured) == pytest.approx(least)
    assert "misses it by 100.0%" in str(found.remedy(name))


def _moved(report: TrainReport, constant: str, factor: float) -> TrainReport:
    """Return a plan with a constant moved through the options that users have."""
    device = report.case.cluster.device
    overrides = {
        "matrix FLOP/s": {"peak_flops.bf16": device.peak_flops("bf16") * factor},
        "memory bandwidth": {"memory_bandwidth": device.memory_bytes_per_second * factor},
        "fast link": {"fast_bandwidth": device.fast_bytes_per_second * factor},
        "network": {"slow_bandwidth": report.case.cluster.tiers[-1].bytes_per_second * factor},
    }[constant]
    on = Cluster.parse("16xa100-sxm-80gb", {"memory": "10GB", "price": 2.0, **overrides})
    return train(report.case.model, on, report.plan, report.job, TrainingOptions(stack=report.case.stack))


def test_swaps_are_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the factor that is stated two plans are equal; constants that are not named never swap them."""
    band = Band(low=0.25, typical=1.0, high=4.0, rows=1, source="wide enough for sensitivity")
    monkeypatch.setattr("shardwise.search._sensitivity._band", lambda found: band)
    found = _found("experts", SearchOptions(top=30))
    best, near = found.best[0], runners_up(found, most=6)
    assert [one.report.plan for one in near] == [report.plan for report in found.best[1:7]]
    assert [runner_up.behind for runner_up in near] == sorted(runner_up.behind for runner_up in near)
    seen = 0
    for runner_up in near:
        assert runner_up.behind == pytest.approx(runner_up.report.step_seconds / best.step_seconds - 1)
        sensitivity = {swap.constant: swap for swap in runner_up.sensitivity}
        for constant in ("matrix FLOP/s", "memory bandwidth", "fast link", "network"):
            ends = {
                factor: _moved(runner_up.report, constant, factor).step_seconds
                < _moved(best, constant, factor).step_seconds
                for factor in (1 / band.high, 1 / band.low)
            }
            assert any(ends.values()) == (constant in sensitivity)
            if constant in sensitivity:
                factor = sensitivity[constant].factor
                pair = [_moved(report, constant, factor).step_seconds for report in (runner_up.report, best)]
                assert pair[0] == pytest.approx(pair[1], rel=5e-4)
                assert sensitivity[constant].low <= factor <= sensitivity[constant].high
                seen += 1
    assert seen > 0


def test_swaps_of_imposed_rates_move_the_imposed_ones() -> None:
    """Where a rate is imposed in place of the fit, it is what moves."""
    achieved = Efficiencies(matmul_flops_per_second=1.5e14, slow_bytes_per_second=5e9)
    found = plan_training(MODELS["dense"], ON, JOB, SPACE, SearchOptions(efficiencies=achieved))
    assert runners_up(found)[0].behind >= 0


def test_rivals_of_deployments() -> None:
    """The next deployment and what could put it ahead are those of `infer` with the constant moved."""
    on, job = Cluster.parse("8xa100-sxm-80gb"), Serving(input_tokens=2048, output_tokens=64)
    found = plan_serving(MODELS["dense"], on, job, ServingSpace(weights=("bf16", "int8", "int4")))
    for runner_up in runners_up(found):
        assert runner_up.behind > 0
        for swap in runner_up.sensitivity:
            if swap.constant != "memory bandwidth":
                continue
            values = []
            for report in (found.best[0], runner_up.report):
                faster = {"memory_bandwidth": on.device.memory_bytes_per_second * swap.factor}
                moved = Cluster.parse("8xa100-sxm-80gb", faster)
                options = ServingOptions(engine=report.case.engine)
                values.append(infer(MODELS["dense"], moved, report.plan, report.job, options).output_tokens_per_second)
            assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_scaling_is_a_search_on_each_count() -> None:
    """Each row of strong scaling is the search on so many devices, and the efficiency is against the first."""
    rows = strong_scaling(MODELS["dense"], ON, JOB, (2, 4, 8, 16), SPACE)
    assert [row.num_devices for row in rows] == [2, 4, 8, 16]
    first = next(row.best for row in rows if row.best is not None)
    for row in rows:
        on = Cluster.parse(f"{row.num_devices}xa100-sxm-80gb", {"memory": "8GB", "price": 2.0})
        alone = plan_training(MODELS["dense"], on, JOB, SPACE, SearchOptions(top=1)).best
        assert (row.best is None) == (not alone)
        if row.best is not None and alone:
            assert row.best.step_seconds == pytest.approx(alone[0].step_seconds, rel=1e-12)
            rate = row.best.tokens_per_second_per_gpu / first.tokens_per_second_per_gpu
            assert row.efficiency == pytest.approx(rate)


def test_scaling_with_fewer_devices_allowed_never_slows_down() -> None:
    """With at most n devices the step never gets longer as n grows."""
    rows = strong_scaling(MODELS["dense"], ON, JOB, (2, 4, 8, 16), replace(SPACE, devices=upto(16)))
    times = [row.best.step_seconds for row in rows if row.best is not None]
    assert len(times) >= 3
    assert times == sorted(times, reverse=True)


def test_scaling_beyond_the_cluster_is_refused() -> None:
    """Counts that the cluster does not have are refused by name."""
    assert doubling(3, 13) == (3, 6, 12)
    with pytest.raises(InputError) as error:
        strong_scaling(MODELS["dense"], ON, JOB, (16, 32), SPACE)
    assert [p.field for p in error.value.problems] == ["scaling"]


def test_plans_fit_with_the_wanted_chance() -> None:
    """Every plan that is proposed has the chance to fit that was asked; a higher one never allows more plans."""
    counts = []
    for risk in (0.1, 0.5, 0.9, 0.99):
        found = _found(options=SearchOptions(risk=risk))
        assert all(report.chance_to_fit >= risk * (1 - 1e-9) for report in (*found.best, *found.front))
        counts.append(found.counts.fitting)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_rows_are_choices_and_say_how_far_they_range() -> None:
    """Each row has degrees of its own; what else has them lies between it and the last row, the shortest first."""
    found = _found()
    degrees = [(p.tp, p.tp2, p.cp, p.pp, p.dp, p.ep, p.etp) for p in (report.plan for report in found.best)]
    assert len(set(degrees)) == len(degrees) >= 4
    for report in found.best:
        alike = found.alternatives(report)
        assert alike[0] == pytest.approx(report.step_seconds)
        assert list(alike) == sorted(alike)


def test_groups_of_ties_are_told_apart() -> None:
    """What ties with the first of a group is behind it by less than pairs of published runs tell, the next is not."""
    found, tie = _found(), tie_factor("step_seconds")
    firsts = [group.first for group in found.groups]
    assert len(firsts) > 1 and firsts[0] is not None
    assert all(one.step_seconds * tie < other.step_seconds for one, other in pairwise(firsts))
    assert all(0 <= one.behind <= tie - 1 for group in found.groups for one in group.ties)
    seen = [plan_degrees(plan) for group in found.groups for plan in (group.first.plan, *(t.plan for t in group.ties))]
    assert len(set(seen)) == len(seen)
    assert seen[: len(found.best)] == [plan_degrees(report.plan) for report in found.best][: len(seen)]
    (rival, *_) = runners_up(found)
    assert rival.report.plan == found.best[1].plan
    plans = found.frame()
    ahead = plans["fits_at_risk"] & (plans["step_seconds"] <= firsts[1].step_seconds)
    assert {plans["group"][at] for at in np.flatnonzero(ahead)} <= {0, 1, 2}


def test_a_hopeless_search_names_fewer_bytes() -> None:
    """Where nothing fits, the remedy of memory keeps less or counts fewer bytes, and is as short as it says."""
    small = Cluster.parse("2xa100-sxm-80gb", {"memory": "4GB"})
    found = plan_training(MODELS["dense"], small, JOB, SPACE)
    assert not found.best
    (row,) = [row for row in found.rejected if row.name == "memory"]
    assert "short" in row.remedy
    assert any(word in row.remedy for word in ("recompute", "sharding", "adam8bit", "bf16-pure"))


def test_replicas_alike_are_one_row() -> None:
    """Deployments that differ in their number of replicas alone are one row, that of the fewest devices."""
    on, job = Cluster.parse("8xa100-sxm-80gb"), Serving(input_tokens=512, output_tokens=64)
    found = plan_serving(MODELS["dense"], on, job, ServingSpace(devices=upto(8)))
    degrees = [(r.plan.tp, r.plan.pp) for r in found.best]
    assert len(set(degrees)) == len(degrees)
    assert found.best[0].plan.dp == 1


@pytest.mark.parametrize("kind", list(MODELS))
def test_constants_moved_as_one_column_give_what_they_give_one_by_one(kind: str) -> None:
    """Seconds of several plans with a rate or an overhead moved are those of each plan on such hardware."""
    reports = _found(kind).best[:4]
    moves = [(name, factor) for name in CONSTANTS for factor in (0.6, 1.0, 1.7)]
    for report, seconds in zip(reports, moved_steps(reports, moves), strict=True):
        one_by_one = [with_constant(report, name, factor).step_seconds for name, factor in moves]
        assert seconds == pytest.approx(one_by_one, rel=1e-12)


@pytest.mark.parametrize("kind", list(MODELS))
def test_constants_moved_of_plans_of_every_structure_are_theirs(kind: str) -> None:
    """Plans that differ in recompute, sharding, schedule and split are priced together and stay what they are."""
    first = _found(kind).best[0]
    dp = first.plan.num_devices
    plans = [
        Plan(dp=dp),
        Plan(dp=dp, recompute="full", sharding="zero3"),
        Plan(tp=2, dp=dp // 2, sequence_parallel=True, sharding="distributed-optimizer"),
        Plan(tp=2, dp=dp // 2, recompute="selective"),
        Plan(pp=2, dp=dp // 2, schedule="gpipe", recompute="full"),
        Plan(pp=2, dp=dp // 2, offload=("optimizer",)),
    ]
    reports = [report_of(replace(first.case, plan=plan), ()) for plan in plans]
    moves = [(name, factor) for name in CONSTANTS for factor in (0.6, 1.7)]
    for report, seconds in zip(reports, moved_steps(reports, moves), strict=True):
        one_by_one = [with_constant(report, name, factor).step_seconds for name, factor in moves]
        assert seconds == pytest.approx(one_by_one, rel=1e-12)


IN_FORMATS = [(kind, "vllm", ("bf16", "fp8")) for kind in MODELS]
# Whose kernels quantise inputs in steps of their own, and multiply in integers.
IN_FORMATS += [
    ("dense", "sglang", ("fp8",)),
    ("dense", "llama.cpp", ("q4_k_m",)),
    ("experts", "llama.cpp", ("q4_k_m",)),
]


@pytest.mark.parametrize(("kind", "engine", "weights"), IN_FORMATS)
def test_constants_of_deployments_moved_as_one_column_give_what_they_give_one_by_one(
    kind: str, engine: str, weights: tuple[str, ...]
) -> None:
    """Deployments in two formats, on parts of a cluster, with a constant moved are those of `infer` on such devices."""
    on, job = Cluster.parse("16xh100-sxm-80gb"), Serving(input_tokens=512, output_tokens=64)
    space = ServingSpace(weights=weights, engine=(engine,), devices=IntRanges(((4, 4), (16, 16))))
    best = plan_serving(MODELS[kind], on, job, space).best
    reports = [*best[:3], *(one for one in best if one.plan.num_devices != best[0].plan.num_devices)][:4]
    moves = [(name, factor) for name in CONSTANTS for factor in (0.6, 1.0, 1.7)]
    for report, moved in zip(reports, moved_replicas(reports, moves), strict=True):
        for (name, factor), column in zip(moves, moved, strict=True):
            alone = with_constant(report, name, factor)
            for field in ("ttft_seconds", "tpot_seconds", "request_seconds"):
                assert getattr(column, field) == pytest.approx(getattr(alone, field), rel=1e-12)


@pytest.mark.parametrize(("engine", "weights"), [("vllm==0.6.0", "fp8"), ("llama.cpp", "nvfp4")])
def test_constants_are_moved_of_rates_that_are_shares_of_others(engine: str, weights: str) -> None:
    """What quantises inputs moves a share of a bandwidth, integers have a share of a rate: of columns, columns too."""
    report = infer(
        load_model("llama-3.1-8b"),
        Cluster.parse("2xl40s"),
        Plan(tp=2),
        Serving(batch=8, input_tokens=512, output_tokens=64, weights=weights),
        ServingOptions(engine=engine),
    )
    moves = [(name, factor) for name in CONSTANTS for factor in (0.6, 1.7)]
    for (name, factor), column in zip(moves, moved_replicas([report], moves)[0], strict=True):
        alone = with_constant(report, name, factor)
        assert column.request_seconds == pytest.approx(alone.request_seconds, rel=1e-12)


def test_the_factor_at_which_a_plan_overtakes_is_found() -> None:
    """A gap that jumps is found to the digits that are shown in three looks, one that is smooth to five in two."""
    gaps = (lambda f: 1.0 if f > 0.9 else -1.0, lambda f: 1 / f - 0.8)
    looks = Counter[int]()

    def asked_of(asked: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        looks.update(asked.keys())
        return {i: [gaps[i](f) for f in some] for i, some in asked.items()}

    jump, smooth = crossings(asked_of, [0.5, 1.5])
    assert jump == pytest.approx(0.9, rel=2e-3)
    assert smooth == pytest.approx(1.25, rel=1e-5)
    assert looks == {0: 3, 1: 2}
