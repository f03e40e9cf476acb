"""Rows of kernel tables: GEMMs, experts, and what all tables share.

A row is one kernel that was timed alone. It is priced by the forms and constants that price training and serving
(accuracy/notes/calibration.md), for the shape that the row states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from accuracy.kernels.routing import check, tiled, timed_rows
from accuracy.kernels.streaming import read_share
from accuracy.kernels.tables import (
    ENGINES,
    copies,
    engine_word,
    host_seconds,
    maxima_seconds,
    measured_on_table,
    tables,
    walked_bytes,
)
from accuracy.kernels.ticks import Ticks, ticks_of
from accuracy.kernels.types import types_of
from shardwise.cost import (
    Datasheet,
    Efficiencies,
    ExpertsFit,
    Gemm,
    Quantise,
    Tiles,
    bandwidth_of,
    constants,
    experts_seconds,
    family_of,
    family_with,
    gemm_rates,
    gemm_seconds,
    last_cache_bytes,
    mapped_seconds,
    matmul_row,
    others_seconds,
    tile_rows,
)
from shardwise.hardware import Device
from shardwise.ledger.number import X, maximum
from shardwise.measured import Context, Prediction, Record, refuse

# Tables of engines replay captured graphs at the highest clock (aiconfigurator's collector).
AT_HIGHEST_CLOCK: dict[str, Any] = {"steady_state_share": 1.0, "steady_state_by_device": {}}
_NONE = Efficiencies()
Seconds = Callable[[Record, Device], float]


def kernel_answer(seconds: Seconds, table: str) -> Callable[[Record, Context], Prediction]:
    """Return the predictor of a table of kernels."""

    def predict(record: Record, context: Context) -> Prediction:
        record = Record({**record.row, "engine": engine_word(record.text("engine"))})
        named = record.text("device")
        taken = measured_on_table(table, record.text("engine"), named)
        if taken:
            record.assume(f"kernels of {named}: taken on {taken}, whose table this is")
        device, notes = context.device(taken or named)
        alone, ticks = seconds(record, device), _ticks(record, table, device)
        if ticks.seconds:
            record.assume(f"timing: replays of one graph that begin on ticks of {1e6 * ticks.seconds:.3f} us")
        stated = ticks.stated(alone)
        return Prediction(value=float(stated), assumed=(*notes, *record.assumed), family=_type(record))

    return predict


def _ticks(record: Record, table: str, device: Device) -> Ticks:
    """Return how the table of a row times kernels."""
    dtype, weight = record.text("dtype"), 0.0
    if table == "gemm" and dtype in types_of("products"):
        weight = types_of("products")[dtype].weight_bytes * record.positive("n") * record.positive("k")
    return ticks_of(table, record.text("engine"), device, dtype, weight)


def _type(record: Record) -> str:
    return record.text("dtype") or record.text("kv_dtype") or record.text("mla_dtype") or "-"


def datasheet_of(device: Device, dtype: str) -> Datasheet[float]:
    """Return what constants of kernels are shares of."""
    if dtype == "bf16" and dtype not in device.matrix_flops:
        dtype = "fp16"
    return Datasheet(
        flops=device.peak_flops(dtype),
        bytes_per_second=bandwidth_of(device),
        cores=float(device.cores),
        cached_bytes=last_cache_bytes(device),
    )


def engine_in(record: Record, table: Mapping[str, Any]) -> str:
    """Return the engine of a row among those of a table; what stands in for another is said."""
    engine = ENGINES.get(record.text("engine"), record.text("engine"))
    if engine in table:
        return engine
    nearest = tables()["nearest"].get(engine, "vllm")
    near = next((name for name in (nearest, "vllm") if name in table), next(iter(table)))
    record.assume(f"kernels of {engine or 'an engine that is not stated'}: those of {near}")
    return near


def measured_family(record: Record, device: Device, kind: str) -> str:
    """Return the family whose kernels of a kind a row takes: what stands in for the device's own is said."""
    own = family_of(device)
    found = family_with(kind, own)
    if found != own:
        record.assume(f"kernels of {own}: those of {found}")
    return found


def product(record: Record, device: Device) -> float:
    """Return seconds of one GEMM, its input quantised where the table's type does so."""
    m, n, k = (record.positive(word) for word in "mnk")
    dtype, engine = record.text("dtype"), record.text("engine")
    called = host_seconds(engine, dtype, device.name, (m, n, k))
    if not called:
        held = cached_share(device, ENGINES.get(engine, ""), dtype, (m, n, k))
        return timed(record, device, dtype, (m, n, k, 1.0), held)
    record.assume(f"{engine} in {dtype}: called from the host one by one")
    kernels = tables()["called"][f"{engine}-{dtype}"]["kernels"]
    return max(called, timed(Record({**record.row, "engine": kernels}), device, dtype, (m, n, k, 1.0)))


def cached_share(device: Device, engine: str, dtype: str, shape: tuple[float, float, float]) -> float:
    """Return the share of the seconds of reading weights that a table's copies of them leave to the last cache.

    The shape is (m, n, k).

    >>> from shardwise.hardware import find_device
    >>> cached_share(find_device("h100-sxm-80gb").device, "vllm", "bf16", (1.0, 65536.0, 65536.0))
    0.0
    """
    kept, (m, n, k) = last_cache_bytes(device), shape
    values = types_of("products").get(dtype)
    if values is None or not kept:
        return 0.0
    walked = walked_bytes(engine, dtype, values.weight_bytes * n * k, 2 * m * (n + k), kept)
    return 1 - read_share(device, walked)


def timed(
    record: Record, device: Device, dtype: str, shape: tuple[float, float, float, float], held: float = 0.0
) -> float:
    """Return seconds of a batch of GEMMs of a type as a table times them; the shape is (m, n, k, batch).

    `held` is the share of the seconds of its weights that a cache saves, where they are not read from memory.
    """
    if dtype not in types_of("products"):
        raise refuse("dtype", dtype, "is not a type of GEMMs that is modelled")
    values = types_of("products")[dtype]
    m, _, k, _ = shape
    family = family_of(device)
    name = values.row if values.row in constants().families[family].matmul else values.peak
    row, note = matmul_row(family, name)
    if note:
        record.assume(note)
    engine = ENGINES.get(record.text("engine"), record.text("engine"))
    if engine in ENGINES.values():
        row = replayed(replace(row, **row.engines.get(engine, {})), device, engine, dtype, shape)
    elif row.steady_state_share != 1:
        record.assume("clocks of lasting runs: only the tables of engines were taken at the highest clock")
    rates = gemm_rates(device, values.peak, row, _NONE, engine)
    seconds = gemm_seconds(rates, shape, moved_bytes(dtype, shape, held))
    if row.quantise and name != "bf16":
        q = row.quantise[engine_in(record, row.quantise)]
        seconds += quantise_seconds(q, device, (m, k), maxima_seconds(engine, dtype, family, m))
    return float(seconds)


def replayed(row: Gemm, device: Device, engine: str, dtype: str, shape: tuple[Any, ...]) -> Gemm:
    """Return a row of constants as a table of an engine times it: at the highest clock, replayed a few dozen times."""
    kept, weight = last_cache_bytes(device), types_of("products")[dtype].weight_bytes
    left = row.unset_left if dtype in tables()["copies"][engine].get("unset", ()) else 1.0
    launches = tables()["ticks"]["usual"] * copies(engine, dtype, weight * shape[1] * shape[2], kept)
    return replace(row, **AT_HIGHEST_CLOCK, launches=launches, burst_left=left)


def moved_bytes(dtype: str, shape: tuple[Any, Any, Any, Any], held: Any) -> Any:
    """Return bytes that a batch of GEMMs reads and writes; `held` is the share of the weights that a cache saves.

    >>> moved_bytes("fp8", (16.0, 64.0, 32.0, 1.0), 0.0)
    4608.0
    """
    values, (m, n, k, batch) = types_of("products")[dtype], shape
    read = values.weight_bytes * (1 - held) * n * k + values.input_bytes * m * k
    return batch * (read + max(values.input_bytes, 2.0) * m * n)


def quantise_seconds(q: Quantise, device: Device, size: tuple[X, X], in_turn: X) -> X:
    """Return seconds of quantising an input of (m, k) values of 16 bits, and the seconds that its rows take in turn."""
    m, k = size
    streamed = 3 * m * k / (q.efficiency * bandwidth_of(device))
    return q.start_seconds + maximum(streamed, in_turn)


def type_in(record: Record, table: Mapping[str, Any], label: str) -> str:
    """Return the type of values of a row among those of a table; the nearest that stands in for another is said."""
    near = next((k for k in (label, label.split("-")[0], "bf16") if k in table), next(iter(table)))
    if near != label:
        record.assume(f"{label}: constants of {near}")
    return near


def ungated(kernel: str, version: str, inner: float, top_k: float, count: float) -> bool:
    """Return whether experts were measured without a gate, by their kernel or by the model that has such experts."""
    taken = tables()["experts"]
    plain = [inner, top_k, count] in taken["ungated"] and version not in taken["gated_versions"]
    return "nongated" in kernel or plain


def expert_reads(device: Device, weights: float, beside: float) -> float:
    """Return seconds of reading weights over those from memory: calls of a table use the same, one after another."""
    return read_share(device, weights + beside)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """What one rank of a fused layer of experts runs: numbers of one row, or columns of a table.

    The ranks that share the experts, its experts, those hit, their rows, rows of other ranks, rows of a tile and how
    many tiles run, the width of a token, of the first GEMM's output and of the second's input, and the bytes of a
    weight, fewer where the last cache holds it.
    """

    ranks: Any
    held: Any
    hit: Any
    rows: Any
    others: Any
    tile: Any
    tiles: Any
    hidden: Any
    up: Any
    down: Any
    weight_bytes: Any


def tile_steps(kernel: str) -> tuple[float, ...]:
    """Return the tokens beyond which the tiles of a kernel of experts have twice the rows, none if that is not known.

    >>> tile_steps("moe_torch_flow")
    ()
    """
    return tuple(tables()["experts"]["tile_steps"].get(kernel, ()))


def fused_of(record: Record, device: Device, steps: tuple[float, ...] = ()) -> Fused:
    """Return what a row of a table of experts ran on its device, in tiles of the rows that `steps` give."""
    dtype, kernel = record.text("dtype"), record.text("kernel")
    if dtype not in types_of("experts"):
        raise refuse("dtype", dtype, "is not a type of experts that is modelled")
    names = ("num_tokens", "hidden_size", "intermediate_size", "top_k", "num_experts")
    T, D, inner, k, E = (record.positive(name) for name in names)
    tp, ep = record.count("moe_tp"), record.count("moe_ep")
    version, routing = record.text("engine_version"), record.text("routing")
    check(routing, k, E, ep)
    hit, rows, others = timed_rows(kernel, version, routing, (T, k, E, ep))
    width, F = types_of("experts")[dtype].weight_bytes, inner / tp
    up = (1 if ungated(kernel, version, inner, k, E) else 2) * F
    width *= expert_reads(device, width * hit * D * (up + F), 2 * rows * (2 * D + up + F))
    tile = tile_rows(steps, T)
    return Fused(
        ranks=ep, held=E / ep, hit=hit, rows=rows, others=others, tile=tile, tiles=tiled(routing, (T, k, E, ep), tile),
        hidden=D, up=up, down=F, weight_bytes=width,
    )  # fmt: skip


def fused_seconds(c: ExpertsFit, chip: Datasheet[Any], f: Fused) -> Any:
    """Return seconds of a fused layer of experts: two GEMMs over the experts that got a token."""

    def one(n: Any, k: Any) -> Any:
        moved = f.weight_bytes * f.hit * n * k + 2 * f.rows * (n + k)
        return experts_seconds(c, chip, moved, (f.rows, f.held, f.hit, n, k), Tiles(rows=f.tile, count=f.tiles))

    apart = others_seconds(c, chip, f.others, f.hidden + f.up) + mapped_seconds(c, f.ranks)
    return one(f.up, f.hidden) + one(f.hidden, f.down) + apart


def experts(record: Record, device: Device) -> float:
    """Return seconds of a fused layer of experts on one rank, by the constants of its kernel or of one like it."""
    dtype, kernel, ran = record.text("dtype"), record.text("kernel"), fused_of(record, device)
    engines = constants().families[measured_family(record, device, "experts")].experts
    table = engines[engine_in(record, engines)]
    by_kernel = table[type_in(record, table, dtype)]
    row = by_kernel.get(kernel)
    if row is None:
        same = {
            n: r for n, r in by_kernel.items() if n.endswith("nongated") == kernel.endswith("nongated")
        } or by_kernel
        name = max(same, key=lambda n: same[n].rows)
        record.assume(f"kernel {kernel or 'not stated'}: constants of {name}")
        row = same[name]
    if row.tile_steps:
        ran = fused_of(record, device, row.tile_steps)
    return float(fused_seconds(row, datasheet_of(device, types_of("experts")[dtype].peak), ran))
