"""The ledgers of a model in one place: what composition folds."""

from __future__ import annotations

from shardwise.ledger.number import X
from shardwise.ledger.op import Op, Tensor
from shardwise.models import Model
from shardwise.ops.attention import attention_masks
from shardwise.ops.block import block_ops
from shardwise.ops.head import embedding, final_norm, head, loss, mtp_ops
from shardwise.ops.layout import Layout, memory_op, widened
from shardwise.ops.logit_losses import LOGIT_LOSSES
from shardwise.records import replace


def nothing(y: Layout[X]) -> tuple[Op[X], ...]:
    """Return a ledger line that costs nothing, for models without an embedding or a head."""
    zero = 0 * y.tokens
    return (memory_op(y, "none", "none", (zero, zero), kernels=0),)


def shared_head(y: Layout[X], model: Model) -> tuple[Op[X], ...]:
    """Return the output head run again for another predicted token: the work without the weights.

    A loss that keeps the logits as the head made them has them among what it keeps.
    """
    ops = tuple(replace(op, weights=()) for op in head(y, model))
    row = LOGIT_LOSSES.get(y.stack.loss_kernel)
    return ops if row is None or row.kept else tuple(replace(op, output_bytes=0) for op in ops)


def predictions(y: Layout[X], model: Model) -> tuple[tuple[Op[X], ...], tuple[Op[X], ...]]:
    """Return (layers, heads and losses) of the model's multi-token predictions, which keep tensors of their own.

    Those that share weights are passes of one layer (Megatron-LM core/transformer/multi_token_prediction.py,
    mtp_use_repeated_layer).
    """
    y = widened(y) if y.stack.settings.bf16_mtp_layers else y
    layers: list[Op[X]] = []
    losses: list[Op[X]] = []
    for i, block in enumerate(model.mtp):
        ops = (*mtp_ops(y, model), *block_ops(y, block, model.hidden))
        if block.shared_weights in {one.shared_weights for one in model.mtp[:i]} - {""}:
            ops = tuple(replace(op, weights=()) for op in ops)
        layers += _apart(ops, f"mtp{i + 1}.")
        losses += _apart((*shared_head(y, model), *loss(y, model)), f"mtp{i + 1}.")
    return tuple(layers), tuple(losses)


def _apart(ops: tuple[Op[X], ...], prefix: str) -> list[Op[X]]:
    """Return operators whose tensors have names of their own."""

    def renamed(tensors: tuple[Tensor[X], ...]) -> tuple[Tensor[X], ...]:
        return tuple(replace(t, name=prefix + t.name) for t in tensors)

    return [replace(op, saves=renamed(op.saves), reads=renamed(op.reads)) for op in ops]


__all__ = [
    "attention_masks", "block_ops", "embedding", "final_norm", "head", "loss", "mtp_ops", "nothing", "predictions",
    "shared_head",
]  # fmt: skip
