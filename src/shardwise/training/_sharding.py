"""Seconds that sharded weights and gradients cost a micro-batch: messages of units, what waits, what compute loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X, above, maximum, total
from shardwise.ledger.traced import named
from shardwise.ops.fold import Machine
from shardwise.training._blocks import Folded
from shardwise.training._memory import Parts, Recipe, root_elements
from shardwise.training._sizes import Sizes
from shardwise.training._stages import Stages
from shardwise.training._state import gathers, lost_seconds, scatters, state_seconds


def unit_rounds(z: Sizes[X], r: Recipe) -> tuple[X, X]:
    """Return in which share of the micro-batches a unit's weights and gradients move, and whether backward gathers too.

    Every micro-batch gathers ahead of forward and of backward, or, where a pipeline keeps weights gathered and
    gradients whole, one of a step gathers and one scatters (torch.distributed.pipelining, FSDPModule).
    """
    one = 0 * z.num_micro + 1
    if not r.stack.pipeline_keeps_gathered:
        return one, one
    return above(z.pp, 1, one / z.num_micro, one), above(z.pp, 1, 0 * one, one)


def rounds_of_messages(z: Sizes[X], r: Recipe) -> tuple[X, X]:
    """Return how often (a micro-batch, a step) a stage waits for what `unit_rounds` spreads over the micro-batches.

    A pipeline that keeps weights gathered gathers before the first forward pass of a stage, and scatters behind its
    last backward pass: the other micro-batches find weights and gradients there.
    """
    one = 0 * z.num_micro + 1
    if not r.stack.pipeline_keeps_gathered:
        return one, 0 * one
    return above(z.pp, 1, 0 * one, one), above(z.pp, 1, z.num_micro, 0 * one)


def unit_exposure(m: Machine[X], z: Sizes[X], r: Recipe, k: Folded[X]) -> tuple[X, X, X, X, X]:
    """Return seconds a layer waits in (forward, backward) for its weights under ZeRO-3 and FSDP, and hidden ones.

    After them seconds that its compute loses (forward, backward): to the cores that messages hold, and to copies.

    Weights are gathered a unit ahead, forward and backward, and gradients reduce-scattered behind the next unit's
    backward, for every micro-batch (torch.distributed.fsdp; arXiv:2304.11277). ZeRO-2 scatters gradients every
    micro-batch.
    """
    zero = 0 * k.forward
    if not r.shards_gradients:
        return zero, zero, zero, zero, zero
    dense, expert = k.elements.dense, k.elements.expert
    scattered, gathered = scatters(z, r, (dense, expert)), gathers(r, dense, expert) if r.shards_weights else ()
    scatter, gather = state_seconds(m, scattered, zero), state_seconds(m, gathered, zero)
    hides = m.hides("dp") and r.stack.overlap_gradients
    often, twice = unit_rounds(z, r)
    first, last = often * gather, often * (twice * gather + scatter)
    ahead = maximum(first - often * k.forward, 0.0) if hides else first
    behind = maximum(last - often * k.backward, 0.0) if hides else last
    hidden = first + last - ahead - behind
    copied, returned = copy_seconds(m, r, often * (dense + expert))
    return (
        named(ahead, "waiting for weights"),
        named(behind, "waiting for weights and gradients"),
        hidden,
        named(lost_seconds(m, gathered, first - ahead) + copied, "slowed by gathers and their copies"),
        named(
            lost_seconds(m, (*gathered, *scattered), last - behind) + twice * copied + returned,
            "slowed by messages and their copies",
        ),
    )


def copy_seconds(m: Machine[X], r: Recipe, count: X) -> tuple[X, X]:
    """Return seconds that the framework copies gathered weights out of, and gradients into, its messages' buffers."""
    stack = r.stack
    gathered = stack.gather_copy_bytes * count if r.shards_weights else 0 * count
    scattered = stack.scatter_copy_bytes * count if r.precision.trains else 0 * count
    return gathered / m.rates.memory_bytes, scattered / m.rates.memory_bytes


def root_exposure(m: Machine[X], z: Sizes[X], r: Recipe, parts: Parts[X], s: Stages[X]) -> tuple[X, X]:
    """Return seconds of (gathering, scattering) the root unit: once each a micro-batch, with nothing beside them.

    The root holds embedding, head and final norm and stays gathered from forward to backward (torch.distributed.fsdp).
    """
    zero = 0 * s.count
    if not r.shards_gradients:
        return zero, zero
    root, (often, _) = root_elements(parts, s), unit_rounds(z, r)
    scatter = named(often * state_seconds(m, scatters(z, r, (root, 0 * root)), zero), "scattering the root unit")
    if not r.shards_weights:
        return zero, scatter
    return named(often * state_seconds(m, gathers(r, root, 0 * root), zero), "gathering the root unit"), scatter


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingSeconds(Generic[X]):
    """What sharded weights cost a stage and micro-batch: waits ahead and behind, hidden seconds, compute lost."""

    ahead: X
    behind: X
    hidden: X
    lost_ahead: X
    lost_behind: X


def sharding_waits(m: Machine[X], z: Sizes[X], r: Recipe, parts: Parts[X], s: Stages[X]) -> ShardingSeconds[X]:
    """Return seconds a stage waits in a micro-batch for sharded weights, and what their messages take of compute."""
    waits = [unit_exposure(m, z, r, k) for k in parts.kinds]
    zero = 0 * s.count
    sums = [total((n * w[i] for n, w in zip(s.layers, waits, strict=True)), zero) for i in range(5)]
    gather, scatter = root_exposure(m, z, r, parts, s)
    return ShardingSeconds(
        ahead=sums[0] + gather, behind=sums[1] + scatter, hidden=sums[2], lost_ahead=sums[3], lost_behind=sums[4]
    )
