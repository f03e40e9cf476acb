"""What is known of frameworks: the stacks that run rows, and what cells of a row change in them."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from accuracy.published import Published
from shardwise.measured import framework_of, frameworks, read
from shardwise.measured._frameworks import adjusted, has_default, variant_of
from shardwise.measured._record import Record
from shardwise.measured._training_plan import precision_of
from shardwise.plans import Stack, find_stack, stack_names

TABLE: dict[str, Any] = Published.frameworks
_LORA = {"citation": "github:mlcommons/training_results_v5.0@1", "finetune": "lora", "device": "h200-sxm-141gb",
         "notes": "fp8 attention"}  # fmt: skip


def test_every_stack_of_the_table_is_known() -> None:
    """Frameworks and their variants name stacks of the package, and every pattern of a stack's name fits one."""
    names = {one.stack for one in frameworks(TABLE)} | {one["stack"] for one in TABLE["variant"]}
    assert names - {""} <= set(stack_names())
    patterns = [one["of"] for kind in ("variant", "adjustment") for one in TABLE[kind]]
    patterns += [one["stacks"] for one in TABLE["habit"].values()]
    for pattern in patterns:
        assert any(re.fullmatch(pattern, name) for name in stack_names()), pattern


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("torchtitan 9dec370 (2024-12)", "fsdp2-2024"),
        ("torchtitan (2025-03)", "fsdp2-2024"),
        ("torchtitan 2025-06", "fsdp2"),
        ("Megatron-SWIFT", "megatron-lm"),
        ("Megatron-Core + TE (Megatron-FSDP, 2026-05)", "megatron"),
        ("ms-swift (megatron sft)", "megatron-lm"),
        ("ms-swift", "ms-swift"),
        ("torchtitan 0.3.0", "torchtitan-2026"),
        ("NeMo 23.04", "nemo-2023"),
        ("NeMo 24.07", "nemo-2024"),
        ("NeMo 25.04", "nemo-2025"),
        ("torchtitan (2026-05)", "torchtitan-2026"),
        ("torchtitan (2026-03)", "fsdp2"),
        ("TRL 1.12.0", "trl-2026"),
        ("TRL 1.16.0", "trl"),
        ("TRL", "trl"),
        ("HF TRL 0.13.0 / transformers 4.48.1 / peft 0.13.2", "trl-2024"),
        ("TRL 0.9.6", "trl-2024"),
        ("TRL (2024-03)", "trl-2024"),
        ("TRL 0.24.0", "trl-2025"),
        ("TRL 1.6.0", "trl-2025"),
        ("HF TRL (2026-03)", "trl-2025"),
        ("HF TRL 1.10.0", "trl-2026"),
        ("HF TRL 0.29 / transformers 5 / DeepSpeed 0.18", "deepspeed"),
        ("HF Trainer + DeepSpeed 0.14.2 / torch 2.2.0", "deepspeed-2025"),
        ("HF transformers + DeepSpeed 0.16.6 (torch 2.6, 2025-04)", "deepspeed-2025"),
        ("HF Trainer + DeepSpeed (2026-04)", "deepspeed"),
        ("HF transformers + FSDP (accelerate, torch 2.6, 2025-04)", "transformers-2025"),
        ("accelerate 1.13 + FSDP2 (torch 2.9, 2025-11)", "accelerate"),
        ("ms-swift 4.2 FSDP2 (transformers 5.5.4, torch 2.10)", "ms-swift"),
        ("ms-swift (torch 2.1.1)", "ms-swift-2024"),
        ("transformers 4.48.1 / peft 0.13.2", "transformers-4-48"),
        ("HF transformers 4.40", "transformers-2024"),
        ("HF peft 0.19.2.dev0 / torch 2.13.0+cu130", "transformers"),
        ("unsloth 2024.5", "unsloth-2024"),
        ("unsloth 2024.11.6 / torch 2.5.1", "unsloth-2024"),
        ("unsloth 2024.11.9", "unsloth"),
        ("unsloth 2025.9.1 / torch 2.8.0", "unsloth"),
        ("unsloth", "unsloth"),
        ("nanotron", "nanotron"),
        ("nanotron (2024-07)", "nanotron-2024"),
        ("llm-foundry/Composer (PyTorch 1.13)", "composer-2022"),
        ("Megatron-LM (2021)", "megatron-2021"),
        ("Megatron-LM (2021-02)", "megatron-2021"),
        ("Megatron-LM", "megatron"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("NeMo 24.05", "nemo-2024"),
        ("NeMo 25.04.rc2", "nemo-2025"),
        ("NeMo 25.04 (llm.pretrain)", "megatron"),
        ("NeMo 25.09", "megatron-bridge"),
        ("LitGPT 8641822 (2023-10)", "litgpt-2024"),
        ("LitGPT", "litgpt"),
    ],
)
def test_a_row_of_anyone_that_names_a_release_runs_its_stack(name: str, stack: str) -> None:
    """What the package knows of frameworks has their releases, whoever ran them."""
    assert framework_of(read("frameworks.toml"), name, {"device": "a100-sxm-80gb"}).stack == stack


def test_adjustments_set_fields_that_stacks_have() -> None:
    """What cells change is a field of a stack, or of its settings, of the type that the field has."""
    stack = find_stack("megatron")
    assert {f.name for f in fields(Stack)} >= {name for one in TABLE["adjustment"] for name in one.get("sets", {})}
    for one in TABLE["adjustment"]:
        for table, values in ((stack, one.get("sets", {})), (stack.settings, one.get("settings", {}))):
            assert all(type(getattr(table, name)) is type(value) for name, value in values.items())


def test_every_entry_has_a_source() -> None:
    """Whatever is known of a framework is cited."""
    entries = [*TABLE["framework"], *TABLE["variant"], *TABLE["adjustment"], *TABLE["habit"].values()]
    assert all(one["source"] for one in [*entries, TABLE["recompute_recipe"]])


@pytest.mark.parametrize(
    ("stack", "row", "experts", "runs"),
    [
        ("fsdp2", {"notes": "torch.compile"}, "none", "fsdp2-compiled-loss"),
        ("fsdp2-2024", {"notes": "compile"}, "none", "fsdp2-compiled"),
        ("fsdp2", {"notes": "compile, Async TP"}, "none", "fsdp2-async-tp"),
        ("megatron", {"attention_kernel": "unfused"}, "none", "megatron-scores"),
        ("megatron-2021", {"attention_kernel": "unfused"}, "none", "megatron-2021"),
        ("megatron-scores", {"attention_kernel": "flash"}, "none", "megatron"),
        ("automodel", {}, "none", "automodel-dense"),
        ("automodel", {"notes": "lora_targets=q; torch.compile"}, "none", "automodel-compiled"),
        ("automodel", {}, "gated", "automodel"),
        ("pytorch", {"notes": "autocast; torch.compile"}, "none", "pytorch-compiled"),
        ("pytorch", {"notes": "autocast; eager"}, "none", "pytorch"),
        ("megatron-bridge-2606", {}, "ungated", "megatron-bridge"),
    ],
)
def test_cells_tell_the_variant_of_a_stack(stack: str, row: dict[str, str], experts: str, runs: str) -> None:
    """Compilation, the kernel of attention and the kind of model decide which of its stacks a framework runs."""
    assert variant_of(TABLE, stack, row, experts) == runs


@pytest.mark.parametrize(
    ("stack", "row", "field", "value"),
    [
        ("megatron", {"notes": "fused cross entropy", "framework": "Megatron-LM + TE"}, "loss",
         "vocab-parallel-in-place"),
        ("megatron", {"notes": "fused cross entropy"}, "loss", "vocab-parallel-compiled"),
        ("fsdp2", {"notes": "chunked cross-entropy"}, "loss", "chunked"),
        ("pytorch", {"attention_kernel": "unfused"}, "attention", "eager"),
        ("pytorch-compiled", {"attention_kernel": "unfused"}, "attention", "scores"),
        ("trl-2025", {"attention_kernel": "unfused"}, "attention", "eager"),
        ("llama-factory-2024", {"attention_kernel": "unfused"}, "attention", "eager"),
        ("deepspeed-2023", {"attention_kernel": "unfused"}, "attention", "eager"),
        ("trl-2024", {"framework": "TRL 0.4.4 / transformers 4.31.0"}, "attention", "eager"),
        ("transformers-2024", {"framework": "transformers 4.35.2", "attention_kernel": "flash"}, "attention", "flash"),
        ("transformers-2024", {"framework": "transformers 4.36.2"}, "attention", "flash"),
        ("pytorch", {"framework": "plain PyTorch 2.1 DDP"}, "attention_kernel", "flash-1"),
        ("pytorch-compiled", {"framework": "plain PyTorch 2.4 DDP"}, "attention_kernel", "flash-2"),
        ("pytorch", {"framework": "plain PyTorch 2.11 DDP"}, "attention_kernel", "cudnn-9.19"),
        ("pytorch-compiled", {"framework": "lightning-thunder benchmark (plain PyTorch)"}, "loss", "eager"),
        ("fsdp2-compiled-loss", {"notes": "chunked loss"}, "loss", "compiled"),
        ("megatron", {"notes": "dispatcher HybridEP"}, "dispatch", "deduplicated"),
        ("megatron-bridge-2606", {"model": "deepseek-v4-flash"}, "overlap_experts", "never"),
        ("megatron", {"notes": "DeepEP", "framework": "Megatron-Core 2026-06"}, "dispatch", "deepep-1"),
        ("fsdp2", {"notes": "DeepEP", "framework": "torchtitan (2025-11)"}, "dispatch", "deepep-1"),
        ("fsdp2", {"notes": "DeepEP", "framework": "torchtitan (2026-09)"}, "dispatch", "deduplicated"),
        ("automodel", {"notes": "TE + DeepEP; fake balanced gate"}, "dispatch", "in-turn"),
        ("torchtitan-2026", {"framework": "torchtitan (2026-05)"}, "attention_kernel", ""),
        ("torchtitan-2026", {"framework": "torchtitan (2026-06)"}, "attention_kernel", "flash-2"),
        ("torchtitan-2026", {"framework": "torchtitan (2026-06)"}, "experts", "indexed"),
        ("torchtitan-2026-compiled", {"framework": "torchtitan (2026-06)"}, "experts", "grouped-mm"),
        ("torchtitan-2026", {"notes": "MinimalAsyncEP"}, "experts", "grouped-mm"),
        ("fsdp2", {"framework": "torchtitan SimpleFSDP 2025-11"}, "apart_pools", False),
        ("fsdp2", {"framework": "torchtitan 2025-11"}, "apart_pools", True),
        ("torchtitan-2026", {"framework": "torchtitan 2026-06 GraphTrainer"}, "apart_pools", False),
        ("megatron", {"notes": "tp-comm-overlap"}, "overlap_tensor", True),
        ("megatron-2021", {"framework": "Megatron-LM 8aa4619 (2021)"}, "scattered_sends", False),
        ("megatron-2021", {"framework": "Megatron-LM (2021-01)"}, "scattered_sends", False),
        ("megatron-2021", {"framework": "Megatron-LM (2021-08)"}, "scattered_sends", True),
        ("megatron-2021", {"framework": "Megatron-LM (2021)"}, "scattered_sends", True),
        ("megatron", {"notes": "1F1B overlap"}, "overlap_experts", "always"),
        ("transformers", {"framework": "HF peft / torch 2.7.1+cu126"}, "attention_kernel", "flash-2"),
        ("transformers", {"framework": "HF peft / torch 2.10.0+cu128"}, "attention_kernel", "flash-2"),
        ("transformers", {"framework": "HF peft / torch 2.13.0+cu130"}, "attention_kernel", "cudnn-9.19"),
        ("pytorch", {"notes": "flash_attention_2"}, "attention_kernel", "flash-2"),
        ("transformers", {"notes": "FlashAttention-3"}, "attention_kernel", ""),
        ("ms-swift", {"notes": "packed; liger"}, "loss", "fused-linear"),
        ("trl-2024", {"framework": "TRL 0.11.4 / transformers 4.45.2"}, "loss", "eager-copied"),
        ("trl-2024", {"framework": "TRL 0.13.0 / transformers 4.48.1"}, "loss", "eager-held"),
        ("trl-2024", {"framework": "TRL 0.15.0 / transformers 4.49.0"}, "loss", "eager"),
        ("deepspeed-2025", {"framework": "transformers 4.34 + DeepSpeed 0.11.1"}, "loss", "eager-copied"),
        ("deepspeed-2025", {"framework": "transformers 4.46.1 + DeepSpeed"}, "loss", "eager-held"),
        ("deepspeed-2025", {"framework": "transformers 4.52 + DeepSpeed"}, "loss", "eager"),
        ("deepspeed-2025", {"framework": "transformers 4.45", "notes": "liger"}, "loss", "fused-linear"),
        ("trl-2024", {"notes": "liger", "framework": "transformers 4.45.2"}, "loss", "fused-linear"),
        ("trl-2024", {"notes": "fast_loss fused_ce_liger", "framework": "transformers 4.45.2"}, "loss", "fused-linear"),
        ("trl-2024", {"notes": "fast_loss fused_ce_liger"}, "loss_brings_layers", False),
        ("trl-2024", {"notes": "fused_lora"}, "adapter_kernels", "sft"),
        ("trl-2024", {"framework": "HF TRL 0.4.4 / transformers 4.31.0"}, "narrow_rest_bytes", 4.0),
        ("trl-2024", {"framework": "HF TRL 0.11.4 / transformers 4.45.2"}, "narrow_rest_bytes", 0.0),
        ("trl-2024", {"framework": "HF TRL 0.7.5 / transformers 4.36.2"}, "narrow_rest_bytes", 0.0),
        ("transformers", {"notes": "liger", "model": "gpt-oss-20b"}, "activation", "eager"),
        ("trl-2024", {"sharding": "fsdp"}, "narrow_norm_bytes", 0.0),
        ("trl-2024", {"notes": "no prepare_model_for_kbit_training"}, "narrow_norm_bytes", 0.0),
        ("fsdp-2024", {"framework": "FSDP1 around transformers 4.33"}, "answer", "held"),
        ("fsdp-2024", {"framework": "llama-recipes (transformers 4)", "notes": "loss alone held"}, "answer", "cache"),
        ("fsdp-2024", {"framework": "HF transformers 4.40 + FSDP"}, "answer", "logits"),
        ("megatron-bridge", {**_LORA, "cp": "1"}, "attention_kernel", "fp8"),
        ("megatron-bridge", {**_LORA, "cp": "2"}, "attention_kernel", ""),
    ],
)  # fmt: skip
def test_cells_change_what_a_stack_does(stack: str, row: dict[str, str], field: str, value: object) -> None:
    """Notes name kernels and messages; the stack has them, and is otherwise the same."""
    assert getattr(adjusted(TABLE, find_stack(stack), row), field) == value
    assert adjusted(TABLE, find_stack(stack), {}) == find_stack(stack)


@pytest.mark.parametrize(
    ("framework", "notes", "each"),
    [
        ("axolotl (2025-08)", "FSDP2; cut cross entropy", True),
        ("HF TRL 0.21 / accelerate 1.10.0", "fsdp2", True),
        ("HF TRL 0.24 / accelerate 1.11.0", "fsdp2", False),
        ("axolotl (2026-08)", "FSDP2", False),
        ("axolotl (2025-08)", "FSDP1", False),
    ],
)
def test_accelerate_reduced_every_micro_batch_of_fsdp2_until_its_1_11(framework: str, notes: str, each: bool) -> None:
    """Pull 3762 (2025-09) holds whole gradients until the last micro-batch, as FSDP1 did before."""
    row = {"framework": framework, "notes": notes}
    for stack in ("axolotl", "trl-2025"):
        assert adjusted(TABLE, find_stack(stack), row).settings.sync_each_batch is each


def test_notes_say_what_the_user_set() -> None:
    """Recompute by operator and updates within the backward pass are settings of any stack."""
    row = {"recompute": "selective", "recompute_detail": "per-op SAC", "notes": "optimizer in backward"}
    settings = adjusted(TABLE, find_stack("fsdp2"), row).settings
    assert (settings.checkpoint_policy, settings.updates_in_backward) == ("second-matmuls", True)
    stored = [
        adjusted(TABLE, find_stack("megatron-bridge"), {"compute_dtype": word}).settings for word in ("fp8", "mxfp8")
    ]
    assert [(s.fp8_recipe, s.fp8_param_gather) for s in stored] == [("", True), ("mxfp8", True)]
    row = {"compute_dtype": "fp8", "notes": "torch.compile; float8 all-gather"}
    assert adjusted(TABLE, find_stack("fsdp2-compiled"), row).settings.fp8_param_gather
    assert not adjusted(TABLE, find_stack("fsdp2-compiled"), {**row, "notes": ""}).settings.fp8_param_gather


def test_habits_belong_to_old_frameworks() -> None:
    """Dropout is on by default before Megatron-Core, 16-bit gradients are those of five frameworks."""
    assert [has_default(TABLE, name, "dropout") for name in ("megatron-2021", "megatron-scores", "megatron")] == [
        True,
        True,
        False,
    ]
    assert {name for name in stack_names() if has_default(TABLE, name, "narrow_gradients")} == {
        "megatron-2021",
        "megatron-deepspeed",
        "oneflow",
        "internevo",
        "deepspeed",
        "deepspeed-2025",
        "deepspeed-2023",
    }


@pytest.mark.parametrize(
    ("name", "device", "stack"),
    [
        ("Megatron-LM", "a100-sxm-80gb", "megatron-scores"),
        ("Megatron", "v100-sxm-32gb", "megatron-scores"),
        ("Megatron-LM", "rtx-3090", "megatron-scores"),
        ("Megatron-LM", "h100-sxm-80gb", "megatron"),
        ("Megatron-LM", "rtx-4090", "megatron"),
        ("Megatron-LM (2022)", "h100-sxm-80gb", "megatron-scores"),
        ("Megatron-LM v0.12", "a100-sxm-80gb", "megatron"),
    ],
)
def test_a_name_without_a_release_is_as_old_as_its_device(name: str, device: str, stack: str) -> None:
    """Megatron-LM without a date is that of whole scores on devices from before 2023 alone."""
    assert framework_of(TABLE, name, {"device": device}).stack == stack


def test_an_unknown_framework_is_not_known() -> None:
    """The entry for all others has no stack of its own."""
    found = framework_of(TABLE, "my own trainer", {})
    assert (found.known, found.stack) == (False, "")


@pytest.mark.parametrize(
    ("stack", "dtype", "expected"),
    [
        ("megatron-2021", "fp16", "fp16-grads16"),
        ("oneflow", "fp16", "fp16-grads16"),
        ("megatron-2021", "bf16", ""),
        ("deepspeed", "fp16", "fp16-grads16"),
        ("deepspeed", "bf16", "bf16-grads16"),
        ("megatron-scores", "fp16", "fp16"),
    ],
)
def test_gradients_of_fp16_stay_narrow_where_nobody_asked_for_fp32(stack: str, dtype: str, expected: str) -> None:
    """Megatron-LM of 2021 adds up and reduces gradients in fp16, and in fp32 under bf16; later ones in fp32."""
    assert precision_of(Record({"compute_dtype": dtype}), stack, {"fp16", "bf16"}, TABLE) == expected
