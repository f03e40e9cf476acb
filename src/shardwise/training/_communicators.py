"""What a device shows beside what the allocator holds: the context of its process and NCCL's communicators."""

from __future__ import annotations

from shardwise.hardware import Cluster, peer_bytes
from shardwise.ledger.number import X, above, minimum, total
from shardwise.plans import Stack
from shardwise.training._sizes import PlanSizes

_NEIGHBOURS = 2
"""The stages next to one of a pipeline."""
_MEASURED_NODE = 8
"""The largest node of which it is measured what an all-to-all leaves behind."""


def outside_bytes(stack: Stack, cluster: Cluster, sizes: PlanSizes[X]) -> X:
    """Return the bytes that a device shows beside what the allocator holds: context, communicators and what is told."""
    stated = stack.settings.misc_bytes + stack.settings.rollout_beside_bytes
    return communicator_bytes(stack, cluster, sizes) + (stack.context_bytes(cluster.device) + stated)


def communicator_bytes(stack: Stack, cluster: Cluster, sizes: PlanSizes[X]) -> X:
    """Return the bytes of a device's communicators: of axes, of copies of experts, of all ranks and to peers.

    Rings and trees have a buffer for each of two neighbours; sends and receipts one for every peer, whatever is sent
    (hardware/context.toml, peers). Groups that span nodes have two channels to a peer, and buffers that all share.
    """
    axes = total(above(axis, 1, 1, 0) for axis in (sizes.tp, sizes.tp2, sizes.cp, sizes.pp, sizes.dp, sizes.ep))
    axes = axes + above(sizes.ep, 1, above(sizes.expert_copies, 1, 1, 0), 0)
    world = above(axes, 0, 1, 0) if stack.world_communicator else 0
    rings = (axes + world) * stack.communicator_bytes
    return rings + _peers(stack, cluster, sizes) * peer_bytes(cluster.device) if stack.communicator_bytes else rings


def _peers(stack: Stack, cluster: Cluster, sizes: PlanSizes[X]) -> X:
    """Return to how many devices of its node one sends and from how many it receives, of experts and of stages.

    Ranks of experts lie side by side, stages outermost (`group_shapes`).
    """
    node, zero = cluster.tiers[0].size, 0 * sizes.pp
    ranks = sizes.tp * sizes.tp2 * sizes.cp * sizes.dp * sizes.pp
    stages = above(ranks, node, zero, minimum(sizes.pp - 1, _NEIGHBOURS))
    if stack.dispatch != "all-to-all":
        return stages
    experts = above(sizes.ep * sizes.etp, node, zero, minimum(sizes.ep - 1, _MEASURED_NODE - 1))
    return stages + experts
