"""Bytes on one rank of each stage at the named moments of a step; a peak is a moment.

Sources: state bytes arXiv:1910.02054 and Megatron-LM distributed optimizer; in-flight micro-batches by schedule; the
moments were checked against PyTorch's memory tracker on whole training steps (tests/training).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from shardwise.ledger.number import X, above, divide, largest, maximum, minimum, total
from shardwise.ledger.traced import named
from shardwise.plans import WHOLE_LOSSES, WIDENED_LOSSES
from shardwise.records import dataclass
from shardwise.training._framework_bytes import (
    adds_narrow,
    bucket_bytes,
    flat_gradients,
    flat_segments,
    flat_update,
    graph_gradients,
    late_block,
    module_buffers,
    recomputed_streams,
    shares,
    stage_buffers,
    table_gradients,
    update_bytes,
    whole_table,
    widened_bytes,
    with_answers,
)
from shardwise.training._fsdp_units import (
    GatheredWeights,
    end_units,
    gathered_bytes,
    held_head,
    holds_end_gradients,
    layer_units,
    lone_bytes,
    reduced_ends,
    watched_inputs,
)
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
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages
from shardwise.training._trained import TrainedShare, largest_layer, shares_of

STATE = "docs/formulas.md, state"


def state_bytes(recipe: Recipe, sizes: PlanSizes[X], params: tuple[X, X, X, X], states: tuple[X, X]) -> tuple[X, X, X]:
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
        share, expert_share = shares(sizes, groups)
        return divide(dense, share) + divide(expert, expert_share)

    p, o = recipe.precision, recipe.optimizer
    return (
        categorized("weights", spread(p.weight_bytes, p.weight_bytes, recipe.shards_weights), "weights", STATE),
        categorized(
            "gradients", spread(p.gradient_bytes, p.gradient_bytes, recipe.shards_gradients), "gradients", STATE
        ),
        categorized(
            "optimizer",
            spread(
                p.master_bytes + o.matrix.element_bytes(p.state_bytes),
                p.master_bytes + o.other.element_bytes(p.state_bytes),
                recipe.shards_optimizer,
                recipe.stack.settings.optimizer_instances,
                more=True,
            ),
            "optimizer state",
            STATE,
        ),
    )


def stage_state(
    recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X], classes: Sequence[TrainedShare[X]]
) -> tuple[X, X, X]:
    """Return bytes of (weights, gradients, optimizer state) of a stage on a rank, those of frozen weights too."""
    zero, narrow, by_tensor = 0 * stage.count, narrow_weights(recipe, parts, stage), recipe.optimizer.by_tensor
    each = [
        state_bytes(one.recipe, sizes, one.params, owned_states(one.parts, stage) if by_tensor else (zero, zero))
        for one in classes
    ]
    if not parts.tuned:
        return each[0][0] + narrow, *each[0][1:]
    weights, gradients, optimizer = (total(column) for column in zip(*each, strict=True))
    dense, expert, apart = frozen_bytes(parts, stage)
    if recipe.shards_weights:
        dense, expert = divide(dense, sizes.shard_share), divide(expert, sizes.expert_share)
    frozen = categorized("weights", dense + expert + apart, "frozen weights", STATE)
    return weights + frozen + narrow, gradients, optimizer


def narrow_weights(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> X | float:
    """Return bytes that the weights of narrow GEMMs take beyond those of the recipe."""
    width = recipe.narrow_bytes
    if not width:
        return 0.0
    layers = total((n * k.narrow for n, k in zip(stage.layers, parts.kinds, strict=True)), 0 * stage.count)
    return categorized("weights", width * layers, "weights in fewer bits", STATE)


def paged_state(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return bytes of a rank's optimizer state in memory that the driver moves (cudaMallocManaged)."""
    zero = 0 * stage.count
    if not recipe.optimizer.paged:
        return zero
    pages = [owned_pages(some, stage) for _, some in trained(recipe, parts)]
    dense, expert = (total((one[i] for one in pages), zero) for i in (0, 1))
    if recipe.shards_optimizer:
        dense, expert = divide(dense, sizes.shard_share), divide(expert, sizes.expert_share)
    return (1 + recipe.critics) * (dense + expert)


def wide_tables(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return bytes that the embedding table takes beyond those of other weights, where the recipe keeps it wider."""
    wider = recipe.precision.embedding_bytes - recipe.precision.weight_bytes
    tables = (stage.embeddings * parts.table + tied_copy(parts, stage)) * wider
    return named(divide(tables, sizes.shard_share) if recipe.shards_weights else tables, "wide embedding table")


def saved_bytes(parts: ModelBlocks[X], layers: tuple[X, ...], embeds: X, zero: X) -> X:
    """Return the bytes saved for backward by the layers and the embedding of one micro-batch."""
    kept = total((n * k.kept_bytes for n, k in zip(layers, parts.kinds, strict=True)), zero)
    return named(kept + embeds * parts.embedding.kept_bytes, "saved for backward, one micro-batch")


def in_flight_bytes(parts: ModelBlocks[X], stage: Stages[X], depth: InFlight[X]) -> X:
    """Return the bytes saved for backward by the layers and the embedding of all micro-batches in flight."""
    zero = 0 * stage.count
    own = saved_bytes(parts, stage.layers, stage.embeds, zero)
    mirrored = saved_bytes(parts, stage.mirrored, stage.mirrored_embeds, zero)
    return categorized("activations", depth.own * own + depth.mirrored * mirrored, "activations in flight")


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


def stage_memory(
    recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X], depth: InFlight[X]
) -> StageMemory[X]:
    """Return the bytes of one stage that holds the activations of `depth` micro-batches at its fullest."""
    classes = shares_of(recipe, parts, stage)
    weights, gradients, optimizer = stage_state(recipe, sizes, parts, stage, classes)
    if not (recipe.shards_gradients or parts.shared_table):
        gradients = categorized("gradients", gradients + whole_table(recipe, sizes, parts, stage), "gradients")
    if recipe.stack.settings.updates_in_backward:
        one_tensor = largest([one.recipe.precision.gradient_bytes * one.largest for one in classes])
        gradients = categorized("gradients", minimum(one_tensor, gradients), "gradient of the largest tensor")
    if recipe.copies or recipe.critics:
        weights = categorized("weights", (1 + recipe.copies + recipe.critics) * weights, "weights of all models")
        gradients, optimizer = (1 + recipe.critics) * gradients, (1 + recipe.critics) * optimizer
    if recipe.precision.embedding_bytes:
        weights = categorized("weights", weights + wide_tables(recipe, sizes, parts, stage), "weights")
    paged = paged_state(recipe, sizes, parts, stage)
    if recipe.optimizer.paged:
        optimizer = categorized("optimizer", optimizer - paged, "optimizer state beside its pages")
    home = placed(recipe, sizes, parts, stage, (weights, gradients, optimizer), in_flight_bytes(parts, stage, depth))
    weights, gradients, optimizer = home.weights, home.gradients, home.optimizer
    gathered = above(stage.heads, 0, parts.gather_buffer, 0 * stage.count)
    gathered = categorized("buffers", gathered, "gathered input of the head")
    buffers = module_buffers(recipe, parts, stage) + gathered + stage_buffers(recipe, sizes, parts, stage, depth)
    hosted, none = recipe.offloads("optimizer"), 0 * weights
    widened = none if hosted else total(widened_bytes(one.recipe, sizes, one.params) for one in classes)
    buckets = bucket_bytes(recipe, [(one.recipe, one.params, one.largest) for one in classes])
    state = (weights + optimizer + buffers, gradients, home.activations, buckets)
    moment = made_of(recipe, sizes, parts, stage, depth, state)
    each = moments_of(recipe, sizes, parts, stage, moment)
    made = total(
        update_bytes(one.recipe, sizes, one.params, one.largest) + flat_update(one.recipe, sizes, one.params)
        for one in classes
    )
    each["optimizer step"] = moment.lasting + gradients, widened + (none if hosted else made)
    each = with_answers(recipe, parts, stage, each)
    moments = {name: named(fixed + moving, name) for name, (fixed, moving) in each.items()}
    peak, table = named(largest(moments.values()), "peak of the stage"), late_block(recipe, parts, stage)
    block = maximum(stage.heads * parts.loss.kept_bytes, largest_layer(parts, stage, lambda k: k.widest_bytes))
    flat = total(flat_segments(one.recipe, sizes, one.params, block) for one in classes)
    late = table, flat + flat_gradients(recipe, sizes, classes[0].params, table)
    return StageMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=moment.activations,
        logits=moment.logits,
        recomputed=moment.again,
        buffers=moment.buckets + moment.gathered.backward,
        in_flight=depth.own + depth.mirrored,
        framework=buffers,
        widened=widened,
        host=home.host,
        paged=paged,
        fragmented=fragmented_bytes(recipe, parts, stage, moment, each, late),
        moments=moments,
        peak=peak,
    )


def fragmented_bytes(
    recipe: Recipe,
    parts: ModelBlocks[X],
    stage: Stages[X],
    moment: Moment[X],
    moments: dict[MemoryMoment, tuple[X, X]],
    late: tuple[X, X],
) -> X:
    """Return the peak of a stage with what the caching allocator cannot use twice at that moment.

    The block of 16-bit logits, freed before backward, is too small for any of the fp32 tensors that follow
    (c10/cuda/CUDACachingAllocator.cpp splits and joins blocks, but moves none). Gathered weights and sharded gradients
    lie in the pools of their streams: the root's and one layer's at once, a shard that comes from the host, and the
    gradients, whatever else is there.
    `late` is the segment of the table's gradient, and gradients that are made flat for the update, which find no room
    among what the passes have freed.
    """
    table, flat = late
    moving = {name: value for name, (_, value) in moments.items()}
    if recipe.stack.reserved_over_allocated > 1 and recipe.stack.loss_kernel in WIDENED_LOSSES:
        moving["loss"] = moving["loss"] + stage.heads * parts.loss.kept_bytes * recipe.precision.activation_bytes / 4
    if recipe.stack.reserved_over_allocated > 1 and not recipe.stack.expandable_segments:
        moving["loss"] = moving["loss"] + left_by_layers(parts, stage, moment)
        spare = moment.activations * largest_layer(parts, stage, lambda k: k.beside_kept)
        lodged = named(spare, "beside checkpoints in their blocks")
        moving = {name: value + lodged * (name in ("forward", "loss", "backward")) for name, value in moving.items()}
    totals = {
        name: (fixed + table * (name != "ends reduced") + flat * (name != "optimizer step")) + moving[name]
        for name, (fixed, _) in moments.items()
    }
    if not (recipe.stack.apart_pools and recipe.shards_weights):
        return largest(totals.values())
    during, coming = ("forward", "loss", "backward"), moment.gathered.coming
    others = [
        value
        - (moment.standing if name in during else moment.gradients)
        - coming * (name not in ("loss", "optimizer step"))
        for name, value in totals.items()
    ]
    parts_in_compute = in_compute(recipe, parts)
    (unit, _), ends = layer_units(recipe, parts_in_compute, stage), end_units(recipe, parts_in_compute, stage)
    gathered = recipe.precision.activation_bytes * maximum(*ends) + recipe.unit_bytes * unit
    return named(largest(others) + moment.gradients + gathered + coming, "peak of the pools")


def left_by_layers(parts: ModelBlocks[X], stage: Stages[X], moment: Moment[X]) -> X:
    """Return the bytes of blocks that a layer has freed before the loss, which finds no room in them.

    A layer that runs again in backward keeps none of what it makes in forward. Blocks of different requests never
    join (c10/cuda/CUDACachingAllocator.cpp), so that a tensor of the loss that is larger than any of a layer's needs
    another; backward then fits into blocks of either.
    """
    zero = 0 * stage.count
    made = largest_layer(parts, stage, lambda k: above(k.dropped_bytes, 0, k.working_bytes, zero))
    widest = maximum(parts.head.transient_bytes, parts.loss.transient_bytes)
    return named(above(stage.heads * widest, moment.transient, made, zero), "blocks that layers have freed")


def made_of(
    recipe: Recipe,
    sizes: PlanSizes[X],
    parts: ModelBlocks[X],
    stage: Stages[X],
    depth: InFlight[X],
    state: tuple[X, X, X, X],
) -> Moment[X]:
    """Return what the moments of a stage are made of; `state` is what lasts, gradients, what is in flight, buckets."""
    whole_step, gradients, activations, buckets = state
    # Gradients that zero_grad frees exist in forward only when micro-batches are accumulated, shards not beside whole.
    standing, whole = gradients, recipe.stack.whole_gradients and recipe.shards_weights
    if recipe.stack.gradients == "transient":
        left = lone_bytes(recipe, sizes, parts, stage) if whole else gradients
        standing = above(sizes.num_micro, 1, left, 0 * gradients)
    last, wide = parts.head.kept_bytes + parts.loss.kept_bytes, parts.head.transient_bytes
    # GPipe runs every loss before the first backward pass; the others have one head in flight.
    waiting = categorized("logits", (depth.heads - 1) * stage.heads * last, "logits that wait for backward")
    return Moment(
        lasting=whole_step,
        standing=standing,
        buckets=buckets,
        gathered=gathered_bytes(recipe, sizes, parts, stage),
        gradients=gradients,
        activations=activations,
        again=categorized("recomputed", largest_layer(parts, stage, lambda k: k.dropped_bytes), "recomputed layer"),
        transient=largest_layer(parts, stage, lambda k: k.transient_bytes),
        # The gradient of the residual stream flows beside whatever an operator of a branch makes.
        flowing=named(parts.stream_bytes, "gradient of the residual stream") + recomputed_streams(recipe, parts, stage),
        waiting=waiting,
        # A head of few bits is made wide beside its logits.
        logits=categorized("logits", waiting + stage.heads * maximum(last + parts.loss.transient_bytes, wide),
                           "logits and loss"),
        last_layer=categorized("activations", largest_layer(parts, stage, lambda k: k.kept_bytes),
                               "saved for backward, one layer"),
    )  # fmt: skip


def cast_weights(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X], moment: Moment[X]) -> tuple[X, X]:
    """Return the 16-bit copies of weights of layers that run again, and the logits and the loss beside them.

    Autocast keeps copies of leaves that train until it ends, behind the loss (aten/src/ATen/autocast_mode.cpp
    cached_cast); what is no layer of these is among what it saved. The loss of 16-bit logits holds them, their fp32
    copy and its log-softmax.
    """
    zero, width = 0 * stage.count, recipe.precision.activation_bytes
    if not recipe.autocast or recipe.adapters:
        return zero, zero
    again = [above(k.dropped_bytes, 0, width * k.elements.dense_matrix, zero) for k in parts.kinds]
    copies = total((n * one for n, one in zip(stage.layers, again, strict=True)), zero)
    late = 0 if recipe.stack.loss_kernel in WHOLE_LOSSES else parts.loss.kept_bytes * width / 4
    logits = above(copies, 0, moment.logits - stage.heads * late, zero)
    return categorized("temporaries", copies, "16-bit copies of weights"), logits


def moments_of(
    recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X], moment: Moment[X]
) -> dict[MemoryMoment, tuple[X, X]]:
    """Return the bytes at the moments of the passes: what no micro-batch and no recomputation changes, and the rest.

    The last forward pass in flight; the loss with its logits; backward of the first layer, with what recompute makes
    again; all gradients complete. Transient gradients do not exist before the first backward pass ends unless
    micro-batches are accumulated.
    """
    base, back = moment.lasting + moment.buckets + moment.standing, moment.again + moment.transient + moment.flowing
    whole = moment.gathered
    # Where tensors are gathered one by one the head's weight is there while it is used.
    one = in_compute(recipe, parts).head.elements.largest if recipe.stack.gathers_tensors else 0
    apart = recipe.precision.activation_bytes * stage.heads * one
    early, late, last = table_gradients(recipe, sizes, parts, stage, moment.flowing)
    early = early + held_head(recipe, parts, stage)
    done = moment.lasting + moment.buckets + moment.gradients
    watched = watched_inputs(recipe, parts, stage)
    complete = minimum(moment.last_layer, moment.activations) + back + (whole.complete - late)
    copies, made = cast_weights(recipe, parts, stage, moment)
    moments: dict[MemoryMoment, tuple[X, X]] = {
        "forward": (base + whole.forward, moment.activations + maximum(moment.transient, made) + parts.mask + copies),
        "loss": (base + whole.loss, moment.activations + moment.logits + apart + stage.heads * parts.mask),
        "backward": (base + early + whole.backward, moment.activations + moment.waiting + back + watched),
        "gradients complete": (done, maximum(complete, last)),
    }
    if holds_end_gradients(recipe, parts):
        gradients, work = reduced_ends(recipe, sizes, parts, stage, moment.gradients)
        moments["ends reduced"] = moment.lasting + moment.buckets + gradients, work + moment.flowing
    if recipe.scorings:
        # Without gradients a layer frees what it made before the next, and the last before the logits.
        alone = maximum(moment.again + moment.last_layer + moment.transient, moment.logits)
        moments["scoring"] = base + whole.forward, alone
    if recipe.stack.micro_gradients == "all" and not recipe.offloads("gradients"):
        moments["micro-batch complete"] = done, complete + graph_gradients(sizes, shares_of(recipe, parts, stage))
    if adds_narrow(recipe):
        # All 16-bit gradients of one backward pass, while other micro-batches wait for theirs.
        made = named(recipe.precision.activation_bytes * total(owned(parts, stage)), "16-bit gradients")
        freed = minimum(saved_bytes(parts, stage.layers, stage.embeds, 0 * stage.count), moment.activations)
        moments["micro-batch complete"] = done, complete + made + moment.activations - freed
    return moments
