"""The cross entropy: what a stack keeps and makes for every logit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.helpers import layout
from shardwise.models import Model
from shardwise.ops.head import local_vocab, loss
from shardwise.ops.layout import lay_out
from shardwise.plans import find_stack


@pytest.mark.parametrize(
    ("stack", "kernel", "bytes_per_logit"),
    [
        ("megatron", "", 6),
        ("megatron-2023", "", 10),
        ("megatron-scores", "", 6),
        ("megatron", "vocab-parallel-compiled", 10),
        ("megatron", "fused", 4),
        ("transformers", "", 12),
    ],
)
def test_a_logit_takes_the_bytes_of_its_kernel(stack: str, kernel: str, bytes_per_logit: int) -> None:
    """Megatron holds 6 bytes a logit where the maximum is subtracted in place, 10 where it or fusion makes a copy."""
    model, found = Model.load("gpt2"), find_stack(stack)
    base = layout({"B": 1}, stack)
    y = lay_out(base.degrees, base.work, replace(base.choices, stack=replace(found, loss=kernel or found.loss)))
    (op,) = loss(y, model)
    held = sum(tensor.size_bytes for tensor in op.saves) + op.transient_bytes
    assert held == bytes_per_logit * 64 * local_vocab(y, model)


def test_a_loss_in_its_logits_holds_them_and_the_gradient_behind_the_head() -> None:
    """Transformer Engine's cross entropy writes the gradient over the 16-bit logits."""
    model, base = Model.load("gpt2"), layout({"B": 1}, "megatron")
    found = replace(find_stack("megatron"), loss="vocab-parallel-in-place")
    y = lay_out(base.degrees, base.work, replace(base.choices, stack=found))
    (op,) = loss(y, model)
    assert op.saves[0].size_bytes == 2 * 64 * local_vocab(y, model)
    assert op.transient_bytes == 2 * 64 * model.hidden
