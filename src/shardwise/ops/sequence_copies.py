"""The copies by which functional collectives of PyTorch gather and scatter a sequence that is no first dimension."""

from __future__ import annotations

from shardwise.ledger.number import X, above, total
from shardwise.ledger.op import Collective, Op
from shardwise.ops.layout import Layout, memory_op


def with_sequence_copies(y: Layout[X], ops: tuple[Op[X], ...], compiled: bool) -> tuple[Op[X], ...]:
    """Return operators with the copies around their messages of tensor parallelism, of a tensor read and written each.

    What is gathered lies rank by rank, and is put together sequence by sequence, a view of one sequence alone; what is
    scattered is first laid out rank by rank (torch/distributed/_functional_collectives.py all_gather_single and
    reduce_scatter_single, torch/_utils.py _maybe_view_chunk_cat and _chunk_or_narrow_cat). Inductor has both as kernels
    of their own, but for the gradients that it adds up into the same layout; what async TP sends by panels has none.
    """
    if y.stack.copies_chunks == "never" or not y.choices.sequence_parallel or y.work.phase != "train":
        return ops
    return tuple(one for op in ops for one in (*_ahead(y, op, compiled), op, *_behind(y, op, compiled)))


def _ahead(y: Layout[X], op: Op[X], compiled: bool) -> tuple[Op[X], ...]:
    """What is copied before an operator, and of its input gradient behind it: none where a fused sum makes that."""
    back = () if op.apart and compiled else _copied(y, op.backward, "reduce_scatter")
    return _copies(y, op, "ahead", (_copied(y, op.forward, "all_gather"), back), compiled)


def _behind(y: Layout[X], op: Op[X], compiled: bool) -> tuple[Op[X], ...]:
    """What is copied behind an operator, and of its output gradient before it."""
    moved = _copied(y, op.forward, "reduce_scatter"), _copied(y, op.backward, "all_gather")
    return _copies(y, op, "behind", moved, compiled)


def _copied(y: Layout[X], messages: tuple[Collective[X], ...], verb: str) -> tuple[X, ...]:
    """Return the bytes of the tensors that are copied around messages."""
    sizes = (0 * y.tokens + one.count * one.size_bytes for one in messages
             if (one.axis, one.verb) == ("tp", verb) and one.hides != "copied")  # fmt: skip
    several = verb == "all_gather" and y.stack.copies_chunks == "where several"
    return tuple(above(y.work.B, 1, size, 0 * size) if several else size for size in sizes)


def _copies(
    y: Layout[X], op: Op[X], name: str, copied: tuple[tuple[X, ...], tuple[X, ...]], compiled: bool
) -> tuple[Op[X], ...]:
    if not any(copied):
        return ()
    moved = 2 * total(copied[0], 0 * y.tokens), 2 * total(copied[1], 0 * y.tokens)
    takes, role = op.takes or tuple(tensor.name for tensor in op.reads), "other" if compiled else "steps"
    return (memory_op(y, f"{op.name}.chunks {name}", op.region, moved, role=role, takes=takes, makes=()),)
