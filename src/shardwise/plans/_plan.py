"""How a model is laid out over devices: degrees of each axis, sharding, schedule, recompute, placement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

Sharding: TypeAlias = Literal["none", "zero1", "zero2", "zero3", "fsdp", "hsdp", "distributed-optimizer"]
Schedule: TypeAlias = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"]
ContextKind: TypeAlias = Literal["ring", "all-gather", "all-to-all"]
LayoutKind: TypeAlias = Literal["1d", "summa"]
Recompute: TypeAlias = Literal["none", "selective", "attention", "norm-attention-norm", "full"]
Axis: TypeAlias = Literal["tp", "tp2", "cp", "dp", "pp"]

SHARDINGS: tuple[str, ...] = get_args(Sharding)
SCHEDULES: tuple[str, ...] = get_args(Schedule)
CONTEXT_KINDS: tuple[str, ...] = get_args(ContextKind)
LAYOUTS: tuple[str, ...] = get_args(LayoutKind)
RECOMPUTES: tuple[str, ...] = get_args(Recompute)
AXES: tuple[str, ...] = get_args(Axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One way to lay a training job or a served model out.

    `tp2` is the second axis of the "summa" layout (1 otherwise). `dp` counts all replicas, sharded or not; `shard` is
    the sharding group of "hsdp", and of a sharded optimizer where it is over 1 (elsewhere all of dp).
    `recompute_layers` limits recompute to so many layers of each stage (0: all). `modules` adds Megatron's named
    modules to recompute. `stage_layers` gives the layers of every stage when they are not equal. `order` lists the axes
    from the fastest links outwards; `fast` says how many ranks of each of `AXES` share the fastest domain (left out,
    the first axes of the order fill it).

    >>> Plan(tp=8, pp=4).tp
    8
    """

    tp: int = 1
    tp2: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    micro_batch: int = 1
    layout: LayoutKind = "1d"
    panels: int = 1
    sequence_parallel: bool = True
    cp_kind: ContextKind = "ring"
    schedule: Schedule = "1f1b"
    sharding: Sharding = "none"
    shard: int = 1
    recompute: Recompute = "none"
    recompute_layers: int = 0
    modules: tuple[str, ...] = ()
    stage_layers: tuple[int, ...] = ()
    order: tuple[Axis, ...] = field(default=("tp", "tp2", "cp", "dp", "pp"))
    fast: tuple[int, ...] = ()

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
