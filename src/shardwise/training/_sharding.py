"""Seconds that sharded weights and gradients cost a micro-batch: messages of units, what waits, what compute loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X, above, maximum, total
from shardwise.ledger.traced import named
from shardwise.ops.fold import CostModel
from shardwise.training._blocks import BlockCost
from shardwise.training._parts import ModelBlocks, Recipe, in_compute
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages
from shardwise.training._state import StateMessage, gathers, lost_seconds, scatters, state_seconds
from shardwise.training._units import end_units, gathered_elements, scattered_elements, scattered_ends


def unit_rounds(z: PlanSizes[X], r: Recipe) -> tuple[X, X]:
    """Return in which share of the micro-batches a unit's weights and gradients move, and whether backward gathers too.

    Every micro-batch gathers ahead of forward and, unless weights are kept, of backward, or, where a pipeline keeps
    weights gathered and gradients whole, one of a step gathers and one scatters (torch.distributed.pipelining,
    FSDPModule).
    """
    one = 0 * z.num_micro + 1
    again = 0 * one if r.keeps_gathered else one
    if not r.stack.pipeline_keeps_gathered:
        return one, again
    return above(z.pp, 1, one / z.num_micro, one), above(z.pp, 1, 0 * one, again)


def waits_once(z: PlanSizes[X], r: Recipe) -> X:
    """Return 1 where a stage waits once a step for what `unit_rounds` spreads over the micro-batches, else 0.

    A pipeline that keeps weights gathered gathers before the first forward pass of a stage, and scatters behind its
    last backward pass: the other micro-batches find weights and gradients there.
    """
    one = 0 * z.num_micro + 1
    return above(z.pp, 1, one, 0 * one) if r.stack.pipeline_keeps_gathered else 0 * one


def unit_exposure(m: CostModel[X], z: PlanSizes[X], r: Recipe, k: BlockCost[X]) -> tuple[X, X, X, X, X]:
    """Return seconds a layer waits in (forward, backward) for its weights under ZeRO-3 and FSDP, and hidden ones.

    After them seconds that its compute loses (forward, backward): to the cores that messages hold, and to copies.

    Weights are gathered a unit ahead, forward and backward, and gradients reduce-scattered behind the next unit's
    backward, for every micro-batch (torch.distributed.fsdp; arXiv:2304.11277). ZeRO-2 scatters gradients every
    micro-batch.
    """
    zero = 0 * k.forward
    if not r.shards_gradients:
        return zero, zero, zero, zero, zero
    held, made = gathered_elements(r, z, k), scattered_elements(r, z, k)
    scattered, gathered = scatters(z, r, made), gathers(r, *held) if r.shards_weights else ()
    scatter, gather = state_seconds(m, scattered, zero), state_seconds(m, gathered, zero)
    hides = m.hides("dp") and r.stack.overlap_gradients
    often, twice = unit_rounds(z, r)
    first, last = often * gather, often * (twice * gather + scatter)
    ahead = maximum(first - often * k.forward, 0.0) if hides else first
    behind = maximum(last - often * k.backward, 0.0) if hides else last
    hidden = first + last - ahead - behind
    copied, returned = copy_seconds(m, r, often * total(held), often * total(made))
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


def copy_seconds(m: CostModel[X], r: Recipe, held: X, made: X) -> tuple[X, X]:
    """Return seconds that the framework copies gathered weights out of, and gradients into, its messages' buffers."""
    stack = r.stack
    gathered = stack.gather_copy_bytes * held if r.shards_weights else 0 * held
    scattered = stack.scatter_copy_bytes * made
    return gathered / m.rates.memory_bytes, scattered / m.rates.memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EndMessages(Generic[X]):
    """What a unit at an end of the model sends in a pass: how often a micro-batch, seconds that wait and that hide."""

    unit: str
    backward: bool
    messages: tuple[StateMessage[X], ...]
    count: X
    exposed: X
    hidden: X


def _mean_layer(parts: ModelBlocks[X], s: Stages[X]) -> tuple[X, X]:
    """Return seconds of (forward, backward) of a stage's layers on the mean."""
    zero, layers = 0 * s.count, maximum(total(s.layers, 0 * s.count), 1)
    forward = total((n * k.forward for n, k in zip(s.layers, parts.kinds, strict=True)), zero)
    backward = total((n * k.backward for n, k in zip(s.layers, parts.kinds, strict=True)), zero)
    return forward / layers, backward / layers


def end_messages(
    m: CostModel[X], z: PlanSizes[X], r: Recipe, parts: ModelBlocks[X], s: Stages[X]
) -> tuple[EndMessages[X], ...]:
    """Return the messages of embedding, final norm and head of a stage in one micro-batch.

    A root unit has nothing beside it: it is gathered before the first layer and scattered behind the last. Of ends that
    are wrapped apart so does the embedding; the head's weights come beside the last layer's forward pass, and its
    gradients go, as the embedding is gathered again, beside a layer's backward pass.
    """
    zero = 0 * s.count
    if not r.shards_gradients:
        return ()
    resharded, held = end_units(r, in_compute(r, parts), s)
    often, twice = unit_rounds(z, r)
    apart = r.stack.fsdp_ends == "apart" and r.shards_weights and not parts.shared_table
    names = ("embedding unit", "norm and head unit") if apart else ("", "root unit")
    hides = apart and m.hides("dp") and r.stack.overlap_gradients
    ahead, behind = (one if hides else zero for one in _mean_layer(parts, s))
    found: list[EndMessages[X]] = []

    def add(unit: str, backward: bool, sent: tuple[StateMessage[X], ...], count: X, beside: X) -> None:
        seconds = count * state_seconds(m, sent, zero)
        waits = maximum(seconds - beside, 0.0)
        label = f"{'scattering' if backward else 'gathering'} the {unit}"
        found.append(
            EndMessages(unit=unit, backward=backward, messages=sent, count=count, exposed=named(waits, label),
                        hidden=seconds - waits)
        )  # fmt: skip

    gathered = [gathers(r, one, 0 * one) if r.shards_weights else () for one in (resharded, held)]
    scattered = [scatters(z, r, (one, 0 * one)) for one in scattered_ends(r, parts, s)]
    if apart:
        add(names[0], False, gathered[0], often, zero)
    add(names[1], False, gathered[1], often, ahead)
    add(names[1], True, scattered[1], often, behind)
    if apart:
        add(names[0], True, gathered[0], often * twice, behind)
        add(names[0], True, scattered[0], often, zero)
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingSeconds(Generic[X]):
    """What sharded weights cost a stage and micro-batch: waits ahead and behind, hidden seconds, compute lost."""

    ahead: X
    behind: X
    hidden: X
    lost_ahead: X
    lost_behind: X


def sharding_waits(
    m: CostModel[X], z: PlanSizes[X], r: Recipe, parts: ModelBlocks[X], s: Stages[X]
) -> ShardingSeconds[X]:
    """Return seconds a stage waits in a micro-batch for sharded weights, and what their messages take of compute."""
    waits = [unit_exposure(m, z, r, k) for k in parts.kinds]
    zero = 0 * s.count
    sums = [total((n * w[i] for n, w in zip(s.layers, waits, strict=True)), zero) for i in range(5)]
    ends = end_messages(m, z, r, parts, s)
    first, last = (tuple(one for one in ends if one.backward is back) for back in (False, True))
    lost = [total((lost_seconds(m, one.messages, one.hidden) for one in some), zero) for some in (first, last)]
    return ShardingSeconds(
        ahead=sums[0] + total((one.exposed for one in first), zero),
        behind=sums[1] + total((one.exposed for one in last), zero),
        hidden=sums[2] + total((one.hidden for one in ends), zero),
        lost_ahead=sums[3] + lost[0],
        lost_behind=sums[4] + lost[1],
    )
