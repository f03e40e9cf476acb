"""Heads that share keys where PyTorch has no fused kernel for them: what runs, what it keeps, and what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import run
from ops.helpers import layout
from shardwise import Cluster, Plan, Training, TrainingOptions, TrainReport, load_model, train
from shardwise.ledger.flow import flow
from shardwise.ops.attention import attention_masks, repeated
from shardwise.ops.block import block_ops
from shardwise.ops.core import AttentionCore, AttentionMask
from shardwise.ops.core_kernels import attention_core, lacks_kernel, without_sdpa
from shardwise.plans import find_stack, with_attention
from shardwise.records import replace
from shardwise.training import TrainingCase, stated

DATA = Path(__file__).parents[1] / "data/tuning"
RUNS: list[dict[str, Any]] = json.loads((DATA / "sdpa_math.json").read_text(encoding="utf-8"))["runs"]
MASKED: list[dict[str, Any]] = json.loads((DATA / "sdpa_masks.json").read_text(encoding="utf-8"))["runs"]


def _core(heads: int = 8, kv_heads: int = 2, width: int = 64, **more: Any) -> AttentionCore[Any]:
    sizes = {"heads": heads, "kv_heads": kv_heads, "key_dim": width, "value_dim": width, "repeats": heads // kv_heads}
    return AttentionCore(**{**sizes, **more})


def _ops(y: Any, core: AttentionCore[Any]) -> tuple[Any, ...]:
    inputs = tuple(y.activation(f"attention.{name}", 1, "attention") for name in ("queries", "keys", "values"))
    return attention_core(y, core, inputs)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['heads']}-{run['kv_heads']}-{run['key_dim']}")
def test_steps_keep_what_torch_keeps(run: dict[str, Any]) -> None:
    """The operands in fp32, repeated, and the softmax: to the byte as saved-tensor hooks of torch 2.13.0 saw them."""
    work = {"B": run["sequences"], "S": run["tokens"], "widest_group": 0}
    y = layout({**work, "activation_bytes": 4 if run["dtype"] == "float32" else 2}, "agilerl")
    core = _core(run["heads"], run["kv_heads"], run["key_dim"], value_dim=run["value_dim"])
    kept = {tensor.name: tensor.size_bytes for op in _ops(y, core) for tensor in op.saves}
    assert sum(kept.values()) == run["saved_bytes"]


@pytest.mark.parametrize("run", MASKED, ids=lambda run: f"{run['path']}-{run['heads']}-{run['tokens']}-{run['dtype']}")
def test_windows_and_sinks_keep_what_transformers_keeps(run: dict[str, Any]) -> None:
    """The mask of each layer and repeated keys and values, or a softmax with its sinks, to the byte of the hooks."""
    tokens, heads, kv, dim = run["tokens"], run["heads"], run["kv_heads"], run["head_dim"]
    wide = 4 if run["dtype"] == "float32" else 2
    work = {"B": run["sequences"], "S": tokens, "activation_bytes": wide, "dtype": "tf32" if wide == 4 else "bf16"}
    limits = {"mask": AttentionMask(window=run["window"])} if run["path"] == "sdpa" else {"sinks": True}
    core = _core(heads, kv, dim, **limits)
    y = without_sdpa(layout(work, "transformers"), core)
    assert y.stack.attention == ("flash" if run["path"] == "sdpa" else "eager")
    sizes = {"queries": heads * dim, "keys": kv * dim, "values": kv * dim}
    inputs = tuple(y.activation(f"attention.{name}", size, "attention") for name, size in sizes.items())
    copies, read = repeated(y, core, inputs) if kv > 1 else ((), inputs)
    kept = {tensor.name: tensor.size_bytes for op in (*copies, *attention_core(y, core, read)) for tensor in op.saves}
    assert sum(kept.values()) == run["saved_bytes"]


def test_a_window_of_sdpa_computes_all_pairs_once_it_is_reached() -> None:
    """Below the window SDPA is causal, from it on it runs the square; model FLOPs are those of the window."""
    core = _core(mask=AttentionMask(window=64))

    def flops(tokens: int, stack: str) -> tuple[float, float]:
        ops = _ops(layout({"S": tokens}, stack), core)
        return sum(op.flops for op in ops), sum(op.model_flops for op in ops)

    assert flops(63, "transformers") == flops(63, "axolotl")
    for tokens in (64, 512):
        whole = _ops(layout({"S": tokens}, "axolotl"), _core(mask=AttentionMask(causal=False)))
        assert flops(tokens, "transformers") == (sum(op.flops for op in whole), flops(tokens, "axolotl")[1])


@pytest.mark.parametrize(
    ("stack", "widest", "core", "expected"),
    [
        ("transformers", 0, _core(), True),
        ("transformers", 256, _core(), False),
        ("transformers", 256, _core(width=512), False),
        ("transformers", 0, _core(width=512), False),
        ("agilerl", 256, _core(width=512), True),
        ("agilerl", 256, _core(width=256), False),
        ("transformers", 0, _core(kv_heads=8), False),
        ("transformers", 0, _core(mask=AttentionMask(window=16)), False),
        ("unsloth", 0, _core(), False),
        ("transformers-2024", 0, _core(), False),
        ("megatron", 0, _core(width=512), False),
    ],
)
def test_groups_without_a_kernel_run_in_steps(
    stack: str, widest: int, core: AttentionCore[Any], expected: bool
) -> None:
    """Only heads that share keys, without a window, of a framework that leaves them to PyTorch."""
    y = layout({"widest_group": widest}, stack)
    assert lacks_kernel(y, core) is expected
    assert ("attention.softmax" in {op.name for op in _ops(y, core)}) is expected


def test_steps_count_no_more_model_flops_than_the_kernel() -> None:
    """The whole square is computed, twice what a causal mask leaves, and counts as model FLOPs no more than that."""
    steps, kernel = (_ops(layout({"S": 512, "widest_group": n}, "transformers"), _core()) for n in (0, 256))
    assert sum(op.model_flops for op in steps) == pytest.approx(sum(op.model_flops for op in kernel))
    assert sum(op.flops for op in steps) == pytest.approx(2 * sum(op.flops for op in kernel), rel=0.01)


def test_steps_keep_nothing_where_nothing_needs_a_gradient() -> None:
    """Frozen layers before the first that trains keep neither scores nor copies."""
    found = flow(_ops(layout({"widest_group": 0}, "transformers"), _core()), entry=False)
    assert not [tensor for op in found.ops for tensor in op.saves]


@pytest.mark.parametrize(
    ("device", "expected"),
    [("t4", 0), ("v100-sxm-32gb", 0), ("p100-pcie-16gb", 0), ("a100-sxm-80gb", 256), ("jetson-agx-orin", 256),
     ("l4", 256), ("h100-sxm-80gb", 256), ("mi300x", 256)],
)  # fmt: skip
def test_groups_have_a_kernel_since_compute_capability_8(device: str, expected: int) -> None:
    """FlashAttention runs on NVIDIA's devices from Ampere on; other makers' kernels are their own."""
    job, cluster = Training(seq_len=64, global_batch=1), Cluster.parse(device)
    case = TrainingCase(
        model=load_model("gpt2"), cluster=cluster, job=job, stack=find_stack("transformers"), plan=Plan()
    )
    assert case.widest_group == expected


def _report(device: str, stack: str, precision: str = "amp-fp16") -> TrainReport:
    job = Training(seq_len=2048, global_batch=1, adapter="lora", precision=precision)
    plan = Plan(micro_batch=1, recompute="full")
    return train(load_model("qwen2.5-1.5b"), Cluster.parse(device), plan, job, TrainingOptions(stack=stack))


def test_a_card_before_flash_attention_keeps_scores_under_transformers() -> None:
    """T4 runs shared heads in steps under transformers 5, says so, and takes longer; Unsloth's kernels take them."""
    steps, before = _report("1xt4", "transformers"), _report("1xt4", "transformers-2024")
    assert any(note.startswith("attention in steps") and "t4" in note for note in stated(steps.case))
    assert not any(note.startswith("attention") for note in stated(before.case))
    scores = 12 * 2048**2
    gained = steps.evaluation.memory[0].moments["backward"] - before.evaluation.memory[0].moments["backward"]
    assert 10 * scores < gained < 13 * scores
    assert steps.step_seconds > before.step_seconds
    assert not any(note.startswith("attention") for note in stated(_report("1xt4", "unsloth").case))


def test_fp32_on_a_gpu_says_what_its_attention_may_hold() -> None:
    """Whole steps in fp32 were recorded on a CPU, whose fused kernel takes what no GPU's does."""
    said = [
        note for note in stated(_report("1xa100-sxm-80gb", "transformers", "fp32").case) if note.startswith("attention")
    ]
    assert said == [
        "attention fused: in fp32 PyTorch has no kernel for heads that share keys on a GPU, and a batch without "
        "padding holds 13 bytes a score of a layer more"
    ]


ASKED = (
    "train", "--on", "h100-sxm-80gb", "--seq-len", "4096", "--global-batch", "1", "--micro-batch", "1", "--adapter",
    "lora", "--rank", "16",
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "stack", "word", "said"),
    [
        ("gpt-oss-20b", "trl", "", "SDPA has no sinks"),
        ("gpt-oss-20b", "trl", "flash_attention_3", ""),
        ("gpt-oss-20b", "axolotl", "", ""),
        ("gpt-oss-20b", "axolotl", "sdpa", "SDPA has no sinks"),
        ("gpt-oss-20b", "llama-factory", "", ""),
        ("gemma-2-9b", "llama-factory", "", "SDPA has no capped scores"),
        ("gemma-3-12b", "ms-swift", "", "windows of 1024 tokens are masks to SDPA"),
        ("gemma-3-12b", "ms-swift", "flex_attention", ""),
        ("llama-3.1-8b", "trl", "", ""),
    ],
)
def test_what_transformers_makes_of_a_models_attention_is_said(model: str, stack: str, word: str, said: str) -> None:
    """It runs eager what SDPA lacks and makes masks of windows, unless another attention is named."""
    named = ("--attn-implementation", word) if word else ()
    done = run(*ASKED, "--model", model, "--stack", stack, *named, "--json")
    notes = json.loads(done.out)["assumptions"]
    found = [note for note in notes if "SDPA has" in note or "to SDPA" in note]
    assert [said in note for note in found] == [True] * bool(said)


@pytest.mark.parametrize(
    ("model", "device", "word"),
    [
        ("gpt-oss-20b", "h100-sxm-80gb", "flash_attention_3"),
        ("gpt-oss-20b", "a100-sxm-80gb", "flex_attention"),
        ("gemma-2-9b", "a100-sxm-80gb", "flash_attention_2"),
    ],
)
def test_the_attention_that_is_advised_runs_on_the_device(model: str, device: str, word: str) -> None:
    """Sinks are in the flash kernel of Hopper alone; capped scores in FlashAttention-2 of all."""
    asked = [device if word == "h100-sxm-80gb" else word for word in ASKED]
    done = run(*asked, "--model", model, "--stack", "trl", "--json")
    notes = [note for note in json.loads(done.out)["assumptions"] if "SDPA has" in note]
    assert [f"--attn-implementation {word} keeps no scores" in note for note in notes] == [True]


@pytest.mark.parametrize(
    ("stack", "word", "said"),
    [
        ("transformers", "", "Hugging Face transformers, SDPA attention"),
        ("transformers", "flash_attention_2", "Hugging Face transformers, flash_attention_2"),
        ("transformers-eager", "sdpa", "Hugging Face transformers, sdpa"),
        ("deepspeed", "flex_attention", "DeepSpeed ZeRO with transformers, flex_attention"),
        ("trl", "flash_attention_3", "TRL's trainers, flash_attention_3"),
    ],
)
def test_a_stack_is_named_with_the_attention_that_runs(stack: str, word: str, said: str) -> None:
    """Its title names the usual one, in whose place another is."""
    named = ("--attn-implementation", word) if word else ()
    done = run(*ASKED, "--model", "llama-3.1-8b", "--stack", stack, *named, "--json")
    assert f"stack {stack}: {said}" in json.loads(done.out)["assumptions"]


def test_llama_factory_loads_a_kernel_that_takes_sinks() -> None:
    """All layers of gpt-oss, full or with a window, keep no scores and no mask, as with FlashAttention-3 named."""
    model, sizes = load_model("gpt-oss-20b"), {"B": 1, "S": 4096}
    own = layout(sizes, "llama-factory")
    named = replace(own, choices=replace(own.choices, stack=with_attention(own.stack, "flash_attention_3")))
    assert attention_masks(own, model) == attention_masks(named, model) == 0
    for block in model.kinds:
        saved = [sum(t.size_bytes for op in block_ops(y, block, model.hidden) for t in op.saves) for y in (own, named)]
        assert saved[0] == saved[1]


def test_attention_is_chosen_around_models_of_transformers() -> None:
    """Megatron-Core has no such setting; the refusal says which framework has."""
    done = run(*ASKED, "--model", "gpt2", "--stack", "megatron", "--attn-implementation", "sdpa")
    assert done.status == 2
    assert "attn_implementation = 'sdpa'" in done.err and "--stack trl" in done.err
