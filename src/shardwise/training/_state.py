"""The messages that no operator makes: of weights and gradients between copies, and of the stream between stages.

The seconds of a step and the communication report both read these. Sources: arXiv:1910.02054 (ZeRO),
arXiv:2304.11277 and torch.distributed.fsdp (FSDP, HSDP), Megatron-LM core/distributed (distributed optimizer).
"""

from __future__ import annotations

from typing import Generic

from shardwise.cost import collective_seconds
from shardwise.ledger.number import X, above, divide, maximum, minimum, total
from shardwise.ledger.op import Verb
from shardwise.ops.overlap import CostModel
from shardwise.records import dataclass, replace
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


def message_seconds(costs: CostModel[X], one: StateMessage[X]) -> X:
    """Return the seconds of one message, or of one from each rank that has any of its tensors."""
    at = costs.group_shapes[one.group]
    if costs.messages is None:
        return _sent_seconds(costs, one, at)
    key = at, one.verb, one.size_bytes, one.tensors
    if key not in costs.messages:
        costs.messages[key] = _sent_seconds(costs, one, at)
    return costs.messages[key]


def _sent_seconds(costs: CostModel[X], one: StateMessage[X], at: tuple[X, ...]) -> X:
    if one.tensors is None:
        return collective_seconds(costs.network, one.verb, one.size_bytes, at)
    owners = maximum(minimum(one.tensors, at[-1]), 1)
    return owners * collective_seconds(costs.network, one.verb, divide(one.size_bytes, owners), at)


def state_seconds(costs: CostModel[X], messages: tuple[StateMessage[X], ...], zero: X) -> X:
    """Return the seconds of messages one after another."""
    seconds = zero
    for one in messages:
        seconds = seconds + message_seconds(costs, one)
    return seconds


def scatters(sizes: PlanSizes[X], recipe: Recipe, params: tuple[X, X]) -> tuple[StateMessage[X], ...]:
    """Return what reduce-scatters the gradients of (dense, expert) parameters.

    Hybrid sharding then all-reduces the shards over its replicas (torch.distributed.fsdp, HSDP).
    """
    groups = (("shard", "replicate", sizes.shard_share), ("expert_shard", "expert_replicate", sizes.expert_share))
    messages: list[StateMessage[X]] = []
    for count, (inner, outer, share), kind in zip(params, groups, ("", "expert "), strict=True):
        size, tensor = recipe.scatter_bytes * count, f"{kind}gradients"
        messages.append(StateMessage(group=inner, verb="reduce_scatter", size_bytes=size, tensor=tensor))
        if recipe.replicates_shards:
            rest = divide(size, share)
            messages.append(StateMessage(group=outer, verb="all_reduce", size_bytes=rest, tensor=f"shard of {tensor}"))
    return tuple(messages)


def gathers(recipe: Recipe, dense: X, expert: X) -> tuple[StateMessage[X], ...]:
    """Return what gathers the sharded weights of a unit in the type of compute."""
    w = recipe.unit_bytes
    return (
        StateMessage(group="shard", verb="all_gather", size_bytes=w * dense, tensor="weights"),
        StateMessage(group="expert_shard", verb="all_gather", size_bytes=w * expert, tensor="expert weights"),
    )


def reductions(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> tuple[StateMessage[X], ...]:
    """Return what brings the gradients of a stage together once a step; nothing where a micro-batch does it already."""
    if recipe.shards_gradients:
        return ()
    verb: Verb = "all_reduce" if recipe.reduces_whole else "reduce_scatter"
    classes = enumerate(trained(recipe, parts))
    return tuple(
        one
        for i, (own, some) in classes
        for one in _whole_stage(
            some, stage, verb, own.precision.gradient_bytes, "adapter gradients" if i else "gradients"
        )
    )


def updates(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> tuple[StateMessage[X], ...]:
    """Return what hands the new weights of a stage to all copies once a step, where the optimizer is sharded."""
    if not recipe.shards_optimizer or recipe.shards_weights:
        return ()
    classes = enumerate(trained(recipe, parts))
    return tuple(
        one for i, (own, some) in classes for one in _updated(own, some, stage, "adapters" if i else "weights")
    )


def _tensors_of(parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return how many tensors of weights the layers of a stage have, with its tables."""
    layers = total((n * k.elements.tensors for n, k in zip(stage.layers, parts.kinds, strict=True)), 0 * stage.count)
    return layers + stage.embeddings + stage.heads


def _updated(
    recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X], tensor: str
) -> tuple[StateMessage[X], StateMessage[X]]:
    """Return what hands the new weights of one class of parameters to all copies."""
    verb: Verb = "broadcast" if recipe.stack.broadcasts_weights else "all_gather"
    narrow, wide = recipe.narrow_gather_bytes, recipe.precision.weight_bytes
    dense, expert = _whole_stage(parts, stage, verb, narrow or wide, tensor)
    if narrow:
        # Tables and norms stay in 16 bits (Megatron-LM core/fp8_utils.py, is_float8tensor of weights of linear layers).
        table, others, _, _ = owned(parts, stage.with_tables_alone())
        more = table + others + owned(parts, stage)[1] - others
        dense = replace(dense, size_bytes=dense.size_bytes + (wide - narrow) * more)
    if recipe.splits_replicas:
        dense, expert = replace(dense, group="shard"), replace(expert, group="expert_shard")
    if not recipe.stack.broadcasts_weights:
        return dense, expert
    tensors = _tensors_of(parts, stage)
    return replace(dense, tensors=tensors), replace(expert, tensors=tensors)


def _whole_stage(
    parts: ModelBlocks[X], stage: Stages[X], verb: Verb, width: float, tensor: str
) -> tuple[StateMessage[X], StateMessage[X]]:
    dense_matrix, dense_other, expert_matrix, expert_other = owned(parts, stage)
    dense, expert = width * (dense_matrix + dense_other), width * (expert_matrix + expert_other)
    return (
        StateMessage(group="dp_cp", verb=verb, size_bytes=dense, tensor=tensor),
        StateMessage(group="edp", verb=verb, size_bytes=expert, tensor=f"expert {tensor}"),
    )


def boundary_messages(sizes: PlanSizes[X], size_bytes: X, scattered: bool) -> tuple[StateMessage[X], ...]:
    """Return what hands the residual stream of a micro-batch to the next stage, or its gradient back.

    Scattered, each tensor-parallel rank sends its share, and the receivers gather it (arXiv:2104.04473 section 4.1).
    """
    tensor = "residual stream"
    if not scattered:
        return (StateMessage(group="pp", verb="send", size_bytes=size_bytes, tensor=tensor),)
    return (
        StateMessage(group="pp", verb="send", size_bytes=divide(size_bytes, sizes.tp), tensor=f"share of the {tensor}"),
        StateMessage(group="tp", verb="all_gather", size_bytes=size_bytes, tensor=tensor),
    )


def table_message(size_bytes: X) -> StateMessage[X]:
    """Return what adds up the gradients of a table that the first and the last stage share."""
    return StateMessage(group="table", verb="all_reduce", size_bytes=size_bytes, tensor="tied table gradients")


def table_group_shape(sizes: PlanSizes[X]) -> tuple[X, ...]:
    """Return how many of the first and the last stage sit in one domain of each tier."""
    # They share a domain only where the whole pipeline does.
    return tuple(above(at + 1 - sizes.pp, 0, 0 * at + 2, 0 * at + 1) for at in sizes.group_shapes["pp"])


def table_seconds(costs: CostModel[X], sizes: PlanSizes[X], size_bytes: X) -> X:
    """Return the seconds in which the first and the last stage add up the gradients of a table that they share."""
    seconds = collective_seconds(costs.network, table_message(size_bytes).verb, size_bytes, table_group_shape(sizes))
    return above(sizes.pp, 1, seconds, 0 * sizes.pp)
