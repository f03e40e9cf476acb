"""What a device reaches: its datasheet peaks times fitted efficiencies, each with the source of the fit."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Generic

from shardwise.cost._power import derated_attention, derated_gemm, power_share, steady_state_rate
from shardwise.cost._records import AttentionFit, DeviceFamily, Gemm, GroupedGemm, MemoryKernels
from shardwise.cost._tables import bandwidth_of, constants, family_of, last_cache_bytes, matmul_row
from shardwise.cost._tiles import ELEMENT_BYTES, AttentionBlocks, BandwidthShares, Tiling, tiling_of
from shardwise.errors import Problems
from shardwise.hardware import Device
from shardwise.ledger.number import X
from shardwise.ledger.traced import leaf
from shardwise.records import dataclass, replace

OVERLAP_AXES = ("tp", "cp", "ep", "dp", "pp")
"""Axes whose messages may be kept from running beside compute; tp has both of the two-dimensional layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiencies:
    """Efficiencies that the user imposes in place of the fitted ones; 0 leaves the fit.

    `ideal` sets every one to 1 and starts to 0. `matmul_flops_per_second` and `memory_bytes_per_second` impose
    achieved rates instead of fractions. `exposed_axes` are those whose messages never run beside compute.
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
    exposed_axes: tuple[str, ...] = ()

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
        for axis in self.exposed_axes:
            if axis not in OVERLAP_AXES:
                problems.add("exposed_axes", axis, "is not an axis of messages", f"use {', '.join(OVERLAP_AXES)}")
        problems.raise_if_any()


WIDE_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCorrections:
    """What a GEMM meets beside arithmetic and bandwidth; nothing of it where all is ideal."""

    burst_share: float = 0.0
    """By how much arithmetic is faster before power limits the clock, in replays shorter than `burst_seconds`."""
    burst_seconds: Any = 1.0
    burst_left: float = 1.0
    """Share of it that long replays lose: less where operands are zeros."""
    write_share: float = 0.0
    """Share of the memory's time of the output that is spent after the arithmetic."""
    cached_bytes: float = 0.0
    """Size of the last cache: the input of a GEMM that moves less stays in it, at `cached_share` of its time."""
    cached_share: float = 1.0
    keeps_outputs: bool = False
    """Whether the output does so too."""
    unaligned: float = 1.0
    """Time of a GEMM with rows that start between multiples of 16 bytes over that of one whose rows do not."""
    width: float = 2.0
    """Bytes of an element of the operands."""

    @classmethod
    def stated(cls, row: Gemm, dtype: str, device: Device) -> GemmCorrections:
        """Return what a row of GEMMs and a device's family state, with the device's own last cache.

        `launches` of a table share the time before clocks fall.
        """
        lasts = row.launches is None
        return cls(
            burst_share=0.0 if lasts else row.burst_share,
            burst_seconds=row.burst_seconds if lasts else row.burst_seconds / row.launches,
            burst_left=row.burst_left,
            write_share=row.write_share,
            cached_bytes=last_cache_bytes(device),
            cached_share=row.cached_share,
            unaligned=row.unaligned,
            keeps_outputs=constants().families[family_of(device)].memory.keeps_outputs,
            width=ELEMENT_BYTES[dtype],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmRates(Generic[X]):
    """What a device achieves in GEMMs of one data type."""

    matmul_flops: X
    matmul_bytes: X
    matmul_start: X
    sharpness: float
    tiling: Tiling
    ramp_seconds: float = 0.0
    """What filling and draining pipelines of loads costs GEMMs of many more bytes than `ramp_traffic`."""
    ramp_traffic: float = 1.0
    corrections: GemmCorrections = GemmCorrections()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates(GemmRates[X]):
    """Achieved rates of one device and data type; numbers explain themselves when they are traced."""

    attention_forward_flops: X
    attention_backward_flops: X
    attention_start: X
    pair_dims: float
    """Values of a head whose products cost as much as the exponential of a pair (0: it costs nothing)."""
    grouped_flops: X
    grouped_start: X
    grouped_each: X
    """Seconds that one more group of a grouped GEMM costs."""
    grouped_gradients: tuple[float, float]
    """Rates of grouped GEMMs of input and of weight gradients over that of forward ones."""
    memory_bytes: X
    memory_start: X
    launch: X
    contention: float
    """By how much compute slows while messages run beside it, as a share of their time."""
    weight_gradient: float
    """Rate of GEMMs of weight gradients over that of the other GEMMs."""
    cast_traffic: float
    """Bytes moved to cast one element to a narrower type."""
    recast_traffic: float
    """Bytes moved to cast one element again, scaled along its other side, for a weight gradient."""
    family: str
    assumptions: tuple[str, ...] = ()
    attention_blocks: AttentionBlocks = AttentionBlocks()
    bandwidth_shares: BandwidthShares = BandwidthShares()
    experts_in_turn: bool = False
    wide: GemmRates[X] | None = None
    """Rates of GEMMs that stay in 16 bits beside narrower ones."""
    vector_flops: X | float = 0.0
    """Rate without matrix units (0: not known)."""
    cached_rate: float = 0.0
    """Bytes/s of kernels that find what they move in the last cache (0: not known)."""
    row_rate: float = 0.0
    """Rows/s of kernels that start a block of threads a row (0: not known)."""


def lasting(row: Gemm) -> float:
    """Return the share of the peak that GEMMs keep in lasting runs, where a second laboratory measured it."""
    return row.compute * row.steady_state_share


def attention_dtype(device: Device, dtype: str) -> str:
    """Return the data type of the attention core: 16 bit where GEMMs are narrower.

    Transformer Engine's DotProductAttention and the engines' flash attention stay in 16 bit unless they are told
    otherwise (TransformerEngine common/recipe, fp8_dpa = False).

    >>> from shardwise.hardware import find_device
    >>> attention_dtype(find_device("h100-sxm-80gb").device, "fp8")
    'bf16'
    """
    narrow = dtype not in ("fp32", "tf32", *WIDE_DTYPES)
    return next((d for d in WIDE_DTYPES if narrow and d in device.matrix_flops), dtype)


def check_achieved(imposed: Efficiencies, peak: float, bandwidth: float) -> None:
    """Raise `InputError` for achieved rates above what the datasheet gives."""
    problems = Problems()
    for name, limit in (("matmul_flops_per_second", peak), ("memory_bytes_per_second", bandwidth)):
        if getattr(imposed, name) > limit:
            rule = f"is above the device's peak of {limit:g} a second"
            problems.add(name, getattr(imposed, name), rule, f"use at most {limit:g}, or another device")
    problems.raise_if_any()


def gemm_rates(device: Device, dtype: str, row: Gemm, imposed: Efficiencies, engine: str = "") -> GemmRates[Any]:
    """Return the part of `Rates` that GEMMs of a data type need, from one row of constants.

    A device that was measured itself (`shardwise measure`) reaches what its file states. Of others
    `by_device` holds what one device of the family reaches of the others (`memory_by_device`, `start_by_device`);
    `engines` holds the constants of engines with a library of their own.
    """
    imposed.check()
    row = replace(row, **row.engines.get(engine, {}))
    peak, bandwidth = device.peak_flops(dtype), device.memory_bytes_per_second
    check_achieved(imposed, peak, bandwidth)
    scale = row.by_device.get(device.chip, 1.0) * steady_state_rate(row, device, dtype)
    reached = device.achieved(f"flops.{dtype}")
    kept = float(reached.value) / peak if reached else lasting(row) * scale
    flops = imposed.matmul_flops_per_second or effective(imposed, kept, imposed.compute) * peak
    moved = achieved_bytes(device, imposed, row.memory * row.memory_by_device.get(device.chip, 1.0))
    start = 0.0 if imposed.ideal else row.start_by_device.get(device.chip, 1.0)
    return GemmRates(
        matmul_flops=leaf("achievable matrix FLOP/s", flops, reached.source if reached else row.source),
        matmul_bytes=leaf("achievable HBM bytes/s", moved, row.source),
        matmul_start=leaf("kernel start", start * row.start_seconds, row.source),
        sharpness=math.inf if imposed.ideal else row.sharpness,
        tiling=Tiling(0, 0.0) if imposed.ideal else tiling_of(device, dtype, row, flops),
        ramp_seconds=0.0 if imposed.ideal else row.ramp_seconds,
        ramp_traffic=row.ramp_traffic,
        corrections=GemmCorrections() if imposed.ideal else GemmCorrections.stated(row, dtype, device),
    )


def effective(imposed: Efficiencies, fitted: float, user: float) -> float:
    """Return the user's efficiency, or one where everything is ideal, or the fitted one."""
    return user or (1.0 if imposed.ideal else fitted)


def achieved_bytes(device: Device, imposed: Efficiencies, fitted: float) -> float:
    """Return the bytes a second that the user states, or his share of the datasheet's, or the fitted one."""
    if imposed.memory_bytes_per_second:
        return imposed.memory_bytes_per_second
    if imposed.memory or imposed.ideal:
        return (imposed.memory or 1.0) * device.memory_bytes_per_second
    return fitted * bandwidth_of(device)


def cast_bytes(dtype: str) -> float:
    """Return bytes that casting an element from 16 bit moves: read once, written in rows and in columns.

    TransformerEngine common/cast and transpose (cast_transpose): GEMMs of narrow types take both operands with the
    inner dimension first, so that each tensor is written twice.

    >>> cast_bytes("fp8"), cast_bytes("bf16")
    (4.0, 0.0)
    """
    width = ELEMENT_BYTES[dtype]
    return 2.0 + 2 * width if width < 2 else 0.0


def contention_of(device: Device, imposed: Efficiencies) -> float:
    """Return by how much compute slows while messages run beside it: their kernels hold cores, c of n: c / (n - c).

    Nothing where every efficiency is one, or where a device is not made of many equal cores.

    >>> from shardwise.hardware import find_device
    >>> round(contention_of(find_device("a100-sxm-80gb").device, Efficiencies()), 3)
    0.421
    """
    cores = constants().rules.message_cores.count
    if imposed.ideal or not device.knows("num_cores") or device.num_cores < 2 * cores:
        return 0.0
    return float(cores / (device.num_cores - cores))


def narrowed(family: str, row: Gemm) -> float:
    """Return what GEMMs of a type reach in lasting runs of the share that 16-bit ones do; grouped ones alike."""
    return min(1.0, lasting(row) / lasting(constants().families[family].matmul["bf16"]))


def grouped_by(row: GroupedGemm, kernel: str) -> GroupedGemm:
    """Return the rates of grouped GEMMs by a named kernel, those of the family's best where it has no row."""
    return replace(row, **row.kernels.get(kernel, {}))


def relative(device: Device, row: Gemm, measured: str) -> float:
    """Return the rate of a device's GEMMs over those of the device on which another kernel was measured."""
    share = 1.0
    for rows in (row.by_device, row.steady_state_by_device):
        share *= rows.get(device.chip, 1.0) / rows.get(measured, 1.0)
    return float(share)


def weight_gradient(family: DeviceFamily) -> float:
    """Return the rate of GEMMs of weight gradients over that of the others, the family's own where it states one."""
    return (family.weight_gradient or constants().rules.weight_gradient).rate


def _attention(family: DeviceFamily, device: Device, dtype: str, kernel: str) -> tuple[AttentionFit, float]:
    """Return a family's rates of attention by a named kernel in a type, and the peak that power leaves of a device."""
    row = replace(family.attention, **family.attention.kernels.get(kernel, {}))
    row = replace(row, **row.by_type.get(dtype, {}))
    weaker = power_share(family.matmul["bf16"], device, dtype) if "bf16" in family.matmul else 1.0
    return row, row.steady_state_by_device.get(device.chip, weaker) * device.peak_flops(dtype)


def rates_of(
    device: Device,
    dtype: str,
    launch_seconds: float,
    imposed: Efficiencies,
    kernels: tuple[str, str, str] = ("", "", ""),
    node_busy: bool = False,
) -> Rates[Any]:
    """Return what a device achieves in a data type, as named numbers.

    `launch_seconds` is the launch of a kernel by the framework: it hides behind longer kernels. `kernels` are the
    framework's of attention and of experts, and the release of its library of GEMMs; `node_busy` says that other
    devices work beside it. Raises `InputError` when the device has no rate for the data type or an imposed efficiency
    is out of range.
    """
    family = family_of(device)
    table = constants().families[family]
    row, note = matmul_row(family, dtype)
    row = derated_gemm(row, device, node_busy, kernels[2])
    notes = [note] if note else []
    if table.note:
        notes.append(f"{device.name}: {table.note}")
    products = gemm_rates(device, dtype, row, imposed)
    start = 0.0 if imposed.ideal else 1.0
    memory, grouped, peak = table.memory, grouped_by(table.grouped, kernels[1]), device.peak_flops(dtype)
    attention, attention_peak = _attention(table, device, attention_dtype(device, dtype), kernels[0])
    attention = derated_attention(attention, device, node_busy)
    streamed = device.achieved("bytes_per_second")
    share = float(streamed.value) / bandwidth_of(device) if streamed else memory.efficiency
    stream = achieved_bytes(device, imposed, share)
    scale = relative(device, row, grouped.measured_on or device.chip)
    forward, backward, experts = (
        effective(imposed, fitted, imposed.compute)
        for fitted in (attention.forward, attention.backward, grouped.compute * narrowed(family, row) * scale)
    )
    return Rates(
        **{f.name: getattr(products, f.name) for f in fields(products)},
        attention_forward_flops=leaf("attention forward FLOP/s", forward * attention_peak, attention.source),
        attention_backward_flops=leaf("attention backward FLOP/s", backward * attention_peak, attention.source),
        attention_start=leaf("attention start", start * attention.start_seconds, attention.source),
        pair_dims=0.0 if imposed.ideal else attention.pair_dims,
        grouped_flops=leaf("grouped FLOP/s", experts * peak, grouped.source),
        grouped_gradients=(1.0, 1.0) if imposed.ideal else (grouped.input_gradient, grouped.weight_gradient),
        grouped_start=leaf("grouped start", start * grouped.start_seconds, grouped.source),
        grouped_each=leaf("start of one expert", start * grouped.each_seconds, grouped.source),
        memory_bytes=leaf("streaming HBM bytes/s", stream, streamed.source if streamed else memory.source),
        memory_start=leaf("kernel start", start * memory.start_seconds, memory.source),
        launch=leaf("launch", start * launch_seconds, "the stack's eager launch"),
        contention=contention_of(device, imposed),
        weight_gradient=1.0 if imposed.ideal else weight_gradient(table),
        cast_traffic=0.0 if imposed.ideal else cast_bytes(dtype),
        recast_traffic=0.0,
        family=family,
        assumptions=tuple(notes),
        attention_blocks=AttentionBlocks() if imposed.ideal else AttentionBlocks.stated(attention),
        bandwidth_shares=BandwidthShares()
        if imposed.ideal or imposed.memory or imposed.memory_bytes_per_second
        else BandwidthShares.stated(memory, dtype),
        experts_in_turn=grouped.in_turn,
        cached_rate=_cached_rate(device, memory, imposed),
        row_rate=_cores(device, imposed) * memory.rows_per_second_per_core,
        wide=_wide(device, dtype, imposed, (node_busy, kernels[2])),
        vector_flops=_vector_flops(device, imposed),
    )


def _cached_rate(device: Device, memory: MemoryKernels, imposed: Efficiencies) -> float:
    """Return the bytes/s at which kernels find what they move in the last cache, 0 where that is not measured."""
    cores = _cores(device, imposed)
    return cores * memory.cached_bytes_per_second_per_core if cores and last_cache_bytes(device) else 0.0


def _cores(device: Device, imposed: Efficiencies) -> int:
    """Return the cores of a device, 0 where they are not known or the rates of memory are imposed."""
    imposes = imposed.ideal or imposed.memory or imposed.memory_bytes_per_second
    return device.num_cores if not imposes and device.knows("num_cores") else 0


def _vector_flops(device: Device, imposed: Efficiencies) -> Any:
    """Return the fp32 FLOP/s outside the matrix units, 0 where they are not known or nothing is lost."""
    if imposed.ideal or not device.knows("vector_flops"):
        return 0.0
    reached = device.achieved("flops.fp32")
    if reached:
        return leaf("FLOP/s without matrix units", min(float(reached.value), device.vector_flops), reached.source)
    return leaf("FLOP/s without matrix units", device.vector_flops, "datasheet of the device")


def _wide(device: Device, dtype: str, imposed: Efficiencies, run: tuple[bool, str]) -> GemmRates[Any] | None:
    """Return the rates of 16-bit GEMMs beside narrower ones; a rate that the user imposes is that of narrow ones.

    `run` says whether other devices of the node are busy, and the release of the library.
    """
    wide = attention_dtype(device, dtype)
    if wide == dtype:
        return None
    own = replace(imposed, matmul_flops_per_second=min(imposed.matmul_flops_per_second, device.peak_flops(wide)))
    row = derated_gemm(matmul_row(family_of(device), wide)[0], device, *run)
    return gemm_rates(device, wide, row, own)
