"""Bytes on one rank of each stage: weights, cache of the batch, activations, and what the engine takes beside them.

The budget is spelled as the engine spells it: docs/formulas.md, key-value budget. vLLM's start-up log closes with it:
fraction x memory - weights - peak of activations - non-torch memory is the cache it prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X, above, divide, largest, maximum, minimum, total
from shardwise.ledger.traced import leaf, named
from shardwise.serving._buffers import static_bytes
from shardwise.serving._cache import Cache, sequence_bytes
from shardwise.serving._case import Case
from shardwise.serving._fold import Parts, Phase
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


def stage_weights(parts: Parts[X], s: Stage[X], tied: bool) -> X:
    """Return bytes of the weights of a stage; the last one holds a copy of a tied table that it does not share."""
    layers = (n * k.weight_bytes for n, k in zip(s.layers, parts.kinds, strict=True))
    ends = s.embeds * parts.embedding.weight_bytes + s.ends * parts.head.weight_bytes
    copy = above(s.ends, s.embeds, parts.embedding.table_bytes, 0 * ends) if tied else 0 * ends
    return named(total(layers, 0 * parts.send) + ends + copy, "weights")


def shared_weights(z: Sizes[X], parts: Parts[X], whole: X) -> X:
    """Return bytes of weights sharded over the replicas: a share, and the running part and the next one gathered."""
    unit = largest([part.weight_bytes for part in (*parts.kinds, parts.embedding, parts.head)])
    share = divide(whole, z.dp) + named(minimum(2 * unit, whole), "gathered layers")
    return named(above(z.dp, 1, share, whole), "weights")


def stage_cache(caches: Sequence[tuple[Cache[X], ...]], s: Stage[X], tokens: X) -> X:
    """Return bytes of the cache of one sequence of so many tokens on a stage."""
    held = enumerate(zip(s.layers, caches, strict=True))
    layers = (n * named(sequence_bytes(c, tokens), f"a sequence in layer kind {i}") for i, (n, c) in held)
    return total(layers, 0 * s.embeds)


def stage_memory(
    case: Case, z: Sizes[X], s: Stage[X], parts: Parts[X], caches: Sequence[tuple[Cache[X], ...]],
    phases: tuple[Phase[X], Phase[X]],
) -> StageMemory[X]:  # fmt: skip
    """Return the bytes of one stage for the batch of a case."""
    engine, zero = case.engine, 0 * z.batch
    weights = stage_weights(parts, s, case.model.tied)
    if case.job.shard_weights:
        weights = shared_weights(z, parts, weights)
    tokens = zero + blocks_of(case.job.total_tokens, engine.block_tokens)
    cache = named(z.batch * stage_cache(caches, s, tokens), "key-value cache")
    if engine.head_copy and case.model.tied:
        weights = weights + above(s.ends, 0, parts.embedding.table_bytes, zero) * above(s.embeds, 0, 1 + zero, zero)
    activations = named(maximum(phases[0].live_bytes, phases[1].live_bytes), "activations")
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
    held = above(total(s.layers, zero) + s.embeds + s.ends, 0, weights + cache + working + beside, zero)
    return StageMemory(
        weights=weights,
        kv_cache=cache,
        activations=activations,
        sampling=sampling,
        context=context,
        communicators=communicators,
        needed=named(held, "memory of the stage"),
        cache_budget=named(budget_bytes(case, weights, working, beside), "budget of the cache"),
    )
