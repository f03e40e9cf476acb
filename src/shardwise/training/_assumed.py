"""What an answer about training says that it assumed, and what of a question changes nothing."""

from __future__ import annotations

from shardwise.cost import WIDE_DTYPES, family_of
from shardwise.models import Block, Model, attention_limits
from shardwise.ops import count_parameters
from shardwise.ops.core_kernels import leaves_heads, views_keys
from shardwise.ops.elementwise import written_in_python
from shardwise.ops.experts import has_fp32_experts
from shardwise.plans import (
    OBJECTIVES,
    Plan,
    Training,
    find_rules,
    find_scaling,
)
from shardwise.training._case import TrainingCase

ROLLOUTS_LEFT_OUT = "rollouts: left out of time and cost; `train --rollout-prompt-tokens N` times them"
# Seven synchronous runs with one pool (github.com/NVIDIA-NeMo/RL docs/about/performance-summary.md, 0.5 and 0.6), each
# asked with its mean length: 1.23 to 1.67 times, and 4.5 with DeepSeek-V3, whose answers have 700 of 1,536 tokens.
EQUAL_ROLLOUTS = (
    "rollouts: every answer as long as a sequence leaves behind its prompt; where lengths differ a step waits for the "
    "longest, and runs with one pool of devices took 1.2 to 1.7 times what their mean length says"
)
# The same recipe with routing forced and free: Qwen3-30B on H100 24.7 and 30.3 s, Nemotron-3 Super 27.6 and 29.4
# (github.com/NVIDIA-NeMo/Megatron-Bridge examples/model_verification_cards), Qwen3-235B 9 to 24 % by length
# (github.com/yanring/Megatron-MoE-ModelZoo).
_EVEN_ROUTING = (
    "expert_imbalance 1: every rank of experts gets as many tokens, as benchmarks force it; runs that leave it to the "
    "router took 7 to 24 % longer"
)


def idle_settings(case: TrainingCase) -> list[tuple[str, str]]:
    """Return the settings of the framework that change nothing under a plan, and why."""
    settings, plan, idle = case.stack.settings, case.plan, list[tuple[str, str]]()
    if plan.recompute != "full":
        whole = ("checkpoint_policy", "partition_activations")
        idle += [(name, "there are no checkpoints of whole layers") for name in whole if getattr(settings, name)]
    if plan.recompute == "full" and plan.modules:
        idle.append((f"modules {','.join(plan.modules)}", "recompute full runs whole layers again"))
    if plan.recompute == "full" and settings.partition_activations and (plan.tp == 1 or plan.sequence_parallel):
        idle.append(
            ("partition_activations", "tp is 1" if plan.tp == 1 else "sequence parallelism splits them already")
        )
    if settings.bucket_elements and not case.recipe.shards_optimizer:
        idle.append(("bucket_elements", "no optimizer is sharded"))
    if settings.max_live_parameters and not case.recipe.shards_weights:
        idle.append(("max_live_parameters", "no weights are sharded"))
    if settings.quantize_moe_experts and not (case.model.has_experts and case.tuning and case.tuning.base.bitsandbytes):
        idle.append(("quantize_moe_experts", "there are no experts beside weights of bitsandbytes"))
    if settings.pipeline_runs > 1 and plan.pp == 1:
        idle.append((f"pipeline_runs {settings.pipeline_runs}", "pp is 1"))
    if settings.sync_each_batch and not (case.stack.accumulates_whole and case.recipe.shards_weights):
        idle.append(("sync_each_batch", "no gradients stay whole between micro-batches"))
    return [*idle, *_idle_bits(case), *_idle_widths(case), *_idle_kernels(case)]


def _idle_kernels(case: TrainingCase) -> list[tuple[str, str]]:
    """Return what of norms and of attention the kernels of a framework have no place for."""
    stack, idle, width = case.stack, list[tuple[str, str]](), case.stack.settings.norm_bytes
    if width == case.recipe.precision.activation_bytes:
        idle.append((f"norm_bytes {width:g}", "norms keep so many as it is"))
    elif width and stack.norm == "eager" and all(written_in_python(block.norm) for block in layers_within(case.model)):
        idle.append((f"norm_bytes {width:g}", f"norms of {stack.name} are steps, which keep copies of their own"))
    if case.job.softmax_dropout and stack.attention == "flash":
        idle.append(("softmax_dropout", "fused attention makes its masks again in backward"))
    return idle


def _idle_bits(case: TrainingCase) -> list[tuple[str, str]]:
    """Return the settings of GEMMs of fewer than 16 bits that those of a case do not read."""
    settings, compute, idle = case.stack.settings, case.recipe.precision.compute, list[tuple[str, str]]()
    for name in ("bf16_first_layers", "bf16_last_layers", "bf16_mtp_layers"):
        if getattr(settings, name) and compute in (*WIDE_DTYPES, "fp32", "tf32"):
            idle.append((name, f"GEMMs run in {compute}"))
    if settings.bf16_mtp_layers and not case.model.mtp:
        idle.append(("bf16_mtp_layers", f"{case.model.name} has none"))
    if settings.fp8_recipe and compute != "fp8":
        idle.append((f"fp8_recipe {settings.fp8_recipe}", f"GEMMs run in {compute}"))
    if settings.fp8_param_gather and find_scaling(compute) is None:
        idle.append(("fp8_param_gather", f"GEMMs run in {compute}"))
    return idle


def _idle_widths(case: TrainingCase) -> list[tuple[str, str]]:
    """Return the widths of saved MLP inputs that a model without a feed-forward has no use for."""
    if any(block.feed_forward is not None for block in layers_within(case.model)):
        return []
    names = ("mlp_input_bits", "activation_input_bits", "mlp_down_input_bits")
    why = f"{case.model.name} has no feed-forward"
    return [(name, why) for name in names if getattr(case.stack.settings, name)]


def layers_within(model: Model) -> list[Block]:
    """Return the kinds of layer of a model, those inside them too."""
    return [one for block in model.kinds for one in (block, *block.also)]


def reported_otherwise(case: TrainingCase) -> list[str]:
    """Return what the report of a stack's run states and the question does not, by flag, and what no flag says."""
    plan, settings, notes = case.plan, case.stack.settings, list[str]()
    for name, value in case.stack.reported:
        if name == "precision":
            same = case.recipe.precision.name == value
        else:
            same = {*value} <= {*plan.modules} if name == "modules" else getattr(settings, name) == value
        if not same:
            text = ",".join(value) if isinstance(value, tuple) else value
            notes.append(f"--{name.replace('_', '-')} {text}")
    flags = [f"the report of its run has {' '.join(notes)}"] if notes else []
    return [f"stack {case.stack.name}: {text}" for text in (*flags, *case.stack.uncounted)]


def _capacity_note(job: Training, model: Model) -> str:
    """Return what a capacity of experts does to the rows that tokens send them: drops, fills them up, or neither."""
    if not model.has_experts:
        return f"no effect, {model.name} has no experts"
    share = job.capacity_factor / max(job.expert_imbalance, 1.0)
    if share < 1:
        who = "the busiest experts drop" if job.expert_imbalance > 1 else "experts drop"
        return f"{who} {1 - share:.0%} of their rows; tokens/s and MFU count every token all the same"
    if job.pad_to_capacity and job.capacity_factor > 1:
        zeros = 1 - 1 / job.capacity_factor
        return f"{zeros:.0%} of the rows of experts are zeros that fill them up; MFU does not count them"
    return f"routing is taken as {'stated' if job.expert_imbalance > 1 else 'even'}, so that no row is dropped"


def idle_words(job: Training, model: Model) -> list[str]:
    """Return the words of a job that change nothing for a model, or beside the rest of it."""
    idle = list[str]()
    if job.expert_imbalance > 1 and not model.has_experts:
        idle.append(f"expert_imbalance {job.expert_imbalance:g}: no effect, {model.name} has no experts")
    if job.attention_density < 1 and not any(m.attends for b in layers_within(model) for m in b.mixers):
        idle.append(f"attention_density {job.attention_density:g}: no effect, {model.name} has no attention")
    if job.checkpoint_interval_seconds and not (job.failures_per_device_hour or job.checkpoint_seconds):
        idle.append("checkpoint_interval: no effect without failures or the time of a checkpoint")
    return idle


def stated(case: TrainingCase) -> tuple[str, ...]:
    """Return what was assumed because the input was silent."""
    notes = [f"stack {case.stack.name}: {case.cluster.device.built(case.stack.title)}", *reported_otherwise(case)]
    notes += [*_sdpa_notes(case), *_attention_notes(case)]
    if not case.job.precision:
        notes.append(f"precision {case.recipe.precision.name}: the stack's own")
    if case.plan.pp == 1 and case.plan.schedule != Plan().schedule:
        notes.append(f"schedule {case.plan.schedule}: no effect, pp is 1")
    off = find_rules(case.plan.schedule).uneven_error
    if off and case.plan.pp > 1 and len(set(case.partition.sizes)) > 1:
        notes.append(f"schedule {case.plan.schedule}: seconds of stages that differ are within {off:.0%} of its order")
    if case.plan.cp == 1 and case.plan.cp_kind != Plan().cp_kind:
        notes.append(f"cp_kind {case.plan.cp_kind}: no effect, cp is 1")
    if 0 < case.model.max_context < case.job.seq_len:
        notes.append(f"{case.job.seq_len} tokens exceed the trained context of {case.model.max_context}")
    notes += idle_words(case.job, case.model)
    if case.job.capacity_factor:
        notes.append(f"capacity_factor {case.job.capacity_factor:g}: {_capacity_note(case.job, case.model)}")
    notes += _expert_notes(case)
    notes += [f"{name}: no effect, {why}" for name, why in idle_settings(case)]
    if case.recipe.precision.note:
        notes.append(case.recipe.precision.note)
    # The law is of training from scratch: what starts from a trained model has no such budget.
    if case.tuning is None and 0 < case.job.run_tokens < 20 * count_parameters(case.model):
        share = case.job.run_tokens / count_parameters(case.model)
        notes.append(f"{share:.3g} tokens a parameter: under the 20 of compute-optimal training (arXiv:2203.15556)")
    if case.job.run_tokens and case.job.method in OBJECTIVES and OBJECTIVES[case.job.method].rollout:
        notes.append(ROLLOUTS_LEFT_OUT)
    if case.job.dropout is None and case.model.dropout:
        notes.append("dropout: the model's own configuration has it")
    if case.cluster.usd_per_device_hour is None:
        notes.append("price: not known, no cost given")
    return tuple(notes)


def _expert_notes(case: TrainingCase) -> list[str]:
    """Return what is said of how experts are split, and of the type that their GEMMs run in."""
    if not case.model.has_experts:
        return []
    notes, tp, job = list[str](), case.plan.tp, case.job
    if case.plan.ep > 1 and job.expert_imbalance == 1 and not job.capacity_factor:
        notes.append(_EVEN_ROUTING)
    if tp > 1 and case.plan.etp == 1:
        notes.append(f"etp 1: experts are whole on their ranks; etp {tp} splits them as tp splits the rest")
    if has_fp32_experts(case.autocast, case.tuning) and not case.stack.experts_loop:
        way = "--base bf16" if case.tuning else "--precision bf16-pure"
        notes.append(
            f"experts run in fp32: autocast leaves grouped GEMMs in the type of their weights; {way} has 16 bits"
        )
    return notes


def _sdpa_notes(case: TrainingCase) -> list[str]:
    """Return what is said where transformers calls SDPA, of windows and of what SDPA lacks.

    The flash kernel that takes sinks, which transformers loads for any of its words, is of Hopper alone
    (GptOssPreTrainedModel._compatible_flash_implementations, kernels-community/vllm-flash-attn3).
    """
    if not case.stack.calls_sdpa or case.stack.attention != "flash":
        return []
    kinds = attention_limits(case.model, case.stack.loads_sinks_kernel)
    lacking = tuple(dict.fromkeys(word for _, more in kinds for word in more))
    sinks = "flash_attention_3" if family_of(case.cluster.device) == "hopper" else "flex_attention"
    other = f"--attn-implementation {sinks if 'sinks' in lacking else 'flash_attention_2'}"
    if lacking:
        words = " and ".join(lacking)
        return [f"attention eager, over the whole matrix of scores: SDPA has no {words}; {other} keeps no scores"]
    sizes = " and ".join(str(limit) for limit, _ in kinds if 0 < limit <= case.job.seq_len)
    note = f"windows of {sizes} tokens are masks to SDPA, which computes all pairs; {other} does not"
    return [note] if sizes else []


def _attention_notes(case: TrainingCase) -> list[str]:
    """Return what is said of layers in fp32, and of heads that share keys where PyTorch fuses nothing for them."""
    mixers = [m for block in case.model.kinds for m in block.mixers if m.attends and not any(m.cost_breakpoints())]
    sizes = [size for size in (m.core(False) for m in mixers) if size is not None]
    shared = [size.head for size in sizes if size.kind == "prefill" and size.group > 1]
    widest = case.stack.widest_fused_head
    unfused = [size.head for size in sizes if size.kind == "prefill" and 0 < widest < size.head]
    device = case.cluster.device
    wide_layers = case.tuning is not None and case.tuning.wide_layers
    own = ["layers in fp32: beside narrow weights nothing casts them without autocast; --precision amp-bf16 does"]
    notes = own if wide_layers else []
    if case.stack.attention == "flash" and unfused:
        title = f"heads of {max(unfused)} values, which no fused kernel of {case.stack.title} trains"
        return [f"attention over the matrix of scores, which is kept: {title}; --recompute selective drops it"]
    heads = [keys for m in mixers if (keys := m.cached_heads()) is not None]
    if any(views_keys(case.stack, one.viewed_keys) for one in heads):
        return [
            *notes,
            "attention in steps, which keep fp32 scores: its class hands SDPA one head of keys for all, which no fused "
            "kernel of PyTorch takes; --attn-implementation flash_attention_2 keeps none",
        ]
    if any(leaves_heads(case.stack, width, case.widest_group) for width in shared):
        type_of = "for heads in fp32 that" if wide_layers else "for heads that"
        return [
            *notes,
            f"attention in steps, which keep fp32 scores: PyTorch has no fused kernel on {device.name} {type_of} "
            "share keys; sequences of equal lengths, since padding makes a mask and fused kernels",
        ]
    wide = case.recipe.precision.activation_bytes == 4 and device.vendor == "NVIDIA"
    if wide and any(leaves_heads(case.stack, width, 0) for width in shared):
        return [
            "attention fused: in fp32 PyTorch has no kernel for heads that share keys on a GPU, and a batch without "
            "padding holds 13 bytes a score of a layer more"
        ]
    return notes
