"""What a device shows beside what the allocator holds: the context of its process and NCCL's communicators."""

from __future__ import annotations

from shardwise.hardware import Cluster
from shardwise.ledger.number import X, above, total
from shardwise.plans import Stack
from shardwise.training._sizes import PlanSizes


def outside_bytes(stack: Stack, cluster: Cluster, sizes: PlanSizes[X]) -> X:
    """Return the bytes that a device shows beside what the allocator holds: context, communicators and what is told."""
    stated = stack.settings.misc_bytes + stack.settings.rollout_beside_bytes
    return communicator_bytes(stack, cluster, sizes) + (stack.context_bytes(cluster.device) + stated)


def communicator_bytes(stack: Stack, cluster: Cluster, sizes: PlanSizes[X]) -> X:
    """Return the bytes of a device's communicators: of axes, of copies of experts and of all ranks."""
    axes = total(above(axis, 1, 1, 0) for axis in (sizes.tp, sizes.tp2, sizes.cp, sizes.pp, sizes.dp, sizes.ep))
    axes = axes + above(sizes.ep, 1, above(sizes.expert_copies, 1, 1, 0), 0)
    world = above(axes, 0, 1, 0) if stack.world_communicator else 0
    return (axes + world) * stack.communicator_bytes
