"""Seconds of the kernels of engines, of attention and of fused experts, each part at its own measured cost.

Costs are how many times longer a part takes than at the peak of the device, or seconds. What the head size changes is
in the parts (bytes, FLOPs, exponentials, tiles), so that kernels of many head sizes, with a window or without, and of
many engines share the cost of a part; the fit says which, and what a kernel does not pay for
(accuracy/notes/calibration.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, cast

from shardwise.cost._operators import blend
from shardwise.cost._records import DECODE_PARTS, PROMPT_PARTS, AttentionTable, ExpertsFit
from shardwise.cost._tables import constants, family_of, family_with
from shardwise.hardware import Device
from shardwise.ledger.number import X, above, ceil, is_plain, maximum, minimum, power, total
from shardwise.records import dataclass

PARTS = {kind: PROMPT_PARTS if kind.endswith("prefill") else DECODE_PARTS
         for kind in ("prefill", "decode", "latent_prefill", "latent_decode")}  # fmt: skip
"""Parts of each kind of attention that was measured."""
PARTS_IN_SECONDS = frozenset({"start", "waves", "first_1k_tokens", "first_16k_tokens", "swapped", "sequences"})
"""Parts over a cache whose costs are seconds, where the others are times longer than at a peak of the device."""
_GROUP_ROWS = 16
_FLOOR, _FIRST, _FAR = 128, 1024, 16384
TILE_KEYS = 64
# An exponential a query and key costs the same whatever the head size: counted as the FLOPs of a head of 64.
_EXPONENTIAL_FLOPS = 4 * 64
# Query heads of a group that kernels take together at most: two tiles of 16 rows (TensorRT-LLM xqa: 32 heads).
_SHARED_HEADS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillAttention(Generic[X]):
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
class PrefillTiles(Generic[X]):
    """What the tiles of attention of a prompt are: so many, the keys that one visits, and those of the longest.

    `pairs` are the queries and keys of all heads that the mask leaves, `masked` those that a window takes away,
    `swapped` the kernels whose query heads are copied into another order first.
    """

    tiles: X
    keys: X
    longest: X
    pair_flops: X | float
    pairs: X
    masked: X
    edge_bytes: X
    cache_bytes: X
    tokens: X
    swapped: X


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeAttention(Generic[X]):
    """Attention of one new token a sequence over `tokens` cached ones; work items are key-value heads of sequences.

    `group` query heads share an item; `item_bytes` are those of a token of an item.
    """

    sequences: X
    items: X
    group: X | float
    tokens: X
    pair_flops: X | float
    item_bytes: X | float
    edge_bytes: X


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCosts:
    """Costs of the parts of one compiled kernel, and whether heads of a group share a tile of queries.

    `packs` is "all", "one" (of a single new token alone) or "none"; `scale` by how much one device is slower.
    """

    costs: tuple[float, ...]
    packs: str
    scale: float


def seen_pairs(n: X | float, window: X | float) -> Any:
    """Return the (query, key) pairs of the first n queries: all before each, or the last `window`; 0 is no window.

    >>> seen_pairs(4, 0), seen_pairs(4, 2)
    (10.0, 7.0)
    """
    if is_plain(window, 0):
        return n * (n + 1) / 2
    grown: Any = minimum(n, window)
    return grown * (grown + 1) / 2 + (n - grown) * window


def heads_together(group: X | float, queries: X, packs: str) -> Any:
    """Return how many heads share a tile of queries: all of a group, of a single new token alone, or none.

    FlashAttention 3 packs always where that fills tiles (PackGQA), FlashAttention 2 only one token a sequence
    (csrc/flash_attn/flash_api.cpp, seqlenq_ngroups_swapped).

    >>> heads_together(4.0, 1.0, "one"), heads_together(4.0, 16.0, "one"), heads_together(4.0, 16.0, "all")
    (4.0, 1.0, 4.0)
    """
    return group if packs == "all" else above(queries, 1.5, 1.0, group) if packs == "one" else 1.0


def swapped(sequences: X, kv_heads: X, group: X | float) -> Any:
    """Return 1 where query heads of one new token are copied into another order, 0 where a view does.

    Heads (K, G) of B sequences become (B G, K): a copy of queries and of the output unless B, K or G is one
    (FlashAttention 2, csrc/flash_attn/flash_api.cpp, seqlenq_ngroups_swapped).

    >>> swapped(2.0, 2.0, 4.0), swapped(1.0, 2.0, 4.0)
    (1.0, 0.0)
    """
    one = above(kv_heads, 1.5, above(group + 0 * kv_heads, 1.5, 1.0, 0.0), 0.0)
    return above(sequences, 1.5, one, 0.0)


def visited_keys(queries: X, past: X | float, rows: X | float, window: X | float) -> tuple[Any, Any]:
    """Return the keys that a tile of some queries visits, in blocks of 64: the mean of tiles, and the most."""
    every: Any = ceil((queries + past) / TILE_KEYS) * TILE_KEYS
    longest = every if is_plain(window, 0) else minimum(every, window + rows + TILE_KEYS)
    return minimum(longest, past + (queries + minimum(queries, rows) + TILE_KEYS) / 2), longest


def prompt_parts(chip: Datasheet[X], p: PrefillAttention[X], packs: str) -> tuple[X, ...]:
    """Return what a kernel of a prompt does, each part in seconds at the peak of the chip, or as a count."""
    S, past, G = p.queries, p.past, p.heads / p.kv_heads
    whole = seen_pairs(S + past, 0) - seen_pairs(past, 0)
    seen = whole if is_plain(p.window, 0) else seen_pairs(S + past, p.window) - seen_pairs(past, p.window)
    share = heads_together(G, S, packs)
    keys, longest = visited_keys(S, past, TILE_ROWS / share, p.window)
    of_all = p.sequences * p.heads
    return tiled_parts(
        chip,
        PrefillTiles(
            tiles=of_all / share * ceil(S * share / TILE_ROWS),
            keys=keys,
            longest=longest,
            pair_flops=p.pair_flops,
            pairs=of_all * seen,
            masked=of_all * (whole - seen),
            edge_bytes=p.edge_bytes,
            cache_bytes=p.kv_heads * p.sequences * p.token_bytes * (S + past),
            tokens=p.sequences * S,
            swapped=above(S, 1.5, 0.0, swapped(p.sequences, p.kv_heads, G)),
        ),
    )


def _beyond_cache(chip: Datasheet[X], moved: X) -> X:
    """Return the bytes that the last cache does not hold when the same kernel runs again, all from twice its size."""
    return maximum(minimum(moved, 2 * (moved - chip.cached_bytes)), 0.0)


def tiled_parts(chip: Datasheet[X], t: PrefillTiles[X]) -> tuple[X, ...]:
    """Return the parts of attention of a prompt from what its tiles are, compute and move.

    A start; GEMMs and exponentials of every key that a tile of 128 rows visits; GEMMs of the pairs that the
    mask leaves; waves of tiles; queries and output; keys and values; what of them the last cache cannot hold;
    the longest tile alone on a core, GEMMs and exponentials; pairs outside a window; new tokens; copies of heads.
    """
    pair, exponential = t.pair_flops / chip.flops, _EXPONENTIAL_FLOPS / chip.flops
    visited, longest = t.tiles * TILE_ROWS * t.keys, TILE_ROWS * t.longest * chip.cores
    zero = 0 * t.tiles
    return (
        zero + 1,
        visited * pair,
        visited * exponential,
        t.pairs * pair,
        ceil(t.tiles / chip.cores),
        t.edge_bytes / chip.bytes_per_second,
        t.cache_bytes / chip.bytes_per_second,
        _beyond_cache(chip, t.edge_bytes + t.cache_bytes) / chip.bytes_per_second,
        longest * pair + zero,
        longest * exponential + zero,
        t.masked * pair,
        t.tokens + zero,
        t.swapped + zero,
    )


def decode_parts(chip: Datasheet[X], fit: DecodeAttention[X]) -> tuple[X, ...]:
    """Return what a kernel over a cache does, each part in seconds at the peak of the chip, or as a count.

    A start; the cache; queries and output; GEMMs in tiles of 16 query heads; waves of items; the chain of the
    first 1,024 and of 16,384 tokens; the cache where no context is shorter than 128; what of it the last cache cannot
    hold; one item alone on a core; the cache read by every query head of groups too large to share it; GEMMs of heads
    without a group; copies of heads; sequences. No part falls with a larger batch or context.
    """
    items, L = fit.items, fit.tokens
    cache, floor = items * fit.item_bytes * L, items * fit.item_bytes * maximum(L, _FLOOR)
    zero = 0 * items + 0 * L
    return (
        zero + 1,
        cache / chip.bytes_per_second,
        fit.edge_bytes / chip.bytes_per_second + zero,
        items * ceil(fit.group / _GROUP_ROWS) * _GROUP_ROWS * fit.pair_flops * L / chip.flops,
        ceil(items / chip.cores) + zero,
        minimum(L, _FIRST) / _FIRST + zero,
        minimum(L, _FAR) / _FAR + zero,
        floor / chip.bytes_per_second,
        _beyond_cache(chip, cache) / chip.bytes_per_second,
        fit.item_bytes * L / (chip.bytes_per_second / chip.cores) + zero,
        above(fit.group + zero, _SHARED_HEADS + 0.5, fit.group * floor / chip.bytes_per_second, zero),
        above(fit.group + zero, 1.5, zero, items * fit.pair_flops * L / chip.flops),
        swapped(fit.sequences, items / fit.sequences, fit.group) + zero,
        fit.sequences + zero,
    )


def costed_seconds(k: KernelCosts, parts: tuple[X, ...]) -> X:
    """Return seconds of a kernel: the start, and its other parts at their costs.

    `scale` is by how much one device is slower than the others of its family. Parts that cost nothing are left out.

    >>> costed_seconds(KernelCosts(costs=(1e-5, 2.0, 0.0), packs="none", scale=1.5), (1.0, 1e-3, 7.0))
    0.00301
    """
    zero = 0 * parts[0]
    work = total([cost * part for cost, part in zip(k.costs[1:], parts[1:], strict=True) if cost], zero)
    return k.costs[0] * parts[0] + k.scale * work


def runs_as(head: float, windowed: bool, heads: Iterable[str]) -> str:
    """Return which of the measured heads a head size runs as: itself, or the next larger size.

    >>> runs_as(80, False, ("64", "128", "128w")), runs_as(512, True, ("64", "128w"))
    ('128', '128w')
    """
    mark = "w" if windowed and any(n.endswith("w") for n in heads) else ""
    sizes = sorted(int(n.rstrip("w")) for n in heads if n.endswith("w") == bool(mark))
    return f"{next((n for n in sizes if n >= head), sizes[-1])}{mark}"


def part_costs(kind: str, costs: Mapping[str, Sequence[float]], counts: Mapping[str, int]) -> tuple[float, ...]:
    """Return the cost of every part of a kernel, which takes one of the costs of a part or none.

    >>> part_costs("decode", {"start": [5e-6, 9e-6], "cache": [1.1]}, {"start": 1, "cache": 0})[:3]
    (9e-06, 1.1, 0.0)
    """
    return tuple(costs[part][counts[part]] if part in counts else 0.0 for part in PARTS[kind])


def kernel_costs(
    device: Device, kind: str, kernel: tuple[str, str], head: float, windowed: bool, family: str = ""
) -> KernelCosts | None:
    """Return the costs of a compiled kernel of an engine and type; None where no kernel of that kind was measured.

    `kernel` is (engine, type of the values); `kind` is prefill, decode, latent_prefill or latent_decode. A head size
    that was not compiled runs the next larger one; where no kernel with a window was measured that without stands in.
    A `family` other than the device's is that for which the kernel was written.

    >>> from shardwise.hardware import find_device
    >>> h100 = find_device("h100-sxm-80gb").device
    >>> kernel_costs(h100, "prefill", ("vllm", "bf16"), 80, False) == kernel_costs(
    ...     h100, "prefill", ("vllm", "bf16"), 128, False
    ... )
    True
    """
    table = constants().families[family or family_of(device)].attention_table(kind)
    row = table.engines.get(kernel[0], {}).get(kernel[1]) if table else None
    if table is None or row is None:
        return None
    head_costs = row.heads[runs_as(head, windowed, row.heads)]
    scale = table.by_device.get(device.chip, 1.0)
    return KernelCosts(costs=part_costs(kind, table.costs, head_costs), packs=row.packs, scale=scale)


def nearest_costs(device: Device, engine: str, family: str = "") -> tuple[KernelCosts, str]:
    """Return the costs of attention over a 16-bit cache and their source, of the nearest kernels that were measured.

    Engines without tables take the kernels of vLLM, families without those of `family_with`, by their own peaks.

    >>> from shardwise.hardware import find_device
    >>> nearest_costs(find_device("mi300x").device, "tgi")[0].packs
    'none'
    """
    family = family or family_of(device)
    family = family_with("decode_kernels", family)
    engines = cast(AttentionTable, constants().families[family].decode_kernels).engines
    engine = engine if engine in engines else "vllm"
    costs = kernel_costs(device, "decode", (engine, "bf16"), 128.0, False, family)
    return cast(KernelCosts, costs), engines[engine]["bf16"].source


TILE_ROWS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasheet(Generic[X]):
    """What a kernel's constants are shares of: FLOP/s and bytes/s of the datasheet, the cores, the last cache."""

    flops: X
    bytes_per_second: X
    cores: float
    cached_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles(Generic[X]):
    """The tiles of a GEMM of experts: the rows of each, and how many all experts with tokens have."""

    rows: X
    count: X


def tile_rows(steps: tuple[float, ...], tokens: X) -> X:
    """Return the rows of a tile for the tokens of a step: 16, twice as many beyond each of the steps.

    >>> [tile_rows((32, 96, 512), tokens) for tokens in (32, 33, 512, 8192)]
    [16, 32, 64, 128]
    """
    rows = 16 + 0 * tokens
    for doubled, step in enumerate(steps, 1):
        rows = above(tokens, step, 16 * 2**doubled + 0 * tokens, rows)
    return rows


def routed_tiles(fit: ExpertsFit, tokens: X, rows: X, hit: X) -> Tiles[X]:
    """Return the tiles of experts whose rows are routed at random: half of the last is empty where each has several.

    The rows of an expert spread by their root, so that those that nearly fill a tile take a second one now and then.
    """
    size, each = tile_rows(fit.tile_steps, tokens), rows / maximum(hit, 1)
    over = 1 + minimum(maximum((each - size) / (2 * power(maximum(each, 1), 0.5)) + 0.5, 0), 1)
    return Tiles(rows=size, count=hit * above(each, size, maximum(over, each / size + 0.5), over))


def experts_seconds(
    fit: ExpertsFit, chip: Datasheet[X], moved: X, shape: tuple[X, X, X, X, X], tiles: Tiles[X] | None = None
) -> X:
    """Return seconds of one of the two GEMMs of experts; the shape is (rows in all, experts, those hit, n, k).

    Kernels whose `tile_steps` are known run whole tiles, each of which reads a part of the weights again.
    """
    rows, columns, hit, n, k = shape
    laid_out = rows + fit.empty_rows * columns if fit.empty_rows else rows
    rate, ran = fit.compute * chip.flops, laid_out + fit.pad_rows * hit
    if tiles is not None and fit.tile_steps:
        ran, weights = tiles.rows * tiles.count, (moved - 2 * rows * (n + k)) / maximum(hit, 1)
        moved = moved + fit.tile_reads * maximum(tiles.count - hit, 0) * weights
    longest = fit.chain_share * (2 * 64 * 128 * chip.cores * k / rate)
    worked = 2 * ran * n * k / rate + longest
    own = fit.start_seconds / 2 + fit.expert_seconds / 2 * hit + fit.walk_seconds / 2 * columns
    own = own + fit.row_traffic * (2 * laid_out * (n + k)) / chip.bytes_per_second
    return blend(worked, moved / (fit.memory * chip.bytes_per_second), fit.sharpness) + own


def mapped_seconds(fit: ExpertsFit, ranks: X) -> X:
    """Return seconds in which a rank finds its own among the experts of all ranks, 0 where it has every one.

    >>> from shardwise.cost import constants
    >>> fit = constants().families["hopper"].experts["vllm"]["fp8_block"]["vllm_fp8moe_triton_tritonexperts"]
    >>> mapped_seconds(fit, 1), mapped_seconds(fit, 8)
    (0, 0.0)
    """
    return above(ranks, 1, fit.mapped_seconds + 0 * ranks, 0 * ranks)


def others_seconds(fit: ExpertsFit, chip: Datasheet[X], rows: X, dims: X) -> X:
    """Return seconds that fused experts spend on rows of other ranks: sorted, zeroed, activated and added up too."""
    return fit.others_traffic * (2 * rows * dims) / chip.bytes_per_second
