"""Seconds of one operator: a smooth roofline over tiles, waves and kernel starts.

Form of docs/formulas.md: ((compute)^q + (memory)^q)^(1/q) + start, where compute charges whole tiles in whole waves of
cores, or shares cut along k. Roofline: Williams, Waterman, Patterson 2009. Constants with residuals: constants.toml.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, cast

from shardwise.cost._rates import WIDE_DTYPES, GemmRates, Rates
from shardwise.cost._tables import constants
from shardwise.cost._tiles import Tiling, blocked_flops, kind_of
from shardwise.ledger.number import X, array_library, evaluate, is_plain, maximum, minimum, register, total
from shardwise.ledger.op import Op
from shardwise.ledger.traced import named
from shardwise.records import dataclass

SPLITS = (1, 3, 9, 27)
"""Into how many parts the inner dimension may be cut; parts between these gain nothing that the tables show."""
_WHOLE = SPLITS[0]
# Products of a column up to which all tiles and cuts are looked at at once: more would not stay in the cache.
_FEW = 1536


def _chain(t: Tiling, rows: Any) -> Any:
    """Return FLOPs of the time in which a tile waits for the loads of one k; one row (`rows` 0) waits a share of it."""
    return t.chain_flops * (t.vector_wait_share + (1 - t.vector_wait_share) * rows)


def _cut(sqrt: Any, chain: Any, shape: tuple[Any, ...], t: Tiling, wave: Any, parts: Any) -> Any:
    """Return FLOPs charged when a GEMM runs in tiles on waves of cores, its inner dimension in so many parts.

    `wave` is what the waves are charged for one k. A tile waits for its loads one after the other; parts are joined.
    """
    m, n, k, batch = shape
    charged = sqrt(wave * wave + chain * chain) * (k / parts) + wave * t.depth
    if parts is _WHOLE:
        return charged
    return charged + t.split_flops + t.join_flops * parts * (m * n * batch)


def _charged(maths: Any, least: Any, waves: Callable[[Any, int], Any], shape: tuple[Any, ...], t: Tiling) -> Any:
    """Return FLOPs charged for a GEMM, the best of the tiles and cuts: waves waste what the last one leaves idle."""
    m, n, k, batch = shape
    if not t.cores:
        return 2 * m * n * (k + t.depth) * batch
    down = {height: maths.ceil(m / height) for height in {tile[0] for tile in t.tiles}}
    across = {width: maths.ceil(n / width) * (batch / t.cores) for width in {tile[1] for tile in t.tiles}}
    tiles = [(down[height] * across[width], charge) for height, width, charge in t.tiles]
    chain, best = _chain(t, least(m - 1, 1)), math.inf
    for parts in SPLITS:
        best = least(best, _cut(maths.sqrt, chain, shape, t, waves(tiles, parts), parts))
    return best


def _waves_plainly(tiles: list[tuple[float, float]], parts: int) -> float:
    return min([math.ceil(count * parts) * charge for count, charge in tiles])


def _waves_of_columns(tiles: list[tuple[Any, Any]], parts: int) -> Any:
    numpy, least = array_library(), math.inf
    for count, charge in tiles:
        least = numpy.minimum(least, numpy.ceil(count * parts) * charge)
    return least


# Layers of a model, passes and plans that differ in little else multiply the same shapes.
@lru_cache(maxsize=4096)
def _charged_plainly(*shape: Any) -> Any:
    return _charged(math, min, _waves_plainly, shape[:-1], shape[-1])


@lru_cache(maxsize=64)
def _tiles(tiles: tuple[tuple[int, int, float], ...]) -> tuple[Any, ...]:
    """Return the distinct heights and widths of tiles, where each tile has its own among them, and their charges."""
    numpy = array_library()
    heights, widths = (list(dict.fromkeys(tile[side] for tile in tiles)) for side in (0, 1))
    places = [[heights.index(a) for a, *_ in tiles], [widths.index(b) for _, b, _ in tiles]]
    sizes = (numpy.array(one, float)[:, None] for one in (heights, widths, [charge for *_, charge in tiles]))
    return *sizes, *map(numpy.array, places)


def _charged_column(*shape: Any) -> Any:
    """Return FLOPs charged for columns of GEMMs; of few, all tiles and cuts are looked at at once."""
    numpy, (*sizes, t) = array_library(), shape
    if t.cores and max(map(numpy.ndim, sizes)) < 2 and max(map(numpy.size, sizes)) <= _FEW:
        m, n, k, batch = sizes
        return _charged_few(m, n, k, batch, t)
    return _charged(numpy, numpy.minimum, _waves_of_columns, tuple(sizes), t)


def _charged_few(m: Any, n: Any, k: Any, batch: Any, t: Tiling) -> Any:
    numpy, shape, seconds = array_library(), (m, n, k, batch), []
    heights, widths, charges, down, across = _tiles(t.tiles)
    counts = numpy.ceil(m / heights).take(down, 0) * (numpy.ceil(n / widths) * (batch / t.cores)).take(across, 0)
    chain = _chain(t, numpy.minimum(m - 1, 1))
    several = numpy.array(SPLITS[1:], float)[:, None]
    for parts, waves in ((_WHOLE, counts), (several, counts * several[..., None])):
        wave = (numpy.ceil(waves) * charges).min(axis=-2)
        seconds.append(_cut(numpy.sqrt, chain, shape, t, wave, parts))
    return numpy.minimum(seconds[0], seconds[1].min(axis=0))


def _smooth(largest: Callable[[Any, Any], Any], a: Any, b: Any, sharpness: float) -> Any:
    """Return (a^q + b^q)^(1/q), scaled by the larger so that nothing underflows."""
    low = largest(largest(a, b), 1e-30)
    return low * ((a / low) ** sharpness + (b / low) ** sharpness) ** (1 / sharpness)


def _smooth_column(a: Any, b: Any, sharpness: float) -> Any:
    return _smooth(array_library().maximum, a, b, sharpness)


register("smooth_max", lambda a, b, sharpness: _smooth(max, a, b, sharpness), _smooth_column)
register("tiled_flops", _charged_plainly, _charged_column, Tiling)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSeconds(Generic[X]):
    """Seconds of compute of one operator by pass, without messages."""

    forward: X
    backward_input: X
    backward_weight: X


def blend(compute: X, memory: X, sharpness: float) -> X:
    """Return a smooth maximum of compute and memory time; never below the larger, which it is where all is ideal.

    >>> round(blend(3.0, 4.0, 2.0), 6), blend(3.0, 4.0, math.inf)
    (5.0, 4.0)
    """
    if sharpness == math.inf:
        return maximum(compute, memory)
    return cast(X, evaluate("smooth_max", compute, memory, sharpness))


def gemm_seconds(rates: GemmRates[X], shape: tuple[X, X, X, X | float], moved: X) -> X:
    """Return seconds of a batch of (m, k) by (k, n) GEMMs that move so many bytes; the shape is (m, n, k, batch)."""
    (m, n, k, batch), s = shape, rates.corrections
    charged = named(cast(X, evaluate("tiled_flops", *shape, rates.tiling)), "FLOPs in whole tiles and waves")
    worked = charged / rates.matmul_flops
    if s.burst_share:
        short = worked / (1 + s.burst_share)
        worked = short * (1 + s.burst_left * s.burst_share * short / (short + s.burst_seconds))
    written, streamed = 2 * m * n * batch, moved
    if s.cached_bytes:
        cached_share = (1 - s.cached_share) * inside_share(moved / s.cached_bytes)
        cached_bytes = s.width * m * k * batch + (written if s.keeps_outputs else 0.0)
        streamed = maximum(moved - cached_share * cached_bytes, 0 * moved)
    if s.write_share:
        worked = worked + s.write_share * written / rates.matmul_bytes
    seconds = named(blend(worked, streamed / rates.matmul_bytes, rates.sharpness), "arithmetic and memory traffic")
    if rates.ramp_seconds:
        # Pipelines of loads fill and drain: nothing of it shows in a GEMM of few bytes, all in one of many.
        seconds = seconds + named(
            rates.ramp_seconds * streamed / (streamed + rates.ramp_traffic), "pipelined loads fill and drain"
        )
    return seconds + rates.matmul_start


def inside_share(full: X) -> X:
    """Return the share of bytes that are still in the last cache after so many of its sizes were walked through.

    Source: `last_cache` of priors.toml.

    >>> inside_share(0.5), round(inside_share(1.0), 6), inside_share(2.0), inside_share(math.inf)
    (1.0, 0.4, 0.0, 0.0)
    """
    bounds = constants().rules.last_cache
    every, nothing = bounds.every, bounds.nothing
    return minimum((nothing - minimum(full, nothing)) / (nothing - every), 1.0)


def matmul_seconds(rates: GemmRates[X], op: Op[X], moved: X, swap: str = "") -> X:
    """Return seconds of a GEMM; `swap` "input" or "weight" turns m, n, k to those of the gradients."""
    m, n, k = op.rows, op.columns, op.inner
    if swap == "input":
        n, k = k, n
    elif swap == "weight":
        m, n, k = k, n, m
    return gemm_seconds(rates, (m, n, k, op.batch), moved)


def _off_matrix_units(rates: Rates[X], op: Op[X], flops: X, seconds: X) -> X:
    """Return the seconds of a GEMM, at the rate of the vector units where it runs on those.

    Products of fp32 beside 16-bit ones do unless they are rounded to TF32, which torch leaves to its user. NVIDIA,
    Matrix Multiplication Background User's Guide, section 2.1: efficient use of tensor cores needs multiples of 16
    bytes, and before cuBLAS 11 any use. That batched GEMMs of attention in CUDA 11 did without them is what the
    steps of BLOOM say (accuracy/notes/causes.md), not the guide.
    """
    if not op.vector_units or is_plain(rates.vector_flops, 0):
        return seconds
    return maximum(seconds, named(flops / rates.vector_flops, "GEMM without matrix units"))


def _unaligned_seconds(rates: GemmRates[X], op: Op[X], seconds: X) -> X:
    """Return the seconds of a GEMM on the kernels of an older generation where its rows start between 16 bytes.

    Hopper's kernels load by TMA, whose strides are multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled).
    """
    slower = rates.corrections.unaligned
    if slower == 1 or is_plain(op.unaligned, 0):
        return seconds
    return seconds * named(1 + (slower - 1) * op.unaligned, "kernels for unaligned rows")


def _apart_seconds(rates: GemmRates[X], op: Op[X], moved: X, which: str) -> X:
    """Return the seconds of GEMMs of one input that run one by one, each with its part of the columns."""
    m, k, width = op.rows, op.inner, rates.corrections.width
    seconds = []
    for n in op.parts:
        shape = {"forward": (m, n, k, 1), "input": (m, k, n, 1), "weight": (k, n, m, 1)}[which]
        share = n / op.columns
        # Each reads the input, or writes its gradient, whole.
        seconds.append(gemm_seconds(rates, shape, moved * share + width * (m * k) * (1 - share)))
    return total(seconds, 0 * moved)


_FULL_HEAD = 128.0
# Products of experts wait for both their weights and their arithmetic: each is short (SimuMax B200 system file).
_GROUPED_SHARPNESS = 2.0


# FLOPs and bytes of each pass.
_WORK = {
    "forward": attrgetter("flops", "forward_bytes"),
    "input": attrgetter("backward_flops", "backward_bytes"),
    "weight": attrgetter("weight_flops", "weight_bytes"),
}


def kernel_seconds(rates: Rates[X], op: Op[X], which: str) -> X:
    """Return seconds of one pass of an operator: "forward", "input" (gradient) or "weight" (gradient)."""
    work: tuple[X, X] = _WORK[which](op)
    flops, moved = work
    if op.kind == "none" or is_plain(op.kernels, 0):
        return 0 * flops
    if op.kind == "matmul":
        return _gemm_pass(rates, op, which, flops, moved)
    if op.kind == "grouped":
        return _grouped_pass(rates, op, which, flops, moved)
    if op.kind == "attention":
        rate = rates.attention_forward_flops if which == "forward" else rates.attention_backward_flops
        if rates.pair_dims and op.region.endswith("core"):
            rate = rate * named(head_share(op.inner / 2, rates.pair_dims), "share of the rate of heads of 128")
        met = op.flops / (2 * op.rows * op.batch * op.inner)
        flops = blocked_flops(rates.attention_blocks, flops, (op.columns, met), which != "forward")
        worked, streamed = named(flops / rate, "arithmetic"), named(moved / rates.memory_bytes, "memory traffic")
        return _off_matrix_units(rates, op, flops, maximum(worked, streamed)) + rates.attention_start
    scan = flops / rates.grouped_flops if op.kind == "scan" else 0 * flops
    streamed = named(_streamed_seconds(rates, op, which, moved), "memory traffic")
    if rates.row_rate and not is_plain(op.row_blocks, 0):
        streamed = maximum(streamed, named(op.row_blocks / rates.row_rate, "a block of threads a row"))
    launches = named(op.kernels * rates.launch, "launches by the host")
    return maximum(scan, maximum(streamed, launches)) + named(op.kernels * rates.memory_start, "kernel start")


def cached_share(rates: Rates[X], op: Op[X], moved: X) -> X:
    """Return the share of what the kernels of an operator move that the last cache still holds of the one before."""
    if not rates.cached_rate or not rates.corrections.cached_bytes or op.kind not in ("memory", "scan"):
        return 0 * moved
    return inside_share(moved / (maximum(op.kernels, 1) * rates.corrections.cached_bytes))


def _streamed_seconds(rates: Rates[X], op: Op[X], which: str, moved: X) -> X:
    """Return seconds of kernels that only move bytes: those of what the last cache holds at the rate of the cache.

    A kernel reads what the one before it wrote; what was kept for backward comes from memory again.
    """
    streaming = rates.bandwidth_shares.rate(rates.memory_bytes, kind_of(op), which != "forward")
    if not rates.cached_rate or not rates.corrections.cached_bytes:
        return moved / streaming
    kept = total((s.size_bytes for s in op.saves), 0 * moved) if which != "forward" else 0 * moved
    near = maximum(moved - kept, 0 * moved) * cached_share(rates, op, moved)
    walked = named((moved - near) / streaming, "bytes from memory")
    return walked + named(near / rates.cached_rate, "bytes from the last cache")


def _gemm_pass(rates: Rates[X], op: Op[X], which: str, flops: X, moved: X) -> X:
    """Return seconds of one pass of a GEMM, with what casts its input or finishes its weight gradient."""
    if op.region.endswith("core") and which == "input":
        # Both operands are activations: two GEMMs, each the size of the forward one.
        return _off_matrix_units(rates, op, flops, 2 * matmul_seconds(rates, op, moved / 2, "input"))
    wide = rates.wide if rates.wide is not None and op.dtype in WIDE_DTYPES else None
    seconds = (
        _apart_seconds(wide or rates, op, moved, which) + _added(rates, op, which)
        if op.apart and not _is_ideal(rates)
        else matmul_seconds(wide or rates, op, moved, "" if which == "forward" else which)
    )
    seconds = _unaligned_seconds(wide or rates, op, seconds)
    if which != "weight":
        return _off_matrix_units(rates, op, flops, seconds if wide else seconds + _cast(rates, op, which))
    again = rates.casts.again if rates.casts and not wide else 0.0
    recast_seconds = again * (op.rows * (op.inner + op.columns)) / rates.memory_bytes
    return _off_matrix_units(rates, op, flops, seconds / rates.weight_gradient) + _finish(rates, op) + recast_seconds


def _grouped_pass(rates: Rates[X], op: Op[X], which: str, flops: X, moved: X) -> X:
    """Return seconds of one pass of the GEMMs of experts, in one kernel or one after the other."""
    share = {"forward": 1.0, "input": rates.grouped_gradients[0], "weight": rates.grouped_gradients[1]}[which]
    if rates.experts_in_turn:
        products = matmul_seconds(rates, op, moved, "" if which == "forward" else which)
        products = products + (op.batch - 1) * rates.matmul_start
    else:
        sharpness = rates.sharpness if _is_ideal(rates) else min(rates.sharpness, _GROUPED_SHARPNESS)
        products = blend(flops / (rates.grouped_flops * share), moved / rates.memory_bytes, sharpness)
        products = products + op.batch * rates.grouped_each + rates.grouped_start
        if which == "forward" and not _is_ideal(rates) and not is_plain(op.host_seconds, 0):
            # Behind the count of rows, for which the host has waited.
            products = maximum(products, named(op.host_seconds, "launches by the host"))
    products = _off_matrix_units(rates, op, flops, products)
    return products if which == "weight" else products + _cast(rates, op, which)


def _is_ideal(rates: Rates[X]) -> bool:
    """Return whether rates are those of an ideal device: nothing but the larger of arithmetic and bytes counts."""
    return rates.sharpness == math.inf


def head_share(dims: X, pair_dims: float) -> X:
    """Return the rate of attention with heads of so many values over that with heads of 128 or more.

    A pair of a query and a key costs an exponential beside its GEMMs, as much as the GEMMs of `pair_dims` values.

    >>> head_share(128, 182.0), round(head_share(64, 182.0), 2)
    (1.0, 0.63)
    """
    return minimum(dims * ((_FULL_HEAD + pair_dims) / _FULL_HEAD) / (dims + pair_dims), 1.0)


def _cast(rates: Rates[X], op: Op[X], which: str) -> X:
    """Return seconds to cast what enters a narrow GEMM: the input, or the gradient of the output."""
    if is_plain(rates.cast_traffic, 0) or which not in op.casts:
        return 0 * op.rows
    width = op.inner if which == "forward" else op.columns
    traffic = rates.casts.moved(op, which) if rates.casts else rates.cast_traffic
    return cast(X, traffic * (op.batch * op.rows * width) / rates.memory_bytes)


def _added(rates: Rates[X], op: Op[X], which: str) -> X | float:
    """Return the seconds of adding up the input gradients of GEMMs that ran apart, in 16 bits or wider."""
    if which != "input":
        return 0.0
    return op.apart * max(rates.corrections.width, 2.0) * (op.rows * op.inner) / rates.memory_bytes + rates.memory_start


def _finish(rates: Rates[X], op: Op[X]) -> X | float:
    """Return seconds of the kernels behind the GEMM of a weight gradient, where there are any."""
    if is_plain(op.finish_bytes, 0):
        return 0.0
    return op.finish_bytes / rates.memory_bytes + rates.memory_start


def op_seconds(rates: Rates[X], op: Op[X]) -> PassSeconds[X]:
    """Return seconds of every pass of an operator that has it, gradients that nothing asks for left out."""
    zero = 0 * op.forward_bytes
    two = op.kind in ("matmul", "grouped") and not op.region.endswith("core")
    has_weight_pass = two and bool(op.weights or op.weight_flops is not zero) and "weight" not in op.without
    forward, back = (kernel_seconds(rates, op, which) for which in ("forward", "input"))
    if not is_plain(op.widened_bytes, 0):
        widening = op.widened_bytes / rates.memory_bytes
        if not is_plain(op.decoding_flops, 0) and not is_plain(rates.vector_flops, 0):
            widening = maximum(widening, op.decoding_flops / rates.vector_flops)
        widened = named(widening + rates.memory_start, "dequantised weights")
        forward, back = forward + widened, back + widened
    return PassSeconds(
        forward=named(forward, f"{op.name}, forward"),
        backward_input=zero if "input" in op.without else named(back, f"{op.name}, input gradient"),
        backward_weight=named(kernel_seconds(rates, op, "weight"), f"{op.name}, weight gradient")
        if has_weight_pass
        else zero,
    )
