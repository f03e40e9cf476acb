"""Which gradients a block needs, and so what it keeps, computes and sends in backward.

A tensor needs a gradient if what made it has a weight that trains or read a tensor that needs one (torch autograd,
requires_grad). Weights that are frozen have no gradient of their own; the input of an operator has one where it needs
one. Tensors that neither of the two reads are not kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from shardwise.ledger.number import X
from shardwise.ledger.op import Gradient, Op
from shardwise.records import dataclass, replace

ENTRY = "input"
"""The residual stream that enters a block."""


@dataclass(frozen=True, slots=True)
class GradientFlow(Generic[X]):
    """The operators of a block with what their gradients need, and whether the block's output needs a gradient."""

    ops: tuple[Op[X], ...]
    output: bool


def multiplies_weights(op: Op[X]) -> bool:
    """Return whether an operator is a GEMM with weights, its own or tied ones, and not of two activations."""
    return op.kind in ("matmul", "grouped") and not op.region.endswith("core")


def trains(op: Op[X]) -> bool:
    """Return whether an operator has a weight with a gradient; tied ones are those of another, and train with it."""
    if not op.weights:
        return multiplies_weights(op) and "weight" not in op.without
    return any(w.trainable for w in op.weights)


def flow(ops: Iterable[Op[X]], entry: bool = True) -> GradientFlow[X]:
    """Return operators without the gradients that nothing asks for; `entry` says whether the block's input needs one.

    An operator reads what it `takes`, else its `reads`, or whatever came before it where something else made those.
    What a GEMM keeps of its input, gathered or in another type, needs a gradient where its input does.
    """
    ops = tuple(ops)
    made, needs = {ENTRY}, {ENTRY} if entry else set[str]()
    asked: list[tuple[Op[X], bool, bool]] = []
    # Names that nothing here makes stand for whatever came before.
    for op in ops:
        own = op.makes if op.makes is not None else (op.name, f"{op.name}.output")
        named = next((some for some in (op.takes, [t.name for t in op.reads]) if some and made.issuperset(some)), needs)
        into, weight = not needs.isdisjoint(named), trains(op)
        made.update(own)
        if into or weight:
            needs.update(own)
        kept = {t.name for t in op.saves if t.read_for == "weight"} - made if multiplies_weights(op) else ()
        made.update(kept)
        if into:
            needs.update(kept)
        asked.append((op, into, weight))
    idle = not any(into or weight for _, into, weight in asked)
    unknown = {t.read_for for op in ops for t in op.saves} - made
    return GradientFlow(
        tuple(_narrowed(op, into, weight, needs | unknown, idle) for op, into, weight in asked), bool(needs)
    )


def _wanted(read_for: Gradient, into: bool, weight: bool, needs: set[str]) -> bool:
    """Return whether what is read for a gradient is read at all; other words are names of tensors that need one."""
    known = {"either": into or weight, "input": into, "weight": weight, "later": True}
    return known.get(read_for, into and read_for in needs)


def _narrowed(op: Op[X], into: bool, weight: bool, needs: set[str], idle: bool) -> Op[X]:
    """Return an operator with the gradients of its input and of its weights that are asked for; `idle` keeps nothing.

    Only GEMMs have a pass for each; what others do in backward is one.
    """
    both = (into, weight) if multiplies_weights(op) else (into or weight,) * 2
    gone: tuple[Gradient, ...] = tuple(
        name for name, asked in zip(("input", "weight"), both, strict=True) if not asked or name in op.without
    )
    saves = tuple(t for t in op.saves if _wanted(t.read_for, into, weight, needs))
    backward = tuple(c for c in op.backward if _wanted(c.read_for, into, weight, needs))
    if not (gone or idle) and len(saves) == len(op.saves) and len(backward) == len(op.backward):
        return op
    narrowed = replace(op, saves=saves, backward=backward, without=gone, reads=() if idle else op.reads)
    zero = 0 * op.forward_bytes
    if "input" in gone:
        narrowed = replace(narrowed, backward_flops=zero, backward_bytes=zero)
    if "weight" in gone:
        narrowed = replace(narrowed, weight_flops=zero, weight_bytes=zero, finish_bytes=0)
    return narrowed


def gradient_passes(op: Op[X]) -> int:
    """Return how often the model FLOPs of an operator count in backward: once for each operand with a gradient."""
    if multiplies_weights(op):
        return 2 - len(op.without)
    return 0 if "input" in op.without else 2
