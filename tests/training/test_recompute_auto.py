"""Recomputation that is left to the answer: the least with which the plan fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cost import WANTED_CHANCE
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Training
from shardwise.training import TrainingOptions, TrainReport, train

LLAMA, CLUSTER = load_model("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb")


def asked(micro_batch: int, seq_len: int, **fields: object) -> TrainReport:
    """Return the answer for Llama-8B under FSDP on eight H100."""
    plan = Plan(dp=8, sharding="fsdp", micro_batch=micro_batch, recompute="auto", **fields)  # type: ignore[arg-type]
    return train(LLAMA, CLUSTER, plan, Training(seq_len=seq_len, global_batch=8 * micro_batch))


def test_what_fits_without_recomputes_nothing() -> None:
    """A plan that fits as it is recomputes nothing, and the answer says what was settled."""
    report = asked(1, 2048)
    assert (report.plan.recompute, report.plan.recompute_layers, report.plan.modules) == ("none", 0, ())
    assert report.assumptions[0] == "recompute none: the least that fits with a chance of 90%"


def test_one_layer_less_does_not_fit() -> None:
    """As few layers of a stage are recomputed as are likely to fit: with one less the plan is not."""
    model, cluster = LLAMA, Cluster.parse("8xh100-sxm-80gb")
    plan = Plan(tp=2, dp=4, sharding="distributed-optimizer", micro_batch=3, recompute="auto")
    report = train(model, cluster, plan, Training(seq_len=8192, global_batch=12))
    assert report.fits and report.plan.recompute == "full" and report.plan.recompute_layers > 1
    less = replace(report.plan, recompute_layers=report.plan.recompute_layers - 1)
    assert report.chance_to_fit >= WANTED_CHANCE > train(LLAMA, CLUSTER, less, report.job).chance_to_fit


@pytest.mark.parametrize("stack", ["torchtitan", "accelerate"])
def test_what_is_settled_is_what_the_framework_launches(stack: str) -> None:
    """Of 32 layers torchtitan recomputes every one or every second and so on, accelerate all or none."""
    plan = Plan(dp=8, sharding="fsdp", micro_batch=2, recompute="auto")
    report = train(LLAMA, CLUSTER, plan, Training(seq_len=8192, global_batch=16), TrainingOptions(stack=stack))
    assert report.fits and report.plan.recompute == "full" and report.unlaunched == ()


def test_all_layers_where_nothing_fits() -> None:
    """What fits under no recomputation is answered with all of it, and is said not to fit."""
    report = asked(8, 8192)
    assert not report.fits and (report.plan.recompute, report.plan.recompute_layers) == ("full", 0)
    assert report.assumptions[0] == "recompute full: nothing fits with a chance of 90%"


def test_recipes_recompute_modules_before_layers() -> None:
    """Of a model with experts Megatron-Bridge recomputes the modules of its recipes first, the least first."""
    model, cluster = load_model("qwen3-30b-a3b"), Cluster.parse("16xh100-sxm-80gb")
    plan = Plan(ep=8, dp=16, sharding="distributed-optimizer", micro_batch=2, recompute="auto")
    report = train(
        model, cluster, plan, Training(seq_len=2304, global_batch=64), TrainingOptions(stack="megatron-bridge")
    )
    assert report.fits and report.plan.modules[:1] == ("moe_act",) and report.plan.recompute == "none"


def test_a_stated_limit_is_refused() -> None:
    """A limit of layers belongs to a recomputation that is stated."""
    with pytest.raises(InputError, match="recompute_layers"):
        asked(1, 2048, recompute_layers=2)
