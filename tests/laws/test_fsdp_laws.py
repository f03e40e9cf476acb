"""Laws of fully sharded data parallelism: what is gathered when, and what each rank holds at rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from laws.helpers import SLACK, evaluated, tried
from laws.strategies import ANY, cases
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Training
from shardwise.records import replace
from shardwise.training import TrainingCase, TrainingOptions, train
from shardwise.training._fsdp_units import unpadded
from shardwise.training._parts import owned
from shardwise.training._traffic import flows_of, traffic_of

TORCH = ("pytorch", "fsdp2", "fsdp2-2024", "transformers", "automodel")
FSDP = replace(ANY, shardings=("fsdp",), stacks=TORCH, layouts=("1d",), schedules=("1f1b",), modules=False)
ONE_STAGE = cases(FSDP).filter(lambda case: case.plan.pp == 1)


def kept(case: TrainingCase, **more: Any) -> TrainingCase:
    """Return the case with weights that stay gathered from forward to backward."""
    return replace(case, plan=replace(case.plan, sharding="shard-grad-op", **more))


def sent(case: TrainingCase, verb: str) -> tuple[float, float]:
    """Return calls and bytes of a verb over the sharding groups of the first stage in a step."""
    found = evaluated(case)
    flows = [f for f in flows_of(traffic_of(case, found), 0, 1.0) if f.message.group.endswith("shard")]
    chosen = [f for f in flows if f.message.verb == verb]
    return sum(f.per_step for f in chosen), sum(f.bytes_per_step for f in chosen)


@given(ONE_STAGE)
@tried(12)
def test_kept_weights_never_need_less_memory(case: TrainingCase) -> None:
    """The state at rest is that of FSDP; while the loss is made all weights are whole, never fewer bytes than then."""
    (one,), (other,) = evaluated(case).memory, evaluated(kept(case)).memory
    assert (one.weights, one.gradients, one.optimizer) == (other.weights, other.gradients, other.optimizer)
    assert one.moments["loss"] <= other.moments["loss"]


@given(ONE_STAGE)
@tried(12)
def test_kept_weights_are_gathered_once_a_micro_batch(case: TrainingCase) -> None:
    """Fewer gathers than FSDP sends, as many scatters of as many bytes, and no gather in backward."""
    assert sent(case, "reduce_scatter") == sent(kept(case), "reduce_scatter")
    calls, size = sent(case, "all_gather")
    fewer, less = sent(kept(case), "all_gather")
    assert fewer <= calls
    assert less <= size <= 2 * less * SLACK
    flows = flows_of(traffic_of(kept(case), evaluated(kept(case))), 0, 1.0)
    assert not [f for f in flows if f.message.phase == "backward" and f.message.tensor.endswith("weights")]


@given(ONE_STAGE)
@tried(12)
def test_kept_weights_are_waited_for_no_longer(case: TrainingCase) -> None:
    """A step that gathers once never takes longer than one that gathers twice."""
    assert evaluated(kept(case)).step.total <= evaluated(case).step.total * SLACK


@given(ONE_STAGE)
@tried(12)
def test_smaller_sharding_groups_hold_more_at_rest(case: TrainingCase) -> None:
    """Hybrid groups of half the replicas hold at least what groups of all hold, weights resharded or kept."""
    if case.plan.dp % 4 == 0:
        whole, half = evaluated(kept(case)).memory[0], evaluated(kept(case, shard=case.plan.dp // 2)).memory[0]
        assert whole.weights <= half.weights
        assert whole.optimizer <= half.optimizer


@given(ONE_STAGE)
@tried(12)
def test_padding_is_less_than_a_row_of_each_rank(case: TrainingCase) -> None:
    """Shards hold at least the model, and no more than one row of each tensor on each rank besides."""
    found = evaluated(case)
    stage, z = found.stages[0], found.sizes
    have, alone = sum(owned(found.parts, stage)), sum(owned(unpadded(found.parts), stage))
    assert have >= alone * (1 - 1e-12)
    # Of a vocabulary that tp does not divide the first rank has a row more than the mean.
    if z.shard_share == z.expert_share == 1 and case.model.vocab % case.plan.tp == 0:
        assert have == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(("stack", "copies"), [("accelerate", 8), ("transformers", 8), ("fsdp2", 1), ("composer", 1)])
def test_a_group_larger_than_the_experts_holds_a_multiple_of_them(stack: str, copies: int) -> None:
    """Over 64 ranks the 8 experts of Mixtral and its routers are 64 where the first dimension is sharded.

    torchtitan shards the second dimension of experts then, FSDP1 flat units.
    """
    model, job = Model.load("mixtral-8x7b"), Training(seq_len=2048, global_batch=64)
    report = train(model, Cluster.parse("64xh100"), Plan(dp=64, sharding="fsdp"), job, TrainingOptions(stack=stack))
    *_, expert, _ = owned(report.evaluation.parts, report.evaluation.stages[0])
    assert expert == copies * 32 * 8 * 3 * 4096 * 14336


@given(ONE_STAGE)
@tried(10)
def test_more_replicas_never_need_more_state(case: TrainingCase) -> None:
    """Twice the replicas of one sharding group hold no more at rest, whatever is padded."""
    more = replace(
        case,
        plan=replace(case.plan, dp=2 * case.plan.dp),
        job=replace(case.job, global_batch=2 * case.job.global_batch),
    )
    cluster = Cluster.parse(f"{more.plan.num_devices}xh100-sxm-80gb")
    one, two = evaluated(case).memory[0], evaluated(replace(more, cluster=cluster)).memory[0]
    assert two.weights <= one.weights * SLACK
    assert two.gradients <= one.gradients * SLACK
    assert two.optimizer <= one.optimizer * SLACK
