"""The ledgers of a model in one place: what composition folds."""

from __future__ import annotations

from dataclasses import replace

from shardwise.ledger.number import X
from shardwise.ledger.op import Op
from shardwise.models import Model
from shardwise.ops.block import block_ops
from shardwise.ops.head import embedding, final_norm, head, loss, mtp_ops
from shardwise.ops.layout import Layout, memory_op


def nothing(y: Layout[X]) -> tuple[Op[X], ...]:
    """Return a ledger line that costs nothing, for models without an embedding or a head."""
    zero = 0 * y.tokens
    return (memory_op(y, "none", "none", (zero, zero), kernels=0),)


def shared_head(y: Layout[X], model: Model) -> tuple[Op[X], ...]:
    """Return the output head run again for another predicted token: the work without the weights."""
    return tuple(replace(op, weights=()) for op in head(y, model))


__all__ = ["block_ops", "embedding", "final_norm", "head", "loss", "mtp_ops", "nothing", "shared_head"]
