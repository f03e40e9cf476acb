"""How a model is laid out over devices: degrees of each axis, sharding, schedule, recompute, placement."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal, TypeAlias, get_args

from shardwise.notebook import CardLine, card
from shardwise.plans.schedules import Schedule
from shardwise.records import dataclass
from shardwise.units import counted

Sharding: TypeAlias = Literal[
    "none", "zero1", "zero2", "zero3", "fsdp", "hsdp", "shard-grad-op", "distributed-optimizer"
]
ContextKind: TypeAlias = Literal["ring", "all-gather", "all-to-all"]
LayoutKind: TypeAlias = Literal["1d", "summa"]
Recompute: TypeAlias = Literal["none", "selective", "attention", "norm-attention-norm", "full", "auto"]
Axis: TypeAlias = Literal["tp", "tp2", "cp", "dp", "pp"]

SHARDINGS: tuple[str, ...] = get_args(Sharding)
CONTEXT_KINDS: tuple[str, ...] = get_args(ContextKind)
LAYOUTS: tuple[str, ...] = get_args(LayoutKind)
RECOMPUTES: tuple[str, ...] = tuple(word for word in get_args(Recompute) if word != "auto")
AXES: tuple[Axis, ...] = get_args(Axis)
STAGE_AXES: tuple[Axis, ...] = tuple(axis for axis in AXES if axis != "pp")
DEGREES: tuple[str, ...] = ("tp", "tp2", "cp", "pp", "vpp", "dp", "ep", "etp")
OFFLOADS: tuple[str, ...] = ("optimizer", "gradients", "parameters", "activations")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One way to lay a training job, or a model that is served, out over devices.

    Degrees say how many ranks split a thing; one that is not given is 1, which splits nothing.

    >>> plan = Plan(tp=8, pp=4, dp=2, sharding="distributed-optimizer")
    >>> plan.num_devices
    64
    """

    tp: int = 1
    """Tensor parallelism: ranks that split the matrices of each layer."""
    tp2: int = 1
    """The second axis of the "summa" layout."""
    cp: int = 1
    """Context parallelism: ranks that split each sequence."""
    pp: int = 1
    """Pipeline parallelism: stages that split the layers."""
    vpp: int = 1
    """Virtual stages: pieces of the model that each stage of an interleaved pipeline holds."""
    dp: int = 1
    """Data parallelism: all replicas, whether they share one sharded copy or not."""
    ep: int = 1
    """Expert parallelism: ranks that hold different experts."""
    etp: int = 1
    """Tensor parallelism within an expert."""
    micro_batch: int = 1
    """Sequences that a replica runs at a time."""
    layout: LayoutKind = "1d"
    panels: int = 1
    """Panels that the messages of a "summa" GEMM are cut into."""
    sequence_parallel: bool = True
    """Norms and residuals split their tokens over the tensor-parallel ranks."""
    cp_kind: ContextKind = "ring"
    schedule: Schedule = "1f1b"
    sharding: Sharding = "none"
    shard: int = 1
    """Replicas that share one copy under "hsdp", or where this is above 1 under "shard-grad-op" and a sharded optimizer
    (else all of dp)."""
    recompute: Recompute = "none"
    """What backward computes again; "auto" asks for the least that fits, which the answer's plan states."""
    recompute_layers: int = 0
    """Layers of each stage that recompute is limited to (0: all)."""
    offload: tuple[str, ...] = ()
    """What lies in the host's memory: of `OFFLOADS`; activations are those that backward reads, or checkpoints."""
    modules: tuple[str, ...] = ()
    """Modules to recompute besides, by the names of Megatron-Core."""
    stage_layers: tuple[int, ...] = ()
    """Layers of every stage, where they are not spread evenly."""
    order: tuple[Axis, ...] = AXES
    """The axes from the fastest links outwards."""
    fast: tuple[int, ...] = ()
    """Ranks of each of `AXES` that share the fastest domain; left out, the first axes of the order fill it."""

    def _repr_html_(self) -> str:
        stated = ((one.name, getattr(self, one.name)) for one in fields(self) if getattr(self, one.name) != one.default)
        return card(
            f"Plan for {counted(self.num_devices, 'device')}", (CardLine(name, str(value)) for name, value in stated)
        )

    @property
    def sharding_rules(self) -> ShardingRules:
        """What its sharding shards, and over which replicas."""
        return find_sharding(self.sharding)

    @property
    def num_devices(self) -> int:
        """How many devices the plan uses."""
        return self.tp * self.tp2 * self.cp * self.pp * self.dp

    @property
    def stage_devices(self) -> int:
        """How many devices one pipeline stage has, over all replicas."""
        return self.tp * self.tp2 * self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        """How many copies of each expert a stage holds."""
        return self.stage_devices // (self.ep * self.etp)


Groups: TypeAlias = Literal["all", "some", "hybrid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingRules:
    """Which state is sharded over replicas (arXiv:1910.02054 section 5, arXiv:2304.11277), and over which of them."""

    optimizer: bool = False
    gradients: bool = False
    weights: bool = False
    keeps_gathered: bool = False
    """Weights that forward gathered stay whole until backward (FSDP's reshard_after_forward=False)."""
    groups: Groups = "all"
    """Over all replicas; over some where a plan says how many; or always within groups that hold copies (HSDP)."""

    @property
    def shards(self) -> bool:
        """Whether replicas share any state out."""
        return self.optimizer or self.gradients or self.weights

    @property
    def hybrid(self) -> bool:
        """Whether groups of replicas hold copies of one another's shards whatever their size."""
        return self.groups == "hybrid"


_OPTIMIZER = ShardingRules(optimizer=True, groups="some")
_EVERYTHING = ShardingRules(optimizer=True, gradients=True, weights=True)
SHARDING_RULES: dict[str, ShardingRules] = {
    "none": ShardingRules(),
    "zero1": _OPTIMIZER,
    "distributed-optimizer": _OPTIMIZER,
    "zero2": ShardingRules(optimizer=True, gradients=True),
    "shard-grad-op": ShardingRules(optimizer=True, gradients=True, weights=True, keeps_gathered=True, groups="some"),
    "zero3": _EVERYTHING,
    "fsdp": _EVERYTHING,
    "hsdp": ShardingRules(optimizer=True, gradients=True, weights=True, groups="hybrid"),
}


def find_sharding(word: str) -> ShardingRules:
    """Return what a word of sharding means.

    >>> find_sharding("zero3") == find_sharding("fsdp"), find_sharding("zero2").weights
    (True, False)
    """
    return SHARDING_RULES[word]


def in_groups(word: Sharding) -> Sharding:
    """Return the sharding within groups of replicas that hold copies of one another's, where a word has one.

    >>> in_groups("fsdp"), in_groups("zero1")
    ('hsdp', 'zero1')
    """
    rules = find_sharding(word)
    return "hsdp" if rules.weights and not rules.keeps_gathered else word


def distinct_shardings() -> tuple[str, ...]:
    """Return one word for each way to shard over all replicas, the least sharded first.

    >>> distinct_shardings()
    ('none', 'zero1', 'zero2', 'shard-grad-op', 'zero3')
    """
    words = {rules: word for word, rules in reversed(SHARDING_RULES.items()) if not rules.hybrid}
    return tuple(reversed(words.values()))


def alike(one: str, other: str) -> bool:
    """Return whether two words of sharding mean the same.

    >>> alike("zero1", "distributed-optimizer"), alike("zero2", "zero3")
    (True, False)
    """
    rules = SHARDING_RULES.get(one)
    return rules is not None and rules == SHARDING_RULES.get(other)
