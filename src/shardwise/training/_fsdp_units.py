"""The units in which sharded weights are gathered: what each holds, and what of them is whole at which moment.

Sources: torch.distributed.fsdp (units are layers; arXiv:2304.11277), checked to the byte with torch 2.13.0's FSDP
memory tracker; plans/stacks.toml has the file that wraps the ends of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from shardwise.ledger.number import X, above, ceil, divide, is_plain, largest, maximum, minimum, total
from shardwise.ledger.traced import named
from shardwise.records import dataclass, replace
from shardwise.training._blocks import BlockCost
from shardwise.training._parts import (
    ModelBlocks,
    Recipe,
    all_elements,
    categorized,
    in_compute,
    owned,
    tied_copy,
    trained,
)
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages
from shardwise.training._weights import ParameterCounts


def padded(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X]) -> ModelBlocks[X]:
    """Return the parts with the parameters that shards hold and messages move: dimensions padded to the group.

    A tensor of d rows over n ranks has ceil(d / n) n of them (torch/distributed/fsdp/_fully_shard/_fsdp_param.py), so
    that 8 experts over 64 ranks are 64 to them, unless their second dimension is sharded.
    """
    if not recipe.shards_weights or recipe.stack.fsdp_padding == "flat":
        return parts
    return _resized(parts, lambda expert, tensors: _padded(recipe, sizes, expert, tensors))


def unpadded(parts: ModelBlocks[X]) -> ModelBlocks[X]:
    """Return the parts with the parameters of the model alone."""
    return _resized(parts, lambda _, tensors: total((one[0] for one in tensors), 0 * parts.table))


def _resized(parts: ModelBlocks[X], size: Callable[[bool, tuple[tuple[X, X, X], ...]], X]) -> ModelBlocks[X]:
    """Return the parts with as many parameters of each class as its tensors have by `size`."""

    def of(e: ParameterCounts[X]) -> ParameterCounts[X]:
        def own(known: X, *of: bool) -> X:
            return size(of[0], e.sides[of[0], of[1]]) if of in e.sides else known

        return replace(
            e,
            dense_matrix=own(e.dense_matrix, False, True),
            dense_other=own(e.dense_other, False, False),
            expert_matrix=own(e.expert_matrix, True, True),
            expert_other=own(e.expert_other, True, False),
        )

    def whole(k: BlockCost[X]) -> BlockCost[X]:
        return replace(k, elements=of(k.elements))

    words = parts.embedding.elements.sides.get((False, False), ())[:1]
    return replace(
        parts,
        kinds=tuple(map(whole, parts.kinds)),
        shared=tuple(replace(one, elements=of(one.elements)) for one in parts.shared),
        embedding=whole(parts.embedding),
        head=whole(parts.head),
        table=parts.table if is_plain(parts.table, 0) or not words else size(False, words),
    )


def _padded(recipe: Recipe, sizes: PlanSizes[X], expert: bool, tensors: tuple[tuple[X, X, X], ...]) -> X:
    """Return the elements of some tensors over their sharding group, the chunks of the last ranks filled up."""
    ranks = sizes.expert_share if expert else sizes.shard_share

    def filled(elements: X, sides: X) -> X:
        return ceil(divide(sides, ranks)) * ranks * divide(elements, sides)

    size = 0 * ranks
    for elements, rows, columns in tensors:
        one = filled(elements, rows)
        if expert and recipe.stack.fsdp_padding == "rows-or-columns":
            one = above(ranks, rows, filled(elements, columns), one)
        size = size + one
    return size


def unit_elements(recipe: Recipe, sizes: PlanSizes[X], e: ParameterCounts[X]) -> tuple[X, X]:
    """Return the parameters of a layer that are gathered over (the sharding group, that of its experts).

    Experts that nothing splits are parameters of their layer.
    """
    if recipe.stack.fsdp_experts == "units" or is_plain(e.expert, 0):
        return e.dense, e.expert
    one = 0 * sizes.ep + 1
    apart = above(sizes.ep, 1, one, above(sizes.tp * sizes.tp2, sizes.etp, one, 0 * one))
    return e.dense + (1 - apart) * e.expert, apart * (1 - lone_experts(recipe, sizes)) * e.expert


def lone_experts(recipe: Recipe, sizes: PlanSizes[X]) -> X:
    """Return 1 where FSDP leaves the experts of a rank alone, which no other rank has a share of, else 0."""
    zero = 0 * sizes.ep
    if recipe.stack.fsdp_experts != "layer or none":
        return zero
    return above(sizes.ep, 1, above(sizes.expert_share, 1, zero, zero + 1), zero)


def without_lone(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X]) -> ModelBlocks[X]:
    """Return the parts without the experts that FSDP leaves alone: neither gathered nor reduced by it."""
    if recipe.stack.fsdp_experts != "layer or none":
        return parts
    kept = 1 - lone_experts(recipe, sizes)

    def own(one: ParameterCounts[X]) -> ParameterCounts[X]:
        return replace(one, expert_matrix=kept * one.expert_matrix, expert_other=kept * one.expert_other)

    return parts.with_elements(lambda one: own(one.elements))


def lone_bytes(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return the bytes of the gradients of those experts, which stay whole between the micro-batches of a step."""
    if recipe.stack.fsdp_experts != "layer or none":
        return 0 * stage.count
    apart = sum(owned(parts, stage)[2:]) * lone_experts(recipe, sizes)
    lone = categorized("gradients", recipe.precision.gradient_bytes * apart, "gradients of experts")
    return above(sizes.num_micro, 1, lone, 0 * lone)


def gathered_elements(recipe: Recipe, sizes: PlanSizes[X], k: BlockCost[X]) -> tuple[X, X]:
    """Return the parameters of a layer that are gathered, as wide as compute's input, over both groups."""
    return unit_elements(recipe, sizes, all_elements(recipe, k))


def scattered_elements(recipe: Recipe, sizes: PlanSizes[X], k: BlockCost[X]) -> tuple[X, X]:
    """Return the parameters of a layer whose gradients are scattered, as wide as those of the model, over both."""
    dense, expert = unit_elements(recipe, sizes, k.elements)
    if k.adapters is None or recipe.adapters is None:
        return dense, expert
    share = recipe.adapters.gradient_bytes / recipe.precision.gradient_bytes
    more, experts = unit_elements(recipe, sizes, k.adapters)
    return dense + share * more, expert + share * experts


def scattered_ends(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> tuple[X, X]:
    """Return the parameters of a stage's ends whose gradients are scattered, as `end_units` parts them."""
    ends = end_units(recipe, parts, stage)
    for own, some in trained(recipe, parts)[1:]:
        share = own.precision.gradient_bytes / recipe.precision.gradient_bytes
        first, second = end_units(recipe, some, stage)
        ends = (ends[0] + share * first, ends[1] + share * second)
    return ends


def end_units(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> tuple[X, X]:
    """Return the parameters of a stage's ends: (unit that is resharded behind forward, unit that is never).

    One root unit holds embedding, final norm and head; wrapped apart the embedding is a unit like a layer, and final
    norm and head are one that backward needs first (github.com/pytorch/torchtitan torchtitan/distributed/fsdp.py,
    apply_fsdp_to_decoder; tied weights are one unit of three).
    """
    table = stage.embeddings * parts.embedding.elements.dense
    head = stage.heads * parts.head.elements.dense + tied_copy(parts, stage)
    if recipe.stack.fsdp_ends == "root" or parts.shared_table or not recipe.shards_weights:
        return 0 * table, table + head
    return table, head


def layer_units(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> tuple[X, X]:
    """Return the parameters that are gathered at once for the largest layer of a stage, and for all of its layers."""
    alone = recipe.stack.gathers_tensors
    units = [k.elements.largest if alone else k.elements.dense + k.elements.expert for k in parts.kinds]
    layers = [n + m for n, m in zip(stage.layers, stage.mirrored, strict=True)]
    unit = largest([above(n, 0, u, 0 * u) for n, u in zip(layers, units, strict=True)])
    return unit, total((n * u for n, u in zip(layers, units, strict=True)), 0 * stage.count)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredWeights(Generic[X]):
    """Bytes of gathered weights at the moments of a step, with the whole gradients of the units at work.

    Where weights lie on the host they come with the shard of a unit on its way, `coming`, everywhere but at the loss.
    """

    forward: X
    loss: X
    backward: X
    complete: X
    coming: X


def gathered_bytes(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]) -> GatheredWeights[X]:
    """Return the bytes gathered for compute under ZeRO-3 and FSDP.

    Of the layers the running unit and the prefetched next one, and the gradients of one unit before their reduction;
    kept from forward to backward all layers, each freed behind its backward pass. A pipeline may keep the weights of a
    stage gathered, and its gradients whole, from micro-batch to micro-batch.
    """
    zero = 0 * stage.count
    if not recipe.shards_weights:
        return GatheredWeights(forward=zero, loss=zero, backward=zero, complete=zero, coming=zero)
    parts = without_lone(recipe, sizes, parts)
    ends, units = _ends(recipe, sizes, in_compute(recipe, parts), stage), _layers(recipe, sizes, parts, stage)
    pairs = [
        categorized("buffers", one, "gathered ends of the model")
        + categorized("buffers", other, "gathered layers and gradients")
        for one, other in zip(ends, units, strict=True)
    ]
    coming = _coming(recipe, sizes, parts, stage)
    forward, loss, backward, complete = pairs[0] + coming, pairs[1], pairs[2] + coming, pairs[3] + coming
    return GatheredWeights(forward=forward, loss=loss, backward=backward, complete=complete, coming=coming)


def _coming(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return the bytes of the largest unit's shard, which comes from the host before the ranks gather it.

    torch/distributed/fsdp/_flat_param.py, pre_unshard; _fully_shard/_fsdp_param.py, all_gather_inputs.
    """
    if not recipe.offloads("parameters"):
        return 0 * stage.count
    whole = in_compute(recipe, parts)
    unit, _ = layer_units(recipe, whole, stage)
    width = recipe.precision.activation_bytes if parts.tuned else recipe.precision.weight_bytes
    shard = divide(width * maximum(unit, largest(end_units(recipe, whole, stage))), sizes.shard_share)
    return categorized("buffers", shard, "shard on its way from the host")


def _ends(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]) -> tuple[X, X, X, X]:
    """Return bytes of the gathered ends in forward, at the loss, in backward and at its end."""
    if recipe.stack.gathers_tensors:
        zero = 0 * stage.count
        return zero, zero, zero, zero
    width = recipe.precision.activation_bytes
    resharded, kept = (width * one for one in end_units(recipe, parts, stage))
    both = resharded + kept
    if recipe.stack.fsdp_ends == "root" or parts.shared_table:
        return both, both, both, both
    # Backward frees final norm and head first, and gathers the embedding last.
    during, late = (both if recipe.keeps_gathered else kept), resharded
    if recipe.stack.pipeline_keeps_gathered:
        during, late = (above(sizes.pp, 1, both, one) for one in (during, late))
    return during, during, during, late


def _layers(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]) -> tuple[X, X, X, X]:
    """Return bytes of the gathered layers and of whole gradients in forward, at the loss, in backward, at its end."""
    width = recipe.whole_gradient_bytes
    whole_parts, classes = in_compute(recipe, parts), trained(recipe, parts)
    unit, layers = layer_units(recipe, whole_parts, stage)
    ends, every = total(end_units(recipe, whole_parts, stage)), total(owned(whole_parts, stage))
    one = total(own.precision.gradient_bytes * layer_units(own, some, stage)[0] for own, some in classes)
    all_made = total(own.whole_gradient_bytes * total(owned(some, stage)) for own, some in classes)
    kept = width * total(total(owned(some, stage)) for _, some in classes)
    if parts.tuned and recipe.stack.whole_gradients == "units":
        # PyTorch documentation, FullyShardedDataParallel, use_orig_params: gradients of a flat parameter that holds
        # trained and frozen weights take the room of both; ends that hold frozen ones alone have none.
        trains = total(total(end_units(recipe, some, stage)) for _, some in classes)
        moved = every - above(trains, 0, 0 * ends, ends)
        one, all_made, kept = width * unit, width * moved, width * moved
    gradients, whole = one, 0 * one
    gathered = units_at_once(recipe, parts, stage) * recipe.unit_bytes * unit
    if recipe.stack.settings.max_live_parameters:
        gathered = recipe.unit_bytes * maximum(minimum(layers, recipe.stack.settings.max_live_parameters), unit)
    if recipe.stack.whole_gradients:
        whole = above(sizes.num_micro, 1, kept, whole)
        gradients = above(sizes.num_micro, 1, kept, gradients)
    # Whole gradients of the micro-batches before are there at the loss; the last backward pass makes shards of them.
    working = gathered + gradients
    sums = (working, whole, working, gathered + one)
    if recipe.keeps_gathered:
        kept = recipe.unit_bytes * (every - ends)
        sums = (kept + whole, kept + whole, kept + gradients, recipe.unit_bytes * unit + one)
    if not recipe.stack.pipeline_keeps_gathered:
        return sums
    piped = recipe.unit_bytes * (every - ends) + all_made
    first, loss, back, last = (above(sizes.pp, 1, piped, one) for one in sums)
    return first, loss, back, last


def holds_end_gradients(recipe: Recipe, parts: ModelBlocks[X]) -> bool:
    """Return whether the gradients of a unit of the ends wait for each other, in PyTorch's FSDP, and all of them train.

    Nothing is known of ends of which an adapter's method trains a part.
    """
    fsdp = recipe.shards_weights and recipe.stack.gradients == "transient" and not recipe.stack.gathers_tensors
    return fsdp and not parts.tuned and recipe.adapters is None


def reduced_ends(
    recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X], gradients: X
) -> tuple[X, X]:
    """Return bytes of gradients, and of what is made of the ends, when the last unit of backward is reduced.

    Autograd makes the gradient of each tensor, and FSDP1 one flat gradient of all, which it adds to that of the
    micro-batches before; FSDP2 frees what it gathered and copies them into the message. Every allocation was followed
    with torch 2.14.1: 3 and 4 times the root unit on top of shards in FSDP1, 2 in FSDP2, 3 where fp32 is reduced.
    `gradients` are the shards, of which those of this unit come last.
    Source: torch/distributed/fsdp/_runtime_utils.py _post_backward_hook (SplitWithSizesBackward of the flat parameter
    joins the gradients of its views), _fully_shard/_fsdp_collectives.py foreach_reduce.
    """
    zero, whole = 0 * stage.count, recipe.stack.whole_gradients
    width, wide = recipe.precision.activation_bytes, recipe.whole_gradient_bytes
    first, second = end_units(recipe, parts, stage)
    root = recipe.stack.fsdp_ends == "root" or parts.shared_table
    unit = first + second if root else first
    both = above(stage.heads, 0, above(stage.embeddings, 0, parts.table, zero), zero) if parts.shared_table else zero
    made = width * (unit + 2 * both)
    if recipe.stack.fsdp_padding == "flat":
        work = width * unit + maximum(2 * width * unit, made)
    else:
        sent = recipe.scatter_bytes * unit
        work = maximum(width * unit + made, sent if whole else width * unit + sent)
    work = categorized("gradients", work, "gradients of the ends at work")
    own = zero if recipe.offloads("gradients") else divide(recipe.precision.gradient_bytes * unit, sizes.shard_share)
    if not whole:
        return gradients - above(sizes.num_micro, 1, zero, own), work
    before = wide * total(owned(without_lone(recipe, sizes, parts), stage)) + lone_bytes(recipe, sizes, parts, stage)
    before = before - above(sizes.num_micro, 2, zero, wide * unit)
    several = maximum(before, gradients - own + wide * unit)
    return above(sizes.num_micro, 1, several, gradients - own), work


def held_head(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return the bytes of the head's gradient, which waits in backward where embedding and head are one unit."""
    zero = 0 * stage.count
    if not holds_end_gradients(recipe, parts) or not (recipe.stack.fsdp_ends == "root" or parts.shared_table):
        return zero
    table = above(stage.heads, 0, parts.table, zero) if parts.shared_table else zero
    head = recipe.precision.activation_bytes * (stage.heads * parts.head.elements.dense + table)
    return categorized("gradients", head, "gradient of the head")


def reentrant_fsdp(recipe: Recipe) -> bool:
    """Return whether weights are sharded by FSDP1 around reentrant checkpoints."""
    flat = recipe.stack.fsdp_padding == "flat" and not recipe.stack.step_gradients
    return recipe.reenters and recipe.shards_weights and flat


def layers_again(parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return how many layers of a stage run again in backward."""
    none = 0 * parts.stream_bytes * stage.count
    return total(
        (n * above(k.dropped_bytes, 0, 1 + none, none) for n, k in zip(stage.layers, parts.kinds, strict=True)), none
    )


def units_at_once(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return how many layers' weights are there at once: one and the next, prefetched.

    FSDP1 fetches no layer ahead whose forward pass had no gradients, as in a reentrant checkpoint, and frees one before
    it asks for the next (torch 2.4 distributed/fsdp/_runtime_utils.py _get_handle_to_prefetch: a handle that
    _needs_pre_backward_unshard, which _register_pre_backward_hooks says of outputs with gradients).
    """
    none = 0 * parts.stream_bytes * stage.count
    if not reentrant_fsdp(recipe):
        return 2 + none
    return above(total(stage.layers, none) - layers_again(parts, stage), 0, 2 + none, 1 + none)


def watched_inputs(recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]) -> X:
    """Return the gradients of the inputs of layers that FSDP1 holds until backward ends, with those inputs.

    A unit without a gradient of its own is resharded by a hook on its inputs. In the second run of a reentrant
    checkpoint these are leaves, whose accumulators the hook keeps, and those keep input and gradient, until the last
    callback of backward (torch 2.4 distributed/fsdp/_runtime_utils.py _register_post_backward_reshard_only_hook and
    _finalize_params; autograd/graph.py register_multi_grad_hook; all were alive on a CPU, torch 2.13). So no checkpoint
    is freed, and behind them lie as many gradients, but for those of the layer at work and of the one before it.
    """
    if not (reentrant_fsdp(recipe) and recipe.adapters):
        return 0 * parts.stream_bytes * stage.count
    others = maximum(layers_again(parts, stage) - 2, 0 * stage.count)
    return named(others * parts.stream_bytes, "gradients of layers' inputs that hooks hold")
