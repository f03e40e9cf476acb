"""The numbers of a plan that formulas read, as plain numbers, columns of plans or traced numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Generic

from shardwise.ledger.number import X, above, ceil, divide, maximum
from shardwise.ledger.traced import is_tracing, leaf
from shardwise.plans import DEGREES, Plan, Stack, group_shapes, shard_of, splits_replicas
from shardwise.records import dataclass, replace

_NUMBERS = (*DEGREES, "panels", "micro_batch", "shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSizes(Generic[X]):
    """Degrees and batch of a plan; `group_shapes` has the ranks of each axis' group in a domain of each tier."""

    tp: X
    tp2: X
    cp: X
    pp: X
    vpp: X
    dp: X
    ep: X
    etp: X
    panels: X
    micro_batch: X
    shard: X
    num_micro: X
    group_shapes: dict[str, tuple[X, ...]]

    @property
    def expert_copies(self) -> X:
        """Ranks that hold the same experts."""
        return divide(self.tp * self.tp2 * self.cp * self.dp, self.ep * self.etp)

    @property
    def shard_share(self) -> X:
        """Ranks of one sharding group of dense weights; the whole of data parallelism unless the plan is hybrid."""
        return self.shard * self.cp

    @property
    def expert_share(self) -> X:
        """Ranks of one sharding group of experts, never below one."""
        return maximum(divide(self.expert_copies * self.shard, self.dp), 1)


def micro_batches_a_run(sizes: PlanSizes[X], stack: Stack) -> X:
    """Return the micro-batches of one run of the pipeline, which drains it; all of a step where there is none.

    Source: torch/distributed/pipelining/schedules.py, step() runs the micro-batches of the batch that it is given.
    """
    runs = stack.settings.pipeline_runs
    return above(sizes.pp, 1, divide(sizes.num_micro, runs), sizes.num_micro) if runs > 1 else sizes.num_micro


def num_micro_batches(plan: Plan, global_batch: int) -> float:
    """Return how many micro-batches each replica runs in a step, a smaller last one too.

    >>> num_micro_batches(Plan(dp=4, micro_batch=2), 64), num_micro_batches(Plan(dp=4, micro_batch=2), 60)
    (8, 8)
    """
    return ceil(divide(global_batch, plan.dp * plan.micro_batch))


def sizes_of(plan: Plan, global_batch: int, domains: Sequence[int]) -> PlanSizes[Any]:
    """Return the numbers of one plan, each a named leaf while tracing."""
    shared: dict[str, Any] = group_shapes(plan, domains)
    if is_tracing():
        shared = {
            axis: tuple(leaf(f"{axis} ranks in tier {i}", n) for i, n in enumerate(at)) for axis, at in shared.items()
        }
    values = {name: leaf(name, getattr(plan, name)) for name in _NUMBERS}
    if not plan.sharding_rules.hybrid and not splits_replicas(plan):
        values["shard"] = values["dp"]
    return PlanSizes(
        num_micro=leaf("micro-batches", num_micro_batches(plan, global_batch)), group_shapes=shared, **values
    )


def sizes_of_columns(plans: Sequence[Plan], global_batch: int, domains: Sequence[int]) -> PlanSizes[Any]:
    """Return the numbers of many plans as float64 columns."""
    import numpy

    def column(values: Sequence[float]) -> Any:
        return numpy.array(values, numpy.float64)

    placed = [group_shapes(p, domains) for p in plans]
    shared = {a: tuple(column([s[a][i] for s in placed]) for i in range(len(domains))) for a in placed[0]}
    values = {name: column([getattr(p, name) for p in plans]) for name in _NUMBERS}
    values["shard"] = column([shard_of(p) for p in plans])
    return PlanSizes(
        num_micro=column([num_micro_batches(p, global_batch) for p in plans]), group_shapes=shared, **values
    )


def leaves(value: Any) -> Any:
    """Return numbers, in records and tuples of them, as numbers that record what is made of them.

    >>> from shardwise.ledger.traced import tracing
    >>> with tracing():
    ...     leaves((1.0, "a"))
    (Traced(1.0, name=''), 'a')
    """
    if isinstance(value, float | int) and not isinstance(value, bool):
        return leaf("", value)
    if isinstance(value, tuple):
        return tuple(map(leaves, value))
    if isinstance(value, dict):
        return {key: leaves(one) for key, one in value.items()}
    if is_dataclass(value):
        return replace(value, **{f.name: leaves(getattr(value, f.name)) for f in fields(value)})  # type: ignore[type-var]
    return value
