"""A block as a list of operators: the ledger of one layer on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.ledger.number import X
from shardwise.ledger.op import Op, Tensor
from shardwise.models import Attention, Block, LatentAttention, Mixer, MoE
from shardwise.ops.attention import attention
from shardwise.ops.elementwise import norm, residual_add
from shardwise.ops.feed_forward import mlp, moe
from shardwise.ops.latent import latent_attention
from shardwise.ops.layout import Layout, Shape

_MIXERS: dict[type, Callable[..., tuple[Op[Any], ...]]] = {Attention: attention, LatentAttention: latent_attention}


def mixer(y: Layout[X], m: Mixer, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of one mixer."""
    return _MIXERS[type(m)](y, m, D, source)


def block_ops(y: Layout[X], block: Block, D: int) -> tuple[Op[X], ...]:
    """Return the ledger of one block: norm, mixers, addition, norm, feed-forward, addition.

    Pre-norm blocks norm the input of each branch; models with four norms norm the branch's output too. A parallel block adds
    both branches to one input. Regions are "norm1", "attention", "norm2", "mlp".
    """
    entry = y.residual("input", D, "")
    pre = min(block.norms, 2)
    normed = y.residual("norm1.output", D, "norm1") if pre else entry
    ops: list[Op[X]] = []
    if pre:
        ops.append(norm(y, "norm1", D, block.norm, entry))
    for one in block.mixers:
        ops += mixer(y, one, D, normed)
    if block.norms > 3:
        ops.append(norm(y, "post_norm1", D, block.norm, y.residual("mixer.output", D, "attention"), "attention"))
    for extra in block.extras:
        zero = 0 * y.tokens
        shape = Shape(inputs=zero + extra.inputs, outputs=zero + extra.outputs, whole_inputs=extra.inputs, whole_outputs=extra.outputs, bias=extra.bias)
        ops.append(y.whole(extra.name, "attention", shape, Tensor(name=f"{extra.name}.input", size_bytes=y.a * y.residual_tokens * extra.inputs, born="attention")))
    middle = entry
    if block.mixers and not block.parallel:
        ops.append(residual_add(y, "add1", D, "attention"))
        middle = y.residual("middle", D, "attention")
    if block.feed_forward is not None:
        ops += _feed_forward(y, block, D, middle, normed)
    for other in block.also:
        ops += block_ops(y, other, D)
    return tuple(ops)


def _feed_forward(y: Layout[X], block: Block, D: int, middle: Tensor[X], normed: Tensor[X]) -> list[Op[X]]:
    ops: list[Op[X]] = []
    source = normed
    own_norm = block.norms > 1 and bool(block.mixers)
    if own_norm:
        ops.append(norm(y, "norm2", D, block.norm, middle))
        source = y.residual("norm2.output", D, "norm2")
    m = block.feed_forward
    ops += moe(y, m, D, source) if isinstance(m, MoE) else mlp(y, m, D, source)  # type: ignore[arg-type]
    if block.norms > 3:
        ops.append(norm(y, "post_norm2", D, block.norm, y.residual("mlp.output", D, "mlp"), "mlp"))
    ops.append(residual_add(y, "add2", D, "mlp"))
    return ops
