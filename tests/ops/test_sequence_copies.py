"""The copies around messages of a sequence that tensor-parallel ranks split, as PyTorch's functional collectives do."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.ledger.saved import POLICIES, Checkpoint, recomputed_shares
from shardwise.models import load_model
from shardwise.ops.block import block_ops
from shardwise.ops.head import embedding, head
from shardwise.ops.sequence_copies import with_sequence_copies
from tests.ops.helpers import layout

MODEL = load_model("llama-3.1-8b")
FULL = 2 * 64 * MODEL.hidden  # Bytes of one sequence of 64 tokens in 16 bits.


def copies(stack: str, sequences: int = 2, **more: Any) -> dict[str, tuple[float, float]]:
    """Return what is copied forward and backward around each operator of a layer, in whole tensors moved."""
    y = layout({"B": sequences}, stack, **{"tp": 4, "sequence_parallel": True, **more})
    ops = block_ops(y, MODEL.layers[0], MODEL.hidden)
    found = with_sequence_copies(y, ops, compiled=y.stack.activation == "fused")
    whole = FULL * sequences
    return {op.name: (op.forward_bytes / whole, op.backward_bytes / whole) for op in found if op not in ops}


@pytest.mark.parametrize("stack", ["fsdp2", "fsdp2-2024", "torchtitan-2026", "pytorch"])
def test_gathers_and_scatters_of_several_sequences_are_copied(stack: str) -> None:
    """Recorded with torch 2.13.0: aten.cat of whole tensors twice forward and twice backward in a feed-forward."""
    assert copies(stack) == {
        "qkv.chunks ahead": (2, 2),
        "out.chunks behind": (2, 2),
        "mlp.up.chunks ahead": (2, 2),
        "mlp.down.chunks behind": (2, 2),
    }


def test_inductor_adds_gradients_up_in_the_layout_that_is_scattered() -> None:
    """cpp_fused_add_cat_split of torch 2.13.0: the sum of input gradients is copied by the kernel that makes it."""
    found = copies("torchtitan-2026-compiled")
    assert found["mlp.up.chunks ahead"] == found["qkv.chunks ahead"] == (2, 0)
    assert found["out.chunks behind"] == found["mlp.down.chunks behind"] == (2, 2)


@pytest.mark.parametrize(("stack", "gathered"), [("torchtitan-2026", 0), ("fsdp2-2024", 2)])
def test_one_gathered_sequence_is_a_view_since_pytorch_2_11(stack: str, gathered: int) -> None:
    """Of a batch of one what is gathered lies in order; what is scattered is laid out by torch.cat all the same."""
    found = copies(stack, sequences=1)
    assert found["mlp.up.chunks ahead"] == (gathered, 2)
    assert found["mlp.down.chunks behind"] == (2, gathered)


@pytest.mark.parametrize(
    ("stack", "more"),
    [
        ("megatron", {}),  # Its sequence is the first dimension.
        ("torchtitan-2026-async-tp", {}),  # By panels, into their places.
        ("fsdp2", {"sequence_parallel": False}),
    ],
)
def test_other_messages_are_copied_nowhere(stack: str, more: dict[str, Any]) -> None:
    """All-reduces, sequences in front and panels need no copies."""
    assert copies(stack, **more) == {}


@pytest.mark.parametrize(("compiled", "again"), [(False, 1.0), (True, 0.0)])
def test_sums_that_a_policy_keeps_are_laid_out_once_where_compiled(compiled: bool, again: float) -> None:
    """Torchtitan keeps what reduce-scatters give: eager checkpoints call torch.cat before it all the same."""
    y = layout(None, "fsdp2", tp=4, sequence_parallel=True)
    ops = with_sequence_copies(y, block_ops(y, MODEL.layers[0], MODEL.hidden), compiled=compiled)
    unit = Checkpoint(("norm1", "attention", "norm2", "mlp"), policy=POLICIES["second-matmuls"], prunes=compiled)
    shares = recomputed_shares(ops, (unit,))
    found = {op.name: shares[id(op)] for op in ops if ".chunks" in op.name}
    assert found["mlp.up.chunks ahead"] == found["qkv.chunks ahead"] == 1
    assert found["out.chunks behind"] == found["mlp.down.chunks behind"] == again


def test_tables_and_heads_are_copied_too() -> None:
    """The embedding scatters what it sums, the head gathers its input."""
    y = layout(None, "fsdp2", tp=4, sequence_parallel=True)
    first, last = (with_sequence_copies(y, ops, compiled=False) for ops in (embedding(y, MODEL), head(y, MODEL)))
    assert [op.forward_bytes for op in first if op.name.endswith("behind")] == [2 * 2 * FULL]
    assert [op.backward_bytes for op in last if op.name.endswith("ahead")] == [2 * 2 * FULL]
