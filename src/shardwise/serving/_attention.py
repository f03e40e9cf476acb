"""Attention kernels of an engine under a model: those compiled for its head sizes, and their seconds."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost import (
    TILE_KEYS,
    TILE_ROWS,
    Cached,
    Chip,
    KernelCosts,
    Tiled,
    constants,
    costed_seconds,
    decode_parts,
    family_of,
    heads_together,
    kernel_costs,
    tiled_parts,
)
from shardwise.hardware import Device
from shardwise.ledger.number import X, above, ceil, maximum, minimum
from shardwise.ledger.op import Op
from shardwise.models import Attention, LatentAttention, Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Sized:
    """The kernel of a head size: elements of a key and a value of a head, and of a token in the cache, its costs.

    `group` query heads share a key-value head.
    """

    dims: float
    cached: float
    group: float
    costs: KernelCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernels:
    """The attention kernels that a model runs, by head size, smallest first.

    `cache_width` is the bytes of a cached element, `width` those of an activation.
    """

    prompt: tuple[Sized, ...]
    decode: tuple[Sized, ...]
    cache_width: float
    width: float
    source: str


def _sizes(model: Model, decoding: bool) -> dict[float, tuple[str, float, float, float]]:
    """Return the kind of kernel, its head size, what a token caches and the group by the elements of key and value."""
    found: dict[float, tuple[str, float, float, float]] = {}
    for mixer in {mixer for block in model.layers for mixer in block.mixers}:
        if isinstance(mixer, Attention):
            dims = mixer.head_dim + mixer.value_dim
            group = mixer.heads / mixer.kv_heads
            found[dims] = ("decode" if decoding else "prefill", mixer.head_dim, dims, group)
        elif isinstance(mixer, LatentAttention) and decoding:
            rank, rope = mixer.kv_lora_rank, mixer.qk_rope_head_dim
            found[2 * rank + rope] = ("latent_decode", rank + rope, rank + rope, 1.0)
        elif isinstance(mixer, LatentAttention):
            dims = mixer.qk_head_dim + mixer.v_head_dim
            found[dims] = ("latent_prefill", mixer.qk_head_dim, dims, 1.0)
    return found


def attention_kernels(
    device: Device, engine: str, model: Model, widths: tuple[float, float], latent: str = "", older: str = ""
) -> AttentionKernels | None:
    """Return the measured attention kernels of an engine for a model; None where one of them was not measured.

    `widths` are bytes of an activation and of a cached element, `latent` the engine whose kernels over latent caches
    stand for the engine's own, `older` the family for which its kernels over other caches were written.
    """
    narrow = widths[1] < 2
    made: list[tuple[Sized, ...]] = []
    for decoding in (False, True):
        label = "bf16" if not narrow else "fp8" if decoding else "bf16-fp8"
        sized = []
        for dims, (kind, head, cached, group) in sorted(_sizes(model, decoding).items()):
            name = label if kind != "latent_prefill" or not narrow else "fp8"
            owner = latent if latent and kind == "latent_decode" else engine
            family = older if kind == "decode" else ""
            costs = kernel_costs(device, kind, (owner, name), head, False, family)
            costs = costs or kernel_costs(device, kind, (owner, "bf16"), head, False, family)
            if costs is None:
                return None
            sized.append(Sized(dims=float(dims), cached=float(cached), group=float(group), costs=costs))
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


def _chosen(kernels: tuple[Sized, ...], op: Op[X], seconds: list[X]) -> X:
    """Return the seconds by the kernel of the operator's head size."""
    found = seconds[-1]
    for kernel, one in reversed(list(zip(kernels[:-1], seconds[:-1], strict=True))):
        found = above(op.inner, kernel.dims, found, one)
    return found


def prompt_seconds(kernels: AttentionKernels, chip: Chip[X], op: Op[X]) -> X:
    """Return seconds of attention of a prompt, by the parts of `cost` as an operator of the ledger states them."""
    seconds = [costed_seconds(k.costs, _prompt_parts(kernels, chip, op, k)) for k in kernels.prompt]
    return _chosen(kernels.prompt, op, seconds)


def _prompt_parts(kernels: AttentionKernels, chip: Chip[X], op: Op[X], k: Sized) -> tuple[X, ...]:
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
    rows = minimum(TILE_ROWS / share + 0 * each, each)
    longest = minimum(2 * pairs / queries, op.columns) + TILE_KEYS / 2
    return tiled_parts(
        chip,
        Tiled(
            tiles=sequences * op.batch / share * ceil(each * share / TILE_ROWS),
            keys=minimum(longest, pairs / queries + (rows + TILE_KEYS) / 2),
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


def cached_seconds(kernels: AttentionKernels, chip: Chip[X], op: Op[X]) -> X:
    """Return seconds of attention over a cache, a work item a key-value head of a sequence."""
    seconds = [
        costed_seconds(k.costs, cached_parts(chip, op, k.cached, (kernels.cache_width, kernels.width)))
        for k in kernels.decode
    ]
    return _chosen(kernels.decode, op, seconds)


def cached_parts(chip: Chip[X], op: Op[X], token: X | float, widths: tuple[float, float]) -> tuple[X, ...]:
    """Return the parts of attention over a cache that holds `token` elements of a token and item.

    `widths` are bytes of a cached element and of an activation.
    """
    queries = op.rows * op.batch
    edges = widths[1] * queries * op.inner
    cache = maximum(op.forward_bytes - edges, 1.0)
    items = cache / (widths[0] * token * op.columns)
    work = Cached(
        sequences=op.rows,
        items=items,
        group=queries / items,
        tokens=op.columns,
        pair_flops=op.flops / (queries * op.columns),
        item_bytes=widths[0] * token,
        edge_bytes=edges,
    )
    return decode_parts(chip, work)
