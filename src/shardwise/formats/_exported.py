"""What an exporter hands back, and how it finds out that the target cannot say something.

Two cases that mean the same are made equal first: what has no effect is left out of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from shardwise.errors import InputError, Problem
from shardwise.hardware import Cluster
from shardwise.models import Attention, Block, Mamba2, Mixer, Model
from shardwise.plans import AXES, Axis, Plan, Sharding, Stack, Training
from shardwise.plans.laws import stack_problems
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportCase:
    """What is exported: a complete plan and job of a model on a cluster, in a framework.

    `named` is the hub's name of the model as it was asked; empty: the catalogue's.
    """

    model: Model
    cluster: Cluster
    plan: Plan
    job: Training
    stack: Stack
    named: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Ready files by name, the version that they were checked against, and what is left to be filled in.

    `launch` is the command that starts them on each of `nodes`, with `node_devices` devices; empty where the training
    script is the user's. A server (`serves`) stands there in so many `copies`, each on nodes of its own.
    """

    system: str
    version: str
    files: Mapping[str, str]
    notes: tuple[str, ...] = field(default=())
    launch: str = ""
    nodes: int = 1
    node_devices: int = 0
    copies: int = 1
    serves: bool = False


def differences(ours: object, theirs: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield (path, ours, theirs) of every value in which two of a kind differ.

    >>> list(differences(Plan(tp=2), Plan()))
    [('tp', 2, 1)]
    """
    if type(ours) is type(theirs) and is_dataclass(ours) and not isinstance(ours, type):
        for one in fields(ours):
            inner = f"{path}.{one.name}" if path else one.name
            yield from differences(getattr(ours, one.name), getattr(theirs, one.name), inner)
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(a, b, f"{path}[{i}]")
    elif ours != theirs:
        yield path, ours, theirs


def refuse(
    system: str,
    found: Mapping[str, tuple[object, object]],
    case: ExportCase | None = None,
    adapters: bool = False,
) -> None:
    """Raise `InputError` naming every field that a system cannot say, or that a case's framework does not run.

    A system whose files say `adapters` is asked for them in `found`.
    """
    problems: list[Problem] = []
    if case is not None:
        problems = [*_unlaunched(case), *(() if adapters else _tuned(case, system))]
    named = {problem.field for problem in problems}
    problems += [
        Problem(path, _short(ours), f"cannot be said to {system}", _remedy(path, ours, theirs))
        for path, (ours, theirs) in found.items()
        if path not in named
    ]
    if problems:
        raise InputError(problems)


def worded(case: ExportCase) -> ExportCase:
    """Return a case whose sharding is in its framework's own word."""
    sharding = cast(Sharding, case.stack.runs.word(case.plan.sharding))
    return replace(case, plan=replace(case.plan, sharding=sharding))


def _unlaunched(case: ExportCase) -> tuple[Problem, ...]:
    """Return what the framework of a case does not run."""
    precision = case.job.precision or case.stack.precision
    return stack_problems(case.stack, case.plan, precision=precision, optimizer=case.job.optimizer)


def _tuned(case: ExportCase, system: str) -> Iterator[Problem]:
    """Yield what a fine-tuning asks that no file of a system says: the training script makes adapters."""
    for name in ("adapter", "base", "trains"):
        if value := getattr(case.job, name):
            shown = ",".join(value) if isinstance(value, tuple) else value
            yield Problem(name, shown, f"cannot be said to {system}", "leave it out: the training script says it")
    if case.job.method != "sft":
        yield Problem("method", case.job.method, _NO_METHOD.format(system=system), _RUNS_METHOD[case.job.method])
    if case.job.capacity_factor and system != "Megatron-LM":
        yield Problem("capacity_factor", case.job.capacity_factor, f"cannot be said to {system}", "leave it out")


_NO_METHOD = "is what a training script of its user's optimises: {system}'s files do not say it"
_RUNS_METHOD = dict.fromkeys(("dpo", "reward"), "export trl, axolotl or llamafactory, which run it")
_RUNS_METHOD |= dict.fromkeys(("grpo", "ppo"), "export verl, which runs it")
Found = dict[str, tuple[Any, Any]]


def untold(plan: Plan, told: frozenset[str]) -> tuple[Plan, Found]:
    """Return a canonical plan without what a system has no word for, and its fields with what they were and became.

    >>> untold(Plan(tp=2, pp=2, sequence_parallel=False), frozenset({"tp"}))[1]
    {'pp': (2, 1)}
    """
    plan, plain = canonical_plan(plan), Plan(sequence_parallel=False)
    pairs = {f.name: (getattr(plan, f.name), getattr(plain, f.name)) for f in fields(Plan) if f.name not in told}
    found = changed(pairs)
    return replace(plan, **{name: pair[1] for name, pair in found.items()}), found


def changed(pairs: Mapping[str, tuple[object, object]]) -> Found:
    """Return the fields that came back otherwise than they were."""
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def plan_changes(ours: Plan, back: Plan) -> Found:
    """Return every field of a plan that came back otherwise than it was."""
    return {path: (a, b) for path, a, b in differences(ours, canonical_plan(back))}


def job_changes(case: ExportCase, back: Training) -> Found:
    """Return the fields of a job that came back otherwise than they were."""
    job, pairs = case.job, Found()
    for name in ("seq_len", "global_batch", "optimizer", "capacity_factor", "pad_to_capacity"):
        pairs[name] = (getattr(job, name), getattr(back, name))
    pairs["precision"] = (job.precision or case.stack.precision, back.precision)
    pairs["epochs"] = (job.epochs, 1.0)
    tokens = job.token_budget or job.sample_budget * job.seq_len
    if abs(tokens - back.token_budget) > job.seq_len:
        pairs["token_budget"] = (tokens, back.token_budget)
    return changed(pairs)


def _short(value: object) -> object:
    """Return a value as plain words: parts of a model by their names.

    >>> _short((1, 2)), _short(Plan()), _short(())
    ('1, 2', 'Plan', 'none')
    """
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return ", ".join(str(_short(one)) for one in value) or "none"
    return getattr(value, "name", "") or type(value).__name__


def _remedy(path: str, ours: object, value: object) -> str:
    if path == "method" and ours in _RUNS_METHOD:
        return _RUNS_METHOD[str(ours)]
    return "leave it out" if is_dataclass(value) or value is None or value == () else f"use {_short(value)}"


T = TypeVar("T")
# What other implementations of a model do differently with the same sizes; Megatron-LM has its own way.
_OWN_WAY: dict[str, Any] = {
    "fused_projection": False, "joined_rotary": False, "float_weights": False, "float_router": False,
    "qk_norm_kind": "rmsnorm", "normalised": False,
}  # fmt: skip


ORDERS: tuple[tuple[Axis, ...], ...] = (AXES, ("tp", "tp2", "cp", "pp", "dp"))


def canonical_plan(p: Plan) -> Plan:
    """Return a plan without what has no effect: an order of axes of one rank, equal stages listed, and the like.

    >>> canonical_plan(Plan(pp=2, stage_layers=(4, 4), cp_kind="all-gather")) == Plan(pp=2, sequence_parallel=False)
    True
    """

    def wide(order: tuple[Axis, ...]) -> list[Axis]:
        return [axis for axis in order if getattr(p, axis) > 1]

    rules = p.sharding_rules
    whole = rules.weights and rules.groups != "all" and p.shard == p.dp
    return replace(
        p,
        sharding="fsdp" if whole and rules.hybrid else p.sharding,
        shard=1 if whole else p.shard,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        stage_layers=() if len(set(p.stage_layers)) == 1 else p.stage_layers,
        cp_kind=p.cp_kind if p.cp > 1 else "ring",
        order=next((order for order in ORDERS if wide(order) == wide(p.order)), p.order),
    )


def alone(plan: Plan) -> Plan:
    """Return a canonical plan without a sharding over one rank, which trainers do not apply.

    Source: torchtitan distributed/parallel_dims.py fsdp_enabled; accelerate leaves a world of one as it is.
    """
    plan = canonical_plan(plan)
    return plan if plan.dp * plan.cp > 1 else replace(plan, sharding="none", shard=1)


def canonical(m: Model) -> Model:
    """Return a model without its name and without what only other implementations do differently."""
    made = {block: _canonical(block) for block in dict.fromkeys((*m.layers, *m.mtp))}
    return replace(
        m, name="", family="", layers=tuple(made[b] for b in m.layers), mtp=tuple(made[b] for b in m.mtp),
        norm=_plain(m.norm), max_context=0, quantization="", dropout=False, assumptions=(), mtp_norms=3,
    )  # fmt: skip


def _canonical(block: Block) -> Block:
    mixers: tuple[Mixer, ...] = tuple(_own_way(mixer) for mixer in block.mixers)
    feed = None if block.feed_forward is None else _own_way(block.feed_forward)
    return replace(
        block, mixers=mixers, feed_forward=feed, norm=_plain(block.norm), also=tuple(map(_canonical, block.also))
    )


def _own_way(part: T) -> T:
    names = {name: value for name, value in _OWN_WAY.items() if hasattr(part, name)}
    if isinstance(part, Attention):
        # Without a norm its kind says nothing; one without weights is a kind of its own.
        names["qk_norm_kind"] = part.qk_norm_kind if "no-weight" in part.qk_norm_kind else "rmsnorm"
    if isinstance(part, Mamba2):
        names["chunk"] = 128
    if getattr(part, "activation", "") == "gelu-new":
        names["activation"] = "gelu-tanh"
    return replace(part, **names)  # type: ignore[type-var]


def _plain(norm: Any) -> Any:
    return {"rmsnorm-float": "rmsnorm", "rmsnorm-offset": "rmsnorm", "layernorm-float": "layernorm"}.get(norm, norm)
