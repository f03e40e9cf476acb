"""Experts beside weights of 4 bits: linear layers that bitsandbytes stores, or parameters that it passes over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line import run
from shardwise import Plan, Training
from shardwise.formats import ImportContext, import_file
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.ops.blocks import block_ops
from shardwise.ops.count import trainable_parameters
from shardwise.plans import find_stack, tuning_of, with_attention
from shardwise.training import TrainingOptions, TrainReport, train

# Layers x experts x three matrices.
EXPERTS = {"qwen3-30b-a3b": 48 * 128 * 3 * 2048 * 768, "gpt-oss-20b": 24 * 32 * 3 * 2880 * 2880}


def tuned(model: str, stack: str, base: str = "nf4") -> TrainReport:
    """Return QLoRA of a model under a framework."""
    job = Training(seq_len=2048, global_batch=1, adapter="lora", rank=8, targets=("q", "v"), base=base)
    plan = Plan(micro_batch=1, recompute="full", sequence_parallel=False)
    return train(load_model(model), Cluster.parse("1xh200-sxm"), plan, job, TrainingOptions(stack=stack))


@pytest.mark.parametrize("model", EXPERTS)
@pytest.mark.parametrize(("stack", "each"), [("transformers", 4), ("llama-factory", 2), ("unsloth", 0.5625)])
def test_parameters_of_three_dimensions_stay_as_wide_as_they_are_loaded(model: str, stack: str, each: float) -> None:
    """Only linear layers are replaced (transformers 5); peft makes fp32 of the rest, Unsloth patches it."""
    rest = {"transformers": 4, "llama-factory": 2, "unsloth": 2}[stack]
    whole = load_model(model)
    experts = EXPERTS[model]
    weights = tuned(model, stack).memory.weights
    # Embedding and head, and beside them attention in 4 bits, biases, norms and routers.
    tables = rest * whole.vocab * whole.hidden * 2
    assert experts * each < weights - tables < experts * each + 1.6e9


def test_experts_that_are_linear_layers_are_stored_in_four_bits() -> None:
    """Before transformers 5 all experts were; Llama 4's become so (quantizers/base.py SequentialLlama4TextExperts)."""
    assert tuned("qwen3-30b-a3b", "transformers-2024").memory.weights < 21e9
    scout = tuned("llama-4-scout", "transformers").memory.weights
    assert scout < 0.6 * 109e9 + 4 * 2 * 202048 * 5120


def test_experts_in_a_loop_of_python_are_widened_one_at_a_time() -> None:
    """Beside an expert's own gradients there are 16 bits of one of its matrices, not of those of all experts."""
    report = tuned("mixtral-8x7b", "transformers-2024")
    rows, width, hidden = 2 * 2048, 14336, 4096
    (up,) = [op for op in block_ops(report.evaluation.layout, report.case.model.layers[0], hidden) if op.role == "up"]
    assert up.transient_bytes == 2 * rows * 2 * width / 8 + 2 * hidden * width


def test_what_is_passed_over_is_said_with_a_framework_that_does_not(tmp_path: Path) -> None:
    """The answer names how wide experts are, and axolotl's switch stores them in 4 bits."""
    words = " ".join(tuned("qwen3-30b-a3b", "transformers").assumptions)
    assert "experts in fp32" in words
    assert "--stack unsloth" in words
    assert "experts in" not in " ".join(tuned("qwen3-8b", "transformers").assumptions)
    text = "base_model: Qwen/Qwen3-30B-A3B\nadapter: qlora\nload_in_4bit: true\nlora_target_modules: [q_proj]\n"
    narrow = []
    for more in ("", "quantize_moe_experts: true\n"):
        (tmp_path / "a.yaml").write_text(text + more, encoding="utf-8")
        narrow.append(import_file(tmp_path / "a.yaml", around=ImportContext(num_devices=1)).stack.settings)
    assert [one.quantize_moe_experts for one in narrow] == [False, True]


def test_a_fine_tune_whose_experts_stay_wide_is_led_to_a_framework_that_stores_them() -> None:
    """Where experts beside 4 bits are too much, weights of 16 bits and Unsloth are proposed, and hold what is said."""
    ask = ("train", "gpt-oss-20b", "--on", "l40s", "--seq-len", "2048", "--micro-batch", "1", "--json")
    rows = run(*ask, "--qlora").tree["proposals"]
    wide, narrow = (next(row for row in rows if word in row["flags"]) for word in ("--base bf16", "--stack unsloth"))
    for row, words in ((wide, ["--adapter", "lora"]), (narrow, ["--qlora"])):
        assert run(*ask, *words, *row["flags"].split()).tree["device_bytes"] == row["device_bytes"]


def test_experts_that_axolotl_prepares_are_fp32_but_where_weights_are_sharded() -> None:
    """Peft casts all that is not in 4 bits, axolotl norms and embeddings alone back, and neither runs under FSDP."""
    model, job = load_model("qwen3-30b-a3b"), Training(seq_len=64, global_batch=2, adapter="lora", base="nf4")
    weights = []
    for sharding in ("none", "fsdp"):
        plan = Plan(micro_batch=1, dp=2, sharding=sharding, sequence_parallel=False)
        report = train(model, Cluster.parse("2xb300"), plan, job, TrainingOptions(stack="axolotl"))
        weights.append(report.memory.weights)
        assert any(("fp32" if sharding == "none" else "16 bits") in note for note in report.assumptions)
    assert weights[0] > 4 * EXPERTS["qwen3-30b-a3b"] and weights[1] < 1.1 * EXPERTS["qwen3-30b-a3b"]


@pytest.mark.parametrize(("stack", "wide"), [("trl", True), ("llama-factory", True), ("transformers-2025", False)])
def test_experts_in_fp32_run_off_the_matrix_units_under_autocast(stack: str, wide: bool) -> None:
    """Grouped GEMMs of parameters are no operators of autocast; modules of transformers 4 are linear layers."""
    model, plan = load_model("olmoe-1b-7b"), Plan(micro_batch=8, recompute="full", sequence_parallel=False)

    def ran(precision: str) -> TrainReport:
        job = Training(seq_len=2048, global_batch=8, precision=precision)
        return train(model, Cluster.parse("1xh200"), plan, job, TrainingOptions(stack=stack))

    narrow, cast = ran("bf16-pure"), ran("amp-bf16")
    # Eight experts of three GEMMs a token, four passes with recomputation, at the 67 TFLOP/s of fp32 at most.
    least = 4 * 2 * 16 * 8 * 3 * 2048 * 1024 * 8 * 2048 / 67e12
    assert (cast.step_seconds > least) is wide
    assert wide or cast.step_seconds < 1.1 * narrow.step_seconds
    assert any("experts run in fp32" in note for note in cast.assumptions) is wide
    assert not any("experts run in fp32" in note for note in narrow.assumptions)


R, LAYERS, E, D, F, HEADS, KV = 16, 48, 128, 2048, 768, 32 * 128, 4 * 128
ATTENTION = LAYERS * R * ((D + HEADS) + 2 * (D + KV) + (HEADS + D))
ROUTERS = LAYERS * R * (D + E)
JOINT = LAYERS * E * R * ((D + 2 * F) + (F + D))
APART = LAYERS * E * R * 3 * (D + F)
CONVERTED = LAYERS * E * R * (2 * (D + 2 * F) + (F + D))
REACHED = {
    "transformers": ATTENTION + CONVERTED + ROUTERS,
    "trl": ATTENTION + CONVERTED + ROUTERS,
    "transformers-2025": ATTENTION + APART + ROUTERS,
    "unsloth": ATTENTION + JOINT,
    "megatron-bridge": JOINT + LAYERS * R * ((D + HEADS + 2 * KV) + (HEADS + D)),
    "axolotl": ATTENTION,
    "ms-swift": ATTENTION,
    "llama-factory": ATTENTION,
}


@pytest.mark.parametrize("stack", REACHED)
def test_all_linear_layers_are_what_each_framework_finds(stack: str) -> None:
    """LoRA of Qwen3-30B-A3B, counted by hand: experts by name, by parameter, one by one, grouped, or not at all."""
    job = Training(seq_len=1, global_batch=1, adapter="lora", rank=R)
    tuning = tuning_of(job, find_stack(stack), "qwen3_moe")
    assert tuning is not None
    assert sum(trainable_parameters(load_model("qwen3-30b-a3b"), tuning).values()) == REACHED[stack]


@pytest.mark.parametrize("stack", ["transformers", "transformers-2025", "unsloth", "megatron-bridge", "axolotl"])
def test_adapters_hold_as_many_bytes_as_parameters_are_said_to_train(stack: str) -> None:
    """What the answer counts is what the device holds, in each way of adapting experts."""
    model, plan = load_model("qwen3-30b-a3b"), Plan(micro_batch=1, sequence_parallel=False)

    def weights(*targets: str) -> tuple[float, float]:
        job = Training(seq_len=64, global_batch=1, adapter="lora", rank=R, targets=targets)
        report = train(model, Cluster.parse("1xb300"), plan, job, TrainingOptions(stack=stack))
        assert report.tuning is not None
        return report.memory.weights, report.tuning.adapter_bytes

    (whole, all_bytes), (few, few_bytes) = weights("all-linear"), weights("q")
    assert whole - few == pytest.approx(all_bytes - few_bytes, rel=1e-9)


def test_names_of_other_feed_forwards_reach_experts_where_peft_converts_them() -> None:
    """A list of DeepSeek's linear layers has gate_proj of shared experts, which peft takes for the routed ones'."""
    model, job = load_model("deepseek-v2-lite"), Training(seq_len=1, global_batch=1, adapter="lora", rank=R)
    counts = {}
    for stack in ("axolotl", "llama-factory"):
        tuning = tuning_of(job, find_stack(stack), model.family)
        assert tuning is not None
        counts[stack] = trainable_parameters(model, tuning)
    assert "experts" in counts["axolotl"] and "gate" not in counts["axolotl"]
    assert "experts" not in counts["llama-factory"] and "gate" in counts["llama-factory"]


def test_experts_that_stay_frozen_are_said() -> None:
    """The answer says that all-linear leaves experts out, and what takes them in."""
    ask = ("train", "qwen3-30b-a3b", "--on", "1xh200", "--adapter", "lora", "--seq-len", "512", "--micro-batch", "1")
    said = run(*ask, "--stack", "axolotl", "--json").tree["assumptions"]
    assert any("experts stay frozen" in note and "all-linear,experts" in note for note in said)
    told = run(*ask, "--stack", "axolotl", "--targets", "all-linear,experts", "--json").tree["assumptions"]
    assert not any("experts stay frozen" in note for note in told)
    job = Training(seq_len=1, global_batch=1, adapter="lora", rank=R, targets=("all-linear", "experts"))
    tuning = tuning_of(job, find_stack("axolotl"), "qwen3_moe")
    assert tuning is not None
    assert sum(trainable_parameters(load_model("qwen3-30b-a3b"), tuning).values()) == ATTENTION + JOINT


def test_experts_that_were_parameters_before_transformers_5_stay_wide() -> None:
    """Bitsandbytes passed over those of gpt-oss then too (transformers 4.57.6 GptOssExperts)."""
    assert tuned("gpt-oss-20b", "transformers-2025").memory.weights > 2 * EXPERTS["gpt-oss-20b"]


def seconds(model: str, stack: str, **words: Any) -> float:
    """Return seconds of a step of 4,096 tokens with flash attention, every layer recomputed."""
    job = Training(seq_len=4096, global_batch=1, **words)
    plan = Plan(micro_batch=1, recompute="full", sequence_parallel=False)
    options = TrainingOptions(stack=with_attention(find_stack(stack), "flash_attention_2"))
    return train(load_model(model), Cluster.parse("1xh200-sxm"), plan, job, options).step_seconds


# FLOPs of the experts of 4,096 tokens in one pass: tokens x layers x chosen experts x three matrices.
CHOSEN = {"gpt-oss-20b": 2 * 4096 * 24 * 4 * 3 * 2880**2, "mixtral-8x7b": 2 * 4096 * 32 * 2 * 3 * 4096 * 14336}
FP32_FLOPS = 67e12


def test_experts_in_fp32_run_in_fp32() -> None:
    """PyTorch has no grouped GEMM of fp32 but a loop of plain ones, and autocast leaves it (torch 2.13 F.grouped_mm).

    Forward, recompute and input gradient of QLoRA take what the FP32 units need at least; a full fine-tune has the
    weight gradient beside them. Experts of 16 or of 4 bits take far less, and so do linear layers under autocast.
    """
    bound = {model: flops / FP32_FLOPS for model, flops in CHOSEN.items()}
    tuned = {"adapter": "lora", "targets": ("q", "v")}
    for stack in ("transformers", "trl", "axolotl"):
        assert seconds("gpt-oss-20b", stack, base="nf4", **tuned) > 3 * bound["gpt-oss-20b"]
    for stack, base in (("transformers", "bf16"), ("unsloth", "nf4")):
        assert seconds("gpt-oss-20b", stack, base=base, **tuned) < 2 * bound["gpt-oss-20b"]
    assert seconds("mixtral-8x7b", "trl") > 4 * bound["mixtral-8x7b"]
    for stack, precision in (("trl", "bf16-pure"), ("litgpt", "amp-bf16"), ("transformers-2025", "amp-bf16")):
        assert seconds("mixtral-8x7b", stack, precision=precision) < 2 * bound["mixtral-8x7b"]


def test_an_answer_says_that_experts_run_in_fp32() -> None:
    """The reason of the seconds, and the flag that changes it, which does."""
    ask = ("train", "olmoe-1b-7b", "--on", "h200", "--stack", "trl", "--seq-len", "2048")
    ask = (*ask, "--micro-batch", "1", "--json")
    for words, flags in (((), ["--precision", "bf16-pure"]), (("--qlora",), ["--base", "bf16", "--adapter", "lora"])):
        wide = run(*ask, *words).tree
        assert any("experts run in fp32" in line and " ".join(flags[:2]) in line for line in wide["assumptions"])
        narrow = run(*ask, *flags).tree
        assert not any("experts run in fp32" in line for line in narrow["assumptions"])
        assert narrow["step_seconds"] < wide["step_seconds"]


@pytest.mark.parametrize("deepspeed", ["", "deepspeed: ds.json\n"])
def test_what_a_trainer_lists_it_lists_under_deepspeed_too(deepspeed: str, tmp_path: Path) -> None:
    """LLaMA-Factory names the same layers, whatever runs the model."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}', "utf-8")
    text = "model_name_or_path: Qwen/Qwen3-30B-A3B\nstage: sft\nfinetuning_type: lora\nlora_rank: 16\nbf16: true\n"
    (tmp_path / "lf.yaml").write_text(text + deepspeed, "utf-8")
    case = import_file(tmp_path / "lf.yaml", around=ImportContext(num_devices=8))
    tuning = tuning_of(case.job, case.stack, "qwen3_moe")
    assert tuning is not None
    assert sum(trainable_parameters(load_model("qwen3-30b-a3b"), tuning).values()) == ATTENTION


def test_axolotl_leaves_dropout_out_before_adapters_of_experts(tmp_path: Path) -> None:
    """Peft refuses it; axolotl gives its wrapper of parameters none, and all other layers theirs."""
    text = "base_model: deepseek-ai/DeepSeek-V2-Lite\nadapter: lora\nlora_r: 16\nlora_target_linear: true\n"
    (tmp_path / "a.yaml").write_text(text + "lora_dropout: 0.05\n", encoding="utf-8")
    assert run("train", "--from", str(tmp_path / "a.yaml"), "--on", "1xh200").status == 0
    ask = ("train", "deepseek-v2-lite", "--on", "1xh200", "--adapter", "lora", "--adapter-dropout", "0.05")
    assert "adapter_dropout" in run(*ask, "--seq-len", "512", "--stack", "ms-swift").err


def test_axolotl_quantises_experts_where_it_is_asked() -> None:
    """Its switch stores them in the format of the linear layers; the answer names it, and others have none."""
    ask = ("train", "qwen3-30b-a3b", "--on", "h100", "--qlora", "--seq-len", "1024", "--recompute", "full", "--json")
    wide = run(*ask, "--stack", "axolotl").tree
    assert any("--quantize-moe-experts stores them in nf4-dq too" in line for line in wide["assumptions"])
    stored = run(*ask, "--stack", "axolotl", "--quantize-moe-experts").tree
    assert wide["memory"]["at_peak"]["weights"] > 110e9
    assert stored["memory"]["at_peak"]["weights"] < 18e9
    assert stored["launchable"] and stored["fits"]
    other = run(*ask, "--stack", "trl", "--quantize-moe-experts").tree
    assert [one["field"] for one in other["unlaunched"]] == ["quantize_moe_experts"]


def test_a_file_of_axolotl_sets_what_the_flag_sets(tmp_path: Path) -> None:
    """The switch is read as a setting, and written again."""
    text = (
        "base_model: Qwen/Qwen3-30B-A3B\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_modules: [q_proj]\n"
    )
    (tmp_path / "a.yaml").write_text(text + "quantize_moe_experts: true\nsequence_len: 1024\n", encoding="utf-8")
    case = import_file(tmp_path / "a.yaml", around=ImportContext(num_devices=1))
    assert case.stack.settings.quantize_moe_experts
    ask = ("--from", str(tmp_path / "a.yaml"), "--on", "1xh100")
    assert "quantize_moe_experts: true" in run("export", "axolotl", *ask).out
