"""Which limit of a device each rate of its cost model is, and cost models that have one limit left.

What bounds an operator is found by asking for its price again without the other limits: nothing is priced twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from shardwise.cost import DECODE_PARTS, PARTS_IN_SECONDS, ExpertsFit, GemmRates, KernelCosts, Rates
from shardwise.records import replace
from shardwise.serving import EngineCostModel, EngineKernels, KeyTiles, RouterKernel, UnifiedKernel

Bound = Literal["compute", "memory", "start"]
_NO_LIMIT = 1e30

# Which limit each rate is, and which records hold rates of their own. Rows/s of blocks of threads are starts.
_PRODUCTS: dict[str, Bound] = {
    "matmul_flops": "compute",
    "matmul_bytes": "memory",
    "matmul_start": "start",
    "ramp_seconds": "start",
}
LIMITS: dict[type, dict[str, Bound]] = {
    GemmRates: _PRODUCTS,
    Rates: {
        **_PRODUCTS,
        **dict.fromkeys(("attention_forward_flops", "attention_backward_flops"), "compute"),
        **dict.fromkeys(("grouped_flops", "vector_flops"), "compute"),
        **dict.fromkeys(("attention_start", "grouped_start", "memory_start", "launch", "row_rate"), "start"),
        **dict.fromkeys(("memory_bytes", "cached_rate"), "memory"),
    },
    EngineCostModel: {
        **dict.fromkeys(("peak", "narrow_peak", "experts_peak", "widened", "scanned", "unpacked"), "compute"),
        "bandwidth": "memory",
    },
    ExpertsFit: {
        "compute": "compute",
        "memory": "memory",
        **dict.fromkeys(("start_seconds", "expert_seconds", "walk_seconds", "mapped_seconds"), "start"),
    },
    EngineKernels: {},
    KernelCosts: {},
    # What takes its seconds whatever the device could compute and move meanwhile.
    RouterKernel: {"first_seconds": "start", "token_seconds": "start"},
    KeyTiles: {"seconds": "start"},
    UnifiedKernel: {},
}
INSIDE: dict[type, tuple[str, ...]] = {
    Rates: ("wide",),
    EngineCostModel: ("rates", "narrow", "kernels", "weight_only", "router", "unified"),
    UnifiedKernel: ("token", "prompt"),
    EngineKernels: ("decode", "experts_wide", "experts_narrow", "experts_unspread"),
}


def _only(thing: Any, kept: Bound) -> Any:
    """Return rates, kernels or a server with every limit taken away but one; 0 says that something has no limit."""
    if isinstance(thing, tuple):
        return tuple((one[0], _only(one[1], kept)) if isinstance(one, tuple) else _only(one, kept) for one in thing)
    changed: dict[str, Any] = {
        name: 0.0 if bound == "start" or not getattr(thing, name) else _NO_LIMIT
        for name, bound in LIMITS[type(thing)].items()
        if bound != kept
    }
    for name in INSIDE.get(type(thing), ()):
        value = getattr(thing, name)
        changed[name] = value and _only(value, kept)
    if isinstance(thing, KernelCosts) and kept != "start":
        parts = zip(DECODE_PARTS, thing.costs, strict=True)
        changed["costs"] = tuple(0.0 if part in PARTS_IN_SECONDS else cost for part, cost in parts)
    return replace(thing, **changed)


def each_alone(machine: Any) -> dict[Bound, Any]:
    """Return the rates of a machine with one limit each."""
    every: tuple[Bound, ...] = ("compute", "memory", "start")
    return {kept: _only(machine, kept) for kept in every}


def binding(price: Callable[[Any], float], limits: dict[Bound, Any]) -> Bound:
    """Return the limit that alone takes longest, the first of those that take equally long."""
    alone = {kept: price(machine) for kept, machine in limits.items()}
    return max(alone, key=lambda kept: alone[kept])
