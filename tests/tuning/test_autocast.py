"""Adapters beside narrow weights with and without autocast: who autocasts, and what a loop without it makes."""

from __future__ import annotations

from typing import Any

import pytest

from ops.helpers import layout
from shardwise import Cluster, Plan, Training, load_model, train
from shardwise.ledger.op import Op
from shardwise.models import model_from_config
from shardwise.ops.block import block_ops
from shardwise.ops.cast_kernels import with_casts
from shardwise.ops.head import head
from shardwise.plans import find_stack, tuning_of
from shardwise.records import replace
from shardwise.training import TrainingOptions, TrainReport, ledger_of
from shardwise.training._assumed import stated

JOB: dict[str, Any] = {
    "seq_len": 2048,
    "global_batch": 1,
    "adapter": "lora",
    "rank": 32,
    "targets": ("q", "k", "v", "o"),
}


def report(model: str, precision: str, stack: str = "transformers", base: str = "nf4", **changed: Any) -> TrainReport:
    """A step of QLoRA on one device, in a stack of which some fields are `changed`."""
    job = Training(base=base, precision=precision, **JOB)
    plan = Plan(micro_batch=1, recompute="full")
    options = TrainingOptions(stack=replace(find_stack(stack), **changed))
    return train(load_model(model), Cluster.parse("a100-sxm-80gb"), plan, job, options)


def layer_ops(of: TrainReport) -> dict[str, Op[Any]]:
    """The operators of a layer by name."""
    kind = ledger_of(of.case.model, of.case.plan, of.case.kinds, of.evaluation.layout).kinds[0]
    return {op.name: op for op in kind.ops}


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


def test_gemms_between_norms_in_fp32_cast_what_they_take_and_give() -> None:
    """TRL before 0.20 leaves norms in fp32: Linear4bit casts to 16 bits and back, and layers are in fp32 between."""
    wide, plain = (layer_ops(report("llama-2-7b", "", "trl-2024", narrow_norm_bytes=width)) for width in (4.0, 0.0))
    D, F, T = 4096, 11008, 2048
    # fp32 is read and 16 bits written of what each layer takes, and the other way round of what it gives.
    for name, layers, inner, columns in (("qkv", 3, D, 3 * D), ("mlp.up", 2, D, 2 * F), ("mlp.down", 1, F, D)):
        assert wide[name].widened_bytes - plain[name].widened_bytes == 6 * T * (layers * inner + columns)
    assert wide["out"].widened_bytes == plain["out"].widened_bytes
    assert wide["mlp.activation"].forward_bytes == 2 * plain["mlp.activation"].forward_bytes
    assert wide["norm1"].forward_bytes == 28 / 36 * plain["norm1"].forward_bytes
    assert wide["rotary"].forward_bytes == 2 * plain["rotary"].forward_bytes + 6 * T * 2 * D
    assert wide["attention"] == plain["attention"]


def test_gemms_of_gptq_give_16_bits_whatever_norms_are() -> None:
    """Other formats have kernels whose results are in 16 bits, as their inputs are."""
    wide, plain = (
        layer_ops(report("llama-2-7b", "", "trl-2024", "gptq4", narrow_norm_bytes=width)) for width in (4.0, 0.0)
    )
    assert [(op.name, op.forward_bytes) for op in wide.values()] == [
        (op.name, op.forward_bytes) for op in plain.values()
    ]


def test_autocast_pays_for_its_copies() -> None:
    """A cast of 6 bytes an element of each weight, and of each fp32 input of q, k, v, gate and up, both ways."""
    model = load_model("llama-3.1-8b")
    wide = layout({"B": 1, "S": 64}, "transformers")
    y = replace(wide, choices=replace(wide.choices, autocast=True))
    ops = block_ops(y, model.layers[0], model.hidden)
    made = [op for op in with_casts(y, ops) if op.name.endswith(".casts")]
    weights = sum(w.elements for op in ops if op.kind == "matmul" for w in op.weights)
    stream = 64 * model.hidden
    assert sum(op.forward_bytes for op in made) == 6 * (weights + 5 * stream)
    # Gradients of q, k and v, and of gate and up, are added up in fp32: 12 bytes, of which the GEMMs have half.
    in_gemms = 2 * sum(op.apart for op in ops)
    assert sum(op.backward_bytes for op in made) == 6 * (weights + 5 * stream) + (12 * (2 + 1) - in_gemms) * stream
    assert in_gemms == 6 * (2 + 1)
    fused = replace(y, choices=replace(y.choices, stack=replace(y.stack, projections_apart="none")))
    joint = block_ops(fused, model.layers[0], model.hidden)
    assert sum(op.forward_bytes for op in with_casts(fused, joint) if ".casts" in op.name) == 6 * (weights + 2 * stream)
    assert with_casts(wide, ops) == ops
    compiled = replace(y, choices=replace(y.choices, stack=find_stack("pytorch-compiled")))
    assert sum(op.forward_bytes for op in with_casts(compiled, ops) if op.name.endswith(".casts")) == 6 * weights


def test_autocast_casts_the_table_of_a_tied_head_too() -> None:
    """torch.nn.functional.linear takes a leaf in fp32, whichever layer it also is of."""
    model, y = load_model("llama-3.2-1b"), layout({"B": 1, "S": 64}, "transformers")
    y = replace(y, choices=replace(y.choices, autocast=True))
    found = [op for op in with_casts(y, head(y, model)) if op.name == "head.casts"]
    elements = model.vocab * model.hidden + 64 * model.hidden
    assert [(op.forward_bytes, op.backward_bytes) for op in found] == [(6 * elements, 6 * elements)]


def test_autocast_casts_the_weights_of_every_expert() -> None:
    """One tensor has them all; each row goes through some of them, each weight is cast once."""
    model, y = load_model("mixtral-8x7b"), layout({"B": 1, "S": 64}, "transformers")
    y = replace(y, choices=replace(y.choices, autocast=True))
    ops = with_casts(y, block_ops(y, model.layers[0], model.hidden))
    made = {op.name: op.forward_bytes for op in ops if op.name.endswith(".casts")}
    assert made["mlp.experts.down.casts"] == 6 * 8 * model.hidden * 14336


@pytest.mark.parametrize(
    ("family", "asked", "kept"),
    [
        ("llama", {}, 3206144),
        ("llama", {"targets": ("all-linear",)}, 3097856),
        ("llama", {"targets": ("q", "v")}, 2589696),
        ("llama", {"targets": ("q", "v"), "adapter_dropout": 0.1}, 2851840 - 3 * 128 * 2 * 256),
        ("llama", {"targets": ("all-linear",), "adapter_dropout": 0.1}, 4236544 - 3 * 128 * (6 * 256 + 688)),
        ("qwen3", {}, 3504128),
        ("qwen3", {"targets": ("all-linear",)}, 3297536),
        ("qwen3", {"targets": ("q", "v")}, 2789376),
    ],
)
def test_a_layer_of_fp32_weights_keeps_what_autocast_saves(family: str, asked: dict[str, Any], kept: int) -> None:
    """Bytes of a layer's saved tensors, to the byte: the third of three less the second, weights in fp32.

    Hooks of torch 2.14.1 under torch.autocast in bf16, transformers 5.24.0, peft 0.21.2, LoRA of rank 8, 128 tokens. A
    mask of dropout has 4 bytes an element on the CPU that this was run on, 1 on CUDA.
    """
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
    model = model_from_config(
        {"model_type": family, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 688,
         "num_hidden_layers": 3, "tie_word_embeddings": False, **sizes}
    )  # fmt: skip
    adapter = {"adapter": "lora", "rank": 8, "base": "fp32", **asked} if asked else {}
    job = Training(seq_len=128, global_batch=1, precision="amp-bf16", **adapter)
    cluster, options = Cluster.parse("1xh100-sxm-80gb"), TrainingOptions(stack=find_stack("trl"))
    found = train(model, cluster, Plan(micro_batch=1), job, options)
    assert found.evaluation.parts.kinds[-1].kept_bytes == kept
