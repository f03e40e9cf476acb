"""Weights that layers share are held once on a stage."""

from __future__ import annotations

import pytest

from shardwise import Cluster, Model, Plan, Training, train
from shardwise.models import model_from_config
from shardwise.ops import count_parameters
from shardwise.records import replace


def test_one_stage_holds_every_parameter_once() -> None:
    """On one device the bytes of weights are the model's parameters, blocks that share theirs counted once."""
    model = Model.load("zamba2-7b")
    job = Training(seq_len=1024, global_batch=1, precision="bf16-pure")
    report = train(model, Cluster.parse("1xb200-sxm-180gb"), Plan(micro_batch=1), job)
    padding = -model.vocab % 128 * model.hidden
    assert report.memory.weights == 2 * (count_parameters(model) + padding)


def test_passes_of_one_prediction_layer_own_it_once() -> None:
    """Two predictions of further tokens that are passes of one layer have its weights once, and run twice."""
    job, cluster = Training(seq_len=1024, global_batch=1, precision="bf16-pure"), Cluster.parse("1xb300")
    size = {"model_type": "nemotron_h", "hidden_size": 512, "hybrid_override_pattern": "M*", "num_hidden_layers": 2,
            "vocab_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
            "intermediate_size": 512, "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 8,
            "mtp_hybrid_override_pattern": "*"}  # fmt: skip
    one, two, passes = (
        train(model_from_config({**size, **more}), cluster, Plan(micro_batch=1), job)
        for more in (
            {"num_nextn_predict_layers": 1},
            {"num_nextn_predict_layers": 2},
            {"num_nextn_predict_layers": 2, "mtp_use_repeated_layer": True},
        )
    )
    assert passes.memory.weights == one.memory.weights < two.memory.weights
    assert passes.evaluation.step.pipeline.total == two.evaluation.step.pipeline.total


def test_blocks_that_share_weights_have_adapters_each() -> None:
    """Adam's two fp32 moments of the parameters of adapters, 13 uses of two blocks of Zamba-2 with their own.

    Each use is a module with the low-rank layers of 6 or 7, of which one runs: peft adapts all of them, no gradient
    reaches the others, and Adam keeps no moments of what has none.
    """
    job, idle = Training(seq_len=512, global_batch=1, adapter="lora", rank=8), 0.0
    report = train(Model.load("zamba2-7b"), Cluster.parse("1xh100-sxm-80gb"), Plan(micro_batch=1), job)
    assert report.tuning is not None
    for name, parameters in report.tuning.trainable_by_module.items():
        idle += parameters * (1 - 13 / (7 * 7 + 6 * 6)) if "_adapter_" in name else 0
    assert report.memory.optimizer == pytest.approx(8 * (report.tuning.trainable_parameters - idle))
    attention = train(report.case.model, report.case.cluster, Plan(micro_batch=1), replace(job, targets=("attention",)))
    assert attention.tuning is not None
    assert attention.memory.optimizer == 8 * attention.tuning.trainable_parameters
