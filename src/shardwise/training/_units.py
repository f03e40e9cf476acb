"""The units in which sharded weights are gathered: what each holds, and what of them is whole at which moment.

Sources: torch.distributed.fsdp (units are layers; arXiv:2304.11277), checked to the byte with torch 2.13.0's FSDP
memory tracker; plans/stacks.toml has the file that wraps the ends of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X, above, largest, maximum, minimum, total
from shardwise.ledger.traced import named
from shardwise.training._parts import Parts, Recipe, owned, tied_copy
from shardwise.training._sizes import Sizes
from shardwise.training._stages import Stages


def end_units(r: Recipe, parts: Parts[X], s: Stages[X]) -> tuple[X, X]:
    """Return the parameters of a stage's ends: (unit that is resharded behind forward, unit that is never).

    One root unit holds embedding, final norm and head; wrapped apart the embedding is a unit like a layer, and final
    norm and head are one that backward needs first (github.com/pytorch/torchtitan torchtitan/distributed/fsdp.py,
    apply_fsdp_to_decoder; tied weights are one unit of three).
    """
    table = s.embeddings * parts.embedding.elements.dense
    head = s.heads * parts.head.elements.dense + tied_copy(parts, s)
    if r.stack.fsdp_ends == "root" or parts.shared_table or not r.shards_weights:
        return 0 * table, table + head
    return table, head


def layer_units(r: Recipe, parts: Parts[X], s: Stages[X]) -> tuple[X, X]:
    """Return the parameters that are gathered at once for the largest layer of a stage, and for all of its layers."""
    alone = r.stack.gathers_tensors
    units = [k.elements.largest if alone else k.elements.dense + k.elements.expert for k in parts.kinds]
    held = [n + m for n, m in zip(s.layers, s.mirrored, strict=True)]
    unit = largest([above(n, 0, u, 0 * u) for n, u in zip(held, units, strict=True)])
    return unit, total((n * u for n, u in zip(held, units, strict=True)), 0 * s.count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered(Generic[X]):
    """Bytes of gathered weights at the moments of a step, with the whole gradients of the units at work."""

    forward: X
    loss: X
    backward: X
    complete: X


def gathered_bytes(r: Recipe, z: Sizes[X], parts: Parts[X], s: Stages[X]) -> Gathered[X]:
    """Return the bytes gathered for compute under ZeRO-3 and FSDP.

    Of the layers the running unit and the prefetched next one, and the gradients of one unit before their reduction;
    kept from forward to backward all layers, each freed behind its backward pass. A pipeline may keep the weights of a
    stage gathered, and its gradients whole, from micro-batch to micro-batch.
    """
    zero = 0 * s.count
    if not r.shards_weights:
        return Gathered(forward=zero, loss=zero, backward=zero, complete=zero)
    ends, units = _ends(r, z, parts, s), _layers(r, z, parts, s)
    pairs = [
        named(one, "gathered ends of the model") + named(other, "gathered layers and gradients")
        for one, other in zip(ends, units, strict=True)
    ]
    return Gathered(forward=pairs[0], loss=pairs[1], backward=pairs[2], complete=pairs[3])


def _ends(r: Recipe, z: Sizes[X], parts: Parts[X], s: Stages[X]) -> tuple[X, X, X, X]:
    """Return bytes of the gathered ends in forward, at the loss, in backward and at its end."""
    if r.stack.gathers_tensors:
        zero = 0 * s.count
        return zero, zero, zero, zero
    width = r.precision.activation_bytes
    resharded, held = (width * one for one in end_units(r, parts, s))
    both = resharded + held
    if r.stack.fsdp_ends == "root" or parts.shared_table:
        return both, both, both, both
    # Backward frees final norm and head first, and gathers the embedding last.
    during, late = (both if r.keeps_gathered else held), resharded
    if r.stack.pipeline_keeps_gathered:
        during, late = (above(z.pp, 1, both, one) for one in (during, late))
    return during, during, during, late


def _layers(r: Recipe, z: Sizes[X], parts: Parts[X], s: Stages[X]) -> tuple[X, X, X, X]:
    """Return bytes of the gathered layers and of whole gradients in forward, at the loss, in backward, at its end."""
    width, made = r.precision.activation_bytes, r.precision.gradient_bytes
    unit, layers = layer_units(r, parts, s)
    ends, every, gradients = total(end_units(r, parts, s)), total(owned(parts, s)), made * unit
    gathered = 2 * width * unit
    if r.stack.settings.max_live_parameters:
        gathered = width * maximum(minimum(layers, r.stack.settings.max_live_parameters), unit)
    if r.stack.accumulates_whole:
        gradients = above(z.num_micro, 1, made * every, gradients)
    working = gathered + gradients
    found = (working, 0 * working, working, working)
    if r.keeps_gathered:
        kept, whole = width * (every - ends), gradients - made * unit
        found = (kept + whole, kept + whole, kept + gradients, width * unit + gradients)
    if not r.stack.pipeline_keeps_gathered:
        return found
    piped = width * (every - ends) + made * every
    first, loss, back, last = (above(z.pp, 1, piped, one) for one in found)
    return first, loss, back, last
