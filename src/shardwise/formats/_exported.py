"""What an exporter hands back, and how it finds out that the target cannot say something.

Two cases that mean the same are made equal first: what has no effect is left out of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shardwise.errors import InputError, Problem
from shardwise.hardware import Cluster
from shardwise.models import Attention, Block, Mamba2, Mixer, Model
from shardwise.plans import (
    AXES,
    SCALINGS,
    USUAL_TARGETS,
    VIRTUAL,
    Axis,
    Plan,
    Settings,
    Sharding,
    Stack,
    Training,
    find_precision,
    rank_of,
    reference_of,
    sharding_stack,
    trained_recipe,
    tuning_of,
)
from shardwise.plans.fields import SETTINGS, TRAINING, Field
from shardwise.plans.laws import stack_problems
from shardwise.records import dataclass, replace

if TYPE_CHECKING:
    from shardwise.formats._imported import Imported


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


def refuse(system: str, differences_of: Mapping[str, tuple[object, object]], case: ExportCase) -> None:
    """Raise `InputError` naming every field that a system cannot say, or that a case's framework does not run."""
    problems = list(_unlaunched(case))
    named = {problem.field for problem in problems}
    for path, (ours, theirs) in differences_of.items():
        if path == "method":
            rule = f"is what a training script of its user's optimises: {system}'s files do not say it"
            problems.append(Problem(path, ours, rule, _RUNS_METHOD.get(str(ours), f"use {theirs}")))
        elif path == "attention":
            problems.append(Problem("attn_implementation", ours, f"cannot be said to {system}", _SAYS_ATTENTION))
        elif path not in named:
            remedy = _remedy(theirs) if theirs else _WHICH_WRITE.get(path, _remedy(theirs))
            problems.append(Problem(path, _short(ours), f"cannot be said to {system}", remedy))
    if problems:
        raise InputError(problems)


def worded(case: ExportCase) -> ExportCase:
    """Return a case whose sharding is in its framework's own word."""
    sharding = cast(Sharding, case.stack.runs.word(case.plan.sharding))
    return replace(case, plan=replace(case.plan, sharding=sharding))


def _unlaunched(case: ExportCase) -> tuple[Problem, ...]:
    """Return what the framework of a case does not run."""
    job = case.job
    precision = job.precision or case.stack.precision
    precision = trained_recipe(job, sharding_stack(case.stack, case.plan.sharding)) if job.adapter else precision
    loss = {"loss": case.stack.settings.loss} if case.stack.settings.loss else {}
    words = {"precision": precision, "optimizer": job.optimizer, "method": job.method, **loss}
    words["experts"] = str(case.model.has_experts).lower()
    return stack_problems(case.stack, case.plan, **words)


_WHICH_WRITE = {
    "adapter": "export trl, axolotl or llamafactory, which write it",
    "model": "export transformers, axolotl or llamafactory, which name it, or megatron, which has its sizes",
}
_SAYS_ATTENTION = "leave it out, or export trl, axolotl or llamafactory, which write it"
_RUNS_METHOD = dict.fromkeys(("dpo", "kto", "reward"), "export trl, axolotl or llamafactory, which run it")
_RUNS_METHOD |= dict.fromkeys(("grpo", "ppo"), "export verl, which runs it")
_RUNS_METHOD |= {"sft": "export transformers, trl, axolotl or llamafactory, which run it"}
Differences = dict[str, tuple[Any, Any]]


def unexported(plan: Plan, fields_told: frozenset[str]) -> tuple[Plan, Differences]:
    """Return a canonical plan without what a system has no word for, and its fields with what they were and became.

    >>> unexported(Plan(tp=2, pp=2, sequence_parallel=False), frozenset({"tp"}))[1]
    {'pp': (2, 1)}
    """
    plan, plain = canonical_plan(plan), Plan(sequence_parallel=False)
    pairs = {f.name: (getattr(plan, f.name), getattr(plain, f.name)) for f in fields(Plan) if f.name not in fields_told}
    differing = changed(pairs)
    return replace(plan, **{name: pair[1] for name, pair in differing.items()}), differing


def changed(pairs: Mapping[str, tuple[object, object]]) -> Differences:
    """Return the fields that came back otherwise than they were."""
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def lost(case: ExportCase, back: Imported, apart: Collection[str] = ()) -> Differences:
    """Return every field of a canonical plan, of a job and of a framework that came back otherwise than it was.

    Fields of the job that are said `apart` from a file are not looked for in it.
    """
    plan = {path: (a, b) for path, a, b in differences(case.plan, canonical_plan(back.plan))}
    return plan | _job_changes(case, back, apart) | _stack_changes(case, back.stack)


_DROPOUTS = ("softmax_dropout", "attention_dropout", "hidden_dropout")
_BUDGET = ("token_budget", "sample_budget", "epochs")


def _meant(job: Training, model: Model, stack: Stack, sharding: str) -> dict[str, Any]:
    """Return what the fields of a job that a framework is told mean, defaults filled in."""
    names = {name for row in TRAINING if row.exported for name in row.names} - {"dropout", *_BUDGET}
    values = {f.name: getattr(job, f.name) for f in fields(Training) if f.name in names}
    both = model.dropout if job.dropout is None else job.dropout
    values |= {name: both if values[name] is None else values[name] for name in _DROPOUTS}
    values["precision"] = job.precision or stack.precision
    values["reference"] = reference_of(job, stack.reference)
    if job.adapter:
        from shardwise.formats._targets import target_names

        values |= {"rank": rank_of(job), "targets": target_names(job, model, stack)}
        tuning = tuning_of(job, stack)
        own = tuning.precision if tuning else find_precision("fp32")
        masters = own.master_bytes > 0  # which are the framework's own
        values["adapter_precision"] = "fp32" if own.weight_bytes == 4 else "" if masters else "bf16"
        values["precision"] = trained_recipe(job, sharding_stack(stack, sharding))
        values["base"] = job.base or "bf16"
    return values | {"token_budget": job.run_tokens}


def script_words(job: Training) -> str:
    """Return what a training script says where a system's file does not: lengths of a sequence and of the run.

    >>> script_words(Training(seq_len=2048, global_batch=1, token_budget=1e9))
    'sequences of 2048 tokens, 1e+09 tokens in all'
    """
    return f"sequences of {job.seq_len} tokens" + (f", {job.run_tokens:g} tokens in all" if job.run_tokens else "")


def unsaid(*asked: tuple[Iterable[Field], Any]) -> list[str]:
    """Return what is assumed of data, machines and the run that differs from what is usual: no system is told it.

    Each table of fields stands beside the record that it is of.

    >>> job, settings = Training(seq_len=1, global_batch=1, expert_imbalance=1.5), Settings(misc_bytes=2.0**30)
    >>> unsaid((TRAINING, job), (SETTINGS, settings))
    ['expert_imbalance 1.5', 'misc_memory 1073741824.0']
    """
    lines: dict[str, str] = {}
    for rows, part in asked:
        usual = {f.name: f.default for f in fields(part)}
        names = ((row.key, name) for row in rows if not row.exported for name in row.names)
        lines |= {name: f"{key} {getattr(part, name)}" for key, name in names if getattr(part, name) != usual[name]}
    return list(lines.values())


# What says nothing where it is 0: the run's length, and a factor that changes neither bytes nor seconds.
_LEFT_OPEN = ("token_budget", "adapter_alpha")


def _job_changes(case: ExportCase, back: Imported, apart: Collection[str]) -> Differences:
    """Return the fields of a job that came back otherwise; the run's length may come back rounded to whole steps."""
    ours = _meant(case.job, case.model, case.stack, case.plan.sharding)
    theirs = _meant(back.job, back.model or case.model, back.stack, case.plan.sharding)
    if abs(ours["token_budget"] - theirs["token_budget"]) <= case.job.tokens_per_step:
        theirs["token_budget"] = ours["token_budget"]
    open_ = [name for name in _LEFT_OPEN if not ours[name]]
    open_ += ["reference"] if case.job.method != back.job.method else []
    # Where nothing but the adapters trains, theirs is compared by itself; shards are gathered in the recipe's.
    alone = case.job.adapter and not case.job.trains and not case.plan.sharding_rules.gradients
    open_ += ["precision"] if alone and not case.job.precision else []
    pairs = {name: (ours[name], theirs.get(name)) for name in ours if name not in (*apart, *open_)}
    return changed(pairs | _targets_changed(case, back, theirs.get("targets")))


def _targets_changed(case: ExportCase, back: Imported, named: object) -> Differences:
    """Return targets that came back as names of other layers: a class may call several what one is called."""
    from shardwise.formats._targets import reached

    if not case.job.adapter or not back.job.adapter or case.job.adapter in VIRTUAL:
        return {}
    own, other = (reached(job, case.model, case.stack) for job in (case.job, back.job))
    return {"targets": (named, named) if own == other else (case.job.targets or USUAL_TARGETS, named)}


def _stack_changes(case: ExportCase, back: Stack) -> Differences:
    """Return what came back otherwise of a framework: what its user set of it, and all else that moves the answer."""
    own = case.stack
    if own.runs.exporter != back.runs.exporter and own.name == back.name:
        # A trainer beside DeepSpeed, whose ZeRO its own file does not say.
        return {"sharding": (case.plan.sharding, "fsdp")}
    if own.runs.exporter != back.runs.exporter:
        return {"stack": (own.name, back.name)}
    ours, theirs = _parts_of(own), _parts_of(back)
    set_ = {name for row in SETTINGS if row.exported for name in row.names if ours[name] != _UNSET.get(name)}
    assumed = {name for row in SETTINGS if not row.exported for name in row.names}
    pairs = changed({name: (ours[name], theirs[name]) for name in ours if name not in assumed})
    changes = {name: pair for name, pair in pairs.items() if name in set_ or _moves(case, name, pair[1])}
    whole = own.name != back.name and not set_ & changes.keys() and changes
    return {"stack": (own.name, back.name)} if whole else changes


_UNSET = {f.name: f.default for f in fields(Settings)} | {"fp8_recipe": SCALINGS[0]}
# What tells stacks apart and no answer depends on.
_OF_STACKS = ("name", "title", "sources", "settings", "runs", "reported", "uncounted", "measured_as")


def _parts_of(stack: Stack) -> dict[str, Any]:
    """Return what is set of a framework and what it does, by name; the loss is the one that runs."""
    own = {f.name: getattr(stack.settings, f.name) for f in fields(Settings)}
    parts = {f.name: getattr(stack, f.name) for f in fields(Stack) if f.name not in _OF_STACKS}
    return parts | own | {"loss": stack.loss_kernel, "fp8_recipe": own["fp8_recipe"] or SCALINGS[0]}


def _moves(case: ExportCase, name: str, value: object) -> bool:
    """Return whether a case takes other bytes or seconds with another value of what its framework does."""
    from shardwise.training import TrainingOptions, train

    stack, one = case.stack, cast(dict[str, Any], {name: value})
    other = replace(stack, settings=replace(stack.settings, **one)) if name in _UNSET else replace(stack, **one)
    try:
        first, second = (
            train(case.model, case.cluster, case.plan, case.job, TrainingOptions(stack=which))
            for which in (stack, other)
        )
    except InputError:  # a case that is refused as it is
        return False
    return (first.device_bytes, first.step_seconds) != (second.device_bytes, second.step_seconds)


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


def _remedy(value: object) -> str:
    return "leave it out" if is_dataclass(value) or value in (None, (), "") else f"use {_short(value)}"


T = TypeVar("T")
# What other implementations of a model do differently with the same sizes; Megatron-LM has its own way.
_OWN_WAY: dict[str, Any] = {
    "fused_projection": False, "joined_rotary": False, "float_weights": False, "float_router": False,
    "qk_norm_kind": "rmsnorm", "normalised": False, "scaled_gate": False, "chosen_softmax": False,
    "router_norm": False, "all_tokens": False, "viewed_keys": False, "masked": False, "narrow_softmax": False,
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
        schedule="1f1b" if p.pp == p.vpp == 1 else p.schedule,
        order=next((order for order in ORDERS if wide(order) == wide(p.order)), p.order),
    )


def alone(plan: Plan) -> Plan:
    """Return a canonical plan without a sharding over one rank, which trainers do not apply.

    Source: torchtitan distributed/parallel_dims.py fsdp_enabled; accelerate leaves a world of one as it is.
    """
    plan = canonical_plan(plan)
    return plan if plan.dp * plan.cp > 1 else replace(plan, sharding="none", shard=1)


def one_rank(plan: Plan) -> tuple[str, ...]:
    """Return what is noted of a sharding over one rank, which `alone` leaves out of a file.

    >>> one_rank(Plan(sharding="zero3"))
    ('sharding zero3 is over one rank, which is not wrapped: ask for --sharding none, as the file reads',)
    """
    if alone(plan).sharding == canonical_plan(plan).sharding:
        return ()
    rule = f"sharding {plan.sharding} is over one rank, which is not wrapped"
    return (f"{rule}: ask for --sharding none, as the file reads",)


def canonical(model: Model) -> Model:
    """Return a model without its name and without what only other implementations do differently."""
    made = {block: _canonical(block) for block in dict.fromkeys((*model.layers, *model.mtp))}
    return replace(
        model, name="", family="", layers=tuple(made[b] for b in model.layers), mtp=tuple(made[b] for b in model.mtp),
        norm=_plain(model.norm), max_context=0, quantization="", state_types=(), dropout=False, assumptions=(),
        mtp_norms=3,
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
    plain = dict.fromkeys(("rmsnorm-float", "rmsnorm-offset", "rmsnorm-power"), "rmsnorm")
    return {**plain, "layernorm-float": "layernorm"}.get(norm, norm)
