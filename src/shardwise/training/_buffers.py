"""Tensors beside weights that modules hold for the whole run, and those of an answer that a loop holds.

The gathered sequence and tables of positions; keys and values that a pass gives out.
"""

from __future__ import annotations

import re

from shardwise.ledger.number import X, above, divide, total
from shardwise.ops.layout import Layout
from shardwise.ops.logit_losses import LOGIT_LOSSES
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


def returned_caches(case: TrainingCase, y: Layout[X]) -> tuple[X, ...]:
    """Return the bytes of keys and values that a layer of a training pass gives out, one entry a kind of layer.

    A layer that saves them for backward has them anyway; one that runs again does not.
    github.com/huggingface/transformers v4.33.3 models/llama/modeling_llama.py LlamaModel.forward: next_decoder_cache,
    use_cache unless its own gradient_checkpointing is on, so that checkpoints around its layers leave it on;
    github.com/meta-llama/llama-cookbook pull 165 (2023-09).
    """
    zero = 0 * y.tokens
    if case.stack.answer not in ("cache", "held"):
        return tuple(zero for _ in case.kinds)
    each = ([c for mixer in kind.block.mixers for c in mixer.caches()] for kind in case.kinds)
    return tuple(total((y.a * y.tokens * y.kv_heads(c.heads) * c.elements for c in some), zero) for some in each)


def answer_logits(case: TrainingCase, y: Layout[X], kept: X) -> X:
    """Return the bytes of the logits of an answer that a loop holds until the next; `kept` are those of the loss."""
    row = LOGIT_LOSSES.get(case.stack.loss_kernel) if case.stack.answer in ("logits", "held") else None
    return divide(row.answer * kept, row.kept or y.a) if row else 0 * kept
