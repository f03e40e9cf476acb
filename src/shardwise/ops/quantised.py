"""What a feed-forward keeps in fewer bits: a copy of each chosen tensor, made forward and widened again backward.

Letters: a bytes of an activation. Source: ActNN, arXiv:2104.14129, per tensor; scales are not counted.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.ledger.number import X, total
from shardwise.ledger.op import Op, Tensor
from shardwise.ops.layout import Layout, memory_op


def bits_of(y: Layout[X], op: Op[X], tensor: Tensor[X]) -> int:
    """Return the bits in which a tensor that a feed-forward's operator keeps is kept, 0 as it is.

    The input of the first product, of the activation, or of the last product; what routing keeps stays as it is.
    """
    s = y.stack.settings
    if tensor.product:
        return s.mlp_product_bits
    return {"activation": s.activation_input_bits, "up": s.mlp_input_bits}.get(op.role, 0)


def quantised(y: Layout[X], ops: tuple[Op[X], ...], source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of a feed-forward that keep narrow copies, after one that makes them.

    Each copy reads the tensor and writes its bits forward, reads them and writes the tensor backward.
    """
    copies: dict[str, Tensor[X]] = {}
    moved: list[X] = []
    found = []
    for op in ops:
        saves, reads = [], {t.name: t for t in op.reads}
        for tensor in op.saves:
            bits = bits_of(y, op, tensor)
            name = f"{tensor.name}, {bits} bits"
            if not bits:
                saves.append(tensor)
                continue
            born = "mlp" if tensor.name == source.name else tensor.born
            narrow = Tensor(name=name, size_bytes=tensor.size_bytes * (bits / (8 * y.a)), born=born)
            if name not in copies:
                moved.append(tensor.size_bytes + narrow.size_bytes)
            copies[name] = narrow
            saves.append(narrow)
            # An operator that is recomputed reads the copy, where what makes the tensor is not recomputed with it.
            if tensor.name in reads and tensor.name != source.name:
                reads[tensor.name] = narrow
        found.append(replace(op, saves=tuple(saves), reads=tuple(reads.values())))
    if not copies:
        return ops
    both = total(moved)
    return (*found, memory_op(y, "mlp.quantise", "mlp", (both, both), kernels=len(copies)))
