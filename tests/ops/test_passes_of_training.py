"""What kernels of training move beside products: clamps of gpt-oss, keys and values of latents, chunks of scans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cost._tiles import kind_of
from shardwise.ledger.op import Op
from shardwise.models import load_model
from shardwise.ops.block import block_ops
from shardwise.ops.count import whole_layout
from shardwise.ops.layout import Layout


def layout(stack: str = "megatron-bridge", tokens: int = 4096, phase: Any = "train") -> Layout[float]:
    """Return a layer whole on one device under a stack."""
    y = whole_layout(1, tokens, stack=stack)
    return replace(y, work=replace(y.work, phase=phase))


def named(model: str, name: str, y: Layout[float]) -> list[Op[float]]:
    """Return the operators of a name in the first layer of a model that has one."""
    m = load_model(model)
    found = ([op for op in block_ops(y, block, m.hidden) if op.name == name] for block in m.layers)
    return next((ops for ops in found if ops), [])


def test_gpt_oss_clamps_gate_and_up_in_kernels_of_their_own() -> None:
    """Eight widths of the experts a row forward, ten backward, and the joined copy is kept until then."""
    (op,) = named("gpt-oss-120b", "mlp.experts.clamps", layout())
    rows = 4096 * 4
    assert op.forward_bytes == 2 * 8 * rows * 2880
    assert op.backward_bytes == 2 * 10 * rows * 2880
    assert [t.size_bytes for t in op.saves] == [2 * 2 * rows * 2880]


@pytest.mark.parametrize(
    ("model", "stack", "phase"),
    [
        ("qwen3-30b-a3b", "megatron-bridge", "train"),
        ("gpt-oss-120b", "megatron-bridge-2606", "train"),
        ("gpt-oss-120b", "transformers", "train"),
        ("gpt-oss-120b", "megatron-bridge", "prefill"),
        ("gpt-oss-120b", "automodel", "train"),
    ],
)
def test_nothing_is_clamped_elsewhere(model: str, stack: str, phase: str) -> None:
    """Other models, the kernel of all experts, other frameworks and engines have no such kernels."""
    assert not named(model, "mlp.experts.clamps", layout(stack, phase=phase))


def test_biases_of_both_products_are_added_expert_by_expert_in_automodel() -> None:
    """Beside those of the second, as in Megatron-LM, four widths of gate and up forward and one backward."""
    (ours,), (theirs,) = (named("gpt-oss-120b", "mlp.experts.bias", layout(s)) for s in ("automodel", "megatron"))
    first = 2 * 2 * 2880 * 4096 * 4
    more = ours.forward_bytes - theirs.forward_bytes, ours.backward_bytes - theirs.backward_bytes
    assert more == (4 * first, first)


@pytest.mark.parametrize(
    ("stack", "phase", "passes"),
    [
        ("fsdp2", "train", (6, 3)),
        ("fsdp2-compiled", "train", (4, 3)),
        ("fsdp2", "prefill", (0, 0)),
        ("composer", "train", (0, 0)),
        ("fms-fsdp", "train", (0, 0)),
        ("fms-fsdp-eager", "train", (6, 3)),
        ("litgpt", "train", (0, 3)),
        ("megatron", "train", (0, 0)),
    ],
)
def test_projections_of_one_input_run_apart_where_they_are_linears_of_their_own(
    stack: str, phase: str, passes: tuple[int, int]
) -> None:
    """Input gradients of q, k, v and of gate and up are added by autograd two at a time, compiled all at once."""
    y = layout(stack, phase=phase)
    assert tuple(op.apart for name in ("qkv", "mlp.up") for op in named("llama-3.1-8b", name, y)) == passes


def test_norms_of_widened_rows_move_a_cast_beside_them() -> None:
    """InternEvo's norms move 12 bytes an element forward and 22 back where fused ones of 16 bits move 4 and 6."""
    (fused,) = named("llama-2-7b", "norm1", layout("megatron"))
    (wide,) = named("llama-2-7b", "norm1", layout("internevo"))
    assert (wide.forward_bytes, wide.backward_bytes) == (3 * fused.forward_bytes, 22 / 6 * fused.backward_bytes)
    assert [t.size_bytes for t in wide.saves] == [t.size_bytes for t in fused.saves]


@pytest.mark.parametrize(
    ("stack", "moved"), [("torchtune", (48, 100)), ("torchtune-compiled", (4, 4)), ("fsdp2", (20, 20))]
)
def test_rotary_of_torchtune_runs_in_fp32_kernel_by_kernel(stack: str, moved: tuple[int, int]) -> None:
    """Bytes an element: casts, products of halves, stacks, and backward the zeros of four selects and their sums."""
    (op,) = named("llama-2-7b", "rotary", layout(stack))
    assert (op.forward_bytes, op.backward_bytes) == tuple(4096 * 2 * 4096 * one for one in moved)


def test_parts_of_latents_are_joined_in_steps_without_fusion() -> None:
    """Megatron-LM's own path moves more than twice what one kernel does, backward more than forward."""
    (fused,) = named("deepseek-v3", "keys and values", layout())
    (steps,) = named("deepseek-v3", "parts.joined", layout("megatron"))
    assert steps.backward_bytes > steps.forward_bytes > 2 * fused.forward_bytes
    assert not named("deepseek-v3", "parts.joined", layout("megatron", phase="prefill"))


def test_keys_and_values_of_latents_are_written_apart() -> None:
    """The up-projection is read, keys with their rotary part and values are written: 576 elements a head."""
    (op,) = named("deepseek-v3", "keys and values", layout())
    assert op.forward_bytes == op.backward_bytes == 2 * 4096 * 128 * (2 * 256 + 64)
    assert not named("deepseek-v3", "keys and values", layout(phase="prefill"))


@pytest.mark.parametrize("model", ["nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b"])
def test_scans_of_training_hand_chunks_on_through_memory(model: str) -> None:
    """Chunked kernels move several times what goes in and out, backward more than twice as much as forward."""
    (op,) = named(model, "scan", layout())
    assert op.forward_bytes > 2 * (2 * op.output_bytes)
    assert op.backward_bytes > 2 * op.forward_bytes


def test_states_of_a_scan_cost_less_in_longer_chunks() -> None:
    """A short sequence is one chunk: its states are as many as its tokens are few."""
    short, long = (named("nemotron-3-nano-30b-a3b", "scan", layout(tokens=n))[0] for n in (64, 4096))
    assert short.forward_bytes / 64 > long.forward_bytes / 4096


@pytest.mark.parametrize(
    ("model", "stack", "moved", "kept"),
    [
        ("llama-3.2-3b", "torchtune", 2 * 4096 * 32 * 256, 2 * 4096 * 128 * (3 * 24)),
        ("llama-3.2-3b", "torchtune-compiled", 0, 2 * 4096 * 128 * (24 + 2 * 8)),
        ("llama-3.2-3b", "pytorch", 0, 2 * 4096 * 128 * (24 + 2 * 8)),
        ("llama-2-7b", "torchtune", 0, 2 * 4096 * 128 * (3 * 32)),
    ],
)
def test_repeated_keys_and_values_are_copies_that_the_kernel_keeps(
    model: str, stack: str, moved: int, kept: int
) -> None:
    """Torchtune expands 8 heads to 24 before attention, as torchtitan; a compiled layer does so anew in backward."""
    y = layout(stack)
    (core,) = named(model, "attention", y)
    assert sum(op.forward_bytes for op in named(model, "repeat", y)) == moved
    assert sum(t.size_bytes for t in core.saves if t.name.split(".")[1] not in ("out", "logsumexp")) == kept


def test_rows_that_torchtitan_brings_to_experts_by_index_are_read_and_written_step_by_step() -> None:
    """Operators of its MoE.forward and their gradients, recorded with torch 2.14.1: 12, 30, 50 and 6 bytes a value.

    The gradient of an index takes the time of 22 bytes more (B200); nothing of it is compiled. 20 and 36 of the 30 and
    50 are of casts and of products with a weight a row, which run at the rate of such kernels.
    """
    model, one = load_model("deepseek-v2-lite"), layout("fsdp2-compiled-loss")
    y = replace(one, choices=replace(one.choices, stack=replace(one.choices.stack, experts="indexed")))
    block = model.layers[-1]
    found, plain = ({op.name: op for op in block_ops(at, block, model.hidden)} for at in (y, one))
    values = 4096 * 6 * 2048
    steps = [found[name] for name in ("mlp.dispatch", "mlp.weighted", "mlp.combine")]
    assert [(op.forward_bytes / values, op.backward_bytes / values) for op in steps] == [(12, 28), (20, 36), (10, 14)]
    assert [kind_of(op) for op in steps] == ["permute", "eager", "permute"]
    # The gradient of a weight needs its row as the product read it: in fp32, 4 bytes a value, where it was cast for it.
    for at, size in ((found, 4), (plain, 2)):
        assert [t.size_bytes / values for t in at["mlp.combine"].saves if "unscaled" in t.name] == [size]
    assert "mlp.weighted" not in plain
    assert [plain[name].forward_bytes / values for name in ("mlp.dispatch", "mlp.combine")] == [8, 8]
