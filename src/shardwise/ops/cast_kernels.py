"""The kernels by which torch.autocast makes 16-bit copies of fp32 weights and inputs before each GEMM."""

from __future__ import annotations

from shardwise.ledger.flow import multiplies_weights, trains
from shardwise.ledger.number import X, total
from shardwise.ledger.op import Op
from shardwise.ops.layout import Layout, memory_op


def with_casts(y: Layout[X], ops: tuple[Op[X], ...]) -> tuple[Op[X], ...]:
    """Return operators with the kernels of autocast before each GEMM: of its weight, and of its fp32 inputs.

    A cast reads 4 bytes and writes 2. Backward the gradient of each input is widened, and those of one stream are added
    up in fp32, twice what adding them up in 16 bits moves, which the GEMM has (`Op.apart`); that of a weight is widened
    where it trains. Compiled layers cast inputs in the kernels that make them.
    Nothing of that is in the GEMM's own seconds (pytorch aten/src/ATen/autocast_mode.cpp cached_cast).
    """
    if not y.choices.autocast or y.work.phase != "train":
        return ops
    return tuple(one for op in ops for one in (*_casts(y, op), op))


def _casts(y: Layout[X], op: Op[X]) -> tuple[Op[X], ...]:
    if not multiplies_weights(op):
        return ()
    compiled, layers = y.stack.checkpoint_prunes, len(op.modules) if op.apart else 1
    inputs = layers if not compiled and any(tensor.stream for tensor in op.reads) else 0
    # A tied head owns no weight, and casts the table; one tensor has the weights of all experts.
    weight = total((w.elements for w in op.weights), 0 * op.rows) if op.weights else op.columns * op.inner
    stream, cast = op.rows * op.inner, 4 + y.a
    ahead = cast * (inputs * stream + weight)
    back = cast * inputs * stream + y.a * 3 * max(inputs - 1, 0) * stream + cast * weight * trains(op)
    takes = op.takes or tuple(tensor.name for tensor in op.reads)
    return (
        memory_op(y, f"{op.name}.casts", op.region, (ahead, back), kernels=inputs + layers, role="steps",
                  takes=takes, makes=()),
    )  # fmt: skip
