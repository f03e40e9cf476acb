"""Liger's kernels, which trainers switch on together."""

from __future__ import annotations

from shardwise.plans._stack import Stack
from shardwise.records import replace


def fused_layers(stack: Stack) -> Stack:
    """Return a stack whose norms, activations and rotary embeddings are one kernel each, as Liger's are.

    liger-kernel 0.8.5 ops/rms_norm.py keeps the input and its deviation, ops/swiglu.py gate and up alone.
    """
    return replace(stack, norm="fused", activation="fused")


def with_loss_layers(stack: Stack) -> Stack:
    """Return a stack as it runs: with the layers that its loss brings.

    >>> from shardwise.plans import Settings, find_stack
    >>> stack = replace(find_stack("llama-factory"), settings=Settings(loss="fused-linear"))
    >>> stack.norm, with_loss_layers(stack).norm
    ('eager', 'fused')
    """
    return fused_layers(stack) if stack.loss_brings_layers and stack.settings.loss == "fused-linear" else stack
