"""Inference engines and their kernels: seconds and bytes they add to the ledger, with the source of each figure."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from shardwise.cost import Efficiencies
from shardwise.errors import InputError, Problem
from shardwise.hardware import Device
from shardwise.plans import Stack, find_stack


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One inference engine.

    `budget` is how it spells its memory fraction: "total" bounds weights, activations and cache, "static"
    weights and cache, "free" is the cache's share of what is left. `fused` names operators that run
    inside another kernel.
    """

    name: str
    title: str
    budget: Literal["total", "static", "free"]
    memory_fraction: float
    one_shot: bool
    step_seconds: float
    sequence_seconds: float
    small_kernel_seconds: float
    fused: tuple[str, ...]
    context_bytes: float
    communicator_bytes: float
    sampler_bytes: float
    block_tokens: int
    quantised_start_seconds: float
    sources: tuple[tuple[str, str], ...]

    @property
    def stack(self) -> Stack:
        """The ledger's view of the engine: fused norms, attention and activations, no dropout."""
        return replace(find_stack("megatron"), name=self.name, title=self.title)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Constants of kernels that training does not have: decode attention, fused experts, one-shot all-reduce.

    `all_reduce` lists (ranks, start seconds, bytes per second), largest group last; empty where the engine has none.
    """

    attention_efficiency: float
    attention_start_seconds: float
    attention_floor_tokens: float
    experts_wide: float
    experts_narrow: float
    experts_pad_rows: float
    experts_start_seconds: float
    all_reduce: tuple[tuple[int, float, float], ...]
    sources: tuple[str, ...]


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("shardwise.serving").joinpath("engines.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def engine_names() -> tuple[str, ...]:
    """Return the names of the engines that are known.

    >>> "vllm" in engine_names()
    True
    """
    return tuple(_table()["engines"])


@cache
def find_engine(name: str) -> Engine:
    """Return the named engine; raises `InputError` naming the known ones.

    >>> find_engine("vllm").block_tokens
    16
    """
    if name not in _table()["engines"]:
        problem = Problem("engine", name, "is not a known engine", "use one of " + ", ".join(engine_names()))
        raise InputError([problem])
    row = _table()["engines"][name]
    values = {f.name: row[f.name] for f in fields(Engine) if f.name not in ("name", "sources", "fused")}
    return Engine(name=name, fused=tuple(row["fused"]), sources=tuple(row["sources"].items()), **values)


def _all_reduce(family: str, engine: str) -> tuple[tuple[int, float, float], ...]:
    """Return the one-shot all-reduce of an engine on a family; engines without a measurement take vLLM's."""
    table = _table()["all_reduce"]
    if family not in table:
        return ()
    row = table[family].get(engine, table[family]["vllm"])
    return tuple(zip(table["ranks"], row["start_seconds"], row["bytes_per_second"], strict=True))


def kernels_of(device: Device, family: str, engine: Engine, imposed: Efficiencies) -> Kernels:
    """Return the kernel constants of a device family under an engine; imposed efficiencies replace the fitted ones."""
    table = _table()
    attention = table["attention"].get(family, table["attention"]["generic"])
    experts = table["experts"]
    start = 0.0 if imposed.ideal else 1.0

    def effective(fitted: float, user: float) -> float:
        return user or (1.0 if imposed.ideal else fitted)

    direct = (
        engine.one_shot
        and device.fast_link.startswith("nvlink")
        and not (imposed.ideal or imposed.fast_bytes_per_second)
    )
    return Kernels(
        attention_efficiency=effective(attention["efficiency"], imposed.memory),
        attention_start_seconds=start * attention["start_seconds"],
        attention_floor_tokens=start * attention["floor_tokens"],
        experts_wide=effective(experts["wide"], imposed.compute),
        experts_narrow=effective(experts["narrow"], imposed.compute),
        experts_pad_rows=start * experts["pad_rows"],
        experts_start_seconds=start * experts["start_seconds"].get(family, experts["start_seconds"]["generic"]),
        all_reduce=_all_reduce(family, engine.name) if direct else (),
        sources=(attention["source"], experts["source"], table["all_reduce"]["source"]),
    )
