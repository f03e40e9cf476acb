"""Seconds of the kernels of engines: attention over a cache, attention of a prompt, fused experts.

Forms of docs/calibration.md; constants per family and engine in constants.toml.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Generic

from shardwise.cost._operators import blend
from shardwise.ledger.number import X, maximum, minimum

TILE_ROWS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip(Generic[X]):
    """What a kernel's constants are shares of: FLOP/s and bytes/s of the datasheet, and the cores."""

    flops: X
    bytes_per_second: X
    cores: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeFit:
    """Constants of attention over a cache: it streams the cache, a work item a sequence and key-value head."""

    memory: float
    compute: float
    start_seconds: float
    sharpness: float
    floor_tokens: float
    item_seconds: float
    ramp_seconds: float
    ramp_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsFit:
    """Constants of the two fused products of experts: rows padded, a cost an expert hit and a row moved.

    `chain_share` is of the time of one tile that ends the kernel, `row_traffic` how often a row is moved beside the
    products (gathered, quantised, activated, added up), `others_traffic` the same of rows that other ranks serve.
    """

    memory: float
    compute: float
    start_seconds: float
    sharpness: float
    pad_rows: float
    expert_seconds: float
    chain_share: float = 1.0
    row_traffic: float = 0.0
    others_traffic: float = 0.0


def fit_from(kind: type[Any], row: dict[str, Any]) -> Any:
    """Return constants of a kind of kernel from a stored row."""
    return kind(**{f.name: row[f.name] for f in fields(kind) if f.name in row})


def decode_seconds(c: DecodeFit, chip: Chip[X], moved: tuple[X, X], flops: X, items: X, tokens: X) -> X:
    """Return seconds of attention over cached tokens: bytes of the cache and of the rest, so many work items.

    Short contexts stream a floor of tokens an item, and the latency of one item's chain grows until it is cut.
    """
    cache, edges = moved
    streamed = (cache * (maximum(tokens, c.floor_tokens) / tokens) + edges) / (c.memory * chip.bytes_per_second)
    worked = flops / (c.compute * chip.flops) + c.item_seconds * items / chip.cores
    ramp = c.ramp_seconds * minimum(tokens, c.ramp_tokens) / c.ramp_tokens
    return blend(streamed, worked, c.sharpness) + ramp + c.start_seconds


def experts_seconds(c: ExpertsFit, chip: Chip[X], moved: X, shape: tuple[X, X, X, X]) -> X:
    """Return seconds of one of the two products of experts; the shape is (rows in all, experts hit, n, k)."""
    rows, hit, n, k = shape
    rate = c.compute * chip.flops
    longest = c.chain_share * (2 * 64 * 128 * chip.cores * k / rate)
    worked = 2 * (rows + c.pad_rows * hit) * n * k / rate + longest
    own = c.start_seconds / 2 + c.expert_seconds / 2 * hit
    own = own + c.row_traffic * (2 * rows * (n + k)) / chip.bytes_per_second
    return blend(worked, moved / (c.memory * chip.bytes_per_second), c.sharpness) + own


def others_seconds(c: ExpertsFit, chip: Chip[X], rows: X, dims: X) -> X:
    """Return seconds that fused experts spend on rows of other ranks: sorted, zeroed, activated and added up too."""
    return c.others_traffic * (2 * rows * dims) / chip.bytes_per_second
