"""What trainers patch into a model: the kind of their checkpoints, what they send to the host, and fused layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise import Plan, Training
from shardwise.formats import ImportContext, Imported, import_file, trl
from shardwise.hardware import Cluster
from shardwise.training import TrainingOptions, TrainReport, train

LORA = "adapter: lora\nlora_target_linear: true\n"
AXOLOTL = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 2048\nmicro_batch_size: 1\nsample_packing: true\n"
FACTORY = (
    "model_name_or_path: meta-llama/Llama-3.1-8B\nfinetuning_type: full\ncutoff_len: 2048\npacking: true\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 1\nbf16: true\n"
)
TRL = (
    "model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 2048\npacking: true\nper_device_train_batch_size: 1\n"
    "gradient_accumulation_steps: 1\n"
)
LIGER = "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rms_norm: true\nliger_glu_activation: true\n"
ON = "gradient_checkpointing: true\n"


def case_of(text: str, folder: Path, devices: int = 1) -> Imported:
    """Return what a YAML means."""
    (folder / "a.yaml").write_text(text, encoding="utf-8")
    return import_file(folder / "a.yaml", around=ImportContext(num_devices=devices))


def answer(case: Imported) -> TrainReport:
    """Return the prediction of an imported case."""
    assert case.model is not None
    cluster = Cluster.parse(f"{case.num_devices}xh100-sxm-80gb")
    return train(case.model, cluster, case.plan, case.job, TrainingOptions(stack=case.stack))


def seconds(text: str, folder: Path) -> float:
    """Return the step of a YAML on one device."""
    return answer(case_of(text, folder)).step_seconds


@pytest.mark.parametrize(
    ("more", "recompute", "offload"),
    [
        (LORA + ON, "full", ()),
        (LORA + ON + "activation_offloading: true\n", "none", ("activations",)),
        (LORA + ON + "activation_offloading: legacy\n", "none", ("activations",)),
        (LORA + ON + "activation_offloading: disk\n", "none", ("activations",)),
        (LORA + ON + "activation_offloading: hidden_states\n", "full", ("activations",)),
        (LORA + "gradient_checkpointing: offload\n", "none", ("activations",)),
        (ON + "activation_offloading: true\n", "full", ("activations",)),
    ],
)
def test_axolotl_s_offload_of_activations_replaces_checkpoints_beside_an_adapter(
    more: str, recompute: str, offload: tuple[str, ...], tmp_path: Path
) -> None:
    """Axolotl 0.19.0 core/builders/base.py turns checkpoints off and loaders/model.py wraps layers without adapters."""
    plan = case_of(AXOLOTL + more, tmp_path).plan
    assert (plan.recompute, plan.offload) == (recompute, offload)


@pytest.mark.parametrize(
    ("usual", "other", "less"),
    [
        (AXOLOTL + ON, "gradient_checkpointing_kwargs: {use_reentrant: false}\n", True),
        (AXOLOTL + ON, "gradient_checkpointing_kwargs: {use_reentrant: true}\n", None),
        (FACTORY, "use_reentrant_gc: false\n", True),
        (TRL, "gradient_checkpointing_kwargs: {use_reentrant: true}\n", False),
    ],
)
def test_a_file_that_says_which_checkpoints_it_has_gets_those(
    usual: str, other: str, less: bool | None, tmp_path: Path
) -> None:
    """Checkpoints without reentrance do not run the last product of a layer again, reentrant ones do."""
    first, second = seconds(usual, tmp_path), seconds(usual + other, tmp_path)
    assert second == first if less is None else 0.02 < abs(1 - second / first) < 0.1
    assert less is None or (second < first) is less


def test_a_function_that_saves_behind_its_products_runs_them_all_again(tmp_path: Path) -> None:
    """LoRA_MLP of axolotl saves when it is through: no checkpoint stops before its last product."""
    other = "gradient_checkpointing_kwargs: {use_reentrant: false}\n"
    assert seconds(AXOLOTL + LORA + ON, tmp_path) == seconds(AXOLOTL + LORA + ON + other, tmp_path)


@pytest.mark.parametrize(
    ("text", "more", "most"),
    [
        (FACTORY, "enable_liger_kernel: true\n", 1.05),
        (FACTORY + "stage: dpo\n", "enable_liger_kernel: true\n", 0.93),
        (TRL, "use_liger_kernel: true\n", 0.93),
        (AXOLOTL, LIGER, 0.93),
    ],
)  # fmt: skip
def test_liger_fuses_norms_and_activations_too(text: str, more: str, most: float, tmp_path: Path) -> None:
    """Each norm keeps its 16-bit input, the activation gate and up: 61,440 bytes a token and layer less.

    Of the steps a norm keeps 4 D more, and the activation one of its width: 2 * 4 * 4096 + 2 * 14336. LLaMA-Factory
    trains fp32 weights, of which each of the 32 chunks of the loss casts the head's: 2,048 tokens gain nothing.
    """
    text += "disable_gradient_checkpointing: true\n" if text.startswith(FACTORY) else ""
    text += "gradient_checkpointing: false\n" if text.startswith(TRL) else ""
    eager, fused = answer(case_of(text, tmp_path)), answer(case_of(text + more, tmp_path))
    tokens = 2048 * eager.case.job.sequences
    kept = [one.evaluation.parts.kinds[0].kept_bytes / tokens for one in (eager, fused)]
    assert kept[0] - kept[1] == 61440
    assert fused.step_seconds < most * eager.step_seconds


def test_a_layer_of_liger_s_keeps_what_its_functions_save(tmp_path: Path) -> None:
    """Bytes a token of Llama-3.1-8B in 16 bits, by hand: D 4096, 32 heads and 8 of keys of 128, F 14336."""
    norms = 2 * (2 * 4096 + 4) + 2 * 2 * 4096
    attention = 2 * (4096 + 2 * 1024) + 2 * 4096 + 4 * 32
    report = answer(case_of(AXOLOTL + LIGER, tmp_path))
    assert report.evaluation.parts.kinds[0].kept_bytes / 2048 == norms + attention + 3 * 2 * 14336


def test_stages_that_read_logits_keep_them_under_liger(tmp_path: Path) -> None:
    """LLaMA-Factory 0.9.5 model/loader.py: all stages but pt and sft require logits."""
    sft, dpo = (
        case_of(FACTORY + f"stage: {stage}\nenable_liger_kernel: true\n", tmp_path).stack.loss_kernel
        for stage in ("sft", "dpo")
    )
    assert (sft, dpo) == ("fused-linear", "eager")


def test_trl_beside_deepspeed_keeps_its_head_in_tiles(tmp_path: Path) -> None:
    """TRL 1.16.0 patches the head of a model, whatever shards it; adapters under ZeRO-3 get reentrant checkpoints."""
    zero = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(zero), encoding="utf-8")
    plain, tuned = (case_of(f"{TRL}deepspeed: ds.json\n{more}", tmp_path, 8) for more in ("", "use_peft: true\n"))
    assert (plain.stack.name, plain.stack.loss_kernel) == ("deepspeed", "fused-lm-head")
    kinds: list[Any] = [one.stack.checkpoint_reenters for one in (plain, tuned)]
    assert kinds == ["zero3 adapters", "always"]


def test_trainers_beside_deepspeed_keep_their_checkpoints(tmp_path: Path) -> None:
    """LLaMA-Factory's are reentrant unless told, and axolotl's LoRA has its own functions, under DeepSpeed too."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    factory = case_of(FACTORY + "deepspeed: ds.json\n", tmp_path, 2).stack
    own = case_of(AXOLOTL + LORA + ON + "deepspeed: ds.json\n", tmp_path, 2)
    assert factory.checkpoint_reenters == "but fsdp"
    assert own.stack.runs_lora(own.job)
    assert own.stack.checkpoint_reenters == "sft"


def test_plans_on_a_device_say_what_their_checkpoints_are() -> None:
    """Checkpoints on the host are axolotl's own, which are not reentrant; of other trainers they run all again."""
    from shardwise.models import load_model

    job = Training(seq_len=2048, global_batch=8)
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb")
    for stack, reenters in (("axolotl", False), ("llama-factory", True)):
        plan = Plan(dp=0, sharding="fsdp", recompute="full", offload=("activations",), micro_batch=1)
        assert train(model, cluster, plan, job, TrainingOptions(stack=stack)).case.reenters is reenters


def test_a_script_that_accelerate_starts_with_deepspeed_runs_under_it(tmp_path: Path) -> None:
    """ZeRO-3 by accelerate's file shards and casts as DeepSpeed does, and the trainer says in which 16 bits."""
    config = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_processes: 8\nmixed_precision: 'no'\n"
    (tmp_path / "acc.yaml").write_text(config, encoding="utf-8")
    script = (
        "accelerate launch --config_file acc.yaml trl/scripts/sft.py --model_name_or_path meta-llama/Llama-3.1-8B "
        "--max_length 4096 --packing --per_device_train_batch_size 1 --gradient_accumulation_steps 8\n"
    )
    (tmp_path / "train.sh").write_text(script, encoding="utf-8")
    case = import_file(tmp_path / "train.sh")
    assert (case.plan.sharding, case.plan.dp, case.plan.recompute) == ("zero3", 8, "full")
    assert (case.stack.name, case.stack.loss_kernel, case.job.precision) == (
        "deepspeed", "fused-lm-head", "bf16-grads16"
    )  # fmt: skip


def test_a_framework_that_makes_fewer_logits_than_are_counted_says_so() -> None:
    """Today's ms-swift makes those of labelled tokens alone, ms-swift of 2024 all."""
    from shardwise.models import load_model

    job, plan = Training(seq_len=2048, global_batch=1, adapter="lora"), Plan(micro_batch=1)
    told_so = [
        any(
            "labelled tokens" in text for text in train(load_model("qwen3-8b"), cluster, plan, job, options).assumptions
        )
        for cluster in (Cluster.parse("1xh100-sxm-80gb"),)
        for options in (TrainingOptions(stack="ms-swift"), TrainingOptions(stack="ms-swift-2024"))
    ]
    assert told_so == [True, False]


@pytest.mark.parametrize(
    ("word", "attention", "kernel"),
    [("", "flash", "cudnn-9.19"), ("sdpa", "flash", "cudnn-9.19"), ("eager", "eager", "cudnn-9.19"),
     ("flash_attention_2", "flash", "flash-2"), ("kernels-community/flash-attn2", "flash", "flash-2")],
)  # fmt: skip
def test_a_file_chooses_the_attention_of_transformers(word: str, attention: str, kernel: str) -> None:
    """Eager attention keeps whole scores, 32 heads of 4,096 squared twice and more; others are kernels."""
    text = (
        f"model_name_or_path: meta-llama/Llama-2-7b-hf\nmax_length: 4096\npacking: true\nattn_implementation: {word}\n"
    )
    text = text if word else text.rpartition("attn")[0]
    case = trl.read(text + "per_device_train_batch_size: 1\ngradient_checkpointing: false\n",
                    around=ImportContext(num_devices=1))  # fmt: skip
    assert (case.stack.attention, case.stack.attention_kernel) == (attention, kernel)
    kept = case.train("b200").evaluation.parts.kinds[0].kept_bytes
    assert (kept > 32 * 4096**2 * 6) == (word == "eager")


@pytest.mark.parametrize(
    ("text", "patched"),
    [
        ("base_model: meta-llama/Llama-3.1-8B\n" + LIGER, True),
        ("base_model: allenai/OLMoE-1B-7B-0924\n" + LIGER, False),
        ("model_name_or_path: zai-org/GLM-4.5-Air\nstage: sft\nenable_liger_kernel: true\n", False),
        ("model_name_or_path: zai-org/GLM-4.5-Air\nmax_length: 512\nuse_liger_kernel: true\n", False),
        ("model_name_or_path: Qwen/Qwen3-8B\nmax_length: 512\nuse_liger_kernel: true\n", True),
    ],
)
def test_liger_leaves_types_of_models_that_it_has_no_kernels_for(text: str, patched: bool, tmp_path: Path) -> None:
    """Their layers stay as they come, which the answer says (liger-kernel 0.8.5 transformers/monkey_patch.py)."""
    case = case_of(text, tmp_path)
    assert (case.stack.norm == "fused" or case.stack.settings.loss == "fused-linear") is patched
    assert any("Liger's kernels are not of" in note for note in case.assumed) is not patched


@pytest.mark.parametrize(("text", "word"), [(AXOLOTL, "eager_attention: true"), (FACTORY, "flash_attn: disabled")])
def test_a_trainer_s_own_word_for_eager_attention_keeps_scores(text: str, word: str, tmp_path: Path) -> None:
    """Whole scores of 32 heads are kept, where a fused kernel keeps a number a row."""
    off = "disable_gradient_checkpointing: true\n" if text.startswith(FACTORY) else ""
    usual, eager = (answer(case_of(text + off + more, tmp_path)) for more in ("", word + "\n"))
    kept = [one.evaluation.parts.kinds[0].kept_bytes / one.case.job.sequences for one in (usual, eager)]
    assert kept[1] - kept[0] > 4 * 32 * 2048**2


def test_unsloth_within_llamafactory_is_unsloth(tmp_path: Path) -> None:
    """Its layers, its loss without logits and its checkpoints on the host; beside DeepSpeed it is said, not counted."""
    text = "model_name_or_path: meta-llama/Llama-3.1-8B\nfinetuning_type: lora\nquantization_bit: 4\nbf16: true\n"
    text += "cutoff_len: 4096\nper_device_train_batch_size: 2\n"
    plain, patched = (answer(case_of(text + more, tmp_path)) for more in ("", "use_unsloth: true\n"))
    assert patched.case.stack.name == "unsloth" and "activations" in patched.case.plan.offload
    assert patched.device_bytes < 0.5 * plain.device_bytes
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    case = case_of(text + "use_unsloth: true\ndeepspeed: ds.json\n", tmp_path)
    assert any("use_unsloth" in note for note in case.assumed)


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ("[q_proj, gate_proj, q_a_proj]", ("q_proj", "gate_proj")),
        ("[q_a_proj, kv_b_proj]", ("q_a_proj", "kv_b_proj")),
        ("'model.layers.[\\d]+.(mlp|self_attn).(up|q_a)_proj'", ("up_proj",)),
    ],
)
def test_targets_that_a_model_lacks_are_left_out(names: str, kept: tuple[str, ...], tmp_path: Path) -> None:
    """Names that match count, and a list of which none does is refused (peft 0.21.2 inject_adapter)."""
    case = case_of(AXOLOTL + f"adapter: lora\nlora_r: 8\nlora_target_modules: {names}\n", tmp_path)
    assert case.job.targets == kept
    assert any("which peft leaves out" in note for note in case.assumed) is (kept[0] != "q_a_proj")
