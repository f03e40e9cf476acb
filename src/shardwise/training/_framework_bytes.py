"""Bytes that a framework and its allocator hold beside the state and the activations of a stage.

Sources: Transformer Engine and Megatron-LM for what they keep from step to step, PyTorch for its caching allocator;
plans/stacks.toml has the file of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.ledger.number import X, above, divide, largest, maximum, minimum, total
from shardwise.ledger.traced import named
from shardwise.plans import Stack
from shardwise.training._parts import ModelBlocks, Recipe, StageMemory, categorized
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages


def shares(z: PlanSizes[X], groups: int) -> tuple[X, X]:
    """Return over how many ranks dense and expert state is sharded, where so many groups of replicas shard apart."""
    if groups == 1:
        return z.shard_share, z.expert_share
    return maximum(divide(z.shard_share, groups), 1), maximum(divide(z.expert_share, groups), 1)


def _wide_gradients(r: Recipe, z: PlanSizes[X], params: tuple[X, X, X, X]) -> X:
    """Return the bytes of a rank's gradients in the type of the optimizer, its own shard where that is sharded."""
    width = r.precision.master_bytes
    dense, expert = width * (params[0] + params[1]), width * (params[2] + params[3])
    if not r.shards_optimizer:
        return dense + expert
    share, expert_share = shares(z, r.stack.settings.optimizer_instances)
    return divide(dense, share) + divide(expert, expert_share)


def widened_bytes(r: Recipe, z: PlanSizes[X], params: tuple[X, X, X, X]) -> X:
    """Return the bytes of 16-bit gradients in fp32, which the optimizer keeps from its step to the next forward pass.

    Megatron-LM core/optimizer/distrib_optimizer.py _copy_model_grads_to_main_grads, optimizer.py likewise.
    """
    zero = 0 * params[0]
    if not r.stack.widens_gradients or r.precision.gradient_bytes >= r.precision.master_bytes:
        return zero
    return named(_wide_gradients(r, z, params), "gradients in fp32")


def late_block(r: Recipe, parts: ModelBlocks[X], s: Stages[X]) -> X:
    """Return the bytes of the gradient of the embedding table, which the caching allocator finds no room for.

    It is made last of all, dense and in one piece, among the freed segments of smaller tensors, which do not join
    (c10/cuda/CUDACachingAllocator.cpp), unless segments are expandable.
    """
    zero = 0 * s.count
    if r.stack.expandable_segments:
        return zero
    size = r.precision.activation_bytes * parts.table
    return named(above(s.embeddings, 0, size, zero), "segment of the table's gradient")


def flat_gradients(r: Recipe, z: PlanSizes[X], params: tuple[X, X, X, X], table: X) -> X:
    """Return the bytes of new segments for a shard of 16-bit gradients, made flat for the step, then flat in fp32.

    DeepSpeed runtime/zero/stage_1_and_2.py, step: single_grad_partition is flatten(averaged_gradients).to(fp32). The
    segment of the table's gradient, free by then, takes the first where it fits, or both.
    """
    zero = 0 * params[0]
    if not r.stack.micro_gradients or r.precision.gradient_bytes >= r.precision.master_bytes or not r.shards_optimizer:
        return zero
    wide = _wide_gradients(r, z, params)
    narrow = wide * r.precision.gradient_bytes / r.precision.master_bytes
    one = above(table, narrow, wide, narrow + wide)
    return named(above(table, narrow + wide, zero, one), "segments of the flat gradients")


def bucket_bytes(r: Recipe, classes: Sequence[tuple[Recipe, tuple[X, X, X, X], X]]) -> X:
    """Return bytes of the buckets of a sharded optimizer: one of gradients, one of weights on their way.

    `classes` are the recipe, the parameters and the largest tensor of each kind of parameter that trains. DeepSpeed's
    reduce_bucket_size and allgather_bucket_size, in elements; no bucket is larger than the stage. Where
    gradients of 16 bits are added to fp32 ones a bucket holds at least one tensor, whatever its size
    (deepspeed/runtime/engine.py buffered_allreduce_fallback, split_half_float_double). ZeRO's own are of gradients
    alone and whole, two where one is reduced while the other fills (deepspeed/runtime/zero/stage_1_and_2.py).
    """
    zero = 0 * classes[0][2]
    if not (r.bucket_elements and r.shards_optimizer):
        return zero
    if r.stack.flattens_gradients:
        many = r.stack.reduce_buckets(r.shards_weights)
        return categorized("buffers", zero + many * r.precision.activation_bytes * r.bucket_elements, "reduce buckets")
    size = zero
    for own, params, biggest in classes:
        elements = minimum(total(params), r.bucket_elements)
        reduced = maximum(elements, biggest) if adds_narrow(own) else elements
        size = size + own.precision.gradient_bytes * reduced + own.precision.weight_bytes * elements
    return categorized("buffers", size, "gathered in buckets")


def adds_narrow(r: Recipe) -> bool:
    """Return whether 16-bit gradients of a whole backward pass are added to fp32 ones behind it."""
    return r.stack.micro_gradients and r.precision.compute == "bf16" and r.precision.gradient_bytes == 4


_SUB_GROUP = 1e9


def flat_update(r: Recipe, z: PlanSizes[X], params: tuple[X, X, X, X]) -> X:
    """Return the bytes of a shard's gradients made flat, and then fp32, beside those that the passes have reduced.

    DeepSpeed runtime/zero/stage_1_and_2.py, step; ZeRO-3 takes sub-groups of 1e9 in turn (stage3.py sub_group_size).
    """
    zero = 0 * params[0]
    if not (r.stack.flattens_gradients and r.shards_optimizer and r.precision.master_bytes):
        return zero
    master, own = r.precision.master_bytes, r.precision.gradient_bytes
    wide = _wide_gradients(r, z, params)
    if r.shards_weights:
        wide = minimum(wide, master * _SUB_GROUP)
    return categorized("gradients", wide * (own / master + (own < master)), "flat gradients")


def reserved_bytes(stack: Stack, m: StageMemory[X]) -> X:
    """Return what the caching allocator holds of a stage at its fullest, workspaces left out."""
    return m.peak * stack.reserved_over_allocated + m.late_block


def stand_in_bytes(r: Recipe, parts: ModelBlocks[X], s: Stages[X]) -> X:
    """Return the bytes of the empty tensors that stand for weight gradients added up in the buffer.

    One of each shape for the whole run, in the type of the weight (Transformer Engine module/base.py get_dummy_wgrad).
    Products of one name are one module, and the largest of them is taken where kinds of layer differ.
    """
    zero = 0 * s.count
    if not r.stack.gradient_stand_ins or r.stack.settings.separate_weight_gradients:
        return zero
    layers = [(n + m, k) for n, m, k in zip(s.layers, s.mirrored, parts.kinds, strict=True)]
    names = dict.fromkeys(name for _, k in layers for name in k.gradient_shapes)
    shapes = [
        largest([above(n, 0, k.gradient_shapes[name], zero) for n, k in layers if name in k.gradient_shapes])
        for name in names
    ]
    ends = [above(s.heads, 0, one, zero) for one in parts.head.gradient_shapes.values()]
    return named(r.precision.activation_bytes * total([*shapes, *ends], zero), "dummy weight gradients")


def resident_pages(paged: X, other_bytes: X, room: float) -> X:
    """Return the bytes of pages that stay on a device that holds so much beside them."""
    return minimum(paged, maximum(room - other_bytes, 0.0))


def moved_pages(paged: X, other_bytes: X, room: float) -> X:
    """Return the bytes of pages that an update moves onto the device, and as many off it: none where all stay.

    It walks through them in order, and what came first goes first (NVIDIA's open-gpu-kernel-modules,
    nvidia-uvm/uvm_pmm_gpu.c, va_block_used): where some have to leave, none is there when its turn comes.
    """
    return above(paged - resident_pages(paged, other_bytes, room), 0, paged, 0 * paged)


def device_bytes(stack: Stack, z: PlanSizes[X], reserved: X, workspace: float) -> X:
    """Return the bytes that a device shows beside what is reserved: workspaces, context and communicators added."""
    axes = total(above(axis, 1, 1, 0) for axis in (z.tp, z.tp2, z.cp, z.pp, z.dp, z.ep))
    reserved_bytes = reserved + workspace * stack.reserved_over_allocated
    other_bytes = stack.settings.misc_bytes + stack.settings.rollout_beside_bytes
    return reserved_bytes + stack.context_bytes + axes * stack.communicator_bytes + other_bytes
