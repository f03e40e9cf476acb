"""Why a space has no plan at all: which ranges hold nothing that the devices, the model or the batch divide into."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from shardwise.errors import Problem
from shardwise.plans import AXES, divisors, find_rules
from shardwise.search._result import Rejection
from shardwise.search._space import IntRanges

if TYPE_CHECKING:
    from shardwise.search._grid import PlanGrid
    from shardwise.search._serving_grid import ServingGrid

EMPTY = "space"
_SHOWN = 24


def empty_rejections(problems: Iterable[Problem]) -> tuple[Rejection, ...]:
    """Return the rows that say why there is nothing to search, each of no plans."""
    title = "the space has no plan"
    return tuple(Rejection(name=EMPTY, title=title, count=0, remedy=str(problem)) for problem in problems)


def written(wholes: IntRanges) -> int | str:
    """Return a set of whole numbers as a flag takes it.

    >>> written(IntRanges.parse("1..4,16")), written(IntRanges.parse("3"))
    ('1..4,16', 3)
    """
    text = ",".join(f"{low}..{high}" if low < high else f"{low}" for low, high in wholes.ranges)
    return int(text) if text.isdecimal() else text


def _one_of(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:_SHOWN]))
    return f"use one of {shown}{', ...' if len(values) > _SHOWN else ''}" if len(values) > 1 else f"use {shown}"


def _problem(name: str, wholes: IntRanges, values: Iterable[int], rule: str) -> list[Problem]:
    """Return the problem of a range that holds none of some values."""
    values = sorted(set(values))
    return [] if wholes.of(values) else [Problem(name, written(wholes), rule, _one_of(values))]


def _axis_problems(space: object, axes: Iterable[str], counts: list[int], layers: int) -> list[Problem]:
    ways, problems = {w for n in counts for w in divisors(n)}, list[Problem]()
    devices = f"{counts[-1]} devices" if len(counts) == 1 else f"devices, {counts[0]} to {counts[-1]} of them"
    for axis in axes:
        fitting = {w for w in ways if axis != "pp" or w <= layers}
        more = f" and be at most the {layers} layers" if axis == "pp" else ""
        problems += _problem(axis, getattr(space, axis), fitting, f"must divide the {devices}{more}")
    return problems


def _product_problem(space: object, axes: tuple[str, ...], counts: list[int]) -> list[Problem]:
    """Return the problem of degrees that divide the devices each and together do not."""
    given = [axis for axis in axes if getattr(space, axis).ranges]
    values = {axis: getattr(space, axis).of({w for n in counts for w in divisors(n)}) for axis in given}
    free = len(given) < len(axes)
    for n in counts:
        for degrees in product(*values.values()):
            used = 1
            for degree in degrees:
                used *= degree
            if used == n or (free and n % used == 0):
                return []
    rule = f"with {', '.join(given)} as given no product of degrees is the {counts[-1]} devices"
    first = max(given, key=lambda axis: min(values[axis]))
    return [Problem(first, written(getattr(space, first)), rule, f"widen one of {', '.join(given)}")]


def why_empty(grid: PlanGrid) -> list[Problem]:
    """Return which ranges leave a space of training plans without any, what they must hold and what they hold."""
    space, model, counts = grid.space, grid.case.model, grid.device_counts
    if not counts:
        most = grid.case.cluster.num_devices
        return [Problem("devices", written(space.devices), f"must be among the {most} devices", f"use up to {most}")]
    axes = AXES
    problems = _axis_problems(space, axes, counts, model.num_layers)
    if grid.has_experts:
        problems += _axis_problems(space, ("ep", "etp"), counts, model.num_layers)
    batch = grid.case.job.global_batch
    problems += _problem("micro_batch", space.micro_batch, divisors(batch), f"must divide the global batch of {batch}")
    problems = problems or _product_problem(space, axes, counts)
    return problems or _group_problems(grid) or _pipeline_problems(grid) or _place_problems(grid)


def _group_problems(grid: PlanGrid) -> list[Problem]:
    """Return the problem of a sharding group that no replicas of the space are several of."""
    shard, space = grid.case.plan.shard, grid.space
    replicas = set[int]()
    for n in grid.device_counts:
        ways = divisors(n)
        least = prod(min(getattr(space, axis).of(ways), default=1) for axis in ("tp", "tp2", "cp", "pp"))
        replicas |= {dp for dp in space.dp.of(ways) if dp * least <= n}
    if shard == 1 or any(dp > shard and dp % shard == 0 for dp in replicas):
        return []
    good = {size for dp in replicas for size in divisors(dp) if 1 < size < dp}
    rule = f"must be a part of dp, at most {max(replicas, default=1)} here: a group of all replicas is none"
    whole = "a sharding without groups"
    return [Problem("shard", shard, rule, f"{_one_of(sorted(good))}, or {whole}" if good else f"use {whole}")]


def _pipeline_problems(grid: PlanGrid) -> list[Problem]:
    """Return the problem of chunks and schedules that no pipeline of the space can have."""
    space, layers = grid.space, grid.case.model.num_layers
    pipelines = space.pp.of(sorted({w for n in grid.device_counts for w in divisors(n) if w <= layers}))
    if any(grid.compositions(pp) for pp in pipelines):
        return []
    if limit := grid.case.plan.recompute_layers:
        rule = "must be below the layers of a stage, and as many of each chunk"
        return [Problem("recompute_layers", limit, rule, "use 0, which is all of them, or a smaller number")]
    deep = next((pp for pp in pipelines if pp > 1), 0)
    if not deep:
        schedules = ",".join(space.schedule)
        return [Problem("schedule", schedules, "needs more than one stage", "use --schedule 1f1b, or allow pp above 1")]
    chunks = [v for v in range(1, layers // deep + 1) if layers % (deep * v) == 0]
    if not any(find_rules(one).chunked for one in space.schedule):
        chunks = chunks[:1]
    rule = f"must cut the {layers} layers evenly with pp {deep} and a schedule of {', '.join(space.schedule)}"
    return [Problem("vpp", written(space.vpp), rule, _one_of(chunks))]


def _place_problems(grid: PlanGrid) -> list[Problem]:
    """Return the problem of ranks in the fastest domain that no placement has."""
    domain, space = grid.case.domains[0], grid.space
    given = [axis for axis in AXES if space.fast_of(axis).ranges]
    rule = f"no placement has so many ranks in a domain of {domain} devices, which ranks fill as far as they can"
    return [
        Problem(f"fast_{axis}", written(space.fast_of(axis)), rule, "widen it or leave it out, or --explore")
        for axis in given
    ]  # fmt: skip


def why_empty_serving(grid: ServingGrid) -> list[Problem]:
    """Return which ranges leave a space of deployments without any, what they must hold and what they hold."""
    space, most, layers = grid.space, grid.cluster.num_devices, grid.model.num_layers
    counts = space.devices.of(range(1, most + 1)) if space.devices.ranges else [most]
    if not counts:
        return [Problem("devices", written(space.devices), f"must be among the {most} devices", f"use up to {most}")]
    problems = _axis_problems(space, ("tp", "pp", "dp"), counts, layers)
    if grid.has_experts:
        problems += _axis_problems(space, ("ep", "etp"), counts, layers)
    problems = problems or _product_problem(space, ("tp", "pp", "dp"), counts)
    if not problems and grid.has_experts:
        rule = "must fill the tensor-parallel ranks with experts, and with etp divide tp x dp"
        problems = [
            Problem(axis, written(getattr(space, axis)), rule, "widen ep, etp or tp")
            for axis in ("ep", "etp")
            if getattr(space, axis).ranges
        ]
    return problems
