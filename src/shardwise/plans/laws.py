"""Every way in which a plan can be impossible, all checked at once, each with the values that would do.

It stands beside the package and not in it, since laws know models, which plans alone do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod

from shardwise.errors import Problem, Problems
from shardwise.models import Model
from shardwise.plans._capabilities import Capabilities, Refusal, every_nth, refusals, shown
from shardwise.plans._laws import (
    MODULE_NAMES,
    all_blocks,
    context_laws,
    divisors,
    expert_laws,
    module_laws,
    module_names,
    offload_laws,
    one_of,
    pipeline_laws,
    sharding_laws,
    splits_sequence,
    summa_laws,
    tensor_laws,
)
from shardwise.plans._plan import AXES, OFFLOADS, Plan
from shardwise.plans._stack import Stack, find_stack, stack_names, stack_table
from shardwise.plans.fields import PLAN
from shardwise.plans.schedules import ROUNDS, Rounds, find_rules, runnable_count
from shardwise.units import counted

__all__ = [
    "MODULE_NAMES",
    "all_blocks",
    "batch_problems",
    "context_laws",
    "divisors",
    "domain_problems",
    "every_nth",
    "expert_laws",
    "field_problems",
    "is_count",
    "module_names",
    "node_problems",
    "one_of",
    "pipeline_laws",
    "plan_problems",
    "refusals",
    "splits_sequence",
    "stack_problems",
    "summa_laws",
    "tensor_laws",
]

_COUNTS = tuple(f.key for f in PLAN if f.type == "whole" and f.least == 1)
_WHOLES = tuple(f.key for f in PLAN if f.type == "whole" and f.least == 0)
_SWITCHES = tuple(f.key for f in PLAN if f.type == "switch")
_CHOICES = {f.key: f.choices for f in PLAN if f.choices and f.type == "choice"}


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least one; True and 1.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_whole(value: object) -> bool:
    return is_count(value) or (value == 0 and not isinstance(value, bool))


def field_problems(plan: Plan) -> Problems:
    """Return what is wrong with the fields of a plan taken one by one."""
    problems = Problems()
    for name in _COUNTS:
        if not is_count(getattr(plan, name)):
            problems.add(name, getattr(plan, name), "must be a whole number of at least 1", "use 1 to leave it out")
    for name, allowed in _CHOICES.items():
        if getattr(plan, name) not in allowed:
            problems.add(name, getattr(plan, name), "is not a known choice", one_of(allowed))
    _unknown_words(plan, problems)
    for name in _WHOLES:
        if not _is_whole(getattr(plan, name)):
            problems.add(name, getattr(plan, name), "must be a whole number of at least 0", "use 0 to leave it out")
    for name in _SWITCHES:
        if not isinstance(getattr(plan, name), bool):
            problems.add(name, getattr(plan, name), "must be true or false", "use true or false")
    if not all(_is_whole(n) for n in plan.stage_layers):
        problems.add(
            "stage_layers", plan.stage_layers, "must be whole numbers of layers", "leave it out for equal stages"
        )
    if sorted(plan.order) != sorted(AXES):
        problems.add(
            "order", ",".join(map(str, plan.order)), "must name every axis once", f"for example {','.join(AXES)}"
        )
    if plan.fast and not (len(plan.fast) == len(AXES) and all(map(is_count, plan.fast))):
        rule = "must give whole numbers of ranks of " + ", ".join(AXES)
        problems.add("fast", str(plan.fast), rule, "leave it out to fill the fastest domain in order")
    return problems


def _unknown_words(plan: Plan, problems: Problems) -> None:
    """Record words of lists that plans do not have."""
    for key, known, rule in (
        ("offload", OFFLOADS, "is nothing that can lie in the host's memory"),
        ("modules", MODULE_NAMES, "is not a module that can be recomputed"),
    ):
        for name in getattr(plan, key):
            if name not in known:
                problems.add(key, name, rule, one_of(known))


def plan_problems(model: Model, plan: Plan, seq_len: int) -> tuple[Problem, ...]:
    """Return every law that a plan breaks for a model and a sequence length; empty when it is legal.

    A length of 0 leaves the laws of the sequence out.
    """
    return tuple(field_problems(plan).items) or law_problems(model, plan, seq_len)


def law_problems(model: Model, plan: Plan, seq_len: int) -> tuple[Problem, ...]:
    """Return every law that a plan breaks whose fields are right one by one."""
    problems = Problems()
    blocks = tuple(all_blocks(model))
    tensor_laws(model, blocks, plan, problems)
    expert_laws(model, blocks, plan, problems)
    pipeline_laws(model, plan, problems)
    module_laws(model, blocks, plan, problems)
    context_laws(blocks, plan, seq_len, problems)
    summa_laws(model, blocks, plan, seq_len, problems)
    sharding_laws(plan, problems)
    offload_laws(plan, problems)
    _fast_laws(plan, problems)
    return tuple(dict.fromkeys(problems.items))


def _fast_laws(plan: Plan, problems: Problems) -> None:
    """Record axes that do not have as many ranks as they are to have in the fastest domain."""
    for axis, ranks in zip(AXES, plan.fast, strict=False):
        degree = getattr(plan, axis)
        if degree % ranks:
            problems.add("fast", f"{axis}={ranks}", f"must divide {axis} = {degree}", one_of(divisors(degree)))


def domain_problems(plan: Plan, domain: int) -> tuple[Problem, ...]:
    """Return what is wrong between the ranks that are to share the fastest domain and its devices.

    >>> [str(p) for p in domain_problems(Plan(tp=16, fast=(16, 1, 1, 1, 1)), 8)]
    ['fast = 16: ranks multiplied must divide the 8 devices of the fastest domain; use one of 1, 2, 4, 8']
    """
    problems, ranks = Problems(), prod(plan.fast)
    if plan.fast and domain % ranks:
        rule = f"ranks multiplied must divide the {domain} devices of the fastest domain"
        problems.add("fast", ranks, rule, one_of(divisors(domain)))
    return tuple(problems.items)


def node_problems(plan: Plan, devices: int) -> tuple[Problem, ...]:
    """Return what is wrong between stages that one process drives and the devices of a node.

    >>> [str(p) for p in node_problems(Plan(pp=16, schedule="sequential"), 8)]
    ['pp = 16: stages of the sequential schedule are devices of one process, so of one node; use 8, or schedule 1f1b']
    """
    problems = Problems()
    if find_rules(plan.schedule).one_process and plan.pp > devices:
        rule = f"stages of the {plan.schedule} schedule are devices of one process, so of one node"
        problems.add("pp", plan.pp, rule, f"use {devices}, or schedule 1f1b")
    return tuple(problems.items)


def batch_problems(
    plan: Plan, global_batch: int, rounds: Rounds = "whole", splits_batch: bool = False, runs: int = 1
) -> tuple[Problem, ...]:
    """Return what is wrong between a plan and a global batch, `rounds` as the framework fills those of micro-batches.

    One that cuts batches, outside of pipelines, may have a smaller last micro-batch. A pipeline that drains `runs`
    times a step runs equal numbers of them.

    >>> [str(p) for p in batch_problems(Plan(dp=4), 6)]
    ['global_batch = 6: must be a multiple of dp x micro_batch = 4; use one of 4, 8']
    >>> batch_problems(Plan(dp=2, micro_batch=2), 6, splits_batch=True)
    ()
    """
    problems = Problems()
    cuts = splits_batch and plan.pp == 1
    unit = plan.dp * (1 if cuts else plan.micro_batch)
    if not is_count(global_batch):
        rule = "must be a whole number of sequences of at least 1"
        problems.add("global_batch", global_batch, rule, f"use {unit}, or a multiple of it")
    elif global_batch % unit:
        low = max(unit, global_batch // unit * unit)
        rule = f"must be a multiple of dp{'' if cuts else ' x micro_batch'} = {unit}"
        problems.add("global_batch", global_batch, rule, one_of(sorted({low, low + unit})))
    elif not cuts:
        _micro_batches(plan, global_batch // unit, rounds, runs if plan.pp > 1 else 1, problems)
    return tuple(problems.items)


def _micro_batches(plan: Plan, steps: int, rounds: Rounds, runs: int, problems: Problems) -> None:
    """Record what the schedule needs of the number of micro-batches of each run of the pipeline."""
    rules, unit, count = find_rules(plan.schedule), plan.dp * plan.micro_batch * runs, max(steps // runs, 1)
    if steps % runs:
        rule = f"makes {counted(steps, 'micro-batch')}, which {runs} runs of the pipeline must divide"
        problems.add("global_batch", steps * plan.dp * plan.micro_batch, rule, f"use {unit * count}, or fewer runs")
        return
    most = runnable_count(rules, plan.pp, count, rounds)
    if most != count:
        in_rounds = rules.rounds and rules.next_count(plan.pp, count) == count
        words = f"{rules.name} needs {ROUNDS[rounds]}" if in_rounds else rules.needs
        rule = f"makes {counted(count, 'micro-batch')}, and {words.format(pp=plan.pp, twice=2 * plan.pp)}"
        problems.add("global_batch", count * unit, rule, f"use {most * unit}, or schedule 1f1b")


def stack_problems(stack: Stack, plan: Plan, **job: str) -> tuple[Problem, ...]:
    """Return everything of a plan, and of a job's precision and optimizer, that its framework cannot run.

    >>> from shardwise.plans import find_stack
    >>> [str(p) for p in stack_problems(find_stack("deepspeed"), Plan(pp=2, sharding="zero1"))]
    ['pp = 2: deepspeed does not split over this axis; use 1, or stack megatron or megatron-lm']
    """
    own = tuple(dict.fromkeys(refusals(stack.runs, plan, **job)))
    if not own:
        return ()
    refused = {name: {one.field for one in refusals(runs, plan, **job)} for name, runs in _frameworks().items()}
    return tuple(_stack_problem(stack, one, plan, refused) for one in own)


@cache
def _frameworks() -> dict[str, Capabilities]:
    """Return what each framework runs, of those that run the same the first."""
    known = {find_stack(name).runs: name for name in reversed(stack_names())}
    return {name: runs for runs, name in known.items()}


def _stack_problem(stack: Stack, one: Refusal, plan: Plan, refused: Mapping[str, set[str]]) -> Problem:
    """Return the problem of one value, with the values of the framework and the frameworks that run it.

    `refused` has the fields of the plan that each framework refuses.
    """
    known, table = _frameworks(), stack_table()
    # Those that run the whole plan alone, where there are such: those that are released now, whose launch is written,
    # and who brought the sharding before others.
    ranks = {
        name: (
            *(bool(refused[name]), not runs.current, not runs.exporter),
            *(plan.sharding not in table[name].get("brought", ()), stack_names().index(name)),
        )
        for name, runs in known.items()
    }
    trainers = [name for name in sorted(ranks, key=ranks.__getitem__) if not table[name].get("written_with")]
    able = [name for name in trainers if one.field not in refused[name]]
    able = [name for name in able if not refused[name]] or able
    value = one.value if isinstance(one.value, str | int) else shown(one.value)
    remedy = one_of(str(v).lower() if isinstance(v, bool) else v for v in one.instead)
    if able:
        remedy += f", or stack {' or '.join(able[:2])}"
    return Problem(one.field, value, f"{stack.name} {one.because}", remedy)
