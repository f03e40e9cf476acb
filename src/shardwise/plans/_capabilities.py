"""What a framework can run, and what of a plan it cannot: laws, searches and exporters read it.

The entries are `runs` of stacks.toml. Values that have no effect (a schedule without stages) are not judged, and fields
that are wrong by themselves are left to `field_problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, TypeAlias

from shardwise.plans._plan import AXES, DEGREES, Plan, alike
from shardwise.plans.schedules import Rounds
from shardwise.records import dataclass

Value: TypeAlias = str | int | bool
Values: TypeAlias = tuple[Value, ...]
RuleConditions: TypeAlias = tuple[tuple[str, Values], ...]


DIVISORS = "of "
"""What stands before the field whose divisors a rule of a framework wants."""
SETTING_WORDS = ("tile_mlp", "updates_in_backward", "quantize_moe_experts", "checkpoint_policy", "loss")
JOB_WORDS = (
    *("precision", "optimizer", "method", "adapter", "adapter_precision", "base", "full_training", "experts"),
    *SETTING_WORDS,
)


@dataclass(frozen=True, slots=True)
class CapabilityRule:
    """Where all of some fields have one of their values, others must have one of theirs.

    A value is a word, a number, ">1" for numbers above it, the name of a field for the same as there, or "of dp" for
    its divisors.
    """

    where: RuleConditions
    needs: RuleConditions
    source: str

    def judges(self, job: Mapping[str, Any]) -> bool:
        """Return whether all is known of a job that the rule asks where it holds."""
        return all(job.get(name) is not None for name, _ in self.where if name in JOB_WORDS)

    def broken(self, get: Callable[[str, Values], Any]) -> Any:
        """Return whether the rule is broken, `get` saying of a field whether its value is one of some."""
        holds: Any = True
        for name, values in self.where:
            holds = holds & get(name, values)
            if holds is False:
                return False
        kept: Any = True
        for name, values in self.needs:
            kept = kept & get(name, values)
        return holds & (kept ^ True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What one framework runs; an empty `precision`, `optimizer` or `methods` stands for any."""

    exporter: str
    """The format of shardwise that writes its launch ("": none)."""
    split: tuple[str, ...]
    """Degrees that can be above 1."""
    layout: tuple[str, ...]
    sequence_parallel: tuple[bool, ...]
    cp_kind: tuple[str, ...]
    schedule: tuple[str, ...]
    rounds: Rounds
    """How it fills the rounds of an interleaved schedule."""
    splits_batch: bool
    """The batch of a replica is cut into pieces of which the last may be smaller."""
    sharding: tuple[str, ...]
    """Its own words, the least sharded first."""
    recompute: tuple[str, ...]
    modules: tuple[str, ...]
    """What it can recompute by the names of Megatron-Core."""
    offload: tuple[str, ...]
    """What it can keep in the host's memory."""
    partial_recompute: Literal["none", "any", "every"]
    """To which layers of a stage full recompute can be limited: to none, to any number, or to every nth."""
    uneven_stages: bool
    """Layers of each stage can be listed."""
    order: tuple[str, ...]
    """Orders of the axes outwards from the fastest links."""
    any_place: bool
    """Ranks can fill the fastest domain in other ways than an order does."""
    precision: tuple[str, ...]
    optimizer: tuple[str, ...]
    client_optimizer: tuple[str, ...]
    """Those that a trainer hands it beside its own."""
    adapters: bool
    """It trains adapters beside frozen weights."""
    methods: tuple[str, ...]
    """Methods of adapters that it has, those of peft where none are named."""
    current: bool
    """It is what its makers release now, not an earlier state of it."""
    tile_mlp: bool
    """It runs the feed-forward of a sequence piece by piece."""
    updates_in_backward: bool
    """It updates each parameter as soon as its gradient is there."""
    quantize_moe_experts: bool
    """Its user can have bitsandbytes store experts that are parameters."""
    checkpoint_policy: tuple[str, ...]
    """What its full recompute can keep (`Settings.checkpoint_policy`)."""
    rules: tuple[CapabilityRule, ...]

    def word(self, sharding: str) -> str:
        """Return the framework's own word for what a sharding does, or the word given where it has none.

        >>> from shardwise.plans import find_stack
        >>> [find_stack("megatron").runs.word(one) for one in ("zero1", "zero3", "none")]
        ['distributed-optimizer', 'fsdp', 'none']
        """
        if sharding in self.sharding:
            return sharding
        return next((own for own in self.sharding if alike(own, sharding)), sharding)

    @property
    def orders(self) -> tuple[tuple[str, ...], ...]:
        """Orders of all axes, the second tensor axis beside the first."""
        return tuple(_whole_order(text) for text in self.order)


@cache
def _whole_order(text: str) -> tuple[str, ...]:
    axes = text.split("-")
    return tuple(axes if "tp2" in axes else (*axes[: axes.index("tp") + 1], "tp2", *axes[axes.index("tp") + 1 :]))


def capabilities_of(row: Mapping[str, Any]) -> Capabilities:
    """Return the record of a table of stacks.toml."""
    stated = {name: value for name, value in row.items() if name != "sources"}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()
    }
    values["rules"] = tuple(_rule(one) for one in row["rules"])
    return Capabilities(**values)


def _rule(row: Mapping[str, Any]) -> CapabilityRule:
    def conditions(table: Mapping[str, Any]) -> RuleConditions:
        return tuple((name, tuple(values)) for name, values in table.items())

    return CapabilityRule(conditions(row["where"]), conditions(row["needs"]), row["source"])


@dataclass(frozen=True, slots=True)
class Refusal:
    """A value of a plan that a framework does not run: which field, its value, why, and which values it runs."""

    field: str
    value: object
    because: str
    instead: Values


def refusals(runs: Capabilities, plan: Plan, **job: str) -> Iterator[Refusal]:
    """Yield everything of a plan, and of the job's `JOB_WORDS`, that a framework does not run.

    >>> from shardwise.plans import find_stack
    >>> [one.field for one in refusals(find_stack("megatron").runs, Plan(tp2=2, pp=2, schedule="zb-h1"))]
    ['tp2', 'schedule']
    """
    seen = set()
    for one in (*_refused_degrees(runs, plan), *_refused_words(runs, plan, job), *_refused_layers(runs, plan, job)):
        seen.add(one.field)
        yield one
    yield from _refused_places(runs, plan)
    for rule in runs.rules:
        if rule.judges(job) and rule.broken(lambda name, values: _is_one_of(_value(plan, job, name), values, plan)):
            yield from (one for one in _broken(rule, runs, plan, job) if one.field not in seen)


def _refused_degrees(runs: Capabilities, plan: Plan) -> Iterator[Refusal]:
    for axis in DEGREES:
        if _many(getattr(plan, axis)) and axis not in runs.split:
            yield Refusal(axis, getattr(plan, axis), "does not split over this axis", (1,))


def _refused_words(runs: Capabilities, plan: Plan, job: Mapping[str, str]) -> Iterator[Refusal]:
    matters = {
        "layout": True,
        "sequence_parallel": _many(plan.tp) and plan.layout == "1d",
        "cp_kind": _many(plan.cp),
        "schedule": _many(plan.pp),
        "sharding": plan.sharding_rules.shards or _many(plan.dp) or _many(plan.cp),
        "recompute": True,
    }
    for name, effective in matters.items():
        value, known = getattr(plan, name), getattr(runs, name)
        value = runs.word(value) if name == "sharding" else value
        if effective and value not in known:
            yield Refusal(name, value, "does not run this", known)
    for name in ("precision", "optimizer"):
        known = getattr(runs, name)
        if known and job.get(name) and job[name] not in known:
            yield Refusal(name, job[name], "does not run this", known)
    if job.get("adapter") and not runs.adapters:
        yield Refusal("adapter", job["adapter"], "has no adapters", ("full training",))
    elif job.get("adapter") and runs.methods and job["adapter"] not in runs.methods:
        yield Refusal("adapter", job["adapter"], "does not train this", runs.methods)
    if job.get("tile_mlp") and not runs.tile_mlp:
        yield Refusal("tile_mlp", int(job["tile_mlp"]), "runs a feed-forward whole", (1,))
    if job.get("updates_in_backward") and not runs.updates_in_backward:
        yield Refusal("updates_in_backward", True, "updates after backward", ("an update after backward",))
    if job.get("quantize_moe_experts") and not runs.quantize_moe_experts:
        because = "has no switch that stores experts in 4 or 8 bits"
        yield Refusal("quantize_moe_experts", True, because, ("experts as they come",))
    policy = job.get("checkpoint_policy")
    if policy and policy not in runs.checkpoint_policy:
        yield Refusal(
            "checkpoint_policy", policy, "does not keep this", runs.checkpoint_policy or ("whole checkpoints",)
        )


def _refused_layers(runs: Capabilities, plan: Plan, job: Mapping[str, str]) -> Iterator[Refusal]:
    for name in plan.modules:
        if name not in runs.modules:
            yield Refusal("modules", name, "does not recompute this by itself", runs.modules or ("none",))
    for name in plan.offload:
        if name not in runs.offload:
            yield Refusal("offload", name, "does not keep this in the host's memory", runs.offload or ("none",))
    yield from _refused_limits(runs, plan, int(job.get("layers", 0)) // max(plan.pp, 1))
    if len(set(plan.stage_layers)) > 1 and not runs.uneven_stages:
        yield Refusal("stage_layers", ",".join(map(str, plan.stage_layers)), "has equal stages", ("equal stages",))


def every_nth(layers: int) -> Values:
    """Return how many of so many layers are every one, every second, every third and so on, the most first.

    >>> every_nth(10)
    (10, 5, 3, 2, 1)
    """
    return tuple(dict.fromkeys(layers // n for n in range(1, layers + 1)))


def _refused_limits(runs: Capabilities, plan: Plan, layers: int) -> Iterator[Refusal]:
    """Yield a limit of recompute that a framework does not have, for stages of so many layers (0: not known)."""
    limit, chunks = plan.recompute_layers, plan.vpp
    if not limit:
        return
    if runs.partial_recompute == "none":
        yield Refusal("recompute_layers", limit, "recomputes all layers of a stage or none", (0,))
    elif runs.partial_recompute == "any" and limit % chunks:
        because, least = f"recomputes as many layers of each of the {chunks} chunks", limit // chunks
        yield Refusal("recompute_layers", limit, because, (least * chunks,))
    elif runs.partial_recompute == "every" and 0 < limit < layers and limit not in every_nth(layers):
        near = sorted(every_nth(layers), key=lambda n: abs(int(n) - limit))[:2]
        because = f"recomputes every second of the {layers} layers of a stage, or every third and so on"
        yield Refusal("recompute_layers", limit, because, tuple(sorted(near)))


def _refused_places(runs: Capabilities, plan: Plan) -> Iterator[Refusal]:
    def wide(order: tuple[str, ...]) -> list[str]:
        return [axis for axis in order if axis in AXES and _many(getattr(plan, axis))]

    if not any(wide(order) == wide(plan.order) for order in runs.orders):
        yield Refusal("order", "-".join(wide(plan.order)), "lays ranks out in an order of its own", runs.order)
    if plan.fast and not runs.any_place:
        places = ",".join(f"{axis}={n}" for axis, n in zip(AXES, plan.fast, strict=False) if n > 1)
        yield Refusal("fast", places, "fills the fastest domain in the order of its axes", ("the order alone",))


def _many(degree: object) -> bool:
    return isinstance(degree, int) and degree > 1


def _value(plan: Plan, job: Mapping[str, str], name: str) -> object:
    return job.get(name) if name in JOB_WORDS else getattr(plan, name)


def _is_one_of(value: Any, values: Values, plan: Plan) -> bool:
    def is_it(one: Value) -> bool:
        if isinstance(value, tuple):
            return one in value
        if not isinstance(one, str) or value is None:
            # A job that is not known is no ground for a refusal.
            return bool(value == one) or value is None
        if one.startswith(">"):
            return isinstance(value, int) and value > int(one[1:])
        if one.startswith(DIVISORS):
            return isinstance(value, int) and getattr(plan, one.removeprefix(DIVISORS)) % value == 0
        return bool(value == (getattr(plan, one) if one in DEGREES else one)) or alike(str(value), one)

    return any(map(is_it, values))


def shown(value: object) -> str:
    """Return a value as its flag says it.

    >>> shown(("optimizer", "gradients")), shown(2)
    ('optimizer,gradients', '2')
    """
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _broken(rule: CapabilityRule, runs: Capabilities, plan: Plan, job: Mapping[str, str]) -> Iterator[Refusal]:
    """Yield the fields that a broken rule needs otherwise, each with what it is beside."""
    for name, values in rule.needs:
        value = _value(plan, job, name)
        if not _is_one_of(value, values, plan):
            others = ", ".join(f"{one} {shown(_value(plan, job, one))}" for one, _ in rule.where if one != name)
            because = f"does not run this beside {others}" if others else "does not run this alone"
            if isinstance(value, tuple):
                values = tuple(shown(_completed(runs, name, (*value, more))) for more in values)
            values = tuple(f"a divisor {one}" if str(one).startswith(DIVISORS) else one for one in values)
            yield Refusal(name, value, because, values)


def _completed(runs: Capabilities, name: str, chosen: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return some of a field's words with all that rules about this field alone want beside them."""
    for rule in runs.rules:
        wanted = dict(rule.needs).get(name, ())
        asked = [field for field, _ in rule.where] == [name] and any(one in chosen for one in rule.where[0][1])
        if wanted and asked and not any(one in chosen for one in wanted):
            return _completed(runs, name, (*chosen, wanted[0]))
    # Gradients go where the optimizer reads them, whatever the framework.
    alone = name == "offload" and "gradients" in chosen and "optimizer" not in chosen
    return (*chosen, "optimizer") if alone else chosen
