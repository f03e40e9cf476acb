"""Adapters beside narrow weights with and without autocast: who autocasts, and what a loop without it makes."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise import Cluster, Plan, Training, load_model, train
from shardwise.plans import find_stack, tuning_of
from shardwise.training import TrainingOptions, TrainReport
from shardwise.training._assumed import stated

JOB: dict[str, Any] = {
    "seq_len": 2048,
    "global_batch": 1,
    "adapter": "lora",
    "rank": 32,
    "targets": ("q", "k", "v", "o"),
}


def report(model: str, precision: str, stack: str = "transformers", base: str = "nf4") -> TrainReport:
    """A step of QLoRA on one device."""
    job = Training(base=base, precision=precision, **JOB)
    plan = Plan(micro_batch=1, recompute="full")
    return train(load_model(model), Cluster.parse("a100-sxm-80gb"), plan, job, TrainingOptions(stack=find_stack(stack)))


@pytest.mark.parametrize(
    ("stack", "base", "precision", "expected"),
    [
        ("transformers", "nf4", "", True),
        ("transformers", "nf4", "bf16-pure", False),
        ("transformers", "nf4", "amp-fp16", True),
        ("transformers", "bf16", "", False),
        ("transformers", "bf16", "amp-bf16", True),
        ("trl", "nf4", "bf16-pure", True),
        ("deepspeed", "nf4", "", False),
        ("litgpt", "nf4", "", False),
        ("unsloth", "nf4", "", False),
    ],
)
def test_adapters_autocast_as_the_recipe_says(stack: str, base: str, precision: str, expected: bool) -> None:
    """A recipe of mixed precision is torch.autocast around forward; trainers beside 4 bits have it unless told."""
    tuning = tuning_of(Training(base=base, precision=precision, **JOB), find_stack(stack))
    assert tuning is not None
    assert tuning.autocast is expected


def test_layers_without_autocast_are_in_fp32() -> None:
    """GEMMs of bitsandbytes give the type of their input: q, k, v and gate have four bytes, not two."""
    plain, cast = (report("smollm2-1.7b", name) for name in ("bf16-pure", "amp-bf16"))
    assert plain.case.layer_type == ("fp32", 4)
    assert cast.case.layer_type == ("bf16", 2)
    # Rotated queries, keys and values, gate, up and their product, whatever adapters keep besides.
    model = plain.case.model
    wider = 2 * 2048 * (3 * model.hidden + 3 * 8192)
    again = plain.evaluation.memory[0].recomputed - cast.evaluation.memory[0].recomputed
    assert 0.5 * wider < again < 1.5 * wider


def test_groups_of_heads_in_fp32_have_no_fused_kernel() -> None:
    """Without autocast scores of heads that share keys are whole, 13 bytes each: FlashAttention takes 16 bits alone."""
    plain, cast = (report("llama-3.1-8b", name) for name in ("bf16-pure", "amp-bf16"))
    scores = 2048 * 2048 * 32
    assert plain.evaluation.memory[0].moments["backward"] - cast.evaluation.memory[0].moments["backward"] > 9 * scores
    assert any("attention in steps" in note for note in stated(plain.case))
    assert not any("attention in steps" in note for note in stated(cast.case))
