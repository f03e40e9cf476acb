"""Kernels that an engine runs for a model, as measured: attention, experts, the all-reduce, rates of single cores."""

from __future__ import annotations

import re
from typing import Any

from shardwise.cost import (
    PARTS,
    TILE_KEYS,
    TILE_ROWS,
    Datasheet,
    DecodeAttention,
    Efficiencies,
    EngineReduce,
    ExpertsFit,
    KernelCosts,
    PrefillTiles,
    constants,
    costed_seconds,
    decode_parts,
    family_of,
    heads_together,
    kernel_costs,
    last_cache_bytes,
    nearest_costs,
    reduce_of,
    tiled_parts,
)
from shardwise.hardware import Device
from shardwise.ledger.number import X, above, ceil, maximum, minimum
from shardwise.ledger.op import Op
from shardwise.models import CoreSizes, Model
from shardwise.records import dataclass, replace
from shardwise.serving._engine import Engine, engine_tables
from shardwise.serving._experts import narrow_row, on_device, unspread_row, wide_row
from shardwise.serving._replayed import replayed_start


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKernels:
    """Constants of kernels that training does not have: attention over a cache, fused experts, the all-reduce."""

    decode: KernelCosts | None
    """Attention over a cache; None where efficiencies are imposed."""
    last_cache: float
    """Bytes that the tables of attention find in the last cache."""
    experts_wide: ExpertsFit
    experts_narrow: ExpertsFit
    experts_unspread: ExpertsFit | None
    """The narrow ones that are not spread over ranks, None where they run as the others."""
    unspread_ranks: float
    """Ranks that split each expert from which on they run so; fewer run as the others."""
    experts_type: str
    all_reduce: EngineReduce | None
    """The engine's own all-reduce; None where that of NCCL stands."""
    head_bytes_per_second: float
    """Rate of a core where every query head reads the cache for itself (0: the heads of a group share)."""
    """Rate of a core where no context is cut (0: it is)."""
    thin_bytes_per_second: float
    """Rate of a core in GEMMs of few rows (0: only the memory bounds them)."""
    thin_rows: float
    """Rows up to which GEMMs may run in a kernel that spreads over all cores whatever their shape."""
    library_roles: tuple[str, str]
    """Roles of GEMMs in 16 bits, and of those in fewer (patterns), that never do."""
    cached_rate: float
    """How much faster than memory the activations of a piece of a prompt pass where the last cache holds them."""
    sources: tuple[str, ...]


def _core_rate(kind: str, device: Device, family: str, used: bool) -> float:
    """Return bytes a second that one core reads in a kind of kernel, 0 where it is not used or not bound by that."""
    rates = engine_tables()[kind]["bytes_per_second_per_core"]
    return float(rates.get(device.chip, rates.get(family, 0.0))) if used else 0.0


def watts_per_core(family: str) -> float:
    """Return watts a core of the device on which the GEMMs of a family were measured, 0 where it is not stated.

    >>> watts_per_core("ampere")
    3.7
    """
    return float(engine_tables()["measured"]["watts_per_core"].get(family, 0.0))


def steady_state_memory(device: str) -> float:
    """Return the share of the streaming rate of measured GEMMs that steps of engines keep, 1 where it is all.

    >>> steady_state_memory("a100-sxm-80gb"), steady_state_memory("rtx-3090"), steady_state_memory("h100-sxm-80gb")
    (0.91, 1.0, 1.0)
    """
    shares: dict[str, float] = engine_tables()["measured"]["steady_state_memory"]
    return next((float(share) for names, share in shares.items() if re.fullmatch(names, device)), 1.0)


def thin_rows(family: str, untuned: bool = False) -> float:
    """Return the rows up to which GEMMs on a family of devices may run in a kernel that spreads over all cores.

    Shares of an `untuned` library were fitted with those of other families.

    >>> thin_rows("cdna"), thin_rows("hopper")
    (4.0, 64.0)
    """
    rows = engine_tables()["measured"]["thin_rows"]
    return float(rows["any"] if untuned else rows.get(family, rows["any"]))


def library_roles(engine: Engine, words: str) -> tuple[str, str]:
    """Return the roles of GEMMs of 16 bits, and of those of fewer, for which an engine has no such kernel.

    `words` are the family of devices, the format of the weights and the family of models.

    >>> from shardwise.serving import find_engine
    >>> sglang = find_engine("sglang")
    >>> [library_roles(sglang, f"hopper fp8-block {model}") for model in ("deepseek_v3", "qwen3_moe")]
    [('.*', ''), ('.*', '.*')]
    """
    rows = engine.operators.library_products
    return next(((wide, narrow) for at, wide, narrow in rows if re.fullmatch(at, words)), ("", ""))


_WASTE = (
    *("pad_rows", "empty_rows", "chain_share", "row_traffic", "others_traffic", "tile_reads"),
    *("start_seconds", "expert_seconds", "walk_seconds", "mapped_seconds"),
)


def _imposed(row: ExpertsFit, imposed: Efficiencies) -> ExpertsFit:
    """Return a row with the user's efficiencies; ideal kernels stream at full rate and start at once."""
    if imposed.ideal:
        free: dict[str, Any] = dict.fromkeys(_WASTE, 0.0)
        return replace(row, compute=1.0, memory=1.0, **free)
    compute, memory = (min(user or own, 1.0) for user, own in _shares(row, imposed))
    return replace(row, compute=compute, memory=memory)


def _shares(row: ExpertsFit, imposed: Efficiencies) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the user's and the fitted share of the peak, and of the bandwidth."""
    return (imposed.compute, row.compute), (imposed.memory, row.memory)


_PAGED_ROWS = 64
_CHAINS = ("first_1k_tokens", "first_16k_tokens")


def _started(costs: KernelCosts, engine: Engine, family: str) -> KernelCosts:
    """Return costs of attention over a cache whose kernel starts as the engine's own small ones do.

    It cuts the context over all cores, so that none has a chain of tokens to follow.
    """
    start = engine.attention.cached_starts * replayed_start(engine, family)
    parts = zip(PARTS["decode"][1:], costs.costs[1:], strict=True)
    return (
        replace(costs, costs=(start, *(0.0 if part in _CHAINS else cost for part, cost in parts))) if start else costs
    )


def kernels_of(
    device: Device, family: str, products: str, engine: Engine, imposed: Efficiencies, model: str = ""
) -> EngineKernels:
    """Return the kernel constants of a family under an engine for GEMMs of a type or of a format.

    Imposed efficiencies replace the fitted ones; a family without tables of engines takes those of L40S. The kernel of
    experts depends on the family of models too, which `model` names.
    """
    families = constants().families
    table = families[family].experts or families["ada"].experts
    experts = table.get(engine.operators.experts_as or engine.kernels, table["vllm"])
    decode, source = nearest_costs(device, engine.kernels, engine.attention.decode_family(family))
    kind, wide = wide_row(experts, products, family, engine, model)
    narrow = narrow_row(experts, products, family, engine, model)
    alone, least = unspread_row(products, family, engine, model) or (None, 1.0)
    own = engine.operators.custom_all_reduce and not (
        imposed.ideal or imposed.fast_bytes_per_second or imposed.fast_link
    )
    # Engines' own kernels were measured without peer access where ranks slow each other with their square.
    others = (name for pattern, name in engine.operators.all_reduce_as if re.fullmatch(pattern, f"{family} {model}"))
    reduce = reduce_of(device, next(others, engine.kernels)) if own else None
    return EngineKernels(
        decode=None if imposed.ideal or imposed.compute or imposed.memory else _started(decode, engine, family),
        last_cache=last_cache_bytes(device),
        experts_wide=_imposed(on_device(wide, device, family), imposed),
        experts_narrow=_imposed(on_device(narrow, device, family), imposed),
        experts_unspread=alone and _imposed(on_device(alone, device, family), imposed),
        unspread_ranks=least,
        experts_type="fp8" if kind.startswith("w4a8") else "",
        all_reduce=None if reduce and reduce.fit.crowding > 1 else reduce,
        head_bytes_per_second=engine.attention.bytes_per_second_per_core
        or _core_rate("own_heads", device, family, engine.attention.shared_query_heads > 1 and not imposed.ideal),
        thin_rows=thin_rows(family, device.chip in dict(engine.operators.library_shares)),
        library_roles=library_roles(engine, f"{family} {products} {model}"),
        cached_rate=float(engine_tables()["measured"]["cached_rate"].get(family, 1.0)),
        thin_bytes_per_second=_core_rate(
            "thin_products", device, family, engine.operators.gemv_bound_by_cores and not imposed.ideal
        ),
        sources=(
            source,
            wide.source,
            narrow.source,
            *((alone.source,) if alone else ()),
            *((reduce.source,) if reduce else ()),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedKernel:
    """The kernel of a head size: elements of a key and a value of a head, and of a token in the cache, its costs.

    `group` query heads share a key-value head; the cache is read as `widened` times as wide as it is, `late` seconds
    pass before, and costs are shares of `peak` times the peak of 16 bits.
    """

    dims: float
    cached: float
    group: float
    costs: KernelCosts
    widened: float = 1.0
    late: float = 0.0
    peak: float = 1.0
    whole_tiles: bool = False
    """Tiles take all of their rows, whatever they hold."""

    @property
    def block_keys(self) -> int:
        """Keys that a tile of FlashAttention 2 over a paged cache takes at a time, by the size of a head.

        csrc/flash_attn/src/flash_fwd_launch_template.h, run_mha_fwd_splitkv_dispatch (kBlockN).
        """
        head = self.dims / 2
        return 256 if head <= 64 else 128 if head <= 128 else 64


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernels:
    """The attention kernels that a model runs, by head size, smallest first.

    `cache_width` is the bytes of a cached element, `width` those of an activation.
    """

    prompt: tuple[SizedKernel, ...]
    decode: tuple[SizedKernel, ...]
    cache_width: float
    width: float
    source: str

    def with_heads_apart(self) -> AttentionKernels:
        """Return the kernels for sequences of one token beside longer prompts: no tile holds several of their heads."""
        apart = (replace(k, costs=replace(k.costs, packs="none"), whole_tiles=True) for k in self.prompt)
        return replace(self, prompt=tuple(apart))


def core_sizes(model: Model, decoding: bool) -> list[CoreSizes]:
    """Return the sizes of the kernels of a model's attention, one for each number of elements of key and value."""
    every = (mixer.core(decoding) for block in model.kinds for mixer in block.mixers)
    return [one for _, one in sorted({one.elements: one for one in every if one is not None}.items())]


def attention_kernels(
    device: Device, engine: str, model: Model, widths: tuple[float, float], latent: str = "", older: str = ""
) -> AttentionKernels | None:
    """Return the measured attention kernels of an engine for a model; None where one of them was not measured.

    `widths` are bytes of an activation and of a cached element, `latent` the engine whose kernels over latent caches
    stand for the engine's own, `older` the family for which its kernels over other caches were written.
    """
    narrow = widths[1] < 2
    made: list[tuple[SizedKernel, ...]] = []
    for decoding in (False, True):
        label = "bf16" if not narrow else "fp8" if decoding else "bf16-fp8"
        sized = []
        for core in core_sizes(model, decoding):
            name = label if core.kind != "latent_prefill" or not narrow else "fp8"
            owner = latent if latent and core.kind == "latent_decode" else engine
            family = older if core.kind == "decode" else ""
            costs = kernel_costs(device, core.kind, (owner, name), core.head, False, family)
            costs = costs or kernel_costs(device, core.kind, (owner, "bf16"), core.head, False, family)
            if costs is None:
                return None
            sized.append(
                SizedKernel(dims=float(core.elements), cached=float(core.cached), group=core.group, costs=costs)
            )
        made.append(tuple(sized))
    if not made[0] or not device.knows("num_cores"):
        return None
    table = constants().families[family_of(device)].prefill_kernels
    row = next(iter(table.engines[engine].values())) if table else None
    return AttentionKernels(
        prompt=made[0],
        decode=made[1],
        cache_width=widths[1],
        width=widths[0],
        source=row.source if row else "",
    )


def _chosen(kernels: tuple[SizedKernel, ...], op: Op[X], seconds: list[X]) -> X:
    """Return the seconds by the kernel of the operator's head size."""
    chosen = seconds[-1]
    for kernel, one in reversed(list(zip(kernels[:-1], seconds[:-1], strict=True))):
        chosen = above(op.inner, kernel.dims, chosen, one)
    return chosen


def prompt_seconds(kernels: AttentionKernels, chip: Datasheet[X], op: Op[X]) -> X:
    """Return seconds of attention of a prompt, by the parts of `cost` as an operator of the ledger states them."""
    seconds = [
        costed_seconds(k.costs, _prompt_parts(kernels, replace(chip, flops=k.peak * chip.flops), op, k))
        for k in kernels.prompt
    ]
    return _chosen(kernels.prompt, op, seconds)


def _prompt_parts(kernels: AttentionKernels, chip: Datasheet[X], op: Op[X], k: SizedKernel) -> tuple[X, ...]:
    """Return the parts of attention of a prompt: what is moved beside queries and output is the cache.

    No query sees more keys than twice the mean, and there are as many sequences as the cache holds lines of all keys.
    """
    queries = op.rows * op.batch
    edges = kernels.width * queries * op.inner
    cache = maximum(op.forward_bytes - edges, 1.0)
    group = minimum(k.group + 0 * op.batch, op.batch)
    sequences = maximum(cache * group / (kernels.cache_width * op.inner * op.columns * op.batch), 1.0)
    each = op.rows / sequences
    share = heads_together(group, each, k.costs.packs)
    pairs = op.flops / (2 * op.inner)
    seen = pairs / queries
    rows = minimum(TILE_ROWS / share + 0 * each, each)
    longest = minimum(2 * seen, op.columns) + TILE_KEYS / 2
    if k.whole_tiles:
        pairs = pairs + sequences * op.batch * _unfilled_pairs(each, seen, k)
    return tiled_parts(
        chip,
        PrefillTiles(
            tiles=sequences * op.batch / share * ceil(each * share / TILE_ROWS),
            keys=minimum(longest, seen + (rows + TILE_KEYS) / 2),
            longest=longest,
            pair_flops=2 * op.inner,
            pairs=pairs,
            masked=0 * pairs,
            edge_bytes=edges,
            cache_bytes=cache,
            tokens=op.rows,
            swapped=0 * pairs,
        ),
    )


def _unfilled_pairs(each: X, keys: X, k: SizedKernel) -> X:
    """Return the pairs of queries and keys that tiles of a sequence and head multiply for rows that hold no query.

    FlashAttention 2 over a paged cache has tiles of 64 rows (the same, kBlockM). The first block of keys is in the
    seconds of a wave: prompts of 16 to 64 tokens were measured, whose tiles have no other.
    """
    further = maximum(ceil(keys / k.block_keys) - 1, 0.0) * k.block_keys
    return (ceil(each / _PAGED_ROWS) * _PAGED_ROWS - each) * further


def cached_seconds(kernels: AttentionKernels, chip: Datasheet[X], op: Op[X]) -> X:
    """Return seconds of attention over a cache, a work item a key-value head of a sequence."""
    seconds = [costed_seconds(k.costs, _cached_parts(kernels, chip, op, k)) + k.late for k in kernels.decode]
    return _chosen(kernels.decode, op, seconds)


def _cached_parts(kernels: AttentionKernels, chip: Datasheet[X], op: Op[X], k: SizedKernel) -> tuple[X, ...]:
    if k.widened != 1:
        edges = kernels.width * op.rows * op.batch * op.inner
        op = replace(op, forward_bytes=edges + k.widened * (op.forward_bytes - edges))
    return cached_parts(chip, op, k.cached, (k.widened * kernels.cache_width, kernels.width))


def cached_parts(chip: Datasheet[X], op: Op[X], token: X | float, widths: tuple[float, float]) -> tuple[X, ...]:
    """Return the parts of attention over a cache that holds `token` elements of a token and item.

    `widths` are bytes of a cached element and of an activation.
    """
    queries = op.rows * op.batch
    edges = widths[1] * queries * op.inner
    cache = maximum(op.forward_bytes - edges, 1.0)
    # The first entries of compressed tokens come after `rate` of them: an item of none takes as long as one of one.
    keys = maximum(op.columns, 1.0)
    items = cache / (widths[0] * token * keys)
    work = DecodeAttention(
        sequences=op.rows,
        items=items,
        group=queries / items,
        tokens=keys,
        pair_flops=op.flops / (queries * keys),
        item_bytes=widths[0] * token,
        edge_bytes=edges,
    )
    return decode_parts(chip, work)
