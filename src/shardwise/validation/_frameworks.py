"""Which stack runs a row, by the name of its framework and by what its other cells say (frameworks.toml)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from shardwise.plans import Stack
from shardwise.validation._toml import read


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """What a framework does where a row is silent: its stack, sharding, and sequence parallelism with tp.

    An entry for a part of the runs of a framework asks for matching cells with `where`. `pipeline_batch` is what a
    stated micro-batch of a pipeline is, `recompute_policy` that nobody prints how much selective recompute runs again.
    """

    pattern: str
    stack: str
    sharding: str
    sequence_parallel: bool
    source: str
    where: Mapping[str, str] = field(default_factory=dict)
    pipeline_batch: Literal["stated", "replica", "sequence"] = "stated"
    recompute_policy: bool = False

    @property
    def known(self) -> bool:
        """Whether this is the entry of a framework, not the one for all others."""
        return bool(self.pattern)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """What a stack keeps for adapters: bytes of a parameter of one, and of dropout over its input in 16 bits.

    With `narrow_head` the head is quantised as the layers are.
    """

    parameter_bytes: float
    dropout_bytes: float
    narrow_head: bool
    source: str


def _table() -> dict[str, Any]:
    return read("frameworks.toml")


@cache
def frameworks() -> tuple[Framework, ...]:
    """Return what frameworks do, the first pattern that matches first."""
    return tuple(Framework(**row) for row in _table()["framework"])


def framework_of(name: str, row: Mapping[str, str] | None = None) -> Framework:
    """Return the entry of a framework by its name in a file, the one for all others where it is not known.

    >>> framework_of("torchtitan 2025-06").stack, framework_of("my own trainer").known
    ('fsdp2', False)
    """
    cells = row or {}
    return next(one for one in frameworks() if re.search(one.pattern, name.lower()) and matches(one.where, cells))


def matches(where: Mapping[str, str], cells: Mapping[str, str]) -> bool:
    """Return whether every named cell of a row matches its whole pattern.

    >>> matches({"device": "h[12]00.*"}, {"device": "h100-sxm-80gb"}), matches({"device": "h100"}, {})
    (True, False)
    """
    return all(re.fullmatch(pattern, (cells.get(name) or "").strip()) for name, pattern in where.items())


def variant_of(stack: str, row: Mapping[str, str], experts: str) -> str:
    """Return the name of the stack that runs a row of a framework; `experts` are "none", "gated" or "ungated".

    >>> variant_of("fsdp2", {"notes": "torch.compile"}, "none"), variant_of("fsdp2", {}, "none")
    ('fsdp2-compiled-loss', 'fsdp2')
    """
    told = {**row, "experts": experts}
    for one in _table()["variant"]:
        if re.fullmatch(one["of"], stack) and matches(one["where"], told):
            stack = one["stack"]
    return stack


def adjusted(stack: Stack, row: Mapping[str, str]) -> Stack:
    """Return a stack with what the cells of a row, its notes too, say of how it was set.

    >>> from shardwise.plans import find_stack
    >>> adjusted(find_stack("megatron"), {"notes": "dispatcher DeepEP"}).dispatch
    'deduplicated'
    """
    for one in _table()["adjustment"]:
        told = {**row, "stack.loss": stack.loss}
        if re.fullmatch(one["of"], stack.name) and matches(one["where"], told):
            stack = replace(stack, **one.get("sets", {}), settings=replace(stack.settings, **one.get("settings", {})))
    return stack


def has_habit(stack: str, habit: str) -> bool:
    """Return whether a stack does something by default where rows are silent.

    >>> has_habit("megatron-2021", "dropout"), has_habit("megatron", "dropout")
    (True, False)
    """
    return bool(re.fullmatch(_table()["habit"][habit]["stacks"], stack))


def recompute_steps(stack: str) -> tuple[tuple[str, ...], ...]:
    """Return the modules that recipes of a stack run again before whole layers, the least first; none without recipes.

    >>> recompute_steps("megatron-bridge")[:2], recompute_steps("fsdp2")
    (((), ('moe_act',)), ())
    """
    recipe = _table()["recompute_recipe"]
    return tuple(tuple(step) for step in recipe["steps"]) if re.fullmatch(recipe["stacks"], stack) else ()


def offload_bytes_per_second() -> float:
    """Return the rate to the host's memory above which recipes send activations there rather than recompute."""
    return float(_table()["recompute_recipe"]["offload_bytes_per_second"])


def adapters_of(stack: str) -> Adapters:
    """Return what a stack keeps for adapters.

    >>> adapters_of("litgpt").parameter_bytes, adapters_of("transformers").parameter_bytes
    (8.0, 16.0)
    """
    rows = _table()["adapters"]
    return Adapters(**rows.get(stack, rows["other"]))
