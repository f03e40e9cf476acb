"""The numbers of a serving plan that formulas read, and its pipeline stages: plain, columns of plans, or traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Generic

from shardwise.ledger.number import X, is_column, maximum
from shardwise.ledger.traced import leaf
from shardwise.models import Model
from shardwise.plans import Plan, Serving, group_shapes, split_layers
from shardwise.plans.fields import DEPLOYED
from shardwise.records import dataclass, replace

_WHOLE = Serving()


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStage(Generic[X]):
    """One pipeline stage: how many layers of each kind it holds, and 1 where it has the embedding or the head.

    A model that is split with the host has one stage on the device and one `on_host`. `experts` are layers of each kind
    whose routed experts alone it holds, below 0 those that its layers lack.
    """

    layers: tuple[X, ...]
    embeds: X
    ends: X
    experts: tuple[int, ...] = ()
    on_host: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSizes(Generic[X]):
    """Degrees and batch of a plan; `group_shapes` says how many ranks of each group sit in a domain of each tier.

    `stages` lists the distinct stages; columns are padded with stages that hold nothing.
    """

    tp: X
    pp: X
    dp: X
    ep: X
    etp: X
    batch: X
    group_shapes: dict[str, tuple[X, ...]]
    stages: tuple[PipelineStage[X], ...]


def server_ranks(sizes: ServingSizes[X]) -> X:
    """Return the ranks of a stage of one server, whose groups of attention share experts; others stand beside it."""
    return maximum(sizes.tp, sizes.ep * sizes.etp)


def host_rows(model: Model, job: Serving) -> tuple[PipelineStage[float], ...]:
    """Return the parts of a model that is split with its host, the device's first.

    The host holds the embedding and the first layers; the head goes to the device before any layer does
    (github.com/ggml-org/llama.cpp src/llama-model.cpp, load_tensors: i_gpu_start).
    """
    layers, kinds = model.layers, list(model.kinds)
    first = min(model.num_layers + 1 - job.gpu_layers, model.num_layers) if job.gpu_layers >= 0 else 0
    counts = [Counter(part) for part in (layers[first:], layers[:first], layers[first : max(first, job.cpu_experts)])]
    near, far, apart = (tuple(part[kind] for kind in kinds) for part in counts)
    apart = tuple(n * (kind.experts is not None) for n, kind in zip(apart, kinds, strict=True))
    ends = int(job.gpu_layers != 0)
    lacks = tuple(-n for n in apart)
    return (
        PipelineStage(layers=near, embeds=0, ends=ends, experts=lacks),
        PipelineStage(layers=far, embeds=1, ends=1 - ends, experts=apart, on_host=True),
    )


def stage_rows(model: Model, plan: Plan, job: Serving) -> tuple[PipelineStage[float], ...]:
    """Return the distinct stages of a plan, in order of first appearance."""
    if job.splits_with_host:
        return host_rows(model, job)
    sizes = plan.stage_layers or split_layers(model.num_layers, plan.pp, "middle")
    stages, at = [], 0
    for i, size in enumerate(sizes):
        kinds = Counter(model.order[at : at + size])
        layers = tuple(kinds[kind] for kind in range(len(model.kinds)))
        stage: PipelineStage[float] = PipelineStage(layers=layers, embeds=int(i == 0), ends=int(i == plan.pp - 1))
        stages.append(stage)
        at += size
    return tuple(dict.fromkeys(stages))


def sizes_of(model: Model, plan: Plan, job: Serving, domains: Sequence[int]) -> ServingSizes[Any]:
    """Return the numbers of one plan, each a named leaf while tracing."""
    placed = group_shapes(plan, domains).items()
    shared = {axis: tuple(leaf(f"{axis} ranks in tier {i}", n) for i, n in enumerate(at)) for axis, at in placed}
    values = {name: leaf(name, getattr(plan, name)) for name in DEPLOYED}
    stages: Any = stage_rows(model, plan, job)
    return ServingSizes(batch=leaf("batch", job.batch), group_shapes=shared, stages=stages, **values)


def take_rows(value: Any, rows: Any) -> Any:
    """Return some rows of every column in a tree of records, tuples and dicts; plain numbers stay as they are."""
    if is_column(value):
        return value[rows]
    if isinstance(value, tuple):
        return tuple(take_rows(item, rows) for item in value)
    if isinstance(value, dict):
        return {key: take_rows(item, rows) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: take_rows(getattr(value, f.name), rows) for f in fields(value)})
    return value


def sizes_of_columns(
    model: Model, plans: Sequence[Plan], batches: Sequence[int], domains: Sequence[int], job: Serving = _WHOLE
) -> ServingSizes[Any]:
    """Return the numbers of many plans, each with its batch, as float64 columns; a split with the host is the job's."""
    from shardwise.arrays import np

    def column(values: Iterable[float]) -> Any:
        return np.array(list(values), np.float64)

    placed = [group_shapes(plan, domains) for plan in plans]
    shared = {a: tuple(column(p[a][i] for p in placed) for i in range(len(domains))) for a in placed[0]}
    known = {(plan.pp, plan.stage_layers): plan for plan in plans}
    stages_of = {cut: stage_rows(model, plan, job) for cut, plan in known.items()}
    rows = [stages_of[plan.pp, plan.stage_layers] for plan in plans]
    empty: PipelineStage[float] = PipelineStage(layers=(0,) * len(model.kinds), embeds=0, ends=0)
    longest = max(map(len, rows))
    padded = [(*row, *(empty,) * (longest - len(row))) for row in rows]
    stages: tuple[PipelineStage[Any], ...] = tuple(
        PipelineStage(
            layers=tuple(column(row[i].layers[k] for row in padded) for k in range(len(model.kinds))),
            embeds=column(row[i].embeds for row in padded),
            ends=column(row[i].ends for row in padded),
        )
        for i in range(longest)
    )
    if job.splits_with_host:
        stages = host_rows(model, job)
    values = {name: column(getattr(plan, name) for plan in plans) for name in DEPLOYED}
    return ServingSizes(batch=column(batches), group_shapes=shared, stages=stages, **values)
