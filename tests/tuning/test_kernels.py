"""LoRA in functions of the framework's own: what a feed-forward keeps."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.formats import ImportContext
from shardwise.formats.axolotl import read
from shardwise.hardware import Cluster
from shardwise.ledger.saved import keep
from shardwise.models import load_model
from shardwise.plans import Plan, Training
from shardwise.training import TrainingOptions, train
from shardwise.training._ledger import ledger_of

T, D, F, R = 1024, 2048, 8192, 16


def kept_by_the_mlp(stack: str, **job: Any) -> float:
    """Return the bytes a token that the feed-forward of Llama-3.2-1B keeps beside LoRA, thin results left out."""
    asked = {"adapter": "lora", "rank": R, "targets": ("all-linear",)} | job
    report = train(load_model("llama-3.2-1b"), Cluster.parse("1xa100-sxm-80gb"), Plan(micro_batch=1),
                   Training(seq_len=T, global_batch=1, **asked), TrainingOptions(stack=stack))  # fmt: skip
    layer = ledger_of(report.case.model, report.case.plan, report.case.kinds, report.evaluation.layout).kinds[0]
    kept = keep([op for op in layer.ops if op.region.startswith("mlp")]).kept
    return sum(t.size_bytes for t in kept if t.size_bytes >= 2 * T * D) / T


@pytest.mark.parametrize(
    ("line", "on"), [("", True), ("lora_mlp_kernel: true", True), ("lora_mlp_kernel: false", False),
                     ("lora_o_kernel: true", False)],
)  # fmt: skip
def test_a_file_that_says_one_kernel_says_all(line: str, on: bool) -> None:
    """None is on by itself beside one that is stated."""
    base = "base_model: meta-llama/Llama-3.1-8B\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n"
    case = read(f"{base}sequence_len: 512\nmicro_batch_size: 1\n{line}\n", "axolotl.yaml", ImportContext(num_devices=1))
    assert bool(case.stack.adapter_kernels) == on


# axolotl's own kernels/lora.py LoRA_MLP, run with torch 2.13 and its two Triton kernels written in torch: X, gate and
# up, 2 D + 4 F bytes a token; peft's modules kept 4 D + 8 F there, in eager steps with adapters of 16 bits.
FUNCTION = 2 * D + 2 * 2 * F


@pytest.mark.parametrize(
    ("stack", "job", "inside"),
    [
        ("axolotl", {}, True),
        ("axolotl", {"targets": ("gate", "up", "down")}, True),
        ("axolotl", {"targets": ("gate_proj", "up_proj")}, False),
        ("axolotl", {"base": "nf4"}, True),
        # utils/schemas/config.py check_auto_enable_lora_kernels: not for rl, not beside 8-bit bases, not DoRA's norms.
        ("axolotl", {"base": "int8"}, False),
        ("axolotl", {"method": "dpo"}, False),
        ("axolotl", {"adapter": "dora"}, False),
        ("unsloth", {}, True),
        # unsloth models/llama.py patch_peft_model: lora_dropout == 0.
        ("unsloth", {"adapter_dropout": 0.1}, False),
        ("transformers", {}, False),
    ],
)
def test_a_feed_forward_in_one_function_keeps_its_input_gate_and_up(
    stack: str, job: dict[str, Any], inside: bool
) -> None:
    """What enters the last GEMM is made again in backward, as the function's own run showed to the byte."""
    sequences = 2 if job.get("method") == "dpo" else 1
    kept = kept_by_the_mlp(stack, **job) / sequences
    assert (kept == FUNCTION) if inside else (kept > FUNCTION)
