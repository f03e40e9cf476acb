"""Tensors beside weights that modules hold for the whole run: the gathered sequence, and tables of positions."""

from __future__ import annotations

import re

from shardwise.ledger.number import X, above
from shardwise.ops.layout import Layout
from shardwise.training._case import TrainingCase


def gather_buffer(case: TrainingCase, y: Layout[X]) -> X:
    """Return the bytes of the buffer into which the split sequence is gathered for the head, kept for the whole run.

    Megatron-LM core/tensor_parallel/layers.py, get_global_memory_buffer "mpu"; Transformer Engine has none.
    """
    zero = 0 * y.tokens
    if not (case.stack.keeps_gathered and case.plan.sequence_parallel and case.model.head):
        return zero
    return above(y.degrees.tp, 1, y.a * y.tokens * case.model.hidden, zero)


def rotary_buffers(case: TrainingCase, y: Layout[X]) -> tuple[X, ...]:
    """Return the bytes of cosines and sines of all positions that a layer holds, one entry a kind of layer.

    Buffers of each layer's attention, as long as the context of the checkpoint, in the type that weights are loaded in,
    16 bits by bitsandbytes: github.com/huggingface/transformers v4.39.3 models/mistral/modeling_mistral.py
    MistralRotaryEmbedding, register_buffer("cos_cached").
    """
    zero, model, base = 0 * y.tokens, case.model, case.tuning.base if case.tuning else None
    if not re.fullmatch(case.stack.rotary_families, model.family):
        return tuple(zero for _ in case.kinds)
    rows = model.stated_context or model.max_context
    width = case.recipe.precision.weight_bytes if base is None else 2 if base.narrow else base.bits / 8
    rotated = (sum(mixer.rotated for mixer in kind.block.mixers) for kind in case.kinds)
    return tuple(zero + 2 * width * rows * one for one in rotated)
