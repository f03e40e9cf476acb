"""What a device reaches: its datasheet peaks times fitted efficiencies, each with the source of the fit."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic

from shardwise.errors import Problems
from shardwise.hardware import Device
from shardwise.ledger.number import X
from shardwise.ledger.traced import leaf


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiencies:
    """Efficiencies that the user imposes in place of the fitted ones; 0 leaves the fit.

    `ideal` sets every one to 1 and starts to 0. `matmul_flops_per_second` and `memory_bytes_per_second` impose
    achieved rates instead of fractions.
    """

    compute: float = 0.0
    memory: float = 0.0
    fast_link: float = 0.0
    slow_link: float = 0.0
    matmul_flops_per_second: float = 0.0
    memory_bytes_per_second: float = 0.0
    fast_bytes_per_second: float = 0.0
    slow_bytes_per_second: float = 0.0
    ideal: bool = False

    def check(self) -> None:
        """Raise `InputError` for fractions outside (0, 1] and negative rates."""
        problems = Problems()
        for name in ("compute", "memory", "fast_link", "slow_link"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                problems.add(
                    f"{name}_efficiency",
                    value,
                    "must be a fraction of the peak, above 0 and at most 1",
                    "use for example 0.7",
                )
        for name in (
            "matmul_flops_per_second",
            "memory_bytes_per_second",
            "fast_bytes_per_second",
            "slow_bytes_per_second",
        ):
            if getattr(self, name) < 0:
                problems.add(
                    name, getattr(self, name), "must not be negative", "give an achieved rate, or leave it out"
                )
        problems.raise_if_any()


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a device cuts products: cores that share tiles, k elements lost to a prologue, penalty of small tiles.

    No cores means no quantisation at all.
    """

    cores: int
    depth: float
    shrink: float

    def __str__(self) -> str:
        return "tiles"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates(Generic[X]):
    """Achieved rates of one device and data type; every field is a number that explains itself when traced."""

    matmul_flops: X
    matmul_bytes: X
    matmul_start: X
    attention_forward_flops: X
    attention_backward_flops: X
    attention_start: X
    grouped_flops: X
    grouped_start: X
    memory_bytes: X
    memory_start: X
    launch: X
    sharpness: float
    tiling: Tiling
    family: str
    assumptions: tuple[str, ...] = ()


@cache
def constants() -> dict[str, Any]:
    """Return the table of fitted constants as stored."""
    return tomllib.loads(resources.files("shardwise.cost").joinpath("constants.toml").read_text(encoding="utf-8"))


def family_of(device: Device) -> str:
    """Return the family of fitted constants that covers a device, "generic" when none does.

    >>> from shardwise.hardware import find_device
    >>> family_of(find_device("h100-sxm-80gb").device)
    'hopper'
    """
    stem = device.name
    for family, row in constants().items():
        if any(stem == d or stem.startswith(d + "-") for d in row.get("devices", ())):
            return family
    return "generic"


def _matmul_row(family: str, dtype: str) -> tuple[dict[str, Any], str]:
    """Return the fit for a data type, or the nearest one of the family with the word of what stands in."""
    table = constants()
    rows = table[family]["matmul"]
    if dtype in rows:
        return rows[dtype], ""
    if dtype == "fp16" and "bf16" in rows:
        return rows["bf16"], ""
    wide = "fp8" if dtype in ("int8", "fp4", "int4") else "bf16"
    if wide in rows:
        return rows[wide], f"{dtype} matrix products use the {wide} efficiency of {family}"
    return table["generic"]["matmul"][wide], f"{dtype} matrix products use the generic {wide} efficiency"


def lasting(row: dict[str, Any]) -> float:
    """Return the share of the peak that products keep in lasting runs, where a second laboratory measured it.

    >>> lasting({"compute": 0.8, "sustained": 0.5}), lasting({"compute": 0.8})
    (0.4, 0.8)
    """
    return float(row["compute"] * row.get("sustained", 1.0))


def tiling_of(device: Device, row: dict[str, Any], ideal: bool) -> Tiling:
    """Return how a device cuts products; nothing is cut when efficiencies are one or the cores are not known."""
    known = device.knows("num_cores") and not ideal
    return Tiling(int(device.num_cores) if known else 0, row["depth"] if known else 0.0, row["tile"] if known else 0.0)


def attention_dtype(device: Device, dtype: str) -> str:
    """Return the data type of the attention core: 16 bit where products are narrower.

    Transformer Engine's DotProductAttention and the engines' flash attention stay in 16 bit unless they are told
    otherwise (TransformerEngine common/recipe, fp8_dpa = False).

    >>> from shardwise.hardware import find_device
    >>> attention_dtype(find_device("h100-sxm-80gb").device, "fp8")
    'bf16'
    """
    narrow = dtype not in ("fp32", "tf32", "bf16", "fp16")
    return next((d for d in ("bf16", "fp16") if narrow and d in device.matrix_flops), dtype)


def check_achieved(imposed: Efficiencies, peak: float, bandwidth: float) -> None:
    """Raise `InputError` for achieved rates above what the datasheet gives."""
    problems = Problems()
    for name, limit in (("matmul_flops_per_second", peak), ("memory_bytes_per_second", bandwidth)):
        if getattr(imposed, name) > limit:
            rule = f"is above the device's peak of {limit:g} a second"
            problems.add(name, getattr(imposed, name), rule, f"use at most {limit:g}, or another device")
    problems.raise_if_any()


def rates_of(device: Device, dtype: str, launch_seconds: float, imposed: Efficiencies) -> Rates[Any]:
    """Return what a device achieves in a data type, as named numbers.

    `launch_seconds` is the launch of a kernel by the framework: it hides behind longer kernels. Raises `InputError`
    when the device has no rate for the data type or an imposed efficiency is out of range.
    """
    imposed.check()
    family = family_of(device)
    table = constants()[family]
    row, note = _matmul_row(family, dtype)
    notes = [note] if note else []
    if family == "generic":
        notes.append(f"{device.name}: no kernel measurements; efficiencies are the middle of A100, H100 and B200")
    start = 0.0 if imposed.ideal else 1.0

    def effective(fitted: float, user: float) -> float:
        return user or (1.0 if imposed.ideal else fitted)

    peak, bandwidth = device.peak_flops(dtype), device.memory_bytes_per_second
    check_achieved(imposed, peak, bandwidth)
    compute, memory = effective(lasting(row), imposed.compute), effective(row["memory"], imposed.memory)

    def named(name: str, value: float, source: str) -> float:
        return leaf(name, value, source)

    stream = effective(table["memory"]["efficiency"], imposed.memory)
    attention, attention_peak = table["attention"], device.peak_flops(attention_dtype(device, dtype))
    return Rates(
        matmul_flops=named(
            "achievable matrix FLOP/s", imposed.matmul_flops_per_second or compute * peak, row["source"]
        ),
        matmul_bytes=named(
            "achievable HBM bytes/s", imposed.memory_bytes_per_second or memory * bandwidth, row["source"]
        ),
        matmul_start=named("kernel start", start * row["start_seconds"], row["source"]),
        attention_forward_flops=named(
            "attention forward FLOP/s",
            effective(attention["forward"], imposed.compute) * attention_peak,
            attention["source"],
        ),
        attention_backward_flops=named(
            "attention backward FLOP/s",
            effective(attention["backward"], imposed.compute) * attention_peak,
            attention["source"],
        ),
        attention_start=named("attention start", start * attention["start_seconds"], attention["source"]),
        grouped_flops=named(
            "grouped FLOP/s", effective(table["grouped"]["compute"], imposed.compute) * peak, table["grouped"]["source"]
        ),
        grouped_start=named("grouped start", start * table["grouped"]["start_seconds"], table["grouped"]["source"]),
        memory_bytes=named(
            "streaming HBM bytes/s", imposed.memory_bytes_per_second or stream * bandwidth, table["memory"]["source"]
        ),
        memory_start=named("kernel start", start * table["memory"]["start_seconds"], table["memory"]["source"]),
        launch=named("launch", start * launch_seconds, "the stack's eager launch"),
        sharpness=row["sharpness"],
        tiling=tiling_of(device, row, imposed.ideal),
        family=family,
        assumptions=tuple(notes),
    )
