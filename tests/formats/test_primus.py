"""Primus' experiments: presets, variables and overrides of Megatron-LM's and torchtitan's words, and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import InputError
from shardwise.formats import ImportContext, Imported, import_file
from shardwise.formats._imported import table
from shardwise.formats.primus import read
from shardwise.models import load_model
from shardwise.ops import count_parameters

HEAD = (
    "work_group: ${PRIMUS_TEAM:amd}\nuser_name: ${PRIMUS_USER:root}\nexp_name: a\nworkspace: ./output\n"
    "modules:\n  pre_trainer:\n    framework: %s\n    config: pre_trainer.yaml\n    model: %s\n    overrides: {%s}\n"
)


def case_of(framework: str, model: str, overrides: str, devices: int = 8, **variables: str) -> Imported:
    """Return the case of an experiment."""
    around = ImportContext(num_devices=devices, variables=variables)
    return read(HEAD % (framework, model, overrides), "exp.yaml", around)


# Preset of Megatron-LM -> the model of the catalogue that has as many parameters.
SAME = {
    "deepseek_r1_distill_qwen_1.5B": "deepseek-r1-distill-qwen-1.5b", "deepseek_v2": "deepseek-v2",
    "deepseek_v2_lite": "deepseek-v2-lite", "deepseek_v3": "deepseek-v3", "kimi_k2": "kimi-k2",
    "llama2_7B": "llama-2-7b", "llama2_70B": "llama-2-70b", "llama3_8B": "llama-3-8b",
    "llama3.1_405B": "llama-3.1-405b", "llama3.3_70B": "llama-3.3-70b", "llama4_17B16E": "llama-4-scout",
    "llama4_17B128E": "llama-4-maverick", "mixtral_8x7B_v0.1": "mixtral-8x7b", "mixtral_8x22B_v0.1": "mixtral-8x22b",
    "qwen3_30B_A3B": "qwen3-30b-a3b", "qwen3_235B_A22B": "qwen3-235b-a22b", "deepseek_v4_flash": "deepseek-v4-flash",
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_preset_has_the_parameters_of_its_model(name: str) -> None:
    """Sizes of configs/models/megatron, through every file that one extends, make the model within 1 in 1,000."""
    model = case_of("megatron", f"{name}.yaml", "expert_model_parallel_size: 1").model
    assert model is not None
    assert count_parameters(model) == pytest.approx(count_parameters(load_model(SAME[name])), rel=1e-3)


def test_every_preset_is_read() -> None:
    """No preset of any framework lacks what a model needs."""
    for framework, kind in (("megatron", "presets"), ("torchtitan", "flavors"), ("maxtext", "maxtext_models")):
        for name in table("primus.toml")[kind]:
            if not name.endswith("_base") and name != "language_model":
                case = case_of(framework, f"{name}.yaml", "", 0)
                known = framework != "torchtitan" or "1B" not in name
                assert (case.model is not None) == known, name


def test_an_experiment_of_experts_means_what_its_launch_has() -> None:
    """AMD-AGI/Primus examples/megatron/configs/MI355X/qwen3_30B_A3B-BF16-pretrain.yaml, in its own words."""
    overrides = (
        "train_iters: 50, micro_batch_size: 8, global_batch_size: 512, seq_length: '${PRIMUS_SEQ_LENGTH:4096}', "
        "max_position_embeddings: 4096, expert_model_parallel_size: '${PRIMUS_EP:8}', overlap_grad_reduce: true, "
        "recompute_granularity: full, recompute_method: block, recompute_num_layers: 5, enable_primus_turbo: true, "
        "use_precision_aware_optimizer: true, main_grads_dtype: bf16, exp_avg_dtype: bf16, exp_avg_sq_dtype: bf16, "
        "use_turbo_deepep: true, turbo_deepep_num_cu: 80, moe_router_dtype: fp32, turbo_sync_free_moe_stage: 1, "
        "use_turbo_grouped_gemm: false, stderr_sink_level: DEBUG, wandb_project: a, save: null"
    )
    case = case_of("megatron", "${PRIMUS_MODEL:qwen3_30B_A3B}.yaml", overrides, PRIMUS_SEQ_LENGTH="2048")
    plan, job = case.plan, case.job
    assert (case.system, case.stack.name, case.stack.dispatch) == ("Primus", "megatron", "deepep-1")
    assert (plan.dp, plan.ep, plan.micro_batch, plan.recompute, plan.recompute_layers) == (8, 8, 8, "full", 5)
    assert (job.seq_len, job.global_batch, job.precision) == (2048, 512, "bf16-grads16-masters16-moments16")
    assert not case.unknown and {one.argument for one in case.ignored} == {"turbo_deepep_num_cu", "moe_router_dtype"}
    assert "stderr_sink_level" in case.silent and "expert_model_parallel_size" in {r.argument for r in case.understood}


def test_an_experiment_of_torchtitan_has_its_words() -> None:
    """Tables of torchtitan stand in the overrides, over Primus' own defaults: compiled, and nothing recomputed."""
    overrides = (
        "training: {local_batch_size: 4, seq_len: 8192, mock_data: false, steps: 50}, metrics: {log_freq: 1}, "
        "primus_turbo: {enable_primus_turbo: true}, sink_level: null, parallelism: {tensor_parallel_degree: 2}"
    )
    case = case_of("torchtitan", "llama3.1_8B-fp8.yaml", overrides)
    assert case.model is not None and case.model.name == "llama-3.1-8b" and not case.unknown
    assert (case.plan.tp, case.plan.dp, case.plan.micro_batch, case.plan.recompute) == (2, 4, 4, "none")
    assert (case.job.precision, case.job.seq_len, case.job.global_batch) == ("fp8-amp", 8192, 16)
    assert case.stack.name == "fsdp2-compiled-loss"
    overrides = "activation_checkpoint: {mode: full}, compile: {enable: false}"
    case = case_of("torchtitan", "llama3.1_8B.yaml", overrides)
    assert (case.plan.recompute, case.stack.name, case.job.precision) == ("full", "fsdp2", "amp-bf16")


def test_an_experiment_of_maxtext_has_its_words() -> None:
    """AMD-AGI/Primus examples/maxtext/configs/MI300X/llama3_70B-bf16-pretrain.yaml, in its own words."""
    overrides = (
        "run_name: a, steps: 50, profiler: '', dataset_type: synthetic, dcn_data_parallelism: -1, "
        "dcn_fsdp_parallelism: 1, ici_fsdp_parallelism: 8, ici_data_parallelism: 1, remat_policy: full, "
        "optimizer_memory_host_offload: true, max_target_length: 8192, per_device_batch_size: 3, sink_level: null"
    )
    case = case_of("maxtext", "llama3_70B.yaml", overrides, 16)
    plan, job = case.plan, case.job
    assert case.model is not None and case.model.name == "llama-3-70b"
    assert (case.system, case.stack.name, case.num_devices, plan.sharding, plan.shard) == (
        "Primus",
        "maxtext",
        16,
        "hsdp",
        8,
    )
    assert (plan.dp, plan.micro_batch, plan.recompute, plan.offload) == (16, 3, "full", ("optimizer",))
    assert (job.seq_len, job.global_batch, job.precision) == (8192, 48, "bf16-pure")
    assert not case.unknown and "dataset_type" in case.silent
    assert case_of("maxtext", "mine.yaml", overrides, 16).model is None


def test_windows_of_its_attention_are_those_of_every_second_layer() -> None:
    """Primus-Turbo's attention has them from the first layer on, and without it nobody reads them (primus_turbo.py)."""
    window = "use_sink_attention: true, sink_sliding_window: 128, expert_model_parallel_size: 1"
    turbo = "enable_primus_turbo: true, use_turbo_attention: true"
    for overrides, wide in ((f"{window}, {turbo}", 12), (window, 24),
                            (f"{window}, {turbo}, sink_window_even_layers_only: false", 0)):  # fmt: skip
        model = case_of("megatron", "gpt_oss_20B.yaml", overrides).model
        assert model is not None
        assert sum(not any(getattr(one, "window", 0) for one in block.mixers) for block in model.layers) == wide, (
            overrides
        )


WRONG: tuple[tuple[str, str, str, str], ...] = (
    ("maxdiffusion", "llama2_7B.yaml", "", "framework"),
    ("maxtext", "llama2_7B.yaml", "quantization: nanoo_fp8", "quantization"),
    ("megatron", "llama2_7B.yaml", "patch_zero_bubble: true", "patch_zero_bubble"),
    ("megatron", "llama2_7B.yaml", "decoder_pipeline_manual_split_list: [8, 24]", "decoder_pipeline_manual_split_list"),
    ("megatron", "llama2_7B.yaml", "seq_length: '${LENGTH}'", "modules.pre_trainer.overrides.seq_length"),
    # 126 layers on 8 stages, as in its own example: Megatron-LM stops at it
    ("megatron", "llama3.1_405B.yaml", "pipeline_model_parallel_size: 8", "pipeline_model_parallel_size"),
    ("torchtitan", "llama3.1_8B.yaml", "model: {converters: [quantize.linear.mx]}", "model.converters"),
    ("torchtitan", "llama3.1_8B.yaml", "training: 5", "training"),
    ("torchtitan", "llama3.1_8B.yaml", "training: {steps: {a: 1}}", "training.steps.a"),
)


@pytest.mark.parametrize(("framework", "model", "overrides", "field"), WRONG)
def test_what_is_not_read_of_an_experiment_is_refused(framework: str, model: str, overrides: str, field: str) -> None:
    """A word that changes the answer and is not counted is named as the file has it."""
    with pytest.raises(InputError) as caught:
        case_of(framework, model, overrides)
    assert [problem.field for problem in caught.value.problems] == [field]


def test_the_command_line_reads_an_experiment(tmp_path: Path) -> None:
    """The file is known by its modules, and a preset that nobody knows leaves the model to be named."""
    path = tmp_path / "exp.yaml"
    path.write_text(HEAD % ("megatron", "mine.yaml", "tensor_model_parallel_size: 2"), encoding="utf-8")
    case: Any = import_file(path, around=ImportContext(num_devices=8))
    assert case.model is None and (case.plan.tp, case.plan.dp) == (2, 4)
    assert any("mine is not among the presets" in text for text in case.assumed)
