"""Seconds of the optimizer's update: what it streams, and the products of Muon."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.cost import constants
from shardwise.ledger.number import X, above, divide, total
from shardwise.ledger.traced import named
from shardwise.ops.fold import CostModel
from shardwise.training._blocks import Elements
from shardwise.training._parts import ModelBlocks, Recipe, owned
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages


def optimizer_seconds(m: CostModel[X], r: Recipe, z: PlanSizes[X], parts: ModelBlocks[X], s: Stages[X]) -> X:
    """Return seconds of the update: it streams gradient (twice, for the norm), master, moments and weight each way.

    Adam in fp32 moves 34 bytes a parameter of the shard. Without fusion each of its steps is a kernel, over one tensor
    or over all (priors.toml, passes.update_in_steps). What the framework copies beside it, and its passes over the
    whole gradient buffer, are those of the stack.
    """
    p, o = r.precision, r.optimizer
    if not p.trains:
        return 0 * s.count
    dense_matrix, dense_other, expert_matrix, expert_other = owned(parts, s)
    moment = o.moment_bytes or p.state_bytes
    apart = 0.0 if r.stack.optimizer_step == "fused" else constants().rules.update_in_steps.accesses
    extra = apart * p.state_bytes

    def moved(moments: int) -> float:
        base = 2 * p.gradient_bytes + (2 * p.master_bytes + p.weight_bytes if p.master_bytes else 2 * p.weight_bytes)
        return base + 2 * moments * moment + extra + r.stack.update_copy_bytes

    dense = dense_matrix * moved(o.matrix_moments) + dense_other * moved(o.vector_moments)
    expert = expert_matrix * moved(o.matrix_moments) + expert_other * moved(o.vector_moments)
    streamed = divide(dense, z.shard_share) + divide(expert, z.expert_share) if r.shards_optimizer else dense + expert
    whole = dense_matrix + dense_other + expert_matrix + expert_other
    every = r.stack.buffer_passes * p.gradient_bytes * whole
    # A group of one rank splits no gradients: its buffer is the whole one.
    passes = above(z.shard_share, 1, 0 * whole, every) if r.shards_gradients else every
    rate = m.rates.streams.rate(m.rates.memory_bytes, o.name)
    return named((streamed + passes) / rate + m.rates.memory_start, "optimizer step")


def muon_seconds(m: CostModel[X], r: Recipe, z: PlanSizes[X], parts: ModelBlocks[X], s: Stages[X]) -> X:
    """Return seconds of Muon's orthogonalisation of the shard's matrices; zero for other optimizers.

    Five Newton-Schulz steps on a matrix of r by c, r the smaller, take 5 * (4 r^2 c + 2 r^3) FLOPs
    (github.com/KellerJordan/Muon), at the rate of matrix products.
    """
    zero = 0 * s.count
    if r.optimizer.name != "muon":
        return zero
    dense, expert = (_weighted_work(parts, s, pick) for pick in (lambda e: e.dense_work, lambda e: e.expert_work))
    share = divide(dense, z.shard_share) + divide(expert, z.expert_share) if r.shards_optimizer else dense + expert
    return named(share / m.rates.matmul_flops, "Newton-Schulz steps")


def _weighted_work(parts: ModelBlocks[X], s: Stages[X], pick: Callable[[Elements[X]], X]) -> X:
    rows = zip(s.layers, s.mirrored, parts.kinds, strict=True)
    return total(((n + opposite) * pick(k.elements) for n, opposite, k in rows), 0 * s.count)
