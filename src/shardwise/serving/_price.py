"""Seconds of single operators and messages as an engine runs them.

Kernels start from captured graphs, additions are fused into others, and all-reduces may be the engine's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.cost import (
    UNKNOWN_CORES,
    Chip,
    Rates,
    blend,
    costed_seconds,
    experts_seconds,
    kernel_seconds,
    one_query_seconds,
    reduce_seconds,
)
from shardwise.ledger.number import X, above, ceil, maximum, minimum, total
from shardwise.ledger.op import Collective, Op, within
from shardwise.ledger.traced import named
from shardwise.ops.experts import EXPERTS
from shardwise.ops.fold import Machine
from shardwise.serving._attention import AttentionKernels, cached_parts, cached_seconds, prompt_seconds
from shardwise.serving._engine import Engine, Kernels, lasting_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Server(Machine[X]):
    """A device that serves: `rates` of 16-bit products, `narrow` of those in `narrow_dtype`, kernels and engine.

    Widths are bytes of an element of activations and of the cache; `widened` are cached elements that all
    cores widen in a second, 0 where that takes no time.
    """

    narrow: Rates[X]
    narrow_dtype: str
    bandwidth: X
    peak: X
    narrow_peak: X
    experts_peak: X
    fused_experts: bool
    cores: float
    activation_width: float
    cache_width: float
    kernels: Kernels
    engine: Engine
    decoding: bool
    starts: float = 1.0
    widened: float = 0.0
    attention: AttentionKernels | None = None

    def message(self, c: Collective[X]) -> X:
        """Return seconds of one message; inside the fastest tier all-reduces take the engine's own kernels."""
        seconds = Machine.message(self, c)
        own = self.kernels.all_reduce
        if c.verb != "all_reduce" or own is None:
            return seconds
        group, rate = self.spans[c.axis], self.network.links[0].nominal_bytes_per_second
        inside = above(group[-1], group[0], seconds, reduce_seconds(own, rate, c.size_bytes, group[-1]))
        return above(c.size_bytes, 0, inside, 0 * inside)


def _rates(m: Server[X], op: Op[X]) -> Rates[X]:
    return m.narrow if op.dtype == m.narrow_dtype else m.rates


def _chip(m: Server[X]) -> Chip[X]:
    """Return what attention kernels are shares of; `UNKNOWN_CORES` stand for cores that are not known.

    A step reads the weights of every layer between two visits to a layer's keys and values: unlike the tables, which
    run one kernel again and again, it finds none of them in the last cache. Those of a prompt were just written.
    """
    cores = m.cores if m.cores > 1 else UNKNOWN_CORES
    cached = 0.0 if m.decoding else m.kernels.last_cache
    return Chip(flops=m.peak, bytes_per_second=m.bandwidth, cores=cores, cached_bytes=cached)


def _attention(m: Server[X], op: Op[X]) -> X:
    """Return seconds of one decode attention kernel (accuracy/notes/calibration.md).

    A work item is one key-value head of one sequence; what is not cache are the queries and the output.
    """
    if m.attention and op.role == "attention" and not m.kernels.head_bytes_per_second:
        return cached_seconds(m.attention, _chip(m), op)
    edges = m.activation_width * op.rows * op.batch * op.inner
    cache = maximum(op.forward_bytes - edges, 1.0)
    if m.rates.blocks.keys:
        return one_query_seconds(m.rates.blocks, op.flops, cache, (m.peak, m.bandwidth))
    if m.kernels.decode is None:
        worked = maximum((cache + edges) / m.rates.memory_bytes, op.flops / m.rates.attention_forward_flops)
        return worked + m.rates.attention_start
    shared = costed_seconds(m.kernels.decode, cached_parts(_chip(m), op, op.inner, (m.cache_width, m.activation_width)))
    if not m.kernels.head_bytes_per_second:
        return shared
    # Two FLOPs for each element that a query head reads: of all heads together more than the cache holds. What bounds
    # them counts elements, not bytes: 8-bit ones are widened by the core that reads them.
    elements = op.flops / 2
    read = elements * m.cache_width
    alone = maximum(shared, _spread(m, op, elements) * 2 / m.kernels.head_bytes_per_second)
    if m.kernels.unsplit_bytes_per_second:
        whole = maximum(alone, read / (m.kernels.unsplit_bytes_per_second * m.cores))
        alone = above(op.rows * op.batch, m.engine.unsplit_items, whole, alone)
    if m.widened:
        alone, shared = maximum(alone, elements / m.widened), maximum(shared, cache / m.cache_width / m.widened)
    group, shares = read / cache, m.engine.sharing_heads
    return above(group, shares - 0.5, above(group, shares + 0.5, alone, shared), alone)


def _spread(m: Server[X], op: Op[X], elements: X) -> X:
    """Return the cached elements that the busiest core reads: whole heads of sequences where no context is cut."""
    heads = op.rows * op.batch
    return elements / heads * ceil(heads / m.cores) if m.engine.uncut else elements / m.cores


def _experts(m: Server[X], op: Op[X]) -> X:
    """Return seconds of one product over the experts that got a token (accuracy/notes/calibration.md)."""
    narrow = op.dtype == m.narrow_dtype and m.narrow is not m.rates
    c, peak = (m.kernels.experts_narrow, m.narrow_peak) if narrow else (m.kernels.experts_wide, m.experts_peak)
    chip = Chip(flops=peak, bytes_per_second=m.bandwidth, cores=m.cores)
    hit = op.batch + 0 * op.rows
    return experts_seconds(c, chip, op.forward_bytes, (op.rows * hit, hit, op.columns, op.inner))


def _product(m: Server[X], op: Op[X]) -> X:
    """Return seconds of a matrix product; up to 64 rows, kernels with tiles of 16 rows compete with the large tiles.

    Such kernels (split-k, GEMV and 16-row MMA tiles: Marlin arXiv:2408.11743) spread over all cores whatever the shape.
    """
    rates = _rates(m, op)
    large = kernel_seconds(rates, op, "forward")
    charged = 2 * 16 * ceil(op.rows / 16) * op.columns * op.inner * op.batch
    small = blend(charged / rates.matmul_flops, op.forward_bytes / rates.matmul_bytes, rates.sharpness)
    if m.kernels.thin_bytes_per_second:
        loaded = op.forward_bytes / (m.kernels.thin_bytes_per_second * m.cores)
        small = maximum(small, loaded)
        # More rows read no less.
        large = above(op.rows, 8, maximum(large, loaded + rates.matmul_start), small + rates.matmul_start)
    if m.engine.activation_bytes > 2:
        # Cast to 16 bits on the way in, back on the way out.
        moved = (2 + m.engine.activation_bytes) * op.rows * (op.columns + op.inner) * op.batch
        casts = moved / (m.rates.memory_bytes * m.kernels.cached_rate)
        large = large + above(op.rows, m.engine.dequantise_rows, casts, 0 * large)
    if m.engine.dequantise_rows and op.weights:
        large = large + above(op.rows, m.engine.dequantise_rows, _written_out(m, op), 0 * large)
    return above(op.rows, 64, large, minimum(large, small + rates.matmul_start))


def _apart(m: Server[X], op: Op[X]) -> tuple[Op[X], ...]:
    """Return the products that an engine runs for one of the ledger, each of which reads the input again."""
    if op.role not in m.engine.apart or len(op.parts) < 2:
        return (op,)
    given = m.activation_width * op.rows * op.inner * op.batch
    rest = op.forward_bytes - given
    shares = [(part, part / op.columns) for part in op.parts]
    return tuple(
        replace(op, columns=part, flops=share * op.flops, forward_bytes=given + share * rest) for part, share in shares
    )


def _written_out(m: Server[X], op: Op[X]) -> X:
    """Return seconds to read the weights of a product and write them in 16 bits, 0 where they are that wide."""
    elements = op.columns * op.inner * op.batch
    held = op.forward_bytes - m.activation_width * op.rows * (op.columns + op.inner) * op.batch
    seconds = (held + 2 * elements) / m.rates.memory_bytes + m.rates.memory_start
    return above(held / elements, 1.5, 0 * seconds, seconds)


# What fused experts do beside their two products: the tables of experts hold it (calls from tokens to summed outputs).
def _in_experts(op: Op[X]) -> bool:
    return op.role in ("dispatch", "combine") or (op.role == "activation" and within(op.region, EXPERTS))


def _charged_elsewhere(m: Server[X], op: Op[X]) -> bool:
    """Return whether an operator takes no time of its own, since it runs none or the tables of another hold it.

    The calls that the tables of attention time also write the cache (accuracy/notes/causes.md).
    """
    measured = m.attention or (m.decoding and m.kernels.decode and not m.rates.blocks.keys)
    if op.role in m.engine.in_attention and measured:
        return True
    return op.kind == "none" or op.kernels == 0 or (m.fused_experts and _in_experts(op))


def op_seconds(m: Server[X], op: Op[X]) -> X:
    """Return seconds of one operator's forward pass in an engine, without its messages."""
    if _charged_elsewhere(m, op):
        return 0 * op.forward_bytes
    if op.role in m.engine.fused:
        seconds = op.forward_bytes / m.rates.memory_bytes
    elif op.kind == "attention" and m.decoding:
        seconds = _attention(m, op)
    elif op.role == "attention" and op.kind == "attention" and m.attention:
        seconds = prompt_seconds(m.attention, _chip(m), op)
    elif op.kind == "grouped":
        seconds = kernel_seconds(m.rates, op, "forward") if m.rates.experts_in_turn else _experts(m, op)
    elif op.kind == "matmul":
        seconds = total((_product(m, one) for one in _apart(m, op)), 0 * op.forward_bytes)
    elif op.role == "softmax":
        # The ledger's softmax reads and writes a score in 16 bits once.
        seconds = op.forward_bytes / 4 * m.engine.score_bytes / m.rates.memory_bytes + op.kernels * m.rates.memory_start
    else:
        seconds = kernel_seconds(m.rates, op, "forward")
        if m.engine.activation_bytes > 2 and op.kind == "memory":
            wider = (m.engine.activation_bytes / 2 - 1) * op.forward_bytes
            seconds = seconds + wider / (m.rates.memory_bytes * m.kernels.cached_rate)
    return named(seconds, op.name)


def captured(rates: Rates[X], engine: Engine, ideal: bool, replay: float) -> Rates[X]:
    """Return rates whose small kernels start as in the engine: from a captured graph, not from Python.

    No kernel of a graph takes less than `replay` seconds.
    """
    if not engine.small_kernel_seconds:
        return rates
    zero = 0 * rates.memory_start
    started = zero + (0.0 if ideal else 1.0) * max(engine.small_kernel_seconds, replay)
    start = rates.matmul_start if ideal else maximum(rates.matmul_start, replay)
    streamed = rates.matmul_bytes * (1.0 if ideal else lasting_memory(rates.family))
    return replace(
        rates, memory_start=started, launch=zero, cast_traffic=0.0, matmul_bytes=streamed, matmul_start=start
    )
