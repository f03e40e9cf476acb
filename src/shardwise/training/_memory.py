"""Bytes on one rank of each stage at the named moments of a step; a peak is a moment.

Sources: state bytes arXiv:1910.02054 and Megatron-LM distributed optimizer; in-flight micro-batches by schedule; the
moments were checked against PyTorch's memory tracker on whole training steps (tests/training).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from shardwise.ledger.number import X, above, divide, largest, maximum, minimum, total
from shardwise.ledger.traced import named
from shardwise.records import dataclass
from shardwise.training._blocks import BlockCost
from shardwise.training._framework_bytes import (
    adds_narrow,
    bucket_bytes,
    flat_gradients,
    flat_update,
    late_block,
    shares,
    stand_in_bytes,
    widened_bytes,
)
from shardwise.training._fsdp_units import GatheredWeights, end_units, gathered_bytes, layer_units
from shardwise.training._offload import placed
from shardwise.training._parts import (
    InFlight,
    MemoryMoment,
    ModelBlocks,
    Recipe,
    StageMemory,
    categorized,
    frozen_bytes,
    in_compute,
    owned,
    owned_pages,
    owned_states,
    tied_copy,
    trained,
)
from shardwise.training._sizes import PlanSizes, micro_batches_a_run
from shardwise.training._stages import Stages

STATE = "docs/formulas.md, state"


def tensors_of(parts: ModelBlocks[X], s: Stages[X]) -> X:
    """Return how many tensors of weights the layers of a stage have, with its tables."""
    layers = total((n * k.elements.tensors for n, k in zip(s.layers, parts.kinds, strict=True)), 0 * s.count)
    return layers + s.embeddings + s.heads


def state_bytes(r: Recipe, z: PlanSizes[X], params: tuple[X, X, X, X], states: tuple[X, X]) -> tuple[X, X, X]:
    """Return bytes of (weights, gradients, optimizer state) on a rank under the sharding.

    Dense copies sit on dp * cp ranks, experts on their own; ZeRO-1 shards the optimizer, ZeRO-2 gradients too, ZeRO-3
    and FSDP everything (arXiv:1910.02054 section 5). `states` are the bytes of optimizer state that single tensors
    decide, (dense, of experts).
    """
    dense_matrix, dense_other, expert_matrix, expert_other = params

    def spread(matrix: float, other: float, sharded: bool, groups: int = 1, more: bool = False) -> X:
        dense = dense_matrix * matrix + dense_other * other
        expert = expert_matrix * matrix + expert_other * other
        if more and o.by_tensor:
            dense, expert = dense + states[0], expert + states[1]
        if not sharded:
            return dense + expert
        share, expert_share = shares(z, groups)
        return divide(dense, share) + divide(expert, expert_share)

    p, o = r.precision, r.optimizer
    return (
        categorized("weights", spread(p.weight_bytes, p.weight_bytes, r.shards_weights), "weights", STATE),
        categorized("gradients", spread(p.gradient_bytes, p.gradient_bytes, r.shards_gradients), "gradients", STATE),
        categorized(
            "optimizer",
            spread(
                p.master_bytes + o.matrix.element_bytes(p.state_bytes),
                p.master_bytes + o.other.element_bytes(p.state_bytes),
                r.shards_optimizer,
                r.stack.settings.optimizer_instances,
                more=True,
            ),
            "optimizer state",
            STATE,
        ),
    )


def stage_state(r: Recipe, z: PlanSizes[X], parts: ModelBlocks[X], s: Stages[X]) -> tuple[X, X, X]:
    """Return bytes of (weights, gradients, optimizer state) of a stage on a rank, those of frozen weights too."""
    layers = total((n * k.narrow for n, k in zip(s.layers, parts.kinds, strict=True)), 0 * s.count)
    narrow = categorized("weights", r.narrow_bytes * layers, "weights in fewer bits", STATE) if r.narrow_bytes else 0.0
    each = [state_bytes(own, z, owned(some, s), owned_states(some, s)) for own, some in trained(r, parts)]
    if not parts.tuned:
        return each[0][0] + narrow, *each[0][1:]
    weights, gradients, optimizer = (total(column) for column in zip(*each, strict=True))
    dense, expert, apart = frozen_bytes(parts, s)
    if r.shards_weights:
        dense, expert = divide(dense, z.shard_share), divide(expert, z.expert_share)
    return (
        weights + categorized("weights", dense + expert + apart, "frozen weights", STATE) + narrow,
        gradients,
        optimizer,
    )


def paged_state(r: Recipe, z: PlanSizes[X], parts: ModelBlocks[X], s: Stages[X]) -> X:
    """Return bytes of a rank's optimizer state in memory that the driver moves (cudaMallocManaged)."""
    zero = 0 * s.count
    if not r.optimizer.paged:
        return zero
    pages = [owned_pages(some, s) for _, some in trained(r, parts)]
    dense, expert = (total((one[i] for one in pages), zero) for i in (0, 1))
    if r.shards_optimizer:
        dense, expert = divide(dense, z.shard_share), divide(expert, z.expert_share)
    return (1 + r.critics) * (dense + expert)


def wide_tables(r: Recipe, z: PlanSizes[X], parts: ModelBlocks[X], s: Stages[X]) -> X:
    """Return bytes that the embedding table takes beyond those of other weights, where the recipe keeps it wider."""
    wider = r.precision.embedding_bytes - r.precision.weight_bytes
    tables = (s.embeddings * parts.table + tied_copy(parts, s)) * wider
    return named(divide(tables, z.shard_share) if r.shards_weights else tables, "wide embedding table")


def stage_buffers(r: Recipe, z: PlanSizes[X], parts: ModelBlocks[X], s: Stages[X], depth: InFlight[X]) -> X:
    """Return the bytes of a stage's messages beside what its layers keep: buffers of micro-batches, and outputs.

    The input of a layer in flight is the buffer that it came in. Of the messages to the next stage the outputs of the
    micro-batches in flight are held, and a buffer for the gradient of each (torch.distributed.pipelining).
    """
    zero = 0 * parts.stream_bytes
    if not r.stack.stage_buffers:
        return zero
    one, num_micro = parts.stream_bytes, micro_batches_a_run(z, r.stack)
    ahead = above(s.embeds, 0, zero, one * maximum(num_micro - depth.own, 0))
    behind = above(s.heads, 0, zero, one * (num_micro + depth.own))
    return named(above(z.pp, 1, ahead + behind, zero), "buffers between stages")


def update_bytes(r: Recipe, z: PlanSizes[X], params: tuple[X, X, X, X], biggest: X) -> X:
    """Return temporaries of the optimizer step: those of the framework, and fp32 copies of a tensor that it makes.

    Two of the largest tensor when tensors are updated one by one, one of everything by foreach, none when fused.
    Source: torch/optim/adamw.py _single_tensor_adamw and _multi_tensor_adamw (the square root of the second moment).
    """
    share = z.shard_share if r.shards_optimizer else 1
    if r.optimizer.own_kernel or r.optimizer.temporaries:
        return named(divide(4 * r.optimizer.temporaries * biggest, share), "optimizer temporaries")
    if r.stack.optimizer_step == "fused":
        return 0 * biggest
    width = r.precision.state_bytes
    if r.stack.optimizer_step == "single":
        return named(divide(2 * width * biggest, share), "optimizer temporaries")
    return named(divide(width * total(params), share), "optimizer temporaries")


def _largest_layer(parts: ModelBlocks[X], s: Stages[X], pick: Callable[[BlockCost[X]], X]) -> X:
    layers = [n + m for n, m in zip(s.layers, s.mirrored, strict=True)]
    return largest([above(n, 0, pick(k), 0 * s.count) for n, k in zip(layers, parts.kinds, strict=True)])


def saved_bytes(parts: ModelBlocks[X], layers: tuple[X, ...], embeds: X, zero: X) -> X:
    """Return the bytes saved for backward by the layers and the embedding of one micro-batch."""
    kept = total((n * k.kept_bytes for n, k in zip(layers, parts.kinds, strict=True)), zero)
    return named(kept + embeds * parts.embedding.kept_bytes, "saved for backward, one micro-batch")


def in_flight_bytes(parts: ModelBlocks[X], s: Stages[X], depth: InFlight[X]) -> X:
    """Return the bytes saved for backward by the layers and the embedding of all micro-batches in flight."""
    zero = 0 * s.count
    own = saved_bytes(parts, s.layers, s.embeds, zero)
    mirrored = saved_bytes(parts, s.mirrored, s.mirrored_embeds, zero)
    return categorized("activations", depth.own * own + depth.mirrored * mirrored, "activations in flight")


def _biggest_tensor(parts: ModelBlocks[X], s: Stages[X]) -> X:
    """Return the parameters of the largest weight of a stage."""
    table = above(s.embeddings + tied_copy(parts, s), 0, parts.embedding.elements.largest, 0 * s.count)
    ends = maximum(table, above(s.heads, 0, parts.head.elements.largest, 0 * s.count))
    return maximum(_largest_layer(parts, s, lambda k: k.elements.largest), ends)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment(Generic[X]):
    """What the moments of a step are made of: bytes that last, of layers at work, and of micro-batches in flight."""

    lasting: X
    standing: X
    buckets: X
    gathered: GatheredWeights[X]
    gradients: X
    activations: X
    again: X
    transient: X
    flowing: X
    waiting: X
    logits: X
    last_layer: X


def stage_memory(r: Recipe, z: PlanSizes[X], parts: ModelBlocks[X], s: Stages[X], depth: InFlight[X]) -> StageMemory[X]:
    """Return the bytes of one stage that holds the activations of `depth` micro-batches at its fullest."""
    params, classes = owned(parts, s), trained(r, parts)
    weights, gradients, optimizer = stage_state(r, z, parts, s)
    if r.stack.settings.updates_in_backward:
        one = largest([own.precision.gradient_bytes * _biggest_tensor(some, s) for own, some in classes])
        gradients = categorized("gradients", minimum(one, gradients), "gradient of the largest tensor")
    if r.copies or r.critics:
        weights = categorized("weights", (1 + r.copies + r.critics) * weights, "weights of all models")
        gradients, optimizer = (1 + r.critics) * gradients, (1 + r.critics) * optimizer
    if r.precision.embedding_bytes:
        weights = categorized("weights", weights + wide_tables(r, z, parts, s), "weights")
    paged = paged_state(r, z, parts, s)
    if r.optimizer.paged:
        optimizer = categorized("optimizer", optimizer - paged, "optimizer state beside its pages")
    home = placed(r, z, parts, s, (weights, gradients, optimizer), in_flight_bytes(parts, s, depth))
    weights, gradients, optimizer = home.weights, home.gradients, home.optimizer
    gathered = categorized("buffers", above(s.heads, 0, parts.gather_buffer, 0 * s.count), "gathered input of the head")
    buffers = stand_in_bytes(r, parts, s) + gathered + stage_buffers(r, z, parts, s, depth)
    hosted, none = r.offloads("optimizer"), 0 * weights
    widened = none if hosted else total(widened_bytes(own, z, owned(some, s)) for own, some in classes)
    m = made_of(r, z, parts, s, depth, (weights + optimizer + buffers, gradients, home.activations))
    moments = moments_of(r, z, parts, s, m)
    made = total(
        update_bytes(own, z, owned(some, s), _biggest_tensor(some, s)) + flat_update(own, z, owned(some, s))
        for own, some in classes
    )
    update = widened + (none if hosted else made)
    moments["optimizer step"] = named(m.lasting + gradients + update, "optimizer step")
    peak, table = named(largest(moments.values()), "peak of the stage"), late_block(r, parts, s)
    return StageMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=m.activations,
        logits=m.logits,
        recomputed=m.again,
        buffers=m.buckets + m.gathered.backward,
        in_flight=depth.own + depth.mirrored,
        framework=buffers,
        widened=widened,
        host=home.host,
        paged=paged,
        late_block=table + fragmented_bytes(r, parts, s, m, moments, flat_gradients(r, z, params, table)) - peak,
        moments=moments,
        peak=peak,
    )


def fragmented_bytes(
    r: Recipe, parts: ModelBlocks[X], s: Stages[X], m: Moment[X], moments: dict[MemoryMoment, X], flat: X
) -> X:
    """Return the peak of a stage with what the caching allocator cannot use twice at that moment.

    The block of 16-bit logits, freed before backward, is too small for any of the fp32 tensors that follow
    (c10/cuda/CUDACachingAllocator.cpp splits and joins blocks, but moves none). Gathered weights and sharded gradients
    lie in the pools of their streams: the root's and one layer's at once, and the gradients, whatever else is there.
    Gradients that are made `flat` for the update find no room among what the passes have freed.
    """
    totals = {name: value + flat * (name != "optimizer step") for name, value in moments.items()}
    if r.stack.reserved_over_allocated > 1 and r.stack.loss_kernel.startswith("eager"):
        totals["loss"] = totals["loss"] + s.heads * parts.loss.kept_bytes * r.precision.activation_bytes / 4
    if r.stack.reserved_over_allocated > 1 and not r.stack.expandable_segments:
        totals["loss"] = totals["loss"] + left_by_layers(parts, s, m)
    if not (r.stack.apart_pools and r.shards_weights):
        return largest(totals.values())
    during = ("forward", "loss", "backward")
    others = [value - (m.standing if name in during else m.gradients) for name, value in totals.items()]
    parts_in_compute = in_compute(r, parts)
    unit, _ = layer_units(r, parts_in_compute, s)
    gathered = r.precision.activation_bytes * (maximum(*end_units(r, parts_in_compute, s)) + unit)
    return named(largest(others) + m.gradients + gathered, "peak of the pools")


def left_by_layers(parts: ModelBlocks[X], s: Stages[X], m: Moment[X]) -> X:
    """Return the bytes of blocks that a layer has freed before the loss, which finds no room in them.

    A layer that runs again in backward keeps none of what it makes in forward. Blocks of different requests never
    join (c10/cuda/CUDACachingAllocator.cpp), so that a tensor of the loss that is larger than any of a layer's needs
    another; backward then fits into blocks of either.
    """
    zero = 0 * s.count
    made = _largest_layer(parts, s, lambda k: above(k.dropped_bytes, 0, k.working_bytes, zero))
    widest = maximum(parts.head.transient_bytes, parts.loss.transient_bytes)
    return named(above(s.heads * widest, m.transient, made, zero), "blocks that layers have freed")


def made_of(
    r: Recipe, z: PlanSizes[X], parts: ModelBlocks[X], s: Stages[X], depth: InFlight[X], state: tuple[X, X, X]
) -> Moment[X]:
    """Return what the moments of a stage are made of; `state` is what lasts, the gradients, and what is in flight."""
    whole_step, gradients, activations = state
    # Gradients that zero_grad frees exist in forward only when micro-batches are accumulated.
    standing = gradients if r.stack.gradients == "persistent" else above(z.num_micro, 1, gradients, 0 * gradients)
    classes = trained(r, parts)
    buckets = bucket_bytes(r, [(own, owned(some, s), _biggest_tensor(some, s)) for own, some in classes])
    last, wide = parts.head.kept_bytes + parts.loss.kept_bytes, parts.head.transient_bytes
    # GPipe runs every loss before the first backward pass; the others have one head in flight.
    waiting = categorized("logits", (depth.heads - 1) * s.heads * last, "logits that wait for backward")
    return Moment(
        lasting=whole_step,
        standing=standing,
        buckets=buckets,
        gathered=gathered_bytes(r, z, parts, s),
        gradients=gradients,
        activations=activations,
        again=categorized("recomputed", _largest_layer(parts, s, lambda k: k.dropped_bytes), "recomputed layer"),
        transient=_largest_layer(parts, s, lambda k: k.transient_bytes),
        # The gradient of the residual stream flows beside whatever an operator of a branch makes.
        flowing=named(parts.stream_bytes, "gradient of the residual stream") + recomputed_streams(r, parts, s),
        waiting=waiting,
        # A head of few bits is made wide beside its logits.
        logits=categorized(
            "logits", waiting + s.heads * maximum(last + parts.loss.transient_bytes, wide), "logits and loss"
        ),
        last_layer=categorized(
            "activations", _largest_layer(parts, s, lambda k: k.kept_bytes), "saved for backward, one layer"
        ),
    )


def recomputed_streams(r: Recipe, parts: ModelBlocks[X], s: Stages[X]) -> X:
    """Return the streams beside an adapter in fp32 of a layer that runs again: its casts are the peak of the replay.

    The residual stream and the branch's input, which the calling modules hold, and the gradient that the last adapter
    has scaled before it asked for its input; counted in whole steps of peft 0.21 (torch 2.13).
    """
    zero = 0 * parts.stream_bytes
    if r.adapters is None or r.adapters.compute != "fp32" or r.stack.adapter_joint or r.stack.activation != "eager":
        return zero
    recomputed = _largest_layer(parts, s, lambda k: k.dropped_bytes)
    return named(above(recomputed, 0, 3 * parts.stream_bytes, zero), "streams of the layer that runs again")


def _table_gradients(r: Recipe, z: PlanSizes[X], parts: ModelBlocks[X], s: Stages[X], m: Moment[X]) -> tuple[X, X, X]:
    """Return gradients of tables: there before those of layers, made after them, and what is beside all at the end.

    Autograd makes the head's first and the embedding's last. Those of a shared table wait for each other, then are
    added into a third tensor (torch/csrc/autograd/input_buffer.cpp); a later micro-batch makes each anew beside
    what is added up. Checked to 1,300 bytes against every allocation of whole steps on a CPU
    (accuracy/notes/measuring.md).
    """
    zero = 0 * s.count
    if r.stack.gradients != "transient" or r.shards_gradients or r.offloads("gradients"):
        return zero, zero, zero
    width = r.precision.gradient_bytes
    shared = above(s.heads, 0, above(s.embeddings, 0, width * parts.table, zero), zero) if parts.shared_table else zero
    tables = width * s.embeddings * parts.embedding.elements.dense
    head = width * s.heads * parts.head.elements.dense
    early = named(above(z.num_micro, 1, shared, head + shared), "gradient of the head")
    late = named(above(z.num_micro, 1, zero, tables) - shared, "gradients of the embedding")
    second = above(z.num_micro, 1, width * s.embeddings * parts.embedding.elements.largest, zero)
    return early, late, named(maximum(m.flowing + second + shared, 2 * shared + second), "gradients of tables at work")


def moments_of(r: Recipe, z: PlanSizes[X], parts: ModelBlocks[X], s: Stages[X], m: Moment[X]) -> dict[MemoryMoment, X]:
    """Return the bytes at the moments of the passes.

    The last forward pass in flight; the loss with its logits; backward of the first layer, with what recompute makes
    again; all gradients complete. Transient gradients do not exist before the first backward pass ends unless
    micro-batches are accumulated.
    """
    base, back = m.lasting + m.buckets + m.standing, m.again + m.transient + m.flowing
    whole = m.gathered
    # Where tensors are gathered one by one the head's weight is there while it is used.
    one = in_compute(r, parts).head.elements.largest if r.stack.gathers_tensors else 0
    apart = r.precision.activation_bytes * s.heads * one
    early, late, last = _table_gradients(r, z, parts, s, m)
    complete = m.lasting + m.buckets + whole.complete + m.gradients - late + minimum(m.last_layer, m.activations) + back
    moments: dict[MemoryMoment, X] = {
        "forward": base + whole.forward + m.activations + m.transient + parts.mask,
        "loss": base + whole.loss + m.activations + m.logits + apart + s.heads * parts.mask,
        "backward": base + early + whole.backward + m.activations + m.waiting + back,
        "gradients complete": maximum(complete, m.lasting + m.buckets + m.gradients + last),
    }
    if r.scorings:
        # Without gradients a layer frees what it made before the next, and the last before the logits.
        moments["scoring"] = base + whole.forward + maximum(m.again + m.last_layer + m.transient, m.logits)
    if adds_narrow(r):
        # All 16-bit gradients of one backward pass, while other micro-batches wait for theirs.
        made = named(r.precision.activation_bytes * total(owned(parts, s)), "16-bit gradients")
        done = minimum(saved_bytes(parts, s.layers, s.embeds, 0 * s.count), m.activations)
        moments["micro-batch complete"] = complete + made + m.activations - done
    return {name: named(value, name) for name, value in moments.items()}
