"""Plans of fine-tuning as columns equal the same plans one by one."""

from __future__ import annotations

import pytest

from ops.helpers import layout
from shardwise import plan_training
from shardwise.hardware import Cluster
from shardwise.ledger.flow import flow
from shardwise.models import MLP, Attention, Block, Model
from shardwise.ops.block import block_ops
from shardwise.ops.peft_adapters import PATHS
from shardwise.plans import ADAPTERS, Plan, Training, find_stack, tuning_of
from shardwise.records import replace
from shardwise.search import SearchOptions, SearchSpace, upto
from shardwise.search._remedies import evaluate_columns
from shardwise.training import TrainingOptions, TrainReport, train

BLOCK = Block(mixers=(Attention(heads=16, kv_heads=4, head_dim=64),), feed_forward=MLP(ffn=2816))
MODEL = Model(name="small", family="llama", hidden=1024, vocab=32000, layers=(BLOCK,) * 4)
CLUSTER = Cluster.parse("4xa100-sxm-80gb")
PLANS = (Plan(dp=4), Plan(dp=2, cp=2), Plan(tp=2, dp=2), Plan(pp=2, dp=2, micro_batch=2))


def _train(plan: Plan, job: Training, stack: str) -> TrainReport:
    return train(MODEL, CLUSTER, plan, job, TrainingOptions(stack=stack))


@pytest.mark.parametrize("method", ADAPTERS)
@pytest.mark.parametrize("stack", ["transformers", "megatron-bridge"])
def test_adapters_as_columns_take_what_they_take_one_by_one(method: str, stack: str) -> None:
    """The first layer included, whose input needs no gradient, and matrices that are made of parameters."""
    job = Training(seq_len=1024, global_batch=16, adapter=method)
    plans = [replace(plan, sequence_parallel=False) for plan in PLANS if plan.tp == 1 or method not in PATHS]
    one_by_one = [_train(plan, job, stack) for plan in plans]
    columns = evaluate_columns(one_by_one[0].case, plans)
    for i, one in enumerate(one_by_one):
        assert columns.peak[i] == pytest.approx(one.evaluation.peak, rel=1e-12), plans[i]
        assert columns.step.total[i] == pytest.approx(one.step_seconds, rel=1e-12), plans[i]


def test_adapters_of_a_gathered_input_have_no_gradient_where_the_layer_has_none() -> None:
    """Under tensor parallelism q, k and v of the first layer read one input, which no weight trains before."""
    job = Training(seq_len=64, global_batch=1, adapter="lora")
    stack = find_stack("transformers")
    ops = block_ops(layout(stack="transformers", tp=2, tuning=tuning_of(job, stack)), BLOCK, MODEL.hidden)
    for entry, without in ((False, ("input",)), (True, ())):
        asked = {op.name: op.without for op in flow(ops, entry).ops}
        assert [asked[f"qkv.{name}.lora_A"] for name in "qkv"] == [without] * 3


@pytest.mark.parametrize("method", ["reward", "sft", "dpo"])
def test_a_search_ranks_what_the_answer_says(method: str) -> None:
    """A reward model has a head of one value in a search of plans too."""
    job = Training(seq_len=1024, global_batch=16, method=method)
    options = SearchOptions(stack="transformers", prune=False)
    found = plan_training(MODEL, CLUSTER, job, SearchSpace(micro_batch=upto(2)), options)
    for entry, best in zip(found.partial.top.entries, found.best, strict=True):
        one = _train(best.plan, job, "transformers")
        assert (best.device_bytes, best.step_seconds) == (one.device_bytes, one.step_seconds)
        assert entry.step_seconds == pytest.approx(one.step_seconds, rel=1e-12)
