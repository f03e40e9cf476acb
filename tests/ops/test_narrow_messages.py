"""Messages of tensor parallelism in fewer than 16 bits: exact bytes of a layer by recipe and framework."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.ledger.op import Collective
from shardwise.models import load_model
from shardwise.ops.block import block_ops
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import lay_out
from shardwise.plans import Settings, Training, find_stack, tuning_of
from tests.ops.helpers import ONE

T, D = 4096, 4096


def sent(dtype: str, recipe: str = "", stack: str = "megatron", **more: Any) -> list[Collective[Any]]:
    """Return what a layer of Llama-3.1-8B sends forward and backward for 4,096 tokens at tp 4."""
    facts = {name: more.pop(name) for name in ("overlap_tensor",) if name in more}
    framework = replace(find_stack(stack), settings=Settings(fp8_recipe=recipe), **facts)
    work: TokenBatch[Any] = TokenBatch(B=1, S=T, context=0, dtype=dtype)
    options = LayoutOptions(stack=framework, sequence_parallel=True, **more)
    model = load_model("llama-3.1-8b")
    ops = block_ops(lay_out(ParallelSizes(**ONE | {"tp": 4}), work, options), model.layers[0], model.hidden)
    return [c for op in ops for c in (*op.forward, *op.backward)]


def gathered(found: list[Collective[Any]], tensor: str) -> list[float]:
    """Return bytes an element of the tensor in each message that gathers it."""
    return [c.size_bytes * c.count / (T * D) for c in found if c.verb == "all_gather" and c.tensor == tensor]


# Type of products, recipe, framework, and bytes an element of an input and of the gradient of an output.
SENT = (
    ("bf16", "", "megatron", 2, 2),
    ("fp8", "delayed", "megatron", 1, 1),
    ("fp8", "tensorwise", "megatron", 1, 1),
    ("fp8", "blockwise", "megatron", 1 + 4 / 128, 2 * (1 + 4 / 128)),
    ("fp8", "mxfp8", "megatron", 1 + 1 / 32, 2 * (1 + 1 / 32)),
    ("fp4", "", "megatron", 0.5 + 1 / 16, 2 * (0.5 + 1 / 16)),
    ("fp8", "", "fsdp2", 1, 1),
    ("fp8", "rowwise", "fsdp2", 2, 2),
    ("fp8", "tensorwise", "fsdp2-compiled-loss", 1, 1),
    ("fp8", "", "torchtitan-2026", 2, 2),
    ("fp8", "", "accelerate", 2, 2),
    ("fp8", "mxfp8", "fsdp2", 2, 2),
    ("fp4", "", "fsdp2", 2, 2),
    ("fp8", "", "pytorch", 2, 2),
    ("fp8", "", "maxtext", 2, 2),
    ("fp8", "", "megatron-deepspeed", 2, 2),
)


@pytest.mark.parametrize(("dtype", "recipe", "stack", "width", "gradient"), SENT)
def test_ranks_gather_what_they_cast_of_inputs_and_gradients(
    dtype: str, recipe: str, stack: str, width: float, gradient: float
) -> None:
    """Inputs of qkv and of gate and up, twice where backward gathers them again, and gradients of out and of down."""
    found = sent(dtype, recipe, stack)
    times = 4 if find_stack(stack).regathers_inputs else 2
    assert gathered(found, "input") == [width] * times
    assert gathered(found, "output gradient") == [gradient] * 2
    scattered = [c.size_bytes * c.count / (T * D) for c in found if c.verb == "reduce_scatter"]
    assert scattered == [2] * 4


@pytest.mark.parametrize(
    ("dtype", "recipe", "parts"),
    [("bf16", "", 4), ("fp8", "delayed", 4), ("fp8", "mxfp8", 4), ("fp8", "blockwise", 1), ("fp4", "", 1)],
)
def test_user_buffers_take_no_blocks_and_no_nvfp4(dtype: str, recipe: str, parts: int) -> None:
    """What Transformer Engine's user buffers refuse goes as one message that waits."""
    found = [c for c in sent(dtype, recipe, overlap_tensor=True) if c.tensor in ("output", "output gradient")]
    assert {(c.hides, c.count) for c in found} == {("copied" if parts > 1 else "exposed", parts)}


@pytest.mark.parametrize(("overlap", "width"), [(False, 2), (True, 1)])
def test_inputs_that_adapters_take_are_gathered_as_they_are(overlap: bool, width: float) -> None:
    """The gathered output of a norm is returned to LoRA in 16 bits, but where user buffers gather it."""
    job = Training(seq_len=T, global_batch=1, precision="fp8", adapter="lora")
    tuning = tuning_of(job, find_stack("megatron"), "llama")
    found = sent("fp8", "delayed", overlap_tensor=overlap, tuning=tuning)
    assert gathered(found, "input")[0] == width
    assert gathered(found, "output gradient") == [1, 1]


def test_gradients_beside_frozen_weights_are_gathered_by_rows_alone() -> None:
    """Nothing multiplies their copy by columns where no weight has a gradient."""
    job = Training(seq_len=T, global_batch=1, precision="fp8", adapter="lora")
    found = sent("fp8", "mxfp8", tuning=tuning_of(job, find_stack("megatron"), "llama"))
    assert gathered(found, "output gradient") == [1 + 1 / 32] * 2
