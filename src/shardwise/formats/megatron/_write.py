"""A case as Megatron-LM's arguments and a launch script.

What was written is read again: a field that does not come back as it was is one that Megatron-LM cannot be told.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import groupby
from typing import TypeVar

from shardwise.errors import InputError, Problem
from shardwise.files import file_name
from shardwise.formats._exported import (
    Differences,
    ExportCase,
    Exported,
    canonical,
    differences,
    lost,
    refuse,
    unexported,
    worded,
)
from shardwise.formats._launch import Launch
from shardwise.formats.megatron._job import settings_words, states_words
from shardwise.formats.megatron._read import read_args
from shardwise.formats.megatron._values import facts, routing
from shardwise.models import MLP, Activation, Attention, Block, GatedDelta, LatentAttention, Mamba2, Model, MoE
from shardwise.plans import Plan, Training
from shardwise.plans.schedules import round_size
from shardwise.records import replace

T = TypeVar("T")
Args = dict[str, str | int | float | bool | tuple[str, ...] | None]
_PRECISIONS: dict[str, Args] = {
    "bf16": {"--bf16": True},
    "bf16-grads16": {"--bf16": True, "--grad-reduce-in-bf16": True},
    "fp16": {"--fp16": True, "--accumulate-allreduce-grads-in-fp32": True},
    "fp16-grads16": {"--fp16": True},
    "fp8": {"--bf16": True, "--fp8-format": "hybrid"},
    "fp8-grads16": {"--bf16": True, "--grad-reduce-in-bf16": True, "--fp8-format": "hybrid"},
    "fp4": {"--bf16": True, "--fp4-format": "e2m1"},
    "fp4-grads16": {"--bf16": True, "--grad-reduce-in-bf16": True, "--fp4-format": "e2m1"},
}
_ACTIVATIONS: dict[tuple[Activation, bool], Args] = {
    ("silu", True): {"--swiglu": True}, ("gelu", True): {"--quick-geglu": True},
    ("relu2", False): {"--squared-relu": True}, ("gelu-tanh", False): {"--openai-gelu": True},
    ("gelu-new", False): {"--openai-gelu": True},
}  # fmt: skip
_SHARDINGS: dict[str, Args] = {
    "distributed-optimizer": {"--use-distributed-optimizer": True},
    "zero2": {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": "optim_grads"},
    "fsdp": {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": "optim_grads_params"},
    "hsdp": {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": "optim_grads_params"},
}
_BESIDE = ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
_CONTEXT = {"ring": "p2p", "all-gather": "allgather", "all-to-all": "a2a"}
# validate_args wants one connection for tensor parallelism before Blackwell, and more with FSDP.
_ENVIRONMENT = ("export CUDA_DEVICE_MAX_CONNECTIONS=1", "unset CUDA_DEVICE_MAX_CONNECTIONS")
EXPORTED = frozenset((
    "tp", "cp", "pp", "vpp", "dp", "ep", "etp", "micro_batch", "sequence_parallel", "cp_kind", "schedule", "sharding",
    "shard", "recompute", "recompute_layers", "modules", "stage_layers", "order",
))  # fmt: skip
"""Fields of a plan that Megatron-Core has words for."""
_BEFORE_FEED_FORWARD = (Attention, LatentAttention, GatedDelta)


def export(case: ExportCase) -> Exported:
    """Return a launch script for a case; raises `InputError` naming every field that Megatron-LM cannot express.

    Source: the arguments of github.com/NVIDIA/Megatron-LM at the version that is returned.
    """
    _check_layers(case.model)
    plan, differing = unexported(worded(case).plan, EXPORTED | {"offload"})
    case = replace(case, plan=plan)
    name, words = file_name(case.model.name, ".sh"), arguments(case)
    refuse("Megatron-LM", differing | _lost(case, words), case)
    checked = facts()["checked"]
    notes = ("data, tokenizer, learning rate and checkpoints are yours to add, passed on from the script's own",)
    version = f"{checked['release']} and commit {checked['commit'][:7]} of {checked['date']}"
    files = {name: script(case, words)}
    return Exported(system="Megatron-LM", version=version, files=files, notes=notes, launch=f"bash {shlex.quote(name)}")


def arguments(case: ExportCase) -> list[str]:
    """Return the arguments of a case."""
    words = _model(case.model, case.job) | plan_words(case) | settings_words(case.stack.settings)
    return list(spelled(words | {"--tp-comm-overlap": words["--tp-comm-overlap"] and words["--sequence-parallel"]}))


def plan_words(case: ExportCase) -> Args:
    """Return the arguments of a case but those of its model."""
    return {**_plan(case.plan, case.model), **_job(case), **_stack(case)}


def spelled(words: Args) -> Iterator[str]:
    """Yield arguments with their values as words; switches that are off are left out."""
    for option, value in words.items():
        if value is not None and value is not False:
            yield option
            yield from () if value is True else value if isinstance(value, tuple) else (str(value),)


def _first(model: Model, kind: type[T]) -> T | None:
    parts = (part for block in (*model.kinds, *model.mtp) for part in (*block.mixers, block.feed_forward))
    return next((part for part in parts if isinstance(part, kind)), None)


def _model(model: Model, job: Training) -> Args:
    rms = "rms" in model.norm
    core = _first(model, Attention)
    position = "learned_absolute" if model.positions else ("rope" if core is None or core.rotary else "none")
    both = model.dropout if job.dropout is None else job.dropout
    of_scores, of_stream = (both if one is None else one for one in (job.softmax_dropout, job.hidden_dropout))
    words: Args = {
        "--num-layers": None if _is_hybrid(model) else model.num_layers,
        "--hidden-size": model.hidden,
        "--seq-length": job.seq_len,
        "--max-position-embeddings": model.positions or max(model.max_context, job.seq_len),
        "--position-embedding-type": position,
        "--vocab-size": model.vocab,
        "--normalization": "RMSNorm" if rms else "LayerNorm",
        "--untie-embeddings-and-output-weights": not model.tied,
        "--attention-dropout": 0.1 if of_scores else 0.0,
        "--hidden-dropout": 0.1 if of_stream else 0.0,
        "--mtp-num-layers": len(model.mtp) if model.mtp and not _is_hybrid(model) else None,
        "--mtp-use-repeated-layer": any(block.shared_weights for block in model.mtp),
        "--hybrid-layer-pattern": _letters(model) if _is_hybrid(model) else None,
    }
    return words | _mixers(model) | _feeds(model) | _patterns(model)


def _is_hybrid(model: Model) -> bool:
    """Return whether a layer is a mixer or a feed-forward alone, which patterns of letters describe."""
    return any(not block.mixers or block.feed_forward is None for block in model.kinds)


def _letters(model: Model) -> str:
    return "/".join([_run(model.layers), *(_run((block, *block.also)) for block in model.mtp)])


def _run(blocks: tuple[Block, ...]) -> str:
    def letter(block: Block) -> str:
        if isinstance(block.feed_forward, MoE):
            return "E"
        if block.feed_forward is not None:
            return "-"
        kinds = {Mamba2: "M", Attention: "*", GatedDelta: "G"}
        one = block.mixers[0] if block.mixers else None
        if isinstance(one, LatentAttention):
            return "D" if one.indexer else "+"
        return kinds.get(type(one), "?") if one is not None else "?"

    return "".join(map(letter, blocks))


def _check_layers(model: Model) -> None:
    """Raise `InputError` where a hybrid has layers that no letter stands for, or a block a mixer without arguments."""
    blocks = (*model.kinds, *model.mtp)
    odd = [mixer for block in blocks for idle in block.idle for mixer in idle.mixers]
    if odd:
        rule = "has layers that attend to another part"
    elif _is_hybrid(model):
        odd = [block.mixers[0] for block in blocks if "?" in _run((block,)) and block.mixers]
        rule = "has layers that Megatron-LM's patterns have no letter for"
    else:
        odd = [mixer for block in blocks for mixer in block.mixers if not isinstance(mixer, _BEFORE_FEED_FORWARD)]
        rule = "has mixers before a feed-forward that Megatron-LM has no argument for"
    if odd:
        names = ", ".join(sorted({type(mixer).__name__ for mixer in odd}))
        remedy = "export another model, or this one to deepspeed or fsdp"
        raise InputError([Problem("model", model.name, f"{rule}: {names}", remedy)])


def _mixers(model: Model) -> Args:
    words: Args = {}
    core, latent, mamba, delta = (_first(model, kind) for kind in (Attention, LatentAttention, Mamba2, GatedDelta))
    if isinstance(core, Attention):
        words |= _attention(core)
    if isinstance(latent, LatentAttention):
        words |= _latent(latent)
    if isinstance(mamba, Mamba2):
        words |= {"--mamba-num-heads": mamba.heads, "--mamba-head-dim": mamba.head_dim}
        words |= {"--mamba-num-groups": mamba.groups, "--mamba-state-dim": mamba.state}
    if isinstance(delta, GatedDelta):
        words |= {"--linear-num-key-heads": delta.key_heads, "--linear-num-value-heads": delta.value_heads}
        words |= {"--linear-key-head-dim": delta.key_dim, "--linear-value-head-dim": delta.value_dim}
        words |= {"--linear-conv-kernel-dim": delta.conv}
    words.setdefault("--num-attention-heads", 1)
    return words


def _attention(a: Attention) -> Args:
    grouped = a.kv_heads != a.heads
    return {
        "--num-attention-heads": a.heads,
        "--kv-channels": a.head_dim,
        "--group-query-attention": grouped,
        "--num-query-groups": a.kv_heads if grouped else None,
        "--add-qkv-bias": a.qkv_bias and not a.out_bias,
        "--qk-layernorm": a.qk_norm == "head" and a.qk_norm_kind != "rmsnorm-no-weight",
        "--qk-l2-norm": a.qk_norm == "head" and a.qk_norm_kind == "rmsnorm-no-weight",
        "--softmax-type": "learnable" if a.sinks else None,
        "--attention-output-gate": a.output_gate,
    }


def _latent(a: LatentAttention) -> Args:
    words: Args = {
        "--multi-latent-attention": True, "--qk-layernorm": a.latent_norm != "none", "--num-attention-heads": a.heads,
        "--q-lora-rank": a.q_lora_rank or None, "--kv-lora-rank": a.kv_lora_rank, "--qk-head-dim": a.qk_nope_head_dim,
        "--qk-pos-emb-head-dim": a.qk_rope_head_dim, "--v-head-dim": a.v_head_dim,
    }  # fmt: skip
    if a.indexer is not None:
        words |= {"--experimental-attention-variant": "dsa", "--dsa-indexer-n-heads": a.indexer.heads}
        words |= {"--dsa-indexer-head-dim": a.indexer.head_dim, "--dsa-indexer-topk": a.indexer.top_k}
    return words


# What gpt-oss clamps to, the only one of its kind (config.json of openai/gpt-oss-120b, swiglu_limit, 2026-11).
_LIMIT = 7.0


def _feeds(model: Model) -> Args:
    core, dense, moe = _first(model, Attention), _first(model, MLP), _first(model, MoE)
    biased = (dense.bias if dense else False) or (moe.bias if moe else False) or (core.out_bias if core else False)
    feed = dense or moe
    words: Args = {"--disable-bias-linear": not biased}
    if feed is not None:
        words |= _ACTIVATIONS.get((feed.activation, feed.gated), {})
    words["--ffn-hidden-size"] = dense.ffn if dense else None
    if moe is None:
        return words
    return words | {
        "--num-experts": moe.experts,
        "--moe-ffn-hidden-size": moe.ffn,
        "--moe-shared-expert-intermediate-size": moe.shared.ffn if moe.shared else None,
        "--moe-shared-expert-gate": moe.shared_gate,
        "--moe-latent-size": moe.latent or None,
        "--activation-func-clamp-value": _LIMIT if moe.clamped else None,
        **routing(moe),
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": "alltoall",
    }


def _patterns(model: Model) -> Args:
    """Return which layers are MoE, have windows or are linear attention, where they differ."""
    if _is_hybrid(model):
        return {}
    words: Args = {}
    sparse = [isinstance(block.feed_forward, MoE) for block in model.layers]
    if any(sparse) and not all(sparse):
        words["--moe-layer-freq"] = listed(sparse)
    mixers = [block.mixers[0] if block.mixers else None for block in model.layers]
    windows = [mixer.window if isinstance(mixer, Attention) else 0 for mixer in mixers]
    if any(windows):
        words["--window-size"] = f"({max(windows) - 1},0)"
        words["--window-attn-skip-freq"] = None if all(windows) else listed([bool(w) for w in windows])
    delta = [isinstance(mixer, GatedDelta) for mixer in mixers]
    if any(delta):
        words |= {"--experimental-attention-variant": "gated_delta_net", "--linear-attention-freq": listed(delta)}
    return words


def listed(choices: list[bool]) -> str:
    """Return choices as the sum of repeated lists that Megatron-LM reads.

    >>> listed([False, True, True])
    '([0]*1+[1]*2)'
    """
    return "(" + "+".join(f"[{int(one)}]*{len(list(run))}" for one, run in groupby(choices)) + ")"


def _plan(p: Plan, model: Model) -> Args:
    moe = _first(model, MoE) is not None
    words: Args = {
        "--tensor-model-parallel-size": p.tp,
        "--pipeline-model-parallel-size": p.pp,
        "--context-parallel-size": p.cp if p.cp > 1 else None,
        "--cp-comm-type": _CONTEXT[p.cp_kind] if p.cp > 1 or p.cp_kind != "ring" else None,
        "--expert-model-parallel-size": p.ep if moe else None,
        "--expert-tensor-parallel-size": p.etp if moe else None,
        "--sequence-parallel": p.sequence_parallel and p.tp > 1,
        "--micro-batch-size": p.micro_batch,
        "--use-tp-pp-dp-mapping": p.order.index("pp") < p.order.index("dp"),
        "--num-distributed-optimizer-instances": p.dp // p.shard if p.shard > 1 else None,
        **dict.fromkeys(("--optimizer-cpu-offload", "--use-precision-aware-optimizer"), "optimizer" in p.offload),
        "--optimizer-offload-fraction": 1.0 if "optimizer" in p.offload else None,
    }
    words |= _SHARDINGS.get(p.sharding, {}) | _pieces(p, len(model.mtp)) | _recompute(p)
    return words | ({"--ckpt-format": "fsdp_dtensor"} if "--use-megatron-fsdp" in words else {})


def _pieces(p: Plan, mtp: int) -> Args:
    """Return how layers are cut: evenly, in chunks, or as a layout that lists every piece.

    Source: megatron/core/transformer/pipeline_parallel_layer_layout.py validate_layer_layout.
    """
    if p.stage_layers:
        parts = ["t" * n for n in p.stage_layers]
        parts[0], parts[-1] = "E" + parts[0], parts[-1] + "m" * mtp + "L"
        return {"--pipeline-model-parallel-layout": "|".join(parts)}
    return {"--num-virtual-stages-per-pipeline-rank": p.vpp if p.vpp > 1 else None}


def _recompute(p: Plan) -> Args:
    if p.recompute == "full":
        method, number = ("block", p.recompute_layers // p.vpp) if p.recompute_layers else ("uniform", 1)
        return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": number}
    modules = [*(["core_attn"] if p.recompute == "selective" else []), *p.modules]
    if not modules:
        return {}
    return {"--recompute-granularity": "selective", "--recompute-modules": tuple(modules)}


def _job(case: ExportCase) -> Args:
    job, p = case.job, case.plan
    count, samples = job.global_batch // (p.dp * p.micro_batch), round(job.run_tokens / job.seq_len)
    words: Args = {
        "--global-batch-size": job.global_batch,
        "--train-samples": samples or None,
        "--moe-expert-capacity-factor": job.capacity_factor or None,
        "--moe-pad-expert-input-to-capacity": job.pad_to_capacity,
        "--optimizer": job.optimizer if job.optimizer in ("adam", "sgd", "lion", "muon") else None,
    }
    if p.vpp > 1 and count % p.pp:
        words["--microbatch-group-size-per-virtual-pipeline-stage"] = round_size(p.pp, count)
    gemms, states = states_words(job.precision or case.stack.precision)
    words |= _PRECISIONS.get(gemms, {}) | states
    if "--use-megatron-fsdp" in _SHARDINGS.get(p.sharding, {}):  # its own default is the width of the parameters
        words["--megatron-fsdp-main-grads-dtype"] = None if gemms.endswith("-grads16") else "fp32"
    own, narrow = case.stack.settings, next((w[:5] for w in words if w.endswith("-format")), "")
    more: Args = {"--fp8-recipe": own.fp8_recipe or "tensorwise"} if narrow == "--fp8" else {}
    ends = {"--num-layers-at-start-in-bf16": own.bf16_first_layers, "--num-layers-at-end-in-bf16": own.bf16_last_layers}
    more |= {"--first-last-layers-bf16": True, **ends} if narrow and any(ends.values()) else {}
    return words | more | ({f"{narrow}-param-gather": own.fp8_param_gather} if narrow else {})


def _stack(case: ExportCase) -> Args:
    stack, p, moe = case.stack, case.plan, _first(case.model, MoE)
    sharded, feed = "--use-distributed-optimizer" in _SHARDINGS.get(p.sharding, {}), _first(case.model, MLP) or moe
    lets = p.ep > 1 and (p.pp == 1 or p.vpp > 1) and p.recompute != "full" and "moe" not in p.modules
    words: Args = {
        "--transformer-impl": "transformer_engine",
        "--attention-backend": "unfused" if stack.attention == "scores" else None,
        "--overlap-grad-reduce": stack.overlap_gradients,
        "--overlap-param-gather": stack.overlap_parameters and stack.overlap_gradients and sharded,
        "--tp-comm-overlap": stack.overlap_tensor,
        "--use-transformer-engine-op-fuser": stack.fuses_operators,
        "--no-overlap-p2p-communication": "interleaved" not in stack.overlap_sends,
        "--make-vocab-size-divisible-by": stack.vocab_multiple,
        f"--no-bias-{'swiglu' if feed and feed.gated else 'gelu'}-fusion": stack.activation == "eager",
        "--cross-entropy-loss-fusion": stack.loss_kernel in ("vocab-parallel-compiled", "vocab-parallel-in-place"),
        "--cross-entropy-fusion-impl": "te" if stack.loss_kernel == "vocab-parallel-in-place" else None,
    }
    kinds = {"deduplicated": ("flex", "hybridep"), "deepep-1": ("flex", "deepep"), "all-gather": ("allgather",)}
    names = ("--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend") if moe is not None else ()
    overlapped = dict.fromkeys(_BESIDE, lets and stack.overlap_experts == "always")
    return words | overlapped | dict(zip(names, kinds.get(stack.dispatch, ()), strict=False))


def _lost(case: ExportCase, words: list[str]) -> Differences:
    """Return every field that does not come back, as it was and as it came."""
    back = read_args(words, Launch(num_devices=case.plan.num_devices, devices_per_node=case.cluster.devices_per_node))
    differing = lost(case, back)
    if back.model is not None:
        for path, a, b in differences(canonical(case.model), canonical(back.model)):
            differing.setdefault(path.rpartition(".")[2] if "[" in path else path, (a, b))
    return differing


def script(case: ExportCase, words: list[str]) -> str:
    """Return the text of a launch script with the arguments, one to a line."""
    each, checked = min(case.cluster.devices_per_node, case.plan.num_devices), facts()["checked"]
    lines: list[str] = []
    for word in words:
        if word.startswith("--"):
            lines.append("    " + word)
        else:
            lines[-1] += " " + shlex.quote(word)
    head = f"""#!/bin/bash
# {case.model.name} on {case.plan.num_devices} devices, as Megatron-LM {checked["release"]} reads it.
# Data, tokenizer, learning rate and checkpoints follow as arguments of this script.
{_ENVIRONMENT["--use-megatron-fsdp" in words]}

LAUNCH=(
    --nproc_per_node {each}
    --nnodes {-(-case.plan.num_devices // each)}
    --node_rank ${{NODE_RANK:-0}}
    --master_addr ${{MASTER_ADDR:-localhost}}
    --master_port ${{MASTER_PORT:-6000}}
)

ARGUMENTS=(
"""
    return head + "\n".join(lines) + '\n)\n\ntorchrun "${LAUNCH[@]}" pretrain_gpt.py "${ARGUMENTS[@]}" "$@"\n'
