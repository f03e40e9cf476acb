"""The job and the framework's behaviour that Megatron-LM's arguments describe.

Sources: megatron/training/arguments.py validate_args, megatron/core/optimizer/optimizer_config.py,
megatron/core/transformer/dot_product_attention.py and core/fusions, 2026-08.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.formats.megatron._graphs import launch_seconds
from shardwise.formats.megatron._reader import Reader
from shardwise.formats.megatron._values import facts, split_states
from shardwise.plans import SCALINGS, Dispatch, LossKernel, Plan, Settings, Stack, Training, find_stack
from shardwise.plans.schedules import find_rules, round_size
from shardwise.records import replace

_STEP = re.compile(r"[0-9.]{1,20}[KMBT]?:([0-9]{1,9})")
_OPTIMIZERS = {
    "adam": "adam",
    "sgd": "sgd",
    "lion": "lion",
    "muon": "muon",
    "dist_muon": "muon",
    "adaptive_muon": "muon",
}


def build(reader: Reader, plan: Plan) -> Training:
    """Return the training job; problems are recorded."""
    batch = _scheduled(reader, plan) or reader.whole("global_batch_size") or 0
    seq_len = _seq_len(reader)
    if not batch:
        batch = plan.micro_batch * plan.dp
        budget_field = f"global_batch {batch}" if batch else "global_batch"
        reader.assume(f"{budget_field}: one micro-batch on each replica, as without --global-batch-size")
    unit = plan.micro_batch * plan.dp
    if unit and batch % unit:
        reader.fail(
            "global_batch_size", f"must be a multiple of micro-batch x dp = {unit}", "change the batch or the launch"
        )
    elif unit:
        _check_rounds(reader, plan, batch // unit)
    if reader.has("rampup_batch_size"):
        reader.assume(f"global_batch {batch}: the final one; --rampup-batch-size starts with fewer")
    return Training(
        seq_len=seq_len,
        global_batch=batch,
        token_budget=float(_samples(reader, batch) * seq_len),
        precision=precision(reader),
        optimizer=_OPTIMIZERS.get(reader.word("optimizer", *_OPTIMIZERS), "adam"),
        **_dropouts(reader),
        **_capacity(reader),
    )


def _scheduled(reader: Reader, plan: Plan) -> int:
    """Return the last global batch of a schedule of thresholds, 0 where there is none.

    Source: megatron/core/num_microbatches_calculator.py StepBatchsizeNumMicroBatchesCalculator.
    """
    name = "step_batch_size_schedule"
    if not reader.has(name):
        return 0
    # validate_args puts one micro-batch on each replica into the namespace of a schedule
    if reader.has("global_batch_size") and reader.whole("global_batch_size") != plan.micro_batch * plan.dp:
        reader.fail(name, f"contradicts {reader.option('global_batch_size')}", "give one of them")
    steps = [_STEP.fullmatch(step) for step in reader.word(name).split()]
    if not steps or not all(steps):
        reader.fail(name, "is not a schedule of thresholds", 'write for example "0:768 250B:1536"')
        return 0
    batches = [int(step[1]) for step in steps if step]
    if len(batches) > 1:
        reader.assume(f"global_batch {batches[-1]}: the final one; {reader.option(name)} starts with {batches[0]}")
    return batches[-1]


def _check_rounds(reader: Reader, plan: Plan, count: int) -> None:
    """Record rounds of so many micro-batches that Megatron does not run, and assume the least where more are given.

    megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving: of a group, as many as
    stages unless given, what is left over is nothing or at least as many as there are stages.
    """
    name, size = "microbatch_group_size_per_vp_stage", round_size(plan.pp, count)
    if not find_rules(plan.schedule).rounds or plan.pp < 2 or count < plan.pp:
        return
    group = reader.whole(name) or plan.pp
    if not plan.pp <= group <= count or 0 < count % group < plan.pp:
        rule = f"{group} of {count} micro-batches at once do not go through {plan.pp} stages"
        reader.fail(name, rule, f"give {reader.option(name)} {size}")
    elif group != size:
        more = f"{(plan.vpp - 1) * (group - size) / plan.vpp:.3g} more micro-batches are held than is counted"
        reader.assume(f"rounds of {size} micro-batches: with {group} {more}")


def _capacity(reader: Reader) -> dict[str, Any]:
    """Return up to how many rows experts take, and whether they are filled up to that (core/transformer/moe).

    DeepSpeed's always are (deepspeed/moe/sharded_moe.py: what is sent is of experts x capacity).
    """
    if reader.has("moe_train_capacity_factor") and not reader.flag("disable_moe_token_dropping"):
        return {"capacity_factor": reader.number("moe_train_capacity_factor"), "pad_to_capacity": True}
    none = str(reader.raw("moe_expert_capacity_factor")).startswith("-")  # below 0: no capacity
    if none or not (reader.whole("num_experts", 0) and reader.number("moe_expert_capacity_factor")):
        return {}
    pads = reader.flag("moe_pad_expert_input_to_capacity")
    if pads and reader.word("moe_token_dispatcher_type") == "flex":
        reader.fail("moe_pad_expert_input_to_capacity", "contradicts --moe-token-dispatcher-type flex", "use alltoall")
    return {"capacity_factor": reader.number("moe_expert_capacity_factor"), "pad_to_capacity": pads}


def _dropouts(reader: Reader) -> dict[str, Any]:
    """Return which dropouts there are, where that of attention's probabilities and that of the stream differ."""
    of_scores, of_stream = reader.number("attention_dropout") > 0, reader.number("hidden_dropout") > 0
    if of_scores == of_stream:
        return {}
    return {"softmax_dropout": of_scores, "attention_dropout": of_stream, "hidden_dropout": of_stream}


def _seq_len(reader: Reader) -> int:
    name = "encoder_seq_length" if reader.has("encoder_seq_length") and not reader.has("seq_length") else "seq_length"
    length, most = reader.needed(name), reader.whole("max_position_embeddings")
    if most and length > most:
        reader.fail(name, f"must not exceed --max-position-embeddings {most}", f"use at most {most}")
    return length


def _samples(reader: Reader, batch: int) -> int:
    """Return the sequences of the whole run, 0 where it is not said."""
    if reader.has("train_iters") and reader.has("train_samples"):
        reader.fail("train_samples", "contradicts --train-iters", "give one of them")
    return reader.whole("train_samples", 0) or (reader.whole("train_iters", 0) or 0) * batch


def precision(reader: Reader) -> str:
    """Return the recipe, with what a precision-aware optimizer keeps in 16 bits of master weights and moments.

    Transformer Engine keeps the 16 bits of a master weight that its bf16 weight lacks (core/optimizer/__init__.py
    store_param_remainders, with Transformer Engine 2.1); Megatron-Core keeps all 32 beside any fp8_recipe but delayed,
    even one that is only named, and an offloaded optimizer keeps 32 of everything. Those of 8 bits count as whole.
    """
    recipe = _gemms(reader)
    if not reader.flag("use_precision_aware_optimizer"):
        return recipe
    aware = _shards_adam(reader) and not reader.flag("optimizer_cpu_offload")
    masters = aware and recipe.startswith("bf16") and _fp8_recipe(reader) == "delayed"
    narrow = [_dtype(reader.word(name)) in ("bf16", "fp16") for name in _MOMENTS]
    moments = aware and all(narrow) and recipe.startswith(("bf16", "fp8"))
    for name in _MOMENTS:
        if not moments and _dtype(reader.word(name)) != "fp32":
            reader.assume(f"moments of 32 bits: {reader.option(name)} counts where both have 16, in bf16 and fp8")
    return recipe + "-masters16" * masters + "-moments16" * moments


_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")


def states_words(precision: str) -> tuple[str, dict[str, Any]]:
    """Return the recipe of GEMMs and gradients of a recipe, and the arguments for what it keeps of the optimizer."""
    gemms, states = split_states(precision)
    words: dict[str, Any] = {"--use-precision-aware-optimizer": True} if states else {}
    return gemms, words | (
        dict.fromkeys(("--exp-avg-dtype", "--exp-avg-sq-dtype"), "bf16") if "moments" in states else {}
    )


def _shards_adam(reader: Reader) -> bool:
    """Return whether the optimizer is Adam, sharded by Megatron-Core's distributed optimizer."""
    adam = _OPTIMIZERS.get(reader.word("optimizer"), "adam") == "adam"
    return adam and reader.flag("use_distributed_optimizer") and not reader.flag("use_megatron_fsdp")


def _gemms(reader: Reader) -> str:
    """Return the types of GEMMs and gradients: 32-bit gradients in bf16 unless asked otherwise, 16-bit ones in fp16."""
    if reader.flag("bf16") and reader.flag("fp16"):
        reader.fail("fp16", "contradicts --bf16", "give one of them")
    whole, narrow = _gradients(reader)
    eight, four = reader.has("fp8") or reader.flag("fp8_e4m3") or reader.flag("fp8_hybrid"), reader.has("fp4")
    if eight and four:
        reader.fail("fp4", "contradicts --fp8-format", "give one of them")
    if eight or four:
        return ("fp4" if four else "fp8") + ("-grads16" if narrow else "")
    if reader.flag("bf16"):
        return "bf16-grads16" if narrow else "bf16"
    if reader.flag("fp16"):
        return "fp16" if whole else "fp16-grads16"
    return "fp32"


def _gradients(reader: Reader) -> tuple[bool, bool]:
    """Return whether the sum of gradients has 32 bits, and whether it has 16, where that is said.

    Megatron-FSDP's has the width of the parameters unless told otherwise, whatever --accumulate-allreduce-grads-in-fp32
    says (megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py _resolve_group_grad_dtype).
    """
    if reader.flag("use_megatron_fsdp"):
        whole = _dtype(reader.word("megatron_fsdp_main_grads_dtype")) == "fp32"
        return whole, not whole and (reader.flag("bf16") or reader.flag("fp16"))
    whole = reader.flag("accumulate_allreduce_grads_in_fp32")
    narrow = reader.flag("grad_reduce_in_bf16") or (
        reader.flag("use_precision_aware_optimizer") and _dtype(reader.word("main_grads_dtype")) in ("bf16", "fp16")
    )
    if whole and narrow:
        reader.fail("accumulate_allreduce_grads_in_fp32", "contradicts gradients of 16 bits", "give one of them")
    return whole, narrow


def _dtype(word: str) -> str:
    """Return the short name of a data type, which a parsed namespace holds as torch's own."""
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return short.get(word.removeprefix("torch."), word)


def stack(reader: Reader, name: str = "megatron") -> Stack:
    """Return Megatron-Core's stack with what the arguments change: kernels, overlap, padding and dispatch."""
    old = era(reader)
    base = find_stack(name if not old else "megatron-scores" if scores(reader) else "megatron-2023")
    if old:
        reader.assume(f"stack {base.name}: {old} is of Megatron-LM before Megatron-Core")
    gated = reader.flag("swiglu")
    fused = reader.flag("bias_swiglu_fusion" if gated else "bias_gelu_fusion")
    sends = tuple(s for s in base.overlap_sends if s != "interleaved" or reader.flag("overlap_p2p_comm"))
    fsdp = reader.flag("use_megatron_fsdp") or reader.flag("use_torch_fsdp2")
    return replace(
        base,
        attention="scores" if scores(reader) else base.attention,
        activation=base.activation if fused else "eager",
        overlap_gradients=reader.flag("overlap_grad_reduce") or fsdp,
        overlap_parameters=reader.flag("overlap_param_gather") or fsdp,
        overlap_tensor=reader.flag("tp_comm_overlap"),
        fuses_operators=reader.flag("use_transformer_engine_op_fuser"),
        overlap_experts="always" if _overlaps_experts(reader, base) else base.overlap_experts,
        overlap_sends=sends,
        loss=_loss(reader, base),
        library_workspace=_scratch(reader, base),
        grouped_streams=base.grouped_streams if reader.flag("moe_grouped_gemm") else 0,
        settings=_settings(reader),
        vocab_multiple=_vocab_multiple(reader),
        dispatch=_dispatch(reader, base),
        **launch_seconds(reader, base),
    )


def _overlaps_experts(reader: Reader, base: Stack) -> bool:
    """Return whether messages of experts run beside the pass of another micro-batch, where Megatron-Core lets them.

    megatron/core/transformer/transformer_config.py and pipeline_parallel/combined_1f1b.py.
    """
    name, delayed = "overlap_moe_expert_parallel_comm", reader.flag("delay_wgrad_compute")
    if not reader.flag(name):
        if delayed:
            reader.fail(
                "delay_wgrad_compute", f"does nothing without {reader.option(name)}", f"give {reader.option(name)} too"
            )
        return False
    pieces = [
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "hybrid_layer_pattern"),
        *("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size"),
    ]
    if reader.count("expert_model_parallel_size") < 2:
        reader.fail(name, "needs expert parallelism", "give --expert-model-parallel-size, or leave it out")
    if reader.count("pipeline_model_parallel_size") > 1 and not any(map(reader.has, pieces)):
        reader.fail(
            name, "needs several pieces of the model on a stage", "give --num-virtual-stages-per-pipeline-rank 2"
        )
    if reader.word("recompute_granularity") == "full" or "moe" in reader.words("recompute_modules"):
        reader.fail(name, "does not go with full recompute, nor with that of experts", "recompute other modules")
    if _gathers_tokens(reader, base):
        option = reader.option("moe_token_dispatcher_type")
        reader.fail(name, f"does not go with {option} allgather", f"give {option} alltoall or flex")
    if reader.flag("moe_shared_expert_overlap"):
        reader.fail(name, "does not go with --moe-shared-expert-overlap", "leave one of them out")
    if not delayed:
        reader.assume(
            f"weight gradients overlap with messages of experts: {reader.option('delay_wgrad_compute')} is not given"
        )
    return True


def era(reader: Reader) -> str:
    """Return an argument that only releases before Megatron-Core have, or nothing."""
    return next((reader.option(name) for name in facts()["old"]["names"] if reader.has(name)), "")


def scores(reader: Reader) -> bool:
    """Return whether attention keeps its score matrix: unfused attention, or local modules without flash."""
    backend = reader.word("attention_backend", "auto", "flash", "fused", "unfused", "local")
    if backend in ("unfused", "local"):
        if reader.flag("use_flash_attn"):
            reader.fail("use_flash_attn", f"contradicts --attention-backend {backend}", "give one of them")
        return True
    if reader.flag("use_flash_attn"):
        return False
    if era(reader):
        return True
    return not _modules(reader)


def _modules(reader: Reader) -> bool:
    """Return whether the layers are Transformer Engine's modules."""
    return reader.word("transformer_impl", "local", "transformer_engine", "inference_optimized") != "local"


def _scratch(reader: Reader, base: Stack) -> tuple[tuple[str, float], ...]:
    """Return the scratch of Transformer Engine's GEMMs.

    A router runs on them whatever the layers are (megatron/core/transformer/moe/moe_utils.py router_gating_linear).
    """
    return base.library_workspace if _modules(reader) or reader.whole("num_experts", 0) else (("other", 0.0),)


def _settings(reader: Reader) -> Settings:
    """Return what the arguments set of buffers: how gradients are added, and masks that come with the data."""
    # Those of Megatron-FSDP are groups of replicas, which the plan has.
    grouped = reader.flag("use_megatron_fsdp") or reader.flag("use_custom_fsdp")
    wide = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    narrow = precision(reader).startswith(("fp8", "fp4")) and reader.flag("first_last_layers_bf16")
    first, last = ((reader.whole(name, least=0) or 0) if narrow else 0 for name in wide)
    return Settings(
        separate_weight_gradients=not reader.flag("gradient_accumulation_fusion"),
        attention_mask=reader.flag("create_attention_mask_in_dataloader"),
        optimizer_instances=1 if grouped else reader.count("num_distributed_optimizer_instances"),
        fp8_recipe=_fp8_recipe(reader) if precision(reader).startswith("fp8") else "",
        fp8_param_gather=reader.flag("fp8_param_gather") or reader.flag("fp4_param_gather"),
        bf16_first_layers=first,
        bf16_last_layers=last,
    )


def settings_words(settings: Settings) -> dict[str, Any]:
    """Return the arguments that `_settings` reads, but those of 8-bit types."""
    return {
        "--no-gradient-accumulation-fusion": settings.separate_weight_gradients,
        "--no-create-attention-mask-in-dataloader": not settings.attention_mask,
        **(
            {"--num-distributed-optimizer-instances": settings.optimizer_instances}
            if settings.optimizer_instances > 1
            else {}
        ),
    }


def _fp8_recipe(reader: Reader) -> str:
    """Return how GEMMs of 8 bits are scaled; a recipe of its user's own is read as Megatron-LM's default."""
    word = reader.word("fp8_recipe", *SCALINGS, "custom")
    if word == "custom":
        reader.assume(f"{reader.option('fp8_recipe')} {word}: read as {SCALINGS[0]}")
    return word if word in SCALINGS else SCALINGS[0]


def _loss(reader: Reader, base: Stack) -> LossKernel:
    """Return the kernel of the loss: Megatron-LM's own, compiled, or Transformer Engine's in the logits."""
    if not reader.flag("cross_entropy_loss_fusion"):
        return base.loss
    kind = reader.word("cross_entropy_fusion_impl", "native", "te")
    return "vocab-parallel-in-place" if kind == "te" else "vocab-parallel-compiled"


def _vocab_multiple(reader: Reader) -> int:
    """Return what x tp the vocabulary is padded to; 1 where it was padded already."""
    padded = reader.has("padded_vocab_size") and not reader.has("vocab_size")
    return 1 if padded or not reader.flag("pad_vocab_size") else reader.count("make_vocab_size_divisible_by")


def _dispatch(reader: Reader, base: Stack) -> Dispatch:
    """Return how tokens find their experts: DeepEP and HybridEP send one copy to each node.

    Kernels of --moe-token-dispatcher-type flex are DeepEP's first unless told otherwise (docker/Dockerfile.ci.dev takes
    them from DeepEP's branch hybrid-ep, which has both).
    """
    name, usual = "moe_flex_dispatcher_backend", base.dispatch
    kind = reader.word("moe_token_dispatcher_type", "alltoall", "allgather", "flex", "alltoall_seq")
    if _gathers_tokens(reader, base) and reader.count("expert_model_parallel_size") > 1:
        return "all-gather"
    flex = kind == "flex" or reader.flag("moe_enable_deepep")
    if not (reader.has(name) if usual == "deduplicated" else flex):  # recipes of Megatron-Bridge have their own
        return usual
    return "deduplicated" if reader.word(name, "deepep", "hybridep") == "hybridep" else "deepep-1"


def _gathers_tokens(reader: Reader, base: Stack) -> bool:
    """Return whether tokens are gathered on all ranks of experts, which Megatron-LM does unless told otherwise."""
    name = "moe_token_dispatcher_type"
    own = reader.has(name) or base.dispatch == "all-to-all"  # recipes of Megatron-Bridge set another
    return own and reader.word(name) == "allgather" and not reader.flag("moe_enable_deepep")
