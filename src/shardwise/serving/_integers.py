"""GEMMs that multiply narrow weights as they are, in 8-bit integers: llama.cpp's kernels with tiles.

Source: github.com/ggml-org/llama.cpp ggml/src/ggml-cuda/mmq.cuh at 00cd20855. A tile of weights and one of tokens are
loaded into shared memory, all threads wait, multiply, and wait again (mul_mat_q_process_tile): a block is alone on its
core, so that loads stand beside the multiplications. Blocks take one tile of weights to all tokens before the next
(mul_mat_q: `it` changes slower than `jt`), and what the cores hold in turn is found again where it fits the last cache.
Each 32 products end in one integer, which vector units convert, multiply by two scales and add
(vec_dot_q8_0_q8_1_mma).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.cost import family_of
from shardwise.ledger.number import X, above, maximum
from shardwise.ledger.op import Op
from shardwise.serving._case import ServingCase

if TYPE_CHECKING:
    from shardwise.serving._cost_model import EngineCostModel

# A block of 128 inputs in 8 bits and its four scales (block_q8_1_mmq), bytes an input.
_INPUT_BYTES = 1.125


def integer_share(case: ServingCase) -> float:
    """Return the share of the 16-bit peak that GEMMs of many rows reach on narrow weights as they are, 0 if none do.

    >>> from shardwise.serving import find_engine
    >>> own = find_engine("llama.cpp").quantisation
    >>> own.integer_share, own.scaled_flops, own.load_rows
    (0.45, 8.0, 128)
    """
    device, own = case.cluster.device, case.engine.quantisation
    imposed = case.efficiencies.ideal or case.efficiencies.compute
    if case.format.bytes >= 1.5 or imposed or family_of(device).startswith("cpu") or "int8" not in device.matrix_flops:
        return 0.0
    units = device.peak_flops("int8")
    reached = min(units, own.scaled_flops * device.vector_flops) if device.knows("vector_flops") else units
    return own.integer_share * reached / device.peak_flops(case.dtype)


def fp4_gains(case: ServingCase) -> tuple[tuple[str, float], ...]:
    """Return how much faster than on integers GEMMs run on weights of formats of 4-bit floats, by format."""
    return case.engine.quantisation.fp4_gains if "fp4" in case.cluster.device.matrix_flops else ()


def weights_read(costs: EngineCostModel[X], op: Op[X]) -> X:
    """Return bytes of the weights of a GEMM: what it moves less its inputs and outputs."""
    return op.forward_bytes - costs.activation_width * op.rows * (op.columns + op.inner) * op.batch


def tiled_rows(costs: EngineCostModel[X], rows: X) -> X:
    """Return the rows of dense GEMMs that take as long as those of experts: half of the last tile is empty in the mean.

    Eight rows and fewer run in a kernel without tiles.
    """
    own = costs.engine.quantisation
    return above(rows, 8, (rows + own.tile_rows / 2) / own.experts_share, rows)


def loaded_seconds(costs: EngineCostModel[X], read: X, op: Op[X], rows: X) -> X:
    """Return seconds to load tiles of weights of `read` bytes: for each tile of tokens, once if a cache keeps them.

    A last tile of fewer tokens counts as its share: loads of steps are then linear between those of a grid.
    """
    own, cache, thin = costs.engine.quantisation, costs.kernels.last_cache, costs.kernels.thin_bytes_per_second
    once = read / costs.rates.matmul_bytes
    if thin:
        once = maximum(once, read / (thin * costs.cores))
    if not cache or not own.load_rows:
        return once
    kept = costs.cores * own.load_rows * read / (op.columns * op.batch) + _INPUT_BYTES * rows * op.inner
    return once * above(kept, cache, maximum(rows / own.load_rows, 1), 1 + 0 * rows)


def expanded(costs: EngineCostModel[X], op: Op[X]) -> X:
    """Return seconds to read the weights of a GEMM and write them in 16 bits, 0 where they are that wide."""
    elements = op.columns * op.inner * op.batch
    read = weights_read(costs, op)
    seconds = (read + 2 * elements) / costs.rates.memory_bytes + costs.rates.memory_start
    return above(read / elements, 1.5, 0 * seconds, seconds)
