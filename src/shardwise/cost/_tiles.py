"""How a device cuts matrix products into tiles, and what a tile is charged."""

from __future__ import annotations

from shardwise.cost._records import Gemm
from shardwise.hardware import Device
from shardwise.records import dataclass

# The tiles of cuBLAS and CUTLASS products (rows, columns); the thin ones stand for split and skinny kernels.
TILES = ((16, 64), (32, 128), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 128))
ELEMENT_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "int4": 0.5}


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a device cuts a product into tiles that its cores share; no cores means that nothing is cut."""

    cores: int
    depth: float
    """Length of k that each tile loses to its prologue."""
    chain_flops: float = 0.0
    """FLOPs of the device in the time that a tile waits for the loads of one k."""
    vector_wait_share: float = 1.0
    """Share of that time that a product of one row waits, where vectors have a kernel of their own."""
    split_flops: float = 0.0
    """FLOPs that it costs to join the parts of a product that was cut along k."""
    join_flops: float = 0.0
    """The same for each element of the output and each part."""
    tiles: tuple[tuple[int, int, float], ...] = ()
    """Tiles to choose from: (rows, columns, FLOPs charged for one k of a wave of such tiles)."""

    def __str__(self) -> str:
        return "tiles"


def tiling_of(device: Device, dtype: str, row: Gemm, flops: float) -> Tiling:
    """Return how a device that reaches `flops` cuts products; nothing is cut where the cores are not known.

    A tile of a by b needs 2 a b FLOPs and a + b elements for each k, whose loads from the cache cost `balance` FLOPs a
    byte: the largest tile is charged what it computes, smaller ones more.
    """
    if row.whole:
        return Tiling(0, row.depth)
    if not device.knows("num_cores"):
        return Tiling(0, 0.0)
    cores = int(device.num_cores)
    loads = row.balance * ELEMENT_BYTES[dtype]
    rows, columns = TILES[-1]
    share = 1 / (1 + loads * (rows + columns) / (2 * rows * columns))
    tiles = tuple((a, b, cores * share * (2.0 * a * b + loads * (a + b))) for a, b in TILES)
    join = 2.0 * row.join_share / device.memory_bytes_per_second
    return Tiling(
        cores=cores,
        depth=row.depth,
        chain_flops=row.chain_seconds * flops,
        vector_wait_share=row.vector_wait_share,
        split_flops=row.split_seconds * flops,
        join_flops=join * flops,
        tiles=tiles,
    )
