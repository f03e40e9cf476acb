"""What a device reaches: its datasheet peaks times fitted efficiencies, each with the source of the fit."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Generic

from shardwise.cost._casts import Casts
from shardwise.cost._imposed import Efficiencies, achieved_bytes, check_achieved, effective
from shardwise.cost._power import derated_attention, derated_gemm, power_share, steady_state_rate
from shardwise.cost._records import AttentionFit, DeviceFamily, Gemm, GroupedGemm, MemoryKernels
from shardwise.cost._tables import bandwidth_of, constants, family_of, last_cache_bytes, matmul_row
from shardwise.cost._tiles import ELEMENT_BYTES, AttentionBlocks, BandwidthShares, Tiling, tiling_of
from shardwise.hardware import Device
from shardwise.ledger.number import X
from shardwise.ledger.traced import leaf
from shardwise.records import dataclass, replace

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
    casts: Casts | None = None
    """The same in training, where a recipe of scales says more."""
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
    return Rates(
        **{f.name: getattr(products, f.name) for f in fields(products)},
        **_attention_rates(table, device, (dtype, kernels[0], node_busy), imposed),
        **_grouped_rates(grouped_by(table.grouped, kernels[1]), device, (family, dtype, row), imposed),
        **_memory_rates(table.memory, device, dtype, imposed),
        launch=leaf("launch", start * launch_seconds, "the stack's eager launch"),
        contention=contention_of(device, imposed),
        weight_gradient=1.0 if imposed.ideal else weight_gradient(table),
        cast_traffic=0.0 if imposed.ideal else cast_bytes(dtype),
        family=family,
        assumptions=tuple(notes),
        wide=_wide(device, dtype, imposed, (node_busy, kernels[2])),
        vector_flops=_vector_flops(device, imposed),
    )


def _attention_rates(
    table: DeviceFamily, device: Device, run: tuple[str, str, bool], imposed: Efficiencies
) -> dict[str, Any]:
    """Return the fields of `Rates` of attention; a `run` has a data type, a kernel and whether the node is busy."""
    dtype, kernel, node_busy = run
    row, peak = _attention(table, device, attention_dtype(device, dtype), kernel)
    row = derated_attention(row, device, node_busy)
    start = 0.0 if imposed.ideal else 1.0
    forward, backward = (effective(imposed, fitted, imposed.compute) for fitted in (row.forward, row.backward))
    return {
        "attention_forward_flops": leaf("attention forward FLOP/s", forward * peak, row.source),
        "attention_backward_flops": leaf("attention backward FLOP/s", backward * peak, row.source),
        "attention_start": leaf("attention start", start * row.start_seconds, row.source),
        "pair_dims": 0.0 if imposed.ideal else row.pair_dims,
        "attention_blocks": AttentionBlocks() if imposed.ideal else AttentionBlocks.stated(row),
    }


def _grouped_rates(
    grouped: GroupedGemm, device: Device, products: tuple[str, str, Gemm], imposed: Efficiencies
) -> dict[str, Any]:
    """Return the fields of `Rates` of grouped GEMMs; `products` are family, data type and row of the others."""
    family, dtype, row = products
    scale = relative(device, row, grouped.measured_on or device.chip)
    start = 0.0 if imposed.ideal else 1.0
    reached = effective(imposed, grouped.compute * narrowed(family, row) * scale, imposed.compute)
    return {
        "grouped_flops": leaf("grouped FLOP/s", reached * device.peak_flops(dtype), grouped.source),
        "grouped_gradients": (1.0, 1.0) if imposed.ideal else (grouped.input_gradient, grouped.weight_gradient),
        "grouped_start": leaf("grouped start", start * grouped.start_seconds, grouped.source),
        "grouped_each": leaf("start of one expert", start * grouped.each_seconds, grouped.source),
        "experts_in_turn": grouped.in_turn,
    }


def _memory_rates(memory: MemoryKernels, device: Device, dtype: str, imposed: Efficiencies) -> dict[str, Any]:
    """Return the fields of `Rates` of kernels that the memory bounds."""
    streamed = device.achieved("bytes_per_second")
    share = float(streamed.value) / bandwidth_of(device) if streamed else memory.efficiency
    stream = achieved_bytes(device, imposed, share)
    start = 0.0 if imposed.ideal else 1.0
    cores = 0 if imposed.imposes_memory or not device.knows("num_cores") else device.num_cores
    return {
        "memory_bytes": leaf("streaming HBM bytes/s", stream, streamed.source if streamed else memory.source),
        "memory_start": leaf("kernel start", start * memory.start_seconds, memory.source),
        "bandwidth_shares": BandwidthShares() if imposed.imposes_memory else BandwidthShares.stated(memory, dtype),
        "cached_rate": cores * memory.cached_bytes_per_second_per_core if cores and last_cache_bytes(device) else 0.0,
        "row_rate": cores * memory.rows_per_second_per_core,
    }


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
