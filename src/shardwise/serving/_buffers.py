"""Bytes that an engine takes on a rank beside weights and cache: of communicators, captured graphs and workspaces."""

from __future__ import annotations

import re
from typing import Generic

from shardwise import hardware
from shardwise.cost import family_of
from shardwise.ledger.number import X, above, divide, largest, maximum, minimum, total
from shardwise.ledger.op import Op
from shardwise.ledger.traced import named
from shardwise.records import dataclass
from shardwise.serving._case import ServingCase
from shardwise.serving._ledger import StepLedger
from shardwise.serving._policy import limits_of
from shardwise.serving._sizes import ServingSizes


def context_bytes(case: ServingCase, sizes: ServingSizes[X]) -> X:
    """Return bytes of the context, with what graphs of the engine's profile leave on a rank without communicators."""
    memory, cores, zero = case.engine.memory, case.cluster.device.cores, 0 * sizes.batch
    whole = hardware.context_bytes(case.cluster.device) if memory.device_context else 0.0
    driver = memory.context_bytes + whole + memory.context_bytes_per_core * cores + case.job.misc_bytes
    left = zero
    if memory.profiles_graphs_on(case.cluster.device, _runs_v2(case)):
        ranks = maximum(sizes.tp, sizes.ep * sizes.etp) * sizes.pp
        left = above(ranks, 1, zero, zero + memory.profiled_graph_bytes_per_core * cores)
    return named(left + driver, "context", dict(case.engine.sources)["memory.context_bytes"])


def _is_quantised(case: ServingCase) -> bool:
    return case.format.bits < 16


def _runs_v2(case: ServingCase) -> bool:
    return case.engine.memory.runs_v2(case.model, _is_quantised(case))


def absorbed_bytes(case: ServingCase, ops: tuple[Op[X], ...], zero: X) -> X:
    """Return bytes of what an engine makes of latents' up-projections when they are loaded, and keeps beside them."""
    weights = [w for op in ops for w in op.weights if w.role == "kv_up"]
    if not case.engine.memory.absorbed_copies or not weights:
        return zero
    forms = (case.format.of(weight) for weight in weights)
    sizes = [case.engine.memory.absorbed_bytes(form.base if form else "bf16") for form in forms]
    copies = total((size * w.elements for size, w in zip(sizes, weights, strict=True)), zero)
    return named(copies, "absorbed up-projections", dict(case.engine.sources)["memory.absorbed_copies"])


def rotary_bytes(case: ServingCase, zero: X) -> X:
    """Return bytes of the tables of cosines and sines that a rank of any stage has, one for all layers that share it.

    As long as the context of the checkpoint, whatever length its server takes (`max_position_embeddings`; no
    --max-model-len shortens it), and so many times that where linear scaling lengthens it, but for layers with a
    window, which keep their own positions (Gemma 3).
    """
    memory, model = case.engine.memory, case.model
    if not memory.rotary_element_bytes or not re.fullmatch(memory.rotary_families, model.family):
        return zero
    rotated = ((one.rotated, one.cached_heads()) for block in model.kinds for one in block.mixers if one.rotated)
    factor = model.rotary_factor or 1.0
    tables = {(width, 1.0 if heads and heads.windowed else factor) for width, heads in rotated}
    rows = model.stated_context or model.max_context
    elements = sum(width * rows * longer for width, longer in tables)
    return named(
        zero + memory.rotary_element_bytes * elements,
        "tables of cosines and sines",
        dict(case.engine.sources)["memory.rotary_element_bytes"],
    )


def tower_bytes(case: ServingCase, sizes: ServingSizes[X]) -> X:
    """Return bytes of the weights of towers on a rank of the first stage."""
    return named(divide(0 * sizes.tp + case.activation_bytes * case.tower_parameters, sizes.tp), "weights of towers")


def image_bytes(case: ServingCase, sizes: ServingSizes[X]) -> X:
    """Return bytes of what the towers make of a step that is all images, which the profile keeps to its end.

    vLLM's budget of encoder tokens is that of a step (vllm/v1/worker/gpu/mm/encoder_runner.py, profile_encoder_cache,
    v0.33.0; profile_run of gpu_model_runner.py, v0.19.0).
    """
    tokens = case.profiled.step_tokens * bool(case.tower_parameters)
    return named(0 * sizes.tp + case.activation_bytes * case.model.hidden * tokens, "encoded images")


def sampled_sequences(case: ServingCase) -> int:
    """Return the sequences for whose sampling an engine has memory: of its profile, or as many as it is told.

    SGLang keeps none for those that it may run: its cache is a share of the memory, whatever their number, and bounds
    them long before (0.5.23 python/sglang/srt/mem_cache/kv_cache_configurator.py).
    """
    asked = case.profiled.sequences
    if case.engine.memory.budget != "static":
        return asked
    return min(asked, limits_of(case.engine.name, case.cluster.device).set_aside)


def sampling_bytes(case: ServingCase, sequences: X, kept: X) -> X:
    """Return bytes alive while tokens of so many sequences are chosen, with what the step before keeps."""
    memory, cores = case.engine.memory, case.cluster.device.cores
    vocab = case.model.vocab if case.model.head else 0
    logits = memory.sampler_bytes(case.model, _is_quantised(case)) * (sequences * vocab)
    rows = memory.sampler_row_bytes * vocab * minimum(sequences, 0 * sequences + cores)
    return named(logits + rows + kept, "logits and sampling")


def communicator_bytes(case: ServingCase, sizes: ServingSizes[X]) -> X:
    """Return bytes of buffers of a rank's communicators, and of the workspace of all-reduces that are fused."""
    memory, sources, zero = case.engine.memory, dict(case.engine.sources), 0 * sizes.batch
    # Ranks that have a copy of attention each talk where they share experts.
    together = maximum(sizes.tp, sizes.ep * sizes.etp)
    ranks = together * sizes.pp if memory.reserves_between_stages else together
    family = family_of(case.cluster.device)
    buffers = above(ranks, 1, zero + memory.communicator_bytes_on(family), zero)
    fused = memory.fusion_bytes_on(family)
    if not fused:
        return named(buffers, "communicators", sources["memory.communicator_bytes"])
    workspace = named(above(sizes.tp, 1, zero + fused, zero), "fused all-reduce", sources["memory.fusion_bytes"])
    return named(buffers + workspace, "communicators", sources["memory.communicator_bytes"])


def captured_bytes(case: ServingCase, sequences: X) -> X:
    """Return bytes that the engine sets aside for its captured graphs on a device, where so many sequences may run."""
    memory, host, device = case.engine.memory, case.engine.host, case.cluster.device
    most = host.most_captured(family_of(device))
    if not most or not memory.captures(device, _runs_v2(case)):
        return 0 * sequences
    decoded = sequences * (1 + case.job.num_speculative_tokens)
    tokens = minimum(host.captured_per_sequence * decoded, most) if host.captured_per_sequence else 0 * decoded + most
    return named(
        memory.captured_bytes(tokens, decoded), "captured graphs", dict(case.engine.sources)["memory.graph_bytes"]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBytes(Generic[X]):
    """Bytes of fused experts: of a workspace that is kept, and of what is alive beside it while they run.

    `known` is whether that is all that they take.
    """

    kept: X
    running: X
    known: bool


def expert_bytes(case: ServingCase, ledger: StepLedger[X], sizes: ServingSizes[X]) -> ExpertBytes[X]:
    """Return bytes of the workspace of fused experts: a row of each token and choice, in and out of the GEMMs.

    Rows are as wide as the wider of the model and of what a GEMM writes, gate and up, and once more of what it reads
    (github.com/vllm-project/vllm v0.33.0 vllm/model_executor/layers/fused_moe/experts/triton_moe.py, workspace_shapes;
    vllm/v1/worker/workspace.py, which frees none). FlashInfer's are as many for the time of a call, of all choices
    whether their experts are on the rank or not (github.com/flashinfer-ai/flashinfer 0.7.2
    csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh, getWorkspaceDeviceBufferSizes). Groups of attention
    that share experts gather the tokens of all of them first (vllm/distributed/device_communicators/all2all.py,
    AgRsAll2AllManager, the default), and each profiles a step as long as its own at the same time.
    """
    zero, step, memory = 0 * sizes.tp, ledger.step, case.engine.memory
    kind = memory.expert_workspace(family_of(case.cluster.device), case.format.kind)
    experts = [block.experts for block in case.model.kinds if block.experts]
    if not experts:
        return ExpertBytes(kept=zero, running=zero, known=False)
    groups = maximum(divide(zero + sizes.ep * sizes.etp, sizes.tp), 1.0) if memory.gathers_tokens else zero + 1
    rows = step.sequences * step.tokens * case.activation_bytes * groups
    gathered = above(groups, 1, named(rows * case.model.hidden, "gathered tokens"), zero)
    if not kind:
        return ExpertBytes(kept=zero, running=gathered, known=False)
    widths = (
        (moe.top_k, moe.latent or case.model.hidden, divide(zero + (1 + moe.gated) * moe.ffn, sizes.etp),
         divide(zero + moe.ffn, sizes.etp))
        for moe in experts
    )  # fmt: skip
    each = largest([k * (maximum(out, zero + wide) + maximum(mid, zero + wide)) for k, wide, out, mid in widths])
    workspace: X = named(rows * each, "workspace of experts")
    kept = above(sizes.ep, 1, zero, workspace) if kind == "split" else workspace
    return ExpertBytes(kept=kept, running=workspace - kept + gathered, known=True)


def static_bytes(case: ServingCase, sizes: ServingSizes[X]) -> X:
    """Return bytes of all buffers of a pass on a rank.

    Of every token: the stream six times (in and out of all layers, normed, out of attention, out of a layer, and of
    contexts that sequences share), queries, keys and values twice, those of shared contexts again, the heads' output
    twice, and the widest feed-forward; of every sequence two S x S masks.

    FasterTransformer allocates all of them before a forward pass (github.com/NVIDIA/FasterTransformer
    src/fastertransformer, 2023: allocateBuffer of models/multi_gpu_gpt/ParallelGpt.cc and ParallelGptContextDecoder.cc,
    layers/FfnLayer.cc and layers/attention_layers/GptContextAttentionLayer.cc).
    """
    a, S, new = case.activation_bytes, case.job.input_tokens, case.new_input_tokens
    forward = [b.dense for b in case.model.kinds if b.dense]
    heads = max((m.query_width for block in case.model.kinds for m in block.mixers), default=0)
    width = max(((1 + f.gated) * f.ffn for f in forward), default=0)
    token = 6 * case.model.hidden + divide(0 * sizes.tp + 10 * heads + width, sizes.tp)
    return sizes.batch * a * (new * token + 2 * S * S)
