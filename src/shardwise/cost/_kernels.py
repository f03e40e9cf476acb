"""Seconds of fused experts in engines, and the chip whose peaks kernels are measured against.

Forms of accuracy/notes/calibration.md; constants per family and engine in constants.toml.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Generic

from shardwise.cost._operators import blend
from shardwise.ledger.number import X

TILE_ROWS = 128
UNKNOWN_CORES = 100.0
"""The cores that kernels count for a device whose cores are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip(Generic[X]):
    """What a kernel's constants are shares of: FLOP/s and bytes/s of the datasheet, the cores, the last cache."""

    flops: X
    bytes_per_second: X
    cores: float
    cached_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsFit:
    """Constants of the two fused products of experts."""

    memory: float
    compute: float
    start_seconds: float
    sharpness: float
    pad_rows: float
    """Rows by which those of an expert are padded in the mean."""
    expert_seconds: float
    """Seconds for each expert that got a token."""
    chain_share: float = 1.0
    """Share of the time of one tile that ends the kernel."""
    row_traffic: float = 0.0
    """How often a row is moved beside the products: gathered, quantised, activated, added up."""
    others_traffic: float = 0.0
    """The same of rows that other ranks serve."""


def fit_from(kind: type[Any], row: dict[str, Any]) -> Any:
    """Return constants of a kind of kernel from a stored row."""
    return kind(**{f.name: row[f.name] for f in fields(kind) if f.name in row})


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
