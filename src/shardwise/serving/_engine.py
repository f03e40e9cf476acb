"""Inference engines and their kernels: seconds and bytes they add to the ledger, with the source of each figure."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from shardwise.cost import DecodeFit, Efficiencies, ExpertsFit, constants, fit_from
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

    decode: DecodeFit
    experts_wide: ExpertsFit
    experts_narrow: ExpertsFit
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


_NARROW = {
    "fp8": ("fp8", "fp8_block"),
    "fp8-block": ("fp8_block", "fp8"),
    "int8": ("fp8", "fp8_block"),
    "fp4": ("nvfp4", "w4a8_mxfp4_mxfp8", "fp8"),
}


def _own(table: dict[str, Any], engine: str) -> dict[str, Any]:
    """Return the rows of an engine; engines without a measurement take vLLM's."""
    row: dict[str, Any] = table.get(engine, table["vllm"])
    return row


def _expert_row(table: dict[str, Any], types: tuple[str, ...]) -> dict[str, Any]:
    """Return the row of the kernel with the most measurements of the first type that was measured."""
    by_kernel = next((table[t] for t in types if t in table), table["bf16"])
    plain = {name: row for name, row in by_kernel.items() if not name.endswith(("nongated", "min_latency"))}
    return max(plain.values(), key=lambda row: row["rows"])


def _imposed(row: dict[str, Any], imposed: Efficiencies) -> dict[str, Any]:
    """Return a row with the user's efficiencies; ideal kernels stream at full rate and start at once."""
    shares = {"compute": imposed.compute, "memory": imposed.memory}
    found = row | {name: min(user or row[name], 1.0) for name, user in shares.items()}
    if not imposed.ideal:
        return found
    free = {name: 0.0 for name in row if name.endswith("_seconds") or name in ("pad_rows", "floor_tokens")}
    return found | free | {"compute": 1.0, "memory": 1.0}


def kernels_of(device: Device, family: str, products: str, engine: Engine, imposed: Efficiencies) -> Kernels:
    """Return the kernel constants of a family under an engine for products of a type, or of the format "fp8-block".

    Imposed efficiencies replace the fitted ones; a family without tables of engines takes those of L40S.
    """
    table = constants()[family if "decode" in constants()[family] else "ada"]
    decode, experts = _own(table["decode"], engine.name)["bf16"], _own(table["experts"], engine.name)
    wide, narrow = _expert_row(experts, ("bf16",)), _expert_row(experts, _NARROW.get(products, ("bf16",)))
    direct = (
        engine.one_shot
        and device.fast_link.startswith("nvlink")
        and not (imposed.ideal or imposed.fast_bytes_per_second)
    )
    return Kernels(
        decode=fit_from(DecodeFit, _imposed(decode, imposed)),
        experts_wide=fit_from(ExpertsFit, _imposed(wide, imposed)),
        experts_narrow=fit_from(ExpertsFit, _imposed(narrow, imposed)),
        all_reduce=_all_reduce(family, engine.name) if direct else (),
        sources=(decode["source"], wide["source"], narrow["source"], _table()["all_reduce"]["source"]),
    )
