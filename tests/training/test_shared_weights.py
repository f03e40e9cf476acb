"""Weights that layers share are held once on a stage."""

from __future__ import annotations

from shardwise import Cluster, Model, Plan, Training, train
from shardwise.ops import count_parameters


def test_one_stage_holds_every_parameter_once() -> None:
    """On one device the bytes of weights are the model's parameters, blocks that share theirs counted once."""
    model = Model.load("zamba2-7b")
    job = Training(seq_len=1024, global_batch=1, precision="bf16-pure")
    report = train(model, Cluster.parse("1xb200-sxm-180gb"), Plan(micro_batch=1), job)
    padding = -model.vocab % 128 * model.hidden
    assert report.memory.weights == 2 * (count_parameters(model) + padding)
