"""Bytes on one rank of each stage: weights, cache of the batch, activations, and what the engine takes beside them.

The budget is spelled as the engine spells it: docs/formulas.md, key-value budget. vLLM's start-up log closes with it:
fraction x memory - weights - peak of activations - non-torch memory is the cache it prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

from shardwise.ledger.number import X, above, divide, largest, maximum, minimum, total
from shardwise.ledger.traced import leaf, named
from shardwise.serving._buffers import static_bytes
from shardwise.serving._cache import Cache, block_caches, sequence_bytes
from shardwise.serving._case import Case, Step, lines_of, views_of
from shardwise.serving._fold import PartBytes, bytes_of
from shardwise.serving._sizes import Sizes, Stage

# Cores of a device whose number is not known: those of an H100.
_CORES = 132


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory(Generic[X]):
    """Bytes of one stage on one rank; `cache_budget` is what the engine's memory fraction leaves for the cache."""

    weights: X
    kv_cache: X
    activations: X
    sampling: X
    context: X
    communicators: X
    needed: X
    cache_budget: X

    @property
    def working(self) -> X:
        """Bytes alive at the peak beside weights and cache: a forward pass or sampling, whichever needs more."""
        return maximum(self.activations, self.sampling)

    @property
    def limit(self) -> X:
        """Bytes that weights, working memory and cache may take together under the budget."""
        return self.needed - self.kv_cache + self.cache_budget


def blocks_of(tokens: float, block: int) -> float:
    """Return tokens rounded up to whole blocks of the cache.

    >>> blocks_of(17, 16)
    32
    """
    return -(-tokens // block) * block


def budget_bytes(case: Case, weights: X, working: X, beside: X) -> X:
    """Return bytes an engine leaves for the cache, as it spells its memory fraction; negative when nothing is left."""
    memory = leaf("usable memory", case.cluster.device.usable_memory_bytes, "device", "bytes")
    share = leaf("memory fraction", case.job.memory_fraction or case.engine.memory_fraction, case.engine.name)
    if case.engine.budget == "total":
        return share * memory - weights - working - beside
    if case.engine.budget == "static":
        return minimum(share * memory - weights, memory - weights - working - beside)
    return share * (memory - weights - working - beside)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes(Generic[X]):
    """Bytes of a model on one rank: of its kinds of layer, embedding and head, and alive in the largest steps."""

    kinds: tuple[PartBytes[X], ...]
    embedding: PartBytes[X]
    head: PartBytes[X]
    live: X


def largest_step(case: Case, z: Sizes[X]) -> tuple[Sizes[X], Step]:
    """Return the prefill step with the most tokens, for which engines reserve working memory at start-up.

    It has all prompts, or as many tokens as a step may have: github.com/vllm-project/vllm vllm/v1/worker/
    gpu_model_runner.py profile_run, 2026-01. Where those are less than one prompt it is the last piece of it.
    """
    new, past = case.new_input_tokens, case.job.prefix_tokens
    limit = case.step_tokens
    if not limit:
        return z, Step(phase="prefill", tokens=new, context=past)
    if limit >= new:
        return replace(z, batch=minimum(z.batch, limit / new)), Step(phase="prefill", tokens=new, context=past)
    return z, Step(phase="prefill", tokens=limit, context=past + new - limit, sequences=1)


def last_step(case: Case) -> Step:
    """Return the step of the last generated token, which has the most before it."""
    tokens = case.job.total_tokens - 1
    if case.job.use_kv_cache:
        return Step(phase="decode", tokens=1, context=tokens)
    return Step(phase="prefill", tokens=tokens, context=0)


def model_bytes(case: Case, z: Sizes[X], prefills: bool = True, decodes: bool = True) -> ModelBytes[X]:
    """Return bytes of the model and those alive in its steps, of a replica that prefills, decodes, or does both."""
    steps = [largest_step(case, z)] if prefills else []
    if decodes and case.job.output_tokens:
        steps.append((z, last_step(case)))
    live = []
    for sizes, step in steps:
        views = views_of(case, sizes, step)
        *kinds, embedding, head = bytes_of(case, lines_of(case, views), 0 * z.tp)
        stream = views.wide.residual("boundary", case.model.hidden, "").size_bytes
        live.append(stream + largest([part.live for part in (*kinds, embedding)]))
    return ModelBytes(kinds=tuple(kinds), embedding=embedding, head=head, live=largest(live))


def caches_of(case: Case, z: Sizes[X]) -> tuple[tuple[Cache[X], ...], ...]:
    """Return what one sequence keeps in a layer of each kind; nothing without a cache."""
    y, kept = views_of(case, z, Step(phase="decode", tokens=1, context=0)).wide, case.job.use_kv_cache
    return tuple(block_caches(y, block) if kept else () for block in case.model.kinds)


def stage_weights(held: ModelBytes[X], s: Stage[X], tied: bool) -> X:
    """Return bytes of the weights of a stage; the last one holds a copy of a tied table that it does not share."""
    zero = 0 * held.head.weights
    layers = (n * k.weights for n, k in zip(s.layers, held.kinds, strict=True))
    ends = s.embeds * held.embedding.weights + s.ends * held.head.weights
    copy = above(s.ends, s.embeds, held.embedding.table, zero) if tied else zero
    return named(total(layers, zero) + ends + copy, "weights")


def shared_weights(z: Sizes[X], held: ModelBytes[X], whole: X) -> X:
    """Return bytes of weights sharded over the replicas: a share, and the running part and the next one gathered."""
    unit = largest([part.weights for part in (*held.kinds, held.embedding, held.head)])
    share = divide(whole, z.dp) + named(minimum(2 * unit, whole), "gathered layers")
    return named(above(z.dp, 1, share, whole), "weights")


def stage_cache(caches: Sequence[tuple[Cache[X], ...]], s: Stage[X], tokens: X) -> X:
    """Return bytes of the cache of one sequence of so many tokens on a stage."""
    held = enumerate(zip(s.layers, caches, strict=True))
    layers = (n * named(sequence_bytes(c, tokens), f"a sequence in layer kind {i}") for i, (n, c) in held)
    return total(layers, 0 * s.embeds)


def stage_memories(case: Case, z: Sizes[X], prefills: bool = True, decodes: bool = True) -> tuple[StageMemory[X], ...]:
    """Return the bytes of every stage for the batch of a case on a replica that prefills, decodes, or does both."""
    held, caches = model_bytes(case, z, prefills, decodes), caches_of(case, z)
    return tuple(stage_memory(case, z, s, held, caches) for s in z.stages)


def stage_memory(
    case: Case, z: Sizes[X], s: Stage[X], held: ModelBytes[X], caches: Sequence[tuple[Cache[X], ...]]
) -> StageMemory[X]:
    """Return the bytes of one stage for the batch of a case."""
    engine, zero = case.engine, 0 * z.batch
    weights = stage_weights(held, s, case.model.tied)
    if case.job.shard_weights:
        weights = shared_weights(z, held, weights)
    tokens = zero + blocks_of(case.job.total_tokens, engine.block_tokens)
    cache = named(z.batch * stage_cache(caches, s, tokens), "key-value cache")
    if engine.head_copy and case.model.tied:
        weights = weights + above(s.ends, 0, held.embedding.table, zero) * above(s.embeds, 0, 1 + zero, zero)
    activations = named(held.live, "activations")
    if engine.static_buffers:
        activations = named(static_bytes(case, z), "buffers of a pass", dict(engine.sources)["static_buffers"])
    sequences = maximum(z.batch, case.job.max_sequences)
    logits = s.ends * (sequences * (case.model.vocab if case.model.head else 0))
    if case.model.generates:
        sampling = named(engine.sampler_bytes * logits, "logits and sampling")
    else:
        tokens = minimum(z.batch * case.job.input_tokens, case.job.max_batched_tokens or math.inf)
        head = case.model.vocab if case.model.head else 0
        sampling = named(s.ends * tokens * case.activation_bytes * head, "logits of every token")
    cores = case.cluster.device.num_cores if case.cluster.device.knows("num_cores") else _CORES
    driver = engine.context_bytes + engine.context_core_bytes * cores + case.job.misc_bytes
    context = named(zero + driver, "context", dict(engine.sources)["context_bytes"])
    communicators = above(z.tp * z.pp, 1, zero + engine.communicator_bytes, zero)
    communicators = named(communicators, "communicators", dict(engine.sources)["communicator_bytes"])
    working, beside = maximum(activations, sampling), context + communicators
    needed = above(total(s.layers, zero) + s.embeds + s.ends, 0, weights + cache + working + beside, zero)
    return StageMemory(
        weights=weights,
        kv_cache=cache,
        activations=activations,
        sampling=sampling,
        context=context,
        communicators=communicators,
        needed=named(needed, "memory of the stage"),
        cache_budget=named(budget_bytes(case, weights, working, beside), "budget of the cache"),
    )
