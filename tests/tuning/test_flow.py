"""Which gradients a layer needs, and so what it keeps: against hooks on the saved tensors of PyTorch, and laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.helpers import layout
from shardwise.ledger.flow import flow, gradient_passes
from shardwise.ledger.op import Op
from shardwise.ledger.saved import keep, tensor_bytes
from shardwise.models import Model
from shardwise.ops.block import block_ops
from tuning.helpers import case_of, golden

STACKS = ("transformers", "transformers-eager", "megatron", "fsdp2", "megatron-scores")
MODELS = ("llama-3.1-8b", "gpt2", "gemma-2-9b", "qwen3-30b-a3b", "deepseek-v2-lite", "mamba-130m", "falcon-h1-0.5b")
PLAIN = [
    run
    for run in golden("activations")["runs"]
    if run["tune"] in ("full", "frozen") and not run["autocast"] and not run["checkpoint"]
]


def frozen(ops: tuple[Op[Any], ...], *but: str) -> tuple[Op[Any], ...]:
    """Operators whose weights do not train, but for those of some."""
    return tuple(
        op if op.name in but else replace(op, weights=tuple(replace(w, trainable=False) for w in op.weights))
        for op in ops
    )


def ops_of(name: str, stack: str, **more: Any) -> tuple[Op[Any], ...]:
    """The operators of a model's last layer."""
    model = Model.load(name)
    return block_ops(layout(stack=stack, **more), model.layers[-1], model.hidden)


@pytest.mark.parametrize("run", PLAIN, ids=lambda run: f"{run['model']}-{run['tune']}")
def test_a_layer_keeps_what_its_gradients_read(run: dict[str, Any]) -> None:
    """Trained whole or frozen, a layer whose input needs a gradient keeps exactly the storages that autograd keeps."""
    model, y = case_of(run)
    ops = block_ops(y, model.layers[1], model.hidden)
    asked = flow(frozen(ops) if run["tune"] == "frozen" else ops)
    assert tensor_bytes(keep(asked.ops).kept) == run["layer_bytes"]


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", MODELS)
def test_training_everything_needs_everything(name: str, stack: str) -> None:
    """Where all weights train the flow of gradients drops no tensor, no pass and no message."""
    ops = ops_of(name, stack)
    asked = flow(ops)
    assert asked.output
    assert {t.name for t in keep(asked.ops).kept} == {t.name for t in keep(ops).kept}
    assert all(op.without == () for op in asked.ops)
    assert [op.backward for op in asked.ops] == [op.backward for op in ops]


@pytest.mark.parametrize("name", MODELS)
def test_nothing_that_trains_needs_nothing(name: str) -> None:
    """A frozen layer behind an input without a gradient keeps nothing, runs no backward pass and sends nothing."""
    asked = flow(frozen(ops_of(name, "megatron", tp=2)), entry=False)
    assert not asked.output
    assert keep(asked.ops).kept == ()
    assert all(gradient_passes(op) == 0 and not op.backward for op in asked.ops)
    assert sum(op.backward_flops + op.weight_flops for op in asked.ops) == 0


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b"])
def test_frozen_weights_cost_half_of_backward(name: str) -> None:
    """A frozen product has the gradient of its input alone; attention has both of its operands'."""
    whole, asked = ops_of(name, "megatron"), flow(frozen(ops_of(name, "megatron"))).ops
    for before, after in zip(whole, asked, strict=True):
        assert after.weight_flops == 0
        assert after.backward_flops == before.backward_flops
        assert gradient_passes(after) == (1 if before.weights and before.kind == "matmul" else 2)


def test_the_first_layer_needs_gradients_from_what_trains_on() -> None:
    """Behind an input without a gradient only what follows the first weight that trains has one."""
    asked = flow(frozen(ops_of("llama-3.1-8b", "transformers"), "mlp.up"), entry=False)
    passes = {op.name: gradient_passes(op) for op in asked.ops}
    assert passes["qkv"] == passes["attention"] == passes["out"] == 0
    assert (passes["mlp.up"], passes["mlp.down"]) == (1, 1)
    assert {t.name for t in keep(asked.ops).kept} == {"norm2.output", "mlp.up", "mlp.activated"}


@given(st.data(), st.booleans())
def test_more_that_trains_never_needs_less(data: st.DataObject, entry: bool) -> None:
    """Training one operator more keeps no tensor less and computes no gradient less."""
    name = data.draw(st.sampled_from(MODELS))
    ops = ops_of(name, "transformers")
    some = data.draw(st.sets(st.sampled_from([op.name for op in ops])))
    more = data.draw(st.sampled_from([op.name for op in ops]))
    few, many = flow(frozen(ops, *some), entry), flow(frozen(ops, *some, more), entry)
    assert {t.name for t in keep(few.ops).kept} <= {t.name for t in keep(many.ops).kept}
    assert all(
        a.backward_flops <= b.backward_flops and a.weight_flops <= b.weight_flops
        for a, b in zip(few.ops, many.ops, strict=True)
    )
