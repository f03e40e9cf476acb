"""What makes a plan fit: the least recomputation ("auto"), and changes of single fields with what each would do."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shardwise.errors import InputError, Problem
from shardwise.models import Model
from shardwise.plans import Capabilities, Plan, Recompute, Stack, default_stack, find_base, sharding_stack
from shardwise.plans.laws import every_nth, module_names, refusals
from shardwise.plans.partition import with_stage_layers
from shardwise.records import dataclass, replace
from shardwise.training._case import TrainingCase
from shardwise.training._resolve import Question, complete, fits_with
from shardwise.units import counted

if TYPE_CHECKING:
    from shardwise.training._headlines import Verdict


class JudgedPlan(Protocol):
    """An answer about a plan, as far as its remedies read it."""

    @property
    def case(self) -> TrainingCase:
        """What was asked."""

    @property
    def chance_to_fit(self) -> float:
        """The chance that it does."""

    @property
    def fits(self) -> bool:
        """Whether the plan fits the device."""

    @property
    def device_bytes(self) -> float:
        """Bytes that the device shows."""

    @property
    def verdict(self) -> Verdict:
        """Bytes of the device and of the host of a node, against what there is."""

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""

    @property
    def whole_step_seconds(self) -> float:
        """Seconds of one step with what an engine generates for it."""


A = TypeVar("A", bound=JudgedPlan)
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A single-field change of a plan and what it would do: bytes on a device, and on the host of a node.

    `stack` is the framework to name beside it, where its own words would bring another, and `offload` what that sends
    to the host with it unless told.
    """

    field: str
    value: object
    needed_bytes: float
    step_seconds: float
    fits: bool
    required_bytes: float = 0.0
    """What of `needed_bytes` the device has to have."""
    host_needed_bytes: float = 0.0
    stack: str = ""
    offload: tuple[str, ...] = ()
    global_batch: int = 0
    """Sequences of a step where it is of others than the plan's, which follow stated accumulation; else 0."""


def stack_beside(case: TrainingCase, then: TrainingCase) -> str:
    """Return the framework of a case to name beside what changes it, which alone would bring another; "" for none.

    Beside quantised weights a framework that recomputes by itself may be another's place to offload, and activations
    on the host bring one that recomputes, which is then no other's plan. Sequence parallelism that is off may be so for
    want of it in the framework: another would have it on.
    """
    turned = find_base(case.job.base or "bf16").narrow != find_base(then.job.base or "bf16").narrow
    usual = default_stack(Plan(offload=case.plan.offload), case.job.adapter, case.job.method)
    for split in (False, True):
        before, after = (default_stack(_as_asked(one, split), one.job.adapter, one.job.method) for one in (case, then))
        own = case.stack.name == usual != before
        if after != then.stack.name and (turned or own or after != before):
            return then.stack.name
    return ""


def _as_asked(case: TrainingCase, split: bool) -> Plan:
    """Return the plan of a case without layers of stages that its framework cuts where nobody says."""
    bare = replace(case.plan, stage_layers=())
    own = with_stage_layers(bare, case.model.num_layers, case.stack.partition)
    plan = bare if own == case.plan else case.plan
    return replace(plan, sequence_parallel=plan.sequence_parallel or split)


def neighbours(plan: Plan, runs: Capabilities) -> list[tuple[str, Any]]:
    """Return (field, value) of plans that differ in one field and may need less memory; replicas follow the degrees."""
    values: list[tuple[str, Any]] = []
    values += [("recompute", mode) for mode in ("selective", "attention", "full") if mode != plan.recompute]
    words = dict.fromkeys(map(runs.word, ("zero1", "zero2", "fsdp")))
    values += [("sharding", s) for s in words if s != plan.sharding and plan.dp * plan.cp > 1]
    if plan.micro_batch > 1:
        values.append(("micro_batch", plan.micro_batch // 2))
    if plan.tp > plan.etp:
        values.append(("etp", plan.tp))
    values += [(axis, getattr(plan, axis) * 2) for axis in ("tp", "pp", "cp", "ep") if axis == "ep" or plan.dp % 2 == 0]
    return values


def changes_of(report: JudgedPlan, ask: Callable[[TrainingCase], JudgedPlan]) -> tuple[Change, ...]:
    """Return single-field changes of a plan that take less of the memory that it lacks: those that fit first.

    Of those the fastest stand first. Where the host of a node lacks memory, less may be kept there too. Where only the
    engine of rollouts lacks room, those that give it room are returned: of the plan, and of the engine.
    """
    case, changes = report.case, list[tuple[Change, JudgedPlan]]()
    lacks, starved = report.verdict.host_short_by_bytes > 0, report.verdict.fits
    refused = {one.field for one in refusals(case.stack.runs, case.plan, **case.job_words)}
    less = [("offload", tuple(o for o in case.plan.offload if o != one)) for one in case.plan.offload if lacks]
    for name, value in [*neighbours(case.plan, case.stack.runs), *less]:
        usual = case.stack.usual_offload if value == "full" != case.plan.recompute and not case.plan.offload else ()
        changed = changed_case(
            case, replace(case.plan, **{"offload": usual or case.plan.offload, name: value}), refused
        )
        answer = _asked(changed, ask)
        if changed is None or answer is None:
            continue
        if not answer.fits if starved else _lacking(answer, lacks) >= _lacking(report, lacks):
            continue
        batch = 0 if changed.job.global_batch == case.job.global_batch else changed.job.global_batch
        stack = stack_beside(case, changed)
        changes.append((_change(name, value, answer, stack=stack, offload=usual, global_batch=batch), answer))
    changes += _of_engine(case, ask) if starved else []

    def rank(pair: tuple[Change, JudgedPlan]) -> tuple[bool, float]:
        one, answer = pair
        short = one.host_needed_bytes if lacks else one.needed_bytes
        return not one.fits, answer.whole_step_seconds / answer.case.job.global_batch if one.fits else short

    return tuple(one for one, _ in sorted(changes, key=rank))


def _asked(changed: TrainingCase | None, ask: Callable[[TrainingCase], JudgedPlan]) -> JudgedPlan | None:
    """Return the answer about a changed case; None where there is none, or its engine of rollouts cannot be."""
    try:
        return None if changed is None else ask(changed)
    except InputError:
        return None


def _change(field: str, value: object, answer: JudgedPlan, **more: Any) -> Change:
    """Return a change as what it does."""
    return Change(
        field=field,
        value=value,
        needed_bytes=answer.device_bytes,
        required_bytes=answer.verdict.required_bytes,
        step_seconds=answer.step_seconds,
        fits=answer.fits,
        host_needed_bytes=answer.verdict.host_needed_bytes,
        **more,
    )


def _of_engine(case: TrainingCase, ask: Callable[[TrainingCase], JudgedPlan]) -> Iterator[tuple[Change, JudgedPlan]]:
    """Yield the least changes of an engine of rollouts that give it room: more ranks, more memory, its own devices."""
    settings = case.stack.settings
    most = settings.rollout_devices or case.cluster.num_devices
    several = [settings.rollout_tp << n for n in range(1, most.bit_length())]
    ways: list[tuple[str, str, list[Any]]] = [("rollout_tp", "rollout_tp", [n for n in several if most % n == 0])]
    if settings.rollout == "awake":
        limit = case.cluster.device.usable_memory_bytes
        sizes = [ceil(settings.rollout_bytes * 2**n / GIB) * GIB for n in range(1, 12)]
        ways.append(("rollout_memory", "rollout_bytes", [float(size) for size in sizes if size < limit]))
    elif settings.rollout != "apart":
        ways.append(("rollout", "rollout", ["apart"]))
    for flag, name, values in ways:
        for value in values:
            changed = replace(case, stack=replace(case.stack, settings=replace(settings, **{name: value})))
            answer = _asked(changed, ask)
            if answer is not None and answer.fits:
                yield _change(flag, f"{value / GIB:g}GiB" if name == "rollout_bytes" else value, answer), answer
                break


def _lacking(report: JudgedPlan, host: bool) -> float:
    """Return the bytes of a plan where it lacks them: on the host of a node, else on the device."""
    return report.verdict.host_needed_bytes if host else report.device_bytes


def changed_case(case: TrainingCase, changed: Plan, refused: Container[str]) -> TrainingCase | None:
    """Return a changed plan with dp refilled; None where it is not legal, or its framework refuses more than before.

    `case` is of the plan as it was, and `refused` are the fields that the framework refuses of it. Beside stated
    accumulation the batch that nobody stated follows, as it does where the change is typed.
    """
    if changed.sharding != case.plan.sharding:
        case = replace(case, stack=sharding_stack(case.stack, changed.sharding))
    plan = replace(changed, dp=0, sequence_parallel=_splits_sequence(case, changed))
    if len(plan.stage_layers) != plan.pp * plan.vpp:
        plan = replace(plan, stage_layers=())
    job = replace(case.job, global_batch=0) if case.batch_follows else case.job
    open_micro = case.accumulation and not case.batch_follows and not case.stated_batches[0]
    if open_micro and plan.micro_batch == case.plan.micro_batch:
        plan = replace(plan, micro_batch=0)
    asked = Question(
        model=case.model, cluster=case.cluster, plan=plan, job=job, stack=case.stack, settled=True,
        accumulation=case.accumulation,
    )  # fmt: skip
    try:
        plan, job, _ = complete(asked, lambda plan, job: None)
    except InputError:
        return None
    whole = case.planned(plan, job)
    return None if any(x.field not in refused for x in refusals(case.stack.runs, plan, **whole.job_words)) else whole


def _splits_sequence(case: TrainingCase, changed: Plan) -> bool:
    """Return whether a changed plan has sequence parallelism: as it was, or as it is asked for with the first tp.

    Beside a framework that never has it nobody who names a tp gets it; experts need it (`expert_laws`).
    """
    if case.plan.tp > 1:
        return changed.sequence_parallel
    able = case.model.has_experts or case.stack.runs.sequence_parallel != (False,)
    return changed.tp > 1 and case.sequence_parallel and able


def recompute_steps(model: Model, stack: Stack) -> tuple[tuple[Recompute, tuple[str, ...]], ...]:
    """Return what is recomputed before whole layers, the least first: (recompute, modules).

    Nothing, then the attention core, of these what the framework runs; of models with experts the modules that the
    recipes of the stack name.

    >>> from shardwise.models import load_model
    >>> from shardwise.plans import find_stack
    >>> recompute_steps(load_model("llama-3.1-8b"), find_stack("fsdp2"))
    (('none', ()),)
    """
    known = module_names(tuple(model.kinds))
    if not stack.recompute_steps or "moe" not in known:
        steps: tuple[Recompute, ...] = ("none", "selective")
        return tuple((mode, ()) for mode in steps if mode in stack.runs.recompute)
    lists = (tuple(name for name in names if name in known) for names in stack.recompute_steps)
    return tuple(("none", modules) for modules in dict.fromkeys(lists))


def likely(report: JudgedPlan, risk: float) -> bool:
    """Return whether a plan fits with a chance, by which what is left open is chosen."""
    return report.fits and report.chance_to_fit >= risk


def least_recompute(plan: Plan, model: Model, stack: Stack, risk: float, ask: Callable[[Plan], A]) -> A:
    """Return the answer with the least recomputation that is likely to fit; with all of it where nothing is.

    After the steps of the stack come whole layers, as few of each stage as do and as the stack can say.
    """
    for name, value in (("modules", plan.modules), ("recompute_layers", plan.recompute_layers)):
        if value:
            rule = "belongs to a recomputation that is stated"
            raise InputError([Problem(name, value, rule, "leave it out, or state what is recomputed")])
    for mode, modules in recompute_steps(model, stack):
        report = ask(replace(plan, recompute=mode, modules=modules))
        if likely(report, risk):
            return report
    most = ask(replace(plan, recompute="full"))
    limits = _limits(-(-model.num_layers // plan.pp), stack)
    low, high = -1, len(limits)
    while likely(most, risk) and high - low > 1:
        middle = (low + high) // 2
        report = ask(replace(plan, recompute="full", recompute_layers=limits[middle]))
        low, high = (low, middle) if likely(report, risk) else (middle, high)
        most = report if likely(report, risk) else most
    return most


def _limits(layers: int, stack: Stack) -> tuple[int, ...]:
    """Return to how many of so many layers of a stage the framework can limit recompute, the fewest first."""
    ways = {"none": (), "any": range(1, layers), "every": sorted(map(int, every_nth(layers)[1:]))}
    return tuple(ways[stack.runs.partial_recompute])


def settled(plan: Plan, chosen: bool, risk: float) -> str:
    """Return what "auto" was settled to, as an assumption; `chosen`: it is likely to fit.

    >>> settled(Plan(recompute="full", recompute_layers=3), True, 0.9)
    'recompute full: the least that fits with a chance of 90%, in 3 layers of each stage'
    """
    why = f"the least that {fits_with(risk)}" if chosen else f"nothing {fits_with(risk)}"
    more = f", with {', '.join(plan.modules)}" if plan.modules else ""
    limit = f", in {counted(plan.recompute_layers, 'layer')} of each stage" if plan.recompute_layers else ""
    return f"recompute {plan.recompute}: {why}{more}{limit}"
