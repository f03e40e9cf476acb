"""Where schedules put the pieces of a model, and what follows for the ends, the messages and the tied table."""

from __future__ import annotations

import pytest

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Training
from shardwise.training import TrainingOptions, TrainReport, comm, train

JOB = Training(seq_len=1024, global_batch=32)
V = ("zb-v", "v-half", "v-min", "dualpipe-v")


def answer(schedule: str, vpp: int, model: str = "gpt2") -> TrainReport:
    """Four stages of a small model."""
    plan = Plan(pp=4, vpp=vpp, schedule=schedule, stage_layers=(2, 1) * (2 * vpp) if vpp == 2 else (3,) * 4)
    return train(load_model(model), Cluster.parse("4xh100"), plan, JOB, TrainingOptions(stack="fsdp2"))


@pytest.mark.parametrize("schedule", V)
def test_the_first_stage_of_a_v_has_both_ends(schedule: str) -> None:
    """Embedding and head lie on stage 0, the tied table is there once, and no gradients of it are sent."""
    found = answer(schedule, 2)
    stages = found.evaluation.stages
    assert [(s.embeds, s.ends) for s in stages] == [(1, 1), *((0, 0) for _ in stages[1:])]
    looped = answer("interleaved", 2)
    table = 50257 * 768
    assert sum(map(sum, _owned(looped))) - sum(map(sum, _owned(found))) == pytest.approx(table, rel=0.01)
    assert (
        "embedding"
        not in comm(found.case.model, found.case.cluster, found.plan, JOB, TrainingOptions(stack="fsdp2")).axes
    )


def _owned(report: TrainReport) -> list[tuple[float, ...]]:
    from shardwise.training._parts import owned

    e = report.evaluation
    return [tuple(s.count * x for x in owned(e.parts, s)) for s in e.stages]


@pytest.mark.parametrize(
    ("schedule", "vpp", "hops"),
    [("1f1b", 1, 3), ("interleaved", 2, 7), ("zb-v", 2, 6), ("v-half", 2, 6), ("dualpipe-v", 2, 6)],
)
def test_messages_cross_every_border_between_pieces_once_each_way(schedule: str, vpp: int, hops: int) -> None:
    """A micro-batch is sent over each border of pieces on two stages, forward and back: the turn of a V is none."""
    found = answer(schedule, vpp)
    axes = comm(found.case.model, found.case.cluster, found.plan, JOB, TrainingOptions(stack="fsdp2")).axes
    assert axes["pp"].cluster_messages == 2 * hops * 32


@pytest.mark.parametrize("schedule", ["interleaved-zb", "looped-bfs", *V])
def test_the_timeline_is_the_step(schedule: str) -> None:
    """The step drawn task by task is as long as the closed form says, within its tolerance."""
    drawn = answer(schedule, 2).timeline()
    assert abs(drawn.difference) < drawn.tolerance
