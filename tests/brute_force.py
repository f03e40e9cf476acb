"""A search by brute force: every tuple of fields, one at a time, through `plan_problems` and `train`'s own report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import permutations, product
from math import prod
from typing import Any

from shardwise.errors import Problems
from shardwise.hardware import part_of
from shardwise.models import MoE
from shardwise.plans import Plan, find_rules, group_shapes, split_layers
from shardwise.plans.laws import (
    all_blocks,
    batch_problems,
    context_laws,
    expert_laws,
    pipeline_laws,
    plan_problems,
    stack_problems,
    summa_laws,
    tensor_laws,
)
from shardwise.records import replace
from shardwise.search import SearchSpace, SearchTask
from shardwise.search._constraints import staged
from shardwise.search._launch import within
from shardwise.training import TrainingCase, TrainReport
from shardwise.training._evaluate import PricedBlocks
from shardwise.training._report import report_of


def _numbers(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _degrees(case: TrainingCase, space: SearchSpace, n: int) -> Iterator[dict[str, Any]]:
    layers = case.model.num_layers
    ways = _numbers(n)
    for layout, tp, tp2, cp, pp in product(
        space.layout, *(getattr(space, a).of(ways) for a in ("tp", "tp2", "cp", "pp"))
    ):
        used = tp * tp2 * cp * pp
        if n % used or pp > layers or n // used not in space.dp.of(ways):
            continue
        if (layout == "1d" and tp2 > 1) or (layout == "summa" and tp * tp2 == 1 and "1d" in space.layout):
            continue
        if case.plan.shard > 1 and (n // used % case.plan.shard or n // used == case.plan.shard):
            continue
        yield {"layout": layout, "tp": tp, "tp2": tp2, "cp": cp, "pp": pp, "dp": n // used}


def _pipelines(case: TrainingCase, space: SearchSpace, pp: int) -> list[tuple[str, int]]:
    layers = case.model.num_layers
    if pp == 1:
        alike = [s for s in space.schedule if s in ("1f1b", "zb-h1")]
        one = [min(alike)] if alike else []
        return [(s, 1) for s in (*one, *(s for s in space.schedule if s == "gpipe"))]
    found = []
    for schedule in space.schedule:
        if schedule in ("1f1b", "gpipe", "zb-h1", "dualpipe"):
            found += [(schedule, v) for v in space.vpp.of([1])]
        else:
            even = [v for v in range(2, layers // pp + 1) if layers % (pp * v) == 0]
            powers = [v for v in (2, 4, 8, 16, 32) if v <= layers // pp]
            asked = [low for low, high in space.vpp.ranges if 1 < low == high <= layers // pp]
            several = sorted({*(powers if layers % pp else even), *asked})
            several = [v for v in several if v == 2 or not find_rules(schedule).folded]
            found += [(schedule, v) for v in space.vpp.of(several)]
    return found


def together(work: SearchTask) -> Iterator[tuple[TrainingCase, Plan]]:
    """Yield every plan of all grids of a search with its case; layers that two ways cut alike are cut once."""
    cuts: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
    for task in work.tasks:
        case = task.grid.case
        known = cuts.setdefault((case.cluster, case.job, replace(case.plan)), set())
        own = set()
        for plan in plans(case, task.grid.space):
            if plan.recompute_layers and not _recomputes_part(case, plan):
                continue
            pieces = split_layers(case.model.num_layers, plan.pp * plan.vpp, case.stack.partition)
            own.add(pieces)
            if pieces not in known:
                yield case, plan
        known |= own


def _recomputes_part(case: TrainingCase, plan: Plan) -> bool:
    """Return whether so many layers are as many of each chunk, and not all layers of every stage."""
    pieces = split_layers(case.model.num_layers, plan.pp * plan.vpp, case.stack.partition)
    fullest = max(sum(pieces[stage :: plan.pp]) for stage in range(plan.pp))
    return plan.recompute_layers < fullest and plan.recompute_layers % plan.vpp == 0


def _choices(case: TrainingCase, space: SearchSpace, fixed: dict[str, Any], n: int) -> Iterator[dict[str, Any]]:
    has_experts = any(isinstance(b.feed_forward, MoE) for b in case.model.kinds)
    ways = _numbers(n)
    experts = list(product(space.ep.of(ways), space.etp.of(ways))) if has_experts else [(1, 1)]
    summa = fixed["layout"] == "summa"
    sequence = space.sequence_parallel if fixed["tp"] > 1 and not summa else (False,)
    kinds = space.cp_kind if fixed["cp"] > 1 else space.cp_kind[:1]
    ranks = fixed["tp"] * fixed["tp2"] * fixed["cp"] * fixed["dp"]
    panels = space.panels.of(_numbers(case.model.hidden)) if summa else [1]
    batches = space.micro_batch.of(_numbers(case.job.global_batch))
    unsharded = replace(case.plan, sharding="none", shard=1, sequence_parallel=case.stack.runs.sequence_parallel[0])
    refused = {problem.field for problem in stack_problems(case.stack, unsharded, **case.job_words)}
    whole = "none" in space.sharding and not case.stack.whole_table_gradient and "sharding" not in refused
    every = product(
        experts, sequence, kinds, space.sharding, panels, batches, space.recompute, _pipelines(case, space, fixed["pp"])
    )
    for (ep, etp), sp, kind, sharding, panel, micro, recompute, (schedule, vpp) in every:
        # Weights that no other rank holds cannot be sharded: none stands for all, where it runs and frees all there is.
        copied = fixed["dp"] * fixed["cp"] > 1 or (has_experts and ranks > ep * etp)
        if not copied and whole and sharding != "none":
            continue
        yield {
            "ep": ep,
            "etp": etp,
            "sequence_parallel": sp,
            "cp_kind": kind,
            "sharding": sharding,
            "panels": panel,
            "micro_batch": micro,
            "recompute": recompute,
            "schedule": schedule,
            "vpp": vpp,
        }


def _places(case: TrainingCase, space: SearchSpace, fixed: dict[str, Any], n: int) -> Iterator[dict[str, Any]]:
    """Yield orders of the axes, then every fullest share of the fastest domain, each set of groups once."""
    axes, domain = ("tp", "tp2", "cp", "dp", "pp"), case.domains[0]
    plain = (axes, *(o for o in permutations(axes) if o != axes))
    orders = space.orders or (plain if len(case.domains) > 2 else plain[:1])
    ways: list[dict[str, Any]] = [{"order": order} for order in orders]
    if not space.orders and n > domain:
        shares = [s for s in product(*(_numbers(fixed[a]) for a in axes)) if domain % prod(s) == 0]

        def holds(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
            return more != less and all(x % y == 0 for x, y in zip(more, less, strict=True))

        full = [s for s in shares if not any(holds(t, s) for t in shares)]
        ways += [{"fast": share, "order": order} for share in sorted(full) for order in orders]
    seen = set()
    for way in ways:
        placed = group_shapes(Plan(**fixed, **way), case.domains)
        place = tuple(placed[a][:-1] for a in axes)
        if place not in seen and all(getattr(space, f"fast_{a}").of([placed[a][0]]) for a in axes):
            yield way
        seen.add(place)


def plans(case: TrainingCase, space: SearchSpace) -> Iterator[Plan]:
    """Yield every plan of a space, legal or not, places that put the same ranks into every domain once."""
    most, space = case.cluster.num_devices, space if space.schedule else within(space, case.stack, explore=False)
    for n in space.devices.of(range(1, most + 1)) if space.devices.ranges else [most]:
        for fixed in _degrees(case, space, n):
            for place in _places(case, space, fixed, n):
                for choice in _choices(case, space, fixed, n):
                    yield staged(case, replace(case.plan, **fixed, **choice, **place))


def is_legal(case: TrainingCase, plan: Plan) -> bool:
    """Return whether a plan breaks no law."""
    batch = batch_problems(plan, case.job.global_batch, case.stack.runs.rounds)
    return not plan_problems(case.model, plan, case.job.seq_len) and not batch


def report(case: TrainingCase, plan: Plan, priced: PricedBlocks | None = None) -> TrainReport:
    """Return the report of one plan of a space; `priced` has blocks of other plans on as many devices."""
    return report_of(replace(case, plan=plan, cluster=part_of(case.cluster, plan.num_devices)), (), priced)


def first_broken(case: TrainingCase, plan: Plan) -> str:
    """Return the first law that a plan breaks, in the order in which a search counts them; "" where it breaks none."""
    model, seq_len, batch, blocks = case.model, case.job.seq_len, case.job.global_batch, tuple(all_blocks(case.model))
    rounds = case.stack.runs.rounds
    asked: dict[str, Callable[[Problems], Any]] = {
        "tensor": lambda f: tensor_laws(model, blocks, plan, f),
        "summa": lambda f: summa_laws(model, blocks, plan, seq_len, f),
        "experts": lambda f: expert_laws(model, blocks, plan, f),
        "context": lambda f: context_laws(blocks, plan, seq_len, f),
        "batch": lambda f: f.items.extend(batch_problems(replace(plan, pp=1, vpp=1, schedule="1f1b"), batch, rounds)),
        "pipeline": lambda f: pipeline_laws(model, plan, f),
        "schedule": lambda f: f.items.extend(batch_problems(plan, batch, rounds)),
    }
    for name, ask in asked.items():
        found = Problems()
        ask(found)
        if found.items:
            return name
    return ""


def fits(report: TrainReport, risk: float = 0.9) -> bool:
    """Return whether a plan fits with a chance of at least `risk`."""
    return report.fits and report.chance_to_fit >= risk * (1 - 1e-12)


def best_of_degrees(reports: Iterable[TrainReport], measure: Callable[[TrainReport], Any]) -> list[Any]:
    """Return the least value of every set of devices and degrees, the least first."""
    found: dict[tuple[int, ...], Any] = {}
    for one in reports:
        p = one.plan
        degrees = p.num_devices, p.tp, p.tp2, p.cp, p.pp, p.dp, p.ep, p.etp
        found[degrees] = min(found.get(degrees, measure(one)), measure(one))
    return sorted(found.values())
