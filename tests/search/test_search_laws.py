"""Laws of a search of training plans, whatever the objective, the space and the hardware."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import plan_training
from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, Block, Model, MoE
from shardwise.plans import Plan, Schedule, Training
from shardwise.records import replace
from shardwise.search import OBJECTIVES, IntRanges, SearchOptions, SearchSpace, upto, work_of
from shardwise.search._constraints import laws_of
from shardwise.training import TrainingCase

DENSE = Block(mixers=(Attention(heads=16, kv_heads=4, head_dim=128),), feed_forward=MLP(ffn=8192))
SPARSE = replace(DENSE, feed_forward=MoE(experts=8, top_k=2, ffn=2048))
MODELS = {
    "dense": Model(name="dense", family="llama", hidden=2048, vocab=32000, layers=(DENSE,) * 6),
    "experts": Model(name="experts", family="llama", hidden=2048, vocab=32000, layers=(DENSE, *(SPARSE,) * 5)),
}
JOB = Training(
    seq_len=1024, global_batch=24, token_budget=1e11, failures_per_device_hour=1e-4, restart_seconds=900,
    checkpoint_interval_seconds=1800,
)  # fmt: skip
GOOD = {"memory": 12e9, "fast_bandwidth": 300e9, "memory_bandwidth": 2e12, "slow_bandwidth": 25e9, "price": 2.0}
SPACE = SearchSpace(
    layout=("1d",),
    cp=upto(2),
    sharding=("zero1", "zero3"),
    recompute=("none", "full"),
    micro_batch=upto(4),
    etp=upto(1),
)
LIMITS = ("max_step_seconds", "max_run_seconds", "max_usd", "min_free_bytes")
KIND, OBJECTIVE = st.sampled_from(list(MODELS)), st.sampled_from(list(OBJECTIVES))
SLACK = 1 + 1e-9


@cache
def _best(kind: str, options: SearchOptions, space: SearchSpace = SPACE, **worse: Any) -> float:
    """Return what the best plan has of an objective, less being better, and infinity where there is none."""
    hardware = {name: int(value) if name == "memory" else value for name, value in {**GOOD, **worse}.items()}
    found = plan_training(
        MODELS[kind], Cluster.parse("8xa100-sxm-80gb", hardware), JOB, space, replace(options, top=1, explore=True)
    )
    return found.partial.top.entries[0].value if found.best else float("inf")


@settings(max_examples=6, deadline=None)
@given(kind=KIND, objective=OBJECTIVE, fewer=st.integers(1, 8), more=st.integers(0, 7))
def test_more_devices_never_hurt(kind: str, objective: str, fewer: int, more: int) -> None:
    """With at most n devices the best never worsens as n grows."""
    options = SearchOptions(objective=objective)
    few, many = (_best(kind, options, replace(SPACE, devices=upto(n))) for n in (fewer, min(8, fewer + more)))
    assert many <= few * SLACK


@settings(max_examples=6, deadline=None)
@given(kind=KIND, objective=OBJECTIVE, name=st.sampled_from(LIMITS), tight=st.floats(0.2, 3), looser=st.floats(1, 5))
def test_a_looser_limit_never_hurts(kind: str, objective: str, name: str, tight: float, looser: float) -> None:
    """The best under a limit is never worse under a looser one, nor without it."""
    scale = {"max_step_seconds": 2.0, "max_run_seconds": 1e7, "max_usd": 1e5, "min_free_bytes": 4e9}[name]
    bounds = tight * scale, tight * scale * (looser if name != "min_free_bytes" else 1 / looser)
    limits: list[dict[str, Any]] = [{name: bound} for bound in bounds]
    first, second = (_best(kind, SearchOptions(objective=objective, **limit)) for limit in limits)
    assert second <= first * SLACK
    assert _best(kind, SearchOptions(objective=objective)) <= second * SLACK


NARROW: dict[str, Any] = {
    "tp": st.integers(1, 8).map(upto),
    "pp": st.sampled_from([IntRanges(((1, 1), (4, 4))), upto(2), IntRanges(((2, 6),))]),
    "dp": st.integers(1, 8).map(upto),
    "micro_batch": st.integers(1, 3).map(upto),
    "sharding": st.sampled_from([("zero1",), ("zero3",)]),
    "recompute": st.sampled_from([("none",), ("full",)]),
    "schedule": st.sampled_from([("1f1b",), ("interleaved", "1f1b"), ("zb-h1", "dualpipe")]),
    "sequence_parallel": st.sampled_from([(True,), (False,)]),
}


@settings(max_examples=6, deadline=None)
@given(kind=KIND, objective=OBJECTIVE, fields=st.data())
def test_a_wider_range_never_hurts(kind: str, objective: str, fields: st.DataObject) -> None:
    """The best of a space is never worse than that of a part of it, nor that worse than of a smaller part."""
    names = fields.draw(st.lists(st.sampled_from(list(NARROW)), min_size=2, max_size=4, unique=True))
    values = {name: fields.draw(NARROW[name]) for name in names}
    options = SearchOptions(objective=objective)
    one: dict[str, Any] = {names[0]: values[names[0]]}
    small, smaller = (_best(kind, options, replace(SPACE, **part)) for part in (one, values))
    assert small <= smaller * SLACK
    assert _best(kind, options) <= small * SLACK


@settings(max_examples=6, deadline=None)
@given(
    kind=KIND,
    objective=OBJECTIVE,
    name=st.sampled_from(["memory", "fast_bandwidth", "memory_bandwidth", "slow_bandwidth", "peak_flops.bf16"]),
    worse=st.floats(0.2, 1.0),
)
def test_worse_hardware_never_helps(kind: str, objective: str, name: str, worse: float) -> None:
    """Less memory, slower memory, slower products or a slower link never make the best better."""
    good = {**GOOD, "peak_flops.bf16": 312e12}
    options = SearchOptions(objective=objective)
    assert _best(kind, options) <= _best(kind, options, **{name: good[name] * worse}) * SLACK


_DEGREE = st.sampled_from([1, 2, 3, 4, 8])
_SCHEDULE = st.sampled_from(["1f1b", "interleaved", "zb-h1", "dualpipe"])


@settings(max_examples=60, deadline=None)
@given(kind=KIND, tp=_DEGREE, cp=_DEGREE, dp=_DEGREE, ep=_DEGREE, etp=_DEGREE, sequence=st.booleans())
def test_the_law_of_experts_on_columns_is_that_of_plans(kind: str, sequence: bool, **degrees: int) -> None:
    """A column holds where the law has nothing to say of the plan."""
    law = laws_of(_case(kind))["experts"]
    assert law.holds is not None
    row = {"layout": 0, "tp2": 1, "sequence_parallel": sequence, **degrees}
    columns = {name: np.array([value]) for name, value in row.items()}
    plan = Plan(**degrees, sequence_parallel=sequence)  # type: ignore[arg-type]
    assert bool(law.holds(columns)[0]) == (not law.problems(plan))


@settings(max_examples=60, deadline=None)
@given(schedule=_SCHEDULE, pp=_DEGREE, dp=_DEGREE, micro_batch=_DEGREE)
def test_the_law_of_the_batch_on_columns_is_that_of_plans(
    schedule: Schedule, pp: int, dp: int, micro_batch: int
) -> None:
    """A column holds where the law has nothing to say of the plan, with and without a schedule."""
    laws = laws_of(_case("dense"))
    columns = {"dp": np.array([dp]), "micro_batch": np.array([micro_batch])}
    for name, fixed in (("batch", {}), ("schedule", {"schedule": schedule, "pp": pp})):
        law, plan = laws[name], Plan(dp=dp, micro_batch=micro_batch, **fixed)  # type: ignore[arg-type]
        assert law.holds is not None
        assert bool(law.holds({**columns, **fixed})[0]) == (not law.problems(plan))


def _case(kind: str) -> TrainingCase:
    return work_of(MODELS[kind], Cluster.parse("8xa100-sxm-80gb"), JOB, None, None).grid.case
