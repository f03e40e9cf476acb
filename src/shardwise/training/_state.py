"""The messages that no operator makes: of weights and gradients between copies, and of the stream between stages.

The seconds of a step and the communication report both read these. Sources: arXiv:1910.02054 (ZeRO),
arXiv:2304.11277 and torch.distributed.fsdp (FSDP, HSDP), Megatron-LM core/distributed (distributed optimizer).
"""

from __future__ import annotations

from typing import Generic

from shardwise.cost import collective_seconds
from shardwise.ledger.number import X, above, divide, maximum, minimum
from shardwise.ledger.op import Verb
from shardwise.ops.overlap import CostModel
from shardwise.records import dataclass, replace
from shardwise.training._memory import tensors_of
from shardwise.training._parts import ModelBlocks, Recipe, owned, trained
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class StateMessage(Generic[X]):
    """One collective over copies of parameters: the group's name, and bytes of the whole (gathered) tensor.

    Of so many `tensors` each rank sends its own, one rank after another.
    """

    group: str
    verb: Verb
    size_bytes: X
    tensor: str
    tensors: X | None = None


def message_seconds(m: CostModel[X], one: StateMessage[X]) -> X:
    """Return the seconds of one message, or of one from each rank that has any of its tensors."""
    at = m.group_shapes[one.group]
    if one.tensors is None:
        return collective_seconds(m.network, one.verb, one.size_bytes, at)
    owners = maximum(minimum(one.tensors, at[-1]), 1)
    return owners * collective_seconds(m.network, one.verb, divide(one.size_bytes, owners), at)


def state_seconds(m: CostModel[X], messages: tuple[StateMessage[X], ...], zero: X) -> X:
    """Return the seconds of messages one after another."""
    seconds = zero
    for one in messages:
        seconds = seconds + message_seconds(m, one)
    return seconds


def scatters(z: PlanSizes[X], r: Recipe, params: tuple[X, X]) -> tuple[StateMessage[X], ...]:
    """Return what reduce-scatters the gradients of (dense, expert) parameters.

    Hybrid sharding then all-reduces the shards over its replicas (torch.distributed.fsdp, HSDP).
    """
    groups = (("shard", "replicate", z.shard_share), ("expert_shard", "expert_replicate", z.expert_share))
    messages: list[StateMessage[X]] = []
    for count, (inner, outer, share), kind in zip(params, groups, ("", "expert "), strict=True):
        size, tensor = (r.stack.scatter_bytes or r.precision.gradient_bytes) * count, f"{kind}gradients"
        messages.append(StateMessage(group=inner, verb="reduce_scatter", size_bytes=size, tensor=tensor))
        if r.replicates_shards:
            rest = divide(size, share)
            messages.append(StateMessage(group=outer, verb="all_reduce", size_bytes=rest, tensor=f"shard of {tensor}"))
    return tuple(messages)


def gathers(r: Recipe, dense: X, expert: X) -> tuple[StateMessage[X], ...]:
    """Return what gathers the sharded weights of a unit in the type of compute."""
    w = r.narrow_gather_bytes or r.precision.activation_bytes
    return (
        StateMessage(group="shard", verb="all_gather", size_bytes=w * dense, tensor="weights"),
        StateMessage(group="expert_shard", verb="all_gather", size_bytes=w * expert, tensor="expert weights"),
    )


def reductions(r: Recipe, parts: ModelBlocks[X], s: Stages[X]) -> tuple[StateMessage[X], ...]:
    """Return what brings the gradients of a stage together once a step; nothing where a micro-batch does it already."""
    if r.shards_gradients:
        return ()
    verb: Verb = "all_reduce" if r.reduces_whole else "reduce_scatter"
    classes = enumerate(trained(r, parts))
    return tuple(
        one
        for i, (own, some) in classes
        for one in _whole_stage(some, s, verb, own.precision.gradient_bytes, "adapter gradients" if i else "gradients")
    )


def updates(r: Recipe, parts: ModelBlocks[X], s: Stages[X]) -> tuple[StateMessage[X], ...]:
    """Return what hands the new weights of a stage to all copies once a step, where the optimizer is sharded."""
    if not r.shards_optimizer or r.shards_weights:
        return ()
    classes = enumerate(trained(r, parts))
    return tuple(one for i, (own, some) in classes for one in _updated(own, some, s, "adapters" if i else "weights"))


def _updated(r: Recipe, parts: ModelBlocks[X], s: Stages[X], tensor: str) -> tuple[StateMessage[X], StateMessage[X]]:
    """Return what hands the new weights of one class of parameters to all copies."""
    verb: Verb = "broadcast" if r.stack.broadcasts_weights else "all_gather"
    dense, expert = _whole_stage(parts, s, verb, r.narrow_gather_bytes or r.precision.weight_bytes, tensor)
    if r.splits_replicas:
        dense, expert = replace(dense, group="shard"), replace(expert, group="expert_shard")
    if not r.stack.broadcasts_weights:
        return dense, expert
    tensors = tensors_of(parts, s)
    return replace(dense, tensors=tensors), replace(expert, tensors=tensors)


def _whole_stage(
    parts: ModelBlocks[X], s: Stages[X], verb: Verb, width: float, tensor: str
) -> tuple[StateMessage[X], StateMessage[X]]:
    dense_matrix, dense_other, expert_matrix, expert_other = owned(parts, s)
    dense, expert = width * (dense_matrix + dense_other), width * (expert_matrix + expert_other)
    return (
        StateMessage(group="dp_cp", verb=verb, size_bytes=dense, tensor=tensor),
        StateMessage(group="edp", verb=verb, size_bytes=expert, tensor=f"expert {tensor}"),
    )


def boundary_messages(z: PlanSizes[X], size_bytes: X, scattered: bool) -> tuple[StateMessage[X], ...]:
    """Return what hands the residual stream of a micro-batch to the next stage, or its gradient back.

    Scattered, each tensor-parallel rank sends its share, and the receivers gather it (arXiv:2104.04473 section 4.1).
    """
    tensor = "residual stream"
    if not scattered:
        return (StateMessage(group="pp", verb="send", size_bytes=size_bytes, tensor=tensor),)
    return (
        StateMessage(group="pp", verb="send", size_bytes=divide(size_bytes, z.tp), tensor=f"share of the {tensor}"),
        StateMessage(group="tp", verb="all_gather", size_bytes=size_bytes, tensor=tensor),
    )


def table_message(size_bytes: X) -> StateMessage[X]:
    """Return what adds up the gradients of a table that the first and the last stage share."""
    return StateMessage(group="table", verb="all_reduce", size_bytes=size_bytes, tensor="tied table gradients")


def table_group_shape(z: PlanSizes[X]) -> tuple[X, ...]:
    """Return how many of the first and the last stage sit in one domain of each tier."""
    # They share a domain only where the whole pipeline does.
    return tuple(above(at + 1 - z.pp, 0, 0 * at + 2, 0 * at + 1) for at in z.group_shapes["pp"])


def table_seconds(m: CostModel[X], z: PlanSizes[X], size_bytes: X) -> X:
    """Return the seconds in which the first and the last stage add up the gradients of a table that they share."""
    seconds = collective_seconds(m.network, table_message(size_bytes).verb, size_bytes, table_group_shape(z))
    return above(z.pp, 1, seconds, 0 * z.pp)
