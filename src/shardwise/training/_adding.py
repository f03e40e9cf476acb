"""Seconds in which the gradients of a micro-batch are added to those before it, where no GEMM does so as it ends."""

from __future__ import annotations

from shardwise.ledger.number import X, above, divide, total
from shardwise.ledger.traced import named
from shardwise.ops.overlap import CostModel
from shardwise.training._fsdp_units import without_lone
from shardwise.training._parts import ModelBlocks, Recipe, owned, trained
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages


def adding_seconds(
    costs: CostModel[X], sizes: PlanSizes[X], recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]
) -> X:
    """Return the seconds a stage and micro-batch that kernels of the framework add gradients up, in the mean of a step.

    Autograd takes the first gradient of a step as it is and adds the others, in the type that it made them. Where FSDP2
    reduces the last micro-batch alone, gradients are cast to the type of the reduction behind the first backward pass
    and added to that behind the others, by kernels of two types. What is scattered in each micro-batch is not counted:
    shards are added up beside the next unit.
    Source: torch/csrc/autograd/functions/accumulate_grad.h accumulateGrad;
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py to_accumulated_grad_if_needed,
    accumulate_unsharded_grad_if_needed.
    """
    zero = 0.0 * stage.count
    if recipe.stack.gradients_apart != "behind the first":
        return zero
    several, first = above(sizes.num_micro, 1, 1 + zero, zero), divide(1 + zero, sizes.num_micro)

    def added(made: float, kept: float, elements: X) -> X:
        """Seconds to add gradients to buffers of so many bytes an element, with the cast of the first."""
        cast = first * (made + kept) if kept != made else zero
        return ((1 - first) * (made + 2 * kept) + cast) * elements / _rate(costs, kept != made)

    seconds = zero
    for own, some in trained(recipe, parts):
        width, every = own.precision.gradient_bytes, total(owned(some, stage))
        if not recipe.shards_gradients:
            seconds = seconds + added(width, width, every)
            continue
        # One rank shares with nobody, and experts that FSDP leaves alone are autograd's.
        sharded = total(owned(without_lone(own, sizes, some), stage))
        waits = _whole(sizes, recipe, zero) * added(own.precision.activation_bytes, own.whole_gradient_bytes, sharded)
        scattered = above(sizes.shard_share, 1, waits, added(width, width, sharded))
        seconds = seconds + scattered + added(width, width, every - sharded)
    return named(several * seconds, "gradients added up")


def _rate(costs: CostModel[X], mixed: bool) -> X:
    """Return bytes/s of a kernel that adds gradients up, of two types or of one."""
    return costs.rates.bandwidth_shares.rate(costs.rates.memory_bytes, "eager" if mixed else "add", backward=True)


def _whole(sizes: PlanSizes[X], recipe: Recipe, zero: X) -> X:
    """Return 1 where sharded gradients are whole between micro-batches, else 0."""
    if recipe.stack.whole_gradients:
        return 1 + zero
    return above(sizes.pp, 1, 1 + zero, zero) if recipe.stack.pipeline_keeps_gathered else zero
