"""Seconds of the attention kernels of engines: a sum of what a kernel does, each part at its own measured cost.

An engine compiles a kernel for each head size, with a window or without (FlashAttention hopper/instantiations,
TensorRT-LLM contextFusedMultiHeadAttention), so that each has a row of costs: how many times longer a part takes than
at the peak of the device, or seconds. Fitted by non-negative least squares: docs/calibration.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from shardwise.cost._kernels import TILE_ROWS, Chip
from shardwise.cost._tables import constants, family_of
from shardwise.hardware import Device
from shardwise.ledger.number import X, above, ceil, maximum, minimum, total

PROMPT_PARTS = ("start", "pairs", "tiles", "waves", "edges", "cache", "longest", "masked")
"""Parts of attention of a prompt, as `prompt_parts` returns them."""
DECODE_PARTS = (
    "start", "cache", "edges", "products", "waves", "first", "far", "floor", "alone", "rounded", "sequences",
)  # fmt: skip
"""Parts of attention over a cache, as `decode_parts` returns them."""
_GROUP_ROWS = 16
_FLOOR, _FIRST, _FAR = 64, 1024, 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt(Generic[X]):
    """Attention of new tokens: queries behind `past` tokens in each of some sequences, 0 as window sees all.

    `pair_flops` are those of a head for a query and a key, `token_bytes` of keys and values a head and token.
    """

    sequences: X
    queries: X
    past: X | float
    heads: X
    kv_heads: X
    pair_flops: float
    token_bytes: float
    edge_bytes: X
    window: X | float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cached(Generic[X]):
    """Attention of one new token a sequence over `tokens` cached ones; work items are key-value heads of sequences.

    `group` query heads share an item; `item_bytes` are those of a token of an item.
    """

    sequences: X
    items: X
    group: X | float
    tokens: X
    pair_flops: X | float
    item_bytes: float
    edge_bytes: X


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCosts:
    """Costs of the parts of one compiled kernel; `packs` says that the heads of a group share a tile of queries."""

    costs: tuple[float, ...]
    packs: bool
    scale: float


def seen_pairs(n: X | float, window: X | float) -> Any:
    """Return the (query, key) pairs of the first n queries: all before each, or the last `window`; 0 is no window.

    >>> seen_pairs(4, 0), seen_pairs(4, 2)
    (10.0, 7.0)
    """
    if _no_window(window):
        return n * (n + 1) / 2
    grown: Any = minimum(n, window)
    return grown * (grown + 1) / 2 + (n - grown) * window


def _no_window(window: X | float) -> bool:
    return isinstance(window, (int, float)) and not window


def prompt_parts(chip: Chip[X], p: Prompt[X], packs: bool) -> tuple[X, ...]:
    """Return what a kernel of a prompt does, each part in seconds at the peak of the chip, or as a count.

    A start; the pairs that the mask leaves; 64 keys for every row of a whole tile (its diagonal, its exponentials);
    waves of tiles; queries and output; keys and values; the longest tile alone on a core; pairs outside the window.
    """
    S, past, flops = p.queries, p.past, p.pair_flops / chip.flops
    whole = seen_pairs(S + past, 0) - seen_pairs(past, 0)
    seen = whole if _no_window(p.window) else seen_pairs(S + past, p.window) - seen_pairs(past, p.window)
    group = p.heads / p.kv_heads if packs else 1.0
    tiles = p.sequences * (p.kv_heads if packs else p.heads) * ceil(S * group / TILE_ROWS)
    keys = S + past if _no_window(p.window) else minimum(S + past, p.window + TILE_ROWS / group)
    pairs, masked = p.heads * p.sequences * seen * flops, p.heads * p.sequences * (whole - seen) * flops
    cache = p.kv_heads * p.sequences * p.token_bytes * (S + past)
    return tiled_parts(chip, (tiles, keys, flops), (pairs, masked), (p.edge_bytes, cache))


def tiled_parts(chip: Chip[X], tiled: tuple[X, X, X], products: tuple[X, X], moved: tuple[X, X]) -> tuple[X, ...]:
    """Return the parts of attention of a prompt from what its tiles are, compute and move.

    `tiled` are the number of tiles, the keys of the longest and the seconds of a query and a key, `products` the
    seconds of the pairs that the mask leaves and of those it does not, `moved` bytes of queries and output, of the
    cache.
    """
    (tiles, keys, pair), (pairs, masked), (edges, cache) = tiled, products, moved
    one = 0 * tiles + 1
    return (
        one,
        pairs,
        tiles * TILE_ROWS * 64 * pair,
        ceil(tiles / chip.cores),
        edges / chip.bytes_per_second,
        cache / chip.bytes_per_second,
        TILE_ROWS * keys * pair * chip.cores * one,
        masked,
    )


def decode_parts(chip: Chip[X], c: Cached[X]) -> tuple[X, ...]:
    """Return what a kernel over a cache does, each part in seconds at the peak of the chip, or as a count.

    A start; the cache; queries and output; products in tiles of 16 query heads; waves of items; the chain of the
    first 1,024 and of 16,384 tokens; the cache where no context is shorter than 64; one item alone on a core; the
    cache where the last wave takes as long as the others; sequences. No part falls with a larger batch or context.
    """
    items, L = c.items, c.tokens
    cache, waves = items * c.item_bytes * L / chip.bytes_per_second, items / chip.cores
    rounded = cache * (ceil(waves) / waves)
    one = 0 * items + 0 * L + 1
    return (
        one,
        cache,
        c.edge_bytes / chip.bytes_per_second * one,
        items * ceil(c.group / _GROUP_ROWS) * _GROUP_ROWS * c.pair_flops * L / chip.flops,
        ceil(waves) * one,
        minimum(L, _FIRST) / _FIRST * one,
        minimum(L, _FAR) / _FAR * one,
        items * c.item_bytes * maximum(L, _FLOOR) / chip.bytes_per_second,
        c.item_bytes * L / (chip.bytes_per_second / chip.cores) * one,
        above(waves, 0.5, rounded, cache),
        c.sequences * one,
    )


def costed_seconds(k: KernelCosts, parts: tuple[X, ...]) -> X:
    """Return seconds of a kernel: the start, and its other parts at their costs.

    `scale` is by how much one device is slower than the others of its family. Parts that cost nothing are left out.

    >>> costed_seconds(KernelCosts(costs=(1e-5, 2.0, 0.0), packs=False, scale=1.5), (1.0, 1e-3, 7.0))
    0.00301
    """
    zero = 0 * parts[0]
    work = total([cost * part for cost, part in zip(k.costs[1:], parts[1:], strict=True) if cost], zero)
    return k.costs[0] * parts[0] + k.scale * work


def kernel_costs(device: Device, kind: str, kernel: tuple[str, str], head: float, windowed: bool) -> KernelCosts | None:
    """Return the costs of a compiled kernel of an engine and type; None where no kernel of that kind was measured.

    `kernel` is (engine, type of the values); `kind` is prefill, decode, latent_prefill or latent_decode. A head size
    that was not compiled runs the next larger one; where no kernel with a window was measured that without stands in.

    >>> from shardwise.hardware import find_device
    >>> h100 = find_device("h100-sxm-80gb").device
    >>> kernel_costs(h100, "prefill", ("vllm", "bf16"), 80, False) == kernel_costs(
    ...     h100, "prefill", ("vllm", "bf16"), 128, False
    ... )
    True
    """
    row: Any = constants()[family_of(device)].get(f"{kind}_kernels", {})
    for key in kernel:
        row = row.get(key, {})
    if not row:
        return None
    table = row["costs"]
    sizes = sorted(int(n[:-1]) for n in table if n.endswith("w")) if windowed else []
    mark = "w" if sizes else ""
    sizes = sizes or sorted(int(n) for n in table if not n.endswith("w"))
    if not sizes:
        return None
    found = table[f"{next((n for n in sizes if n >= head), sizes[-1])}{mark}"]
    return KernelCosts(
        costs=tuple(found), packs=bool(row.get("packs", 0)), scale=row.get("by_device", {}).get(device.name, 1.0)
    )
