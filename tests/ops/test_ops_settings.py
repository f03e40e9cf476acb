"""What settings of a framework make every model of the catalogue keep, under fused and unfused kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.ledger.saved import keep, tensor_bytes
from shardwise.models import Block, Model, load_model, model_names
from shardwise.ops.blocks import block_ops
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.plans import Settings, find_stack
from shardwise.training._blocks import checkpoints

STACKS = ("megatron", "megatron-scores", "transformers", "transformers-eager")
ONE: ParallelSizes[Any] = ParallelSizes(tp=1, tp2=1, cp=1, ep=1, etp=1, panels=1)


def layout(stack: str, **settings: Any) -> Layout[Any]:
    """Return two sequences of 128 tokens under a framework and some settings."""
    work: TokenBatch[Any] = TokenBatch(B=2, S=128, context=0, dropout=True)
    return lay_out(ONE, work, LayoutOptions(stack=replace(find_stack(stack), settings=Settings(**settings))))


def kept(y: Layout[Any], model: Model, block: Block) -> float:
    """Return what a block keeps, in bytes."""
    return float(tensor_bytes(keep(block_ops(y, block, model.hidden)).kept))


@pytest.mark.parametrize("name", model_names())
def test_bits_and_widths_order_what_is_kept(name: str) -> None:
    """Fewer bits never keep more, and a norm that keeps a wider input never less, in any layer under any kernels."""
    model = load_model(name)
    for stack in STACKS:
        sizes = [
            layout(stack, mlp_input_bits=4, activation_input_bits=4, mlp_product_bits=4),
            layout(stack, mlp_input_bits=8, activation_input_bits=8, mlp_product_bits=8),
            layout(stack),
            layout(stack, norm_bytes=4),
        ]
        for block in model.kinds:
            found = [kept(y, model, block) for y in sizes]
            assert found == sorted(found), (name, stack)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "mixtral-8x7b", "deepseek-v3"])
def test_the_product_alone_shrinks_to_its_bits(name: str, stack: str) -> None:
    """In 8 bits the input of every last product takes half of its 2 bytes, and nothing else changes."""
    model = load_model(name)
    plain, narrow = layout(stack), layout(stack, mlp_product_bits=8)
    for block in model.kinds:
        tensors = keep(block_ops(plain, block, model.hidden)).kept
        products = sum(t.size_bytes for t in tensors if t.name.endswith(".product"))
        assert products > 0
        assert kept(plain, model, block) - kept(narrow, model, block) == products / 2


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
def test_a_recomputed_activation_reads_the_narrow_copy(name: str) -> None:
    """Where the activation is recomputed from its input in 8 bits, that input is kept in 8 bits alone."""
    model = load_model(name)
    plain, narrow = layout("megatron"), layout("megatron", activation_input_bits=8)
    again = checkpoints("none", ("moe_act", "mlp_act"))
    for block in model.kinds:
        sizes = [float(tensor_bytes(keep(block_ops(y, block, model.hidden), again).kept)) for y in (plain, narrow)]
        tensors = keep(block_ops(plain, block, model.hidden)).kept
        assert sizes[0] - sizes[1] == sum(t.size_bytes for t in tensors if t.name.endswith(".up")) / 2
