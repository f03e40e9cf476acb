"""The optimizer: what it keeps of single tensors, and seconds of its update: what it streams, and Muon's GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from shardwise.cost import constants
from shardwise.ledger.number import X, above, ceil, divide, is_plain, maximum, minimum, total
from shardwise.ledger.op import Op, Weight
from shardwise.ledger.traced import named
from shardwise.ops.overlap import CostModel
from shardwise.plans import PAGED_ELEMENTS, Moments
from shardwise.records import replace
from shardwise.training._offload import host_traffic, host_update_seconds
from shardwise.training._parts import ModelBlocks, Recipe, owned, owned_states, trained
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages
from shardwise.training._weights import ParameterCounts


def tensor_bytes(moments: Moments, sides: tuple[X, X, X], width: float) -> X:
    """Return the bytes that an optimizer keeps of one tensor: `sides` are its elements, rows and columns.

    The columns of a vector are 1. Sources stand beside the optimizers (plans/_precision.py).
    """
    n, rows, columns = sides
    if moments.factored:
        return width * above(columns, 1, divide(n, columns) + divide(n, rows), n)
    if moments.rank:
        small, large = minimum(rows, columns), maximum(rows, columns)
        return width * divide(n, rows * columns) * minimum(small, moments.rank) * (2 * large + small)
    if not moments.block:
        return moments.element_bytes(width) * n
    blocks = ceil(divide(n, moments.block))
    whole = moments.count * (moments.small_width or width) * n
    size = above(n, moments.least - 1, moments.count * (moments.width * n + 4 * blocks + moments.table_bytes), whole)
    return above(blocks * moments.block, n, whole, size) if moments.whole_blocks else size


def _tensors(op: Op[X]) -> Iterator[tuple[Weight[X], tuple[X, X, X]]]:
    """Yield the trained tensors of an operator with elements, rows and columns; joint GEMMs are of several."""
    for w in op.weights:
        if not w.trainable or is_plain(w.elements, 0):
            continue
        sides = w.shape or ((op.columns, op.inner) if w.kind == "matrix" and op.kind == "matmul" else ())
        one = 0 * w.elements + 1
        rows, columns = (one * sides[-2], one * sides[-1]) if len(sides) > 1 else (w.elements, one)
        joint = op.parts if len(op.parts) > 1 and not w.expert and w.kind in ("matrix", "vector") else (rows,)
        whole = total(joint, 0 * rows)
        for part in joint:
            yield w, (divide(w.elements * part, whole), one * part, columns)


def with_states(
    recipe: Recipe, counts: ParameterCounts[X], ops: Sequence[Op[X]], adapter: bool = False
) -> ParameterCounts[X]:
    """Return parameters of the model, or of adapters, with the bytes of state that their single tensors decide."""
    if not (recipe.optimizer.by_tensor or recipe.optimizer.paged):
        return counts
    width = recipe.precision.state_bytes

    def irregular(w: Weight[X], sides: tuple[X, X, X]) -> tuple[bool, X, X]:
        """Whether a tensor is of experts, its bytes beyond those that grow with its elements, and those in pages."""
        moments = recipe.optimizer.matrix if w.kind == "matrix" else recipe.optimizer.other
        size = tensor_bytes(moments, sides, width)
        if w.kind == "embedding" and moments.small_width and recipe.stack.wide_embedding_moments:
            size = moments.count * moments.small_width * sides[0]
        paged = above(sides[0], PAGED_ELEMENTS - 1, size, 0 * size) if recipe.optimizer.paged else 0 * size
        return w.expert, size - moments.element_bytes(width) * sides[0], paged

    states = [irregular(w, sides) for op in ops for w, sides in _tensors(op) if w.adapter is adapter]
    zero = 0 * counts.largest

    def added(experts: bool, at: Literal[1, 2]) -> X:
        return total((one[at] for one in states if one[0] is experts), zero)

    return replace(
        counts,
        dense_states=named(added(False, 1), "states of single tensors"),
        expert_states=named(added(True, 1), "states of single tensors, experts"),
        dense_pages=named(added(False, 2), "pages of states"),
        expert_pages=named(added(True, 2), "pages of states, experts"),
    )


def with_adapter_states(
    recipe: Recipe, counts: ParameterCounts[X] | None, ops: Sequence[Op[X]]
) -> ParameterCounts[X] | None:
    """Return the parameters of adapters with their optimizer state."""
    if counts is None or recipe.adapters is None:
        return counts
    return with_states(replace(recipe, precision=recipe.adapters), counts, ops, adapter=True)


def optimizer_seconds(
    costs: CostModel[X], recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]
) -> X:
    """Return seconds of the update of all that trains."""
    streamed = total(_streamed_seconds(costs, own, sizes, some, stage) for own, some in trained(recipe, parts))
    return named(streamed if recipe.offloads("optimizer") else streamed + costs.rates.memory_start, "optimizer step")


def _streamed_seconds(
    costs: CostModel[X], recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]
) -> X:
    """Return seconds of the update: it streams gradient (twice, for the norm), master, moments and weight each way.

    An update within backward knows no norm of all gradients. Moments that are codes keep the vector units busy longer.

    Adam in fp32 moves 34 bytes a parameter of the shard. Without fusion each of its steps is a kernel, over one tensor
    or over all (priors.toml, passes.update_in_steps). What the framework copies beside it, and its passes over the
    whole gradient buffer, are those of the stack.
    """
    p, o, early = recipe.precision, recipe.optimizer, recipe.stack.settings.updates_in_backward
    dense_matrix, dense_other, expert_matrix, expert_other = owned(parts, stage)
    hosted = recipe.offloads("optimizer")
    one_pass = recipe.stack.optimizer_step == "fused" or o.own_kernel or hosted
    apart = 0.0 if one_pass else constants().rules.update_in_steps.accesses
    extra = apart * p.state_bytes

    def moved(moments: Moments) -> float:
        base = (1 if early else 2) * p.gradient_bytes + (
            2 * p.master_bytes + p.weight_bytes if p.master_bytes else 2 * p.weight_bytes
        )
        return (
            base
            + 2 * moments.element_bytes(p.state_bytes)
            + extra
            + (0.0 if hosted else recipe.stack.update_copy_bytes)
        )

    dense = dense_matrix * moved(o.matrix) + dense_other * moved(o.other)
    expert = expert_matrix * moved(o.matrix) + expert_other * moved(o.other)
    if o.by_tensor:
        dense_states, expert_states = owned_states(parts, stage)
        dense, expert = dense + 2 * dense_states, expert + 2 * expert_states
    whole = (dense_matrix + dense_other, expert_matrix + expert_other)

    def own(of: X, experts: X) -> X:
        """Return what of both a rank updates."""
        return (
            divide(of, sizes.shard_share) + divide(experts, sizes.expert_share)
            if recipe.shards_optimizer
            else of + experts
        )

    streamed = own(dense, expert)
    if hosted:
        return host_update_seconds(costs, host_traffic(recipe, sizes, parts, stage), streamed)
    every = (0.0 if early else recipe.stack.buffer_passes) * p.gradient_bytes * (whole[0] + whole[1])
    # A group of one rank splits no gradients: its buffer is the whole one.
    passes = above(sizes.shard_share, 1, 0 * every, every) if recipe.shards_gradients else every
    moved_seconds = (streamed + passes) / costs.rates.bandwidth_shares.rate(costs.rates.memory_bytes, o.name)
    if not o.matrix.block or is_plain(costs.rates.vector_flops, 0):
        return moved_seconds
    coded = constants().rules.update_in_steps.coded_flops * o.matrix.count * own(*whole)
    return maximum(moved_seconds, coded / costs.rates.vector_flops)


def orthogonal_seconds(
    costs: CostModel[X], recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]
) -> X:
    """Return seconds in which updates of the shard's matrices are made orthogonal; zero where an optimizer does not.

    Muon: five Newton-Schulz steps on a matrix of r by c, r the smaller, take 5 * (4 r^2 c + 2 r^3) FLOPs
    (github.com/KellerJordan/Muon), at the rate of GEMMs.
    """
    zero = 0 * stage.count
    if not recipe.optimizer.orthogonalises:
        return zero
    picks: tuple[Callable[[ParameterCounts[X]], X], ...] = (lambda e: e.dense_work, lambda e: e.expert_work)
    classes = trained(recipe, parts)
    dense, expert = (total(_weighted_work(some, stage, pick) for _, some in classes) for pick in picks)
    share = (
        divide(dense, sizes.shard_share) + divide(expert, sizes.expert_share)
        if recipe.shards_optimizer
        else dense + expert
    )
    return named(share / costs.rates.matmul_flops, "Newton-Schulz steps")


def _weighted_work(parts: ModelBlocks[X], stage: Stages[X], pick: Callable[[ParameterCounts[X]], X]) -> X:
    rows = zip(stage.layers, stage.mirrored, parts.kinds, strict=True)
    return total(((n + opposite) * pick(k.elements) for n, opposite, k in rows), 0 * stage.count)
