"""Seconds of single operators and messages as an engine runs them, and the device and links that it runs on.

Kernels start from captured graphs, additions are fused into others, and all-reduces may be the engine's own.
"""

from __future__ import annotations

import re

from shardwise.cost import (
    Datasheet,
    ExpertsFit,
    Rates,
    bandwidth_of,
    blend,
    costed_seconds,
    kernel_seconds,
    network_of,
    one_query_seconds,
    rates_of,
    reduce_seconds,
    unlinked,
    with_peers,
)
from shardwise.ledger.number import X, above, ceil, is_plain, maximum, minimum, total
from shardwise.ledger.op import Collective, Op, within
from shardwise.ledger.traced import leaf, named
from shardwise.ops.experts import EXPERTS
from shardwise.ops.overlap import CostModel
from shardwise.records import dataclass, replace
from shardwise.serving._attention import attention_of, lone_heads
from shardwise.serving._beside import rows_beside
from shardwise.serving._block_tiles import in_tiles, tile_seconds
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import Engine
from shardwise.serving._experts import fused_seconds, most_choices, torch_choices, with_choice
from shardwise.serving._formats import WeightFormat
from shardwise.serving._integers import expanded, fp4_gains, integer_share, loaded_seconds, tiled_rows, weights_read
from shardwise.serving._kernels import (
    AttentionKernels,
    EngineKernels,
    cached_parts,
    cached_seconds,
    kernels_of,
    prompt_seconds,
)
from shardwise.serving._picked import PickedKernel, picked_kernel, with_indexer, with_picked
from shardwise.serving._rates import (
    engine_rates,
    merged_operators,
    scanned_flops,
    unpacked_weights,
    weight_only_rates,
    widened_elements,
)
from shardwise.serving._routers import RouterKernel, routed_seconds, router_kernel
from shardwise.serving._scans import chained_seconds
from shardwise.serving._sizes import ServingSizes, sizes_of
from shardwise.serving._unified import UnifiedKernel, unified_kernels, with_unified


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCostModel(CostModel[X]):
    """A device that serves: `rates` of 16-bit GEMMs, `narrow` of those in other types, kernels and engine.

    `narrow_dtype` is that of the format, in which experts are.

    Widths are bytes of an element of activations and of the cache; `widened` are cached elements that all
    cores widen in a second, 0 where that takes no time; `choices` are the experts of a token, 0 without any.
    """

    narrow: tuple[tuple[str, Rates[X]], ...]
    narrow_dtype: str
    format: WeightFormat
    bandwidth: X
    peak: X
    narrow_peak: X
    experts_peak: X
    fused_experts: bool
    torch_choices: tuple[bool, bool]
    choices: float
    cores: float
    activation_width: float
    cache_width: float
    kernels: EngineKernels
    engine: Engine
    decoding: bool
    starts: float = 1.0
    widened: float = 0.0
    integer_share: float = 0.0
    """Share of the 16-bit `peak` that GEMMs of many rows reach on narrow weights as they are, 0 where none run so."""
    fp4_gains: tuple[tuple[str, float], ...] = ()
    """How much faster than on integers GEMMs run on weights of a format of 4-bit floats."""
    merged: tuple[str, ...] = ()  # Operators that start no kernel of their own.
    scanned: float = 0.0
    """FLOP/s of recurrences that run token by token in prompts, 0 where they run in chunks."""
    unpacked: float = 0.0
    """Narrow weights a second that vector units widen, 0 where that takes no time."""
    weight_only: tuple[tuple[str, Rates[X]], ...] = ()
    """Rates of 16-bit GEMMs whose kernels widen weights, by the format of these, where such kernels were measured."""
    attention: AttentionKernels | None = None
    picked: PickedKernel | None = None
    unified: tuple[UnifiedKernel, ...] = ()  # By size of heads.
    block_tile: X | None = None  # `tile_seconds`
    router: RouterKernel | None = None
    beside_rows: float = 0.0
    """Tokens of a captured step up to which shared experts run beside routed ones."""
    processor: EngineCostModel[X] | None = None  # The host's, where it runs a part of the model.

    def message(self, message: Collective[X]) -> X:
        """Return seconds of one message; inside the fastest tier all-reduces take the engine's own kernels."""
        seconds = CostModel.message(self, message)
        own = self.kernels.all_reduce
        if message.verb != "all_reduce" or own is None:
            return seconds
        group, link = self.group_shapes[message.axis], self.network.links[0]
        wire, rate = link.wire("all_reduce"), link.nominal_bytes_per_second
        used: X | float = rate / unlinked(wire, group[-1]) if wire.peers else rate
        inside = above(group[-1], group[0], seconds, reduce_seconds(own, used, message.size_bytes, group[-1]))
        return above(message.size_bytes, 0, inside, 0 * inside)


def product_rates(costs: EngineCostModel[X], op: Op[X]) -> Rates[X]:
    """Return the rates of GEMMs in the type of an operator."""
    return next((rates for dtype, rates in costs.narrow if dtype == op.dtype), costs.rates)


def _chip(costs: EngineCostModel[X]) -> Datasheet[X]:
    """Return what attention kernels are shares of.

    A step reads the weights of every layer between two visits to a layer's keys and values: unlike the tables, which
    run one kernel again and again, it finds none of them in the last cache. Those of a prompt were just written.
    """
    cached = 0.0 if costs.decoding else costs.kernels.last_cache
    return Datasheet(flops=costs.peak, bytes_per_second=costs.bandwidth, cores=costs.cores, cached_bytes=cached)


def _decode_attention(costs: EngineCostModel[X], op: Op[X]) -> X:
    """Return seconds of one decode attention kernel (accuracy/notes/calibration.md).

    A work item is one key-value head of one sequence; what is not cache are the queries and the output.
    """
    if costs.attention and op.role == "attention" and not costs.kernels.head_bytes_per_second:
        return cached_seconds(costs.attention, _chip(costs), op)
    edges = costs.activation_width * op.rows * op.batch * op.inner
    cache = maximum(op.forward_bytes - edges, 1.0)
    if costs.rates.attention_blocks.cached_compute:
        return one_query_seconds(costs.rates.attention_blocks, op.flops, cache, (costs.peak, costs.bandwidth))
    if costs.kernels.decode is None:
        worked = maximum((cache + edges) / costs.rates.memory_bytes, op.flops / costs.rates.attention_forward_flops)
        return worked + costs.rates.attention_start
    shared = costed_seconds(
        costs.kernels.decode, cached_parts(_chip(costs), op, op.inner, (costs.cache_width, costs.activation_width))
    )
    if not costs.kernels.head_bytes_per_second:
        return shared
    # Two FLOPs for each element that a query head reads: of all heads together more than the cache holds. What bounds
    # them counts elements, not bytes: 8-bit ones are widened by the core that reads them.
    elements = op.flops / 2
    read = elements * costs.cache_width
    alone = maximum(shared, _spread(costs, op, elements) * 2 / costs.kernels.head_bytes_per_second)
    if costs.widened:
        alone, shared = (
            maximum(alone, elements / costs.widened),
            maximum(shared, cache / costs.cache_width / costs.widened),
        )
    group, shares = read / cache, costs.engine.attention.shared_query_heads
    return above(group, shares - 0.5, above(group, shares + 0.5, alone, shared), alone)


def _spread(costs: EngineCostModel[X], op: Op[X], elements: X) -> X:
    """Return the cached elements that the busiest core reads: whole heads of sequences where no context is cut."""
    heads = op.rows * op.batch
    return (
        elements / heads * ceil(heads / costs.cores)
        if costs.engine.attention.never_splits_kv
        else elements / costs.cores
    )


def _experts(costs: EngineCostModel[X], op: Op[X]) -> X:
    """Return seconds of one GEMM over the experts that got a token (accuracy/notes/calibration.md)."""
    if costs.engine.operators.experts == "products":
        if is_plain(costs.integer_share, 0):
            return _product(costs, replace(op, kind="matmul"))
        return _product(costs, replace(op, kind="matmul", rows=tiled_rows(costs, op.rows)), op.rows)
    kernels, groups = costs.kernels, costs.group_shapes
    ranks = groups["ep"][-1] + 0 * op.rows

    def fused(row: ExpertsFit, peak: X) -> X:
        chip = Datasheet(flops=peak, bytes_per_second=costs.bandwidth, cores=costs.cores)
        return fused_seconds(row, chip, op, (ranks, groups["tp"][-1] + 0 * op.rows), costs.choices)

    if op.dtype != costs.narrow_dtype or op.dtype not in (dtype for dtype, _ in costs.narrow):
        return fused(kernels.experts_wide, costs.experts_peak)
    seconds, alone = fused(kernels.experts_narrow, costs.narrow_peak), kernels.experts_unspread
    if alone is None:
        return seconds
    split = above(groups["tp"][-1], kernels.unspread_ranks - 1, fused(alone, costs.narrow_peak), seconds)
    return above(ranks, 1, seconds, split)


def _product(costs: EngineCostModel[X], op: Op[X], tokens: X | None = None) -> X:
    """Return seconds of a GEMM, in integers where its weights are narrow; `tokens` are its rows if `op` has tiles."""
    form = next(filter(None, map(costs.format.of, op.weights)), None)
    rates = next((own for name, own in costs.weight_only if form and name == form.name), product_rates(costs, op))
    if costs.block_tile is not None and form and form.name == costs.format.name:
        return in_tiles(costs.engine, (costs.block_tile, costs.cores), op, _multiplied(costs, op, rates))
    if is_plain(costs.integer_share, 0) or not form or form.bits >= 16:
        return _multiplied(costs, op, rates)
    # Eight rows and fewer run in a kernel that multiplies in no matrix unit.
    gain, read = dict(costs.fp4_gains).get(form.base, 1.0), weights_read(costs, op)
    fast = replace(rates, matmul_flops=gain * costs.integer_share * costs.peak)
    multiplied = _multiplied(costs, replace(op, forward_bytes=op.forward_bytes - read), fast)
    loaded = loaded_seconds(costs, read, op, op.rows if tokens is None else tokens)
    return above(op.rows, 8, multiplied + loaded, _multiplied(costs, op, rates))


def _multiplied(costs: EngineCostModel[X], op: Op[X], rates: Rates[X]) -> X:
    """Return seconds of a GEMM at some rates; for few rows, kernels with tiles of 16 rows compete with the large tiles.

    Such kernels (split-k, GEMV and 16-row MMA tiles: Marlin arXiv:2408.11743) spread over all cores whatever the shape.
    """
    large = kernel_seconds(rates, op, "forward")
    small = _few_rows(costs, op, rates)
    if costs.kernels.thin_bytes_per_second:
        loaded = op.forward_bytes / (costs.kernels.thin_bytes_per_second * costs.cores)
        small = maximum(small, loaded)
        # More rows read no less.
        large = above(op.rows, 8, maximum(large, loaded + rates.matmul_start), small + rates.matmul_start)
    if costs.unpacked:
        tile, gemv = costs.engine.quantisation.unpack_rows, costs.engine.operators.gemv_rows
        tiled = large + _widened_once(costs, op) * ceil(op.rows / tile) if tile else large
        large = above(op.rows, gemv, tiled, small + rates.matmul_start)
    if costs.engine.quantisation.activation_bytes > 2:
        # Cast to 16 bits on the way in, back on the way out.
        moved = (2 + costs.engine.quantisation.activation_bytes) * op.rows * (op.columns + op.inner) * op.batch
        casts = moved / (costs.rates.memory_bytes * costs.kernels.cached_rate)
        large = large + above(op.rows, costs.engine.quantisation.dequantise_above_rows, casts, 0 * large)
    if costs.engine.quantisation.dequantise_above_rows and op.weights:
        large = large + above(op.rows, costs.engine.quantisation.dequantise_above_rows, expanded(costs, op), 0 * large)
    if re.fullmatch(costs.kernels.library_roles[rates is not costs.rates], op.role):
        return large
    return above(op.rows, costs.kernels.thin_rows, large, minimum(large, small + rates.matmul_start))


def _few_rows(costs: EngineCostModel[X], op: Op[X], rates: Rates[X]) -> X:
    """Return seconds of a GEMM in tiles of 16 rows, or of few rows in a matrix-vector kernel, without its start."""
    gemv, tiles = costs.engine.operators.gemv_rows, 16 * ceil(op.rows / 16)
    multiplied = above(op.rows, gemv, tiles, op.rows) if gemv else tiles
    worked = 2 * multiplied * op.columns * op.inner * op.batch / rates.matmul_flops
    if costs.unpacked:
        worked = maximum(worked, above(op.rows, gemv, 0 * worked, _widened_once(costs, op)))
    return blend(worked, op.forward_bytes / rates.matmul_bytes, rates.sharpness)


def _widened_once(costs: EngineCostModel[X], op: Op[X]) -> X:
    """Return seconds in which vector units widen every weight of a GEMM once."""
    return op.columns * op.inner * op.batch / costs.unpacked


def _apart(costs: EngineCostModel[X], op: Op[X]) -> tuple[Op[X], ...]:
    """Return the GEMMs that an engine runs for one of the ledger, each of which reads the input again."""
    if len(op.parts) < 2 or not {op.role, *op.modules} & {*costs.engine.operators.unmerged}:
        return (op,)
    given = costs.activation_width * op.rows * op.inner * op.batch
    rest = op.forward_bytes - given
    shares = [(part, part / op.columns) for part in op.parts]
    return tuple(
        replace(op, columns=part, flops=share * op.flops, forward_bytes=given + share * rest) for part, share in shares
    )


# What fused experts do beside their two GEMMs: the tables of experts hold it (calls from tokens to summed outputs).
def _in_experts(op: Op[X]) -> bool:
    return op.role in ("dispatch", "combine") or (op.role == "activation" and within(op.region, EXPERTS))


def _charged_elsewhere(costs: EngineCostModel[X], op: Op[X]) -> bool:
    """Return whether an operator takes no time of its own, since it runs none or the tables of another hold it.

    The calls that the tables of attention time also write the cache (accuracy/notes/causes.md).
    """
    bounds = costs.rates.attention_blocks.cached_compute
    measured = costs.attention or (costs.decoding and costs.kernels.decode and not bounds)
    if op.role in costs.engine.attention.includes and measured:
        return True
    return op.kind == "none" or op.kernels == 0 or (costs.fused_experts and _in_experts(op))


def _routed(costs: EngineCostModel[X], op: Op[X], library: X) -> X:
    """Return seconds of a router, of which the `library` takes those of its product."""
    ranks = costs.group_shapes["tp"][-1]
    seconds = routed_seconds(costs.router, op, ranks, library) if costs.router else library
    if costs.fused_experts:
        return seconds
    # A softmax and the choice of experts, which fused experts hold, are kernels of their own, or one.
    return seconds + (1 if op.role in costs.merged else op.kernels - 1) * costs.rates.memory_start


def op_seconds(costs: EngineCostModel[X], op: Op[X]) -> X:
    """Return seconds of one operator's forward pass in an engine, without its messages."""
    if _charged_elsewhere(costs, op):
        return 0 * op.forward_bytes
    if op.role in costs.merged and op.kind != "matmul":
        seconds = op.forward_bytes / costs.rates.memory_bytes
    elif op.kind == "attention" and costs.decoding:
        seconds = _decode_attention(costs, op)
    elif op.role == "attention" and op.kind == "attention" and costs.attention:
        seconds = prompt_seconds(costs.attention, _chip(costs), op)
    elif op.kind == "grouped":
        seconds = kernel_seconds(costs.rates, op, "forward") if costs.rates.experts_in_turn else _experts(costs, op)
    elif op.kind == "matmul":
        seconds = total((_product(costs, one) for one in _apart(costs, op)), 0 * op.forward_bytes)
        seconds = _routed(costs, op, seconds) if op.role == "router" else seconds
    elif op.kind == "scan" and costs.scanned and not costs.decoding:
        seconds = op.flops / costs.scanned + costs.rates.memory_start
    elif op.role == "softmax":
        moved = op.forward_bytes / 4 * costs.engine.attention.score_bytes  # The ledger moves 16 bits in and out.
        seconds = moved / costs.rates.memory_bytes + op.kernels * costs.rates.memory_start
    else:
        seconds = kernel_seconds(costs.rates, op, "forward") + chained_seconds(costs.rates, op)
        if costs.engine.quantisation.activation_bytes > 2 and op.kind == "memory":
            wider = (costs.engine.quantisation.activation_bytes / 2 - 1) * op.forward_bytes
            seconds = seconds + wider / (costs.rates.memory_bytes * costs.kernels.cached_rate)
    if op.role in ("attention", "indexer"):
        chip = (costs.peak, costs.cores, costs.rates.memory_start)
        seconds = with_picked(costs.picked, costs.engine, chip, costs.decoding, op, seconds)
        seconds = with_unified(costs.unified, chip[1:], costs.decoding, op, seconds)
    return named(with_choice(costs.torch_choices, costs.group_shapes, op, seconds), op.name)


def engine_cost_model(case: ServingCase, sizes: ServingSizes[X]) -> EngineCostModel[X]:
    """Return the device and links as prefill steps meet them; decode steps are `decoding`."""
    device, wanted, case = case.cluster.device, case.efficiencies, lone_heads(case)
    fitted = rates_of(device, case.dtype, 0.0, wanted, ("", "", case.engine.operators.library))
    base, kind = case.format.base, case.format.kind
    products = kind if case.compute == ("fp8" if base == "fp8-block" else case.dtype) else case.compute
    kernels = kernels_of(device, fitted.family, products, case.engine, wanted, case.model.family)
    narrow = engine_rates(case, fitted)
    wide = narrow.pop(case.dtype)
    kept = device.memory_bytes_per_second if wanted.ideal else bandwidth_of(device)
    return EngineCostModel(
        rates=wide,
        narrow=tuple(narrow.items()),
        narrow_dtype=case.compute,
        network=with_peers(network_of(case.cluster, wanted)),
        group_shapes=sizes.group_shapes,
        bandwidth=leaf("HBM bytes/s", wanted.memory_bytes_per_second or kept, "datasheet", "bytes/s"),
        peak=leaf("matrix FLOP/s", device.peak_flops(case.dtype), "datasheet", "FLOP/s"),
        narrow_peak=leaf("matrix FLOP/s of the format", device.peak_flops(case.compute), "datasheet", "FLOP/s"),
        experts_peak=leaf(
            "matrix FLOP/s of experts", device.peak_flops(kernels.experts_type or case.dtype), "datasheet", "FLOP/s"
        ),
        fused_experts=not wanted.ideal and case.engine.operators.experts == "fused",
        torch_choices=torch_choices(case.engine.operators, fitted.family, products, case.model),
        choices=most_choices(case.model),
        cores=float(device.cores),
        activation_width=case.activation_bytes,
        cache_width=case.cache_element_bytes,
        kernels=kernels,
        engine=with_indexer(case),
        decoding=False,
        widened=widened_elements(case),
        integer_share=integer_share(case),
        fp4_gains=fp4_gains(case),
        merged=merged_operators(case),
        scanned=scanned_flops(case),
        unpacked=unpacked_weights(case),
        weight_only=tuple(weight_only_rates(case, wide).items()),
        format=case.format,
        attention=attention_of(case),
        picked=picked_kernel(case),
        unified=unified_kernels(case),
        block_tile=tile_seconds(case),
        router=None if wanted.ideal else router_kernel(case.engine.operators, fitted.family, case.model),
        beside_rows=0.0 if wanted.ideal else rows_beside(case.engine.operators, fitted.family, case.model),
        processor=_host_costs(case, sizes),
    )


def _host_costs(case: ServingCase, sizes: ServingSizes[X]) -> EngineCostModel[X] | None:
    """Return the processor of the host as prefill steps meet it, None where all runs on the device."""
    if (host := case.host) is None:
        return None
    placed = sizes_of(host.model, host.plan, host.job, host.domains)
    return engine_cost_model(host, replace(sizes, group_shapes=placed.group_shapes))
