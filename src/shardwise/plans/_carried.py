"""What a file sets of its framework, under another framework that runs the same layers."""

from __future__ import annotations

from shardwise.plans._settings import WHOLE_LOSSES
from shardwise.plans._stack import Stack, find_stack, stack_table
from shardwise.records import replace

# Fields that settings of trainers around transformers change: Liger's layers, attention, checkpoints.
_CARRIED = (
    "norm", "activation", "attention", "attention_kernel", "leaves_groups", "calls_sdpa", "checkpoint_reenters",
)  # fmt: skip
_LAYERS = "transformers"


def carried(stack: Stack, own: Stack, tunes: bool = True) -> Stack:
    """Return a framework with what a file sets of its `own` one, all where they are one, else of the same layers.

    Liger's loss comes with its layers where the other has no loss of its own that holds no logits, and `tunes` is
    whether the job is supervised fine-tuning, which alone has it.

    >>> own = replace(find_stack("trl"), attention="eager", norm="fused", activation="fused")
    >>> [carried(find_stack(name), own).attention for name in ("trl", "trl-2025", "megatron")]
    ['eager', 'eager', 'flash']
    >>> carried(find_stack("trl-2025"), own).settings.loss
    'fused-linear'
    """
    if stack.name == own.name:
        return own
    if not (_runs_layers(stack.name) and _runs_layers(own.name)):
        return stack
    usual = find_stack(own.name)
    changes = {name: getattr(own, name) for name in _CARRIED if getattr(own, name) != getattr(usual, name)}
    settings = own.settings
    liger = changes.get("norm") == "fused" and own.loss in WHOLE_LOSSES and stack.loss not in WHOLE_LOSSES
    if liger and tunes and not settings.loss:
        settings = replace(settings, loss="fused-linear")
    return replace(stack, settings=settings, **changes)


def _runs_layers(name: str) -> bool:
    """Return whether a framework extends the one around transformers' own layers."""
    while name != _LAYERS and "extends" in stack_table()[name]:
        name = stack_table()[name]["extends"]
    return name == _LAYERS
