"""Bytes that a framework and its allocator hold beside the state and the activations of a stage.

Sources: Transformer Engine and Megatron-LM for what they keep from step to step, PyTorch for its caching allocator;
plans/stacks.toml has the file of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.hardware import Cluster
from shardwise.ledger.number import X, above, divide, largest, maximum, minimum, total
from shardwise.ledger.traced import named
from shardwise.plans import Stack
from shardwise.training._communicators import outside_bytes
from shardwise.training._parts import InFlight, MemoryMoment, ModelBlocks, Recipe, StageMemory, categorized
from shardwise.training._sizes import PlanSizes, micro_batches_a_run
from shardwise.training._stages import Stages
from shardwise.training._trained import TrainedShare, largest_layer


def shares(sizes: PlanSizes[X], groups: int) -> tuple[X, X]:
    """Return over how many ranks dense and expert state is sharded, where so many groups of replicas shard apart."""
    if groups == 1:
        return sizes.shard_share, sizes.expert_share
    return maximum(divide(sizes.shard_share, groups), 1), maximum(divide(sizes.expert_share, groups), 1)


def _wide_gradients(recipe: Recipe, sizes: PlanSizes[X], params: tuple[X, X, X, X]) -> X:
    """Return the bytes of a rank's gradients in the type of the optimizer, its own shard where that is sharded."""
    width = recipe.precision.master_bytes
    dense, expert = width * (params[0] + params[1]), width * (params[2] + params[3])
    if not recipe.shards_optimizer:
        return dense + expert
    share, expert_share = shares(sizes, recipe.stack.settings.optimizer_instances)
    return divide(dense, share) + divide(expert, expert_share)


def widened_bytes(recipe: Recipe, sizes: PlanSizes[X], params: tuple[X, X, X, X]) -> X:
    """Return the bytes of 16-bit gradients in fp32, which the optimizer keeps from its step to the next forward pass.

    Megatron-LM core/optimizer/distrib_optimizer.py _copy_model_grads_to_main_grads, optimizer.py likewise.
    """
    zero = 0 * params[0]
    if not recipe.stack.widens_gradients or recipe.precision.gradient_bytes >= recipe.precision.master_bytes:
        return zero
    return named(_wide_gradients(recipe, sizes, params), "gradients in fp32")


def late_block(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return the bytes of the gradient of the embedding table, which the caching allocator finds no room for.

    It is made last of all, dense and in one piece, among the freed segments of smaller tensors, which do not join
    (c10/cuda/CUDACachingAllocator.cpp), unless segments are expandable.
    """
    zero = 0 * stage.count
    if recipe.stack.expandable_segments:
        return zero
    size = recipe.precision.activation_bytes * parts.table
    return named(above(stage.embeddings, 0, size, zero), "segment of the table's gradient")


def whole_table(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return by how many bytes the gradient of the table of words is larger than the rows of a rank.

    DTensor makes it whole on each tensor-parallel rank and keeps a view of its rows
    (torch/distributed/tensor/_ops/_embedding_ops.py, embedding_dense_backward_strategy: no output by rows).
    """
    if not (recipe.stack.whole_table_gradient and recipe.stack.vocabulary == "split") or parts.tuned:
        return 0 * stage.count
    width = recipe.precision.activation_bytes if recipe.shards_weights else recipe.precision.gradient_bytes
    return named(width * (sizes.tp * sizes.tp2 - 1) * stage.embeddings * parts.table, "rows of other ranks")


def table_gradients(
    recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X], flowing: X
) -> tuple[X, X, X]:
    """Return gradients of tables: there before those of layers, made after them, and what is beside all at the end.

    Autograd makes the head's first and the embedding's last. Those of a shared table wait for each other, then are
    added into a third tensor (torch/csrc/autograd/input_buffer.cpp); a later micro-batch makes each anew beside
    what is added up. Checked to 1,300 bytes against every allocation of whole steps on a CPU
    (accuracy/notes/measuring.md).
    """
    zero, over = 0 * stage.count, whole_table(recipe, sizes, parts, stage)
    if recipe.stack.gradients != "transient" or recipe.offloads("gradients"):
        return zero, zero, zero
    if recipe.shards_gradients:
        return zero, zero, over
    width = recipe.precision.gradient_bytes
    shared = (
        above(stage.heads, 0, above(stage.embeddings, 0, width * parts.table, zero), zero)
        if parts.shared_table
        else zero
    )
    tables = width * stage.embeddings * parts.embedding.elements.dense + (zero if parts.shared_table else over)
    head = width * stage.heads * parts.head.elements.dense
    early = categorized("gradients", above(sizes.num_micro, 1, shared, head + shared), "gradient of the head")
    late = categorized("gradients", above(sizes.num_micro, 1, zero, tables) - shared, "gradients of the embedding")
    second = above(sizes.num_micro, 1, width * stage.embeddings * parts.embedding.elements.largest + over, zero)
    return early, late, named(maximum(flowing + second + shared, 2 * shared + second), "gradients of tables at work")


def recomputed_streams(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return what is beside adapters in a layer that runs again: for those in fp32, whose casts are the peak, streams.

    Those in 16 bits cast nothing, and the gradients in front of a frozen GEMM are the peak (`gradients_beside`).

    The residual stream and the branch's input, which the calling modules hold, and the gradient that the last adapter
    has scaled before it asked for its input; counted in whole steps of peft 0.21 (torch 2.13).
    """
    zero = 0 * parts.stream_bytes
    if recipe.adapters is None or recipe.stack.adapter_joint or recipe.stack.activation != "eager":
        return zero
    recomputed = largest_layer(parts, stage, lambda k: k.dropped_bytes)
    if recipe.adapters.compute != "fp32":
        more = largest_layer(parts, stage, lambda k: maximum(k.gradients_beside - k.transient_bytes, 0 * zero))
        return named(above(recomputed, 0, more, zero), "gradients before a frozen GEMM")
    return named(above(recomputed, 0, 3 * parts.stream_bytes, zero), "streams of the layer that runs again")


def flat_gradients(recipe: Recipe, sizes: PlanSizes[X], params: tuple[X, X, X, X], table: X) -> X:
    """Return the bytes of new segments for a shard of 16-bit gradients, made flat for the step, then flat in fp32.

    DeepSpeed runtime/zero/stage_1_and_2.py, step: single_grad_partition is flatten(averaged_gradients).to(fp32). The
    segment of the table's gradient, free by then, takes the first where it fits, or both.
    """
    zero = 0 * params[0]
    if (
        recipe.stack.micro_gradients != "narrow"
        or recipe.precision.gradient_bytes >= recipe.precision.master_bytes
        or not recipe.shards_optimizer
    ):
        return zero
    wide = _wide_gradients(recipe, sizes, params)
    narrow = wide * recipe.precision.gradient_bytes / recipe.precision.master_bytes
    one = above(table, narrow, wide, narrow + wide)
    return named(above(table, narrow + wide, zero, one), "segments of the flat gradients")


def bucket_bytes(recipe: Recipe, classes: Sequence[tuple[Recipe, tuple[X, X, X, X], X]]) -> X:
    """Return bytes of the buckets of a sharded optimizer: one of gradients, one of weights on their way.

    `classes` are the recipe, the parameters and the largest tensor of each kind of parameter that trains. DeepSpeed's
    reduce_bucket_size and allgather_bucket_size, in elements; no bucket is larger than the stage. Where
    gradients of 16 bits are added to fp32 ones a bucket holds at least one tensor, whatever its size
    (deepspeed/runtime/engine.py buffered_allreduce_fallback, split_half_float_double). ZeRO's own are of gradients
    alone and whole, two where one is reduced while the other fills (deepspeed/runtime/zero/stage_1_and_2.py).
    """
    zero = 0 * classes[0][2]
    if not (recipe.bucket_elements and recipe.shards_optimizer):
        return zero
    if recipe.stack.step_gradients:
        many = recipe.stack.reduce_buckets(recipe.shards_weights)
        return categorized(
            "buffers", zero + many * recipe.precision.activation_bytes * recipe.bucket_elements, "reduce buckets"
        )
    size = zero
    for own, params, biggest in classes:
        elements = minimum(total(params), recipe.bucket_elements)
        reduced = maximum(elements, biggest) if adds_narrow(own) else elements
        size = size + own.precision.gradient_bytes * reduced + own.precision.weight_bytes * elements
    return categorized("buffers", size, "gathered in buckets")


def adds_narrow(recipe: Recipe) -> bool:
    """Return whether 16-bit gradients of a whole backward pass are added to fp32 ones behind it."""
    narrow = recipe.stack.micro_gradients == "narrow"
    return narrow and recipe.precision.compute == "bf16" and recipe.precision.gradient_bytes == 4


def graph_gradients(sizes: PlanSizes[X], trained: Sequence[TrainedShare[X]]) -> X:
    """Return the bytes of the gradients of a micro-batch beside those of the ones before, all made by one graph.

    Hooks of replicas break the graph, those of FSDP at each unit, and of DistributedDataParallel at each bucket
    (torch/_dynamo/backends/distributed.py DDPOptimizer). Nothing is known of one in a stage of a pipeline.
    """
    made = total(one.recipe.precision.gradient_bytes * total(one.params) for one in trained)
    alone = above(sizes.dp * sizes.pp, 1, 0 * made, made)
    return named(above(sizes.num_micro, 1, alone, 0 * made), "gradients of one graph")


_SUB_GROUP = 1e9


def _flat_pair(recipe: Recipe, sizes: PlanSizes[X], params: tuple[X, X, X, X]) -> tuple[X, X]:
    """Return the bytes of a shard's gradients made flat, and of their copy in fp32 where they are narrower.

    DeepSpeed runtime/zero/stage_1_and_2.py, step; ZeRO-3 takes sub-groups of 1e9 in turn (stage3.py sub_group_size).
    """
    zero = 0 * params[0]
    if not (recipe.stack.step_gradients and recipe.shards_optimizer and recipe.precision.master_bytes):
        return zero, zero
    master, own = recipe.precision.master_bytes, recipe.precision.gradient_bytes
    wide = _wide_gradients(recipe, sizes, params)
    if recipe.shards_weights:
        wide = minimum(wide, master * _SUB_GROUP)
    narrow = own / master if recipe.stack.step_gradients == "flat" else 0
    return wide * narrow, wide * (own < master)


def flat_update(recipe: Recipe, sizes: PlanSizes[X], params: tuple[X, X, X, X]) -> X:
    """Return the bytes of a shard's gradients made flat, and then fp32, beside those that the passes have reduced."""
    return categorized("gradients", total(_flat_pair(recipe, sizes, params)), "flat gradients")


def flat_segments(recipe: Recipe, sizes: PlanSizes[X], params: tuple[X, X, X, X], block: X) -> X:
    """Return the bytes of new segments for gradients made flat, where the largest free block, `block`, is smaller.

    What the passes have freed lies in blocks of their tensors, which never join (c10/cuda/CUDACachingAllocator.cpp).
    """
    pair = _flat_pair(recipe, sizes, params)
    if recipe.stack.expandable_segments:
        return 0 * params[0]
    return named(total(above(one, block, one, 0 * one) for one in pair), "segments of the flat gradients")


def reserved_bytes(stack: Stack, memory: StageMemory[X]) -> X:
    """Return what the caching allocator holds of a stage at its fullest, workspaces left out."""
    return memory.fragmented + memory.peak * (stack.reserved_over_allocated - 1)


def stand_in_bytes(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return the bytes of the empty tensors that stand for weight gradients added up in the buffer.

    One of each shape for the whole run, in the type of the weight (Transformer Engine module/base.py get_dummy_wgrad).
    Products of one name are one module, and the largest of them is taken where kinds of layer differ.
    """
    zero = 0 * stage.count
    if not recipe.stack.gradient_stand_ins or recipe.stack.settings.separate_weight_gradients:
        return zero
    layers = [(n + m, k) for n, m, k in zip(stage.layers, stage.mirrored, parts.kinds, strict=True)]
    names = dict.fromkeys(name for _, k in layers for name in k.gradient_shapes)
    shapes = [
        largest([above(n, 0, k.gradient_shapes[name], zero) for n, k in layers if name in k.gradient_shapes])
        for name in names
    ]
    ends = [above(stage.heads, 0, one, zero) for one in parts.head.gradient_shapes.values()]
    return named(recipe.precision.activation_bytes * total([*shapes, *ends], zero), "dummy weight gradients")


def module_buffers(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return the bytes that modules hold for the whole run: stand-ins of gradients, cosines and sines of positions."""
    layers = zip(stage.layers, stage.mirrored, parts.rotary, strict=True)
    positions = total(((n + m) * one for n, m, one in layers), 0 * stage.count)
    return stand_in_bytes(recipe, parts, stage) + categorized("buffers", positions, "cosines and sines")


def stage_buffers(
    recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X], depth: InFlight[X]
) -> X:
    """Return the bytes of a stage's messages beside what its layers keep: buffers of micro-batches, and outputs.

    The input of a layer in flight is the buffer that it came in. Of the messages to the next stage the outputs of the
    micro-batches in flight are held, and a buffer for the gradient of each (torch.distributed.pipelining).
    """
    zero = 0 * parts.stream_bytes
    if not recipe.stack.stage_buffers:
        return zero
    one, num_micro = parts.stream_bytes, micro_batches_a_run(sizes, recipe.stack)
    ahead = above(stage.embeds, 0, zero, one * maximum(num_micro - depth.own, 0))
    behind = above(stage.heads, 0, zero, one * (num_micro + depth.own))
    return named(above(sizes.pp, 1, ahead + behind, zero), "buffers between stages")


def with_answers(
    recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X], moments: dict[MemoryMoment, tuple[X, X]]
) -> dict[MemoryMoment, tuple[X, X]]:
    """Return the moments of a step with what its forward pass gives out: logits, and keys and values (`caches`).

    They end with the pass, or last until the variable that holds the answer takes the next pass's, beside which they
    are at its end; the loss has its logits already. Layers that do not run again save the keys and values of their own
    pass anyway.
    """
    zero, lasts = 0 * stage.count, recipe.stack.answer == "held"
    if not recipe.stack.answer:
        return moments
    logits = categorized("logits", stage.heads * parts.answer, "logits of the answer")
    layers = [n + m for n, m in zip(stage.layers, stage.mirrored, strict=True)]
    caches = [n * one for n, one in zip(layers, parts.caches, strict=True)]
    again = [above(k.dropped_bytes, 0, one, zero) for k, one in zip(parts.kinds, caches, strict=True)]
    new = categorized("activations", total(again, zero), "keys and values that layers give out")
    old = categorized("activations", lasts * total(caches, zero), "keys and values of the last pass")
    more = {"forward": logits + old + new, "loss": old + new, "backward": logits + lasts * new}
    return {name: (fixed, moving + more.get(name, logits + old)) for name, (fixed, moving) in moments.items()}


def update_bytes(recipe: Recipe, sizes: PlanSizes[X], params: tuple[X, X, X, X], biggest: X) -> X:
    """Return temporaries of the optimizer step: those of the framework, and fp32 copies of a tensor that it makes.

    Two of the largest tensor when tensors are updated one by one, one of everything by foreach, none when fused.
    Source: torch/optim/adamw.py _single_tensor_adamw and _multi_tensor_adamw (the square root of the second moment).
    """
    share = sizes.shard_share if recipe.shards_optimizer else 1
    if recipe.optimizer.own_kernel or recipe.optimizer.temporaries:
        return named(divide(4 * recipe.optimizer.temporaries * biggest, share), "optimizer temporaries")
    if recipe.stack.optimizer_step == "fused":
        return 0 * biggest
    width = recipe.precision.state_bytes
    if recipe.stack.optimizer_step == "single":
        return named(divide(2 * width * biggest, share), "optimizer temporaries")
    experts = sizes.expert_share if recipe.shards_optimizer else 1
    shards = divide(total(params[:2]), share) + divide(total(params[2:]), experts)
    return named(width * shards, "optimizer temporaries")


def resident_pages(paged: X, other_bytes: X, room: float) -> X:
    """Return the bytes of pages that stay on a device that holds so much beside them."""
    return minimum(paged, maximum(room - other_bytes, 0.0))


def moved_pages(paged: X, other_bytes: X, room: float) -> X:
    """Return the bytes of pages that an update moves onto the device, and as many off it: none where all stay.

    It walks through them in order, and what came first goes first (NVIDIA's open-gpu-kernel-modules,
    nvidia-uvm/uvm_pmm_gpu.c, va_block_used): where some have to leave, none is there when its turn comes.
    """
    return above(paged - resident_pages(paged, other_bytes, room), 0, paged, 0 * paged)


def device_bytes(
    stack: Stack, cluster: Cluster, sizes: PlanSizes[X], pool: tuple[X, X], workspace: X | float
) -> tuple[X, X]:
    """Return the bytes that a device shows, and those of them that it has to have.

    `pool` is what the allocator reserves where there is room, and its tensors. Before it fails it gives back the blocks
    that are free, and asks again (c10/cuda/CUDACachingAllocator.cpp release_cached_blocks): what is required are
    tensors and what lies between them, and what is shown ends at the device where they are no more than that.
    """
    reserved, peak = pool
    over = stack.reserved_over_allocated
    outside = outside_bytes(stack, cluster, sizes) + workspace * over
    required = peak * over + outside
    return minimum(reserved + outside, maximum(required, cluster.device.usable_memory_bytes)), required
