"""Seconds of fused experts in engines, and the chip whose peaks kernels are measured against.

Forms of accuracy/notes/calibration.md; constants per family and engine in constants.toml.
"""

from __future__ import annotations

from typing import Generic

from shardwise.cost._operators import blend
from shardwise.cost._records import ExpertsFit
from shardwise.ledger.number import X
from shardwise.records import dataclass

TILE_ROWS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip(Generic[X]):
    """What a kernel's constants are shares of: FLOP/s and bytes/s of the datasheet, the cores, the last cache."""

    flops: X
    bytes_per_second: X
    cores: float
    cached_bytes: float = 0.0


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
