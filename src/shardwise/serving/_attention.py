"""Attention kernels of an engine under a model: those compiled for its head sizes, and their seconds."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost import Chip
from shardwise.cost._attention import Cached, KernelCosts, costed_seconds, decode_parts, kernel_costs, tiled_parts
from shardwise.cost._kernels import TILE_ROWS
from shardwise.cost._tables import constants, family_of
from shardwise.hardware import Device
from shardwise.ledger.number import X, above, ceil, maximum, minimum
from shardwise.ledger.op import Op
from shardwise.models import Attention, LatentAttention, Model

Sized = tuple[tuple[float, float, KernelCosts], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernels:
    """The attention kernels that a model runs, by head size.

    Each is (elements of a key and a value of a head, elements of a token in the cache, costs), smallest first.
    `cache_width` is the bytes of a cached element, `width` those of an activation.
    """

    prompt: Sized
    decode: Sized
    cache_width: float
    width: float
    source: str


def _sizes(model: Model, decoding: bool) -> dict[float, tuple[str, float, float]]:
    """Return the kind of kernel, its head size and what a token caches by the elements of a key and a value."""
    found: dict[float, tuple[str, float, float]] = {}
    for mixer in {mixer for block in model.layers for mixer in block.mixers}:
        if isinstance(mixer, Attention):
            dims = mixer.head_dim + mixer.value_dim
            found[dims] = ("decode" if decoding else "prefill", mixer.head_dim, dims)
        elif isinstance(mixer, LatentAttention) and decoding:
            rank, rope = mixer.kv_lora_rank, mixer.qk_rope_head_dim
            found[2 * rank + rope] = ("latent_decode", rank + rope, rank + rope)
        elif isinstance(mixer, LatentAttention):
            dims = mixer.qk_head_dim + mixer.v_head_dim
            found[dims] = ("latent_prefill", mixer.qk_head_dim, dims)
    return found


def attention_kernels(
    device: Device, engine: str, model: Model, widths: tuple[float, float], latent: str = ""
) -> AttentionKernels | None:
    """Return the measured attention kernels of an engine for a model; None where one of them was not measured.

    `widths` are bytes of an activation and of a cached element, `latent` the engine whose kernels over latent caches
    stand for the engine's own.
    """
    narrow = widths[1] < 2
    made: list[Sized] = []
    for decoding in (False, True):
        label = "bf16" if not narrow else "fp8" if decoding else "bf16-fp8"
        sized = []
        for dims, (kind, head, cached) in sorted(_sizes(model, decoding).items()):
            name = label if kind != "latent_prefill" or not narrow else "fp8"
            owner = latent if latent and kind == "latent_decode" else engine
            costs = kernel_costs(device, kind, (owner, name), head, False)
            costs = costs or kernel_costs(device, kind, (owner, "bf16"), head, False)
            if costs is None:
                return None
            sized.append((float(dims), float(cached), costs))
        made.append(tuple(sized))
    if not made[0] or not device.knows("num_cores"):
        return None
    row = next(iter(constants()[family_of(device)]["prefill_kernels"][engine].values()))
    return AttentionKernels(
        prompt=made[0], decode=made[1], cache_width=widths[1], width=widths[0], source=row["source"]
    )


def _chosen(kernels: Sized, op: Op[X], seconds: list[X]) -> X:
    """Return the seconds by the kernel of the operator's head size."""
    found = seconds[-1]
    for (dims, _, _), one in reversed(list(zip(kernels[:-1], seconds[:-1], strict=True))):
        found = above(op.inner, dims, found, one)
    return found


def prompt_seconds(kernels: AttentionKernels, chip: Chip[X], op: Op[X]) -> X:
    """Return seconds of attention of a prompt, by the parts of `cost` as an operator of the ledger states them."""
    seconds = [costed_seconds(costs, _prompt_parts(kernels, chip, op, costs.packs)) for _, _, costs in kernels.prompt]
    return _chosen(kernels.prompt, op, seconds)


def _prompt_parts(kernels: AttentionKernels, chip: Chip[X], op: Op[X], packs: bool) -> tuple[X, ...]:
    """Return the parts of attention of a prompt: what is moved beside queries and output is the cache.

    The longest tile sees all keys, in a window twice the mean of what a query sees.
    """
    flops, queries = 2 * op.inner / chip.flops, op.rows * op.batch
    edges = kernels.width * queries * op.inner
    cache = maximum(op.forward_bytes - edges, 1.0)
    items = cache / (kernels.cache_width * op.inner * op.columns)
    longest = minimum(op.columns, op.flops / (op.inner * queries))
    tiles = items * ceil(queries / items / TILE_ROWS) if packs else maximum(queries / TILE_ROWS, op.batch)
    return tiled_parts(chip, (tiles, longest, flops), (op.flops / chip.flops, 0 * op.flops), (edges, cache))


def cached_seconds(kernels: AttentionKernels, chip: Chip[X], op: Op[X]) -> X:
    """Return seconds of attention over a cache, a work item a key-value head of a sequence."""
    queries = op.rows * op.batch
    edges = kernels.width * queries * op.inner
    cache = maximum(op.forward_bytes - edges, 1.0)
    seconds = []
    for _, token, costs in kernels.decode:
        items = cache / (kernels.cache_width * token * op.columns)
        work = Cached(
            sequences=op.rows,
            items=items,
            group=queries / items,
            tokens=op.columns,
            pair_flops=op.flops / (queries * op.columns),
            item_bytes=kernels.cache_width * token,
            edge_bytes=edges,
        )
        seconds.append(costed_seconds(costs, decode_parts(chip, work)))
    return _chosen(kernels.decode, op, seconds)
