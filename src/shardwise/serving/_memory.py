"""Bytes on one rank of each stage: weights, cache of the batch, activations, and what the engine takes beside them.

The budget is spelled as the engine spells it: docs/formulas.md, key-value budget. vLLM's start-up log closes with it:
fraction x memory - weights - peak of activations - non-torch memory is the cache it prints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Generic

from shardwise.cost import family_of
from shardwise.ledger.number import X, above, divide, largest, maximum, minimum, total
from shardwise.ledger.op import Op, within
from shardwise.ledger.traced import leaf, named
from shardwise.ops.experts import EXPERTS
from shardwise.records import dataclass, replace
from shardwise.serving._buffers import (
    absorbed_bytes,
    captured_bytes,
    communicator_bytes,
    context_bytes,
    expert_bytes,
    image_bytes,
    rotary_bytes,
    sampled_sequences,
    sampling_bytes,
    static_bytes,
    tower_bytes,
)
from shardwise.serving._cache import SequenceCache, block_caches, keeps_states, sequence_bytes
from shardwise.serving._case import ServingCase
from shardwise.serving._draft import draft_caches, draft_case, draft_weights, uses_heads
from shardwise.serving._ledger import (
    EngineStep,
    StepLedger,
    live_bytes,
    step_ledger,
    table_bytes,
    views_of,
    weight_bytes,
)
from shardwise.serving._sizes import PipelineStage, ServingSizes
from shardwise.serving._stated_cache import allocated_cache, most_beside, stated_budget
from shardwise.serving._static_share import memory_share


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes(Generic[X]):
    """Bytes of one stage on one rank; `cache_budget` is what the engine's memory fraction leaves for the cache.

    `tables` are the bytes of tables of embeddings that the host keeps, beside the weights. `most_beside` is what bytes
    beside the cache may come to before the stage does not fit.
    """

    weights: X
    tables: X
    kv_cache: X
    activations: X
    sampling: X
    context: X
    communicators: X
    graphs: X
    needed: X
    cache_budget: X
    most_beside: X

    @property
    def working(self) -> X:
        """Bytes alive at the peak beside weights and cache: a forward pass or sampling, whichever needs more."""
        return maximum(self.activations, self.sampling)

    @property
    def beside_cache(self) -> X:
        """Bytes of everything but the cache: weights, working memory, and what the engine and its libraries hold."""
        return self.needed - self.kv_cache

    @property
    def limit(self) -> X:
        """Bytes that weights, working memory and cache may take together under the budget."""
        return self.beside_cache + self.cache_budget


def blocks_of(tokens: float, block: int) -> float:
    """Return tokens rounded up to whole blocks of the cache.

    >>> blocks_of(17, 16)
    32
    """
    return -(-tokens // block) * block


def budget_bytes(case: ServingCase, share: X, weights: X, working: X, other_bytes: X) -> X:
    """Return bytes an engine leaves for the cache, as it spells its memory fraction; negative when nothing is left."""
    memory = leaf("usable memory", case.cluster.device.usable_memory_bytes, "device", "bytes")
    if case.engine.memory.budget == "total":
        return share * memory - weights - working - other_bytes
    if case.engine.memory.budget == "static":
        # What is free before the weights are loaded counts: context and communicators are no part of it.
        return minimum(share * (memory - other_bytes) - weights, memory - weights - working - other_bytes)
    free = memory - weights - working - other_bytes
    # A share of what is left; of a shortage all of it is short, so that the limit stays the device's memory.
    return minimum(share * free, free)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes(Generic[X]):
    """Bytes of the weights of some operators on one rank, among them the embedding `table` and routed `experts`.

    `lookups` are those of all tables whose rows are looked up: of tokens, of positions, and of tokens for each layer.
    """

    weights: X
    table: X
    lookups: X
    experts: X


def layers_bytes(case: ServingCase, ledger: StepLedger[X], zero: X) -> list[LayerBytes[X]]:
    """Return bytes of every kind of layer, of the embedding and of the head, adapters included."""
    form, lines = case.format, ledger.lines
    return [
        LayerBytes(
            weights=named(weight_bytes(ops, form, zero), f"weights of {label}")
            + absorbed_bytes(case, ops, zero)
            + adapters,
            table=table_bytes(ops, form, zero),
            lookups=table_bytes(ops, form, zero, every=True),
            experts=weight_bytes(tuple(op for op in ops if within(op.region, EXPERTS)), form, zero),
        )
        for (label, ops), adapters in zip(lines, ledger.adapters, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes(Generic[X]):
    """Bytes of a model on one rank: of its kinds of layer, embedding and head, and alive in the largest steps.

    `beside_sampling` are those that are still there while tokens are sampled: of the residual stream behind the last
    layer, and of a workspace of experts.
    """

    kinds: tuple[LayerBytes[X], ...]
    embedding: LayerBytes[X]
    head: LayerBytes[X]
    live: X
    beside_sampling: X


def model_bytes(case: ServingCase, ledgers: Sequence[StepLedger[X]], sizes: ServingSizes[X]) -> ModelBytes[X]:
    """Return bytes of the model, and most that is alive in one of its steps: engines reserve that at start-up."""
    zero = 0 * sizes.tp
    *kinds, embedding, head = layers_bytes(case, ledgers[-1], zero)
    experts = [expert_bytes(case, one, sizes) for one in ledgers]
    live = [
        one.stream_bytes + own.kept + largest([own.running, *(live_bytes(op) for op in _ops_beside(one, own.known))])
        for one, own in zip(ledgers, experts, strict=True)
    ]
    kept = largest([one.stream_bytes + own.kept for one, own in zip(ledgers, experts, strict=True)])
    return ModelBytes(kinds=tuple(kinds), embedding=embedding, head=head, live=largest(live), beside_sampling=kept)


def _ops_beside(ledger: StepLedger[X], experts_known: bool) -> Iterator[Op[X]]:
    """Yield the operators up to the head, without those of experts where their workspace says what they take."""
    ops = (op for _, ops in ledger.lines[:-1] for op in ops)
    return (op for op in ops if not (experts_known and within(op.region, EXPERTS)))


def caches_of(case: ServingCase, sizes: ServingSizes[X]) -> tuple[tuple[SequenceCache[X], ...], ...]:
    """Return what one sequence keeps in a layer of each kind; nothing without a cache."""
    if not case.job.use_kv_cache:
        return tuple(() for _ in case.model.kinds)
    step = EngineStep(phase="decode", sequences=sizes.batch, tokens=1, context=0)
    layout = views_of(case, sizes, step).wide
    # A state after each token that a step verifies, until it is known how many are accepted (vLLM
    # vllm/v1/kv_cache_interface.py, MambaSpec.num_speculative_blocks; SGLang intermediate_ssm_state_cache).
    memory, family = case.engine.memory, case.model.family
    states = memory.states_of(family, case.job.num_speculative_tokens)
    first, *others = (
        tuple(
            replace(
                one,
                states=states,
                limit=one.limit if one.ring else memory.kept_window(one.limit, family, case.step_tokens),
            )
            for one in own
        )
        for own in (block_caches(layout, block, memory.cache_rules) for block in case.model.kinds)
    )
    # The cache of a draft is booked with the layers of the first kind, each with its part.
    count = next(iter(case.model.kinds.values()))
    drafts = (
        replace(one, token_bytes=one.token_bytes / count, constant_bytes=one.constant_bytes / count)
        for one in draft_caches(case, sizes)
    )
    return ((*first, *drafts), *others)


def stage_weights(model: ModelBytes[X], stage: PipelineStage[X], tied: bool, looks_up: bool = True) -> X:
    """Return bytes of the weights of a stage; the last one holds a copy of a tied table that it does not share.

    Where it `looks_up` no rows, tables are with the host but for the copy of a tied one that the head multiplies by.
    """
    zero = 0 * model.head.weights
    layers = (n * k.weights for n, k in zip(stage.layers, model.kinds, strict=True))
    embedding = model.embedding.weights if looks_up else model.embedding.weights - model.embedding.lookups
    ends = stage.embeds * embedding + stage.ends * model.head.weights
    ends = ends + total((n * k.experts for n, k in zip(stage.experts, model.kinds, strict=False) if n), zero)
    copy = above(stage.ends, stage.embeds * looks_up, model.embedding.table, zero) if tied else zero
    return named(total(layers, zero) + ends + copy, "weights")


def shared_weights(sizes: ServingSizes[X], model: ModelBytes[X], whole: X) -> X:
    """Return bytes of weights sharded over the replicas: a share, and the running part and the next one gathered."""
    unit = largest([part.weights for part in (*model.kinds, model.embedding, model.head)])
    share = divide(whole, sizes.dp) + named(minimum(2 * unit, whole), "gathered layers")
    return named(above(sizes.dp, 1, share, whole), "weights")


def stage_cache(caches: Sequence[tuple[SequenceCache[X], ...]], stage: PipelineStage[X], tokens: X) -> X:
    """Return bytes of the cache of one sequence of so many tokens on a stage."""
    cached_layers = enumerate(zip(stage.layers, caches, strict=True))
    layers = (n * named(sequence_bytes(c, tokens), f"a sequence in layer kind {i}") for i, (n, c) in cached_layers)
    return total(layers, 0 * stage.embeds)


def pool_token_bytes(case: ServingCase, caches: Sequence[tuple[SequenceCache[X], ...]], stage: PipelineStage[X]) -> X:
    """Return bytes of a stage's cache for each token of layers that keep all, with what pools of fixed shares add.

    SGLang gives layers with windows a pool of so many tokens for each of the others', and states a share of all
    (github.com/sgl-project/sglang python/sglang/srt/model_executor/pool_configurator.py, HybridSWAPoolConfigurator, and
    mem_cache/kv_cache_configurator.py, _handle_max_mamba_cache).
    """
    memory, zero = case.engine.memory, 0 * stage.embeds
    ratio = memory.window_ratio(case.model.family) or 1.0
    kinds = zip(stage.layers, caches, strict=True)
    growing = ((n, c) for n, own in kinds for c in own if not c.ring)
    tokens = total((n * c.token_bytes * (ratio if c.limit else 1.0) for n, c in growing), zero)
    return tokens / (1.0 - memory.pool_of_states) if keeps_states(case.model.kinds) else tokens


def reserved_cache(
    case: ServingCase, caches: Sequence[tuple[SequenceCache[X], ...]], stage: PipelineStage[X], tokens: X
) -> X:
    """Return bytes that the cache of a stage needs for one sequence of so many tokens, pools of fixed shares included.

    The pool that is nearest to its end decides: of layers that keep all, of windows, or of states. Rings are beside
    them (SGLang has one for each running request, `_get_c128_state_fixed_bytes`).
    """
    memory = case.engine.memory
    limits = [minimum(tokens, c.limit) for own in caches for c in own if c.limit and not c.ring]
    ratio = memory.window_ratio(case.model.family) if limits else 0.0
    share = memory.pool_of_states if keeps_states(case.model.kinds) else 0.0
    if not ratio and not share:
        return stage_cache(caches, stage, tokens)
    pool_tokens = maximum(tokens, largest(limits) / ratio) if ratio else tokens
    keys = pool_token_bytes(case, caches, stage) * pool_tokens
    kept = [(n, c) for n, own in zip(stage.layers, caches, strict=True) for c in own]
    slots = total((n * c.states * c.constant_bytes for n, c in kept), 0 * tokens)
    rings = total((n * c.sequence_bytes(tokens) for n, c in kept if c.ring), 0 * tokens)
    return named((maximum(keys, slots / share) if share else keys) + rings, "pools of the cache")


def stages_bytes(
    case: ServingCase, sizes: ServingSizes[X], ledgers: Sequence[StepLedger[X]]
) -> tuple[StageBytes[X], ...]:
    """Return the bytes of every stage of a replica that runs some steps, for the batch of a case."""
    if case.host is not None:
        near, far = sizes.stages
        there = [step_ledger(case.host, sizes, ledger.step) for ledger in ledgers]
        sides = ((case, near, ledgers), (case.host, far, there))
        return tuple(
            stage_bytes(one, sizes, stage, model_bytes(one, own, sizes), caches_of(one, sizes))
            for one, stage, own in sides
        )
    model, caches = model_bytes(case, ledgers, sizes), caches_of(case, sizes)
    if case.draft is not None:
        guessing = named(draft_weights(case, sizes), "weights of the draft")
        if (draft := draft_case(case)) and not uses_heads(case):
            guessing = guessing + rotary_bytes(draft, 0 * sizes.tp)
        model = replace(model, head=replace(model.head, weights=model.head.weights + guessing))
    return tuple(stage_bytes(case, sizes, stage, model, caches) for stage in sizes.stages)


def _loaded_weights(
    case: ServingCase, sizes: ServingSizes[X], stage: PipelineStage[X], model: ModelBytes[X]
) -> tuple[X, X]:
    """Return the bytes of weights that a stage loads on its devices, and those of tables that the host keeps."""
    memory, zero = case.engine.memory, 0 * sizes.batch
    apart = memory.tables_apart(case.cluster.device)
    weights = stage_weights(model, stage, case.model.tied, not apart)
    tables = stage_weights(model, stage, case.model.tied) - weights if apart else zero
    if case.job.shard_weights:
        weights = shared_weights(sizes, model, weights)
    weights = weights + above(total(stage.layers, zero), 0, rotary_bytes(case, zero), zero)
    if case.tower_parameters:
        weights = weights + stage.embeds * tower_bytes(case, sizes)
    if memory.tied_head_copied and case.model.tied:
        weights = weights + above(stage.ends, 0, model.embedding.table, zero) * above(stage.embeds, 0, 1 + zero, zero)
    return weights, tables


def _working_bytes(
    case: ServingCase, sizes: ServingSizes[X], stage: PipelineStage[X], model: ModelBytes[X]
) -> tuple[X, X]:
    """Return bytes alive at the peak of a forward pass, and while tokens are sampled or all logits are returned."""
    engine = case.engine
    kept = engine.memory.library_bytes_on(family_of(case.cluster.device)) + stage.embeds * image_bytes(case, sizes)
    activations = named(model.live + kept, "activations")
    if engine.memory.static_buffers:
        why = dict(engine.sources)["memory.static_buffers"]
        activations = named(static_bytes(case, sizes), "buffers of a pass", why)
    if case.model.generates:
        sequences = maximum(sizes.batch, sampled_sequences(case))
        return activations, sampling_bytes(case, stage.ends * sequences, model.beside_sampling + kept)
    tokens = minimum(sizes.batch * case.job.input_tokens, case.job.max_batched_tokens or math.inf)
    head = case.model.vocab if case.model.head else 0
    return activations, named(stage.ends * tokens * case.activation_bytes * head, "logits of every token")


def stage_bytes(
    case: ServingCase,
    sizes: ServingSizes[X],
    stage: PipelineStage[X],
    model: ModelBytes[X],
    caches: Sequence[tuple[SequenceCache[X], ...]],
) -> StageBytes[X]:
    """Return the bytes of one stage for the batch of a case."""
    zero = 0 * sizes.batch
    weights, tables = _loaded_weights(case, sizes, stage, model)
    activations, sampling = _working_bytes(case, sizes, stage, model)
    tokens = zero + blocks_of(case.job.total_tokens, case.engine.memory.block_tokens)
    cache = named(sizes.batch * reserved_cache(case, caches, stage, tokens), "KV cache")
    context, communicators = context_bytes(case, sizes), communicator_bytes(case, sizes)
    graphs = captured_bytes(case, maximum(sizes.batch, sampled_sequences(case)))
    working, other_bytes = maximum(activations, sampling), context + communicators + graphs
    left = budget_bytes(case, memory_share(case, sizes), weights, working, other_bytes)
    beside_cache = other_bytes + weights + working
    pool_tokens = pool_token_bytes(case, caches, stage)
    budget = named(stated_budget(case, left, beside_cache, pool_tokens), "budget of the cache")
    cache = allocated_cache(case, cache, beside_cache)
    parts = total(stage.layers, zero) + stage.embeds + stage.ends
    needed = above(parts, 0, weights + cache + working + other_bytes, zero)
    return StageBytes(
        weights=weights,
        tables=tables,
        kv_cache=cache,
        activations=activations,
        sampling=sampling,
        context=context,
        communicators=communicators,
        graphs=graphs,
        needed=named(needed, "memory of the stage"),
        cache_budget=budget,
        most_beside=most_beside(case, needed - cache + budget, cache),
    )
