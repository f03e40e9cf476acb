"""One formula, three kinds of number: columns and traced numbers equal plain ones."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from laws.helpers import evaluated, report, tried
from laws.strategies import cases, random_plans
from shardwise.hardware import Cluster
from shardwise.ledger.traced import Traced, plain
from shardwise.models import MLP, Attention, Block, LatentAttention, Model, MoE
from shardwise.plans import Plan, Training, find_stack
from shardwise.records import replace
from shardwise.search._remedies import evaluate_columns, structure
from shardwise.training import TrainingCase, TrainingOptions, train

JOB = Training(seq_len=4096, global_batch=128)
SOFTMAX = Attention(heads=32, kv_heads=8, head_dim=128, qk_norm="head")
LATENT = LatentAttention(
    heads=32, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
EXPERTS = MoE(experts=16, top_k=4, ffn=1024, shared=MLP(ffn=2048))


def _model(kind: str) -> Model:
    mixer: Any = LATENT if kind == "latent" else SOFTMAX
    plain_block = Block(mixers=(mixer,), feed_forward=MLP(ffn=8192))
    sparse = plain_block if kind == "dense" else replace(plain_block, feed_forward=EXPERTS)
    layers = (plain_block,) * 3 + (sparse,) * 21
    mtp = (sparse,) if kind == "latent" else ()
    return Model(name=kind, family="llama", hidden=4096, vocab=128256, layers=layers, tied=kind == "dense", mtp=mtp)


def _case(kind: str, stack: str = "megatron", plan: Plan | None = None) -> TrainingCase:
    cluster = Cluster.parse("64xh100-sxm-80gb")
    return TrainingCase(model=_model(kind), cluster=cluster, job=JOB, stack=find_stack(stack), plan=plan or Plan(dp=64))


@pytest.mark.parametrize(
    ("kind", "stack", "count"), [("dense", "megatron", 80), ("moe", "fsdp2", 60), ("latent", "megatron", 60)]
)
def test_columns_equal_numbers(kind: str, stack: str, count: int) -> None:
    """Plans evaluated as columns equal the same plans one by one, in memory and in time, to one part in a billion."""
    case = _case(kind, stack)
    plans = sorted(random_plans(case.model, 64, JOB, count), key=lambda p: repr(structure(p)))
    for _, members in groupby(plans, key=structure):
        together = list(members)
        columns = evaluate_columns(case, together)
        for i, plan in enumerate(together):
            one = report(replace(case, plan=plan)).evaluation
            assert columns.peak[i] == pytest.approx(one.peak, rel=1e-9), plan
            assert columns.step.total[i] == pytest.approx(one.step.total, rel=1e-9), plan
            assert columns.step.pipeline.bubble[i] == pytest.approx(one.step.pipeline.bubble, rel=1e-6, abs=1e-9), plan


def test_columns_stay_float64_at_a_trillion_parameters() -> None:
    """No column is of integers, so nothing overflows at a trillion parameters and beyond."""
    block = Block(mixers=(replace(SOFTMAX, heads=128),), feed_forward=MLP(ffn=131072))
    model = Model(name="huge", family="llama", hidden=32768, vocab=256000, layers=(block,) * 128)
    plans = [Plan(tp=8, pp=pp, dp=1024 // (8 * pp), sharding="zero1") for pp in (8, 16, 32)]
    job = Training(seq_len=131072, global_batch=4096)
    cluster = Cluster.parse("1024xb200-sxm-180gb")
    case = TrainingCase(model=model, cluster=cluster, job=job, stack=find_stack("megatron"), plan=plans[0])
    found = evaluate_columns(case, plans)
    arrays = [x for x in _leaves(found) if isinstance(x, np.ndarray)]
    assert arrays
    assert {a.dtype for a in arrays} == {np.dtype("float64")}
    assert all(np.isfinite(a).all() for a in arrays)
    assert (found.parts.head.elements.dense * plans[0].tp > 8e9).all()


def _leaves(value: Any) -> list[Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return [x for f in fields(value) for x in _leaves(getattr(value, f.name))]
    if isinstance(value, dict):
        return [x for item in value.values() for x in _leaves(item)]
    if isinstance(value, (tuple, list)):
        return [x for item in value for x in _leaves(item)]
    return [value]


@given(cases())
@tried(10)
def test_traced_numbers_equal_plain_ones_to_the_last_bit(case: TrainingCase) -> None:
    """A traced evaluation has the very bits of the plain one, in every number it holds."""
    answer = report(case)
    plain_leaves, traced_leaves = _leaves(answer.evaluation), _leaves(answer.traced)
    assert len(plain_leaves) == len(traced_leaves)
    assert any(isinstance(x, Traced) for x in traced_leaves)
    for one, traced in zip(plain_leaves, traced_leaves, strict=True):
        assert plain(traced) == one


def test_copies_that_may_be_there_stand_between_no_others() -> None:
    """What three operators in a row write is the same where copies of chunks are left out and where they move none."""
    mixer = LatentAttention(
        heads=64, q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    block = Block(mixers=(mixer,), feed_forward=MoE(experts=8, top_k=1, ffn=256))
    model = Model(name="latent", family="own", hidden=4608, vocab=32000, layers=(block,) * 2)
    plan, job = Plan(tp=2, sequence_parallel=True, micro_batch=1), Training(seq_len=512, global_batch=1)
    answer = train(model, Cluster.parse("2xh100"), plan, job, TrainingOptions(stack="pytorch"))
    for one, traced in zip(_leaves(answer.evaluation), _leaves(answer.traced), strict=True):
        assert plain(traced) == one


@given(cases())
@tried(12)
def test_a_column_of_one_plan_is_that_plan(case: TrainingCase) -> None:
    """Any legal case as a column of two equals itself twice."""
    columns = evaluate_columns(case, [case.plan, case.plan])
    one = evaluated(case)
    for got, expected in ((columns.peak, one.peak), (columns.step.total, one.step.total)):
        assert got.shape == (2,)
        assert got == pytest.approx([expected] * 2, rel=1e-12)
