"""Megatron-LM's arguments: its own derivations, contradictions all at once, namespaces and checkpoints."""

from __future__ import annotations

import json
import pickle
import zipfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line import run
from shardwise.errors import InputError
from shardwise.formats import ImportContext, Imported, from_megatron_args, import_file, megatron
from shardwise.formats._exported import ExportCase
from shardwise.formats.megatron import Launch, read_args, read_command
from shardwise.formats.megatron import read as read_script
from shardwise.formats.megatron._reader import spelled_out
from shardwise.formats.megatron._values import arguments, facts
from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, MoE, load_model
from shardwise.plans import Plan, Training, find_stack
from shardwise.training import train

BASE: dict[str, Any] = {
    "--num-layers": 8, "--hidden-size": 512, "--num-attention-heads": 8, "--seq-length": 1024,
    "--max-position-embeddings": 1024, "--micro-batch-size": 2, "--vocab-size": 1000, "--bf16": True,
}  # fmt: skip


def read(devices: int = 0, **more: Any) -> Imported:
    """Return the case of the base with further arguments, whose underscores are dashes; None takes one away."""
    words = {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    return read_args({k: v for k, v in (BASE | words).items() if v is not None}, Launch(num_devices=devices))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"])
def test_an_exported_mixture_takes_the_same_memory(name: str) -> None:
    """To the byte: what routers keep of their weights is Megatron-LM's, and a correction is of sigmoid scores."""
    plan = Plan(dp=8, ep=8, etp=1, sharding="distributed-optimizer", sequence_parallel=False)
    job, cluster, stack = Training(seq_len=1024, global_batch=8), Cluster.parse("8xh100"), find_stack("megatron")
    model = load_model(name)
    (text,) = megatron.export(ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=stack)).files.values()
    back = read_script(text)
    assert back.model is not None and back.job is not None
    ours, theirs = (train(one, cluster, plan, each) for one, each in ((model, job), (back.model, back.job)))
    assert theirs.memory.peak == ours.memory.peak
    assert ("--moe-router-score-function sigmoid" in text) == ("--moe-router-enable-expert-bias" in text)


DERIVED: tuple[tuple[dict[str, Any], str, Any], ...] = (
    ({"swiglu": True}, "layers[0].feed_forward.ffn", 1344),
    ({"swiglu": True, "hidden_size": 4096}, "layers[0].feed_forward.ffn", 10880),
    ({}, "layers[0].feed_forward.ffn", 2048),
    ({"kv_channels": 128}, "layers[0].mixers[0].head_dim", 128),
    ({"group_query_attention": True, "num_query_groups": 2}, "layers[0].mixers[0].kv_heads", 2),
    ({"disable_bias_linear": True, "add_qkv_bias": True}, "layers[0].mixers[0].qkv_bias", True),
    ({"disable_bias_linear": True, "add_qkv_bias": True}, "layers[0].mixers[0].out_bias", False),
    ({"qk_layernorm": True}, "layers[0].mixers[0].qk_norm_kind", "layernorm"),
    ({"qk_l2_norm": True}, "layers[0].mixers[0].qk_norm_kind", "rmsnorm-no-weight"),
    ({"position_embedding_type": "rope"}, "positions", 0),
    ({}, "positions", 1024),
    ({"window_size": "(127,0)", "window_attn_skip_freq": 4}, "layers[3].mixers[0].window", 0),
    ({"window_size": "(127,0)", "window_attn_skip_freq": 4}, "layers[2].mixers[0].window", 128),
    ({"num_experts": 4, "moe_layer_freq": "([0]*2+[1]*6)"}, "layers[2].feed_forward.experts", 4),
    ({"num_experts": 4, "moe_layer_freq": 2}, "layers[1].feed_forward.ffn", 2048),
    ({"num_experts": 4}, "layers[0].feed_forward.top_k", 2),
    ({"num_experts": 4}, "layers[0].feed_forward.ffn", 2048),
    ({"num_experts": 4, "moe_shared_expert_intermediate_size": 64}, "layers[0].feed_forward.shared.ffn", 64),
    ({"multi_latent_attention": True, "qk_layernorm": True}, "layers[0].mixers[0].kv_lora_rank", 32),
    ({"hybrid_layer_pattern": "M*-M|M*-M/M*"}, "num_layers", 8),
    ({"vocab_size": None, "padded_vocab_size": 1024}, "vocab", 1024),
    ({"vocab_size": 1000, "padded_vocab_size": 1024}, "vocab", 1000),
    ({"vocab_size": None, "tokenizer_type": "Llama2Tokenizer"}, "vocab", 32000),
    ({"vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "x/llama-3.1-8b"},
     "vocab", 128256),
    ({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, "mtp[1].shared_weights", "mtp"),
)  # fmt: skip


def at(record: object, path: str) -> object:
    """Return what a path of names and places leads to."""
    for part in path.replace("[", ".").replace("]", "").split("."):
        record = record[int(part)] if part.isdigit() else getattr(record, part)  # type: ignore[index]
    return record


@pytest.mark.parametrize(("more", "path", "expected"), DERIVED)
def test_models_are_derived_as_megatron_derives_them(more: dict[str, Any], path: str, expected: object) -> None:
    """Widths, heads, positions, experts and vocabularies follow as in Megatron-LM's own code."""
    assert at(read(**more).model, path) == expected


PLANS: tuple[tuple[int, dict[str, Any], dict[str, Any]], ...] = (
    (16, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}, {"tp": 2, "cp": 2, "dp": 4}),
    (0, {"tensor_model_parallel_size": 2}, {"tp": 2, "dp": 0}),
    (4, {"pipeline_model_parallel_size": 4, "zero_bubble_v_schedule": True}, {"vpp": 2, "schedule": "zb-v"}),
    (4, {"pipeline_model_parallel_size": 4, "zero_bubble_v_schedule": True, "zero_bubble_v_schedule_mem_setup": "half"},
     {"vpp": 2, "schedule": "v-half"}),
    (4, {"pipeline_model_parallel_size": 4, "zero_bubble_v_schedule": True, "zero_bubble_v_schedule_mem_setup": "min"},
     {"vpp": 2, "schedule": "v-min"}),
    (4, {"pipeline_model_parallel_size": 4, "enable_zero_bubble": True}, {"vpp": 1, "schedule": "zb-h1"}),
    (4, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
     {"vpp": 2, "schedule": "interleaved", "dp": 2}),
    (4, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 4}, {"vpp": 4}),
    (2, {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3}, {"stage_layers": (3, 5)}),
    (2, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*3|(tt|)*2mL", "num_layers": 7,
         "mtp_num_layers": 1},
     {"stage_layers": (3, 2, 2, 0), "vpp": 2}),
    (2, {"pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True, "num_layers": 7},
     {"stage_layers": (3, 4)}),
    (2, {"pipeline_model_parallel_size": 2, "hybrid_layer_pattern": "M*M|-M*-M"}, {"stage_layers": (3, 5)}),
    (2, {"recompute_activations": True}, {"recompute": "selective"}),
    (2, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
     {"recompute": "full", "recompute_layers": 0}),
    (2, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3,
         "pipeline_model_parallel_size": 2}, {"recompute": "full", "recompute_layers": 3}),
    (2, {"recompute_granularity": "selective", "recompute_modules": "[layernorm mlp]"},
     {"recompute": "none", "modules": ("layernorm", "mlp")}),
    (8, {"num_experts": 4, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2,
         "sequence_parallel": True}, {"ep": 2, "etp": 2, "sequence_parallel": True}),
    (8, {"num_experts": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, {"etp": 1}),
    (8, {"use_megatron_fsdp": True, "num_distributed_optimizer_instances": 2}, {"sharding": "hsdp", "shard": 4}),
    (8, {"use_tp_pp_dp_mapping": True}, {"order": ("tp", "tp2", "cp", "pp", "dp")}),
    (8, {"cp_comm_type": "a2a", "context_parallel_size": 2}, {"cp_kind": "all-to-all"}),
)  # fmt: skip


@pytest.mark.parametrize(("devices", "more", "expected"), PLANS)
def test_plans_are_derived_as_megatron_derives_them(
    devices: int, more: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Replicas, chunks, stages, recompute and sharding follow as in Megatron-LM's own code."""
    plan = read(devices, **more).plan
    assert {name: getattr(plan, name) for name in expected} == expected


def test_the_last_batch_of_a_schedule_counts() -> None:
    """A schedule of batches stands in the place of --global-batch-size, and ends with the one that lasts."""
    schedule = {"step_batch_size_schedule": "0:16 2.4B:320 12B:1536"}
    case = read(8, global_batch_size=None, micro_batch_size=1, **schedule)
    assert case.job.global_batch == 1536
    assert any("starts with 16" in line for line in case.assumed)
    assert read(8, global_batch_size=8, micro_batch_size=1, **schedule).job.global_batch == 1536  # as validated
    for wrong in ({"global_batch_size": 64}, {"global_batch_size": None, "step_batch_size_schedule": "12B"}):
        with pytest.raises(InputError, match="--step-batch-size-schedule"):
            read(8, micro_batch_size=1, **(schedule | wrong))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"overlap_param_gather": True, "overlap_grad_reduce": True}, "--use-distributed-optimizer"),
        ({"overlap_param_gather": True, "use_distributed_optimizer": True}, "--overlap-grad-reduce"),
        ({"overlap_param_gather": True, "use_megatron_fsdp": True}, "--overlap-grad-reduce"),
        ({"tp_comm_overlap": True, "tensor_model_parallel_size": 2}, "--sequence-parallel"),
        ({"tp_comm_overlap": True, "sequence_parallel": True}, "--tensor-model-parallel-size"),
    ],
)
def test_an_overlap_without_what_it_needs_is_refused(more: dict[str, Any], named: str) -> None:
    """Megatron-LM stops at its start, where an answer would count an overlap that nothing runs."""
    with pytest.raises(InputError, match=f"does not run without {named}"):
        read(8, **more)


def test_tokens_are_gathered_unless_told_otherwise() -> None:
    """Megatron-LM gathers all tokens on each rank of a group unless told otherwise, and so they are counted."""
    moe = {"num_experts": 4, "expert_model_parallel_size": 4}
    for more, dispatch in (
        ({}, "all-gather"),
        ({"moe_token_dispatcher_type": "allgather"}, "all-gather"),
        ({"moe_token_dispatcher_type": "alltoall"}, "all-to-all"),
        ({"moe_token_dispatcher_type": "flex"}, "deepep-1"),
        ({"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"}, "deepep-1"),
        ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}, "deduplicated"),
        ({"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": "hybridep"}, "all-to-all"),
    ):
        found = read(8, **moe, **more)
        assert found.stack is not None and found.stack.dispatch == dispatch
        assert not any("allgather" in line for line in found.assumed)
    alone = read(8, num_experts=4)
    assert alone.stack is not None and alone.stack.dispatch == "all-to-all"


@pytest.mark.parametrize(
    ("group", "told"),
    [(None, "5"), (5, ""), (6, "rounds of 5"), (10, "2.5 more"), (7, "5"), (3, "5"), (11, "5")],
)
def test_rounds_that_megatron_does_not_run_are_refused(group: int | None, told: str) -> None:
    """Of ten micro-batches on four stages two would be left of groups of four, which stops Megatron-Core at its start.

    Larger groups hold more micro-batches than are counted, which is said.
    """
    name = "microbatch_group_size_per_virtual_pipeline_stage"
    more = {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 10}
    more |= {"micro_batch_size": 1, **({name: group} if group else {})}
    if told == "5":
        with pytest.raises(InputError, match="give --microbatch-group-size-per-virtual-pipeline-stage 5"):
            read(4, **more)
    else:
        assumed = [line for line in read(4, **more).assumed if "rounds of" in line]
        assert all(told in line for line in assumed) and bool(assumed) == bool(told)


JOBS: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "bf16"),
    ({"grad_reduce_in_bf16": True}, "bf16-grads16"),
    ({"use_megatron_fsdp": True, "accumulate_allreduce_grads_in_fp32": True}, "bf16-grads16"),
    ({"use_megatron_fsdp": True, "megatron_fsdp_main_grads_dtype": "fp32"}, "bf16"),
    ({"use_megatron_fsdp": True, "fp8_format": "hybrid"}, "fp8-grads16"),
    ({"bf16": None, "fp16": True}, "fp16-grads16"),
    ({"bf16": None, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}, "fp16"),
    ({"bf16": None}, "fp32"),
    ({"fp8_format": "hybrid"}, "fp8"),
    ({"fp8_format": "e4m3", "grad_reduce_in_bf16": True}, "fp8-grads16"),
    ({"fp4_format": "e2m1"}, "fp4"),
    ({"fp4_format": "e2m1", "grad_reduce_in_bf16": True}, "fp4-grads16"),
)
AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
STATES: tuple[tuple[dict[str, Any], str], ...] = (
    (AWARE, "bf16-masters16"),
    (AWARE | MOMENTS, "bf16-masters16-moments16"),
    (AWARE | MOMENTS | {"grad_reduce_in_bf16": True}, "bf16-grads16-masters16-moments16"),
    (AWARE | MOMENTS | {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}, "fp8-moments16"),
    (AWARE | MOMENTS | {"fp8_recipe": "tensorwise"}, "bf16-moments16"),
    (AWARE | MOMENTS | {"optimizer_cpu_offload": True}, "bf16"),
    (AWARE | {"exp_avg_dtype": "bf16"}, "bf16-masters16"),
)


@pytest.mark.parametrize(("more", "precision"), JOBS)
def test_gradients_have_megatrons_width(more: dict[str, Any], precision: str) -> None:
    """Gradients are 32 bits wide in bf16 unless asked otherwise, and 16 in fp16."""
    assert read(**more).job.precision == precision


@pytest.mark.parametrize(("more", "precision"), STATES)
def test_a_precision_aware_optimizer_keeps_narrow_states(more: dict[str, Any], precision: str) -> None:
    """Masters of bf16 shrink to the bits that weights lack, moments to the types that are named, unless offloaded."""
    case = read(4, **more)
    assert case.job.precision == precision
    dropped = any(text.startswith("moments of 32 bits") for text in case.assumed)
    assert dropped == (any(name in more for name in MOMENTS) and "moments16" not in precision)


def test_the_batch_is_one_micro_batch_a_replica_without_one() -> None:
    """Without --global-batch-size Megatron-LM takes one micro-batch on each replica, and the case says so."""
    case = read(8)
    assert case.job.global_batch == 16
    assert any(text.startswith("global_batch 16") for text in case.assumed)


WRONG: tuple[tuple[dict[str, Any], set[str]], ...] = (
    ({"fp8_format": "hybrid", "fp4_format": "e2m1"}, {"--fp4-format"}),
    (
        {"pipeline_model_parallel_layout": "Et*4|t*4L", "pipeline_model_parallel_size": 2, "mtp_num_layers": 1},
        {"--pipeline-model-parallel-layout"},
    ),
    (
        {"pipeline_model_parallel_layout": "Et*4|t*4mL", "pipeline_model_parallel_size": 2},
        {"--pipeline-model-parallel-layout"},
    ),
    ({"fp16": True}, {"--fp16"}),
    ({"mtp_num_layers": 10_000}, {"--mtp-num-layers"}),
    (
        {"mtp_num_layers": 10**12, "pipeline_model_parallel_layout": "Et*4|t*4L"},
        {"--mtp-num-layers", "--pipeline-model-parallel-layout"},
    ),
    ({"swiglu": True, "squared_relu": True}, {"--squared-relu"}),
    ({"train_iters": 5, "train_samples": 5}, {"--train-samples"}),
    ({"recompute_granularity": "full"}, {"--recompute-method", "--recompute-num-layers"}),
    ({"recompute_modules": "[mlp]"}, {"--recompute-modules"}),
    ({"recompute_activations": True, "recompute_granularity": "full"}, {"--recompute-granularity"}),
    ({"seq_length": 4096}, {"--seq-length"}),
    ({"num_query_groups": 3, "group_query_attention": True}, {"--num-query-groups"}),
    ({"hidden_size": None, "num_layers": None}, {"--hidden-size", "--num-layers"}),
    ({"vocab_size": None}, {"--vocab-size"}),
    ({"perform_rl_step": True}, {"--perform-rl-step"}),
    ({"heterogeneous_layers_config_path": "x.json"}, {"--heterogeneous-layers-config-path"}),
    ({"num_layer": 8}, {"--num-layer"}),
    ({"micro_batch_size": "${MBS}", "global_batch_size": "many"}, {"--micro-batch-size", "--global-batch-size"}),
    ({"use_flash_attn": True, "attention_backend": "unfused"}, {"--use-flash-attn"}),
    ({"expert_width": 8}, {"--expert-width"}),
    ({"moe_layer_freq": "__import__('os')", "num_experts": 2}, {"--moe-layer-freq"}),
)


@pytest.mark.parametrize(("more", "named"), WRONG)
def test_contradictions_are_told_all_at_once(more: dict[str, Any], named: set[str]) -> None:
    """Every argument that contradicts, lacks or misspells something is named in one error, with a remedy."""
    with pytest.raises(InputError) as caught:
        read(**more)
    assert {p.field for p in caught.value.problems} == named
    assert all(p.remedy for p in caught.value.problems)


def test_the_last_of_two_that_differ_is_not_taken_in_silence() -> None:
    """An argument given twice with different values is a contradiction, the same value twice is not."""
    words = [word for key, value in BASE.items() for word in (key, *([] if value is True else [str(value)]))]
    assert read_args([*words, "--num-layers", "8"]).model is not None
    with pytest.raises(InputError, match="contradicts"):
        read_args([*words, "--num-layers", "9"])


def test_unknown_arguments_are_listed_unless_they_speak_of_sizes() -> None:
    """An argument that is not Megatron-LM's is listed with its value; `skipped` lets through those of sizes."""
    case = read(patch_tokenizer_type="LLamaTokenizer")
    assert [(r.argument, r.value) for r in case.unknown] == [("--patch-tokenizer-type", "LLamaTokenizer")]
    words = [word for key, value in BASE.items() for word in (key, *([] if value is True else [str(value)]))]
    skipped = read_command([*words, "--extra-vocab-size", "3"], ImportContext(skipped=("extra-vocab-size",)))
    assert [r.argument for r in skipped.unknown] == ["--extra-vocab-size"]


BESIDE: dict[str, Any] = {"num_experts": 4, "expert_model_parallel_size": 4, "overlap_moe_expert_parallel_comm": True,
                          "moe_token_dispatcher_type": "alltoall"}  # fmt: skip


def test_experts_beside_another_micro_batch_are_read() -> None:
    """The overlap of expert messages is the stack's; pieces of a stage and expert parallelism are asked for."""
    found = read(devices=8, **BESIDE, delay_wgrad_compute=True)
    assert found.stack.overlap_experts == "always"
    assert not any("wgrad" in reading.argument for reading in found.ignored)
    assert any("--delay-wgrad-compute" in text for text in read(devices=8, **BESIDE).assumed)
    for more, named in (
        ({"pipeline_model_parallel_size": 2}, "several pieces"),
        ({"expert_model_parallel_size": 1}, "expert parallelism"),
        ({"moe_token_dispatcher_type": None}, "alltoall or flex"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, "recompute"),
    ):
        with pytest.raises(InputError, match=named):
            read(devices=8, **(BESIDE | more))
    with pytest.raises(InputError, match="--overlap-moe-expert-parallel-comm"):
        read(delay_wgrad_compute=True)


@pytest.mark.parametrize(("plan", "written"), [({"ep": 8}, True), ({}, False)])
def test_experts_beside_another_micro_batch_are_written(plan: dict[str, int], written: bool) -> None:
    """What Megatron-Core overlaps is said in both of its arguments, and left out where it refuses them."""
    stack = replace(find_stack("megatron"), overlap_experts="always")
    whole = Plan(**{"dp": 16 // plan.get("pp", 1), "sharding": "distributed-optimizer", **plan})
    found = megatron.export(
        ExportCase(
            model=load_model("qwen3-30b-a3b"),
            cluster=Cluster.parse("16xh200-sxm-141gb"),
            plan=whole,
            job=Training(seq_len=1024, global_batch=64),
            stack=stack,
        )
    )
    (text,) = found.files.values()
    assert all((word in text) == written for word in ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"))


def test_fusion_of_the_loss_is_read() -> None:
    """The loss is the unfused one unless its fusion is asked for."""
    assert (read().stack.loss, read(cross_entropy_loss_fusion=True).stack.loss) == (
        "vocab-parallel", "vocab-parallel-compiled")  # fmt: skip


def test_what_changes_bytes_or_seconds_and_is_left_out_says_why() -> None:
    """Offloading, capacity factors and the like are listed with the reason; defaults and logging are not."""
    case = read(fine_grained_activation_offloading=True, moe_z_loss_coeff=0.1, log_interval=10, fp8_recipe="delayed")
    assert [(r.argument, r.meaning.split(",")[0]) for r in case.ignored] == [
        ("--fine-grained-activation-offloading", "moves tensors to host memory")
    ]
    assert {"--log-interval", "--moe-z-loss-coeff"} <= set(case.silent)


def test_experts_of_deepspeed_are_filled_up_to_their_capacity() -> None:
    """Megatron-DeepSpeed's factor of training is a capacity that is filled, unless no token is dropped."""
    moe = {"num_experts": 4, "expert_model_parallel_size": 4, "moe_train_capacity_factor": 1.5}
    case, whole = read(8, **moe), read(8, **moe, disable_moe_token_dropping=True)
    assert case.job and whole.job and not case.unknown
    assert (case.job.capacity_factor, case.job.pad_to_capacity) == (1.5, True)
    assert (whole.job.capacity_factor, whole.job.pad_to_capacity) == (0.0, False)


def test_a_parsed_namespace_says_the_same_as_its_words() -> None:
    """A training script's own arguments, defaults included and after validation, give the case of the command."""
    names = {a.name: a.default for a in arguments().values() if a.default not in (None, False)}
    given = {key[2:].replace("-", "_"): value for key, value in BASE.items()}
    after = {"ffn_hidden_size": 1344, "kv_channels": 64, "world_size": 8, "rank": 3, "swiglu": True,
             "virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "custom": "x"}  # fmt: skip
    case = from_megatron_args(Namespace(**(names | given | after)))
    words = read(8, swiglu=True, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    assert (case.model and case.model.layers, case.plan, case.job) == (
        words.model and words.model.layers, words.plan, words.job)  # fmt: skip
    assert [r.argument for r in case.unknown] == ["custom"]


def test_patterns_are_spelled_out_without_being_run() -> None:
    """Sums and multiples of lists are read as such; anything else is not evaluated."""
    assert spelled_out("([1]*3+[0])*2") == [1, 1, 1, 0, 1, 1, 1, 0]
    assert spelled_out("[1]*100000000") is None
    assert spelled_out("(lambda: [1])()") is None


def test_the_table_has_a_meaning_for_every_argument() -> None:
    """Every argument is used, without effect, refused, or has a reason that is spelled out."""
    reasons, refused = facts()["reasons"], facts()["refused"]
    for argument in arguments().values():
        word = argument.meaning
        assert word == "none" or word.startswith("read:") or word in reasons or word.removeprefix("!") in refused
    assert len(arguments()) > 850


def save(folder: Path, args: object, part: str = "common.pt") -> None:
    """Write a checkpoint's arguments the way torch.save lays them out."""
    inside = folder / "iter_0000010" / part
    inside.parent.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    with zipfile.ZipFile(inside, "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"args": args, "iteration": 10}, protocol=2))


def test_a_checkpoint_gives_its_arguments_without_torch(tmp_path: Path) -> None:
    """--use-checkpoint-args takes the model of the checkpoint, whose switches win over the command's."""
    save(tmp_path, Namespace(num_layers=4, hidden_size=256, num_attention_heads=4, swiglu=True, seq_length=512,
                             max_position_embeddings=512, padded_vocab_size=2048, num_experts=None))  # fmt: skip
    words = ["--use-checkpoint-args", "--load", str(tmp_path), "--micro-batch-size", "1", "--bf16", "--num-layers", "6"]
    model = read_args(words).model
    assert model is not None
    assert (model.num_layers, model.hidden, model.vocab) == (6, 256, 2048)
    assert model.layers[0].feed_forward == MLP(ffn=640, gated=True, bias=True)


class Mischief:
    """Runs a command when an ordinary unpickler meets it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("a class of the pickle was called",)


def test_nothing_of_a_checkpoint_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pickle that calls functions is read without calling any."""
    save(tmp_path, Namespace(num_layers=4, evil=Mischief()))
    with pytest.raises(InputError, match="hidden-size"):
        read_args(["--use-checkpoint-args", "--load", str(tmp_path), "--micro-batch-size", "1"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("load", ("/nowhere", "${CKPT}", ""))
def test_a_checkpoint_that_cannot_be_read_is_refused(load: str) -> None:
    """A missing folder, or one that only the caller of the script knows, is refused with what to do."""
    words = ["--use-checkpoint-args", *(["--load", load] if load else [])]
    with pytest.raises(InputError) as caught:
        read_args([*words, "--micro-batch-size", "1", "--vocab-size", "8"])
    assert caught.value.problems[0].field in ("--use-checkpoint-args", "--load")


@pytest.mark.parametrize("count", ["\u00b2", "1.5", "two", "-3", "9" * 30])
def test_a_number_of_devices_that_is_none_is_refused(count: str) -> None:
    """What no launcher takes is a problem of its option, in a script too; words and variables leave it open."""
    words = "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --micro-batch-size 1"
    words += " --seq-length 64 --max-position-embeddings 64 --vocab-size 100"
    for line in (f"torchrun --nproc_per_node {count} {words}", f"N={count}\ntorchrun --nnodes=$N {words}"):
        with pytest.raises(InputError) as refused:
            read_script(line)
        assert refused.value.problems[0].field in ("--nproc_per_node", "--nnodes")
    for open_count in ("gpu", "auto", "$GPUS", "-1"):
        assert read_script(f"torchrun --nproc_per_node {open_count} {words}").num_devices == 0


def test_the_command_behind_two_dashes_is_read_with_its_launcher() -> None:
    """Replacing the training program by ours, the launcher's own options in front, gives the same case."""
    words = [word for key, value in BASE.items() for word in (key, *([] if value is True else [str(value)]))]
    alone = read_command(["--nproc_per_node", "8", "--nnodes", "2", "--master_port", "6000", *words])
    whole = read_command(["torchrun", "--nproc_per_node", "8", "--nnodes=2", "pretrain_gpt.py", *words])
    assert alone == whole
    assert (alone.num_devices, alone.devices_per_node) == (16, 8)


SHELL: tuple[tuple[str, int], ...] = (
    ('N=8; torchrun x.py --num-layers $N', 8),
    ('N=${N:-4}; torchrun x.py --num-layers "${N}"', 4),
    ("A=(--num-layers\n 4 # four\n)\nA+=(--swiglu)\ntorchrun x.py ${A[@]}", 4),
    ('P=2\nif [[ $P -gt 1 && "$Q" == "" ]]; then N=6; else N=2; fi\ntorchrun x.py --num-layers $((N*2))', 12),
    ("case tiny in big) N=9;; tiny|small) N=2;; esac\neval \"torchrun x.py --num-layers $N\"", 2),
    ("go() { torchrun x.py --num-layers $1; }\ngo 5", 5),
    ("for N in 3; do torchrun x.py \\\n --num-layers $N; done", 3),
    ('CMD="x.py --num-layers 7"\nsrun bash -c "python $CMD" 2>&1 | tee log', 7),
    ("N=$(( (3 > 2) ? 6 : 1 ))\npython -m torch.distributed.launch x.py --num-layers $N", 6),
    ("# --num-layers 1\necho --num-layers 2\ntorchrun x.py --num-layers 3", 3),
    ("sbatch <<END\ntorchrun x.py --num-layers 4\nEND", 4),
)  # fmt: skip


@pytest.mark.parametrize(("text", "layers"), SHELL)
def test_scripts_are_read_as_the_shell_reads_them(text: str, layers: int) -> None:
    """Variables, defaults, arrays, conditions, functions, quotes and comments mean what they mean to the shell."""
    rest = " --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    more = tuple((rest + " --micro-batch-size 1 --vocab-size 100").split())
    case = read_script(text, around=ImportContext(more=more))
    assert case.model is not None
    assert case.model.num_layers == layers


def test_a_variable_of_the_caller_is_asked_for_by_name() -> None:
    """A value that depends on a variable outside the script is a problem that names it; --set gives it."""
    text = "torchrun x.py --num-layers $DEPTH"
    with pytest.raises(InputError, match="DEPTH"):
        read_script(text)
    rest = "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    more = tuple((rest + " --micro-batch-size 1 --vocab-size 100").split())
    model = read_script(text, around=ImportContext(more=more, variables={"DEPTH": "2"})).model
    assert model is not None and model.num_layers == 2


def test_a_script_without_a_training_is_refused(tmp_path: Path) -> None:
    """A script that starts no program with Megatron-LM's arguments, and a file that is not there, are refused."""
    script = tmp_path / "a.sh"
    script.write_text("echo hello")
    with pytest.raises(InputError, match="starts no program"):
        import_file(script)
    with pytest.raises(InputError, match="cannot be read"):
        import_file(tmp_path / "b.sh")


def test_what_the_release_refuses_is_not_exported() -> None:
    """Transformer Engine's cross entropy is an assertion of Megatron-LM's arguments; its own fusion is written."""
    words = ("export", "megatron", "llama-3.1-8b", "--on", "8xh100", "--tp", "2", "--seq-len", "2048", "--loss")
    assert "megatron does not run this" in run(*words, "vocab-parallel-in-place").err
    assert "--cross-entropy-loss-fusion" in run(*words, "vocab-parallel-compiled").out


def test_experts_and_attention_are_plain_values() -> None:
    """A mixture with rotary attention is equal to the same model written by hand."""
    case = read(num_experts=4, disable_bias_linear=True, swiglu=True, normalization="RMSNorm",
                position_embedding_type="rope", moe_ffn_hidden_size=96)  # fmt: skip
    assert case.model is not None
    block = case.model.layers[0]
    assert block.mixers == (Attention(heads=8, kv_heads=8, head_dim=64),)
    assert block.feed_forward == MoE(experts=4, top_k=2, ffn=96)


def test_json_of_the_arguments_is_a_case_too() -> None:
    """A mapping that went through JSON is read like the words."""
    assert read_args(json.loads(json.dumps(BASE))) == read_args(BASE)
