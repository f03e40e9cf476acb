"""What settings of a framework make every model of the catalogue keep, under fused and unfused kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.hardware import Cluster
from shardwise.ledger.saved import keep, tensor_bytes
from shardwise.models import Block, Model, load_model, model_names
from shardwise.ops.block import block_ops
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.plans import Plan, Settings, Training, find_stack
from shardwise.training import TrainingOptions, train
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
            layout(stack, mlp_input_bits=4, activation_input_bits=4, mlp_down_input_bits=4),
            layout(stack, mlp_input_bits=8, activation_input_bits=8, mlp_down_input_bits=8),
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
    plain, narrow = layout(stack), layout(stack, mlp_down_input_bits=8)
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


def saved(dtype: str, recipe: str = "", **more: Any) -> float:
    """Return what a layer of Llama-3.1-8B keeps for a sequence of 4,096 tokens under Megatron-Core, in bytes."""
    model, stack = load_model("llama-3.1-8b"), replace(find_stack("megatron"), settings=Settings(fp8_recipe=recipe))
    work: TokenBatch[Any] = TokenBatch(B=1, S=4096, context=0, dtype=dtype)
    y = lay_out(replace(ONE, tp=more.get("tp", 1)), work, LayoutOptions(stack=stack, sequence_parallel="tp" in more))
    return kept(y, model, model.layers[0])


@pytest.mark.parametrize(
    ("dtype", "recipe", "width", "proj"),
    [("fp8", "delayed", 1, 1), ("fp8", "tensorwise", 1, 0), ("fp8", "blockwise", 1 + 4 / 128, 0),
     ("fp8", "mxfp8", 1 + 1 / 32, 0), ("fp4", "", 0.5 + 1 / 16, 0)],
)  # fmt: skip
def test_narrow_products_save_what_they_multiplied(dtype: str, recipe: str, width: float, proj: float) -> None:
    """Inputs of qkv, gate and up, and down are kept as their recipe scales them; that of out as attention keeps it."""
    T, D, F = 4096, 4096, 14336
    assert saved(dtype, recipe) - saved("bf16") == T * (2 * D + F) * (width - 2) + proj * T * D


def test_nvfp4_keeps_a_gathered_norm_twice() -> None:
    """Under sequence parallelism both copies of a norm's output in NVFP4 stay, by rows and by columns."""
    T, D, F = 4096, 4096, 14336
    assert saved("fp4", tp=2) - saved("bf16", tp=2) == T * D * (1.125 - 2) + T * F / 2 * (0.5625 - 2)


def test_a_recomputed_unit_makes_its_narrow_copies_again() -> None:
    """A layer that runs again keeps its input alone, a feed-forward that does its norm's output in 16 bits."""
    model, stack = load_model("llama-3.1-8b"), find_stack("megatron")
    sizes = {}
    for dtype in ("bf16", "fp8"):
        y = lay_out(ONE, TokenBatch(B=1, S=4096, context=0, dtype=dtype), LayoutOptions(stack=stack))
        ops = block_ops(y, model.layers[0], model.hidden)
        units = (checkpoints("full", ()), checkpoints("none", ("mlp",)), checkpoints("none", ("layernorm",)))
        sizes[dtype] = [float(tensor_bytes(keep(ops, unit).kept)) for unit in units]
    assert [b - a for a, b in zip(sizes["bf16"], sizes["fp8"], strict=True)] == [0, -4096 * 4096, -4096 * 14336]


@pytest.mark.parametrize(
    ("device", "recipe", "stored", "more"),
    [("h100", "tensorwise", False, 2), ("h100", "tensorwise", True, 0), ("b200", "tensorwise", False, 1),
     ("b200", "tensorwise", True, -1), ("b200", "mxfp8", False, 2.0625), ("h100", "blockwise", False, 2)],
)  # fmt: skip
def test_weights_of_narrow_products_have_copies(device: str, recipe: str, stored: bool, more: float) -> None:
    """A second, turned copy before Blackwell, one by rows and one by columns in blocks; none beside narrow weights."""
    model = load_model("llama-3.1-8b")
    stack = replace(find_stack("megatron"), settings=Settings(fp8_recipe=recipe, fp8_param_gather=stored))
    held = [
        train(model, Cluster.parse(f"8x{device}"), Plan(tp=8), Training(seq_len=4096, global_batch=1, precision=p),
              TrainingOptions(stack=stack)).memory.weights
        for p in ("bf16", "fp8")
    ]  # fmt: skip
    matrices = 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336) // 8
    assert held[1] - held[0] == more * matrices


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("device", "base", "width"),
    [("h100", "fp8", 1 + 4 / 16384), ("b200", "fp8", 1 + 4 / 16384), ("b200", "nvfp4", 2 * (0.5 + 1 / 16))],
)
def test_frozen_narrow_weights_have_no_copies(device: str, stored: bool, base: str, width: float) -> None:
    """Whatever settings say of weights that train; products of NVFP4 read a weight by rows and by columns apart."""
    model = load_model("llama-3.1-8b")
    stack = replace(find_stack("megatron"), settings=Settings(fp8_param_gather=stored))
    job = Training(seq_len=4096, global_batch=1, adapter="lora", base=base, precision={"nvfp4": "fp4"}.get(base, base))
    wide = replace(job, base="bf16", precision="bf16")
    options = TrainingOptions(stack=stack)
    held, plain = (train(model, Cluster.parse(f"1x{device}"), Plan(), j, options).memory.weights for j in (job, wide))
    assert plain - held == pytest.approx((2 - width) * 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336), rel=1e-6)


def test_frozen_weights_have_no_gradients_that_stand_in() -> None:
    """Under LoRA of q to o modules hold empty gradients of two pairs of thin weights alone."""
    stack, job = find_stack("megatron"), Training(seq_len=4096, global_batch=1, adapter="lora", rank=8)
    job = replace(job, targets=("q", "k", "v", "o"))
    report = train(load_model("llama-3.1-8b"), Cluster.parse("1xh100"), Plan(), job, TrainingOptions(stack=stack))
    thin = 8 * (4096 + (4096 + 2 * 1024)) + 8 * (4096 + 4096)
    (stage,) = report.evaluation.memory
    assert stage.framework == 2 * thin


@pytest.mark.parametrize(
    ("dtype", "recipe", "fused"),
    [("fp8", "delayed", True), ("fp8", "mxfp8", True), ("fp8", "tensorwise", False), ("fp4", "", False),
     ("bf16", "delayed", False)],
)  # fmt: skip
def test_a_fused_activation_makes_the_casts_of_the_products_beside_it(dtype: str, recipe: str, fused: bool) -> None:
    """Where scales are known ahead or are of a block: that of the last one forward, that of the first one backward."""
    stack = replace(find_stack("megatron"), fuses_operators=True, settings=Settings(fp8_recipe=recipe))
    work: TokenBatch[Any] = TokenBatch(B=1, S=128, context=0, dtype=dtype)
    model = load_model("llama-3.1-8b")
    ops = block_ops(lay_out(ONE, work, LayoutOptions(stack=stack)), model.layers[0], model.hidden)
    casts = {op.role: op.casts for op in ops if op.role in ("up", "down")}
    both = ("forward", "input")
    assert casts == {"up": both[:1] if fused else both, "down": both[1:] if fused else both}


def test_steps_without_casts_are_shorter_by_what_they_move() -> None:
    """14,336 values a token forward and twice as many backward, each read in 16 bits and written once in 8."""
    model, seconds = load_model("llama-3.1-8b"), []
    for fuses in (False, True):
        stack = replace(find_stack("megatron-bridge"), fuses_operators=fuses, settings=Settings(fp8_recipe="delayed"))
        job, options = Training(seq_len=4096, global_batch=1, precision="fp8"), TrainingOptions(stack=stack)
        seconds.append(train(model, Cluster.parse("1xb200"), Plan(), job, options))
    rate = seconds[0].evaluation.rates.memory_bytes
    assert seconds[0].step_seconds - seconds[1].step_seconds == pytest.approx(32 * 4096 * 3 * 14336 * 3 / rate)
