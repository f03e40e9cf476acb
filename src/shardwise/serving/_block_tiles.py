"""Seconds of GEMMs in 8-bit blocks whose kernel has tiles of one size, whatever the shape."""

from __future__ import annotations

from typing import Any

from shardwise.cost import family_of
from shardwise.ledger.number import X, above, ceil, maximum
from shardwise.ledger.op import Op
from shardwise.ledger.traced import leaf
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import Engine

# Rows and columns of a tile, and the depth that it multiplies at a time: those of a block of weights.
_SIDE = 128


def tile_seconds(case: ServingCase) -> Any:
    """Return seconds in which a tile multiplies one block of depth, None where kernels are chosen for each shape.

    >>> from shardwise.serving import find_engine
    >>> find_engine("sglang-0.5.7").quantisation.block_tile_seconds
    (('cdna', 2.2e-06),)
    """
    seconds = dict(case.engine.quantisation.block_tile_seconds).get(family_of(case.cluster.device))
    blocks = (case.compute, case.format.name) == ("fp8", "fp8-block")
    if case.efficiencies.ideal or not blocks or seconds is None:
        return None
    why = dict(case.engine.sources)["quantisation.block_tile_seconds"]
    return leaf("a tile multiplies a block of depth", seconds, why, "s")


def in_tiles(engine: Engine, tile: tuple[X, float], op: Op[X], seconds: X) -> X:
    """Return seconds of a GEMM that takes `seconds` in the best kernel, where tiles are cut along no depth.

    A `tile` takes so many seconds for each block of depth, one on each of so many cores. Shapes that the engine's
    library has tiles of their own for keep their seconds, and so do shared experts, which run in the kernel of the
    rest, and maps narrower than a block, whose weights stay in 16 bits.
    """
    if any(weight.module == "shared" for weight in op.weights):
        return seconds
    each, cores = tile
    waves = maximum(ceil(op.rows / _SIDE) * ceil(op.columns / _SIDE) / cores, 1.0)
    walked = maximum(seconds, waves * each * ceil(op.inner / _SIDE))
    for columns, inner in engine.quantisation.tuned_blocks:
        walked = _where(op.columns, columns, _where(op.inner, inner, seconds, walked), walked)
    return above(op.columns, _SIDE - 0.5, walked, seconds)


def _where(size: X, wanted: int, then: X, otherwise: X) -> X:
    """Return one value where a size is what is wanted, the other elsewhere."""
    return above(size, wanted - 0.5, above(size, wanted + 0.5, otherwise, then), otherwise)
