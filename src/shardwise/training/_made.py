"""What the operators of a pass make beside what is kept: outputs, and gradients that stand beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.ledger.flow import trains
from shardwise.ledger.number import X, divide, largest, maximum, minimum, total
from shardwise.ledger.op import Op


def _in_threes(ops: Sequence[Op[X]]) -> Iterator[tuple[X | float, ...]]:
    """Yield what each three in a row write: an operator of two inputs, as additions and gates are, stands beside both.

    Copies around messages have no output of their own; they are there wherever a degree is not known to be one.
    """
    made = [o.output_bytes for o in ops if type(o.output_bytes) is not int or o.output_bytes] or [0]
    return (tuple(made[i : i + 3]) for i in range(max(len(made) - 2, 1)))


def working_bytes(ops: Sequence[Op[X]], zero: X) -> X:
    """Return the bytes that a forward pass which keeps nothing holds at once in blocks of each of its parts.

    A mixer and a feed-forward make tensors of different widths, and blocks of one never serve the other. Both read the
    output of a norm, for which one block does.
    """
    norms: list[X] = [zero + o.output_bytes for o in ops if o.region == o.name and o.role == "norm"]
    parts: dict[str, list[Op[X]]] = {}
    for o in ops:
        if not (o.region == o.name and o.role == "norm"):
            parts.setdefault(o.region.split(".")[0], []).append(o)
    made = [largest([zero + total(some) for some in _in_threes(part)]) for part in parts.values()]
    return total(made, largest([zero, *norms]))


def widest_bytes(ops: Sequence[Op[X]], zero: X) -> X:
    """Return the bytes of the widest tensor of a dense feed-forward: gate and up are two where they run apart."""
    own = [o for o in ops if o.region.split(".")[0] == "mlp"]
    tensors = [maximum(minimum(zero + o.kernels, len(o.modules)), 1.0) for o in own]
    return largest([zero, *(divide(zero + o.output_bytes, n) for o, n in zip(own, tensors, strict=True))])


def gradients_beside(ops: Sequence[Op[X]], zero: X) -> X:
    """Return the bytes of gradients at once between an activation in steps and a frozen GEMM, 0 without one.

    The gradient of the output is read until those of gate and up are there. A GEMM behind it that trains, or has an
    adapter, keeps that output or a copy, which is freed by then and makes up for the first of the three. Followed
    through whole steps of peft 0.21.2 on torch 2.13.0 and transformers 5.24.0.
    """
    before = [op for i, op in enumerate(ops) if op.role == "activation" and op.kernels > 1 and _is_frozen(ops[i + 1 :])]
    return largest([zero, *(zero + op.output_bytes + total((t.size_bytes for t in op.reads), zero) for op in before)])


def _is_frozen(behind: Sequence[Op[X]]) -> bool:
    """Whether a GEMM of every token comes first, of weights as they multiply, and nothing of its region trains."""
    if not behind or behind[0].kind != "matmul" or any(w.packed for w in behind[0].weights):
        return False
    return not any(trains(op) for op in behind if op.region == behind[0].region)


def late_bytes(ops: Sequence[Op[X]], zero: X) -> Iterator[X]:
    """Yield the bytes that an operator holds at once beyond those that the ones behind it have freed by then."""
    for i, op in enumerate(ops):
        if type(op.late_bytes) is not int or op.late_bytes:
            before = {tensor.name for earlier in ops[:i] for tensor in earlier.saves}
            behind = {t.name: t.size_bytes for later in ops[i:] for t in later.saves if t.name not in before}
            yield maximum(zero + op.late_bytes - total(behind.values(), zero), zero)
