"""What all plans of one grid share and a search may try several of: clusters, jobs, and fields that are no column.

Each combination is a grid of its own, with its own laws and limits; their plans are ranked together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from shardwise.errors import InputError, Problem, Problems
from shardwise.hardware import Cluster, part_of
from shardwise.plans import SETTING_WORDS, Plan, Stack, divisors, find_precision, find_sharding, sharding_stack
from shardwise.plans.laws import plan_problems, stack_problems
from shardwise.records import replace
from shardwise.search._grid import PlanGrid, Variant
from shardwise.search._launch import runs_whole, within
from shardwise.search._options import SearchOptions
from shardwise.search._space import IntRanges, SearchSpace
from shardwise.training import Question, TrainingCase, placed_problems, question_problems

_DETAILS = ("offload", "modules", "recompute", "recompute_layers")


def grids_of(
    case: TrainingCase, clusters: Sequence[Cluster], space: SearchSpace, options: SearchOptions
) -> tuple[PlanGrid, ...]:
    """Return the grids of a search, one for each combination of what a grid has one of.

    Shardings that are run in another way, as a trainer's ZeRO by DeepSpeed, have grids of their own. Raises
    `InputError` for what the framework, the model or every device refuses.
    """
    grids, wrong, stated = list[PlanGrid](), list[Problem](), bool(space.sharding)
    runners = _runners(case.stack, space.sharding or within(space, case.stack, options.explore).sharding)
    unnamed = () if stated else tuple(stack for stack, words in runners if Plan().sharding in words)
    for stack, words in runners:
        own, named = replace(space, sharding=tuple(words)), tuple(words) if stated else ()
        try:
            of_runner = _grids_of(replace(case, stack=stack), clusters, own, options, named, unnamed)
            grids += [
                replace(one, variant=replace(one.variant, number=len(grids) + i)) for i, one in enumerate(of_runner)
            ]
        except InputError as error:
            wrong += error.problems
    if wrong and (stated or not grids):
        # Runners that refuse the same may name other frameworks for it.
        refused = dict[tuple[str, str, str], Problem]()
        for one in wrong:
            refused.setdefault((one.field, str(one.value), one.rule), one)
        raise InputError(refused.values())
    return tuple(grids)


def _runners(stack: Stack, shardings: Sequence[str]) -> list[tuple[Stack, list[str]]]:
    """Return what runs shardings of a framework, each with its own."""
    runners = list[tuple[Stack, list[str]]]()
    for word in shardings:
        runner = sharding_stack(stack, word)
        known = next((words for one, words in runners if one == runner), None)
        if known is None:
            runners.append((runner, [word]))
        else:
            known.append(word)
    return runners


def _grids_of(
    case: TrainingCase,
    clusters: Sequence[Cluster],
    space: SearchSpace,
    options: SearchOptions,
    named: tuple[str, ...],
    unsharded: tuple[Stack, ...],
) -> list[PlanGrid]:
    """Return the grids of a framework that runs all shardings of a space alike.

    Who asks has `named` some of them; else one copy is tried without sharding where one of `unsharded` runs that.
    """
    explore = options.explore
    named = tuple(map(case.stack.runs.word, named))
    space = within(space, case.stack, explore)
    if case.tuning is not None and "1d" in space.layout:
        # The other layout has no adapters and no frozen weights.
        space = replace(space, layout=("1d",))
    details, grids, wrong = tuple(_details(case, space, named, explore)), list[PlanGrid](), list[Problem]()
    cases = tuple(_choices(case, clusters, space, explore))
    first = cases[0]
    for choice, one in enumerate(cases):
        weight = first.job.tokens_per_step / one.job.tokens_per_step
        if options.objective == "cost":
            weight *= (one.cluster.usd_per_device_hour or 1.0) / (first.cluster.usd_per_device_hour or 1.0)
        seen = list[str]()
        parts = _one_and_more(one.cluster, space.devices)
        for (plan, stack, own), (cluster, devices) in product(details, parts):
            seen += [stack.partition] if stack.partition not in seen else []
            before = tuple(seen[: seen.index(stack.partition)])
            whole = "parameters" not in plan.offload and any(runs_whole(s, plan, one.job_words) for s in unsharded)
            alone = whole and plan.sharding != Plan().sharding
            variant = Variant(choice=choice, weight=weight, partitions=before, copies_alone=alone)
            changed = replace(one, plan=plan, stack=stack, cluster=cluster)
            if plan.offload and (problems := _wrong(changed)):
                wrong += problems
                continue
            grids.append(PlanGrid(case=changed, space=replace(own, devices=devices), explore=explore, variant=variant))
    if not grids:
        raise InputError(dict.fromkeys(wrong))
    return grids


def _one_and_more(cluster: Cluster, devices: IntRanges) -> list[tuple[Cluster, IntRanges]]:
    """Return parts of a cluster with counts of devices: one alone is not slowed as several are, and has its own grid.

    >>> from shardwise.search._space import upto
    >>> [(part.num_devices, counts.ranges) for part, counts in _one_and_more(Cluster.parse("8xh100"), upto(4))]
    [(8, ((2, 4),)), (1, ((1, 1),))]
    """
    if cluster.num_devices == 1 or not devices.ranges or not devices.of([1]):
        return [(cluster, devices)]
    more = IntRanges(tuple((max(low, 2), high) for low, high in devices.ranges if high > 1))
    alone = part_of(cluster, 1), IntRanges(((1, 1),))
    return [(cluster, more), alone] if more.ranges else [alone]


def _choices(
    case: TrainingCase, clusters: Sequence[Cluster], space: SearchSpace, explore: bool
) -> Iterator[TrainingCase]:
    """Yield the case on every cluster with every job; raises `InputError` for what no device or framework runs."""
    job, any_found, slow = case.job, False, list[Problem]()
    batches = space.global_batch or (job.global_batch,)
    words = product(space.precision or (job.precision,), space.optimizer or (job.optimizer,), batches)
    for cluster, (precision, optimizer, batch) in product(clusters, tuple(words)):
        one = replace(
            case, cluster=cluster, job=replace(job, precision=precision, optimizer=optimizer, global_batch=batch)
        )
        if problems := _wrong(one):
            slow += problems
            continue
        if not explore:
            _check_job(one)
        try:
            cluster.device.peak_flops(find_precision(precision or case.recipe.precision.name).compute)
        except InputError as error:
            slow += [replace(p, field="precision") if p.field == "dtype" else p for p in error.problems]
            continue
        any_found = True
        yield one
    if not any_found:
        raise InputError(dict.fromkeys(slow))


def _wrong(case: TrainingCase) -> list[Problem]:
    """Return what is wrong with a job, and with the settings of its framework, beside what is offloaded."""
    asked = Question(model=case.model, cluster=case.cluster, plan=case.plan, job=case.job, stack=case.stack)
    return question_problems(asked).items


def _check_job(case: TrainingCase) -> None:
    """Raise `InputError` for a precision, an optimizer, adapters or savers that the framework does not run."""
    asked = ("precision", "optimizer", "adapter", *SETTING_WORDS)
    job = {name: word for name, word in case.job_words.items() if name in asked}
    problems = [p for p in stack_problems(case.stack, Plan(sequence_parallel=False), **job) if p.field in job]
    if problems:
        raise InputError([replace(p, remedy=f"{p.remedy}, or --explore") for p in problems])


def _details(
    case: TrainingCase, space: SearchSpace, named: Sequence[str], explore: bool
) -> Iterator[tuple[Plan, Stack, SearchSpace]]:
    """Yield the plan, the stack and the space of every combination of fields that the framework runs together.

    Raises `InputError` where it runs none of them, and for what the model does not have.
    """
    wrong, refused, seen = Problems(), list[Problem](), set[tuple[object, ...]]()
    layers = product(space.stage_layers or ("usual",), space.recompute_layers or (0,))
    groups = [(n, words) for n, several in _groups(case, space, named) for words in _apart(case, space, several)]
    ways = product(layers, space.offload or ((),), space.modules or ((),), groups)
    for (shift, limit), offload, modules, (shard, shardings) in ways:
        problems = plan_problems(case.model, Plan(offload=offload, modules=modules, sharding="zero3"), 0)
        wrong.items += [problem for problem in problems if problem.field in _DETAILS]
        if "parameters" in offload:
            # They are brought in unit by unit, as sharded ones are gathered.
            shardings = tuple(word for word in shardings if find_sharding(word).weights)
        # Core attention is what selective recomputes.
        plan = Plan(
            sequence_parallel=False,
            offload=offload,
            modules=tuple(m for m in modules if m != "core_attn"),
            recompute_layers=limit,
        )
        modes = []
        for mode in ("selective",) if plan.modules != modules else space.recompute:
            # Beside more than that no module has an effect, and without either no number of layers.
            known = (modules and mode not in ("none", "selective")) or (limit and mode == "none" and not modules)
            if known or (shift, plan, shard, shardings, mode) in seen:
                continue
            own_mode: Any = {"recompute": mode}
            other = replace(plan, **own_mode)
            problems = _tuning_refuses(case, other) or (() if explore else _refused(case.stack, other))
            refused += problems
            modes += [] if problems else [mode]
        if shardings and modes and not wrong.items:
            seen |= {(shift, plan, shard, shardings, mode) for mode in modes}
            shifted: Any = {} if shift == "usual" else {"partition": f"{case.stack.partition} {shift}"}
            own = replace(space, recompute=tuple(modes), sharding=shardings)
            chosen: Any = {"sharding": shardings[0]} if _sharded(shardings) else {}
            yield replace(plan, shard=shard, **chosen), replace(case.stack, **shifted), own
    wrong.raise_if_any()
    if not seen:
        rule = "leaves no sharding and recomputation that goes with the other fields"
        nothing = Problem("sharding", ",".join(space.sharding), rule, "widen it, or leave the others out")
        raise InputError(dict.fromkeys(refused or [nothing]))


def _refused(stack: Stack, plan: Plan) -> tuple[Problem, ...]:
    """Return what of a plan of one device its framework does not run."""
    problems = stack_problems(stack, replace(plan, sequence_parallel=stack.runs.sequence_parallel[0]))
    return tuple(problem for problem in problems if problem.field in _DETAILS)


def _tuning_refuses(case: TrainingCase, plan: Plan) -> tuple[Problem, ...]:
    """Return what of a recomputation the fine-tuning does not allow."""
    problems = placed_problems(case.stack, case.tuning, plan)
    return tuple(problem for problem in problems if problem.field == "recompute")


def _sharded(shardings: tuple[str, ...]) -> bool:
    return all(find_sharding(word).weights for word in shardings)


def _apart(case: TrainingCase, space: SearchSpace, shardings: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return shardings of a grid in parts whose layers are alike.

    Autocast casts no weights that are sharded, and nothing makes fp32 of frozen experts that are.
    """
    precisions = space.precision or (case.precision.name,)
    parts = [tuple(w for w in shardings if find_sharding(w).weights == weights) for weights in (False, True)]
    cast = case.stack.autocasts and any(find_precision(one).autocast for one in precisions)
    widened = case.tuning is not None and bool(case.tuning.expert_bytes)
    return parts if (cast or widened) and all(parts) else [shardings]


def _groups(case: TrainingCase, space: SearchSpace, named: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
    """Return the sizes of sharding groups with the shardings that have them; in groups of 1 all replicas share one.

    HSDP without a size has groups of a node; shardings that were `named` and know no groups are tried beside any size.
    """
    whole = tuple(word for word in space.sharding if not find_sharding(word).hybrid)
    parted = tuple(word for word in space.sharding if find_sharding(word).groups != "all")
    hybrid = tuple(word for word in parted if find_sharding(word).hybrid)
    sizes = space.shard.of(divisors(case.cluster.num_devices)) if space.shard.ranges else [1]
    if not space.shard.ranges and hybrid:
        return [*([(1, whole)] if whole else []), (case.cluster.devices_per_node, hybrid)]
    alone = () if 1 in sizes else tuple(word for word in whole if word in named and word not in parted)
    groups = [(n, words) for n in sizes if (words := parted if n > 1 else whole)]
    return [(1, alone), *groups] if alone else groups
